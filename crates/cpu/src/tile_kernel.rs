//! The inner loops of a matrix product on tile registers: packed panels in, blocks of the result out.
//!
//! A block of 32 x 32 elements is four registers of sums; two registers of the left operand and two of the right one are
//! loaded and multiplied crosswise, so that each load serves two multiplications. Every tile is 16 contiguous cache lines.
//! The outer loop goes over the panels of one operand, the inner one over those of the other. The inner operand stays in
//! L2; it is loaded past L1, in which the panel of the outer operand stays where it is small enough. The next outer panel
//! is prefetched into L2 meanwhile.
//!
//! The multiplications leave the rest of the processor idle. So the sums of a block go to one of two buffers in L1, and
//! are finished (bias, residual, GELU, rounding), some rows in every step, while the next block is multiplied.
//!
//! An element is, for each block of the inner dimension, the sum over its packed steps ([`STEPS`](crate::tile_packing)
//! of the inner dimension each), ascending; each adds its products as [`Tiles::multiply_bf16`] says. The blocks' sums are
//! added in order, in the [`epilogue`](crate::epilogue). Nothing else enters. Numbers of several parts add, in every
//! packed step, the products of their parts, the largest one (that of the first parts) last. Of three parts, the products
//! of the second with the third and of the third with the third are left out: together at most 2^-26 of the product. Of
//! f32 in two parts, the product of the second parts is left out, too, which is smaller than what two parts lack.
//!
//! Tails: the last rows have registers of exactly their size, and up to 16 last columns have one register instead of two.

use std::mem::MaybeUninit;
use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use phalanx_simd::tiles::Amx;
use phalanx_simd::tiles::{Model, Shapes, TileUnit, Tiles};
#[cfg(target_arch = "x86_64")]
use phalanx_simd::{Avx2, Avx512};
use phalanx_simd::{Isa, Lanes, Portable};

use crate::epilogue::{MatrixPointer, Target, finish};
use crate::tile_packing::{BLOCK, Cut, LANES, Operand};
use crate::tile_step::{ROW, Step, parts};

/// Most rows of a register.
const ROWS: usize = 16;

/// Packed panels of an operand.
#[derive(Clone, Copy)]
pub(crate) struct TilePanels {
    /// First step of the first panel, on a cache line.
    pub(crate) from: *const f32,
    /// Elements of four bytes between the starts of two panels.
    pub(crate) panel: usize,
}

/// Bytes of a cache line.
const LINE: usize = 64;

/// Sums of two blocks: one that is multiplied, and the one before it, which is finished.
#[repr(align(64))]
struct TwoBlocks([MaybeUninit<f32>; 2 * LANES * LANES]);

/// The product that a call of [`block`] computes.
#[derive(Clone, Copy)]
pub(crate) struct TileProduct {
    pub(crate) cut: Cut,
    /// `[rows, columns, depth]`, with depth in packed steps.
    pub(crate) size: [usize; 3],
    pub(crate) a: TilePanels,
    pub(crate) b: TilePanels,
    /// The operand whose panels the outer loop goes over. The other one should fit L2.
    pub(crate) outer: Operand,
}

/// `to = a · b`, finished as `target` says.
///
/// # Safety
/// `a` and `b` hold `depth` steps of `rows` and `columns`, so `cut`; the process may use the unit and the processor
/// has the instruction set; the target is valid for the product, and nobody else uses it.
pub(crate) unsafe fn block((unit, isa): (TileUnit, Isa), product: TileProduct, target: &Target) {
    // SAFETY: the caller's promise.
    unsafe {
        match unit {
            TileUnit::Model => cut_panels::<Model>(isa, product, target),
            #[cfg(target_arch = "x86_64")]
            TileUnit::Amx => cut_panels::<Amx>(isa, product, target),
            #[cfg(not(target_arch = "x86_64"))]
            TileUnit::Amx => unreachable!("only x86-64 has AMX"),
        }
    }
}

