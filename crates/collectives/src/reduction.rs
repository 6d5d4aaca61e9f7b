//! The law of sums: one fixed balanced binary tree over the rank index.
//!
//! `sum(lo..hi) = sum(lo..mid) + sum(mid..hi)` with `mid = lo + next_power_of_two(hi - lo) / 2`, element
//! by element; with `accumulate`, `target = target + sum`. The same bits whatever moves the bytes.
//! bf16 and f16 are widened to f32, added in f32 as above, and rounded once, when the target is written: to
//! nearest even, f16 beyond 65,504 to infinity, every NaN to the same one.
//! Up to eight sources are read in one pass, so that a sum reads each source once and writes once; more
//! are summed in tiles that stay in the first-level cache, eight leaves at a time, which is the same
//! tree because its cuts lie at multiples of eight. Tiles hold sums, so f32 also for 16-bit elements.

mod lanes;
#[cfg(test)]
mod tests;

use half::{bf16, f16};
#[cfg(target_arch = "x86_64")]
use lanes::x86;
use lanes::{Number, Plus, Registers, Single, Wide};
use phalanx_tensor::DType;

/// Bytes of a tile when more than eight ranks are summed.
const TILE_BYTES: usize = 4096;
/// Sources of one pass.
const LEAVES: usize = 8;

/// Whether elements of this type can be summed.
pub fn can_sum(dtype: DType) -> bool {
    match dtype {
        DType::F64 | DType::F32 | DType::BF16 | DType::F16 => true,
        DType::U32 => false,
    }
}

/// `target (+)= sum of sources`, `elements` each.
///
/// # Safety
/// All pointers are aligned to the element and valid for `elements`, and nobody writes the sources
/// meanwhile. The target may be one of the sources, but may not overlap one otherwise.
pub unsafe fn sum(dtype: DType, sources: &[*const u8], target: *mut u8, elements: usize, accumulate: bool) {
    // SAFETY: passed on; the instructions exist (detected).
    unsafe { sum_by(Isa::detect(), dtype, sources, target, elements, accumulate) }
}

/// Instructions that add: bits are the same with all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // some are of one architecture
enum Isa {
    /// What every processor has.
    Portable,
    /// AVX2 and F16C.
    Avx2,
    /// AVX-512 F.
    Avx512,
}

impl Isa {
    /// The widest of this machine.
    fn detect() -> Isa {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx512f") {
            return Isa::Avx512;
        } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
            return Isa::Avx2;
        }
        Isa::Portable
    }
}

/// # Safety
/// As [`sum`]; the processor has the instructions.
unsafe fn sum_by(
    isa: Isa,
    dtype: DType,
    sources: &[*const u8],
    target: *mut u8,
    elements: usize,
    accumulate: bool,
) {
    assert!(!sources.is_empty());
    // SAFETY: passed on.
    unsafe {
        match dtype {
            DType::F64 => sum_of::<f64>(isa, sources, target.cast(), elements, accumulate),
            DType::F32 => sum_of::<f32>(isa, sources, target.cast(), elements, accumulate),
            DType::BF16 => sum_of::<bf16>(isa, sources, target.cast(), elements, accumulate),
            DType::F16 => sum_of::<f16>(isa, sources, target.cast(), elements, accumulate),
            DType::U32 => unreachable!("Call::check refuses {dtype:?}"),
        }
    }
}

/// # Safety
/// As [`sum_by`].
unsafe fn sum_of<N: Number>(
    isa: Isa,
    sources: &[*const u8],
    target: *mut N,
    elements: usize,
    accumulate: bool,
) {
    // SAFETY: passed on; a tile lies inside the buffers.
    unsafe {
        if sources.len() <= LEAVES {
            return pass::<N, N>(isa, sources, 0, target, elements, accumulate);
        }
        let tile = TILE_BYTES / size_of::<N::Sum>();
        let mut from = 0;
        while from < elements {
            let here = tile.min(elements - from);
            tree_of_tiles::<N, N>(isa, sources, from, target.add(from), here, accumulate);
            from += here;
        }
    }
}

/// One tile of the tree above the leaves: sources of `S` into a target of `T`, which is `S` or its sum.
///
/// # Safety
/// As [`sum_by`]; reads sources from element `from` on, writes the target from its start.
unsafe fn tree_of_tiles<S: Number, T: Number<Sum = S::Sum>>(
    isa: Isa,
    sources: &[*const u8],
    from: usize,
    target: *mut T,
    elements: usize,
    accumulate: bool,
) {
    // SAFETY: passed on; the scratch tiles are this function's own.
    unsafe {
        if sources.len() <= LEAVES {
            return pass::<S, T>(isa, sources, from, target, elements, accumulate);
        }
        let (low, high) = sources.split_at(sources.len().next_power_of_two() / 2);
        let mut left = [S::Sum::default(); TILE_BYTES / 4];
        let mut right = [S::Sum::default(); TILE_BYTES / 4];
        tree_of_tiles::<S, S::Sum>(isa, low, from, left.as_mut_ptr(), elements, false);
        tree_of_tiles::<S, S::Sum>(isa, high, from, right.as_mut_ptr(), elements, false);
        let halves = [left.as_ptr(), right.as_ptr()];
        if accumulate {
            by_isa::<S::Sum, T, 2, true>(isa, halves, target, elements);
        } else {
            by_isa::<S::Sum, T, 2, false>(isa, halves, target, elements);
        }
    }
}

