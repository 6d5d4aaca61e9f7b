//! Sixteen f32 as one value, on every instruction set.
//!
//! For the loops that must live in registers (matrix products): here the vectors are spelled out, where
//! [`vectorized!`](crate::vectorized) leaves them to the compiler. Functions are `#[inline(always)]` and unsafe, because
//! they must be inlined into a function that has the instruction set's features; calling them elsewhere is
//! undefined behaviour on a processor without these.

mod rows;
#[cfg(target_arch = "x86_64")]
mod x86;

use half::{bf16, f16};

pub use crate::{fold_row, sum_row};
pub use rows::{exp, exp2, largest, load, max_row, store, sum};
#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2, Avx512};

/// The NaN that [`Lanes::one_nan`] leaves.
const ONE_NAN: f32 = f32::from_bits(0x7fc0_0000);

/// A vector of 16 f32, with the instructions of one instruction set.
///
/// # Safety
/// This holds for every unsafe function here. The processor has the implementor's instruction set, and the caller is
/// compiled for it ([`vectorized!`](crate::vectorized)). Pointers are valid for the numbers read or written, at any
/// alignment.
#[expect(clippy::missing_safety_doc, reason = "one contract for all functions: the trait's Safety section")]
pub trait Lanes: Copy + 'static {
    /// The vector.
    type V: Copy;
    /// The vector of 8 f64.
    type D: Copy;
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
    /// `a / b`.
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// `a` where `a > b`, else `b`; `b` where either is NaN.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// `a` where `a < b`, else `b`; `b` where either is NaN.
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    /// `x * 2^n` for whole n from -126 to 128; 0 where `gate < gate_min`.
    unsafe fn scale2(x: Self::V, n: Self::V, gate: Self::V, gate_min: Self::V) -> Self::V;
    /// Lane i of vector j becomes lane j of vector i.
    unsafe fn transpose(x: [Self::V; 16]) -> [Self::V; 16];
    /// Loads 16 bf16, widened.
    unsafe fn load_bf16(from: *const bf16) -> Self::V;
    /// Stores 16 bf16, rounded to nearest even; NaN stays NaN.
    unsafe fn store_bf16(to: *mut bf16, x: Self::V);
    /// The same, but every NaN becomes `bf16::NAN`.
    unsafe fn store_bf16_one_nan(to: *mut bf16, x: Self::V);
    /// Loads 16 f16, widened.
    unsafe fn load_f16(from: *const f16) -> Self::V;
    /// Stores 16 f16, rounded to nearest even; infinite beyond 65,504.
    unsafe fn store_f16(to: *mut f16, x: Self::V);
    /// Replaces every NaN by 0x7fc0_0000, which rounds to `bf16::NAN` and `f16::NAN`.
    unsafe fn one_nan(x: Self::V) -> Self::V;
    /// 8 numbers of f64.
    unsafe fn load_f64(from: *const f64) -> Self::D;
    /// The first `count` numbers of f64, the other lanes 0.
    unsafe fn load_first_f64(from: *const f64, count: usize) -> Self::D;
    /// 8 numbers of f64.
    unsafe fn store_f64(to: *mut f64, x: Self::D);
    /// The first `count` lanes of f64.
    unsafe fn store_first_f64(to: *mut f64, x: Self::D, count: usize);
    /// `a + b` of f64.
    unsafe fn add_f64(a: Self::D, b: Self::D) -> Self::D;
    /// Packs lanes that hold widened bf16 as pairs: `low` into the lower half of each lane, `high` into the upper half.
    unsafe fn pair_bf16(low: Self::V, high: Self::V) -> Self::V;
    /// Prefetches a cache line for reading; the address need not be valid.
    #[inline(always)]
    unsafe fn prefetch(address: *const f32) {
        let _ = address;
    }
    /// Prefetches a cache line for writing.
    #[inline(always)]
    unsafe fn prefetch_write(address: *mut f32) {
        let _ = address;
    }
}

/// Any processor.
#[derive(Clone, Copy)]
pub struct Portable;

impl Lanes for Portable {
    type V = [f32; 16];
    type D = [f64; 8];
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
    unsafe fn div(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|i| a[i] / b[i])
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
    unsafe fn scale2(x: [f32; 16], n: [f32; 16], gate: [f32; 16], gate_min: [f32; 16]) -> [f32; 16] {
        // 2^n in two factors, because 2^128 alone overflows.
        let power = |n: i32| f32::from_bits((n.wrapping_add(127) as u32) << 23);
        std::array::from_fn(|i| {
            let n = n[i] as i32;
            let y = x[i] * power(n >> 1) * power(n - (n >> 1));
            if gate[i] < gate_min[i] { 0.0 } else { y }
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
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> [f32; 16] {
        // SAFETY: the caller's promise; any alignment.
        unsafe { from.cast::<[bf16; 16]>().read_unaligned() }.map(bf16::to_f32)
    }
    #[inline(always)]
    unsafe fn store_bf16(to: *mut bf16, x: [f32; 16]) {
        // SAFETY: the caller's promise; any alignment.
        unsafe { to.cast::<[bf16; 16]>().write_unaligned(x.map(bf16::from_f32)) };
    }
    #[inline(always)]
    unsafe fn store_bf16_one_nan(to: *mut bf16, x: [f32; 16]) {
        // SAFETY: the caller's promise.
        unsafe { Portable::store_bf16(to, Portable::one_nan(x)) };
    }
    #[inline(always)]
    unsafe fn one_nan(x: [f32; 16]) -> [f32; 16] {
        x.map(|x| if x.is_nan() { ONE_NAN } else { x })
    }
    #[inline(always)]
    unsafe fn load_f64(from: *const f64) -> [f64; 8] {
        // SAFETY: the caller's promise; any alignment.
        unsafe { from.cast::<[f64; 8]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_first_f64(from: *const f64, count: usize) -> [f64; 8] {
        let mut x = [0.0; 8];
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(from, x.as_mut_ptr(), count.min(8)) };
        x
    }
    #[inline(always)]
    unsafe fn store_f64(to: *mut f64, x: [f64; 8]) {
        // SAFETY: the caller's promise; any alignment.
        unsafe { to.cast::<[f64; 8]>().write_unaligned(x) };
    }
    #[inline(always)]
    unsafe fn store_first_f64(to: *mut f64, x: [f64; 8], count: usize) {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(x.as_ptr(), to, count.min(8)) };
    }
    #[inline(always)]
    unsafe fn add_f64(a: [f64; 8], b: [f64; 8]) -> [f64; 8] {
        std::array::from_fn(|i| a[i] + b[i])
    }
    #[inline(always)]
    unsafe fn pair_bf16(low: [f32; 16], high: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|i| f32::from_bits(low[i].to_bits() >> 16 | high[i].to_bits() & 0xffff_0000))
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> [f32; 16] {
        // SAFETY: the caller's promise; any alignment.
        unsafe { from.cast::<[f16; 16]>().read_unaligned() }.map(f16::to_f32)
    }
    #[inline(always)]
    unsafe fn store_f16(to: *mut f16, x: [f32; 16]) {
        // SAFETY: the caller's promise; any alignment.
        unsafe { to.cast::<[f16; 16]>().write_unaligned(x.map(f16::from_f32)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A closure does not inherit target features, so each instruction set has its function.
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
        use crate::Isa;
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
