//! Elements as they lie in memory, and the registers in which they are added: f32 and f64, one or several.
//!
//! A register loads and stores its own type as it is, and bf16 and f16 through f32: widening is exact,
//! rounding is to nearest even. A single number goes through the crate `half`, which is thereby what the
//! vectors are held against.

use half::{bf16, f16};

/// One or several neighbouring numbers of f32 or f64.
pub(super) trait Plus: Copy {
    fn plus(self, other: Self) -> Self;
}

/// Numbers that lie in memory as `E`.
pub(super) trait Lanes<E>: Plus {
    /// # Safety
    /// Readable from the pointer on; the processor has the instructions.
    unsafe fn load(from: *const E) -> Self;
    /// # Safety
    /// Writable from the pointer on; the processor has the instructions.
    unsafe fn store(self, to: *mut E);
}

/// The registers of an instruction set.
pub(super) trait Registers {
    /// Numbers of f32.
    type F32: Lanes<f32> + Lanes<bf16> + Lanes<f16>;
    /// Numbers of f64.
    type F64: Lanes<f64>;
}

/// A type of elements that are summed.
pub(super) trait Number: Copy {
    /// What they are added in.
    type Sum: Wide;
    /// # Safety
    /// As [`Lanes::load`].
    unsafe fn load<R: Registers>(from: *const Self) -> <Self::Sum as Wide>::Register<R>;
    /// # Safety
    /// As [`Lanes::store`].
    unsafe fn store<R: Registers>(sum: <Self::Sum as Wide>::Register<R>, to: *mut Self);
}

/// A type that additions are made in.
pub(super) trait Wide: Number<Sum = Self> + Default {
    type Register<R: Registers>: Plus;
}

impl Wide for f32 {
    type Register<R: Registers> = R::F32;
}
impl Wide for f64 {
    type Register<R: Registers> = R::F64;
}

macro_rules! number {
    ($element:ty, $sum:ty, $register:ident) => {
        impl Number for $element {
            type Sum = $sum;
            #[inline(always)]
            unsafe fn load<R: Registers>(from: *const Self) -> R::$register {
                // SAFETY: passed on.
                unsafe { Lanes::<Self>::load(from) }
            }
            #[inline(always)]
            unsafe fn store<R: Registers>(sum: R::$register, to: *mut Self) {
                // SAFETY: passed on.
                unsafe { Lanes::<Self>::store(sum, to) }
            }
        }
    };
}
number!(f64, f64, F64);
number!(f32, f32, F32);
number!(bf16, f32, F32);
number!(f16, f32, F32);

/// One number at a time: any processor.
pub(super) struct Single;

impl Registers for Single {
    type F32 = f32;
    type F64 = f64;
}

macro_rules! single {
    ($wide:ty) => {
        impl Plus for $wide {
            #[inline(always)]
            fn plus(self, other: $wide) -> $wide {
                self + other
            }
        }
        impl Lanes<$wide> for $wide {
            #[inline(always)]
            unsafe fn load(from: *const $wide) -> $wide {
                // SAFETY: passed on.
                unsafe { *from }
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut $wide) {
                // SAFETY: passed on.
                unsafe { *to = self }
            }
        }
    };
}
single!(f32);
single!(f64);

macro_rules! single_half {
    ($half:ident) => {
        impl Lanes<$half> for f32 {
            #[inline(always)]
            unsafe fn load(from: *const $half) -> f32 {
                // SAFETY: passed on.
                unsafe { *from }.to_f32()
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut $half) {
                let rounded = if self.is_nan() { $half::NAN } else { $half::from_f32(self) };
                // SAFETY: passed on.
                unsafe { *to = rounded }
            }
        }
    };
}
single_half!(bf16);
single_half!(f16);

#[cfg(target_arch = "x86_64")]
pub(super) mod x86 {
    use std::arch::x86_64::*;

    use super::{Lanes, Plus, Registers, bf16, f16};

    /// 32 bytes: AVX2 and F16C.
    pub(in super::super) struct Avx2;

    impl Registers for Avx2 {
        type F32 = __m256;
        type F64 = __m256d;
    }

    /// 64 bytes: AVX-512 F.
    pub(in super::super) struct Avx512;