unsafe fn cut_panels<T: Tiles>(isa: Isa, product: TileProduct, target: &Target) {
    // SAFETY: the caller's promise.
    unsafe {
        match product.cut {
            Cut::One => panels::<T, 1>(isa, product, target),
            Cut::Two => panels::<T, 4>(isa, product, target),
            Cut::Three => panels::<T, 6>(isa, product, target),
        }
    }
}

/// Registers for blocks of `rows` rows: sums 0 to 3, the left operand 4 and 5, the right one 6 and 7. Registers that
/// such a block does not use have any shape.
fn shapes(rows: usize) -> Shapes {
    let upper = rows.min(ROWS);
    let lower = if rows > ROWS { rows - ROWS } else { ROWS };
    Shapes::new([upper, upper, lower, lower, upper, lower, ROWS, ROWS])
}

/// Computes all blocks: whole panels of rows first, then the rows that are left.
unsafe fn panels<T: Tiles, const PRODUCTS: usize>(isa: Isa, product: TileProduct, target: &Target) {
    let rows = product.size[0];
    let whole = rows / LANES * LANES;
    let first = if whole > 0 { LANES } else { rows };
    // SAFETY: the process may use the unit (the caller's promise), and this thread has no other value of it.
    let mut tiles = unsafe { T::new(&shapes(first)) };
    let mut sums = TwoBlocks([MaybeUninit::uninit(); 2 * LANES * LANES]);
    let mut task = Blocks::<T, PRODUCTS> {
        tiles: &mut tiles,
        sums: sums.0.as_mut_ptr().cast(),
        isa,
        product,
        target,
        unfinished: Unfinished { sums: std::ptr::null(), size: [0; 2], rows: 0, target: *target },
        ahead: Ahead { from: std::ptr::null(), lines: 0, lines_per_step: 0 },
    };
    // SAFETY: the caller's promise; the registers are configured for these rows.
    unsafe {
        task.blocks(0..whole, LANES);
        if whole < rows {
            if whole > 0 {
                task.tiles.configure(&shapes(rows - whole));
            }
            task.blocks(whole..rows, rows - whole);
        }
        task.unfinished.finish(isa, LANES);
    }
}

/// Panels, and the registers that multiply them.
struct Blocks<'a, T, const PRODUCTS: usize> {
    tiles: &'a mut T,
    /// The two buffers.
    sums: *mut f32,
    isa: Isa,
    product: TileProduct,
    target: &'a Target,
    unfinished: Unfinished,
    ahead: Ahead,
}

/// A block that is multiplied, of which some rows are not finished.
struct Unfinished {
    sums: *const f32,
    /// `[rows, columns]`
    size: [usize; 2],
    /// Rows that are finished.
    rows: usize,
    target: Target,
}

impl Unfinished {
    /// Finishes the next `count` rows, if there are so many.
    ///
    /// # Safety
    /// The buffer holds the sums; the target is valid for the block; the processor has the instruction set.
    #[inline(always)]
    unsafe fn finish(&mut self, isa: Isa, count: usize) {
        let [rows, columns] = self.size;
        let count = count.min(rows - self.rows);
        if count > 0 {
            let target = self.target.at(self.rows, 0);
            // SAFETY: the caller's promise.
            unsafe { finish_rows(isa, self.sums.add(self.rows * LANES), [count, columns], &target) };
            self.rows += count;
        }
    }
}

/// Cache lines of the next panel that are prefetched.
struct Ahead {
    from: *const u8,
    lines: usize,
    lines_per_step: usize,
}

impl Ahead {
    /// Prefetches the lines of one step into L2.
    #[inline(always)]
    fn fetch(&mut self) {
        let count = self.lines_per_step.min(self.lines);
        for line in 0..count {
            prefetch::<false>(self.from.wrapping_add(line * LINE));
        }
        self.from = self.from.wrapping_add(count * LINE);
        self.lines -= count;
    }
}

