//! Sixteen f32 as one value, on every instruction set.
//!
//! For the loops that must live in registers (matrix products): here the vectors are spelled out, where
//! [`vectorized!`](crate::vectorized) leaves them to the compiler. Functions are `#[inline(always)]` and unsafe, because
//! they must be inlined into a function that has the instruction set's features; calling them elsewhere is
//! undefined behaviour on a processor without these.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod rows;

use half::{bf16, f16};

pub use crate::{fold_row, sum_row};
#[cfg(target_arch = "x86_64")]
pub use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub use avx512::Avx512;
pub use rows::{exp, exp2, largest, load, max_row, store, sum, tanh};

/// The NaN that [`Lanes::one_nan`] leaves.
const ONE_NAN: f32 = f32::from_bits(0x7fc0_0000);

/// The upper half of [`ONE_NAN`]: `bf16::NAN`.
#[cfg(target_arch = "x86_64")]
const ONE_NAN_BF16: i32 = 0x7fc0;

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
    /// The first 8 lanes.
    #[inline(always)]
    unsafe fn store_half(to: *mut f32, x: Self::V) {
        // SAFETY: the caller's promise.
        unsafe { Self::store_first(to, x, 8) };
    }
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
    /// The same for 8 vectors; the other lanes become 0.
    #[inline(always)]
    unsafe fn transpose_half(x: [Self::V; 8]) -> [Self::V; 16] {
        // SAFETY: the caller's promise.
        unsafe {
            let mut all = [Self::splat(0.0); 16];
            all[..8].copy_from_slice(&x);
            Self::transpose(all)
        }
    }
    /// Loads 16 bf16, widened.
    unsafe fn load_bf16(from: *const bf16) -> Self::V;
    /// Loads the first `count` of 16 bf16, widened; the other lanes 0.
    #[inline(always)]
    unsafe fn load_first_bf16(from: *const bf16, count: usize) -> Self::V {
        let mut all = [bf16::ZERO; 16];
        // SAFETY: the caller's promise; the array has 16 numbers.
        unsafe {
            std::ptr::copy_nonoverlapping(from, all.as_mut_ptr(), count.min(16));
            Self::load_bf16(all.as_ptr())
        }
    }
    /// Stores 16 bf16, rounded to nearest even; NaN stays NaN.
    unsafe fn store_bf16(to: *mut bf16, x: Self::V);
    /// The same, but every NaN becomes `bf16::NAN`.
    unsafe fn store_bf16_one_nan(to: *mut bf16, x: Self::V);
    /// Loads 16 f16, widened.
    unsafe fn load_f16(from: *const f16) -> Self::V;
    /// Loads the first `count` of 16 f16, widened; the other lanes 0.
    #[inline(always)]
    unsafe fn load_first_f16(from: *const f16, count: usize) -> Self::V {
        let mut all = [f16::ZERO; 16];
        // SAFETY: the caller's promise; the array has 16 numbers.
        unsafe {
            std::ptr::copy_nonoverlapping(from, all.as_mut_ptr(), count.min(16));
            Self::load_f16(all.as_ptr())
        }
    }
    /// 16 whole numbers of 8 bits.
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self::V {
        // SAFETY: the caller's promise; the array has 16 numbers.
        unsafe { Self::load(from.cast::<[i8; 16]>().read_unaligned().map(f32::from).as_ptr()) }
    }
    /// 16 numbers of a table by codes of 4 bits, which are 8 bytes: the first of two is in the high half.
    #[inline(always)]
    unsafe fn look_up(table: &[f32; 16], codes: *const u8) -> Self::V {
        // SAFETY: the caller's promise; the array has 16 numbers.
        unsafe {
            let codes = codes.cast::<[u8; 8]>().read_unaligned();
            let each: [f32; 16] =
                std::array::from_fn(|i| table[usize::from(codes[i / 2] >> (4 - i % 2 * 4) & 15)]);
            Self::load(each.as_ptr())
        }
    }
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
    /// Prefetches a cache line for reading, not into L1 but into L2; the address need not be valid.
    #[inline(always)]
    unsafe fn prefetch_l2(address: *const f32) {
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

    use crate::{Isa, vectorized};

    /// Numbers of many sizes and both signs, NaN and infinities among them.
    fn numbers(seed: u32) -> [f32; 16] {
        std::array::from_fn(|i| match (i as u32 * 7 + seed) % 16 {
            0 => f32::NAN,
            1 => f32::INFINITY,
            2 => f32::NEG_INFINITY,
            3 => -0.0,
            4 => f32::from_bits(0xff80_0001 + seed),
            n => (n as f32 - 9.5) * (seed as f32 + 0.37).powi(n as i32 - 8),
        })
    }

    vectorized!(fn every_operation(x: &[f32; 16], y: &[f32; 16], out: &mut Vec<[f32; 16]>) = every_operation_body);
    /// Appends the results of all operations that have the same bits on every instruction set.
    #[inline(always)]
    fn every_operation_body<L: Lanes>(x: &[f32; 16], y: &[f32; 16], out: &mut Vec<[f32; 16]>) {
        const BEYOND: f32 = 77.0;
        // SAFETY: compiled for L; the arrays have 16 numbers, and twice as many bf16 or f16.
        unsafe {
            let (a, b) = (L::load(x.as_ptr()), L::load(y.as_ptr()));
            macro_rules! push {
                ($($value:expr),*) => {
                    $(
                        let mut to = [0f32; 16];
                        L::store(to.as_mut_ptr(), $value);
                        out.push(to);
                    )*
                };
            }
            push!(L::add(a, b), L::sub(a, b), L::mul(a, b), L::div(a, b), L::max(a, b), L::min(a, b));
            push!(
                L::one_nan(a),
                L::pair_bf16(a, b),
                L::load_bf16(x.as_ptr().cast()),
                L::load_f16(y.as_ptr().cast())
            );
            for n in [-126.0, -1.0, 0.0, 7.0, 128.0] {
                push!(L::scale2(a, L::splat(n), b, L::splat(0.5)));
            }
            let mut half = [BEYOND; 16];
            L::store_half(half.as_mut_ptr(), a);
            out.push(half);
            for count in 0..=17 {
                push!(L::load_first(x.as_ptr(), count), L::keep_first(a, b, count));
                push!(
                    L::load_first_bf16(x.as_ptr().cast(), count),
                    L::load_first_f16(x.as_ptr().cast(), count)
                );
                let mut to = [BEYOND; 16];
                L::store_first(to.as_mut_ptr(), a, count);
                out.push(to);
            }
            let mut square = [a; 16];
            for (i, row) in square.iter_mut().enumerate() {
                *row = L::add(L::splat(i as f32), if i % 2 == 0 { a } else { b });
            }
            for row in L::transpose(square) {
                push!(row);
            }
            for row in L::transpose_half(*square.first_chunk().unwrap()) {
                push!(row);
            }
        }
    }

    #[test]
    fn operations_have_the_same_bits_on_every_instruction_set() {
        for isa in Isa::ALL.into_iter().filter(|isa| *isa <= Isa::detect()) {
            for seed in 0..16 {
                let (x, y) = (numbers(seed), numbers(seed * 5 + 3));
                let [mut wanted, mut got] = [Vec::new(), Vec::new()];
                every_operation(Isa::Portable, &x, &y, &mut wanted);
                every_operation(isa, &x, &y, &mut got);
                assert_eq!(got.len(), wanted.len());
                for (index, (got, wanted)) in got.iter().zip(&wanted).enumerate() {
                    for lane in 0..16 {
                        let (got, wanted) = (got[lane], wanted[lane]);
                        let same = got.to_bits() == wanted.to_bits() || got.is_nan() && wanted.is_nan();
                        assert!(same, "{}, result {index}, lane {lane}: {got}, not {wanted}", isa.name());
                    }
                }
            }
        }
    }

    vectorized!(fn exp2_all(x: &mut [f32]) = exp2_all_body);
    #[inline(always)]
    fn exp2_all_body<L: Lanes>(x: &mut [f32]) {
        for x in x.chunks_exact_mut(16) {
            // SAFETY: compiled for L; 16 numbers.
            unsafe { L::store(x.as_mut_ptr(), exp2::<L>(L::load(x.as_ptr()))) };
        }
    }

    #[test]
    fn exp2_is_near_f64() {
        for isa in Isa::ALL.map(|isa| isa.limit(Isa::detect())) {
            let x: Vec<f32> = (0..1_600_000).map(|i| i as f32 * 1e-4 - 125.9).collect();
            let mut y = x.clone();
            exp2_all(isa, &mut y);
            let mut worst = 0f64;
            for (x, y) in x.iter().zip(&y) {
                let exact = f64::from(*x).exp2();
                let ulp = f64::from(f32::from_bits((exact as f32).to_bits() + 1)) - f64::from(exact as f32);
                worst = worst.max((f64::from(*y) - exact).abs() / ulp);
            }
            println!("{}: {worst} ulp", isa.name());
            assert!(worst < 2.5, "{}: {worst} ulp", isa.name());
        }
    }

    #[test]
    fn exp2_at_the_ends() {
        for isa in Isa::ALL.map(|isa| isa.limit(Isa::detect())) {
            let mut x = [-126.0; 16];
            let ends = [0.0, -0.0, -1.0, 1.0, -126.1, -1e4, -1e10, -1e20, -1e30, f32::MIN, f32::NEG_INFINITY];
            x[..ends.len()].copy_from_slice(&ends);
            x[11] = f32::NAN;
            exp2_all(isa, &mut x);
            assert_eq!(x[..11], [1.0, 1.0, 0.5, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
            assert!(x[11].is_nan() && x[12] == f32::MIN_POSITIVE);
        }
    }

    vectorized!(fn tanh_all(x: &mut [f32]) = tanh_all_body);
    #[inline(always)]
    fn tanh_all_body<L: Lanes>(x: &mut [f32]) {
        for x in x.chunks_exact_mut(16) {
            // SAFETY: compiled for L; 16 numbers.
            unsafe { L::store(x.as_mut_ptr(), tanh::<L>(L::load(x.as_ptr()))) };
        }
    }

    #[test]
    fn tanh_is_near_f64() {
        for isa in Isa::ALL.map(|isa| isa.limit(Isa::detect())) {
            let x: Vec<f32> = (0..320_000).map(|i| (i as f32 - 160_000.0) * 1e-4).collect();
            let mut y = x.clone();
            tanh_all(isa, &mut y);
            for (x, y) in x.iter().zip(&y) {
                let exact = f64::from(*x).tanh();
                let error = (f64::from(*y) - exact).abs() / f64::from(f32::EPSILON);
                assert!(error <= 3.0 * exact.abs(), "{}: tanh({x}) = {y}, not {exact}", isa.name());
            }
            let mut ends = [f32::INFINITY; 16];
            ends[..5].copy_from_slice(&[0.0, 1e-30, f32::NEG_INFINITY, -20.0, f32::NAN]);
            tanh_all(isa, &mut ends);
            assert_eq!((&ends[..4], ends[15]), (&[0.0, 1e-30, -1.0, -1.0][..], 1.0));
            assert!(ends[4].is_nan());
        }
    }
}
