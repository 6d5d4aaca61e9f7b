//! Packs the rows of heads into [sheets](crate::attention_tiles::Sheet), and prefetches them before they are needed.
//!
//! The rows of a head lie as far apart as the model is wide: each is on another page, and few sets of a cache
//! serve them all. So they are packed once, ahead of use, and fetched while what was packed before is
//! multiplied. Heads of a multiple of 32 numbers are copied by vectors here; others by [`pack`].

use phalanx_plan::trace::DType;
use phalanx_simd::{Isa, Lanes, Number, vectorized};

use crate::attention_tiles::{Sheet, width};
use crate::epilogue::MatrixPointer;
use crate::float::{Float, by_float};
use crate::matrix::Matrix;
use crate::microkernel::Packing;
use crate::packing::{MatrixBlock, PanelLayout, pack};

/// Columns that are copied at once.
const COLUMNS: usize = 32;

/// Bytes of a cache line.
const LINE: usize = 64;

/// A copy of rows into panels. The columns of a row are contiguous, and their number is a multiple of [`COLUMNS`].
#[derive(Clone, Copy)]
struct Copying {
    from: *const u8,
    /// Elements between the starts of two rows.
    stride: usize,
    rows: usize,
    columns: usize,
    to: *mut f32,
    /// Elements between the starts of two panels.
    panel: usize,
    width: usize,
}

impl Copying {
    /// The copy of a matrix block whose steps are rows; None if its lanes are not contiguous or not a multiple of
    /// [`COLUMNS`].
    ///
    /// # Safety
    /// The block is valid to read, and the panels at `to` are valid to write, until the copy is done.
    unsafe fn new(isa: Isa, x: MatrixBlock, to: *mut f32, panel: usize) -> Option<Copying> {
        let MatrixBlock { from, step_stride: stride, depth: rows, lanes: columns, .. } = x;
        let regular = x.lane_stride == 1 && columns % COLUMNS == 0;
        regular.then_some(Copying { from, stride, rows, columns, to, panel, width: width(isa) })
    }

    /// The destination of 16 columns of the first row.
    #[inline(always)]
    fn place(&self, column: usize) -> *mut f32 {
        self.to.wrapping_add(column / self.width * self.panel + column % self.width)
    }
}

impl Sheet {
    /// Packs `x` `[steps, lanes]` as a right operand, from the packed step `first` on: `packing.packed(steps)` rows.
    ///
    /// # Safety
    /// The sheet has room for these rows, and nobody else uses them.
    pub(crate) unsafe fn pack_across(self, isa: Isa, packing: Packing, x: Matrix, first: usize) {
        let [steps, lanes] = x.shape();
        let width = width(isa);
        let to = self.at(first * width).from.cast_mut();
        let piece = x.block(0..steps, 0..lanes);
        // SAFETY: the caller's promise; `Matrix::piece` checks what is read.
        unsafe {
            match (packing, Copying::new(isa, piece, to, self.panel)) {
                (Packing::Single, Some(copying)) => by_float!(piece.dtype, T => copy_rows::<T>(isa, copying)),
                (Packing::Pairs, Some(copying)) => pair_rows(isa, copying),
                (_, None) => {
                    let layout = PanelLayout { packing, lanes: width, width, stride: self.panel };
                    pack(isa, piece, layout, to);
                }
            }
        }
    }

    /// Packs `x` `[lanes, steps]` as a right operand: `packing.packed(steps)` rows.
    ///
    /// # Safety
    /// As for [`Sheet::pack_across`].
    pub(crate) unsafe fn pack_turned(self, isa: Isa, packing: Packing, x: Matrix) {
        let [lanes, steps] = x.shape();
        let to = self.from.cast_mut();
        let mut piece = x.block(0..lanes, 0..steps);
        if packing == Packing::Pairs
            && steps.is_multiple_of(2 * COLUMNS)
            && piece.step_stride.is_multiple_of(2)
        {
            // In memory, pairs of bf16 already have the packed layout.
            piece = MatrixBlock {
                dtype: DType::F32,
                step_stride: piece.step_stride / 2,
                lanes: steps / 2,
                ..piece
            };
        } else if packing == Packing::Pairs {
            piece.lane_stride = 0;
        }
        // SAFETY: the caller's promise; `Matrix::piece` checks what is read.
        unsafe {
            match Copying::new(isa, piece, to, self.panel) {
                Some(copying) => by_float!(piece.dtype, T => turn_rows::<T>(isa, copying)),
                None => self.pack_across(isa, packing, x.t(), 0),
            }
        }
    }

    /// Packs `x` `[rows, steps]` as a left operand whose rows are those of `x`, starting at row `first`. For f32 this
    /// equals [`Sheet::pack_across`] with the rows as steps.
    ///
    /// # Safety
    /// As for [`Sheet::pack_across`].
    pub(crate) unsafe fn pack_along(self, isa: Isa, packing: Packing, x: Matrix, first: usize) {
        if packing == Packing::Single {
            // SAFETY: the caller's promise.
            return unsafe { self.pack_across(isa, packing, x, first) };
        }
        let [rows, steps] = x.shape();
        let width = width(isa);
        let piece = x.block(0..rows, 0..steps);
        assert_eq!(piece.lane_stride, 1);
        let from = piece.from.cast::<u16>();
        let to = self.at(first * width).from.cast_mut();
        for (panel, step) in (0..steps).step_by(2 * width).enumerate() {
            let count = (steps - step).min(2 * width);
            for row in 0..rows {
                // SAFETY: `Matrix::piece` has checked the rows; the panels have room for them (the caller's promise).
                // Pairs of bf16 keep their layout; with an odd number, the last is paired with zero.
                unsafe {
                    let from = from.add(row * piece.step_stride + step);
                    let to = to.add(panel * self.panel + row * width).cast::<u16>();
                    if count == 64 {
                        std::ptr::copy_nonoverlapping(from.cast::<[u16; 64]>(), to.cast(), 1);
                    } else {
                        std::ptr::copy_nonoverlapping(from, to, count);
                        if count % 2 == 1 {
                            to.add(count).write(0);
                        }
                    }
                }
            }
        }
    }
}

