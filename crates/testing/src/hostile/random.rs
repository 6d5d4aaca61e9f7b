//! Random choices for tests: a stream of numbers that depends only on a seed and the number of the case.

use phalanx_system::random::{GOLDEN, SplitMix64, mix};

/// A stream of random numbers.
#[derive(Clone, Debug)]
pub struct Random {
    numbers: SplitMix64,
}

impl Random {
    /// The stream of case `number` of `seed`; streams of different cases are independent.
    pub fn of_case(seed: &str, number: usize) -> Random {
        let state = seed.bytes().fold(GOLDEN, |state, byte| mix(state ^ u64::from(byte)));
        Random { numbers: SplitMix64::new(mix(state ^ number as u64)) }
    }

    /// The next number.
    pub fn next_u64(&mut self) -> u64 {
        self.numbers.next_u64()
    }

    /// A number in `0..bound`; 0 when `bound` is 0.
    pub fn below(&mut self, bound: usize) -> usize {
        if bound == 0 { 0 } else { (self.next_u64() % bound as u64) as usize }
    }

    /// A number in `0.0..1.0`.
    pub fn fraction(&mut self) -> f64 {
        self.numbers.next_fraction()
    }

    /// True with this probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        self.fraction() < probability
    }

    /// Random bytes.
    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.next_u64() as u8).collect()
    }

    /// Puts `items` into a random order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }

    /// One of several, at least one.
    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_are_independent_of_each_other() {
        let first = |seed, number| Random::of_case(seed, number).next_u64();
        assert_eq!(first("kills", 3), first("kills", 3));
        assert_ne!(first("kills", 3), first("kills", 4));
        assert_ne!(first("kills", 3), first("stops", 3));
        let mut numbers: Vec<usize> = (0..50).collect();
        Random::of_case("x", 0).shuffle(&mut numbers);
        assert_ne!(numbers, (0..50).collect::<Vec<_>>());
        numbers.sort_unstable();
        assert_eq!(numbers, (0..50).collect::<Vec<_>>());
    }
}
