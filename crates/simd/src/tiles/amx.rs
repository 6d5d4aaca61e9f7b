//! The tile registers of the processor.
//!
//! The compiler has no type for them and never uses them itself, so what one of these instructions leaves in a register is
//! there for the next one. Every function is one instruction. The states of the unit that cost time when threads are
//! switched end when the value is dropped (`tilerelease`).

use std::arch::asm;

use super::{Shapes, Tiles};

/// The tile registers of this thread.
pub struct Amx(());

impl Tiles for Amx {
    #[inline(always)]
    unsafe fn new(shapes: &Shapes) -> Amx {
        let mut tiles = Amx(());
        // SAFETY: the caller's promise.
        unsafe { tiles.configure(shapes) };
        tiles
    }
    #[inline(always)]
    unsafe fn configure(&mut self, shapes: &Shapes) {
        // SAFETY: the processor has the unit (the caller's promise); the shapes are 64 bytes in its layout.
        unsafe { asm!("ldtilecfg [{}]", in(reg) shapes, options(nostack, readonly, preserves_flags)) };
    }
    #[inline(always)]
    unsafe fn zero<const REGISTER: usize>(&mut self) {
        // SAFETY: the registers are configured (`new`).
        unsafe { asm!("tilezero tmm{}", const REGISTER, options(nostack, nomem, preserves_flags)) };
    }
    #[inline(always)]
    unsafe fn load<const REGISTER: usize>(&mut self, from: *const u8, stride: usize) {
        // SAFETY: as above; the rows are valid (the caller's promise).
        unsafe {
            asm!("tileloadd tmm{}, [{} + {}]", const REGISTER, in(reg) from, in(reg) stride,
                options(nostack, readonly, preserves_flags));
        }
    }
    #[inline(always)]
    unsafe fn load_passing<const REGISTER: usize>(&mut self, from: *const u8, stride: usize) {
        // SAFETY: as above.
        unsafe {
            asm!("tileloaddt1 tmm{}, [{} + {}]", const REGISTER, in(reg) from, in(reg) stride,
                options(nostack, readonly, preserves_flags));
        }
    }
    #[inline(always)]
    unsafe fn store<const REGISTER: usize>(&self, to: *mut u8, stride: usize) {
        // SAFETY: as above.
        unsafe {
            asm!("tilestored [{} + {}], tmm{}", in(reg) to, in(reg) stride, const REGISTER,
                options(nostack, preserves_flags));
        }
    }
    #[inline(always)]
    unsafe fn multiply_bf16<const SUMS: usize, const A: usize, const B: usize>(&mut self) {
        // SAFETY: the registers are configured (`new`).
        unsafe {
            asm!("tdpbf16ps tmm{}, tmm{}, tmm{}", const SUMS, const A, const B,
                options(nostack, nomem, preserves_flags));
        }
    }
}

impl Drop for Amx {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: the processor has the unit (the promise of `new`).
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    }
}