vectorized!(fn copy_rows<T: Float>(copying: Copying) = copy_rows_body);
/// Copies rows, widened to f32.
#[inline(always)]
fn copy_rows_body<L: Lanes, T: Float>(copying: Copying) {
    for column in (0..copying.columns).step_by(COLUMNS) {
        // SAFETY: compiled for L; the promise of `Copying::new`.
        unsafe {
            let mut from = copying.from.cast::<T>().add(column);
            let [mut low, mut high] = [copying.place(column), copying.place(column + 16)];
            for _ in 0..copying.rows {
                L::store(low, T::load::<L>(from));
                L::store(high, T::load::<L>(from.add(16)));
                from = from.wrapping_add(copying.stride);
                low = low.wrapping_add(copying.width);
                high = high.wrapping_add(copying.width);
            }
        }
    }
}

vectorized!(fn pair_rows(copying: Copying) = pair_rows_body);
/// Interleaves each two rows of bf16 into one row of pairs; with an odd number of rows, the last is paired with zeros.
#[inline(always)]
fn pair_rows_body<L: Lanes>(copying: Copying) {
    use half::bf16;
    for column in (0..copying.columns).step_by(COLUMNS) {
        // SAFETY: compiled for L; the promise of `Copying::new`.
        unsafe {
            let mut from = copying.from.cast::<bf16>().add(column);
            let [mut low, mut high] = [copying.place(column), copying.place(column + 16)];
            for row in (0..copying.rows).step_by(2) {
                let both = row + 1 < copying.rows;
                let next = from.wrapping_add(copying.stride);
                let mut second = [L::splat(0.0); 2];
                if both {
                    second = [bf16::load::<L>(next), bf16::load::<L>(next.add(16))];
                }
                L::store(low, L::pair_bf16(bf16::load::<L>(from), second[0]));
                L::store(high, L::pair_bf16(bf16::load::<L>(from.add(16)), second[1]));
                from = next.wrapping_add(copying.stride);
                low = low.wrapping_add(copying.width);
                high = high.wrapping_add(copying.width);
            }
        }
    }
}

vectorized!(fn turn_rows<T: Float>(copying: Copying) = turn_rows_body);
/// Transposes rows, widened to f32; columns up to the next whole vector are zero.
#[inline(always)]
fn turn_rows_body<L: Lanes, T: Float>(copying: Copying) {
    let Copying { from, stride, rows, columns, width, .. } = copying;
    for row in (0..rows).step_by(16) {
        for column in (0..columns).step_by(16) {
            // SAFETY: compiled for L; the promise of `Copying::new`.
            unsafe {
                let mut square = [L::splat(0.0); 16];
                let from = from.cast::<T>().add(row * stride + column);
                if rows - row >= 16 {
                    for (i, x) in square.iter_mut().enumerate() {
                        *x = T::load::<L>(from.add(i * stride));
                    }
                } else {
                    for (i, x) in square.iter_mut().enumerate().take(rows - row) {
                        *x = T::load::<L>(from.add(i * stride));
                    }
                }
                let to = copying.place(row).add(column * width);
                for (i, x) in L::transpose(square).into_iter().enumerate() {
                    L::store(to.add(i * width), x);
                }
            }
        }
        if rows - row <= 16 && (row / 16) % 2 == 0 && width == 32 {
            // The other half of the last panel.
            for column in 0..columns {
                // SAFETY: as above.
                unsafe { L::store(copying.place(row + 16).add(column * width), L::splat(0.0)) };
            }
        }
    }
}

/// Prefetches rows that will be packed soon.
pub(crate) fn fetch(x: Matrix) {
    let [rows, columns] = x.shape();
    let piece = x.block(0..rows, 0..columns);
    let bytes = piece.dtype.bytes();
    for row in 0..rows {
        let from = piece.from.wrapping_add(row * piece.step_stride * bytes);
        for byte in (0..columns * bytes).step_by(LINE) {
            prefetch::<false>(from.wrapping_add(byte));
        }
    }
}

/// Prefetches rows of `columns` numbers that will be written soon.
pub(crate) fn fetch_to_write(isa: Isa, to: MatrixPointer, rows: usize, columns: usize) {
    // Every processor with AVX2 has the instruction.
    if isa < Isa::Avx2 {
        return;
    }
    let bytes = to.dtype.bytes();
    for row in 0..rows {
        let at = to.at.wrapping_add(row * to.stride * bytes);
        for byte in (0..columns * bytes).step_by(LINE) {
            prefetch::<true>(at.wrapping_add(byte));
        }
    }
}

/// Prefetches a cache line: into L2 for reading, or into L1 for writing. Any address is allowed.
#[inline(always)]
fn prefetch<const WRITE: bool>(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, for any address.
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
