//! The matrix products of attention on tile registers.
//!
//! [Sheets](crate::attention_tiles::Sheet) of pairs of bf16 have rows of 32 pairs, which lie as tile registers load them: 16
//! rows of 16 pairs, rows two cache lines apart. Only a left operand whose rows are steps is transposed before. Sums are
//! loaded into registers, and stored from them. All sizes are multiples of 32: forward pads keys and queries with rows whose
//! results nobody reads, or whose terms are zero; backward uses the registers for whole sequences of such lengths only.
//!
//! An element is what is there (or zero), plus its packed steps of 32 products, ascending, as [`Tiles::multiply_bf16`] adds them.

use phalanx_plan::trace::DType;
#[cfg(target_arch = "x86_64")]
use phalanx_simd::tiles::Amx;
use phalanx_simd::tiles::{Model, ROWS, Shapes, TileUnit, Tiles};
use phalanx_simd::{Isa, Lanes, vectorized};

use crate::Cpu;
use crate::attention_tiles::{Left, Sheet};
use crate::epilogue::{MatrixPointer, Target, finish};
use crate::microkernel::Packing;

/// Rows and columns of a block, and pairs of a row of a sheet.
pub(crate) const WIDTH: usize = 32;

/// Pairs of a packed step.
const STEP: usize = 16;

/// Bytes of a row of a sheet, and of a row of a register.
const ROW: usize = 128;
const REGISTER: usize = 64;

/// Most pairs of steps of a left operand whose rows are steps.
const TURNED: usize = 64;

/// Instructions that multiply the operands of attention, and the packing of these operands.
#[derive(Clone, Copy)]
pub(crate) struct Path {
    pub(crate) isa: Isa,
    pub(crate) packing: Packing,
    /// Tile registers for the products.
    pub(crate) tiles: Option<TileUnit>,
}

impl Path {
    /// Tile registers for bf16, where there are any and heads of `size` elements have a multiple of 32; else the instruction set.
    pub(crate) fn forward(cpu: &Cpu, size: usize, dtype: DType) -> Path {
        let usable = size.is_multiple_of(WIDTH) && dtype == DType::BF16 && Isa::detect() == Isa::Avx512Bf16;
        let tiles = cpu.tiles.filter(|_| usable);
        // Tile registers multiply what is packed in pairs.
        let isa = if tiles.is_some() { Isa::Avx512Bf16 } else { cpu.isa };
        Path { isa, packing: Packing::of(isa, dtype), tiles }
    }

    /// The same for backward of sequences of `seq` positions, which has no tails on tile registers.
    pub(crate) fn backward(cpu: &Cpu, [seq, size]: [usize; 2], dtype: DType) -> Path {
        if seq.is_multiple_of(WIDTH) {
            return Path::forward(cpu, size, dtype);
        }
        Path { isa: cpu.isa, packing: Packing::of(cpu.isa, dtype), tiles: None }
    }

    /// Rows that an operand of `rows` rows has where it is packed.
    pub(crate) fn padded(&self, rows: usize) -> usize {
        if self.tiles.is_some() { rows.next_multiple_of(WIDTH) } else { rows }
    }

    /// The tile registers of this thread, configured, if they multiply.
    pub(crate) fn registers(&self) -> Option<Registers> {
        // SAFETY: `Cpu::with_options` has made sure of the unit; a task has one `Registers`, and nothing else on this
        // thread uses them meanwhile.
        self.tiles.map(|unit| unsafe { Registers::new(unit) })
    }
}

/// The tile registers of this thread, configured for attention until this is dropped.
pub(crate) enum Registers {
    #[cfg(target_arch = "x86_64")]
    Amx(Amx),
    Model(Box<Model>),
}

impl Registers {
    /// Configures the registers of `unit`.
    ///
    /// # Safety
    /// The process may use the unit, and this thread has no other registers.
    unsafe fn new(unit: TileUnit) -> Registers {
        let shapes = Shapes::new([ROWS; 8]);
        // SAFETY: the caller's promise.
        unsafe {
            match unit {
                TileUnit::Model => Registers::Model(Box::new(Model::new(&shapes))),
                #[cfg(target_arch = "x86_64")]
                TileUnit::Amx => Registers::Amx(Amx::new(&shapes)),
                #[cfg(not(target_arch = "x86_64"))]
                TileUnit::Amx => unreachable!("only x86-64 has AMX"),
            }
        }
    }

