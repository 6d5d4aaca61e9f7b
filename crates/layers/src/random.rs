//! Random numbers as a function of key and counter alone.
//!
//! A counter-based generator (SplitMix64's finaliser over key and counter, Steele et al., OOPSLA 2014): any number
//! can be computed without the ones before it, so numbers do not depend on the order of calls.

/// Weyl increment of SplitMix64: 2^64 over the golden ratio.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

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

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
