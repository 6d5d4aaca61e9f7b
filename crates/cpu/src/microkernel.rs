//! The inner loops of a matrix product: packed panels in, a tile of the result out.
//!
//! A packed number is four bytes: one f32, or a pair of bf16 that are neighbours along the inner dimension
//! ([`Packing`]). An element of `a · b` is, for each block of the inner dimension, one chain of multiply-adds (or
//! of `vdpbf16ps`, two at a time) from zero, ascending; the blocks' sums are added in order. Nothing else
//! enters: the bits of an element do not depend on where it lies, on how the product is cut into tasks, or on
//! other rows and columns.
//!
//! Panels (Goto and van de Geijn, "Anatomy of high-performance matrix multiplication"): `a` in panels of
//! `ROWS` rows, whose numbers are broadcast; `b` in panels of `16 * VECTORS` columns. A tile of `ROWS x
//! VECTORS` vectors stays in registers: 14 x 2 of AVX-512's 32, 6 x 1 (of two halves) of AVX2's 16.
//!
//! [`epilogue`](crate::epilogue) finishes a tile's sums before they are stored: bias, addition, GELU, rounding.

use phalanx_plan::trace::DType;
#[cfg(target_arch = "x86_64")]
use phalanx_simd::{Avx2, Avx512};
use phalanx_simd::{Isa, Lanes, Portable};

use crate::epilogue::{Target, finish, finish_plain};

/// Contents of one packed element of four bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Packing {
    /// One f32: one step of the inner dimension.
    Single,
    /// Two bf16, the earlier in the lower half: two steps.
    Pairs,
}

impl Packing {
    /// Returns the packing of operands stored as `dtype`. f16 is widened to f32; so is bf16 if the processor has no bf16
    /// products.
    pub(crate) fn of(isa: Isa, dtype: DType) -> Packing {
        if isa == Isa::Avx512Bf16 && dtype == DType::BF16 { Packing::Pairs } else { Packing::Single }
    }

    /// Packed elements for `inner` steps of the inner dimension.
    pub(crate) fn packed(self, inner: usize) -> usize {
        match self {
            Packing::Single => inner,
            Packing::Pairs => inner.div_ceil(2),
        }
    }

    /// Steps of the inner dimension in `packed` elements.
    pub(crate) fn inner(self, packed: usize) -> usize {
        match self {
            Packing::Single => packed,
            Packing::Pairs => 2 * packed,
        }
    }
}

/// Sizes of panels on one instruction set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Panels {
    /// Rows of a tile.
    pub(crate) rows: usize,
    /// Elements between two steps of depth in a panel of `a`; at least `rows`.
    pub(crate) row_width: usize,
    /// Columns of a tile, and width of a panel of `b`.
    pub(crate) columns: usize,
}

/// The panels of an instruction set.
pub(crate) fn panels(isa: Isa) -> Panels {
    match isa {
        Isa::Avx512 | Isa::Avx512Bf16 => Panels { rows: 14, row_width: 16, columns: 32 },
        Isa::Avx2 => Panels { rows: 6, row_width: 8, columns: 16 },
        Isa::Portable => Panels { rows: 2, row_width: 16, columns: 16 },
    }
}

/// Panels of `a`. Their elements are broadcast one by one, so they may also be columns of an unpacked matrix.
#[derive(Clone, Copy)]
pub(crate) struct PanelsA {
    /// First step of the first panel.
    pub(crate) from: *const f32,
    /// Elements between two steps of a panel.
    pub(crate) step: usize,
    /// Elements between the starts of two panels.
    pub(crate) panel: usize,
}

/// Packed panels of `b`.
#[derive(Clone, Copy)]
pub(crate) struct PanelsB {
    /// First step of the first panel.
    pub(crate) from: *const f32,
    /// Elements between the starts of two panels.
    pub(crate) panel: usize,
}

/// The multiply-add of packed elements.
pub(crate) trait Multiply<L: Lanes> {
    /// `a * b + sum` per lane.
    ///
    /// # Safety
    /// As for `L`.
    unsafe fn step(a: L::V, b: L::V, sum: L::V) -> L::V;
}

pub(crate) struct Single;

impl<L: Lanes> Multiply<L> for Single {
    #[inline(always)]
    unsafe fn step(a: L::V, b: L::V, sum: L::V) -> L::V {
        // SAFETY: the caller's promise.
        unsafe { L::mul_add(a, b, sum) }
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) struct Pairs;

#[cfg(target_arch = "x86_64")]
impl Multiply<Avx512> for Pairs {
    #[inline(always)]
    unsafe fn step(
        a: std::arch::x86_64::__m512,
        b: std::arch::x86_64::__m512,
        sum: std::arch::x86_64::__m512,
    ) -> std::arch::x86_64::__m512 {
        use std::arch::x86_64::{__m512bh, _mm512_dpbf16_ps};
        // SAFETY: `Kind::Pairs` is chosen only where the processor has the instruction; both are 64 bytes.
        unsafe {
            let pairs = |x| std::mem::transmute::<std::arch::x86_64::__m512, __m512bh>(x);
            _mm512_dpbf16_ps(sum, pairs(a), pairs(b))
        }
    }
}

/// `to = a · b`, finished as `target` says, for a block of `rows x columns x depth`, with depth in packed elements.
///
/// # Safety
/// `a` holds `rows` and `b` `columns` in panels of `depth` steps, as [`panels`] of this `isa` says, which the processor
/// has; the target is valid for the block, and nobody else uses it.
pub(crate) unsafe fn block(
    isa: Isa,
    packing: Packing,
    size: [usize; 3],
    a: PanelsA,
    b: PanelsB,
    target: &Target,
) {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx512bf16,avx2,fma,f16c")]
    unsafe fn pairs(size: [usize; 3], a: PanelsA, b: PanelsB, target: &Target) {
        // SAFETY: the caller's promise.
        unsafe { tiles::<Avx512, Pairs, 14, 2>(size, a, b, target) }
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c")]
    unsafe fn avx512(size: [usize; 3], a: PanelsA, b: PanelsB, target: &Target) {
        // SAFETY: the caller's promise.
        unsafe { tiles::<Avx512, Single, 14, 2>(size, a, b, target) }
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn avx2(size: [usize; 3], a: PanelsA, b: PanelsB, target: &Target) {
        // SAFETY: the caller's promise.
        unsafe { tiles::<Avx2, Single, 6, 1>(size, a, b, target) }
    }
    // SAFETY: the caller's promise.
    unsafe {
        match (isa, packing) {
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512Bf16, Packing::Pairs) => pairs(size, a, b, target),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512 | Isa::Avx512Bf16, Packing::Single) => avx512(size, a, b, target),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2, Packing::Single) => avx2(size, a, b, target),
            (_, Packing::Single) => tiles::<Portable, Single, 2, 1>(size, a, b, target),
            (_, Packing::Pairs) => unreachable!("pairs need Avx512Bf16"),
        }
    }
}

