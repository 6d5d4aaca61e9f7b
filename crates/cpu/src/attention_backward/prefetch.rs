//! What a walk over blocks of keys and queries prefetches.

use std::ops::Range;

use super::{BLOCK, Backward, K, Q, V, Walk};
use crate::attention_pack::{fetch, fetch_to_write};

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
        if key_block == 0 {
            fetch_to_write(isa, to(Q, rows.start), rows.len(), e.size);
        }
        if query_block + 1 == self.blocks() {
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
        fetch(e.part(self.dout, pair, 0, &rows));
        fetch(e.part(self.out, pair, 0, &rows));
        if !more || e.causal && rows.start / BLOCK < walk.keys.end {
            [K, V].into_iter().for_each(|which| fetch(e.part(self.qkv, pair, which, &rows)));
        }
    }
}
