//! Products of few rows, as sampling has them: the larger operand is read once and never stored in packed form.
//!
//! Such a product is bound by reading memory. What [`packing`](crate::packing) would store is multiplied as it comes from its
//! registers, with the same numbers in the same order as [`microkernel`](crate::microkernel), so with the same bits.

#[cfg(target_arch = "x86_64")]
use phalanx_simd::{Avx2, Avx512};
use phalanx_simd::{Isa, Lanes, Portable};

use crate::epilogue::{Target, finish};
use crate::float::by_float;
#[cfg(target_arch = "x86_64")]
use crate::microkernel::Pairs;
use crate::microkernel::{Multiply, Packing, PanelsA, Single};
use crate::packing::{MatrixBlock, Packer, Paired, Widened, load_square};

/// Most rows of such a product.
pub(crate) const ROWS_MAX: usize = 4;

/// Bytes of the larger operand that a task reads at least, about 5 microseconds.
pub(crate) const TASK_BYTES: usize = 128 << 10;

/// Vectors of sums that stay in registers where lanes are contiguous.
const VECTORS: usize = 16;

/// Steps between the prefetch of contiguous lanes and their use: the rows of a wide matrix are too far apart for the
/// hardware prefetcher.
const AHEAD: usize = 16;

/// `to = a · b`, finished as `target` says: a panel of `rows` packed rows, and a block of b in which lanes or steps are
/// contiguous.
///
/// # Safety
/// `a` holds `rows`, at most [`ROWS_MAX`], in one panel of the block's packed steps; the block is valid to read; the
/// processor has the instruction set; the target is valid for the block, and nobody else uses it.
pub(crate) unsafe fn block(
    isa: Isa,
    packing: Packing,
    rows: usize,
    a: PanelsA,
    b: MatrixBlock,
    target: &Target,
) {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx512bf16,avx2,fma,f16c")]
    unsafe fn pairs(rows: usize, a: PanelsA, b: MatrixBlock, target: &Target) {
        // SAFETY: the caller's promise.
        unsafe { by_rows::<Avx512, Pairs, Paired>(rows, a, b, target) }
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c")]
    unsafe fn avx512(rows: usize, a: PanelsA, b: MatrixBlock, target: &Target) {
        // SAFETY: the caller's promise.
        unsafe { by_float!(b.dtype, T => by_rows::<Avx512, Single, Widened<T>>(rows, a, b, target)) }
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn avx2(rows: usize, a: PanelsA, b: MatrixBlock, target: &Target) {
        // SAFETY: the caller's promise.
        unsafe { by_float!(b.dtype, T => by_rows::<Avx2, Single, Widened<T>>(rows, a, b, target)) }
    }
    // SAFETY: the caller's promise.
    unsafe {
        match (isa, packing) {
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512Bf16, Packing::Pairs) => pairs(rows, a, b, target),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512 | Isa::Avx512Bf16, Packing::Single) => avx512(rows, a, b, target),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2, Packing::Single) => avx2(rows, a, b, target),
            (_, Packing::Single) => {
                by_float!(b.dtype, T => by_rows::<Portable, Single, Widened<T>>(rows, a, b, target));
            }
            (_, Packing::Pairs) => unreachable!("pairs need Avx512Bf16"),
        }
    }
}

#[inline(always)]
unsafe fn by_rows<L: Lanes, M: Multiply<L>, S: Packer>(
    rows: usize,
    a: PanelsA,
    b: MatrixBlock,
    target: &Target,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match rows {
            1 => all::<L, M, S, 1, VECTORS>(a, b, target),
            2 => all::<L, M, S, 2, { VECTORS / 2 }>(a, b, target),
            3 => all::<L, M, S, 3, { VECTORS / 4 }>(a, b, target),
            4 => all::<L, M, S, 4, { VECTORS / 4 }>(a, b, target),
            _ => unreachable!("at most {ROWS_MAX} rows"),
        }
    }
}

