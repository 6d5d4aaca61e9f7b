//! The epilogue of a matrix product: adds bias and residual to a tile's sums, applies GELU, rounds, and stores.
//!
//! Tiles are finished from a buffer in L1, in one pass for each step of the epilogue; a whole tile of f32 without bias is
//! stored straight from registers.

use half::{bf16, f16};
use phalanx_simd::{Lanes, Number};
use phalanx_tensor::arguments::Gelu;
use phalanx_trace::DType;

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
}

/// Where a block of the result is written, and what is applied before. With sums s: `s += partial; s += bias; s += add;
/// to = round(s)`, or with GELU: `pre = round(s); to = round(gelu(pre))`.
#[derive(Clone, Copy)]
pub(crate) struct Target {
    pub(crate) to: MatrixPointer,
    /// Sums of earlier blocks of the inner dimension, in f32.
    pub(crate) partial: MatrixPointer,
    /// One row that is added to every row.
    pub(crate) bias: MatrixPointer,
    /// A matrix that is added; may be `to` itself.
    pub(crate) add: MatrixPointer,
    /// Where the argument of GELU is stored. Null: no GELU.
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

    /// Whether [`finish_plain`] can finish whole tiles.
    #[inline(always)]
    pub(crate) fn is_plain(&self) -> bool {
        self.to.dtype == DType::F32
            && self.add.dtype == DType::F32
            && !self.partial.is_some()
            && !self.bias.is_some()
            && !self.pre.is_some()
    }

    /// Prefetches the `rows x width` block that [`finish`] will read and write.
    #[inline(always)]
    pub(crate) fn prefetch<L: Lanes>(&self, rows: usize, width: usize) {
        const LINE: usize = 64;
        for r in 0..rows {
            for byte in (0..width * self.to.dtype.bytes()).step_by(LINE) {
                // SAFETY: a hint, for any address.
                unsafe { L::prefetch_write(self.to.at(r, 0).at.wrapping_add(byte + LINE - 4).cast()) };
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

/// Stores a whole tile of a plain target from registers.
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

/// Finishes `rows x columns` sums, rows of which are `width` apart in `buffer`.
///
/// # Safety
/// Compiled for `L`; the target is valid for them.
#[inline(always)]
pub(crate) unsafe fn finish<L: Lanes>(buffer: &mut [f32], width: usize, size: [usize; 2], target: &Target) {
    let [rows, columns] = size;
    assert!(columns <= width && rows * width <= buffer.len());
    // SAFETY: the caller's promise; the buffer holds the sums (asserted).
    unsafe {
        add_rows::<L>(buffer, width, size, target.partial);
        if target.bias.is_some() {
            add_rows::<L>(buffer, width, size, MatrixPointer { stride: 0, ..target.bias });
        }
        add_rows::<L>(buffer, width, size, target.add);
        if target.pre.is_some() {
            store_rows::<L>(buffer, width, size, target.pre);
            // GELU is computed from the stored (rounded) argument, so that backward can recompute it.
            copy_rows::<L>(buffer, width, size, target.pre);
            match target.gelu {
                Gelu::Tanh => gelu_all::<L, Tanh>(&mut buffer[..rows * width]),
                Gelu::Erf => gelu_all::<L, Erf>(&mut buffer[..rows * width]),
            }
        }
        store_rows::<L>(buffer, width, size, target.to);
    }
}

/// Applies GELU to whole vectors.
///
/// # Safety
/// Compiled for `L`.
#[inline(always)]
unsafe fn gelu_all<L: Lanes, F: Formula>(sums: &mut [f32]) {
    for x in sums.chunks_exact_mut(16) {
        // SAFETY: the caller's promise; 16 numbers.
        unsafe { L::store(x.as_mut_ptr(), F::value::<L>(L::load(x.as_ptr()))) };
    }
}

/// Runs `$body` for every vector of the sums: index in the buffer, row, first column, number of valid lanes.
macro_rules! for_vectors {
    ($size:expr, $width:expr, |$index:ident, $row:ident, $column:ident, $count:ident| $body:expr) => {
        for $row in 0..$size[0] {
            for $column in (0..$size[1]).step_by(16) {
                let $index = $row * $width + $column;
                let $count = $size[1] - $column;
                $body
            }
        }
    };
}

/// Runs `$body` with `T` the element type of a matrix.
macro_rules! by_place {
    ($place:expr, $T:ident => $body:expr) => {
        match $place.dtype {
            DType::BF16 => {
                type $T = bf16;
                $body
            }
            DType::F16 => {
                type $T = f16;
                $body
            }
            _ => {
                type $T = f32;
                $body
            }
        }
    };
}

#[inline(always)]
unsafe fn add_rows<L: Lanes>(sums: &mut [f32], width: usize, size: [usize; 2], from: MatrixPointer) {
    if !from.is_some() {
        return;
    }
    by_place!(from, T => for_vectors!(size, width, |index, row, column, count| {
        // SAFETY: the caller's promise; the vector lies in the sums.
        unsafe {
            let x = load::<L, T>(from.at.cast::<T>().add(row * from.stride + column), count);
            let sum = sums.as_mut_ptr().add(index);
            L::store(sum, L::add(L::load(sum), x));
        }
    }));
}

#[inline(always)]
unsafe fn copy_rows<L: Lanes>(sums: &mut [f32], width: usize, size: [usize; 2], from: MatrixPointer) {
    by_place!(from, T => for_vectors!(size, width, |index, row, column, count| {
        // SAFETY: the caller's promise; the vector lies in the sums.
        unsafe {
            let x = load::<L, T>(from.at.cast::<T>().add(row * from.stride + column), count);
            L::store(sums.as_mut_ptr().add(index), x);
        }
    }));
}

#[inline(always)]
unsafe fn store_rows<L: Lanes>(sums: &[f32], width: usize, size: [usize; 2], to: MatrixPointer) {
    by_place!(to, T => for_vectors!(size, width, |index, row, column, count| {
        // SAFETY: the caller's promise; the vector lies in the sums.
        unsafe {
            let x = L::load(sums.as_ptr().add(index));
            let to = to.at.cast::<T>().add(row * to.stride + column);
            if count >= 16 { T::store::<L>(to, x) } else { T::store_first::<L>(to, x, count) }
        }
    }));
}

#[inline(always)]
unsafe fn load<L: Lanes, T: Float>(from: *const T, count: usize) -> L::V {
    // SAFETY: the caller's promise.
    unsafe { if count >= 16 { T::load::<L>(from) } else { T::load_first::<L>(from, count) } }
}
