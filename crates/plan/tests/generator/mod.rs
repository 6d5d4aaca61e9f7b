//! A deterministic generator for tests that try many cases.

use phalanx_system::random::{GOLDEN, mix};

/// The state.
pub struct Generator(pub u64);

impl Generator {
    /// The next 64 bits.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN);
        mix(self.0)
    }

    /// An approximately uniform number in `low..=high`.
    pub fn within(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low + 1)
    }
}
