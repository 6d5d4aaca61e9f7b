//! Sixteen f32 on x86-64: two registers of AVX2, one of AVX-512.

use std::arch::x86_64::*;

use super::{Lanes, Portable};

/// AVX2 and FMA: two halves.
#[derive(Clone, Copy)]
pub(crate) struct Avx2;

// SAFETY of all bodies below: the trait's promise, that the processor has the instructions and the
// pointers are valid for the lanes touched.
impl Lanes for Avx2 {
    type V = [__m256; 2];
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
    unsafe fn scale2(x: [__m256; 2], n: [__m256; 2], gate: [__m256; 2], least: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe {
            let power =
                |n| _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(n, _mm256_set1_epi32(127))));
            let half = |x, n, gate, least| {
                // 2^n in two halves, because 2^128 alone is not a number.
                let n = _mm256_cvtps_epi32(n);
                let low = _mm256_srai_epi32::<1>(n);
                let y = _mm256_mul_ps(_mm256_mul_ps(x, power(low)), power(_mm256_sub_epi32(n, low)));
                _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(gate, least), y)
            };
            [half(x[0], n[0], gate[0], least[0]), half(x[1], n[1], gate[1], least[1])]
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
}

/// AVX-512: one register.
#[derive(Clone, Copy)]
pub(crate) struct Avx512;

#[inline(always)]
fn mask(count: usize) -> __mmask16 {
    ((1u32 << count.min(16)) - 1) as __mmask16
}

impl Lanes for Avx512 {
    type V = __m512;
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
    unsafe fn scale2(x: __m512, n: __m512, gate: __m512, least: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(gate, least), x, n) }
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