#[inline(always)]
unsafe fn all<L: Lanes, M: Multiply<L>, S: Packer, const ROWS: usize, const WIDE: usize>(
    a: PanelsA,
    b: MatrixBlock,
    target: &Target,
) {
    let width = if b.lane_stride == 1 { 16 * WIDE } else { 16 };
    for left in (0..b.lanes).step_by(width) {
        let count = width.min(b.lanes - left);
        let mut sums = [[0f32; 16 * VECTORS]; ROWS];
        // SAFETY: the caller's promise; lanes from `count` on are not read, and the target has the others.
        unsafe {
            let from = b.from.cast::<S::T>().add(left * b.lane_stride);
            if b.lane_stride == 1 {
                across::<L, M, S, ROWS, WIDE>(a, b, from, count, &mut sums);
            } else {
                along::<L, M, S, ROWS>(a, b, from, count, &mut sums);
            }
            let width = 16 * VECTORS;
            finish::<L>(sums.as_flattened(), width, [ROWS, count], &target.at(0, left));
        }
    }
}

/// Sums where steps are contiguous: 16 lanes, turned in registers 16 steps at a time.
///
/// Read so, memory gives two thirds of its rate at most, and rows that are a power of two apart push each other out of
/// the L1 cache. So the next 16 lanes come into L2 in the order of their addresses meanwhile, and from there into L1 two squares
/// before their use: 1.7 to 1.9 times as fast with rows of 512 and 1024 steps of bf16 (AMD Zen 5).
#[inline(always)]
unsafe fn along<L: Lanes, M: Multiply<L>, S: Packer, const ROWS: usize>(
    a: PanelsA,
    b: MatrixBlock,
    from: *const S::T,
    count: usize,
    to: &mut [[f32; 16 * VECTORS]; ROWS],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut sums = [L::splat(0.0); ROWS];
        let mut own = a.from;
        let mut next = CacheLines { lane: from.wrapping_add(16 * b.lane_stride), at: 0 };
        let wide = 16 * S::STEPS;
        for step in (0..b.depth).step_by(wide) {
            for _ in 0..wide * size_of::<S::T>() / 4 {
                next.prefetch::<L>(b);
            }
            let steps = b.depth - step;
            let square = L::transpose(load_square::<L, S>(b, from.add(step), [count, steps], 2 * wide));
            for x in square.into_iter().take(steps.div_ceil(S::STEPS)) {
                for (r, sum) in sums.iter_mut().enumerate() {
                    *sum = M::step(L::splat(*own.add(r)), x, *sum);
                }
                own = own.wrapping_add(a.step);
            }
        }
        for (sum, to) in sums.into_iter().zip(to) {
            L::store(to.as_mut_ptr(), sum);
        }
    }
}

/// Cache lines of lanes with contiguous steps, in the order of their addresses.
struct CacheLines<T> {
    lane: *const T,
    at: usize,
}

impl<T> CacheLines<T> {
    /// Prefetches a line into L2.
    #[inline(always)]
    unsafe fn prefetch<L: Lanes>(&mut self, b: MatrixBlock) {
        // SAFETY: a hint, for any address.
        unsafe { L::prefetch_l2(self.lane.wrapping_add(self.at).cast()) };
        self.at += 64 / size_of::<T>();
        if self.at >= b.depth {
            *self = CacheLines { lane: self.lane.wrapping_add(b.lane_stride), at: 0 };
        }
    }
}

/// Sums where lanes are contiguous: up to `16 * WIDE` of them, step by step.
#[inline(always)]
unsafe fn across<L: Lanes, M: Multiply<L>, S: Packer, const ROWS: usize, const WIDE: usize>(
    a: PanelsA,
    b: MatrixBlock,
    from: *const S::T,
    count: usize,
    to: &mut [[f32; 16 * VECTORS]; ROWS],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut sums = [[L::splat(0.0); WIDE]; ROWS];
        let mut own = a.from;
        for step in (0..b.depth).step_by(S::STEPS) {
            let whole = step + S::STEPS <= b.depth;
            let from = from.add(step * b.step_stride);
            for v in 0..WIDE {
                let lanes = count.saturating_sub(16 * v).min(16);
                let from = from.wrapping_add(16 * v);
                for s in 0..S::STEPS {
                    L::prefetch(from.wrapping_add((AHEAD + s) * b.step_stride).cast());
                }
                let x = S::across::<L>(from, b.step_stride, whole, lanes);
                for (r, sums) in sums.iter_mut().enumerate() {
                    sums[v] = M::step(L::splat(*own.add(r)), x, sums[v]);
                }
            }
            own = own.wrapping_add(a.step);
        }
        for (sums, to) in sums.into_iter().zip(to) {
            for (sum, to) in sums.into_iter().zip(to.chunks_exact_mut(16)) {
                L::store(to.as_mut_ptr(), sum);
            }
        }
    }
}
