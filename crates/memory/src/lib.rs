//! When chunks are fetched and when they may go.
//!
//! The dry run told in which order blocks need chunks; nothing is guessed and nothing is learned while
//! running. A chunk is fetched `depth` distinct chunks ahead of its use and kept while it is among the
//! next ones.
#![forbid(unsafe_code)]

use phalanx_plan::Lookahead;

/// Position in the known order of uses of one phase.
pub struct Prefetch {
    lookahead: Lookahead,
    depth: usize,
    position: usize,
}

impl Prefetch {
    /// `order` of chunk uses of a phase (empty: unknown yet, nothing is fetched ahead or kept), and how
    /// many distinct chunks to fetch ahead.
    pub fn new(order: Vec<u32>, depth: usize) -> Prefetch {
        Prefetch { lookahead: Lookahead::new(order), depth, position: 0 }
    }

    /// Back to the start of the phase.
    pub fn restart(&mut self) {
        self.position = 0;
    }

    /// Notes the use of `chunk`, which must be the next in the order, when that is known.
    pub fn advance(&mut self, chunk: u32) {
        if let Some(expected) = self.lookahead.order().get(self.position) {
            assert_eq!(*expected, chunk, "use {} of the phase is not the planned one", self.position);
        }
        self.position += 1;
    }

    /// Chunks to fetch now: the next `depth` distinct ones.
    pub fn wanted(&self) -> Vec<u32> {
        self.lookahead.upcoming(self.position).take(self.depth).collect()
    }

    /// Whether `chunk` is among the next uses and should not be given up.
    pub fn keeps(&self, chunk: u32) -> bool {
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
