//! Packs matrices into panels for the [`microkernel`](crate::microkernel). A panel is a strip of a matrix, copied so that
//! the inner loop reads memory in order. A strip is `[depth][width]` packed numbers. Lanes beyond the matrix are zero;
//! lanes between those of a panel and its width are unspecified, and nobody reads them.
//!
//! f32 are copied, 16-bit numbers widened; or bf16 stay as they are and lie in pairs of neighbouring steps,
//! the last one beside a zero where their number is odd.

use half::bf16;
use phalanx_plan::trace::DType;
#[cfg(target_arch = "x86_64")]
use phalanx_simd::{Avx2, Avx512};
use phalanx_simd::{Isa, Lanes, Portable};

use crate::float::{Float, by_float};
use crate::microkernel::Packing;

/// A matrix block to pack. Element (step, lane) is at `from + step * step_stride + lane * lane_stride`.
#[derive(Clone, Copy)]
pub(crate) struct MatrixBlock {
    pub(crate) from: *const u8,
    pub(crate) dtype: DType,
    pub(crate) step_stride: usize,
    pub(crate) lane_stride: usize,
    /// Steps of depth.
    pub(crate) depth: usize,
    /// Lanes in all.
    pub(crate) lanes: usize,
}

/// The layout of panels: each holds `lanes` lanes of the matrix; packed steps are `width` elements apart, panels
/// `stride` elements.
#[derive(Clone, Copy)]
pub(crate) struct PanelLayout {
    pub(crate) packing: Packing,
    pub(crate) lanes: usize,
    pub(crate) width: usize,
    pub(crate) stride: usize,
}

/// Packs `block` into panels.
///
/// # Safety
/// The block is valid to read; `to` is valid for all panels of the block, and nobody else uses them; the processor has
/// the instruction set; the width is a multiple of 8 and at least the panel's lanes.
pub(crate) unsafe fn pack(isa: Isa, block: MatrixBlock, layout: PanelLayout, to: *mut f32) {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c")]
    unsafe fn avx512(block: MatrixBlock, layout: PanelLayout, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { pack_with::<Avx512>(block, layout, to) }
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn avx2(block: MatrixBlock, layout: PanelLayout, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { pack_with::<Avx2>(block, layout, to) }
    }
    // SAFETY: the caller's promise.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx512Bf16 => avx512(block, layout, to),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => avx2(block, layout, to),
            _ => pack_with::<Portable>(block, layout, to),
        }
    }
}

#[inline(always)]
unsafe fn pack_with<L: Lanes>(block: MatrixBlock, layout: PanelLayout, to: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe {
        match layout.packing {
            Packing::Single => by_float!(block.dtype, T => pack_block::<L, Widened<T>>(block, layout, to)),
            Packing::Pairs => {
                assert_eq!(block.dtype, DType::BF16);
                pack_block::<L, Paired>(block, layout, to);
            }
        }
    }
}

/// Packing of stored elements.
pub(crate) trait Packer {
    /// The stored element type.
    type T: Float;
    /// Stored steps per packed step.
    const STEPS: usize;
    /// The packed step of 16 contiguous lanes, of which the first `count` exist. The next stored step is `step_stride`
    /// elements further, and exists if `whole`.
    unsafe fn across<L: Lanes>(from: *const Self::T, step_stride: usize, whole: bool, count: usize) -> L::V;
    /// The first `steps` stored steps of one lane, which are contiguous, as at most 16 packed steps.
    unsafe fn along<L: Lanes>(from: *const Self::T, steps: usize) -> L::V;
    /// One packed element.
    unsafe fn single(from: *const Self::T, step_stride: usize, whole: bool) -> f32;
}

/// Each element widened to f32.
pub(crate) struct Widened<T>(std::marker::PhantomData<T>);

impl<T: Float> Packer for Widened<T> {
    type T = T;
    const STEPS: usize = 1;
    #[inline(always)]
    unsafe fn across<L: Lanes>(from: *const T, _: usize, _: bool, count: usize) -> L::V {
        // SAFETY: the caller's promise.
        unsafe { if count >= 16 { T::load::<L>(from) } else { T::load_first::<L>(from, count) } }
    }
    #[inline(always)]
    unsafe fn along<L: Lanes>(from: *const T, steps: usize) -> L::V {
        // SAFETY: the caller's promise.
        unsafe { if steps >= 16 { T::load::<L>(from) } else { T::load_first::<L>(from, steps) } }
    }
    #[inline(always)]
    unsafe fn single(from: *const T, _: usize, _: bool) -> f32 {
        // SAFETY: the caller's promise; any alignment.
        unsafe { from.read_unaligned() }.to_f32()
    }
}

