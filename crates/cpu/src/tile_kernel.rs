//! The inner loops of a matrix product on tile registers: packed panels in, blocks of the result out.
//!
//! A block of 32 x 32 elements is four registers of sums; two registers of the left operand and two of the right one are
//! loaded and multiplied crosswise, so that each load serves two multiplications. A panel of the right operand stays in
//! L1 while the panels of the left one come from L2; every tile is 16 contiguous cache lines.
//!
//! An element is, for each block of the inner dimension, the sum over its packed steps ([`STEPS`](crate::tile_packing)
//! of the inner dimension each), ascending; each adds its products as [`Tiles::multiply_bf16`] says. The blocks' sums are
//! added in order, in the [`epilogue`](crate::epilogue). Nothing else enters. Numbers of several parts add, in every
//! packed step, the products of their parts, the largest one (that of the first parts) last. Of three parts, the products
//! of the second with the third and of the third with the third are left out: together at most 2^-26 of the product. Of
//! f32 in two parts, the product of the second parts is left out, too, which is smaller than what two parts lack.
//!
//! Tails: the last rows have registers of exactly their size, and up to 16 last columns have one register instead of two.

#[cfg(target_arch = "x86_64")]
use phalanx_simd::tiles::Amx;
use phalanx_simd::tiles::{Model, Shapes, TileUnit, Tiles};
#[cfg(target_arch = "x86_64")]
use phalanx_simd::{Avx2, Avx512};
use phalanx_simd::{Isa, Lanes, Portable};

use crate::epilogue::{Target, finish};
use crate::tile_packing::{BLOCK, Cut, LANES};

/// Most rows of a register.
const ROWS: usize = 16;

/// Bytes of a register.
const BYTES: usize = 1024;

/// Bytes between two rows of a packed tile.
const ROW: usize = 64;

/// Packed panels of an operand.
#[derive(Clone, Copy)]
pub(crate) struct TilePanels {
    /// First step of the first panel, on a cache line.
    pub(crate) from: *const f32,
    /// Elements of four bytes between the starts of two panels.
    pub(crate) panel: usize,
}

/// Sums of a block, for the epilogue.
#[repr(align(64))]
struct Sums([f32; LANES * LANES]);

/// `to = a · b`, finished as `target` says, for a block of `[rows, columns, depth]`, with depth in packed steps.
///
/// # Safety
/// `a` and `b` hold `depth` steps of `rows` and `columns`, so `cut`; the process may use the unit and the processor
/// has the instruction set; the target is valid for the block, and nobody else uses it.
pub(crate) unsafe fn block(
    (unit, isa): (TileUnit, Isa),
    cut: Cut,
    size: [usize; 3],
    [a, b]: [TilePanels; 2],
    target: &Target,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match unit {
            TileUnit::Model => cut_panels::<Model>(isa, cut, size, [a, b], target),
            #[cfg(target_arch = "x86_64")]
            TileUnit::Amx => cut_panels::<Amx>(isa, cut, size, [a, b], target),
            #[cfg(not(target_arch = "x86_64"))]
            TileUnit::Amx => unreachable!("only x86-64 has AMX"),
        }
    }
}

unsafe fn cut_panels<T: Tiles>(
    isa: Isa,
    cut: Cut,
    size: [usize; 3],
    [a, b]: [TilePanels; 2],
    target: &Target,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match cut {
            Cut::One => panels::<T, 1>(isa, size, a, b, target),
            Cut::Two => panels::<T, 4>(isa, size, a, b, target),
            Cut::TwoOfThree => panels::<T, 3>(isa, size, a, b, target),
            Cut::Three => panels::<T, 6>(isa, size, a, b, target),
        }
    }
}

