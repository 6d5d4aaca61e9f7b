//! The accesses of a warp as few spans: lanes that follow each other, at addresses that do, too, or are the same.

use crate::checks::Lanes;
use crate::registers::LANES;

/// Lanes that access memory together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    /// The address of the first lane.
    pub address: u64,
    /// The first lane.
    pub lane: usize,
    /// How many lanes there are.
    pub lanes: usize,
    /// Whether all have the address of the first; else each begins where the one before ends.
    pub same: bool,
}

impl Span {
    /// One lane.
    pub fn one(address: u64, lane: usize) -> Self {
        Self { address, lane, lanes: 1, same: false }
    }

    /// How many bytes are accessed, if each lane has so many.
    pub fn bytes(self, of_lane: usize) -> usize {
        if self.same { of_lane } else { of_lane * self.lanes }
    }

    /// Which lanes have which bytes, if each has so many.
    pub fn which(self, of_lane: usize) -> Lanes {
        Lanes { first: self.lane, shift: of_lane.trailing_zeros(), several: self.same }
    }

    /// The span at another address.
    pub fn at(self, address: u64) -> Self {
        Self { address, ..self }
    }

    /// The lanes with their addresses.
    pub fn each(self, of_lane: usize) -> impl Iterator<Item = Self> {
        let step = if self.same { 0 } else { of_lane as u64 };
        (0..self.lanes).map(move |index| Self::one(self.address + step * index as u64, self.lane + index))
    }
}

/// The spans of lanes that access so many bytes each, from the lowest lane.
pub(super) struct Spans<'a> {
    addresses: &'a [u64; LANES],
    rest: u32,
    bytes: u64,
    /// Whether lanes with the same address may be one span.
    same: bool,
}

impl<'a> Spans<'a> {
    /// The spans of the lanes of a mask.
    pub fn new(addresses: &'a [u64; LANES], active: u32, bytes: usize, same: bool) -> Self {
        Self { addresses, rest: active, bytes: bytes as u64, same }
    }

    /// The span of all 32 lanes, if they are one.
    #[inline]
    fn whole(&self) -> Option<Span> {
        let step = self.addresses[1].wrapping_sub(self.addresses[0]);
        let same = self.same && step == 0;
        if !same && step != self.bytes {
            return None;
        }
        let mut different = 0;
        for (lane, &address) in self.addresses.iter().enumerate() {
            different |= address ^ self.addresses[0].wrapping_add(step.wrapping_mul(lane as u64));
        }
        (different == 0).then(|| Span { address: self.addresses[0], lane: 0, lanes: LANES, same })
    }
}

impl Iterator for Spans<'_> {
    type Item = Span;

    #[inline]
    fn next(&mut self) -> Option<Span> {
        if self.rest == u32::MAX
            && let Some(span) = self.whole()
        {
            self.rest = 0;
            return Some(span);
        }
        if self.rest == 0 {
            return None;
        }
        let lane = self.rest.trailing_zeros() as usize;
        let address = self.addresses[lane];
        let lanes_max = (self.rest >> lane).trailing_ones() as usize;
        let mut lanes = 1;
        let mut same = false;
        if lanes_max > 1 {
            let step = self.addresses[lane + 1].wrapping_sub(address);
            same = self.same && step == 0;
            if same || step == self.bytes {
                lanes = 2;
                while lanes < lanes_max
                    && self.addresses[lane + lanes].wrapping_sub(self.addresses[lane + lanes - 1]) == step
                {
                    lanes += 1;
                }
            }
        }
        self.rest &= !(u32::MAX >> (LANES - lanes) << lane);
        Some(Span { address, lane, lanes, same })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_runs_of_lanes() {
        let addresses: [u64; LANES] = std::array::from_fn(|lane| match lane {
            0..4 => 100 + 4 * lane as u64,
            4..8 => 500,
            8..31 => 2000 - 4 * lane as u64,
            _ => 7,
        });
        let spans = |active, same| Spans::new(&addresses, active, 4, same).collect::<Vec<_>>();
        let found = spans(u32::MAX, true);
        assert_eq!(found[0], Span { address: 100, lane: 0, lanes: 4, same: false });
        assert_eq!(found[1], Span { address: 500, lane: 4, lanes: 4, same: true });
        assert_eq!(found.len(), 2 + 23 + 1);
        assert_eq!(spans(u32::MAX, false).len(), 1 + 4 + 23 + 1);
        assert_eq!(spans(0b1011, true).iter().map(|span| span.lanes).collect::<Vec<_>>(), [2, 1]);
        let row: [u64; LANES] = std::array::from_fn(|lane| 16 * lane as u64);
        let whole = Span { address: 0, lane: 0, lanes: LANES, same: false };
        assert_eq!(Spans::new(&row, u32::MAX, 16, true).collect::<Vec<_>>(), [whole]);
        assert_eq!(Spans::new(&row, u32::MAX >> 1, 16, true).next().unwrap().lanes, 31);
        assert_eq!(Spans::new(&[9; LANES], u32::MAX, 16, true).next().unwrap().bytes(16), 16);
    }
}
