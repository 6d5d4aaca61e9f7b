//! Token and position embedding: rows looked up, and their gradients without atomics.
//!
//! For the gradient of the table, positions are sorted by token; a task sums the rows of dy of one token
//! after the other, in the order of positions, in f32, and writes the token's row of the table once. So a
//! row's sum has one order whatever the threads, and one rounding whatever the type.

use super::elementwise::{add_piece, by_lanes, convert_piece, fill_slice, load, put, store};
use super::lanes::Lanes;
use super::number::{Number, by_float};
use super::shards::Shards;
use super::simd::vectorized;
use super::{Cpu, row_grain};
use crate::buffer::{View, ViewMut};

/// Columns that a task of a gradient sums: 2 KiB, which stay in the nearest cache.
const STRIP: usize = 512;

/// `y[t] = table[tokens[t]] + positions[t mod seq]`; y `[batch, seq, hidden]` (overwrites).
pub(super) fn embedding(cpu: &Cpu, tokens: View, table: View, positions: View, y: ViewMut) {
    let [_, seq, hidden] = y.dims();
    let tokens = tokens.as_slice::<u32>();
    by_float!(y.dtype(), T => {
        let (table, positions) = (table.as_slice::<T>(), positions.as_slice::<T>());
        let y = Shards::new(y.into_slice::<T>());
        cpu.over(tokens.len(), row_grain(hidden), |rows| {
            // SAFETY: ranges of rows are disjoint.
            let y = unsafe { y.piece(rows.start * hidden..rows.end * hidden) };
            for (t, y) in rows.zip(y.chunks_exact_mut(hidden)) {
                let position = &positions[t % seq * hidden..][..hidden];
                sum_of_two(cpu.isa, row(table, tokens[t], hidden), position, y);
            }
        });
    });
}

vectorized!(fn sum_of_two<T: Number>(a: &[T], b: &[T], y: &mut [T]) = sum_of_two_body);
#[inline(always)]
fn sum_of_two_body<L: Lanes, T: Number>(a: &[T], b: &[T], y: &mut [T]) {
    assert_eq!([a.len(), b.len()], [y.len(); 2]);
    // SAFETY: compiled for L; all are as long as said.
    unsafe {
        by_lanes!(y.len(), |at, count| {
            let sum = L::add(load::<L, T>(a, at, count), load::<L, T>(b, at, count));
            store::<L, T>(y, at, sum, count);
        });
    }
}

fn row<T>(table: &[T], token: u32, hidden: usize) -> &[T] {
    let rows = table.len() / hidden;
    assert!((token as usize) < rows, "token {token} in a table of {rows} rows");
    &table[token as usize * hidden..][..hidden]
}

/// dtable (+)= by `accumulate.0`, dpositions (+)= by `accumulate.1`.
pub(super) fn embedding_backward(
    cpu: &Cpu,
    tokens: View,
    dy: View,
    dtable: ViewMut,
    dpositions: ViewMut,
    accumulate: [bool; 2],
) {
    let [_, seq, hidden] = dy.dims();
    let [add_table, add_positions] = accumulate;
    let tokens = tokens.as_slice::<u32>();
    by_float!(dy.dtype(), T => by_float!(dtable.dtype(), P => {
        let dy = dy.as_slice::<T>();
        table_gradient(cpu, hidden, tokens, dy, dtable.into_slice::<P>(), add_table);
        position_gradient(cpu, [seq, hidden], dy, dpositions.into_slice::<P>(), add_positions);
    }));
}

/// `dtable[tokens[t]] (+)= dy[t]`; rows of absent tokens are zeroed when not accumulating.
fn table_gradient<T: Number, P: Number>(
    cpu: &Cpu,
    hidden: usize,
    tokens: &[u32],
    dy: &[T],
    dtable: &mut [P],
    accumulate: bool,
) {
    let rows = dtable.len() / hidden.max(1);
    if let Some(token) = tokens.iter().find(|&&t| t as usize >= rows) {
        panic!("token {token} in a table of {rows} rows");
    }
    if !accumulate {
        fill_slice(cpu, dtable, P::default());
    }
    let dtable = Shards::new(dtable);
    cpu.scratch.with(|buffer| {
        // Token above, position below: sorted, they are runs of one token, positions ascending.
        let order = buffer.slice::<u64>(tokens.len());
        for (t, (entry, token)) in order.iter_mut().zip(tokens).enumerate() {
            *entry = u64::from(*token) << 32 | t as u64;
        }
        order.sort_unstable();
        let order = &*order;
        let (grain, strips) = (row_grain(hidden.min(STRIP)), hidden.div_ceil(STRIP));
        cpu.over(order.len().div_ceil(grain) * strips, 1, |task| {
            let (piece, strip) = (task.start / strips, task.start % strips);
            let columns = strip * STRIP..hidden.min((strip + 1) * STRIP);
            let mut sums = [0f32; STRIP];
            let sums = &mut sums[..columns.len()];
            for run in runs(order, piece * grain..order.len().min((piece + 1) * grain)) {
                let dy = |entry: u64| &dy[entry as u32 as usize * hidden..][columns.clone()];
                convert_piece(cpu.isa, dy(run[0]), sums);
                run[1..].iter().for_each(|entry| add_piece(cpu.isa, dy(*entry), sums));
                let at = (run[0] >> 32) as usize * hidden;
                // SAFETY: a run belongs to one piece, so this task alone touches these columns of this row.
                let into = unsafe { dtable.piece(at + columns.start..at + columns.end) };
                put(cpu.isa, sums, into, accumulate);
            }
        });
    });
}

/// The runs of equal tokens that start in `range`; the last may go on behind it.
fn runs(order: &[u64], range: std::ops::Range<usize>) -> impl Iterator<Item = &[u64]> {
    let same = |a: &u64, b: &u64| a >> 32 == b >> 32;
    let end_of = move |start: usize| {
        start + order[start..].iter().take_while(|entry| same(entry, &order[start])).count()
    };
    let mut at = range.start;
    if at > 0 && same(&order[at - 1], &order[at]) {
        at = end_of(at);
    }
    std::iter::from_fn(move || {
        let start = at;
        (start < range.end).then(|| {
            at = end_of(start);
            &order[start..at]
        })
    })
}

/// `dpositions[s] (+)= sum over the batch of dy[b, s]`; rows from seq on are zeroed when not accumulating.
fn position_gradient<T: Number, P: Number>(
    cpu: &Cpu,
    [seq, hidden]: [usize; 2],
    dy: &[T],
    dpositions: &mut [P],
    accumulate: bool,
) {
    let (seen, rest) = dpositions.split_at_mut(seq * hidden);
    if !accumulate {
        fill_slice(cpu, rest, P::default());
    }
    cpu.over_mut(seen, STRIP, |range, into| {
        let mut sums = [0f32; STRIP];
        let sums = &mut sums[..into.len()];
        for sample in dy.chunks_exact(seq * hidden) {
            add_piece(cpu.isa, &sample[range.clone()], sums);
        }
        put(cpu.isa, sums, into, accumulate);
    });
}
