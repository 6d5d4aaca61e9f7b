//! SplitMix64 (Steele, Lea and Flood, 2014): the one source of every generated case.
//!
//! A case's numbers depend only on the campaign's seed, the group's name and the case's number, so a case
//! can be repeated alone.

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// A stream of random numbers.
pub(crate) struct Random {
    state: u64,
}

impl Random {
    /// The stream of case `number` of `group`.
    pub(crate) fn of_case(seed: u64, group: &str, number: usize) -> Random {
        let mut state = mix(seed.wrapping_add(GOLDEN));
        for byte in group.bytes() {
            state = mix(state ^ u64::from(byte));
        }
        Random { state: mix(state ^ number as u64) }
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(GOLDEN);
        mix(self.state)
    }

    /// A number in `0..bound`; 0 when `bound` is 0.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        if bound == 0 { 0 } else { (self.next() % bound as u64) as usize }
    }

    /// A number in `0.0..1.0`.
    pub(crate) fn fraction(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    pub(crate) fn chance(&mut self, probability: f64) -> bool {
        self.fraction() < probability
    }

    pub(crate) fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }

    pub(crate) fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.next() as u8).collect()
    }

    /// A permutation of `items`.
    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stream_is_splitmix64() {
        // The first numbers of the reference implementation for seed 1234567.
        let mut random = Random { state: 1234567 };
        let first = [random.next(), random.next(), random.next()];
        assert_eq!(first, [6457827717110365317, 3203168211198807973, 9817491932198370423]);
    }

    #[test]
    fn cases_are_independent_of_each_other() {
        let first = |group, number| Random::of_case(1, group, number).next();
        assert_eq!(first("kills", 3), first("kills", 3));
        assert_ne!(first("kills", 3), first("kills", 4));
        assert_ne!(first("kills", 3), first("stops", 3));
        let mut numbers: Vec<usize> = (0..50).collect();
        Random::of_case(1, "x", 0).shuffle(&mut numbers);
        assert_ne!(numbers, (0..50).collect::<Vec<_>>());
        numbers.sort_unstable();
        assert_eq!(numbers, (0..50).collect::<Vec<_>>());
    }
}
