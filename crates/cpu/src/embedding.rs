//! Embedding: rows of a table, looked up by ids, and rows of positions.
//!
//! A table may be a part of a vocabulary: what is not there is zero, so that the parts of several devices add up
//! to the whole. In f32, rounded once.

use phalanx_simd::{Lanes, vectorized};
use phalanx_tensor::arguments::{Lookup, Positions};
use phalanx_tensor::{View, ViewMut};

use crate::elementwise::{add_piece, by_lanes, load, store};
use crate::float::{Float, by_float};
use crate::shards::Shards;
use crate::{Cpu, row_grain};

/// Bits of an id that hold the token; the one above holds the token type.
const TOKEN: u32 = 0x7fff_ffff;

/// The row of a table of `rows` rows that an id selects, if this table holds it.
pub(crate) fn row_of(id: u32, lookup: Lookup, rows: usize) -> Option<usize> {
    match lookup {
        Lookup::Token { first, vocab } => {
            let token = (id & TOKEN) as usize;
            assert!(token < vocab, "token {token} is outside the vocabulary of {vocab}");
            token.checked_sub(first).filter(|row| *row < rows)
        }
        Lookup::Type => {
            let row = (id >> 31) as usize;
            assert!(row < rows, "token type {row} is outside the table of {rows} rows");
            Some(row)
        }
    }
}

/// `y[i] (+)= table[lookup of ids[i]] (+ positions[(first_row + i) mod seq])`.
pub(crate) fn embedding(
    cpu: &Cpu,
    ids: View,
    lookup: Lookup,
    table: View,
    positions: Option<Positions>,
    accumulate: bool,
    y: ViewMut,
) {
    let [rows, hidden] = table.dims();
    let ids = ids.as_slice::<u32>();
    by_float!(y.dtype(), T => {
        let table = table.as_slice::<T>();
        let positions = positions.map(PositionRows::<T>::new);
        let y = Shards::new(y.into_slice::<T>());
        cpu.over(ids.len(), row_grain(hidden), |range| {
            // SAFETY: ranges of rows are disjoint.
            let y = unsafe { y.piece(range.start * hidden..range.end * hidden) };
            for (i, y) in range.zip(y.chunks_exact_mut(hidden)) {
                let row = row_of(ids[i], lookup, rows).map(|row| &table[row * hidden..][..hidden]);
                let position = positions.as_ref().map(|p| p.row(i));
                match (row, position, accumulate) {
                    (Some(a), Some(b), false) => sum_of_two(cpu.isa, a, b, y),
                    (Some(a), Some(b), true) => add_two(cpu.isa, a, b, y),
                    (Some(a), None, false) | (None, Some(a), false) => y.copy_from_slice(a),
                    (Some(a), None, true) | (None, Some(a), true) => add_piece(cpu.isa, a, y),
                    (None, None, false) => y.fill(T::default()),
                    (None, None, true) => {}
                }
            }
        });
    });
}

/// `y[i] += positions[(first_row + i) mod seq]`.
pub(crate) fn add_positions(cpu: &Cpu, positions: Positions, y: ViewMut) {
    let [rows, hidden] = y.shape().rows_cols();
    by_float!(y.dtype(), T => {
        let positions = PositionRows::<T>::new(positions);
        let y = Shards::new(y.into_slice::<T>());
        cpu.over(rows, row_grain(hidden), |range| {
            // SAFETY: ranges of rows are disjoint.
            let y = unsafe { y.piece(range.start * hidden..range.end * hidden) };
            for (i, y) in range.zip(y.chunks_exact_mut(hidden)) {
                add_piece(cpu.isa, positions.row(i), y);
            }
        });
    });
}

/// The position embeddings as slices.
struct PositionRows<'a, T> {
    table: &'a [T],
    hidden: usize,
    first_row: usize,
    seq: usize,
}

impl<'a, T: Float> PositionRows<'a, T> {
    fn new(Positions { table, first_row, seq }: Positions<'a>) -> PositionRows<'a, T> {
        let [_, hidden] = table.dims();
        PositionRows { table: table.as_slice(), hidden, first_row, seq }
    }

    /// The position embedding of row i.
    fn row(&self, i: usize) -> &'a [T] {
        &self.table[(self.first_row + i) % self.seq * self.hidden..][..self.hidden]
    }
}

vectorized!(fn sum_of_two<T: Float>(a: &[T], b: &[T], y: &mut [T]) = sum_of_two_body);
#[inline(always)]
fn sum_of_two_body<L: Lanes, T: Float>(a: &[T], b: &[T], y: &mut [T]) {
    assert_eq!([a.len(), b.len()], [y.len(); 2]);
    // SAFETY: compiled for L; all slices have the same length.
    unsafe {
        by_lanes!(y.len(), |at, count| {
            let sum = L::add(load::<L, T>(a, at, count), load::<L, T>(b, at, count));
            store::<L, T>(y, at, sum, count);
        });
    }
}

vectorized!(fn add_two<T: Float>(a: &[T], b: &[T], y: &mut [T]) = add_two_body);
/// `y += a + b`, rounded once.
#[inline(always)]
fn add_two_body<L: Lanes, T: Float>(a: &[T], b: &[T], y: &mut [T]) {
    assert_eq!([a.len(), b.len()], [y.len(); 2]);
    // SAFETY: compiled for L; all slices have the same length.
    unsafe {
        by_lanes!(y.len(), |at, count| {
            let sum = L::add(load::<L, T>(a, at, count), load::<L, T>(b, at, count));
            store::<L, T>(y, at, L::add(load::<L, T>(y, at, count), sum), count);
        });
    }
}