/// Up to eight sources in one pass.
///
/// # Safety
/// As [`sum_by`]; reads sources from element `from` on, writes the target from its start.
unsafe fn pass<S: Number, T: Number<Sum = S::Sum>>(
    isa: Isa,
    sources: &[*const u8],
    from: usize,
    target: *mut T,
    elements: usize,
    accumulate: bool,
) {
    // SAFETY: passed on; `from` lies inside the sources.
    unsafe {
        macro_rules! of {
            ($($n:literal)*) => {
                match sources.len() {
                    $($n => {
                        let s: [*const S; $n] = std::array::from_fn(|i| sources[i].cast::<S>().add(from));
                        if accumulate { by_isa::<S, T, $n, true>(isa, s, target, elements) }
                        else { by_isa::<S, T, $n, false>(isa, s, target, elements) }
                    })*
                    n => unreachable!("{n} sources in one pass"),
                }
            };
        }
        of!(1 2 3 4 5 6 7 8)
    }
}

/// The loop with these instructions.
///
/// # Safety
/// As [`sum_by`].
unsafe fn by_isa<S: Number, T: Number<Sum = S::Sum>, const P: usize, const ACCUMULATE: bool>(
    isa: Isa,
    sources: [*const S; P],
    target: *mut T,
    elements: usize,
) {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn avx2<S: Number, T: Number<Sum = S::Sum>, const P: usize, const A: bool>(
        s: [*const S; P],
        t: *mut T,
        n: usize,
    ) {
        // SAFETY: passed on.
        unsafe { over::<x86::Avx2, S, T, P, A>(s, t, n) }
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    unsafe fn avx512<S: Number, T: Number<Sum = S::Sum>, const P: usize, const A: bool>(
        s: [*const S; P],
        t: *mut T,
        n: usize,
    ) {
        // SAFETY: passed on.
        unsafe { over::<x86::Avx512, S, T, P, A>(s, t, n) }
    }
    // SAFETY: passed on.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => avx512::<S, T, P, ACCUMULATE>(sources, target, elements),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => avx2::<S, T, P, ACCUMULATE>(sources, target, elements),
            _ => over::<Single, S, T, P, ACCUMULATE>(sources, target, elements),
        }
    }
}

/// The loop, a register at a time, the rest one by one. All sources are loaded before any is stored, so the
/// target may be one of the sources.
///
/// # Safety
/// As [`sum_by`].
#[inline(always)]
unsafe fn over<R, S, T, const P: usize, const ACCUMULATE: bool>(
    sources: [*const S; P],
    target: *mut T,
    elements: usize,
) where
    R: Registers,
    S: Number,
    T: Number<Sum = S::Sum>,
{
    let width = size_of::<<S::Sum as Wide>::Register<R>>() / size_of::<S::Sum>();
    let whole = elements / width * width;
    // SAFETY: whole registers lie before `whole`, single elements behind.
    unsafe {
        for at in (0..whole).step_by(width) {
            one::<R, S, T, P, ACCUMULATE>(sources, target, at);
        }
        for at in whole..elements {
            one::<Single, S, T, P, ACCUMULATE>(sources, target, at);
        }
    }
}

/// One register.
///
/// # Safety
/// As [`sum_by`], with a whole register of elements at element `at`.
#[inline(always)]
unsafe fn one<R, S, T, const P: usize, const ACCUMULATE: bool>(
    sources: [*const S; P],
    target: *mut T,
    at: usize,
) where
    R: Registers,
    S: Number,
    T: Number<Sum = S::Sum>,
{
    // SAFETY: passed on.
    unsafe {
        // No closure: the vectors must not pass through a function that is compiled without them.
        let mut x = [S::load::<R>(sources[0].add(at)); P];
        let mut i = 1;
        while i < P {
            x[i] = S::load::<R>(sources[i].add(at));
            i += 1;
        }
        let mut sum = tree(x);
        if ACCUMULATE {
            sum = T::load::<R>(target.add(at)).plus(sum);
        }
        T::store::<R>(sum, target.add(at));
    }
}

/// The tree over up to eight leaves, written out: the cut is the largest power of two below P.
#[inline(always)]
fn tree<V: Plus, const P: usize>(x: [V; P]) -> V {
    macro_rules! two {
        ($i:expr) => {
            x[$i].plus(x[$i + 1])
        };
    }
    macro_rules! four {
        ($i:expr) => {
            two!($i).plus(two!($i + 2))
        };
    }
    match P {
        1 => x[0],
        2 => two!(0),
        3 => two!(0).plus(x[2]),
        4 => four!(0),
        5 => four!(0).plus(x[4]),
        6 => four!(0).plus(two!(4)),
        7 => four!(0).plus(two!(4).plus(x[6])),
        8 => four!(0).plus(four!(4)),
        _ => unreachable!("at most eight leaves"),
    }
}