/// Prefetches a cache line: into L2 for reading, or into L1 for writing. Any address is allowed.
#[inline(always)]
fn prefetch<const WRITE: bool>(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, for any address; a processor without the instruction to prefetch for writing takes it as none.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_ET0, _MM_HINT_T1, _mm_prefetch};
        if WRITE {
            _mm_prefetch::<_MM_HINT_ET0>(address.cast());
        } else {
            _mm_prefetch::<_MM_HINT_T1>(address.cast());
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

impl<T: Tiles, const PRODUCTS: usize> Blocks<'_, T, PRODUCTS> {
    /// Computes the blocks of some rows, `height` each.
    ///
    /// # Safety
    /// As [`block`]; the registers are configured for blocks of this height.
    unsafe fn blocks(&mut self, rows: Range<usize>, height: usize) {
        let [_, columns, depth] = self.product.size;
        let lines = depth * parts(PRODUCTS) * BLOCK * 4 / LINE;
        let down = rows.len().div_ceil(LANES);
        let across = columns.div_ceil(LANES);
        let (outer, inner, panels) = match self.product.outer {
            Operand::Left => (down, across, self.product.a),
            Operand::Right => (across, down, self.product.b),
        };
        let first = if self.product.outer == Operand::Left { rows.start / LANES } else { 0 };
        for i in 0..outer {
            if i + 1 < outer {
                let next = panels.from.wrapping_add((first + i + 1) * panels.panel);
                let lines_per_step = lines.div_ceil((inner * depth).max(1));
                self.ahead = Ahead { from: next.cast(), lines, lines_per_step };
            }
            for j in 0..inner {
                let [row, column] = if self.product.outer == Operand::Left { [i, j] } else { [j, i] };
                let at = [rows.start + row * LANES, column * LANES];
                // SAFETY: the caller's promise.
                unsafe { self.block(at, [height, LANES.min(columns - at[1])]) };
            }
        }
    }

    /// Computes the block of `[rows, columns]` that starts at `[top, left]`.
    ///
    /// # Safety
    /// As [`block`]; the registers are configured for these rows.
    #[inline(always)]
    unsafe fn block(&mut self, [top, left]: [usize; 2], size: [usize; 2]) {
        let target = self.target.at(top, left);
        let direct = size[1].is_multiple_of(ROWS) && target.is_overwritten();
        let TileProduct { a, b, .. } = self.product;
        // SAFETY: the caller's promise. The registers' rows and columns are exactly the block's, or fit the buffer.
        unsafe {
            let a = a.from.add(top / LANES * a.panel);
            let b = b.from.add(left / LANES * b.panel);
            fetch_target(&target, size);
            if direct {
                return self.sum(size, a, b, target.to.at.cast(), target.to.stride);
            }
            let other = self.unfinished.sums == self.sums.cast_const();
            let sums = if other { self.sums.add(LANES * LANES) } else { self.sums };
            self.sum(size, a, b, sums, LANES);
            self.unfinished.finish(self.isa, LANES);
            self.unfinished = Unfinished { sums, size, rows: 0, target };
        }
    }

    /// Stores the sums of a block to rows that are `stride` elements apart.
    #[inline(always)]
    unsafe fn sum(
        &mut self,
        [rows, columns]: [usize; 2],
        a: *const f32,
        b: *const f32,
        to: *mut f32,
        stride: usize,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            match (self.product.outer, rows > ROWS, columns > ROWS) {
                (Operand::Left, true, true) => self.sum_of::<2, 2, true>(a, b, to, stride),
                (Operand::Right, true, true) => self.sum_of::<2, 2, false>(a, b, to, stride),
                (_, true, false) => self.sum_of::<2, 1, false>(a, b, to, stride),
                (_, false, true) => self.sum_of::<1, 2, false>(a, b, to, stride),
                (_, false, false) => self.sum_of::<1, 1, false>(a, b, to, stride),
            }
        }
    }

    /// Sums a block of `DOWN` by `ACROSS` registers, and meanwhile finishes the block before. The left operand is the outer
    /// one if `OUTER_LEFT`.
    unsafe fn sum_of<const DOWN: usize, const ACROSS: usize, const OUTER_LEFT: bool>(
        &mut self,
        a: *const f32,
        b: *const f32,
        to: *mut f32,
        stride: usize,
    ) {
        let (mut a, mut b) = (a, b);
        let depth = self.product.size[2];
        let rows = self.unfinished.size[0].div_ceil(depth.max(1));
        // SAFETY: the caller's promise: the panels hold `depth` steps, the result has a block's rows and columns.
        unsafe {
            self.tiles.zero::<0>();
            self.tiles.zero::<1>();
            self.tiles.zero::<2>();
            self.tiles.zero::<3>();
            for _ in 0..depth {
                Step::<T, DOWN, ACROSS, OUTER_LEFT> { tiles: self.tiles, a, b }.add_products::<PRODUCTS>();
                self.unfinished.finish(self.isa, rows);
                self.ahead.fetch();
                a = a.wrapping_add(parts(PRODUCTS) * BLOCK);
                b = b.wrapping_add(parts(PRODUCTS) * BLOCK);
            }
            let (to, bytes) = (to.cast::<u8>(), stride * 4);
            self.tiles.store::<0>(to, bytes);
            if ACROSS > 1 {
                self.tiles.store::<1>(to.add(ROW), bytes);
            }
            if DOWN > 1 {
                self.tiles.store::<2>(to.wrapping_add(ROWS * bytes), bytes);
            }
            if DOWN > 1 && ACROSS > 1 {
                self.tiles.store::<3>(to.wrapping_add(ROWS * bytes + ROW), bytes);
            }
        }
    }
}

