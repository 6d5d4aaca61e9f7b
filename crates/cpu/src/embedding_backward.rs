//! Gradients of an embedding's tables, without atomics.
//!
//! Rows of dy are sorted by the row of the table that they belong to; a task sums those of one after the other, in
//! the order in which they lie, in f32, and writes the table's row once. So a row's sum has one order whatever the
//! threads, and one rounding whatever the type. With two rows (token types), each sums about half of dy: they are summed
//! like the gradient of a bias ([`bias`](crate::bias)).

use phalanx_tensor::arguments::Lookup;
use phalanx_tensor::shape::Shape;
use phalanx_tensor::{View, ViewMut};

use crate::bias::sum_blocks;
use crate::elementwise::{add_piece, convert_piece, fill_slice, put};
use crate::embedding::row_of;
use crate::float::{Float, by_float};
use crate::shards::Shards;
use crate::{Cpu, row_grain};

/// Columns that a gradient task sums: 2 KiB, which stay in L1.
const STRIP: usize = 512;

/// `dtable[lookup of ids[i]] (+)= dy[i]`.
pub(crate) fn embedding_backward(
    cpu: &Cpu,
    ids: View,
    lookup: Lookup,
    dy: View,
    dtable: ViewMut,
    accumulate: bool,
) {
    let [rows, hidden] = dtable.dims();
    let ids = ids.as_slice::<u32>();
    match (lookup, rows) {
        (Lookup::Token { .. }, _) => by_float!(dy.dtype(), T => by_float!(dtable.dtype(), P => {
            table_gradient::<T, P>(cpu, hidden, ids, lookup, dy.as_slice(), dtable.into_slice(), accumulate);
        })),
        (Lookup::Type, 1) => type_gradient::<1>(cpu, ids, dy, dtable, accumulate),
        (Lookup::Type, _) => type_gradient::<2>(cpu, ids, dy, dtable, accumulate),
    }
}

/// The gradient of a table of `TYPES` rows, such as that of token types.
fn type_gradient<const TYPES: usize>(cpu: &Cpu, ids: &[u32], dy: View, dtable: ViewMut, accumulate: bool) {
    let [_, hidden] = dtable.dims();
    let line = |row: usize| (row * hidden..(row + 1) * hidden, Shape::from([hidden]));
    let lines = dtable.into_pieces((0..TYPES).map(line));
    let lines: [ViewMut; TYPES] = lines.try_into().unwrap_or_else(|_| unreachable!("TYPES pieces"));
    by_float!(dy.dtype(), T => {
        let dy = dy.as_slice::<T>();
        sum_blocks(cpu, ids.len(), hidden, lines.map(Some), accumulate, |isa, range, sums| {
            for i in range {
                let row = row_of(ids[i], Lookup::Type, TYPES).unwrap_or_default();
                add_piece(isa, &dy[i * hidden..(i + 1) * hidden], sums[row]);
            }
        });
    });
}

/// `dtable[row of ids[i]] (+)= dy[i]`; rows of absent ids are zeroed when not accumulating.
fn table_gradient<T: Float, P: Float>(
    cpu: &Cpu,
    hidden: usize,
    ids: &[u32],
    lookup: Lookup,
    dy: &[T],
    dtable: &mut [P],
    accumulate: bool,
) {
    let rows = dtable.len() / hidden.max(1);
    if !accumulate {
        fill_slice(cpu, dtable, P::default());
    }
    let dtable = Shards::new(dtable);
    cpu.scratch.with(|buffer| {
        // High bits: row of the table; low bits: row of dy. Sorted, equal table rows form runs in ascending order of
        // dy.
        let order = buffer.slice::<u64>(ids.len());
        let mut found = 0;
        for (t, id) in ids.iter().enumerate() {
            if let Some(row) = row_of(*id, lookup, rows) {
                order[found] = (row as u64) << 32 | t as u64;
                found += 1;
            }
        }
        let order = &mut order[..found];
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
                // SAFETY: a run belongs to one piece, so only this task writes these columns of this row.
                let into = unsafe { dtable.piece(at + columns.start..at + columns.end) };
                put(cpu.isa, sums, into, accumulate);
            }
        });
    });
}

/// The runs of equal rows that start in `range`; the last may extend beyond it.
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

/// `dpositions[(first_row + i) mod seq] (+)= dy[i]`; rows that dy does not touch are zeroed when not accumulating.
pub(crate) fn position_gradient(
    cpu: &Cpu,
    dy: View,
    first_row: usize,
    seq: usize,
    dpositions: ViewMut,
    accumulate: bool,
) {
    let [_, hidden] = dpositions.dims();
    by_float!(dy.dtype(), T => by_float!(dpositions.dtype(), P => {
        let dy = dy.as_slice::<T>();
        let (seen, rest) = dpositions.into_slice::<P>().split_at_mut(seq * hidden);
        if !accumulate {
            fill_slice(cpu, rest, P::default());
        }
        // Start of dy, in elements from position 0 of its first sample.
        let (sample, start) = (seq * hidden, first_row % seq * hidden);
        let end = start + dy.len();
        cpu.over_mut(seen, STRIP, |range, into| {
            let mut sums = [0f32; STRIP];
            let sums = &mut sums[..into.len()];
            for base in (0..end).step_by(sample) {
                let from = (base + range.start).max(start)..(base + range.end).min(end);
                if !from.is_empty() {
                    let at = from.start - base - range.start;
                    let to = &mut sums[at..at + from.len()];
                    add_piece(cpu.isa, &dy[from.start - start..from.end - start], to);
                }
            }
            put(cpu.isa, sums, into, accumulate);
        });
    }));
}
