//! One step of a product on tile registers: loads the tiles of both operands and multiplies them onto four sums.

use phalanx_simd::tiles::Tiles;

use crate::tile_packing::BLOCK;

/// Bytes of a register.
const BYTES: usize = 1024;

/// Bytes between two rows of a packed tile.
pub(crate) const ROW: usize = 64;

/// Parts of the numbers of which so many products are added.
pub(crate) const fn parts(products: usize) -> usize {
    match products {
        1 => 1,
        3 | 4 => 2,
        _ => 3,
    }
}

/// One packed step of a block: its operands' tiles, part by part.
pub(crate) struct Step<'t, T, const DOWN: usize, const ACROSS: usize, const OUTER_LEFT: bool> {
    pub(crate) tiles: &'t mut T,
    pub(crate) a: *const f32,
    pub(crate) b: *const f32,
}

impl<T: Tiles, const DOWN: usize, const ACROSS: usize, const OUTER_LEFT: bool>
    Step<'_, T, DOWN, ACROSS, OUTER_LEFT>
{
    /// Adds the products of the parts, in an order that loads few tiles anew.
    ///
    /// # Safety
    /// The panels hold the parts; registers 0 to 3 hold the sums, and all are configured for the block.
    #[inline(always)]
    pub(crate) unsafe fn add_products<const PRODUCTS: usize>(mut self) {
        // SAFETY: the panels hold the parts (the caller's promise).
        unsafe {
            match PRODUCTS {
                1 => return self.add_single(),
                3 => {
                    self.left(0);
                    self.right(1);
                    self.multiply();
                    self.left(1);
                    self.right(0);
                    self.multiply();
                    self.left(0);
                }
                4 => {
                    self.left(0);
                    self.right(1);
                    self.multiply();
                    self.left(1);
                    self.multiply();
                    self.right(0);
                    self.multiply();
                    self.left(0);
                }
                _ => {
                    self.left(0);
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

    /// Adds the product of numbers of one part; each load stands before the first multiplication that needs it.
    #[inline(always)]
    unsafe fn add_single(&mut self) {
        let (a, b) = (self.a.cast::<u8>(), self.b.cast::<u8>());
        // SAFETY: the caller's promise.
        unsafe {
            self.load::<6, false>(b);
            self.load::<4, true>(a);
            self.tiles.multiply_bf16::<0, 4, 6>();
            if ACROSS > 1 {
                self.load::<7, false>(b.add(BYTES));
                self.tiles.multiply_bf16::<1, 4, 7>();
            }
            if DOWN > 1 {
                self.load::<5, true>(a.add(BYTES));
                self.tiles.multiply_bf16::<2, 5, 6>();
            }
            if DOWN > 1 && ACROSS > 1 {
                self.tiles.multiply_bf16::<3, 5, 7>();
            }
        }
    }

    /// Loads a tile: of the outer operand through L1, of the inner one past it.
    #[inline(always)]
    unsafe fn load<const REGISTER: usize, const LEFT: bool>(&mut self, from: *const u8) {
        // SAFETY: the caller's promise.
        unsafe {
            if LEFT == OUTER_LEFT {
                self.tiles.load::<REGISTER>(from, ROW);
            } else {
                self.tiles.load_passing::<REGISTER>(from, ROW);
            }
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
