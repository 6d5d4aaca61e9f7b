//! The element types that can be summed, and the type in which each is added: bf16 and f16 in f32, f32 and f64 as they
//! are. Widening is exact; a sum is rounded to nearest even when it is stored.

use half::{bf16, f16};

use crate::{Lanes, Number};

/// An element type that can be summed.
///
/// # Safety
/// This holds for every unsafe function here: the caller is compiled for the instruction set of `L`, which the processor
/// has, and pointers are valid for `count` elements, at most [`Sum::LANES`].
pub(super) trait Summand: Copy + 'static {
    /// The type in which elements are added.
    type Sum: Sum;
    /// The first `count` elements, widened; the other lanes are 0.
    unsafe fn load<L: Lanes>(from: *const Self, count: usize) -> <Self::Sum as Sum>::Vector<L>;
    /// The first `count` lanes, rounded.
    unsafe fn store<L: Lanes>(to: *mut Self, sum: <Self::Sum as Sum>::Vector<L>, count: usize);
}

/// A type in which elements are added: f32 or f64.
///
/// # Safety
/// As for [`Summand`].
pub(super) trait Sum: Summand<Sum = Self> + Default {
    /// A vector of contiguous elements.
    type Vector<L: Lanes>: Copy;
    /// Elements of a vector.
    const LANES: usize;
    /// `a + b`
    unsafe fn add<L: Lanes>(a: Self::Vector<L>, b: Self::Vector<L>) -> Self::Vector<L>;
}

impl Sum for f32 {
    type Vector<L: Lanes> = L::V;
    const LANES: usize = 16;
    #[inline(always)]
    unsafe fn add<L: Lanes>(a: L::V, b: L::V) -> L::V {
        // SAFETY: the caller's promise.
        unsafe { L::add(a, b) }
    }
}

impl Sum for f64 {
    type Vector<L: Lanes> = L::D;
    const LANES: usize = 8;
    #[inline(always)]
    unsafe fn add<L: Lanes>(a: L::D, b: L::D) -> L::D {
        // SAFETY: the caller's promise.
        unsafe { L::add_f64(a, b) }
    }
}

impl Summand for f64 {
    type Sum = f64;
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const f64, count: usize) -> L::D {
        // SAFETY: the caller's promise.
        unsafe { if count == Self::LANES { L::load_f64(from) } else { L::load_first_f64(from, count) } }
    }
    #[inline(always)]
    unsafe fn store<L: Lanes>(to: *mut f64, sum: L::D, count: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            if count == Self::LANES { L::store_f64(to, sum) } else { L::store_first_f64(to, sum, count) }
        }
    }
}

macro_rules! added_in_f32 {
    ($element:ty, |$to:ident, $sum:ident| $store:expr) => {
        impl Summand for $element {
            type Sum = f32;
            #[inline(always)]
            unsafe fn load<L: Lanes>(from: *const $element, count: usize) -> L::V {
                // SAFETY: the caller's promise.
                unsafe {
                    if count == f32::LANES {
                        <$element as Number>::load::<L>(from)
                    } else {
                        <$element as Number>::load_first::<L>(from, count)
                    }
                }
            }
            #[inline(always)]
            unsafe fn store<L: Lanes>(to: *mut $element, sum: L::V, count: usize) {
                // SAFETY: the caller's promise; the array has as many elements as a vector.
                unsafe {
                    if count == f32::LANES {
                        let ($to, $sum) = (to, sum);
                        return $store;
                    }
                    let mut all = [<$element>::default(); f32::LANES];
                    let ($to, $sum) = (all.as_mut_ptr(), sum);
                    $store;
                    std::ptr::copy_nonoverlapping(all.as_ptr(), to, count.min(f32::LANES));
                }
            }
        }
    };
}
added_in_f32!(f32, |to, sum| L::store(to, sum));
// The processor chooses which of two NaNs an addition returns, so all NaNs are rounded to the same bits.
added_in_f32!(bf16, |to, sum| L::store_bf16_one_nan(to, sum));
added_in_f32!(f16, |to, sum| L::store_f16(to, L::one_nan(sum)));
