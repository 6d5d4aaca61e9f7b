//! Panels for the [`microkernel`](super::microkernel): a strip of a matrix, copied so that the inner loop
//! reads memory in order. A strip is `[depth][width]`, lanes beyond the matrix zero.

#[cfg(target_arch = "x86_64")]
use super::lanes::{Avx2, Avx512};
use super::lanes::{Lanes, Portable};
use super::simd::Isa;

/// A piece of a matrix to pack: element (step, lane) lies at `from + step * step_stride + lane *
/// lane_stride`.
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

/// How panels lie: `lanes` of the matrix each, a step `width` numbers after the one before, a panel `stride`
/// numbers after the one before.
#[derive(Clone, Copy)]
pub(super) struct Form {
    pub(super) lanes: usize,
    pub(super) width: usize,
    pub(super) stride: usize,
}

/// Packs `piece` into panels.
///
/// # Safety
/// The piece is valid to read; `to` is valid for all panels of the piece, and nobody else touches them; the
/// processor has the instruction set; the width is a multiple of 16 and at least the panel's lanes.
pub(super) unsafe fn pack(isa: Isa, piece: Piece, form: Form, to: *mut f32) {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c")]
    unsafe fn avx512(piece: Piece, form: Form, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { pack_with::<Avx512>(piece, form, to) }
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn avx2(piece: Piece, form: Form, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { pack_with::<Avx2>(piece, form, to) }
    }
    // SAFETY: the caller's promise.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx512Bf16 => avx512(piece, form, to),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => avx2(piece, form, to),
            _ => pack_with::<Portable>(piece, form, to),
        }
    }
}

#[inline(always)]
unsafe fn pack_with<L: Lanes>(piece: Piece, form: Form, to: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe {
        if piece.lane_stride == 1 {
            return copy_panels::<L>(piece, form, to);
        }
        let width = form.width;
        for (index, lane) in (0..piece.lanes).step_by(form.lanes).enumerate() {
            let lanes = form.lanes.min(piece.lanes - lane);
            let from = piece.from.add(lane * piece.lane_stride);
            let to = to.add(index * form.stride);
            if piece.step_stride == 1 {
                for vector in (0..width).step_by(16) {
                    let count = lanes.saturating_sub(vector).min(16);
                    let from = from.wrapping_add(vector * piece.lane_stride);
                    turn_strip::<L>(piece, from, count, width, to.add(vector));
                }
            } else {
                gather_panel(piece, from, lanes, width, to);
            }
        }
    }
}

/// Numbers that are fetched ahead: rows of a wide matrix are far apart, which hardware does not foresee.
const AHEAD: usize = 2048;

/// Lanes lie side by side: each step is read through, and goes to all panels.
#[inline(always)]
unsafe fn copy_panels<L: Lanes>(piece: Piece, form: Form, to: *mut f32) {
    let Form { lanes: panel, width, stride } = form;
    let whole = piece.lanes / panel;
    let rest = piece.lanes % panel;
    let ahead = AHEAD.div_ceil(piece.lanes) * piece.step_stride;
    for step in 0..piece.depth {
        // SAFETY: the caller's promise; lanes beyond the last are not read.
        unsafe {
            let mut from = piece.from.add(step * piece.step_stride);
            let mut to = to.add(step * width);
            for _ in 0..whole {
                for vector in (0..width).step_by(16) {
                    let from = from.add(vector);
                    L::prefetch(from.wrapping_add(ahead));
                    let count = panel - vector;
                    L::store(
                        to.add(vector),
                        if count >= 16 { L::load(from) } else { L::load_first(from, count) },
                    );
                }
                from = from.add(panel);
                to = to.wrapping_add(stride);
            }
            if rest > 0 {
                for vector in (0..width).step_by(16) {
                    let count = rest.saturating_sub(vector).min(16);
                    L::store(to.add(vector), L::load_first(from.wrapping_add(vector), count));
                }
            }
        }
    }
}

/// Steps lie side by side: squares of 16 x 16 are transposed in registers.
#[inline(always)]
unsafe fn turn_strip<L: Lanes>(piece: Piece, from: *const f32, count: usize, width: usize, to: *mut f32) {
    // SAFETY: the caller's promise; lanes from `count` on are not read.
    unsafe {
        let whole = piece.depth / 16 * 16;
        for step in (0..whole).step_by(16) {
            let mut square = [L::splat(0.0); 16];
            for (lane, row) in square.iter_mut().enumerate().take(count) {
                let from = from.add(lane * piece.lane_stride + step);
                // The same steps of the strip after this one.
                L::prefetch(from.wrapping_add(16 * piece.lane_stride));
                *row = L::load(from);
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
unsafe fn gather_panel(piece: Piece, from: *const f32, lanes: usize, width: usize, to: *mut f32) {
    for step in 0..piece.depth {
        for lane in 0..width {
            // SAFETY: the caller's promise; lanes beyond the last are not read.
            unsafe {
                let x = if lane < lanes {
                    *from.add(step * piece.step_stride + lane * piece.lane_stride)
                } else {
                    0.0
                };
                *to.add(step * width + lane) = x;
            }
        }
    }
}
