//! Sixteen f32 in two registers of AVX2.
//!
//! No function here has a closure that calls an instruction: a closure is compiled without the features of the function
//! around it. Where it is not inlined (it was not in [`Lanes::scale2`]), each instruction in it becomes a call, and GELU
//! took 30 times as long.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{Lanes, ONE_NAN, ONE_NAN_BF16, Portable};

/// AVX2 and FMA: two registers per vector.
#[derive(Clone, Copy)]
pub struct Avx2;

// SAFETY of all bodies below: the trait's promise, that the processor has the instructions and the
// pointers are valid for the lanes touched.
impl Lanes for Avx2 {
    type V = [__m256; 2];
    type D = [__m256d; 2];
    #[inline(always)]
    unsafe fn splat(x: f32) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe { [_mm256_set1_ps(x); 2] }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe { [_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))] }
    }
    #[inline(always)]
    unsafe fn load_first(from: *const f32, count: usize) -> [__m256; 2] {
        // SAFETY: see above; masked lanes are not touched.
        unsafe {
            let [low, high] = first(count);
            [_mm256_maskload_ps(from, low), _mm256_maskload_ps(from.wrapping_add(8), high)]
        }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, x: [__m256; 2]) {
        // SAFETY: see above.
        unsafe {
            _mm256_storeu_ps(to, x[0]);
            _mm256_storeu_ps(to.add(8), x[1]);
        }
    }
    #[inline(always)]
    unsafe fn store_first(to: *mut f32, x: [__m256; 2], count: usize) {
        // SAFETY: see above; masked lanes are not touched.
        unsafe {
            let [low, high] = first(count);
            _mm256_maskstore_ps(to, low, x[0]);
            _mm256_maskstore_ps(to.wrapping_add(8), high, x[1]);
        }
    }
    #[inline(always)]
    unsafe fn store_half(to: *mut f32, x: [__m256; 2]) {
        // SAFETY: see above.
        unsafe { _mm256_storeu_ps(to, x[0]) };
    }
    #[inline(always)]
    unsafe fn keep_first(x: [__m256; 2], rest: [__m256; 2], count: usize) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe {
            let [low, high] = first(count);
            [
                _mm256_blendv_ps(rest[0], x[0], _mm256_castsi256_ps(low)),
                _mm256_blendv_ps(rest[1], x[1], _mm256_castsi256_ps(high)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn mul_add(a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
    }
    #[inline(always)]
    fn fused(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
    #[inline(always)]
    unsafe fn sub(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe { [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn mul(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn div(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe { [_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn max(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe { [_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn min(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe { [_mm256_min_ps(a[0], b[0]), _mm256_min_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn scale2(
        x: [__m256; 2],
        n: [__m256; 2],
        gate: [__m256; 2],
        gate_min: [__m256; 2],
    ) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe {
            [half_scale2(x[0], n[0], gate[0], gate_min[0]), half_scale2(x[1], n[1], gate[1], gate_min[1])]
        }
    }
    #[inline(always)]
    unsafe fn add(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn prefetch(address: *const f32) {
        // SAFETY: a hint, for any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
    }
    #[inline(always)]
    unsafe fn prefetch_l2(address: *const f32) {
        // SAFETY: a hint, for any address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) };
    }
    #[inline(always)]
    unsafe fn prefetch_write(address: *mut f32) {
        // SAFETY: as above; every processor with AVX2 has the instruction.
        unsafe { _mm_prefetch::<_MM_HINT_ET0>(address.cast_const().cast()) };
    }
    #[inline(always)]
    unsafe fn transpose(x: [[__m256; 2]; 16]) -> [[__m256; 2]; 16] {
        // SAFETY: see above.
        unsafe {
            let mut out = x;
            for half in 0..2 {
                let (mut low, mut high) = ([x[0][0]; 8], [x[0][0]; 8]);
                for i in 0..8 {
                    [low[i], high[i]] = x[8 * half + i];
                }
                let (low, high) = (transposed(low), transposed(high));
                for i in 0..8 {
                    out[i][half] = low[i];
                    out[8 + i][half] = high[i];
                }
            }
            out
        }
    }
    #[inline(always)]
    unsafe fn transpose_half(x: [[__m256; 2]; 8]) -> [[__m256; 2]; 16] {
        // SAFETY: see above.
        unsafe {
            let mut out = [[_mm256_setzero_ps(); 2]; 16];
            let (mut low, mut high) = ([x[0][0]; 8], [x[0][0]; 8]);
            for i in 0..8 {
                [low[i], high[i]] = x[i];
            }
            let (low, high) = (transposed(low), transposed(high));
            for i in 0..8 {
                out[i][0] = low[i];
                out[8 + i][0] = high[i];
            }
            out
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe { [half_load_bf16(from), half_load_bf16(from.add(8))] }
    }
    #[inline(always)]
    unsafe fn store_bf16(to: *mut bf16, x: [__m256; 2]) {
        // SAFETY: see above.
        unsafe { _mm256_storeu_si256(to.cast(), packed_bf16::<false>(x)) }
    }
    #[inline(always)]
    unsafe fn store_bf16_one_nan(to: *mut bf16, x: [__m256; 2]) {
        // SAFETY: see above.
        unsafe { _mm256_storeu_si256(to.cast(), packed_bf16::<true>(x)) }
    }
    #[inline(always)]
    unsafe fn one_nan(x: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe {
            let one = _mm256_set1_ps(ONE_NAN);
            [
                _mm256_blendv_ps(x[0], one, _mm256_cmp_ps::<_CMP_UNORD_Q>(x[0], x[0])),
                _mm256_blendv_ps(x[1], one, _mm256_cmp_ps::<_CMP_UNORD_Q>(x[1], x[1])),
            ]
        }
    }
    #[inline(always)]
    unsafe fn load_f64(from: *const f64) -> [__m256d; 2] {
        // SAFETY: see above.
        unsafe { [_mm256_loadu_pd(from), _mm256_loadu_pd(from.add(4))] }
    }
    #[inline(always)]
    unsafe fn load_first_f64(from: *const f64, count: usize) -> [__m256d; 2] {
        // SAFETY: see above.
        unsafe { Avx2::load_f64(Portable::load_first_f64(from, count).as_ptr()) }
    }
    #[inline(always)]
    unsafe fn store_f64(to: *mut f64, x: [__m256d; 2]) {
        // SAFETY: see above.
        unsafe {
            _mm256_storeu_pd(to, x[0]);
            _mm256_storeu_pd(to.add(4), x[1]);
        }
    }
    #[inline(always)]
    unsafe fn store_first_f64(to: *mut f64, x: [__m256d; 2], count: usize) {
        let mut all = [0f64; 8];
        // SAFETY: see above.
        unsafe {
            Avx2::store_f64(all.as_mut_ptr(), x);
            Portable::store_first_f64(to, all, count);
        }
    }
    #[inline(always)]
    unsafe fn add_f64(a: [__m256d; 2], b: [__m256d; 2]) -> [__m256d; 2] {
        // SAFETY: see above.
        unsafe { [_mm256_add_pd(a[0], b[0]), _mm256_add_pd(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn pair_bf16(low: [__m256; 2], high: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe { [half_pair_bf16(low[0], high[0]), half_pair_bf16(low[1], high[1])] }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> [__m256; 2] {
        // SAFETY: see above; `Isa::Avx2` has F16C.
        unsafe {
            [
                _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(from.add(8).cast())),
            ]
        }
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe {
            [
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast()))),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.add(8).cast()))),
            ]
        }
    }
    #[inline(always)]
    unsafe fn look_up(table: &[f32; 16], codes: *const u8) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe {
            let each = codes_of_bytes(codes);
            [
                half_look_up(table, _mm256_cvtepu8_epi32(each)),
                half_look_up(table, _mm256_cvtepu8_epi32(_mm_srli_si128::<8>(each))),
            ]
        }
    }
    #[inline(always)]
    unsafe fn store_f16(to: *mut f16, x: [__m256; 2]) {
        // SAFETY: see above; `Isa::Avx2` has F16C.
        unsafe {
            _mm_storeu_si128(to.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x[0]));
            _mm_storeu_si128(to.add(8).cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x[1]));
        }
    }
}

/// The lanes as bf16, each in the lower half of 32 bits. A NaN keeps its bits, or with `ONE_NAN` becomes `bf16::NAN`.
///
/// # Safety
/// The processor has the instructions.
#[inline(always)]
unsafe fn half_rounded_to_bf16<const ONE_NAN: bool>(x: __m256) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let bits = _mm256_castps_si256(x);
        let upper = _mm256_srli_epi32::<16>(bits);
        let odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
        let near = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
        let nan = if ONE_NAN {
            _mm256_set1_epi32(ONE_NAN_BF16)
        } else {
            _mm256_or_si256(upper, _mm256_set1_epi32(0x40))
        };
        let is_nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
        _mm256_blendv_epi8(_mm256_srli_epi32::<16>(near), nan, is_nan)
    }
}

/// 16 lanes as bf16; NaN as in [`half_rounded_to_bf16`].
///
/// # Safety
/// The processor has the instructions.
#[inline(always)]
unsafe fn packed_bf16<const ONE_NAN: bool>(x: [__m256; 2]) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let (low, high) = (half_rounded_to_bf16::<ONE_NAN>(x[0]), half_rounded_to_bf16::<ONE_NAN>(x[1]));
        // Packing works on 128-bit halves, so the quarters come out as 0, 2, 1, 3.
        _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(low, high))
    }
}

/// Masks whose first `count` of 16 lanes are set.
///
/// # Safety
/// The processor has the instructions.
#[inline(always)]
unsafe fn first(count: usize) -> [__m256i; 2] {
    static MASK: [i32; 32] = {
        let mut mask = [0; 32];
        let mut i = 0;
        while i < 16 {
            mask[i] = -1;
            i += 1;
        }
        mask
    };
    let count = count.min(16);
    // SAFETY: the caller's promise; 16 numbers from number 16 - count on lie in the table.
    unsafe {
        let from = MASK.as_ptr().add(16 - count);
        [_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(8).cast())]
    }
}

/// 2 to the n.
///
/// # Safety
/// The processor has the instructions.
#[inline(always)]
unsafe fn half_power(n: __m256i) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(n, _mm256_set1_epi32(127)))) }
}

/// [`Lanes::scale2`] of one register.
///
/// # Safety
/// The processor has the instructions.
#[inline(always)]
unsafe fn half_scale2(x: __m256, n: __m256, gate: __m256, gate_min: __m256) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe {
        // 2^n in two factors, because 2^128 alone overflows.
        let n = _mm256_cvtps_epi32(n);
        let low = _mm256_srai_epi32::<1>(n);
        let y = _mm256_mul_ps(_mm256_mul_ps(x, half_power(low)), half_power(_mm256_sub_epi32(n, low)));
        _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(gate, gate_min), y)
    }
}

