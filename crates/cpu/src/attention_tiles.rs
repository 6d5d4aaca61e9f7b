//! The matrix products of attention, on operands that other products have just left.
//!
//! Every operand lies in *sheets*: panels of as many columns as a tile has (32 on AVX-512), each `[rows][columns]`
//! packed numbers. A sheet is the right operand as it lies, a step a row. As the left operand it is read either
//! way: a panel's columns are rows of the product (probabilities `[key][query]` times values), or its rows are,
//! and the steps run along them and on into the next panel (the same probabilities times dout, under the sum
//! over queries). So nothing that is computed here is ever packed, and a matrix of f32 is packed once for both
//! uses. How an element is summed is what [`microkernel`](crate::microkernel) says.

use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use phalanx_simd::{Avx2, Avx512};
use phalanx_simd::{Isa, Lanes, Portable};

use crate::epilogue::{MatrixPointer, Target, finish, finish_plain};
#[cfg(target_arch = "x86_64")]
use crate::microkernel::Pairs;
use crate::microkernel::{self, Multiply, Packing, Single};

/// Columns of a panel: queries that are computed together.
pub(crate) fn width(isa: Isa) -> usize {
    microkernel::panels(isa).columns
}

/// Cuts `len` rows into as few strips as possible of at most `len_max` rows, whose lengths differ by one at most.
pub(crate) fn strips(len: usize, len_max: usize) -> impl Iterator<Item = Range<usize>> {
    let count = len.div_ceil(len_max).max(1);
    let (shorter, longer) = (len / count, len % count);
    (0..len.min(count)).map(move |i| {
        let start = i * shorter + i.min(longer);
        start..start + shorter + usize::from(i < longer)
    })
}

/// A matrix packed in panels.
#[derive(Clone, Copy)]
pub(crate) struct Sheet {
    /// The first element of the first panel.
    pub(crate) from: *const f32,
    /// Elements between the starts of two panels.
    pub(crate) panel: usize,
}

impl Sheet {
    /// A sheet in `numbers`, with panels of `rows` rows.
    pub(crate) fn new(isa: Isa, numbers: &mut [f32], rows: usize) -> Sheet {
        Sheet { from: numbers.as_mut_ptr(), panel: rows * width(isa) }
    }

    /// Elements of a sheet of `rows` by `columns`.
    pub(crate) fn len(isa: Isa, rows: usize, columns: usize) -> usize {
        rows * columns.next_multiple_of(width(isa))
    }

    /// Fills `rows` of all panels of `columns` columns with zeros.
    ///
    /// # Safety
    /// The sheet has these rows, and nobody else uses them.
    pub(crate) unsafe fn clear(self, isa: Isa, rows: Range<usize>, columns: usize) {
        let width = width(isa);
        for panel in 0..columns.div_ceil(width) {
            let to = self.at(panel * self.panel + rows.start * width).from.cast_mut();
            // SAFETY: the caller's promise.
            unsafe { to.write_bytes(0, rows.len() * width) };
        }
    }

    /// The sheet that starts at an element of the first panel.
    pub(crate) fn at(self, number: usize) -> Sheet {
        Sheet { from: self.from.wrapping_add(number), ..self }
    }
}

/// A left operand.
#[derive(Clone, Copy)]
pub(crate) enum Left {
    /// The columns of the first panel are rows of the product; its rows are steps.
    Columns(Sheet),
    /// The rows are rows of the product; the steps start at this column of the first panel.
    Rows(Sheet, usize),
}

/// `to = a · b`, finished as `target` says. The size is `[rows, columns, depth]`, with depth in packed elements.
///
/// # Safety
/// The sheets hold the operands and the processor has the instruction set; the target is valid for the block, and
/// nobody else touches it.
pub(crate) unsafe fn product(
    isa: Isa,
    packing: Packing,
    size: [usize; 3],
    a: Left,
    b: Sheet,
    target: &Target,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match (isa, packing) {
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512Bf16, Packing::Pairs) => pairs(size, a, b, target),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512 | Isa::Avx512Bf16, Packing::Single) => avx512(size, a, b, target),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2, Packing::Single) => avx2(size, a, b, target),
            (_, Packing::Single) => block::<Portable, Single, 2, 1, 16>(size, a, b, target),
            (_, Packing::Pairs) => unreachable!("pairs need Avx512Bf16"),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx512bf16,avx2,fma,f16c")]