/// bf16 in pairs of steps.
pub(crate) struct Paired;

impl Packer for Paired {
    type T = bf16;
    const STEPS: usize = 2;
    #[inline(always)]
    unsafe fn across<L: Lanes>(from: *const bf16, step_stride: usize, whole: bool, count: usize) -> L::V {
        // SAFETY: the caller's promise; a step that does not exist is not read.
        unsafe {
            let low = Widened::<bf16>::across::<L>(from, 0, true, count);
            let high = if whole {
                Widened::<bf16>::across::<L>(from.wrapping_add(step_stride), 0, true, count)
            } else {
                L::splat(0.0)
            };
            L::pair_bf16(low, high)
        }
    }
    #[inline(always)]
    unsafe fn along<L: Lanes>(from: *const bf16, steps: usize) -> L::V {
        // SAFETY: the caller's promise; 32 stored elements are 16 packed ones.
        unsafe {
            if steps >= 32 {
                return L::load(from.cast());
            }
            let mut all = [bf16::ZERO; 32];
            std::ptr::copy_nonoverlapping(from, all.as_mut_ptr(), steps);
            L::load(all.as_ptr().cast())
        }
    }
    #[inline(always)]
    unsafe fn single(from: *const bf16, step_stride: usize, whole: bool) -> f32 {
        // SAFETY: the caller's promise; a step that does not exist is not read.
        unsafe {
            let low = from.read_unaligned().to_bits();
            let high = if whole { from.add(step_stride).read_unaligned().to_bits() } else { 0 };
            f32::from_bits(u32::from(low) | u32::from(high) << 16)
        }
    }
}

#[inline(always)]
unsafe fn pack_block<L: Lanes, S: Packer>(block: MatrixBlock, layout: PanelLayout, to: *mut f32) {
    let from = block.from.cast::<S::T>();
    // SAFETY: the caller's promise.
    unsafe {
        if block.lane_stride == 1 {
            return copy_panels::<L, S>(block, from, layout, to);
        }
        let width = layout.width;
        for (index, lane) in (0..block.lanes).step_by(layout.lanes).enumerate() {
            let lanes = layout.lanes.min(block.lanes - lane);
            let from = from.add(lane * block.lane_stride);
            let to = to.add(index * layout.stride);
            if block.step_stride == 1 {
                for vector in (0..width).step_by(16) {
                    let count = lanes.saturating_sub(vector).min(16);
                    let from = from.wrapping_add(vector * block.lane_stride);
                    turn_strip::<L, S>(block, from, count, [width, width - vector], to.add(vector));
                }
            } else {
                gather_panel::<S>(block, from, lanes, width, to);
            }
        }
    }
}

/// Prefetch distance in elements: rows of a wide matrix are too far apart for the hardware prefetcher.
const AHEAD: usize = 2048;

/// For contiguous lanes: reads each step in order and distributes it to all panels.
#[inline(always)]
unsafe fn copy_panels<L: Lanes, S: Packer>(
    block: MatrixBlock,
    from: *const S::T,
    layout: PanelLayout,
    to: *mut f32,
) {
    let PanelLayout { lanes: panel, width, stride, .. } = layout;
    let all = block.lanes / panel;
    let rest = block.lanes % panel;
    let ahead = AHEAD.div_ceil(block.lanes) * S::STEPS * block.step_stride;
    for (index, step) in (0..block.depth).step_by(S::STEPS).enumerate() {
        // SAFETY: the caller's promise; lanes beyond the last are not read.
        unsafe {
            let mut from = from.add(step * block.step_stride);
            let whole = step + S::STEPS <= block.depth;
            let mut to = to.add(index * width);
            for strip in 0..all {
                let left = block.lanes - strip * panel;
                for vector in (0..width).step_by(16) {
                    let from = from.add(vector);
                    for s in 0..S::STEPS {
                        L::prefetch(from.wrapping_add(ahead + s * block.step_stride).cast());
                    }
                    // As many lanes as there are, because a part of a vector is slower to read.
                    let x = S::across::<L>(from, block.step_stride, whole, left - vector);
                    store_lanes::<L>(to.add(vector), x, width - vector);
                }
                from = from.add(panel);
                to = to.wrapping_add(stride);
            }
            if rest > 0 {
                for vector in (0..width).step_by(16) {
                    let count = rest.saturating_sub(vector).min(16);
                    let x = S::across::<L>(from.wrapping_add(vector), block.step_stride, whole, count);
                    store_lanes::<L>(to.add(vector), x, width - vector);
                }
            }
        }
    }
}

