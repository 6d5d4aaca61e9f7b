//! The inner loops of a matrix product: packed panels in, a tile of the result out.
//!
//! An element of `a · b` is, for each block of [`DEPTH`] of the inner dimension, one chain of multiply-adds
//! from zero, ascending; the blocks' sums are added to the result in order. Nothing else enters: the bits
//! of an element do not depend on where it lies, on how the product is cut into tasks, or on other rows and
//! columns.
//!
//! Panels (Goto and van de Geijn, "Anatomy of high-performance matrix multiplication"): `a` in panels of
//! `ROWS` rows, whose numbers are broadcast; `b` in panels of `16 * VECTORS` columns. A tile of `ROWS x
//! VECTORS` vectors stays in registers: 14 x 2 of AVX-512's 32, 6 x 1 (of two halves) of AVX2's 16.

#[cfg(target_arch = "x86_64")]
use super::lanes::{Avx2, Avx512};
use super::lanes::{Lanes, Portable};
use super::simd::Isa;

/// Inner dimension of a block: 256 * 32 columns * 4 bytes = 32 KiB of `b` stay in the L1 cache.
pub(super) const DEPTH: usize = 256;

/// Sizes of panels on one instruction set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Panels {
    /// Rows of a tile.
    pub(super) rows: usize,
    /// Numbers from one step of depth to the next in a panel of `a`; at least `rows`.
    pub(super) row_width: usize,
    /// Columns of a tile, and width of a panel of `b`.
    pub(super) columns: usize,
}

/// The panels of an instruction set.
pub(super) fn panels(isa: Isa) -> Panels {
    match isa {
        Isa::Avx512 | Isa::Avx512Bf16 => Panels { rows: 14, row_width: 16, columns: 32 },
        Isa::Avx2 => Panels { rows: 6, row_width: 16, columns: 16 },
        Isa::Portable => Panels { rows: 2, row_width: 16, columns: 16 },
    }
}

/// Where a block of the result goes, and what is added to it. Elements lie `stride` apart by rows.
#[derive(Clone, Copy)]
pub(super) struct Target {
    /// First element of the block.
    pub(super) to: *mut f32,
    /// From one row to the next of `to`.
    pub(super) stride: usize,
    /// First element of what is added, with rows `add_stride` apart; may be `to` itself; null for nothing.
    pub(super) add: *const f32,
    /// From one row to the next of `add`.
    pub(super) add_stride: usize,
    /// First element of a row that is added to every row; null for none.
    pub(super) bias: *const f32,
}

impl Target {
    /// The part that starts at (row, column).
    ///
    /// # Safety
    /// Inside the block.
    #[inline(always)]
    pub(super) unsafe fn at(self, row: usize, column: usize) -> Target {
        // SAFETY: the caller's promise; null stays null.
        unsafe {
            Target {
                to: self.to.add(row * self.stride + column),
                add: if self.add.is_null() { self.add } else { self.add.add(row * self.add_stride + column) },
                bias: if self.bias.is_null() { self.bias } else { self.bias.add(column) },
                ..self
            }
        }
    }
}

/// Panels of `a`: broadcast one number at a time, so they may also be the columns of an unpacked matrix.
#[derive(Clone, Copy)]
pub(super) struct Down {
    /// First step of the first panel.
    pub(super) from: *const f32,
    /// Numbers from step to step of a panel.
    pub(super) step: usize,
    /// Numbers from panel to panel.
    pub(super) panel: usize,
}

/// Packed panels of `b`.
#[derive(Clone, Copy)]
pub(super) struct Across {
    /// First step of the first panel.
    pub(super) from: *const f32,
    /// Numbers from panel to panel.
    pub(super) panel: usize,
}

/// `to = a · b (+ bias) (+ add)` for a block of `rows x columns x depth`.
///
/// # Safety
/// `a` holds `rows` and `b` `columns` in panels of `depth` steps, as [`panels`] of this `isa` says, which the
/// processor has; the target is valid for the block, and nobody else touches it.
pub(super) unsafe fn block(isa: Isa, size: [usize; 3], a: Down, b: Across, target: Target) {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c")]
    unsafe fn avx512(size: [usize; 3], a: Down, b: Across, target: Target) {
        // SAFETY: the caller's promise.
        unsafe { tiles::<Avx512, 14, 2>(size, a, b, target) }
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn avx2(size: [usize; 3], a: Down, b: Across, target: Target) {
        // SAFETY: the caller's promise.
        unsafe { tiles::<Avx2, 6, 1>(size, a, b, target) }
    }
    // SAFETY: the caller's promise.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx512Bf16 => avx512(size, a, b, target),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => avx2(size, a, b, target),
            _ => tiles::<Portable, 2, 1>(size, a, b, target),
        }
    }
}

