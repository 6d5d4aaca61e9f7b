//! Token and position embedding: rows looked up, and their gradients without atomics.
//!
//! The gradient of the table is cut by columns: each task walks all tokens in order and adds its strip of
//! dy to its strip of the table, so a row's sum has one order whatever the threads.

use super::Cpu;
use super::row_grain;
use super::shards::Shards;

/// Columns of a task of the table's gradient: four cache lines of a row.
const STRIP: usize = 64;

/// `y[t] = table[tokens[t]] + positions[t mod seq]`; y `[tokens, hidden]` (overwrites).
pub(super) fn embedding(
    cpu: &Cpu,
    [seq, hidden]: [usize; 2],
    tokens: &[u32],
    [table, positions]: [&[f32]; 2],
    y: &mut [f32],
) {
    let y = Shards::new(y);
    cpu.over(tokens.len(), row_grain(hidden), |rows| {
        // SAFETY: ranges of rows are disjoint.
        let y = unsafe { y.piece(rows.start * hidden..rows.end * hidden) };
        for (t, y) in rows.zip(y.chunks_exact_mut(hidden)) {
            let position = &positions[t % seq * hidden..][..hidden];
            for ((y, a), b) in y.iter_mut().zip(row(table, tokens[t], hidden)).zip(position) {
                *y = a + b;
            }
        }
    });
}

fn row(table: &[f32], token: u32, hidden: usize) -> &[f32] {
    let rows = table.len() / hidden;
    assert!((token as usize) < rows, "token {token} in a table of {rows} rows");
    &table[token as usize * hidden..][..hidden]
}

/// `dtable[tokens[t]] (+)= dy[t]`; rows of absent tokens are zeroed when not accumulating.
pub(super) fn table_gradient(
    cpu: &Cpu,
    hidden: usize,
    tokens: &[u32],
    dy: &[f32],
    dtable: &mut [f32],
    accumulate: bool,
) {
    let rows = dtable.len() / hidden.max(1);
    if let Some(token) = tokens.iter().find(|&&t| t as usize >= rows) {
        panic!("token {token} in a table of {rows} rows");
    }
    if !accumulate {
        super::elementwise::fill(cpu, dtable, 0.0);
    }
    let dtable = Shards::new(dtable);
    cpu.over(hidden, STRIP, |columns| {
        for (t, token) in tokens.iter().enumerate() {
            let at = *token as usize * hidden;
            // SAFETY: this task alone touches these columns, in any row.
            let into = unsafe { dtable.piece(at + columns.start..at + columns.end) };
            for (i, d) in into.iter_mut().zip(&dy[t * hidden..][columns.clone()]) {
                *i += *d;
            }
        }
    });
}

/// `dpositions[s] (+)= sum over the batch of dy[b, s]`; rows from seq on are zeroed when not accumulating.
pub(super) fn position_gradient(
    cpu: &Cpu,
    [seq, hidden]: [usize; 2],
    dy: &[f32],
    dpositions: &mut [f32],
    accumulate: bool,
) {
    let rows = dpositions.len() / hidden.max(1);
    let dpositions = Shards::new(dpositions);
    cpu.over(rows, row_grain(hidden), |rows| {
        // SAFETY: ranges of rows are disjoint.
        let into = unsafe { dpositions.piece(rows.start * hidden..rows.end * hidden) };
        if !accumulate {
            into.fill(0.0);
        }
        let rows = rows.start..rows.end.min(seq);
        if rows.is_empty() {
            return;
        }
        for sample in dy.chunks_exact(seq * hidden) {
            for (i, d) in into.iter_mut().zip(&sample[rows.start * hidden..rows.end * hidden]) {
                *i += *d;
            }
        }
    });
}
