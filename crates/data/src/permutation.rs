//! A keyed permutation of `0..n` that is computed, not stored: one item costs a few dozen operations,
//! so shuffling a trillion samples takes no memory and any position can be asked for first.
//!
//! A balanced Feistel network (Luby and Rackoff, "How to construct pseudorandom permutations from
//! pseudorandom functions", 1988) permutes the smallest even-bit power of two that holds `n`, and
//! cycle walking (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002) repeats it until
//! the result is below `n`: the power is less than `4 n`, so fewer than four turns on average.

/// Four rounds suffice in theory for large domains; small ones want more, and rounds are cheap.
const ROUNDS: usize = 8;

/// A bijection of `0..n` chosen by a key.
#[derive(Clone, Debug)]
pub struct Permutation {
    n: u64,
    half_bits: u32,
    keys: [u64; ROUNDS],
}

impl Permutation {
    /// The permutation of `0..n` for `key`. `n` must be from 1 to 2^62.
    pub fn new(n: u64, key: u64) -> Permutation {
        assert!((1..=1 << 62).contains(&n), "cannot permute {n} items");
        let bits = u64::BITS - (n - 1).leading_zeros();
        Permutation {
            n,
            half_bits: bits.div_ceil(2).max(1),
            keys: std::array::from_fn(|round| mix(key.wrapping_add(mix(round as u64 + 1)))),
        }
    }

    /// The image of `index` (below `n`).
    pub fn at(&self, index: u64) -> u64 {
        assert!(index < self.n, "index {index} of a permutation of {}", self.n);
        let mut value = self.encipher(index);
        while value >= self.n {
            value = self.encipher(value);
        }
        value
    }

    fn encipher(&self, value: u64) -> u64 {
        let mask = (1u64 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for key in self.keys {
            (left, right) = (right, left ^ (mix(right ^ key) & mask));
        }
        (left << self.half_bits) | right
    }
}

/// Scrambles 64 bits, bijectively: SplitMix64's finaliser after one increment, so that 0 does not stay 0.
pub(crate) fn mix(value: u64) -> u64 {
    phalanx_system::random::mix(value.wrapping_add(phalanx_system::random::GOLDEN))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_is_a_bijection() {
        let sizes = (1..=300).chain([1023, 1024, 1025, 4095, 4096, 4097, 65_537, 100_003]);
        for n in sizes {
            for key in [0, 1, u64::MAX] {
                let permutation = Permutation::new(n, key);
                let mut seen = vec![false; n as usize];
                for index in 0..n {
                    let value = permutation.at(index) as usize;
                    assert!(!seen[value], "n {n} key {key}: {value} twice");
                    seen[value] = true;
                }
            }
        }
    }

    #[test]
    fn huge_sizes_stay_in_range() {
        for n in [1 << 40, (1 << 40) + 1, 1 << 61, 1 << 62] {
            let permutation = Permutation::new(n, 7);
            for index in (0..1000).chain(n - 1000..n) {
                assert!(permutation.at(index) < n);
            }
        }
    }

    #[test]
    fn keys_give_different_orders_without_fixed_structure() {
        let n = 10_000;
        let [a, b] = [1, 2].map(|key| Permutation::new(n, key));
        let agreeing = (0..n).filter(|&i| a.at(i) == b.at(i)).count();
        let fixed = (0..n).filter(|&i| a.at(i) == i).count();
        let successors = (1..n).filter(|&i| a.at(i) == a.at(i - 1) + 1).count();
        // For random permutations each count is nearly Poisson with mean 1, so more than 10 has a probability below
        // 1e-7.
        for (name, count) in [("agreeing", agreeing), ("fixed", fixed), ("successors", successors)] {
            assert!(count < 10, "{name}: {count}");
        }
    }

    #[test]
    fn the_order_is_pinned() {
        // A changed order would silently change resumed runs.
        let order: Vec<u64> = (0..10).map(|i| Permutation::new(10, 42).at(i)).collect();
        assert_eq!(order, PINNED);
    }

    const PINNED: [u64; 10] = [8, 5, 6, 4, 7, 9, 2, 0, 1, 3];
}
