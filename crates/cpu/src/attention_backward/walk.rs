//! The state of a walk over blocks of keys and queries, and what it prefetches.

use std::ops::Range;

use super::{BLOCK, Backward, SPAN};
use crate::attention_extents::{K, Q, V};
use crate::attention_pack::{fetch, fetch_to_write};
use crate::attention_registers::Registers;
use crate::attention_tiles::Sheet;

/// Partial sums of dq, dk and dv of one head, starting at row `first`.
#[derive(Clone, Copy)]
pub(super) struct GradientSums {
    pub(super) at: [*mut f32; 3],
    pub(super) first: [usize; 3],
}

/// The buffers and state with which a task computes its blocks.
pub(super) struct Walk<'a> {
    pub(super) registers: Option<Registers>,
    pub(super) pair: usize,
    /// The head whose first block this thread is likely to take next.
    pub(super) after: Option<usize>,
    pub(super) sums: GradientSums,
    /// Blocks of keys, and how many of them are packed.
    pub(super) keys: Range<usize>,
    pub(super) packed: [bool; SPAN],
    /// k and v as left operands.
    pub(super) along: [Sheet; 2],
    /// k as right operand, steps of keys.
    pub(super) across: Sheet,
    /// Queries and dout as right operands, steps of the head's size.
    pub(super) turned: [Sheet; 2],
    /// Queries and dout as right operands, steps of queries.
    pub(super) queries: [Sheet; 2],
    /// Probabilities and score gradients of a block, as left operands whose steps are queries.
    pub(super) p: &'a mut [f32],
    pub(super) ds: &'a mut [f32],
    /// For one panel of (key, query) pairs: scores, dout·vᵀ, and ds as a left operand whose steps are keys.
    pub(super) panels: [&'a mut [f32]; 3],
    /// One value per query.
    pub(super) log_sum_exp2: &'a mut [f32],
    pub(super) delta: &'a mut [f32],
}

impl Backward<'_> {
    /// Prefetches what is needed after the queries `rows` of a block: results that will be written soon, and at the
    /// last block of keys also the next queries (and their keys), either of this walk (if there are `more`) or of the
    /// head that this thread is likely to take next.
    pub(super) fn prefetch_next(
        &self,
        walk: &Walk,
        [key_block, query_block]: [usize; 2],
        rows: &Range<usize>,
        more: bool,
    ) {
        let (isa, e) = (self.path.isa, &self.e);
        let to = |which: usize, row: usize| self.dqkv.part(e, walk.pair, which, row);
        if key_block == self.keys_of(walk.pair, query_block).start {
            fetch_to_write(isa, to(Q, rows.start), rows.len(), e.size);
        }
        if query_block + 1 == self.queries_of(walk.pair, key_block).end {
            let first = key_block * BLOCK + rows.start % BLOCK;
            let count = rows.len().min(e.seq.saturating_sub(first));
            if count > 0 {
                [K, V].into_iter().for_each(|which| fetch_to_write(isa, to(which, first), count, e.size));
            }
        }
        if key_block != walk.keys.start {
            return;
        }
        let (pair, first) = match walk.after {
            _ if more => (walk.pair, rows.start + BLOCK),
            Some(pair) => (pair, rows.start % BLOCK),
            None => return,
        };
        let rows = first..e.seq.min(first + rows.len());
        if rows.is_empty() {
            return;
        }
        fetch(e.part(self.qkv, pair, Q, &rows));
        fetch(e.part(self.dout, pair, Q, &rows));
        fetch(e.part(self.out, pair, Q, &rows));
        if !more || e.heads.causal && rows.start / BLOCK < walk.keys.end {
            [K, V].into_iter().for_each(|which| fetch(e.part(self.qkv, pair, which, &rows)));
        }
    }
}
