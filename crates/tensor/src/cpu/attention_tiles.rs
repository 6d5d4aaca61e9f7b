//! The matrix products of attention, on operands that other products have just left.
//!
//! Every operand lies in *sheets*: panels of as many columns as a tile has (32 on AVX-512), each `[rows][columns]`
//! packed numbers. A sheet is the right operand as it lies, a step a row. As the left operand it is read either
//! way: a panel's columns are rows of the product (probabilities `[key][query]` times values), or its rows are,
//! and the steps run along them and on into the next panel (the same probabilities times dout, under the sum
//! over queries). So nothing that is computed here is ever packed, and a matrix of f32 is packed once for both
//! uses. How an element is summed is what [`microkernel`](super::microkernel) says.

use std::ops::Range;

use super::epilogue::{Place, Target, finish, finish_plain};
#[cfg(target_arch = "x86_64")]
use super::lanes::{Avx2, Avx512};
use super::lanes::{Lanes, Portable};
use super::matrix::Matrix;
#[cfg(target_arch = "x86_64")]
use super::microkernel::Pairs;
use super::microkernel::{self, Kind, Multiply, Single};
use super::packing::{Form, pack};
use super::simd::Isa;

/// Columns of a panel: queries that are treated together.
pub(super) fn width(isa: Isa) -> usize {
    microkernel::panels(isa).columns
}

/// Cuts `len` rows into as few strips of at most `most` as there can be, of lengths that differ by one at most.
pub(super) fn strips(len: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    let count = len.div_ceil(most);
    (0..count).map(move |i| len * i / count..len * (i + 1) / count)
}

/// A matrix in panels.
#[derive(Clone, Copy)]
pub(super) struct Sheet {
    /// First number of the first panel.
    pub(super) from: *const f32,
    /// Numbers from panel to panel.
    pub(super) panel: usize,
}

impl Sheet {
    /// In `numbers`, which holds panels of `rows` rows.
    pub(super) fn new(isa: Isa, numbers: &[f32], rows: usize) -> Sheet {
        Sheet { from: numbers.as_ptr(), panel: rows * width(isa) }
    }

    /// Numbers of `rows` by `columns`.
    pub(super) fn len(isa: Isa, rows: usize, columns: usize) -> usize {
        rows * columns.next_multiple_of(width(isa))
    }

    /// From a number of the first panel on.
    pub(super) fn at(self, number: usize) -> Sheet {
        Sheet { from: self.from.wrapping_add(number), ..self }
    }

    /// Packs `x` `[steps, lanes]` as a right operand: `kind.packed(steps)` rows.
    pub(super) fn across(isa: Isa, kind: Kind, x: Matrix, to: &mut [f32]) -> Sheet {
        let [steps, lanes] = x.shape();
        let rows = kind.packed(steps);
        assert!(Sheet::len(isa, rows, lanes) <= to.len());
        let width = width(isa);
        let form = Form { kind, lanes: width, width, stride: rows * width };
        // SAFETY: the panels fit (asserted), `Matrix::piece` checks what is read.
        unsafe { pack(isa, x.piece(0..steps, 0..lanes), form, to.as_mut_ptr()) };
        Sheet::new(isa, to, rows)
    }

