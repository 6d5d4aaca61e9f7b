//! The epilogue of a matrix product: adds bias and residual to a tile's sums, applies GELU, rounds, and stores.
//!
//! A whole tile of f32 without GELU is finished and stored straight from registers, every other tile from a buffer in L1,
//! vector by vector.

use half::{bf16, f16};
use phalanx_plan::trace::DType;
use phalanx_simd::Lanes;
use phalanx_tensor::arguments::Gelu;

use crate::float::Float;
use crate::gelu::{Erf, Formula, Tanh};

/// A pointer to a block of a matrix whose rows are `stride` elements apart; null for no matrix.
#[derive(Clone, Copy)]
pub(crate) struct MatrixPointer {
    pub(crate) at: *mut u8,
    pub(crate) dtype: DType,
    pub(crate) stride: usize,
}

impl MatrixPointer {
    /// No matrix.
    pub(crate) fn none() -> MatrixPointer {
        MatrixPointer { at: std::ptr::null_mut(), dtype: DType::F32, stride: 0 }
    }

    /// A matrix that is written.
    pub(crate) fn of<T: Float>(at: *mut T, stride: usize) -> MatrixPointer {
        MatrixPointer { at: at.cast(), dtype: T::DTYPE, stride }
    }

    pub(crate) fn is_some(&self) -> bool {
        !self.at.is_null()
    }

    /// The part that starts at (row, column); null stays null.
    #[inline(always)]
    fn at(self, row: usize, column: usize) -> MatrixPointer {
        if self.at.is_null() {
            return self;
        }
        let bytes = (row * self.stride + column) * self.dtype.bytes();
        MatrixPointer { at: self.at.wrapping_add(bytes), ..self }
    }

    /// The element at (row, column); `T` is the element type.
    #[inline(always)]
    fn element<T>(self, row: usize, column: usize) -> *mut T {
        self.at.cast::<T>().wrapping_add(row * self.stride + column)
    }
}

/// Destination of a block of the result, and the operations before the store. With sums s: `s += partial; s += bias;
/// s += add; to = round(s)`, or with GELU: `pre = round(s); to = round(gelu(pre))`.
#[derive(Clone, Copy)]
pub(crate) struct Target {
    pub(crate) to: MatrixPointer,
    /// Sums of earlier blocks of the inner dimension, in f32.
    pub(crate) partial: MatrixPointer,
    /// One row that is added to every row.
    pub(crate) bias: MatrixPointer,
    /// A matrix that is added; may be `to` itself.
    pub(crate) add: MatrixPointer,
    /// Destination of the argument of GELU. Null: no GELU.
    pub(crate) pre: MatrixPointer,
    /// The GELU formula.
    pub(crate) gelu: Gelu,
}

impl Target {
    /// A target that the product overwrites.
    pub(crate) fn new(to: MatrixPointer) -> Target {
        let none = MatrixPointer::none();
        Target { to, partial: none, bias: none, add: none, pre: none, gelu: Gelu::Tanh }
    }

    /// The part that starts at (row, column).
    #[inline(always)]
    pub(crate) fn at(&self, row: usize, column: usize) -> Target {
        Target {
            to: self.to.at(row, column),
            partial: self.partial.at(row, column),
            bias: self.bias.at(0, column),
            add: self.add.at(row, column),
            pre: self.pre.at(row, column),
            gelu: self.gelu,
        }
    }

    /// Returns whether [`finish_plain`] can finish whole tiles.
    #[inline(always)]
    pub(crate) fn is_plain(&self) -> bool {
        self.to.dtype == DType::F32
            && self.add.dtype == DType::F32
            && self.bias.dtype == DType::F32
            && !self.partial.is_some()
            && !self.pre.is_some()
    }

    /// Returns whether the sums are the result, in f32: nothing is added to them.
    #[inline(always)]
    pub(crate) fn is_overwritten(&self) -> bool {
        self.is_plain() && !self.bias.is_some() && !self.add.is_some()
    }

    /// Prefetches the `rows x width` block that [`finish`] will read and write.
    #[inline(always)]
    pub(crate) fn prefetch<L: Lanes>(&self, rows: usize, width: usize) {
        const LINE: usize = 64;
        for r in 0..rows {
            for written in [self.to, self.pre].into_iter().filter(MatrixPointer::is_some) {
                for byte in (0..width * written.dtype.bytes()).step_by(LINE) {
                    // SAFETY: a hint, for any address.
                    unsafe { L::prefetch_write(written.at(r, 0).at.wrapping_add(byte + LINE - 4).cast()) };
                }
            }
            if self.add.is_some() && self.add.at != self.to.at {
                for byte in (0..width * self.add.dtype.bytes()).step_by(LINE) {
                    // SAFETY: as above.
                    unsafe { L::prefetch(self.add.at(r, 0).at.wrapping_add(byte).cast()) };
                }
            }
        }
    }
}

