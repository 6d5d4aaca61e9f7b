//! Packs matrices into tiles of bf16 for the [`tile_kernel`](crate::tile_kernel).
//!
//! A panel is 32 lanes of a matrix: rows of the left operand, columns of the right one. A packed step is 32 steps of the
//! inner dimension. For each packed step, a panel holds a block of two tiles (16 lanes each), once for each part of its
//! numbers; a tile is 16 rows of 64 bytes. The left operand's tiles are `[lane][pair]`, the right one's `[pair][lane]`,
//! where a pair is two neighbouring steps. Lanes and steps beyond the matrix are zero.
//!
//! bf16 have one part, themselves. f32 and f16 are [cut](Cut) into parts: the number rounded to bf16, then what is left
//! rounded to bf16, and so on. Three parts hold the 24 bits of an f32, two the 11 of an f16, exactly, unless a part is
//! smaller than the smallest normal number (2^-126), which the processor takes as zero: f32 below about 2^-110 lose bits.
//! The first part of a number beyond 3.39e38 is infinite, and what is left of an infinite number is NaN.

use half::{bf16, f16};
use phalanx_plan::trace::DType;
#[cfg(target_arch = "x86_64")]
use phalanx_simd::{Avx2, Avx512};
use phalanx_simd::{Isa, Lanes, Portable};

use crate::ProductMethod;
use crate::float::Float;
use crate::packing::MatrixBlock;

/// Lanes of a panel.
pub(crate) const LANES: usize = 32;

/// Steps of the inner dimension in a packed step.
pub(crate) const STEPS: usize = 32;

/// Lanes, and pairs of steps, of a tile.
const SIDE: usize = 16;

/// Elements of four bytes in a tile.
const TILE: usize = SIDE * SIDE;

/// Elements of four bytes in a block: two tiles.
pub(crate) const BLOCK: usize = 2 * TILE;

/// Division of numbers into bf16 parts, and the products of parts that are added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// bf16: the number itself.
    One,
    /// f16: two parts, and all four products.
    Two,
    /// f32: three parts, and the six products that matter.
    Three,
}

impl Cut {
    /// Returns the division of numbers of `dtype`.
    pub(crate) fn of(dtype: DType, products: ProductMethod) -> Cut {
        match (dtype, products) {
            (DType::BF16, _) => Cut::One,
            (DType::F16, _) => Cut::Two,
            _ => Cut::Three,
        }
    }

    /// Parts of a number.
    pub(crate) fn parts(self) -> usize {
        match self {
            Cut::One => 1,
            Cut::Two => 2,
            Cut::Three => 3,
        }
    }

    /// Products of parts in a product of two numbers.
    pub(crate) fn products(self) -> usize {
        match self {
            Cut::One => 1,
            Cut::Two => 4,
            Cut::Three => 6,
        }
    }
}

/// Which operand of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operand {
    Left,
    Right,
}

/// Packs `block` into panels, `stride` elements of four bytes apart.
///
/// # Safety
/// The block is valid to read; `to` is valid for all panels of the block, and nobody else uses them; the processor has
/// the instruction set.
pub(crate) unsafe fn pack(
    (isa, cut): (Isa, Cut),
    operand: Operand,
    block: MatrixBlock,
    stride: usize,
    to: *mut f32,
) {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c")]
    unsafe fn avx512(cut: Cut, operand: Operand, block: MatrixBlock, stride: usize, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { pack_with::<Avx512>(cut, operand, block, stride, to) }
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn avx2(cut: Cut, operand: Operand, block: MatrixBlock, stride: usize, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { pack_with::<Avx2>(cut, operand, block, stride, to) }
    }
    // SAFETY: the caller's promise.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx512Bf16 => avx512(cut, operand, block, stride, to),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => avx2(cut, operand, block, stride, to),
            _ => pack_with::<Portable>(cut, operand, block, stride, to),
        }
    }
}

#[inline(always)]
unsafe fn pack_with<L: Lanes>(cut: Cut, operand: Operand, block: MatrixBlock, stride: usize, to: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe {
        match (block.dtype, cut) {
            (DType::BF16, _) => pack_panels::<L, bf16, 1>(operand, block, stride, to),
            (DType::F16, _) => pack_panels::<L, f16, 2>(operand, block, stride, to),
            (DType::F32, _) => pack_panels::<L, f32, 3>(operand, block, stride, to),
            (other, _) => panic!("kernels compute with f32, bf16 and f16, not with {}", other.name()),
        }
    }
}

/// One tile: its first `parts` squares of 16 vectors.
type Squares<V, const PARTS: usize> = [[V; SIDE]; PARTS];