/// Lane i of vector j becomes lane j of vector i: three rounds of 8 shuffles, of which the last exchanges halves.
///
/// # Safety
/// The processor has the instructions.
#[inline(always)]
unsafe fn transposed(x: [__m256; 8]) -> [__m256; 8] {
    // SAFETY: the caller's promise.
    unsafe {
        let mut a = x;
        for i in 0..4 {
            a[2 * i] = _mm256_unpacklo_ps(x[2 * i], x[2 * i + 1]);
            a[2 * i + 1] = _mm256_unpackhi_ps(x[2 * i], x[2 * i + 1]);
        }
        // Vector 4q + l: lanes l and l + 4 of rows 4q .. 4q + 3.
        let mut b = a;
        for q in 0..2 {
            let [lo, hi] = [_mm256_castps_pd(a[4 * q]), _mm256_castps_pd(a[4 * q + 1])];
            let [lo2, hi2] = [_mm256_castps_pd(a[4 * q + 2]), _mm256_castps_pd(a[4 * q + 3])];
            b[4 * q] = _mm256_castpd_ps(_mm256_unpacklo_pd(lo, lo2));
            b[4 * q + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(lo, lo2));
            b[4 * q + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(hi, hi2));
            b[4 * q + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(hi, hi2));
        }
        let mut out = b;
        for l in 0..4 {
            out[l] = _mm256_permute2f128_ps::<0x20>(b[l], b[4 + l]);
            out[4 + l] = _mm256_permute2f128_ps::<0x31>(b[l], b[4 + l]);
        }
        out
    }
}