    /// `to (+)= a · b` of `[rows, columns, depth]`, with depth in pairs of steps; `target` may only add f32.
    ///
    /// # Safety
    /// The sheets hold the operands; the target is valid for the product, and nobody else uses it; the processor has the
    /// instruction set.
    pub(crate) unsafe fn product(&mut self, isa: Isa, size: [usize; 3], a: Left, b: Sheet, target: &Target) {
        let [rows, columns, depth] = size;
        assert!([rows, columns, 2 * depth].iter().all(|size| size.is_multiple_of(WIDTH)), "{size:?}");
        assert!(target.add.dtype == DType::F32 && !target.partial.is_some() && !target.bias.is_some());
        let mut turned = Turned([0.0; TURNED * WIDTH]);
        let (a, start) = match a {
            Left::Rows(a, start) => (a, start),
            Left::Columns(a) => {
                assert!(rows == WIDTH && depth <= TURNED);
                // SAFETY: the sheet holds so many steps (the caller's promise).
                let steps = unsafe { std::slice::from_raw_parts(a.from, depth * WIDTH) };
                turn(isa, steps, &mut turned.0);
                (Sheet { from: turned.0.as_ptr(), panel: WIDTH * WIDTH }, 0)
            }
        };
        assert!(start.is_multiple_of(STEP));
        for top in (0..rows).step_by(WIDTH) {
            for left in (0..columns).step_by(WIDTH) {
                let a = a.at(top * WIDTH);
                let b = b.at(left / WIDTH * b.panel);
                // SAFETY: the caller's promise.
                unsafe {
                    match self {
                        #[cfg(target_arch = "x86_64")]
                        Registers::Amx(tiles) => {
                            block(tiles, isa, [depth, start], a, b, &target.at(top, left))
                        }
                        Registers::Model(tiles) => {
                            block(&mut **tiles, isa, [depth, start], a, b, &target.at(top, left));
                        }
                    }
                }
            }
        }
    }
}

/// A left operand with its steps along its rows.
#[repr(align(64))]
struct Turned([f32; TURNED * WIDTH]);

vectorized!(fn turn(steps: &[f32], to: &mut [f32]) = turn_body);
/// Transposes `[steps][32]` into panels of 32 steps.
#[inline(always)]
fn turn_body<L: Lanes>(steps: &[f32], to: &mut [f32]) {
    assert!(steps.len() <= to.len() && steps.len().is_multiple_of(STEP * WIDTH));
    for step in (0..steps.len() / WIDTH).step_by(STEP) {
        for half in 0..2 {
            // SAFETY: compiled for L; the square lies in the steps and in the panels (asserted).
            unsafe {
                let mut square = [L::splat(0.0); 16];
                for (i, row) in square.iter_mut().enumerate() {
                    *row = L::load(steps.as_ptr().add((step + i) * WIDTH + half * 16));
                }
                let to = to.as_mut_ptr().add(step / WIDTH * WIDTH * WIDTH + half * 16 * WIDTH + step % WIDTH);
                for (i, row) in L::transpose(square).into_iter().enumerate() {
                    L::store(to.add(i * WIDTH), row);
                }
            }
        }
    }
}

/// Computes a block of 32 x 32 elements.
///
/// # Safety
/// As [`Registers::product`].
#[inline(always)]
unsafe fn block<T: Tiles>(
    tiles: &mut T,
    isa: Isa,
    [depth, start]: [usize; 2],
    a: Sheet,
    b: Sheet,
    target: &Target,
) {
    // SAFETY: the caller's promise.
    unsafe {
        if target.add.is_some() {
            let (from, stride) = (target.add.at.cast_const(), target.add.stride * 4);
            tiles.load::<0>(from, stride);
            tiles.load::<1>(from.add(REGISTER), stride);
            tiles.load::<2>(from.add(ROWS * stride), stride);
            tiles.load::<3>(from.add(ROWS * stride + REGISTER), stride);
        } else {
            tiles.zero::<0>();
            tiles.zero::<1>();
            tiles.zero::<2>();
            tiles.zero::<3>();
        }
        for pair in (0..depth).step_by(STEP) {
            let column = start + pair;
            let a = a.at(column / WIDTH * a.panel + column % WIDTH).from.cast::<u8>();
            let b = b.at(pair * WIDTH).from.cast::<u8>();
            tiles.load::<6>(b, ROW);
            tiles.load::<4>(a, ROW);
            tiles.multiply_bf16::<0, 4, 6>();
            tiles.load::<7>(b.add(REGISTER), ROW);
            tiles.multiply_bf16::<1, 4, 7>();
            tiles.load::<5>(a.add(ROWS * ROW), ROW);
            tiles.multiply_bf16::<2, 5, 6>();
            tiles.multiply_bf16::<3, 5, 7>();
        }
        let mut sums = BlockSums([0.0; WIDTH * WIDTH]);
        let direct = target.to.dtype == DType::F32;
        let (to, stride) = if direct {
            (target.to.at, target.to.stride * 4)
        } else {
            (sums.0.as_mut_ptr().cast(), WIDTH * 4)
        };
        tiles.store::<0>(to, stride);
        tiles.store::<1>(to.add(REGISTER), stride);
        tiles.store::<2>(to.add(ROWS * stride), stride);
        tiles.store::<3>(to.add(ROWS * stride + REGISTER), stride);
        if !direct {
            finish_sums(isa, &sums.0, &Target { add: MatrixPointer::none(), ..*target });
        }
    }
}

/// Sums of a block.
#[repr(align(64))]
struct BlockSums([f32; WIDTH * WIDTH]);

vectorized!(fn finish_sums(sums: &[f32], target: &Target) = finish_sums_body);
/// Rounds and stores the sums of a block.
#[inline(always)]
fn finish_sums_body<L: Lanes>(sums: &[f32], target: &Target) {
    // SAFETY: compiled for L; the target is valid for a block (the promise of `block`).
    unsafe { finish::<L>(sums, WIDTH, [WIDTH; 2], target) };
}