    /// Packs `x` `[rows, steps]` as a left operand whose rows are those of `x`. Of f32 that is what
    /// [`Sheet::across`] makes of steps that are the rows.
    pub(super) fn along(isa: Isa, kind: Kind, x: Matrix, to: &mut [f32]) -> Sheet {
        if kind == Kind::Single {
            return Sheet::across(isa, kind, x, to);
        }
        let [rows, steps] = x.shape();
        let width = width(isa);
        assert!(Sheet::len(isa, rows, kind.packed(steps)) <= to.len());
        let piece = x.piece(0..rows, 0..steps);
        assert_eq!(piece.lane_stride, 1);
        let from = piece.from.cast::<u16>();
        let to = to.as_mut_ptr();
        for (panel, step) in (0..steps).step_by(2 * width).enumerate() {
            let count = (steps - step).min(2 * width);
            for row in 0..rows {
                // SAFETY: `Matrix::piece` has checked the rows; the panels fit (asserted), whose pairs of bf16
                // lie as they do in memory, the last beside a zero where their number is odd.
                unsafe {
                    let from = from.add(row * piece.step_stride + step);
                    let to = to.add((panel * rows + row) * width).cast::<u16>();
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
        Sheet { from: to, panel: rows * width }
    }
}

/// A left operand.
#[derive(Clone, Copy)]
pub(super) enum Left {
    /// Columns of the first panel are rows of the product, its rows are steps.
    Columns(Sheet),
    /// Rows are rows of the product; the steps start at this column of the first panel.
    Rows(Sheet, usize),
}

/// `to = a · b`, finished as `target` says, for `[rows, columns, depth]`, depth in packed numbers.
///
/// # Safety
/// The sheets hold the operands and the processor has the instruction set; the target is valid for the block,
/// and nobody else touches it.
pub(super) unsafe fn product(isa: Isa, kind: Kind, size: [usize; 3], a: Left, b: Sheet, target: &Target) {
    // SAFETY: the caller's promise.
    unsafe {
        match (isa, kind) {
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512Bf16, Kind::Pairs) => pairs(size, a, b, target),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512 | Isa::Avx512Bf16, Kind::Single) => avx512(size, a, b, target),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2, Kind::Single) => avx2(size, a, b, target),
            (_, Kind::Single) => block::<Portable, Single, 2, 1>(size, a, b, target),
            (_, Kind::Pairs) => unreachable!("pairs are multiplied on Avx512Bf16 only"),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx512bf16,avx2,fma,f16c")]
unsafe fn pairs(size: [usize; 3], a: Left, b: Sheet, target: &Target) {
    // SAFETY: the caller's promise.
    unsafe { block::<Avx512, Pairs, 14, 2>(size, a, b, target) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c")]
unsafe fn avx512(size: [usize; 3], a: Left, b: Sheet, target: &Target) {
    // SAFETY: the caller's promise.
    unsafe { block::<Avx512, Single, 14, 2>(size, a, b, target) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2(size: [usize; 3], a: Left, b: Sheet, target: &Target) {
    // SAFETY: the caller's promise.
    unsafe { block::<Avx2, Single, 6, 1>(size, a, b, target) }
}

/// All tiles: a panel of `b` stays near while the strips of `a` pass.
#[inline(always)]
unsafe fn block<L: Lanes, M: Multiply<L>, const ROWS: usize, const VECTORS: usize>(
    [rows, columns, depth]: [usize; 3],
    a: Left,
    b: Sheet,
    target: &Target,
) {
    let width = VECTORS * 16;
    for left in (0..columns).step_by(width) {
        let count = width.min(columns - left);
        let b = b.from.wrapping_add(left / width * b.panel);
        for strip in strips(rows, ROWS) {
            let size = [strip.len(), count, depth];
            let target = target.at(strip.start, left);
            // SAFETY: the caller's promise.
            unsafe {
                match a {
                    Left::Columns(a) => {
                        strip_tile::<L, M, ROWS, VECTORS, false>(size, a.at(strip.start), 0, b, &target);
                    }
                    Left::Rows(a, start) => {
                        strip_tile::<L, M, ROWS, VECTORS, true>(
                            size,
                            a.at(strip.start * width),
                            start,
                            b,
                            &target,
                        );
                    }
                }
            }
        }
    }
}

/// One tile of a strip of rows.
#[inline(always)]
unsafe fn strip_tile<L: Lanes, M: Multiply<L>, const MOST: usize, const VECTORS: usize, const ALONG: bool>(
    [rows, columns, depth]: [usize; 3],
    a: Sheet,
    start: usize,
    b: *const f32,
    target: &Target,
) {
    let mut buffer = [0f32; 14 * 32];
    let whole = columns == VECTORS * 16 && target.is_plain();
    let to = if whole { None } else { Some(&mut buffer) };
    macro_rules! by_rows {
        ($($n:literal)*) => {
            match rows {
                // SAFETY: the caller's promise.
                $($n if $n <= MOST => unsafe { tile::<L, M, $n, VECTORS, ALONG>(depth, a, start, b, target, to) },)*
                _ => unreachable!("no instruction set has more rows in a tile"),
            }
        };
    }
    by_rows!(1 2 3 4 5 6 7 8 9 10 11 12 13 14);
    if !whole {
        // SAFETY: the caller's promise.
        unsafe { finish::<L>(&mut buffer, VECTORS * 16, [rows, columns], target) };
    }
}

/// Steps of an iteration: so few that the end of a tile is foreseen.
const UNROLLED: usize = 4;

/// The sums of a tile, to `buffer` when there is one, else to their place.
#[inline(always)]
unsafe fn tile<L: Lanes, M: Multiply<L>, const ROWS: usize, const VECTORS: usize, const ALONG: bool>(
    depth: usize,
    a: Sheet,
    start: usize,
    b: *const f32,
    target: &Target,
    buffer: Option<&mut [f32; 14 * 32]>,
) {
    let width = VECTORS * 16;
    let (row, step) = if ALONG { (width, 1) } else { (1, width) };
    // SAFETY: the sheets hold `depth` steps, the target `ROWS` rows (the caller's promise).
    unsafe {
        let mut sums = [[L::splat(0.0); VECTORS]; ROWS];
        let mut from = a.from.wrapping_add(start);
        let mut b = b;
        let mut left = depth;
        let mut run = if ALONG { width - start } else { depth };
        while left > 0 {
            run = run.min(left);
            left -= run;
            macro_rules! steps {
                ($steps:expr) => {
                    for s in 0..$steps {
                        let mut across = [L::splat(0.0); VECTORS];
                        for (v, x) in across.iter_mut().enumerate() {
                            *x = L::load(b.add(s * width + v * 16));
                        }
                        for (r, sums) in sums.iter_mut().enumerate() {
                            let down = L::splat(*from.add(s * step + r * row));
                            for (sum, across) in sums.iter_mut().zip(across) {
                                *sum = M::step(down, across, *sum);
                            }
                        }
                    }
                    from = from.wrapping_add($steps * step);
                    b = b.wrapping_add($steps * width);
                };
            }
            for _ in 0..run / UNROLLED {
                steps!(UNROLLED);
            }
            for _ in 0..run % UNROLLED {
                steps!(1);
            }
            if ALONG {
                from = from.wrapping_add(a.panel - width);
                run = width;
            }
        }
        match buffer {
            None => finish_plain::<L, ROWS, VECTORS>(sums, target),
            Some(buffer) => {
                for (r, sums) in sums.iter().enumerate() {
                    for (v, sum) in sums.iter().enumerate() {
                        L::store(buffer.as_mut_ptr().add((r * VECTORS + v) * 16), *sum);
                    }
                }
            }
        }
    }
}

/// A target in memory of this thread, rows `stride` apart, that is added to or overwritten.
pub(super) fn sums(to: *mut f32, stride: usize, add: bool) -> Target {
    let to = Place::of(to, stride);
    Target { add: if add { to } else { Place::none() }, ..Target::new(to) }
}