/// 8 bf16, widened.
///
/// # Safety
/// The processor has the instructions; 8 numbers are valid to read.
#[inline(always)]
unsafe fn half_load_bf16(from: *const bf16) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe {
        let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
    }
}

/// 16 codes of 4 bits, a byte each, of 8 bytes with two, the first in the high half.
///
/// # Safety
/// The processor has the instructions, and there are 8 bytes.
#[inline(always)]
pub(super) unsafe fn codes_of_bytes(codes: *const u8) -> __m128i {
    // SAFETY: the caller's promise.
    unsafe {
        let pairs = _mm_cvtepu8_epi16(_mm_loadl_epi64(codes.cast()));
        let second = _mm_slli_epi16::<8>(_mm_and_si128(pairs, _mm_set1_epi16(15)));
        _mm_or_si128(_mm_srli_epi16::<4>(pairs), second)
    }
}

/// Numbers of a table of 16 by 8 codes.
///
/// # Safety
/// The processor has the instructions.
#[inline(always)]
unsafe fn half_look_up(table: &[f32; 16], codes: __m256i) -> __m256 {
    // SAFETY: the caller's promise. A permutation reads the lower 3 bits of a code, and the fourth chooses the half of the table.
    unsafe {
        let low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table.as_ptr()), codes);
        let high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table.as_ptr().add(8)), codes);
        _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32::<28>(codes)))
    }
}

/// [`Lanes::pair_bf16`] of one register.
///
/// # Safety
/// The processor has the instructions.
#[inline(always)]
unsafe fn half_pair_bf16(low: __m256, high: __m256) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe {
        let low = _mm256_srli_epi32::<16>(_mm256_castps_si256(low));
        // Lower halves of `low`, upper halves of `high`.
        _mm256_castsi256_ps(_mm256_blend_epi16::<0xaa>(low, _mm256_castps_si256(high)))
    }
}
