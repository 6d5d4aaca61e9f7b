//! Random numbers as a function of key and counter alone.
//!
//! The generator is counter-based (see `phalanx_system::random`): any number can be computed without the ones before it, so
//! numbers do not depend on the order of calls.

use phalanx_system::random::{GOLDEN, mix};

/// Mixes seed and name (FNV-1a) into a key.
pub(crate) fn key(seed: u64, name: &str) -> u64 {
    let start = mix(seed ^ GOLDEN);
    let hash =
        name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ b as u64).wrapping_mul(0x0100_0000_01b3));
    mix(start ^ hash)
}

/// Number `counter` of this key.
pub(crate) fn number(key: u64, counter: u64) -> u64 {
    mix(key.wrapping_add(counter.wrapping_mul(GOLDEN)))
}
