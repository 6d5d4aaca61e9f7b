//! Sixteen f32 in one register of AVX-512.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::avx2::codes_of_bytes;
use super::{Lanes, ONE_NAN, ONE_NAN_BF16};

/// AVX-512: one register per vector.
#[derive(Clone, Copy)]
pub struct Avx512;

#[inline(always)]
fn mask(count: usize) -> __mmask16 {
    ((1u32 << count.min(16)) - 1) as __mmask16
}

/// As [`half_rounded_to_bf16`], for 16 lanes in one register.
///
/// # Safety
/// The processor has the instructions.
#[inline(always)]
unsafe fn rounded_to_bf16<const ONE_NAN: bool>(x: __m512) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe {
        let bits = _mm512_castps_si512(x);
        let upper = _mm512_srli_epi32::<16>(bits);
        let odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
        let near = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
        let nan = if ONE_NAN {
            _mm512_set1_epi32(ONE_NAN_BF16)
        } else {
            _mm512_or_si512(upper, _mm512_set1_epi32(0x40))
        };
        let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
        _mm512_mask_blend_epi32(is_nan, _mm512_srli_epi32::<16>(near), nan)
    }
}

impl Lanes for Avx512 {
    type V = __m512;
    type D = __m512d;
    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn load_first(from: *const f32, count: usize) -> __m512 {
        // SAFETY: see above; masked lanes are not touched.
        unsafe { _mm512_maskz_loadu_ps(mask(count), from) }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, x: __m512) {
        // SAFETY: see above.
        unsafe { _mm512_storeu_ps(to, x) };
    }
    #[inline(always)]
    unsafe fn store_first(to: *mut f32, x: __m512, count: usize) {
        // SAFETY: see above; masked lanes are not touched.
        unsafe { _mm512_mask_storeu_ps(to, mask(count), x) };
    }
    #[inline(always)]
    unsafe fn keep_first(x: __m512, rest: __m512, count: usize) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_mask_mov_ps(rest, mask(count), x) }
    }
    #[inline(always)]
    unsafe fn mul_add(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn fused(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn min(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn scale2(x: __m512, n: __m512, gate: __m512, gate_min: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(gate, gate_min), x, n) }
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_add_ps(a, b) }
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
    unsafe fn load_bf16(from: *const bf16) -> __m512 {
        // SAFETY: see above.
        unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        }
    }
    #[inline(always)]
    unsafe fn load_first_bf16(from: *const bf16, count: usize) -> __m512 {
        // SAFETY: see above; masked lanes are not touched.
        unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask(count), from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(to: *mut bf16, x: __m512) {
        // SAFETY: see above.
        unsafe { _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(rounded_to_bf16::<false>(x))) }
    }
    #[inline(always)]
    unsafe fn store_bf16_one_nan(to: *mut bf16, x: __m512) {
        // SAFETY: see above.
        unsafe { _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(rounded_to_bf16::<true>(x))) }
    }
    #[inline(always)]
    unsafe fn one_nan(x: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x), _mm512_set1_ps(ONE_NAN)) }
    }
    #[inline(always)]
    unsafe fn load_f64(from: *const f64) -> __m512d {
        // SAFETY: see above.
        unsafe { _mm512_loadu_pd(from) }
    }
    #[inline(always)]
    unsafe fn load_first_f64(from: *const f64, count: usize) -> __m512d {
        // SAFETY: see above; masked lanes are not touched.
        unsafe { _mm512_maskz_loadu_pd(mask(count.min(8)) as __mmask8, from) }
    }
    #[inline(always)]
    unsafe fn store_f64(to: *mut f64, x: __m512d) {
        // SAFETY: see above.
        unsafe { _mm512_storeu_pd(to, x) };
    }
    #[inline(always)]
    unsafe fn store_first_f64(to: *mut f64, x: __m512d, count: usize) {
        // SAFETY: see above; masked lanes are not touched.
        unsafe { _mm512_mask_storeu_pd(to, mask(count.min(8)) as __mmask8, x) };
    }
    #[inline(always)]
    unsafe fn add_f64(a: __m512d, b: __m512d) -> __m512d {
        // SAFETY: see above.
        unsafe { _mm512_add_pd(a, b) }
    }
    #[inline(always)]
    unsafe fn pair_bf16(low: __m512, high: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe {
            let low = _mm512_srli_epi32::<16>(_mm512_castps_si512(low));
            // Lower halves of `low`, upper halves of `high`.
            let pairs = _mm512_mask_blend_epi16(0xaaaa_aaaa, low, _mm512_castps_si512(high));
            _mm512_castsi512_ps(pairs)
        }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn look_up(table: &[f32; 16], codes: *const u8) -> __m512 {
        // SAFETY: see above.
        unsafe {
            let each = _mm512_cvtepu8_epi32(codes_of_bytes(codes));
            _mm512_permutexvar_ps(each, _mm512_loadu_ps(table.as_ptr()))
        }
    }
    #[inline(always)]
    unsafe fn load_first_f16(from: *const f16, count: usize) -> __m512 {
        // SAFETY: see above; masked lanes are not touched.
        unsafe { _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask(count), from.cast())) }
    }
    #[inline(always)]
    unsafe fn store_f16(to: *mut f16, x: __m512) {
        // SAFETY: see above.
        unsafe { _mm256_storeu_si256(to.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x)) }
    }
    /// Four rounds of 16 shuffles: pairs of lanes, pairs of pairs, then 128-bit quarters twice.
    #[inline(always)]
    unsafe fn transpose(x: [__m512; 16]) -> [__m512; 16] {
        // SAFETY: see above.
        unsafe {
            let mut a = x;
            for i in 0..8 {
                a[2 * i] = _mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]);
                a[2 * i + 1] = _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]);
            }
            // Vector 4q + l: lanes l, l + 4, l + 8, l + 12 of rows 4q .. 4q + 3, by quarters.
            let mut b = a;
            let wide = |v: __m512| _mm512_castps_pd(v);
            for q in 0..4 {
                let (lo, hi) = (a[4 * q], a[4 * q + 1]);
                let (lo2, hi2) = (a[4 * q + 2], a[4 * q + 3]);
                b[4 * q] = _mm512_castpd_ps(_mm512_unpacklo_pd(wide(lo), wide(lo2)));
                b[4 * q + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(wide(lo), wide(lo2)));
                b[4 * q + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(wide(hi), wide(hi2)));
                b[4 * q + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(wide(hi), wide(hi2)));
            }
            let mut out = b;
            for l in 0..4 {
                let low01 = _mm512_shuffle_f32x4::<0x88>(b[l], b[4 + l]);
                let high01 = _mm512_shuffle_f32x4::<0xdd>(b[l], b[4 + l]);
                let low23 = _mm512_shuffle_f32x4::<0x88>(b[8 + l], b[12 + l]);
                let high23 = _mm512_shuffle_f32x4::<0xdd>(b[8 + l], b[12 + l]);
                out[l] = _mm512_shuffle_f32x4::<0x88>(low01, low23);
                out[8 + l] = _mm512_shuffle_f32x4::<0xdd>(low01, low23);
                out[4 + l] = _mm512_shuffle_f32x4::<0x88>(high01, high23);
                out[12 + l] = _mm512_shuffle_f32x4::<0xdd>(high01, high23);
            }
            out
        }
    }
}