/// Prefetches what finishing a block will read and write.
#[inline(always)]
fn fetch_target(target: &Target, [rows, columns]: [usize; 2]) {
    let fetch_rows = |matrix: MatrixPointer, write: bool| {
        let (width, stride) = (columns * matrix.dtype.bytes(), matrix.stride * matrix.dtype.bytes());
        // Rows that do not begin on a line reach into one more.
        let last = (matrix.at as usize % LINE + width).next_multiple_of(LINE);
        for row in 0..rows {
            let from = matrix.at.wrapping_add(row * stride);
            for byte in (0..last).step_by(LINE) {
                if write {
                    prefetch::<true>(from.wrapping_add(byte))
                } else {
                    prefetch::<false>(from.wrapping_add(byte))
                }
            }
        }
    };
    fetch_rows(target.to, true);
    if target.pre.is_some() {
        fetch_rows(target.pre, true);
    }
    if target.add.is_some() && target.add.at != target.to.at {
        fetch_rows(target.add, false);
    }
    if target.partial.is_some() {
        fetch_rows(target.partial, false);
    }
}

/// Calls `body::<L>(..)` compiled for an instruction set.
macro_rules! with_lanes {
    ($(#[$doc:meta])* unsafe fn $name:ident($($arg:ident: $ty:ty),*) = $body:ident) => {
        $(#[$doc])*
        unsafe fn $name(isa: Isa, $($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c")]
            unsafe fn avx512($($arg: $ty),*) {
                // SAFETY: the caller's promise.
                unsafe { $body::<Avx512>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn avx2($($arg: $ty),*) {
                // SAFETY: the caller's promise.
                unsafe { $body::<Avx2>($($arg),*) }
            }
            // SAFETY: the caller's promise.
            unsafe {
                match isa {
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx512 | Isa::Avx512Bf16 => avx512($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx2 => avx2($($arg),*),
                    _ => $body::<Portable>($($arg),*),
                }
            }
        }
    };
}

with_lanes! {
    /// Finishes rows of a block.
    ///
    /// # Safety
    /// The buffer holds their sums; the target is valid for them; the processor has the instruction set.
    unsafe fn finish_rows(sums: *const f32, size: [usize; 2], target: &Target) = finish_with
}

#[inline(always)]
unsafe fn finish_with<L: Lanes>(sums: *const f32, size: [usize; 2], target: &Target) {
    // SAFETY: the caller's promise.
    unsafe { finish::<L>(std::slice::from_raw_parts(sums, size[0] * LANES), LANES, size, target) }
}