/// Parts of the numbers of which so many products are added.
const fn parts(products: usize) -> usize {
    match products {
        1 => 1,
        3 | 4 => 2,
        _ => 3,
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
unsafe fn panels<T: Tiles, const PRODUCTS: usize>(
    isa: Isa,
    [rows, columns, depth]: [usize; 3],
    a: TilePanels,
    b: TilePanels,
    target: &Target,
) {
    let whole = rows / LANES * LANES;
    let first = if whole > 0 { LANES } else { rows };
    // SAFETY: the process may use the unit (the caller's promise), and this thread has no other value of it.
    let mut tiles = unsafe { T::new(&shapes(first)) };
    let sums = Sums([0.0; LANES * LANES]);
    let mut task = Blocks::<T, PRODUCTS> { tiles: &mut tiles, sums, isa, depth, a, b, target };
    // SAFETY: the caller's promise; the registers are configured for these rows.
    unsafe {
        for left in (0..columns).step_by(LANES) {
            for top in (0..whole).step_by(LANES) {
                task.block([top, left], [LANES, LANES.min(columns - left)]);
            }
        }
        if whole == rows {
            return;
        }
        if whole > 0 {
            task.tiles.configure(&shapes(rows - whole));
        }
        for left in (0..columns).step_by(LANES) {
            task.block([whole, left], [rows - whole, LANES.min(columns - left)]);
        }
    }
}

/// Panels, and the registers that multiply them.
struct Blocks<'a, T, const PRODUCTS: usize> {
    tiles: &'a mut T,
    sums: Sums,
    isa: Isa,
    depth: usize,
    a: TilePanels,
    b: TilePanels,
    target: &'a Target,
}

impl<T: Tiles, const PRODUCTS: usize> Blocks<'_, T, PRODUCTS> {
    /// Computes the block of `[rows, columns]` that starts at `[top, left]`.
    ///
    /// # Safety
    /// As [`block`]; the registers are configured for these rows.
    #[inline(always)]
    unsafe fn block(&mut self, [top, left]: [usize; 2], [rows, columns]: [usize; 2]) {
        let target = self.target.at(top, left);
        let buffer = self.sums.0.as_mut_ptr();
        let direct = columns.is_multiple_of(ROWS) && target.is_overwritten();
        // SAFETY: the caller's promise. The registers' rows and columns are exactly the block's, or fit the buffer.
        unsafe {
            let a = self.a.from.add(top / LANES * self.a.panel);
            let b = self.b.from.add(left / LANES * self.b.panel);
            if direct {
                return self.sum([rows, columns], a, b, target.to.at.cast(), target.to.stride);
            }
            prefetch(self.isa, [rows, columns], &target);
            self.sum([rows, columns], a, b, buffer, LANES);
            finish_block(self.isa, buffer, [rows, columns], &target);
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
            match (rows > ROWS, columns > ROWS) {
                (true, true) => self.sum_of::<2, 2>(a, b, to, stride),
                (true, false) => self.sum_of::<2, 1>(a, b, to, stride),
                (false, true) => self.sum_of::<1, 2>(a, b, to, stride),
                (false, false) => self.sum_of::<1, 1>(a, b, to, stride),
            }
        }
    }

    /// Sums a block of `DOWN` by `ACROSS` registers.
    unsafe fn sum_of<const DOWN: usize, const ACROSS: usize>(
        &mut self,
        a: *const f32,
        b: *const f32,
        to: *mut f32,
        stride: usize,
    ) {
        let (mut a, mut b) = (a, b);
        // SAFETY: the caller's promise: the panels hold `depth` steps, the result has a block's rows and columns.
        unsafe {
            self.tiles.zero::<0>();
            self.tiles.zero::<1>();
            self.tiles.zero::<2>();
            self.tiles.zero::<3>();
            for _ in 0..self.depth {
                Step::<T, DOWN, ACROSS> { tiles: self.tiles, a, b }.add_products::<PRODUCTS>();
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

/// One packed step of a block: its operands' tiles, part by part.
struct Step<'t, T, const DOWN: usize, const ACROSS: usize> {
    tiles: &'t mut T,
    a: *const f32,
    b: *const f32,
}

impl<T: Tiles, const DOWN: usize, const ACROSS: usize> Step<'_, T, DOWN, ACROSS> {
    /// Adds the products of the parts, in an order that loads few tiles anew.
    #[inline(always)]
    unsafe fn add_products<const PRODUCTS: usize>(mut self) {
        // SAFETY: the panels hold the parts (the caller's promise).
        unsafe {
            self.left(0);
            match PRODUCTS {
                1 => self.right(0),
                3 => {
                    self.right(1);
                    self.multiply();
                    self.left(1);
                    self.right(0);
                    self.multiply();
                    self.left(0);
                }
                4 => {
                    self.right(1);
                    self.multiply();
                    self.left(1);
                    self.multiply();
                    self.right(0);
                    self.multiply();
                    self.left(0);
                }
                _ => {
                    self.right(2);
                    self.multiply();
                    self.right(1);
                    self.multiply();
                    self.left(1);
                    self.multiply();
                    self.right(0);
                    self.multiply();
                    self.left(2);
                    self.multiply();
                    self.left(0);
                }
            }
            self.multiply();
        }
    }

    #[inline(always)]
    unsafe fn left(&mut self, part: usize) {
        let from = self.a.wrapping_add(part * BLOCK).cast::<u8>();
        // SAFETY: the caller's promise.
        unsafe {
            self.tiles.load::<4>(from, ROW);
            if DOWN > 1 {
                self.tiles.load::<5>(from.add(BYTES), ROW);
            }
        }
    }

    #[inline(always)]
    unsafe fn right(&mut self, part: usize) {
        let from = self.b.wrapping_add(part * BLOCK).cast::<u8>();
        // SAFETY: the caller's promise.
        unsafe {
            self.tiles.load::<6>(from, ROW);
            if ACROSS > 1 {
                self.tiles.load::<7>(from.add(BYTES), ROW);
            }
        }
    }

    #[inline(always)]
    unsafe fn multiply(&mut self) {
        // SAFETY: the registers are configured (the caller's promise).
        unsafe {
            self.tiles.multiply_bf16::<0, 4, 6>();
            if ACROSS > 1 {
                self.tiles.multiply_bf16::<1, 4, 7>();
            }
            if DOWN > 1 {
                self.tiles.multiply_bf16::<2, 5, 6>();
            }
            if DOWN > 1 && ACROSS > 1 {
                self.tiles.multiply_bf16::<3, 5, 7>();
            }
        }
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
    /// Finishes the sums of a block.
    ///
    /// # Safety
    /// The buffer holds them; the target is valid for the block; the processor has the instruction set.
    unsafe fn finish_block(sums: *const f32, size: [usize; 2], target: &Target) = finish_with
}

with_lanes! {
    /// Prefetches what finishing a block will read and write.
    ///
    /// # Safety
    /// The processor has the instruction set.
    unsafe fn prefetch(size: [usize; 2], target: &Target) = prefetch_with
}

#[inline(always)]
unsafe fn finish_with<L: Lanes>(sums: *const f32, size: [usize; 2], target: &Target) {
    // SAFETY: the caller's promise.
    unsafe { finish::<L>(std::slice::from_raw_parts(sums, size[0] * LANES), LANES, size, target) }
}

#[inline(always)]
unsafe fn prefetch_with<L: Lanes>([rows, columns]: [usize; 2], target: &Target) {
    target.prefetch::<L>(rows, columns);
}
