//! Which bytes of a region are free: first fit, and gaps that touch become one.
//!
//! For devices without a plan, in tests. A range that was given back is the first to be handed out again, so work
//! that still uses it meets its new owner soon.

use phalanx_plan::ALIGN;

/// The free ranges of a region, by offset; none touches another.
pub(crate) struct Gaps {
    free: Vec<(usize, usize)>,
}

impl Gaps {
    /// A region of `bytes`, all free.
    pub(crate) fn new(bytes: usize) -> Gaps {
        Gaps { free: vec![(0, bytes)] }
    }

    /// Takes `bytes` and returns their offset, a multiple of [`ALIGN`]; None when no gap is large enough.
    pub(crate) fn take(&mut self, bytes: usize) -> Option<usize> {
        if bytes == 0 {
            return Some(0);
        }
        let bytes = aligned(bytes);
        let at = self.free.iter().position(|(start, end)| end - start >= bytes)?;
        let (start, end) = &mut self.free[at];
        let offset = *start;
        *start += bytes;
        if start == end {
            self.free.remove(at);
        }
        Some(offset)
    }

    /// Gives back what `take(bytes)` returned.
    pub(crate) fn give_back(&mut self, offset: usize, bytes: usize) {
        let (mut start, mut end) = (offset, offset + aligned(bytes));
        if start == end {
            return;
        }
        let mut at = self.free.partition_point(|gap| gap.0 < start);
        if at < self.free.len() && self.free[at].0 == end {
            end = self.free.remove(at).1;
        }
        if at > 0 && self.free[at - 1].1 == start {
            at -= 1;
            start = self.free.remove(at).0;
        }
        self.free.insert(at, (start, end));
    }
}

fn aligned(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGN as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_gap_that_is_large_enough_is_taken() {
        let mut gaps = Gaps::new(4 * 64);
        assert_eq!([gaps.take(1), gaps.take(65), gaps.take(64)], [Some(0), Some(64), Some(192)]);
        assert_eq!([gaps.take(1), gaps.take(0)], [None, Some(0)]);
        gaps.give_back(0, 1);
        assert_eq!([gaps.take(65), gaps.take(64)], [None, Some(0)]);
    }

    #[test]
    fn gaps_that_touch_become_one() {
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let mut gaps = Gaps::new(3 * 64);
            (0..3).for_each(|i| assert_eq!(gaps.take(64), Some(i * 64)));
            order.iter().for_each(|i| gaps.give_back(i * 64, 64));
            assert_eq!(gaps.free, [(0, 3 * 64)], "{order:?}");
        }
    }
}