    impl Registers for Avx512 {
        type F32 = __m512;
        type F64 = __m512d;
    }

    macro_rules! vector {
        ($vector:ident of $wide:ty: $load:ident, $store:ident, $add:ident) => {
            impl Plus for $vector {
                #[inline(always)]
                fn plus(self, other: Self) -> Self {
                    // SAFETY: a value of this type was loaded, so the processor has the instructions.
                    unsafe { $add(self, other) }
                }
            }
            impl Lanes<$wide> for $vector {
                #[inline(always)]
                unsafe fn load(from: *const $wide) -> Self {
                    // SAFETY: passed on.
                    unsafe { $load(from) }
                }
                #[inline(always)]
                unsafe fn store(self, to: *mut $wide) {
                    // SAFETY: passed on.
                    unsafe { $store(to, self) }
                }
            }
        };
    }
    vector!(__m256 of f32: _mm256_loadu_ps, _mm256_storeu_ps, _mm256_add_ps);
    vector!(__m512 of f32: _mm512_loadu_ps, _mm512_storeu_ps, _mm512_add_ps);
    vector!(__m256d of f64: _mm256_loadu_pd, _mm256_storeu_pd, _mm256_add_pd);
    vector!(__m512d of f64: _mm512_loadu_pd, _mm512_storeu_pd, _mm512_add_pd);

    /// The one NaN that is rounded, because which of two an addition keeps is the processor's choice. Its upper
    /// half is `bf16::NAN`, and conversion to f16 gives `f16::NAN`.
    const NAN: f32 = f32::from_bits(0x7fc0_0000);

    /// # Safety
    /// The processor has the instructions.
    #[inline(always)]
    unsafe fn one_nan_256(x: __m256) -> __m256 {
        // SAFETY: passed on.
        unsafe { _mm256_blendv_ps(x, _mm256_set1_ps(NAN), _mm256_cmp_ps::<_CMP_UNORD_Q>(x, x)) }
    }

    /// # Safety
    /// The processor has the instructions.
    #[inline(always)]
    unsafe fn one_nan_512(x: __m512) -> __m512 {
        // SAFETY: passed on.
        unsafe { _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x), _mm512_set1_ps(NAN)) }
    }

    // Rounding adds half of the last place that stays, less one bit where that place is even, and drops the
    // rest. It carries into the exponent and up to infinity as it should, and leaves the NaN above a NaN.

    impl Lanes<bf16> for __m256 {
        #[inline(always)]
        unsafe fn load(from: *const bf16) -> __m256 {
            // SAFETY: passed on.
            unsafe {
                let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
            }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut bf16) {
            // SAFETY: passed on.
            unsafe {
                let bits = _mm256_castps_si256(one_nan_256(self));
                let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
                let near = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
                let upper = _mm256_srli_epi32::<16>(near);
                let (low, high) = (_mm256_castsi256_si128(upper), _mm256_extracti128_si256::<1>(upper));
                _mm_storeu_si128(to.cast(), _mm_packus_epi32(low, high));
            }
        }
    }

    impl Lanes<bf16> for __m512 {
        #[inline(always)]
        unsafe fn load(from: *const bf16) -> __m512 {
            // SAFETY: passed on.
            unsafe {
                let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
            }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut bf16) {
            // SAFETY: passed on.
            unsafe {
                let bits = _mm512_castps_si512(one_nan_512(self));
                let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
                let near = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
                _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(near)));
            }
        }
    }

    impl Lanes<f16> for __m256 {
        #[inline(always)]
        unsafe fn load(from: *const f16) -> __m256 {
            // SAFETY: passed on.
            unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f16) {
            // SAFETY: passed on.
            unsafe {
                let rounded = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(one_nan_256(self));
                _mm_storeu_si128(to.cast(), rounded);
            }
        }
    }

    impl Lanes<f16> for __m512 {
        #[inline(always)]
        unsafe fn load(from: *const f16) -> __m512 {
            // SAFETY: passed on.
            unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f16) {
            // SAFETY: passed on.
            unsafe {
                let rounded = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(one_nan_512(self));
                _mm256_storeu_si256(to.cast(), rounded);
            }
        }
    }
}