unsafe fn pairs(size: [usize; 3], a: Left, b: Sheet, target: &Target) {
    // SAFETY: the caller's promise.
    unsafe { block::<Avx512, Pairs, 14, 2, 32>(size, a, b, target) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c")]
unsafe fn avx512(size: [usize; 3], a: Left, b: Sheet, target: &Target) {
    // SAFETY: the caller's promise.
    unsafe { block::<Avx512, Single, 14, 2, 32>(size, a, b, target) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2(size: [usize; 3], a: Left, b: Sheet, target: &Target) {
    // SAFETY: the caller's promise.
    unsafe { block::<Avx2, Single, 6, 1, 16>(size, a, b, target) }
}

/// Like [`product`] with a plain target, for the upper half of the columns of one panel of 32. `b` and the target
/// describe all 32 columns.
///
/// # Safety
/// As for [`product`].
pub(crate) unsafe fn upper_half(
    isa: Isa,
    packing: Packing,
    [rows, depth]: [usize; 2],
    a: Sheet,
    b: Sheet,
    to: &Target,
) {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx512bf16,avx2,fma,f16c")]
    unsafe fn pairs(size: [usize; 2], a: Sheet, b: *const f32, to: &Target) {
        // SAFETY: the caller's promise.
        unsafe { column::<Avx512, Pairs>(size, a, b, to) }
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c")]
    unsafe fn avx512(size: [usize; 2], a: Sheet, b: *const f32, to: &Target) {
        // SAFETY: the caller's promise.
        unsafe { column::<Avx512, Single>(size, a, b, to) }
    }
    let (b, to) = (b.from.wrapping_add(16), to.at(0, 16));
    // SAFETY: the caller's promise.
    unsafe {
        match (isa, packing) {
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512Bf16, Packing::Pairs) => pairs([rows, depth], a, b, &to),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512 | Isa::Avx512Bf16, Packing::Single) => avx512([rows, depth], a, b, &to),
            _ => unreachable!("only AVX-512 has panels of 32 columns"),
        }
    }
}

/// Computes tiles with one vector of columns.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn column<L: Lanes, M: Multiply<L>>([rows, depth]: [usize; 2], a: Sheet, b: *const f32, to: &Target) {
    let mut row = 0;
    macro_rules! tiles {
        ($($n:literal)*) => {
            $(while rows - row >= $n {
                // SAFETY: the caller's promise.
                unsafe { tile::<L, M, $n, 1, 32, true>(depth, a.at(row * 32), 0, b, &to.at(row, 0), std::ptr::null_mut()) };
                row += $n;
            })*
        };
    }
    tiles!(16 8 4 2 1);
}

/// Computes all tiles: a panel of `b` stays in cache while the strips of `a` are read.
#[inline(always)]
unsafe fn block<L: Lanes, M: Multiply<L>, const ROWS: usize, const VECTORS: usize, const WIDTH: usize>(
    [rows, columns, depth]: [usize; 3],
    a: Left,
    b: Sheet,
    target: &Target,
) {
    for left in (0..columns).step_by(WIDTH) {
        let count = WIDTH.min(columns - left);
        let b = b.from.wrapping_add(left / WIDTH * b.panel);
        for strip in strips(rows, ROWS) {
            let size = [strip.len(), count, depth];
            let target = target.at(strip.start, left);
            // SAFETY: the caller's promise.
            unsafe {
                match a {
                    Left::Columns(a) => {
                        let a = a.at(strip.start);
                        strip_tile::<L, M, ROWS, VECTORS, WIDTH, false>(size, a, 0, b, &target);
                    }
                    Left::Rows(a, start) => {
                        let a = a.at(strip.start * WIDTH);
                        strip_tile::<L, M, ROWS, VECTORS, WIDTH, true>(size, a, start, b, &target);
                    }
                }
            }
        }
    }
}

/// One tile of a strip of rows.
#[inline(always)]
unsafe fn strip_tile<
    L: Lanes,
    M: Multiply<L>,
    const ROWS_MAX: usize,
    const VECTORS: usize,
    const WIDTH: usize,
    const ALONG: bool,
>(
    [rows, columns, depth]: [usize; 3],
    a: Sheet,
    start: usize,
    b: *const f32,
    target: &Target,
) {
    // Not zeroed: whole tiles of a plain target do not use it.
    let mut buffer = std::mem::MaybeUninit::<[f32; 14 * 32]>::uninit();
    let whole = columns == WIDTH && target.is_plain();
    let to = if whole { std::ptr::null_mut() } else { buffer.as_mut_ptr().cast::<f32>() };
    macro_rules! by_rows {
        ($($n:literal)*) => {
            match rows {
                // SAFETY: the caller's promise.
                $($n if $n <= ROWS_MAX => unsafe {
                    tile::<L, M, $n, VECTORS, WIDTH, ALONG>(depth, a, start, b, target, to)
                },)*
                _ => unreachable!("no instruction set has more rows in a tile"),
            }
        };
    }
    by_rows!(1 2 3 4 5 6 7 8 9 10 11 12 13 14);
    if !whole {
        // SAFETY: the caller's promise; the tile has written its rows.
        unsafe {
            let sums = std::slice::from_raw_parts(to, rows * WIDTH);
            finish::<L>(sums, WIDTH, [rows, columns], target);
        }
    }
}

/// Computes the sums of a tile into `buffer`, or, if it is null, directly into the target.
#[inline(always)]
unsafe fn tile<
    L: Lanes,
    M: Multiply<L>,
    const ROWS: usize,
    const VECTORS: usize,
    const WIDTH: usize,
    const ALONG: bool,
>(
    depth: usize,
    a: Sheet,
    start: usize,
    b: *const f32,
    target: &Target,
    buffer: *mut f32,
) {
    let (row, step) = if ALONG { (WIDTH, 1) } else { (1, WIDTH) };
    // SAFETY: the sheets hold `depth` steps, the target `ROWS` rows (the caller's promise).
    unsafe {
        let mut sums = [[L::splat(0.0); VECTORS]; ROWS];
        let mut from = a.from.wrapping_add(start);
        let mut b = b;
        let mut left = depth;
        let mut run = if ALONG { WIDTH - start } else { depth };
        while left > 0 {
            run = run.min(left);
            left -= run;
            for _ in 0..run {
                let mut across = [L::splat(0.0); VECTORS];
                for (v, x) in across.iter_mut().enumerate() {
                    *x = L::load(b.add(v * 16));
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    let down = L::splat(*from.add(r * row));
                    for (sum, across) in sums.iter_mut().zip(across) {
                        *sum = M::step(down, across, *sum);
                    }
                }
                from = from.wrapping_add(step);
                b = b.wrapping_add(WIDTH);
            }
            if ALONG {
                from = from.wrapping_add(a.panel - WIDTH);
                run = WIDTH;
            }
        }
        if buffer.is_null() {
            return finish_plain::<L, ROWS, VECTORS>(sums, target);
        }
        for (r, sums) in sums.iter().enumerate() {
            for (v, sum) in sums.iter().enumerate() {
                L::store(buffer.add(r * WIDTH + v * 16), *sum);
            }
        }
    }
}

/// A target in this thread's memory, with rows `stride` apart; the product is added to it or overwrites it.
pub(crate) fn sums(to: *mut f32, stride: usize, add: bool) -> Target {
    let to = MatrixPointer::of(to, stride);
    Target { add: if add { to } else { MatrixPointer::none() }, ..Target::new(to) }
}
