//! Sixteen f32 on x86-64: two registers of AVX2, one of AVX-512.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{Lanes, ONE_NAN, Portable};

/// The upper half of [`ONE_NAN`]: `bf16::NAN`.
const ONE_NAN_BF16: i32 = 0x7fc0;

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
        // SAFETY: see above.
        unsafe { Avx2::load(Portable::load_first(from, count).as_ptr()) }
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
        let mut all = [0f32; 16];
        // SAFETY: see above.
        unsafe {
            Avx2::store(all.as_mut_ptr(), x);
            Portable::store_first(to, all, count);
        }
    }
    #[inline(always)]
    unsafe fn keep_first(x: [__m256; 2], rest: [__m256; 2], count: usize) -> [__m256; 2] {
        // SAFETY: two times 8 numbers are 16 numbers.
        unsafe {
            let [x, rest] = [x, rest].map(|x| std::mem::transmute::<[__m256; 2], [f32; 16]>(x));
            std::mem::transmute(Portable::keep_first(x, rest, count))
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
            let power =
                |n| _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(n, _mm256_set1_epi32(127))));
            let half = |x, n, gate, gate_min| {
                // 2^n in two factors, because 2^128 alone overflows.
                let n = _mm256_cvtps_epi32(n);
                let low = _mm256_srai_epi32::<1>(n);
                let y = _mm256_mul_ps(_mm256_mul_ps(x, power(low)), power(_mm256_sub_epi32(n, low)));
                _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(gate, gate_min), y)
            };
            [half(x[0], n[0], gate[0], gate_min[0]), half(x[1], n[1], gate[1], gate_min[1])]
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
    unsafe fn prefetch_write(address: *mut f32) {
        // SAFETY: as above; every processor with AVX2 has the instruction.
        unsafe { _mm_prefetch::<_MM_HINT_ET0>(address.cast_const().cast()) };
    }
    #[inline(always)]
    unsafe fn transpose(x: [[__m256; 2]; 16]) -> [[__m256; 2]; 16] {
        // SAFETY: sixteen pairs of 8 numbers are sixteen times 16 numbers.
        unsafe {
            std::mem::transmute(Portable::transpose(
                std::mem::transmute::<[[__m256; 2]; 16], [[f32; 16]; 16]>(x),
            ))
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe {
            let half = |from: *const bf16| {
                let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
            };
            [half(from), half(from.add(8))]
        }
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
        // SAFETY: two times 8 numbers are 16 numbers.
        unsafe {
            let [low, high] = [low, high].map(|x| std::mem::transmute::<[__m256; 2], [f32; 16]>(x));
            std::mem::transmute(Portable::pair_bf16(low, high))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> [__m256; 2] {
        // SAFETY: see above; `Isa::Avx2` has F16C.
        unsafe {
            let half = |from: *const f16| _mm256_cvtph_ps(_mm_loadu_si128(from.cast()));
            [half(from), half(from.add(8))]
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

/// AVX-512: one register per vector.
#[derive(Clone, Copy)]
pub struct Avx512;

#[inline(always)]
fn mask(count: usize) -> __mmask16 {
    ((1u32 << count.min(16)) - 1) as __mmask16
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
