//! Sixteen f32 as one value, on every instruction set.
//!
//! For the loops that must live in registers (matrix products): here the vectors are spelled out, where
//! [`simd`](super::simd) leaves them to the compiler. Functions are `#[inline(always)]` and unsafe, because
//! they must be inlined into a function that has the instruction set's features; calling them elsewhere is
//! undefined behaviour on a processor without these.

/// Vectors of 16 lanes.
///
/// # Safety
/// All functions: the processor has the instruction set of the implementor. Pointers are valid for the
/// lanes read or written.
pub(crate) trait Lanes: Copy + 'static {
    /// The vector.
    type V: Copy;
    /// All lanes `x`.
    unsafe fn splat(x: f32) -> Self::V;
    /// 16 numbers.
    unsafe fn load(from: *const f32) -> Self::V;
    /// The first `count` numbers, the other lanes 0.
    unsafe fn load_first(from: *const f32, count: usize) -> Self::V;
    /// 16 numbers.
    unsafe fn store(to: *mut f32, x: Self::V);
    /// The first `count` lanes.
    unsafe fn store_first(to: *mut f32, x: Self::V, count: usize);
    /// `a * b + c`.
    unsafe fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `a + b`.
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    /// Lane i of vector j becomes lane j of vector i.
    unsafe fn transpose(x: [Self::V; 16]) -> [Self::V; 16];
    /// Brings the cache line of an address nearer, to be read; the address need not be valid.
    #[inline(always)]
    unsafe fn prefetch(address: *const f32) {
        let _ = address;
    }
    /// The same, to be written.
    #[inline(always)]
    unsafe fn prefetch_write(address: *mut f32) {
        let _ = address;
    }
}

/// Any processor.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

impl Lanes for Portable {
    type V = [f32; 16];
    #[inline(always)]
    unsafe fn splat(x: f32) -> [f32; 16] {
        [x; 16]
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> [f32; 16] {
        // SAFETY: the caller's promise; any alignment.
        unsafe { from.cast::<[f32; 16]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_first(from: *const f32, count: usize) -> [f32; 16] {
        let mut x = [0.0; 16];
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(from, x.as_mut_ptr(), count.min(16)) };
        x
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, x: [f32; 16]) {
        // SAFETY: the caller's promise; any alignment.
        unsafe { to.cast::<[f32; 16]>().write_unaligned(x) };
    }
    #[inline(always)]
    unsafe fn store_first(to: *mut f32, x: [f32; 16], count: usize) {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(x.as_ptr(), to, count.min(16)) };
    }
    #[inline(always)]
    unsafe fn mul_add(a: [f32; 16], b: [f32; 16], c: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    unsafe fn add(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|i| a[i] + b[i])
    }
    #[inline(always)]
    unsafe fn transpose(x: [[f32; 16]; 16]) -> [[f32; 16]; 16] {
        std::array::from_fn(|i| std::array::from_fn(|j| x[j][i]))
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Lanes, Portable};
    use std::arch::x86_64::*;

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
        unsafe fn mul_add(a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
            // SAFETY: see above.
            unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
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
            unsafe { std::mem::transmute(Portable::transpose(std::mem::transmute(x))) }
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
        unsafe fn mul_add(a: __m512, b: __m512, c: __m512) -> __m512 {
            // SAFETY: see above.
            unsafe { _mm512_fmadd_ps(a, b, c) }
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
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A closure does not inherit features, so each instruction set has its function.
    fn transposed<L: Lanes>() {
        let x: [[f32; 16]; 16] = std::array::from_fn(|i| std::array::from_fn(|j| (i * 16 + j) as f32));
        // SAFETY: the caller checked the features; loads and stores are of whole rows.
        let y = unsafe {
            let y = L::transpose(x.map(|row| L::load(row.as_ptr())));
            let mut out = [[0f32; 16]; 16];
            out.iter_mut().zip(y).for_each(|(o, y)| L::store(o.as_mut_ptr(), y));
            out
        };
        for i in 0..16 {
            for j in 0..16 {
                assert_eq!(y[i][j], x[j][i], "{i} {j}");
            }
        }
    }

    #[test]
    fn transpose() {
        use crate::cpu::simd::Isa;
        transposed::<Portable>();
        #[cfg(target_arch = "x86_64")]
        {
            if Isa::detect() >= Isa::Avx2 {
                transposed::<Avx2>();
            }
            if Isa::detect() >= Isa::Avx512 {
                transposed::<Avx512>();
            }
        }
    }
}
