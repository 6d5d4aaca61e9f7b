//! Sixteen f32 as one value, on every instruction set.
//!
//! For the loops that must live in registers (matrix products): here the vectors are spelled out, where
//! [`simd`](super::simd) leaves them to the compiler. Functions are `#[inline(always)]` and unsafe, because
//! they must be inlined into a function that has the instruction set's features; calling them elsewhere is
//! undefined behaviour on a processor without these.

/// Vectors of 16 lanes.
///
/// # Safety
/// All unsafe functions: the processor has the instruction set of the implementor. Pointers are valid for the
/// lanes read or written.
pub(crate) trait Lanes: Copy + 'static {
    /// The vector.
    type V: Copy;
    /// `a * b + c` of single numbers, in one rounding where the processor can.
    fn fused(a: f32, b: f32, c: f32) -> f32;
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
    /// The first `count` lanes of `x`, the others of `rest`.
    unsafe fn keep_first(x: Self::V, rest: Self::V, count: usize) -> Self::V;
    /// `a * b + c`.
    unsafe fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `a + b`.
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    /// `a - b`.
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b`.
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    /// `a` where `a > b`, else `b`: `b` also where either is not a number.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// `a` where `a < b`, else `b`: `b` also where either is not a number.
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    /// `x * 2^n` for whole n from -126 to 128; 0 where `gate < least`.
    unsafe fn scale2(x: Self::V, n: Self::V, gate: Self::V, least: Self::V) -> Self::V;
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
    unsafe fn keep_first(x: [f32; 16], rest: [f32; 16], count: usize) -> [f32; 16] {
        std::array::from_fn(|i| if i < count { x[i] } else { rest[i] })
    }
    #[inline(always)]
    unsafe fn mul_add(a: [f32; 16], b: [f32; 16], c: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    fn fused(a: f32, b: f32, c: f32) -> f32 {
        a * b + c
    }
    #[inline(always)]
    unsafe fn sub(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|i| a[i] - b[i])
    }
    #[inline(always)]
    unsafe fn mul(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|i| a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn max(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn min(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn scale2(x: [f32; 16], n: [f32; 16], gate: [f32; 16], least: [f32; 16]) -> [f32; 16] {
        // 2^n in two halves, because 2^128 alone is not a number.
        let power = |n: i32| f32::from_bits((n.wrapping_add(127) as u32) << 23);
        std::array::from_fn(|i| {
            let n = n[i] as i32;
            let y = x[i] * power(n >> 1) * power(n - (n >> 1));
            if gate[i] < least[i] { 0.0 } else { y }
        })
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
                let power = |n| _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(n, _mm256_set1_epi32(127))));
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
}

/// Folds a row: `fold_row!(L, len, start, |state, at, count| next, join)`. `next` takes in the `count` numbers from `at` on,
/// in the first lanes; number i goes to lane i mod 64, that is to four vectors in turn, which hide the latency of an
/// addition and are joined at the end.
///
/// A macro, because the body of a closure would be compiled without the features of the function around it, and be slow where
/// it is not inlined. To be used inside `unsafe`, compiled for `L`.
macro_rules! fold_row {
    ($L:ty, $len:expr, $start:expr, |$state:ident, $at:ident, $count:ident| $next:expr, $join:path) => {{
        let len: usize = $len;
        let (mut a, mut b) = (<$L>::splat($start), <$L>::splat($start));
        let (mut c, mut d) = (a, b);
        let mut base = 0;
        macro_rules! take {
            ($chain:ident, $offset:expr, $n:expr) => {{
                let ($state, $at, $count) = ($chain, base + $offset, $n);
                $chain = $next;
            }};
        }
        while base + 64 <= len {
            take!(a, 0, 16);
            take!(b, 16, 16);
            take!(c, 32, 16);
            take!(d, 48, 16);
            base += 64;
        }
        if base < len {
            take!(a, 0, (len - base).min(16));
        }
        if base + 16 < len {
            take!(b, 16, (len - base - 16).min(16));
        }
        if base + 32 < len {
            take!(c, 32, (len - base - 32).min(16));
        }
        if base + 48 < len {
            take!(d, 48, (len - base - 48).min(16));
        }
        $join($join(a, b), $join(c, d))
    }};
}
pub(crate) use fold_row;

/// Sum over a row: `sum_row!(L, len, |at, count| value)`; lanes of the value from `count` on do not matter.
/// As [`fold_row!`].
macro_rules! sum_row {
    ($L:ty, $len:expr, |$at:ident, $count:ident| $value:expr) => {
        $crate::cpu::lanes::sum::<$L>($crate::cpu::lanes::fold_row!(
            $L,
            $len,
            0.0,
            |state, $at, $count| {
                let x = $value;
                <$L>::add(state, if $count == 16 { x } else { <$L>::keep_first(x, <$L>::splat(0.0), $count) })
            },
            <$L>::add
        ))
    };
}
pub(crate) use sum_row;

/// Largest number of a row; minus infinity for an empty one.
///
/// # Safety
/// Compiled for `L`.
#[inline(always)]
pub(crate) unsafe fn max_row<L: Lanes>(row: &[f32]) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        let folded = fold_row!(
            L,
            row.len(),
            f32::NEG_INFINITY,
            |state, at, count| {
                let x = load::<L>(row, at, count);
                L::max(if count == 16 { x } else { L::keep_first(x, L::splat(f32::NEG_INFINITY), count) }, state)
            },
            L::max
        );
        largest::<L>(folded)
    }
}

/// The `count` numbers from `at` on, in the first lanes.
///
/// # Safety
/// Compiled for `L`; the numbers are in the row.
#[inline(always)]
pub(crate) unsafe fn load<L: Lanes>(row: &[f32], at: usize, count: usize) -> L::V {
    debug_assert!(at + count <= row.len());
    // SAFETY: the caller's promise.
    unsafe {
        let from = row.as_ptr().add(at);
        if count == 16 { L::load(from) } else { L::load_first(from, count) }
    }
}

/// The first `count` lanes to the numbers from `at` on.
///
/// # Safety
/// Compiled for `L`; the numbers are in the row.
#[inline(always)]
pub(crate) unsafe fn store<L: Lanes>(row: &mut [f32], at: usize, x: L::V, count: usize) {
    debug_assert!(at + count <= row.len());
    // SAFETY: the caller's promise.
    unsafe {
        let to = row.as_mut_ptr().add(at);
        if count == 16 { L::store(to, x) } else { L::store_first(to, x, count) }
    }
}

/// Sum of the lanes along a balanced tree.
///
/// # Safety
/// Compiled for `L`.
#[inline(always)]
pub(crate) unsafe fn sum<L: Lanes>(x: L::V) -> f32 {
    let mut lanes = [0f32; 16];
    // SAFETY: the caller's promise; 16 numbers.
    unsafe { L::store(lanes.as_mut_ptr(), x) };
    for width in [8, 4, 2, 1] {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
    }
    lanes[0]
}

/// Largest lane.
///
/// # Safety
/// Compiled for `L`.
#[inline(always)]
pub(crate) unsafe fn largest<L: Lanes>(x: L::V) -> f32 {
    let mut lanes = [0f32; 16];
    // SAFETY: the caller's promise; 16 numbers.
    unsafe { L::store(lanes.as_mut_ptr(), x) };
    lanes.into_iter().fold(f32::NEG_INFINITY, |a, b| if a > b { a } else { b })
}

/// e to the x, lane by lane; accuracy and ends as of [`simd::exp`](super::simd::exp).
///
/// # Safety
/// Compiled for `L`.
#[inline(always)]
pub(crate) unsafe fn exp<L: Lanes>(x: L::V) -> L::V {
    // SAFETY: the caller's promise.
    unsafe {
        let splat = |x: f32| L::splat(x);
        // 1.5 * 2^23: adding it rounds to a whole number.
        let round = splat(12_582_912.0);
        // The bounds come first, so that what is not a number stays so.
        let clamped = L::max(splat(-88.0), L::min(splat(89.0), x));
        let n = L::sub(L::mul_add(clamped, splat(std::f32::consts::LOG2_E), round), round);
        let r = L::mul_add(n, splat(-0.693_359_4), clamped);
        let r = L::mul_add(n, splat(2.121_944_4e-4), r);
        let mut p = splat(1.987_569_1e-4);
        for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
            p = L::mul_add(p, r, splat(c));
        }
        let y = L::add(L::mul_add(p, L::mul(r, r), r), splat(1.0));
        L::scale2(y, L::max(splat(-126.0), n), x, splat(-87.336_54))
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
