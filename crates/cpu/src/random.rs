//! Counter-based random numbers: each is a function of key and counter alone, so any task can compute any of them, and
//! the backward pass computes those of the forward pass again.
//!
//! SplitMix64's finaliser over key and counter (Steele et al., OOPSLA 2014), as in the initial values of
//! `phalanx-layers`: 64 bits are the two numbers of an even counter (lower half) and the odd one after it.

use phalanx_simd::Lanes;
use phalanx_system::random::{GOLDEN, mix};
use phalanx_tensor::arguments::Dropout;

/// Which elements a [`Dropout`] keeps.
#[derive(Clone, Copy)]
pub(crate) struct DropoutMask {
    /// The key minus one step, and the key: for words starting at a pair, and at the pair after it. Both are stored, so
    /// that the compiler cannot fold constants differently per lane.
    keys: [u64; 2],
    /// Smallest random number whose element is kept.
    kept_min: u64,
    /// Bits of 1 / (1 - p) as f32.
    factor: u64,
    /// Counter of element 0.
    first: u64,
}

impl DropoutMask {
    /// The mask of a dropout.
    pub(crate) fn new(dropout: Dropout) -> DropoutMask {
        let p = f64::from(dropout.p);
        let factor = (1.0 / (1.0 - p)) as f32;
        DropoutMask {
            keys: [dropout.key.wrapping_sub(GOLDEN), dropout.key],
            kept_min: (p * 4_294_967_296.0).round() as u64,
            factor: u64::from(factor.to_bits()),
            first: dropout.first,
        }
    }

    /// Lane i is `1 / (1 - p)` if element `element + i` is kept, else 0. Odd counters take twice as long.
    ///
    /// # Safety
    /// Compiled for `L`.
    #[inline(always)]
    pub(crate) unsafe fn factors<L: Lanes>(&self, element: u64) -> L::V {
        let first = self.first.wrapping_add(element);
        // Two lanes share a word, so that everything is 64-bit arithmetic in eight equal lanes.
        let pair = first / 2;
        let here = words(self.keys[0], pair);
        let (mut lower, mut upper) = (here, here);
        if first.is_multiple_of(2) {
            for (l, u) in lower.iter_mut().zip(&mut upper) {
                (*l, *u) = (*l & 0xffff_ffff, *u >> 32);
            }
        } else {
            let next = words(self.keys[1], pair);
            for (l, (u, next)) in lower.iter_mut().zip(upper.iter_mut().zip(next)) {
                (*l, *u) = (*l >> 32, next & 0xffff_ffff);
            }
        }
        let mut pairs = [0u64; 8];
        for (pair, (l, u)) in pairs.iter_mut().zip(lower.iter().zip(&upper)) {
            let l = if *l >= self.kept_min { self.factor } else { 0 };
            let u = if *u >= self.kept_min { self.factor << 32 } else { 0 };
            *pair = if cfg!(target_endian = "big") { (l | u).rotate_left(32) } else { l | u };
        }
        // SAFETY: the caller's promise; eight pairs are 16 numbers.
        unsafe { L::load(pairs.as_ptr().cast()) }
    }
}

/// The words of eight pairs starting at `pair`; `key` is the key minus one step.
#[inline(always)]
fn words(key: u64, pair: u64) -> [u64; 8] {
    let before = key.wrapping_add(pair.wrapping_mul(GOLDEN));
    let mut words = [0; 8];
    for (i, word) in words.iter_mut().enumerate() {
        *word = mix(before.wrapping_add((i as u64 + 1).wrapping_mul(GOLDEN)));
    }
    words
}
