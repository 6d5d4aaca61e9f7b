//! Numbers as they are stored. Kernels read f32, bf16 or f16, compute in f32 and round once when they store.

use half::{bf16, f16};

use crate::Lanes;

/// A stored number: widened when loaded, rounded to nearest even when stored.
///
/// # Safety
/// As for [`Lanes`], with the instruction set of `L`.
#[expect(clippy::missing_safety_doc, reason = "one contract for all functions: the trait's Safety section")]
pub trait Number: Copy + Default + Send + Sync + 'static {
    /// Widened.
    fn to_f32(self) -> f32;
    /// Rounded.
    fn from_f32(x: f32) -> Self;
    /// 16 numbers.
    unsafe fn load<L: Lanes>(from: *const Self) -> L::V;
    /// 16 numbers.
    unsafe fn store<L: Lanes>(to: *mut Self, x: L::V);

    /// The first `count` numbers, the other lanes 0.
    unsafe fn load_first<L: Lanes>(from: *const Self, count: usize) -> L::V;

    /// The first `count` lanes.
    #[inline(always)]
    unsafe fn store_first<L: Lanes>(to: *mut Self, x: L::V, count: usize) {
        let mut all = [Self::default(); 16];
        // SAFETY: the caller's promise; the array has 16 numbers.
        unsafe {
            Self::store::<L>(all.as_mut_ptr(), x);
            std::ptr::copy_nonoverlapping(all.as_ptr(), to, count.min(16));
        }
    }
}

impl Number for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(x: f32) -> f32 {
        x
    }
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const f32) -> L::V {
        // SAFETY: the caller's promise.
        unsafe { L::load(from) }
    }
    #[inline(always)]
    unsafe fn store<L: Lanes>(to: *mut f32, x: L::V) {
        // SAFETY: the caller's promise.
        unsafe { L::store(to, x) }
    }
    #[inline(always)]
    unsafe fn load_first<L: Lanes>(from: *const f32, count: usize) -> L::V {
        // SAFETY: the caller's promise.
        unsafe { L::load_first(from, count) }
    }
    #[inline(always)]
    unsafe fn store_first<L: Lanes>(to: *mut f32, x: L::V, count: usize) {
        // SAFETY: the caller's promise.
        unsafe { L::store_first(to, x, count) }
    }
}

impl Number for bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }
    #[inline(always)]
    fn from_f32(x: f32) -> bf16 {
        bf16::from_f32(x)
    }
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const bf16) -> L::V {
        // SAFETY: the caller's promise.
        unsafe { L::load_bf16(from) }
    }
    #[inline(always)]
    unsafe fn load_first<L: Lanes>(from: *const bf16, count: usize) -> L::V {
        // SAFETY: the caller's promise.
        unsafe { L::load_first_bf16(from, count) }
    }
    #[inline(always)]
    unsafe fn store<L: Lanes>(to: *mut bf16, x: L::V) {
        // SAFETY: the caller's promise.
        unsafe { L::store_bf16(to, x) }
    }
}

impl Number for f16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }
    #[inline(always)]
    fn from_f32(x: f32) -> f16 {
        f16::from_f32(x)
    }
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const f16) -> L::V {
        // SAFETY: the caller's promise.
        unsafe { L::load_f16(from) }
    }
    #[inline(always)]
    unsafe fn load_first<L: Lanes>(from: *const f16, count: usize) -> L::V {
        // SAFETY: the caller's promise.
        unsafe { L::load_first_f16(from, count) }
    }
    #[inline(always)]
    unsafe fn store<L: Lanes>(to: *mut f16, x: L::V) {
        // SAFETY: the caller's promise.
        unsafe { L::store_f16(to, x) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Isa, vectorized};

    vectorized!(fn round_trip<T: Number>(from: &[f32], to: &mut [f32]) = round_trip_body);
    #[inline(always)]
    fn round_trip_body<L: Lanes, T: Number>(from: &[f32], to: &mut [f32]) {
        let mut stored = [T::default(); 16];
        for (from, to) in from.chunks(16).zip(to.chunks_mut(16)) {
            // SAFETY: compiled for L; the chunks have 16 elements.
            unsafe {
                T::store_first::<L>(
                    stored.as_mut_ptr(),
                    L::load_first(from.as_ptr(), from.len()),
                    from.len(),
                );
                L::store_first(to.as_mut_ptr(), T::load_first::<L>(stored.as_ptr(), to.len()), to.len());
            }
        }
    }

    fn agrees<T: Number>(x: &[f32]) {
        for isa in Isa::ALL.map(|isa| isa.limit(Isa::detect())) {
            let mut y = vec![0.0; x.len()];
            round_trip::<T>(isa, x, &mut y);
            for (x, y) in x.iter().zip(&y) {
                assert_eq!(T::from_f32(*x).to_f32().to_bits(), y.to_bits(), "{x} on {}", isa.name());
            }
        }
    }

    #[test]
    fn vectors_round_like_single_numbers() {
        // Every exponent, with fractions at, below and above ties, both signs, and NaN.
        let fractions =
            [0, 1, 0xfff, 0x1000, 0x1001, 0x2fff, 0x3000, 0x7fff, 0x8000, 0x8001, 0x1_8000, 0x7f_ffff];
        let bits = (0..256u32).flat_map(|e| fractions.map(|f| e << 23 | f)).flat_map(|b| [b, b | 1 << 31]);
        let x: Vec<f32> = bits.map(f32::from_bits).collect();
        agrees::<f32>(&x[..x.len() - 3]);
        agrees::<bf16>(&x[..x.len() - 3]);
        agrees::<f16>(&x[..x.len() - 3]);
    }
}