/// All tiles of a block: a panel of `b` stays in L1 while the panels of `a` come from L2.
#[inline(always)]
unsafe fn tiles<L: Lanes, const ROWS: usize, const VECTORS: usize>(
    [rows, columns, depth]: [usize; 3],
    a: Down,
    b: Across,
    target: Target,
) {
    let width = VECTORS * 16;
    for left in (0..columns).step_by(width) {
        let count = width.min(columns - left);
        for top in (0..rows).step_by(ROWS) {
            // SAFETY: panel (left / width) of b and (top / ROWS) of a exist (the caller's promise).
            unsafe {
                let b = b.from.add(left / width * b.panel);
                let a = Down { from: a.from.add(top / ROWS * a.panel), ..a };
                let target = target.at(top, left);
                if rows - top >= ROWS {
                    tile::<L, ROWS, VECTORS>(depth, a, b, target, count);
                } else {
                    last_rows::<L, VECTORS>(rows - top, depth, a, b, target, count);
                }
            }
        }
    }
}

/// A tile of fewer rows.
#[inline(always)]
unsafe fn last_rows<L: Lanes, const VECTORS: usize>(
    rows: usize,
    depth: usize,
    a: Down,
    b: *const f32,
    target: Target,
    columns: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match rows {
            1 => tile::<L, 1, VECTORS>(depth, a, b, target, columns),
            2 => tile::<L, 2, VECTORS>(depth, a, b, target, columns),
            3 => tile::<L, 3, VECTORS>(depth, a, b, target, columns),
            4 => tile::<L, 4, VECTORS>(depth, a, b, target, columns),
            5 => tile::<L, 5, VECTORS>(depth, a, b, target, columns),
            6 => tile::<L, 6, VECTORS>(depth, a, b, target, columns),
            7 => tile::<L, 7, VECTORS>(depth, a, b, target, columns),
            8 => tile::<L, 8, VECTORS>(depth, a, b, target, columns),
            9 => tile::<L, 9, VECTORS>(depth, a, b, target, columns),
            10 => tile::<L, 10, VECTORS>(depth, a, b, target, columns),
            11 => tile::<L, 11, VECTORS>(depth, a, b, target, columns),
            12 => tile::<L, 12, VECTORS>(depth, a, b, target, columns),
            13 => tile::<L, 13, VECTORS>(depth, a, b, target, columns),
            _ => unreachable!("no instruction set has more rows in a tile"),
        }
    }
}

/// One tile.
#[inline(always)]
unsafe fn tile<L: Lanes, const ROWS: usize, const VECTORS: usize>(
    depth: usize,
    a: Down,
    b: *const f32,
    target: Target,
    columns: usize,
) {
    // SAFETY: `a` and `b` hold `depth` steps, the target `ROWS x columns` elements.
    unsafe {
        // What the end touches comes to the cache meanwhile.
        for r in 0..ROWS {
            for v in 0..VECTORS {
                L::prefetch_write(target.to.wrapping_add(r * target.stride + v * 16 + 15));
                if target.add != target.to.cast_const() {
                    L::prefetch(target.add.wrapping_add(r * target.add_stride + v * 16));
                }
            }
        }
        let mut sums = [[L::splat(0.0); VECTORS]; ROWS];
        let Down { from: mut a, step, .. } = a;
        let mut b = b;
        for _ in 0..depth {
            let mut across = [L::splat(0.0); VECTORS];
            for (v, x) in across.iter_mut().enumerate() {
                *x = L::load(b.add(v * 16));
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let down = L::splat(*a.add(r));
                for (sum, across) in sums.iter_mut().zip(across) {
                    *sum = L::mul_add(down, across, *sum);
                }
            }
            a = a.wrapping_add(step);
            b = b.wrapping_add(VECTORS * 16);
        }
        if columns == VECTORS * 16 {
            finish::<L, ROWS, VECTORS>(sums, target, |p, _| L::load(p), |p, x, _| L::store(p, x));
        } else {
            let count = |v: usize| columns.saturating_sub(v * 16);
            finish::<L, ROWS, VECTORS>(
                sums,
                target,
                |p, v| L::load_first(p, count(v)),
                |p, x, v| L::store_first(p, x, count(v)),
            );
        }
    }
}

/// Adds what is to be added and stores, by `load` and `store` of vector v of a row. The loops are apart so
/// that each unrolls and the sums stay in registers.
#[inline(always)]
unsafe fn finish<L: Lanes, const ROWS: usize, const VECTORS: usize>(
    mut sums: [[L::V; VECTORS]; ROWS],
    target: Target,
    load: impl Fn(*const f32, usize) -> L::V,
    store: impl Fn(*mut f32, L::V, usize),
) {
    // SAFETY: the caller's promise; `wrapping_add`, since vectors without columns are not touched.
    unsafe {
        if !target.bias.is_null() {
            for v in 0..VECTORS {
                let bias = load(target.bias.wrapping_add(v * 16), v);
                for sums in &mut sums {
                    sums[v] = L::add(sums[v], bias);
                }
            }
        }
        if !target.add.is_null() {
            for (r, sums) in sums.iter_mut().enumerate() {
                for (v, sum) in sums.iter_mut().enumerate() {
                    *sum = L::add(*sum, load(target.add.wrapping_add(r * target.add_stride + v * 16), v));
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            for (v, sum) in sums.iter().enumerate() {
                store(target.to.wrapping_add(r * target.stride + v * 16), *sum, v);
            }
        }
    }
}