/// Computes all tiles of a block: a panel of `b` stays near while the panels of `a` come from L2.
#[inline(always)]
unsafe fn tiles<L: Lanes, M: Multiply<L>, const ROWS: usize, const VECTORS: usize>(
    [rows, columns, depth]: [usize; 3],
    a: PanelsA,
    b: PanelsB,
    target: &Target,
) {
    let width = VECTORS * 16;
    // Not zeroed: whole tiles of a plain target do not use it.
    let mut buffer = std::mem::MaybeUninit::<[f32; 14 * 32]>::uninit();
    for left in (0..columns).step_by(width) {
        let count = width.min(columns - left);
        let plain = count == width && target.is_plain();
        let sums = if plain { std::ptr::null_mut() } else { buffer.as_mut_ptr().cast::<f32>() };
        for top in (0..rows).step_by(ROWS) {
            let rows = ROWS.min(rows - top);
            // SAFETY: panel (left / width) of b and (top / ROWS) of a exist (the caller's promise). The tile has written
            // its rows of the buffer.
            unsafe {
                let b = b.from.add(left / width * b.panel);
                let a = PanelsA { from: a.from.add(top / ROWS * a.panel), ..a };
                let target = target.at(top, left);
                if rows == ROWS {
                    tile::<L, M, ROWS, VECTORS>(depth, a, b, &target, sums);
                } else {
                    last_rows::<L, M, ROWS, VECTORS>(rows, depth, a, b, &target, sums);
                }
                if !plain {
                    let sums = std::slice::from_raw_parts(sums, rows * width);
                    finish::<L>(sums, width, [rows, count], &target);
                }
            }
        }
    }
}

/// Computes a tile with fewer rows.
#[inline(always)]
unsafe fn last_rows<L: Lanes, M: Multiply<L>, const ROWS_MAX: usize, const VECTORS: usize>(
    rows: usize,
    depth: usize,
    a: PanelsA,
    b: *const f32,
    target: &Target,
    buffer: *mut f32,
) {
    macro_rules! by_rows {
        ($($n:literal)*) => {
            match rows {
                // SAFETY: the caller's promise.
                $($n if $n < ROWS_MAX => unsafe { tile::<L, M, $n, VECTORS>(depth, a, b, target, buffer) },)*
                _ => unreachable!("no instruction set has more rows in a tile"),
            }
        };
    }
    by_rows!(1 2 3 4 5 6 7 8 9 10 11 12 13);
}

/// Steps between the prefetch of packed numbers and their use: some 170 cycles of multiply-adds, several times what a
/// line takes from L2 to L1. A panel of `b` is larger than L1, so each tile reads both panels from L2.
const AHEAD: usize = 12;

/// Computes the sums of a tile into `buffer`, or, if it is null, directly into the target.
#[inline(always)]
unsafe fn tile<L: Lanes, M: Multiply<L>, const ROWS: usize, const VECTORS: usize>(
    depth: usize,
    a: PanelsA,
    b: *const f32,
    target: &Target,
    buffer: *mut f32,
) {
    // SAFETY: `a` and `b` hold `depth` steps, the target and the buffer `ROWS` rows.
    unsafe {
        // Prefetches the target while the sums are computed.
        target.prefetch::<L>(ROWS, VECTORS * 16);
        let mut sums = [[L::splat(0.0); VECTORS]; ROWS];
        let PanelsA { from: mut a, step, .. } = a;
        let mut b = b;
        for _ in 0..depth {
            for v in 0..VECTORS {
                L::prefetch(b.wrapping_add((AHEAD * VECTORS + v) * 16));
            }
            L::prefetch(a.wrapping_add(AHEAD * step));
            let mut across = [L::splat(0.0); VECTORS];
            for (v, x) in across.iter_mut().enumerate() {
                *x = L::load(b.add(v * 16));
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let down = L::splat(*a.add(r));
                for (sum, across) in sums.iter_mut().zip(across) {
                    *sum = M::step(down, across, *sum);
                }
            }
            a = a.wrapping_add(step);
            b = b.wrapping_add(VECTORS * 16);
        }
        if buffer.is_null() {
            return finish_plain::<L, ROWS, VECTORS>(sums, target);
        }
        for (r, sums) in sums.iter().enumerate() {
            for (v, sum) in sums.iter().enumerate() {
                L::store(buffer.add((r * VECTORS + v) * 16), *sum);
            }
        }
    }
}