/// Stores the lanes that a panel has room for: 8, or 16.
#[inline(always)]
unsafe fn store_lanes<L: Lanes>(to: *mut f32, x: L::V, room: usize) {
    // SAFETY: the caller's promise.
    unsafe { if room >= 16 { L::store(to, x) } else { L::store_half(to, x) } }
}

/// 16 packed steps of `count` lanes, as rows; lanes and steps beyond the last are zero. Prefetches what lies `ahead`
/// stored elements behind each lane's.
///
/// # Safety
/// The lanes and the first `steps` stored steps are valid to read at `from`.
#[inline(always)]
pub(crate) unsafe fn load_square<L: Lanes, S: Packer>(
    block: MatrixBlock,
    from: *const S::T,
    [count, steps]: [usize; 2],
    ahead: usize,
) -> [L::V; 16] {
    // SAFETY: the caller's promise; lanes from `count` on are not read.
    unsafe {
        let mut square = [L::splat(0.0); 16];
        // Whole squares have a loop of their own, without branches.
        if count >= 16 {
            for (lane, row) in square.iter_mut().enumerate() {
                *row = load_lane::<L, S>(from.add(lane * block.lane_stride), steps, ahead);
            }
        } else {
            for (lane, row) in square.iter_mut().enumerate().take(count) {
                *row = load_lane::<L, S>(from.add(lane * block.lane_stride), steps, ahead);
            }
        }
        square
    }
}

#[inline(always)]
unsafe fn load_lane<L: Lanes, S: Packer>(from: *const S::T, steps: usize, ahead: usize) -> L::V {
    // SAFETY: the caller's promise; a prefetch is a hint, for any address.
    unsafe {
        L::prefetch(from.wrapping_add(ahead).cast());
        S::along::<L>(from, steps)
    }
}

/// For contiguous steps: transposes squares of 16 x 16 packed elements in registers, or 8 x 16 where a panel has room for
/// fewer than 16 lanes.
#[inline(always)]
unsafe fn turn_strip<L: Lanes, S: Packer>(
    block: MatrixBlock,
    from: *const S::T,
    count: usize,
    [width, room]: [usize; 2],
    to: *mut f32,
) {
    let square_steps = 16 * S::STEPS;
    // SAFETY: the caller's promise; lanes from `count` on are not read.
    unsafe {
        for step in (0..block.depth).step_by(square_steps) {
            let steps = block.depth - step;
            // The same steps of the next strip.
            let ahead = 16 * block.lane_stride;
            let square = load_square::<L, S>(block, from.add(step), [count, steps], ahead);
            let to = to.add(step / S::STEPS * width);
            let packed = steps.div_ceil(S::STEPS).min(16);
            match square.first_chunk() {
                Some(half) if room < 16 => {
                    for (i, row) in L::transpose_half(*half).into_iter().enumerate().take(packed) {
                        L::store_half(to.add(i * width), row);
                    }
                }
                _ if packed == 16 => {
                    for (i, row) in L::transpose(square).into_iter().enumerate() {
                        L::store(to.add(i * width), row);
                    }
                }
                _ => {
                    for (i, row) in L::transpose(square).into_iter().enumerate().take(packed) {
                        L::store(to.add(i * width), row);
                    }
                }
            }
        }
    }
}

/// For matrices in which neither lanes nor steps are contiguous.
unsafe fn gather_panel<S: Packer>(
    block: MatrixBlock,
    from: *const S::T,
    lanes: usize,
    width: usize,
    to: *mut f32,
) {
    for (index, step) in (0..block.depth).step_by(S::STEPS).enumerate() {
        for lane in 0..width {
            // SAFETY: the caller's promise; lanes beyond the last are not read.
            unsafe {
                let from = from.wrapping_add(step * block.step_stride + lane * block.lane_stride);
                let whole = step + S::STEPS <= block.depth;
                let x = if lane < lanes { S::single(from, block.step_stride, whole) } else { 0.0 };
                *to.add(index * width + lane) = x;
            }
        }
    }
}
