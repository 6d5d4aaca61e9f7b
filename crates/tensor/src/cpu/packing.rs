//! Panels for the [`microkernel`](super::microkernel): a strip of a matrix, copied so that the inner loop reads
//! memory in order. A strip is `[depth][width]`, lanes beyond the matrix zero.

use super::lanes::{Lanes, Portable};
#[cfg(target_arch = "x86_64")]
use super::lanes::{Avx2, Avx512};
use super::simd::Isa;

/// A piece of a matrix to pack: element (step, lane) lies at `from + step * step_stride + lane * lane_stride`.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    pub(super) from: *const f32,
    pub(super) step_stride: usize,
    pub(super) lane_stride: usize,
    /// Steps of depth.
    pub(super) depth: usize,
    /// Lanes in all.
    pub(super) lanes: usize,
}

/// Packs `piece` into panels of `panel` lanes, each step of a panel `width` numbers long.
///
/// # Safety
/// The piece is valid to read; `to` is valid for `lanes.div_ceil(panel) * width * depth` numbers; the
/// processor has the instruction set; `width` is a multiple of 16 and at least `panel`.
pub(super) unsafe fn pack(isa: Isa, piece: Piece, panel: usize, width: usize, to: *mut f32) {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
    unsafe fn avx512(piece: Piece, panel: usize, width: usize, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { pack_with::<Avx512>(piece, panel, width, to) }
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn avx2(piece: Piece, panel: usize, width: usize, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { pack_with::<Avx2>(piece, panel, width, to) }
    }
    // SAFETY: the caller's promise.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => avx512(piece, panel, width, to),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => avx2(piece, panel, width, to),
            _ => pack_with::<Portable>(piece, panel, width, to),
        }
    }
}

#[inline(always)]
unsafe fn pack_with<L: Lanes>(piece: Piece, panel: usize, width: usize, to: *mut f32) {
    for (index, lane) in (0..piece.lanes).step_by(panel).enumerate() {
        for vector in (0..width).step_by(16) {
            let start = lane + vector;
            let end = piece.lanes.min(lane + panel);
            let count = end.saturating_sub(start).min(16);
            // SAFETY: the strip's first lane is inside the piece, or it has no lanes and is not read.
            unsafe {
                let from = piece.from.add(start.min(piece.lanes - 1) * piece.lane_stride);
                let to = to.add(index * width * piece.depth + vector);
                if piece.lane_stride == 1 {
                    copy_strip::<L>(piece, from, count, width, to);
                } else if piece.step_stride == 1 {
                    turn_strip::<L>(piece, from, count, width, to);
                } else {
                    gather_strip(piece, from, count, width, to);
                }
            }
        }
    }
}

/// Steps that are fetched ahead: strips of wide matrices are strided, which hardware does not foresee.
const AHEAD: usize = 32;

/// Lanes lie side by side.
#[inline(always)]
unsafe fn copy_strip<L: Lanes>(piece: Piece, from: *const f32, count: usize, width: usize, to: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe {
        if count == 16 {
            for step in 0..piece.depth {
                L::prefetch(from.wrapping_add((step + AHEAD) * piece.step_stride));
                L::store(to.add(step * width), L::load(from.add(step * piece.step_stride)));
            }
        } else {
            for step in 0..piece.depth {
                L::store(to.add(step * width), L::load_first(from.add(step * piece.step_stride), count));
            }
        }
    }
}

/// Steps lie side by side: squares of 16 x 16 are transposed in registers.
#[inline(always)]
unsafe fn turn_strip<L: Lanes>(piece: Piece, from: *const f32, count: usize, width: usize, to: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe {
        let whole = piece.depth / 16 * 16;
        for step in (0..whole).step_by(16) {
            let mut square = [L::splat(0.0); 16];
            for (lane, row) in square.iter_mut().enumerate().take(count) {
                L::prefetch(from.wrapping_add(lane * piece.lane_stride + step + 2 * AHEAD));
                *row = L::load(from.add(lane * piece.lane_stride + step));
            }
            for (i, row) in L::transpose(square).into_iter().enumerate() {
                L::store(to.add((step + i) * width), row);
            }
        }
        if whole < piece.depth {
            let left = piece.depth - whole;
            let mut square = [L::splat(0.0); 16];
            for (lane, row) in square.iter_mut().enumerate().take(count) {
                *row = L::load_first(from.add(lane * piece.lane_stride + whole), left);
            }
            for (i, row) in L::transpose(square).into_iter().enumerate().take(left) {
                L::store(to.add((whole + i) * width), row);
            }
        }
    }
}

/// Neither does.
unsafe fn gather_strip(piece: Piece, from: *const f32, count: usize, width: usize, to: *mut f32) {
    for step in 0..piece.depth {
        for lane in 0..16 {
            // SAFETY: the caller's promise.
            unsafe {
                let x = if lane < count { *from.add(step * piece.step_stride + lane * piece.lane_stride) } else { 0.0 };
                *to.add(step * width + lane) = x;
            }
        }
    }
}
