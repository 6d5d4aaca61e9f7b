//! When chunks are gathered, and how long they are kept.
//!
//! The schedule says in which order blocks use chunks, so nothing is guessed or learned while the run goes on.
//! A chunk is gathered `depth` distinct chunks before its use, and kept while it is among the next `depth` to be used.

use phalanx_plan::Lookahead;

/// The position of one phase in its known order of chunk uses.
pub(super) struct Prefetch {
    lookahead: Lookahead,
    depth: usize,
    position: usize,
}

impl Prefetch {
    /// `order` lists the chunk uses of a phase; where it is still unknown it is empty, and nothing is gathered ahead
    /// or kept. `depth` is the number of distinct chunks to gather ahead.
    pub(super) fn new(order: Vec<u32>, depth: usize) -> Prefetch {
        Prefetch { lookahead: Lookahead::new(order), depth, position: 0 }
    }

    /// Goes back to the start of the phase.
    pub(super) fn restart(&mut self) {
        self.position = 0;
    }

    /// Notes a use of `chunk`.
    ///
    /// # Panics
    /// When the order is known and another chunk comes next in it.
    pub(super) fn advance(&mut self, chunk: u32) {
        if let Some(expected) = self.lookahead.order().get(self.position) {
            assert_eq!(*expected, chunk, "use {} of the phase is not the planned one", self.position);
        }
        self.position += 1;
    }

    /// The chunks to gather now: the next `depth` distinct ones.
    pub(super) fn wanted(&self) -> Vec<u32> {
        self.lookahead.upcoming(self.position).take(self.depth).collect()
    }

    /// Returns whether `chunk` is used again so soon that it should be kept.
    pub(super) fn keeps(&self, chunk: u32) -> bool {
        self.lookahead.upcoming(self.position).take(self.depth.max(1)).any(|c| c == chunk)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fetches_ahead_and_keeps_what_comes_next() {
        let mut prefetch = Prefetch::new(vec![0, 1, 1, 2, 1, 0], 1);
        assert_eq!(prefetch.wanted(), [0]);
        for (used, wanted) in
            [(0, vec![1]), (1, vec![1]), (1, vec![2]), (2, vec![1]), (1, vec![0]), (0, vec![])]
        {
            prefetch.advance(used);
            assert_eq!(prefetch.wanted(), wanted);
        }
        assert!(!prefetch.keeps(0));
        prefetch.restart();
        prefetch.advance(0);
        assert!(prefetch.keeps(1) && !prefetch.keeps(2));
    }

    #[test]
    fn depth_zero_keeps_a_chunk_that_the_next_block_shares() {
        let mut prefetch = Prefetch::new(vec![0, 0, 1], 0);
        prefetch.advance(0);
        assert!(prefetch.wanted().is_empty());
        assert!(prefetch.keeps(0));
        prefetch.advance(0);
        assert!(!prefetch.keeps(0) && prefetch.keeps(1));
    }
}