#[inline(always)]
unsafe fn pack_panels<L: Lanes, T: Float, const PARTS: usize>(
    operand: Operand,
    block: MatrixBlock,
    stride: usize,
    to: *mut f32,
) {
    let from = block.from.cast::<T>();
    let lanes_first = block.step_stride == 1 && block.lane_stride != 1;
    let neither = block.step_stride != 1 && block.lane_stride != 1;
    let turned = lanes_first != (operand == Operand::Left);
    let panels = block.lanes.div_ceil(LANES);
    let steps = block.depth.div_ceil(STEPS);
    for at in 0..panels * steps {
        // Memory is read in its order: rows of lanes across all panels, or rows of steps along one panel.
        let [panel, index] = if lanes_first { [at / steps, at % steps] } else { [at % panels, at / panels] };
        for half in 0..2 {
            let (lane, step) = (panel * LANES + half * SIDE, index * STEPS);
            let lanes = block.lanes.saturating_sub(lane).min(SIDE);
            let steps = (block.depth - step).min(STEPS);
            // SAFETY: the caller's promise; lanes and steps beyond the block are not read.
            unsafe {
                let from = from.wrapping_add(step * block.step_stride + lane * block.lane_stride);
                let to = to.add(panel * stride + index * PARTS * BLOCK + half * TILE);
                if lanes < SIDE || steps < STEPS || neither {
                    let copy = copied(block, from, [lanes, steps], lanes_first);
                    let apart = if lanes_first { STEPS } else { SIDE };
                    let squares = read::<L, T, PARTS>(copy.as_ptr(), apart, lanes_first);
                    store::<L, PARTS>(squares, turned, to);
                } else {
                    let apart = if lanes_first { block.lane_stride } else { block.step_stride };
                    let squares = read::<L, T, PARTS>(from, apart, lanes_first);
                    store::<L, PARTS>(squares, turned, to);
                }
            }
        }
    }
}

/// Copies the existing part of a tile into a buffer of zeros: `[lane][step]` if `lanes_first`, else `[step][lane]`.
unsafe fn copied<T: Float>(
    block: MatrixBlock,
    from: *const T,
    [lanes, steps]: [usize; 2],
    lanes_first: bool,
) -> [T; SIDE * STEPS] {
    let mut copy = [T::default(); SIDE * STEPS];
    for lane in 0..lanes {
        for step in 0..steps {
            let at = if lanes_first { lane * STEPS + step } else { step * SIDE + lane };
            let from = from.wrapping_add(step * block.step_stride + lane * block.lane_stride);
            // SAFETY: within the block (the caller's promise); any alignment.
            copy[at] = unsafe { from.read_unaligned() };
        }
    }
    copy
}

/// Reads a tile whose lanes (if `lanes_first`, else its steps) lie `apart` elements apart, each contiguous, into vectors
/// of pairs: one per lane, or one per pair of steps.
#[inline(always)]
unsafe fn read<L: Lanes, T: Float, const PARTS: usize>(
    from: *const T,
    apart: usize,
    lanes_first: bool,
) -> Squares<L::V, PARTS> {
    // SAFETY: the caller's promise.
    unsafe {
        let mut squares = [[L::splat(0.0); SIDE]; PARTS];
        for i in 0..SIDE {
            let vectors = if lanes_first {
                let from = from.add(i * apart);
                if T::DTYPE == DType::BF16 {
                    // In memory, pairs of bf16 already have the packed layout.
                    [L::load(from.cast()); PARTS]
                } else {
                    beside::<L, PARTS>(T::load::<L>(from), T::load::<L>(from.add(SIDE)))
                }
            } else {
                let from = from.add(2 * i * apart);
                between::<L, PARTS>(T::load::<L>(from), T::load::<L>(from.add(apart)))
            };
            for (square, vector) in squares.iter_mut().zip(vectors) {
                square[i] = vector;
            }
        }
        squares
    }
}

/// Stores the squares of a tile, turned or not, in the blocks of its parts.
#[inline(always)]
unsafe fn store<L: Lanes, const PARTS: usize>(squares: Squares<L::V, PARTS>, turned: bool, to: *mut f32) {
    for (part, square) in squares.into_iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe {
            let square = if turned { L::transpose(square) } else { square };
            for (i, vector) in square.into_iter().enumerate() {
                L::store(to.add(part * BLOCK + i * SIDE), vector);
            }
        }
    }
}

/// Cuts numbers into parts that are bf16, widened.
#[inline(always)]
unsafe fn cut<L: Lanes, const PARTS: usize>(x: L::V) -> [L::V; PARTS] {
    let mut rest = x;
    let mut parts = [x; PARTS];
    if PARTS > 1 {
        for part in &mut parts {
            let mut rounded = [bf16::ZERO; SIDE];
            // SAFETY: the caller's promise; the array has 16 numbers.
            unsafe {
                L::store_bf16(rounded.as_mut_ptr(), rest);
                *part = L::load_bf16(rounded.as_ptr());
                rest = L::sub(rest, *part);
            }
        }
    }
    parts
}

/// The pairs of 32 numbers in a row: the first with the second, the third with the fourth.
#[inline(always)]
unsafe fn beside<L: Lanes, const PARTS: usize>(first: L::V, second: L::V) -> [L::V; PARTS] {
    // SAFETY: the caller's promise; the array has 32 numbers.
    unsafe {
        let mut pairs = [L::splat(0.0); PARTS];
        let halves = [cut::<L, PARTS>(first), cut::<L, PARTS>(second)];
        for (part, pairs) in pairs.iter_mut().enumerate() {
            let mut row = [bf16::ZERO; STEPS];
            L::store_bf16(row.as_mut_ptr(), halves[0][part]);
            L::store_bf16(row.as_mut_ptr().add(SIDE), halves[1][part]);
            *pairs = L::load(row.as_ptr().cast());
        }
        pairs
    }
}

/// The pairs of each number of `low` with that of `high`.
#[inline(always)]
unsafe fn between<L: Lanes, const PARTS: usize>(low: L::V, high: L::V) -> [L::V; PARTS] {
    // SAFETY: the caller's promise.
    unsafe {
        let (low, high) = (cut::<L, PARTS>(low), cut::<L, PARTS>(high));
        let mut pairs = [L::splat(0.0); PARTS];
        for (part, pairs) in pairs.iter_mut().enumerate() {
            *pairs = L::pair_bf16(low[part], high[part]);
        }
        pairs
    }
}
