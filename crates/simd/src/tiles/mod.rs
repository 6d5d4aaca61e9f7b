//! Tile registers: eight small matrices in registers, and an instruction that multiplies two of them onto a third.
//!
//! A register holds up to 16 rows of 64 bytes. A kernel is written once over [`Tiles`]. [`Amx`] is the matrix unit of
//! Intel processors (Intel Architecture Software Developer's Manual, volume 1, chapter "Programming with Intel Advanced
//! Matrix Extensions"). [`Model`] computes the same bits in plain Rust on any processor, so that packing, blocking, tails
//! and errors of a kernel are tested where there is no such unit.

#[cfg(target_arch = "x86_64")]
mod amx;
mod model;
mod unit;

#[cfg(target_arch = "x86_64")]
pub use amx::Amx;
pub use model::Model;
pub use unit::{NoAmx, TileUnit, amx};

/// Registers.
pub const REGISTERS: usize = 8;

/// Most rows of a register.
pub const ROWS: usize = 16;

/// Most bytes of a row.
pub const ROW_BYTES: usize = 64;

/// Rows, and bytes of a row, of every register, as the instruction `ldtilecfg` reads them.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Shapes {
    /// Registers with these numbers of rows, each of 64 bytes.
    ///
    /// # Panics
    /// When a register has no row or more than 16.
    pub fn new(rows: [usize; REGISTERS]) -> Shapes {
        assert!(rows.iter().all(|rows| (1..=ROWS).contains(rows)), "{rows:?}");
        let mut shapes =
            Shapes { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        shapes.row_bytes[..REGISTERS].fill(ROW_BYTES as u16);
        for (to, rows) in shapes.rows.iter_mut().zip(rows) {
            *to = rows as u8;
        }
        shapes
    }

    /// Rows of a register.
    fn rows(&self, register: usize) -> usize {
        usize::from(self.rows[register])
    }
}

/// The tile registers of one thread, from when they are configured until this is dropped. Registers are named by number.
///
/// # Safety
/// This holds for every unsafe function here. The processor has the implementor's unit, and the process may use it
/// ([`amx`]). A thread has one value of an implementor at a time. Pointers are valid for all rows of the register, which
/// lie `stride` bytes apart, at any alignment (whole cache lines are fastest).
#[expect(clippy::missing_safety_doc, reason = "one contract for all functions: the trait's Safety section")]
pub trait Tiles: Sized {
    /// Configures the registers; they hold zeros.
    unsafe fn new(shapes: &Shapes) -> Self;
    /// Configures them anew; they hold zeros again.
    unsafe fn configure(&mut self, shapes: &Shapes);
    /// Fills a register with zeros.
    unsafe fn zero<const REGISTER: usize>(&mut self);
    /// Loads the rows of a register.
    unsafe fn load<const REGISTER: usize>(&mut self, from: *const u8, stride: usize);
    /// Loads the rows of a register, which should not displace what the first-level cache holds.
    unsafe fn load_passing<const REGISTER: usize>(&mut self, from: *const u8, stride: usize);
    /// Stores the rows of a register.
    unsafe fn store<const REGISTER: usize>(&self, to: *mut u8, stride: usize);
    /// `sums += a · b`, as `tdpbf16ps` computes it. `sums` holds f32 `[m][16]`; `a` bf16 `[m][16 pairs]`; `b` bf16
    /// `[16 pairs][16][2]`, so that the two numbers of a pair of `a` meet two numbers beside each other.
    ///
    /// An element is summed in two chains of fused multiply-adds from zero, one over the first numbers of the pairs and
    /// one over the second; then the chains are added, and their sum to what is there. Every step rounds to nearest
    /// even, takes subnormal numbers as zero and flushes subnormal results to zero.
    unsafe fn multiply_bf16<const SUMS: usize, const A: usize, const B: usize>(&mut self);
}