/// Finishes a whole tile of a plain target in registers, and stores it.
///
/// # Safety
/// Compiled for `L`; the target is valid for the tile.
#[inline(always)]
pub(crate) unsafe fn finish_plain<L: Lanes, const ROWS: usize, const VECTORS: usize>(
    mut sums: [[L::V; VECTORS]; ROWS],
    target: &Target,
) {
    let to = target.to.at.cast::<f32>();
    // SAFETY: the caller's promise. The loops are apart so that each unrolls and the sums stay in registers.
    unsafe {
        if target.bias.is_some() {
            let bias = target.bias.at.cast::<f32>();
            for sums in &mut sums {
                for (v, sum) in sums.iter_mut().enumerate() {
                    *sum = L::add(*sum, L::load(bias.add(v * 16)));
                }
            }
        }
        if target.add.is_some() {
            let add = target.add.at.cast::<f32>();
            for (r, sums) in sums.iter_mut().enumerate() {
                for (v, sum) in sums.iter_mut().enumerate() {
                    *sum = L::add(*sum, L::load(add.add(r * target.add.stride + v * 16)));
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            for (v, sum) in sums.iter().enumerate() {
                L::store(to.add(r * target.to.stride + v * 16), *sum);
            }
        }
    }
}

/// Finishes `rows x columns` sums, rows of which are `width` apart.
///
/// # Safety
/// Compiled for `L`; the target is valid for them.
#[inline(always)]
pub(crate) unsafe fn finish<L: Lanes>(sums: &[f32], width: usize, size: [usize; 2], target: &Target) {
    // SAFETY: the caller's promise.
    unsafe {
        match target.to.dtype {
            DType::BF16 => finish_as::<L, bf16>(sums, width, size, target),
            DType::F16 => finish_as::<L, f16>(sums, width, size, target),
            _ => finish_as::<L, f32>(sums, width, size, target),
        }
    }
}

#[inline(always)]
unsafe fn finish_as<L: Lanes, T: Float>(sums: &[f32], width: usize, size: [usize; 2], target: &Target) {
    // SAFETY: the caller's promise.
    unsafe {
        match target.gelu {
            _ if !target.pre.is_some() => finish_rows::<L, T, Tanh, false>(sums, width, size, target),
            Gelu::Tanh => finish_rows::<L, T, Tanh, true>(sums, width, size, target),
            Gelu::Erf => finish_rows::<L, T, Erf, true>(sums, width, size, target),
        }
    }
}

/// Finishes sums into results of type `T`, vector by vector.
///
/// # Safety
/// As [`finish`].
#[inline(always)]
unsafe fn finish_rows<L: Lanes, T: Float, F: Formula, const GELU: bool>(
    sums: &[f32],
    width: usize,
    [rows, columns]: [usize; 2],
    target: &Target,
) {
    let Target { to, partial, bias, add, pre, .. } = *target;
    let (add_is_f32, exact) = (add.dtype == DType::F32, T::DTYPE == DType::F32);
    assert!(columns <= width && rows * width <= sums.len());
    assert!(partial.dtype == DType::F32 && (add_is_f32 || add.dtype == T::DTYPE));
    assert!((!bias.is_some() || bias.dtype == T::DTYPE) && (!GELU || pre.dtype == T::DTYPE));
    for row in 0..rows {
        for column in (0..columns).step_by(16) {
            let count = columns - column;
            // SAFETY: the caller's promise; the vector lies in the sums (asserted), and the types are right (asserted).
            unsafe {
                let mut x = L::load(sums.as_ptr().add(row * width + column));
                if partial.is_some() {
                    x = L::add(x, load::<L, f32>(partial.element(row, column), count));
                }
                if bias.is_some() {
                    x = L::add(x, load::<L, T>(bias.element(0, column), count));
                }
                if add.is_some() && add_is_f32 {
                    x = L::add(x, load::<L, f32>(add.element(row, column), count));
                } else if add.is_some() {
                    x = L::add(x, load::<L, T>(add.element(row, column), count));
                }
                if GELU {
                    store::<L, T>(pre.element(row, column), x, count);
                }
                if GELU && exact {
                    x = F::value::<L>(x);
                }
                if !GELU || exact {
                    store::<L, T>(to.element(row, column), x, count);
                }
            }
        }
    }
    if GELU && !exact {
        // GELU is computed from the stored (rounded) argument, so that backward can recompute it. In a loop of its own,
        // because rounding and widening are too long a chain for the processor to overlap with it.
        for row in 0..rows {
            for column in (0..columns).step_by(16) {
                let count = columns - column;
                // SAFETY: the caller's promise.
                unsafe {
                    let x = load::<L, T>(pre.element(row, column), count);
                    store::<L, T>(to.element(row, column), F::value::<L>(x), count);
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn load<L: Lanes, T: Float>(from: *const T, count: usize) -> L::V {
    // SAFETY: the caller's promise.
    unsafe { if count >= 16 { T::load::<L>(from) } else { T::load_first::<L>(from, count) } }
}

#[inline(always)]
unsafe fn store<L: Lanes, T: Float>(to: *mut T, x: L::V, count: usize) {
    // SAFETY: the caller's promise.
    unsafe { if count >= 16 { T::store::<L>(to, x) } else { T::store_first::<L>(to, x, count) } }
}
