//! The law of sums: one fixed balanced binary tree over the rank index.
//!
//! `sum(lo..hi) = sum(lo..mid) + sum(mid..hi)` with `mid = lo + next_power_of_two(hi - lo) / 2`, element
//! by element; with `accumulate`, `target = target + sum`. The same bits whatever moves the bytes.
//! Up to eight sources are read in one pass, so that a sum reads each source once and writes once; more
//! are summed in tiles that stay in the first-level cache, eight leaves at a time, which is the same
//! tree because its cuts lie at multiples of eight.

use phalanx_tensor::DType;

/// Bytes of a tile when more than eight ranks are summed.
const TILE_BYTES: usize = 4096;
/// Sources of one pass.
const LEAVES: usize = 8;

/// Whether elements of this type can be summed. bf16 and f16 will be summed in f32 and rounded once.
pub fn can_sum(dtype: DType) -> bool {
    match dtype {
        DType::F32 | DType::F64 => true,
        DType::BF16 | DType::F16 | DType::U32 => false,
    }
}

/// `target (+)= sum of sources`, `elements` each.
///
/// # Safety
/// All pointers are aligned to the element and valid for `elements`, and nobody writes the sources
/// meanwhile. The target may be one of the sources, but may not overlap one otherwise.
pub unsafe fn sum(dtype: DType, sources: &[*const u8], target: *mut u8, elements: usize, accumulate: bool) {
    assert!(!sources.is_empty());
    // SAFETY: passed on.
    unsafe {
        match dtype {
            DType::F32 => sum_of::<f32>(sources, target.cast(), elements, accumulate),
            DType::F64 => sum_of::<f64>(sources, target.cast(), elements, accumulate),
            DType::BF16 | DType::F16 | DType::U32 => unreachable!("Call::check refuses {dtype:?}"),
        }
    }
}

/// # Safety
/// As [`sum`].
unsafe fn sum_of<T: Number>(sources: &[*const u8], target: *mut T, elements: usize, accumulate: bool) {
    // SAFETY: passed on; a tile lies inside the buffers.
    unsafe {
        if sources.len() <= LEAVES {
            return pass(sources, 0, target, elements, accumulate);
        }
        let tile = TILE_BYTES / size_of::<T>();
        let mut from = 0;
        while from < elements {
            let here = tile.min(elements - from);
            tree_of_tiles::<T>(sources, from, target.add(from), here, accumulate);
            from += here;
        }
    }
}

/// One tile of the tree above the leaves.
///
/// # Safety
/// As [`sum`]; reads sources from element `from` on, writes the target from its start.
unsafe fn tree_of_tiles<T: Number>(
    sources: &[*const u8],
    from: usize,
    target: *mut T,
    elements: usize,
    accumulate: bool,
) {
    // SAFETY: passed on; the scratch tiles are this function's own.
    unsafe {
        if sources.len() <= LEAVES {
            return pass(sources, from, target, elements, accumulate);
        }
        let (low, high) = sources.split_at(sources.len().next_power_of_two() / 2);
        let mut left = [T::default(); TILE_BYTES / 4];
        let mut right = [T::default(); TILE_BYTES / 4];
        tree_of_tiles(low, from, left.as_mut_ptr(), elements, false);
        tree_of_tiles(high, from, right.as_mut_ptr(), elements, false);
        pass(&[left.as_ptr().cast(), right.as_ptr().cast()], 0, target, elements, accumulate);
    }
}

/// Up to eight sources in one pass.
///
/// # Safety
/// As [`sum`]; reads sources from element `from` on, writes the target from its start.
unsafe fn pass<T: Number>(
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
                        let s: [*const T; $n] = std::array::from_fn(|i| sources[i].cast::<T>().add(from));
                        if accumulate { widest::<T, $n, true>(s, target, elements) }
                        else { widest::<T, $n, false>(s, target, elements) }
                    })*
                    n => unreachable!("{n} sources in one pass"),
                }
            };
        }
        of!(1 2 3 4 5 6 7 8)
    }
}

/// The loop with the widest vectors of this machine that matter to memory.
///
/// # Safety
/// As [`sum`].
unsafe fn widest<T: Number, const P: usize, const ACCUMULATE: bool>(
    sources: [*const T; P],
    target: *mut T,
    elements: usize,
) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2")]
        unsafe fn avx2<T: Number, const P: usize, const A: bool>(s: [*const T; P], t: *mut T, n: usize) {
            // SAFETY: passed on.
            unsafe { over::<T, T::Avx, P, A>(s, t, n) }
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the instructions exist (detected).
            return unsafe { avx2::<T, P, ACCUMULATE>(sources, target, elements) };
        }
    }
    // SAFETY: passed on.
    unsafe { over::<T, T, P, ACCUMULATE>(sources, target, elements) }
}

/// The loop, vectors `V` at a time, the rest one by one. A vector of every source is loaded before any is
/// stored, so the target may be one of the sources.
///
/// # Safety
/// As [`sum`].
#[inline(always)]
unsafe fn over<T: Number, V: Lanes<T>, const P: usize, const ACCUMULATE: bool>(
    sources: [*const T; P],
    target: *mut T,
    elements: usize,
) {
    let width = size_of::<V>() / size_of::<T>();
    let whole = elements / width * width;
    // SAFETY: whole vectors lie before `whole`, single elements behind.
    unsafe {
        for at in (0..whole).step_by(width) {
            one::<T, V, P, ACCUMULATE>(sources, target, at);
        }
        for at in whole..elements {
            one::<T, T, P, ACCUMULATE>(sources, target, at);
        }
    }
}

/// One vector.
///
/// # Safety
/// As [`sum`], with a whole vector at element `at`.
#[inline(always)]
unsafe fn one<T: Number, V: Lanes<T>, const P: usize, const ACCUMULATE: bool>(
    sources: [*const T; P],
    target: *mut T,
    at: usize,
) {
    // SAFETY: passed on.
    unsafe {
        let mut sum = tree::<T, V, P>(sources.map(|p| V::load(p.add(at))));
        if ACCUMULATE {
            sum = V::load(target.add(at)).plus(sum);
        }
        sum.store(target.add(at));
    }
}

/// The tree over up to eight leaves, written out: the cut is the largest power of two below P.
#[inline(always)]
fn tree<T, V: Lanes<T>, const P: usize>(x: [V; P]) -> V {
    let two = |i: usize| x[i].plus(x[i + 1]);
    let four = |i: usize| two(i).plus(two(i + 2));
    match P {
        1 => x[0],
        2 => two(0),
        3 => two(0).plus(x[2]),
        4 => four(0),
        5 => four(0).plus(x[4]),
        6 => four(0).plus(two(4)),
        7 => four(0).plus(two(4).plus(x[6])),
        8 => four(0).plus(four(4)),
        _ => unreachable!("at most eight leaves"),
    }
}

/// One or several neighbouring elements.
trait Lanes<T>: Copy {
    /// # Safety
    /// Readable from the pointer on; the processor has the instructions.
    unsafe fn load(from: *const T) -> Self;
    /// # Safety
    /// Writable from the pointer on; the processor has the instructions.
    unsafe fn store(self, to: *mut T);
    fn plus(self, other: Self) -> Self;
}

/// A type that is summed.
trait Number: Lanes<Self> + Copy + Default {
    /// Its 32-byte vector.
    #[cfg(target_arch = "x86_64")]
    type Avx: Lanes<Self>;
}

macro_rules! number {
    ($number:ty, $vector:ident, $load:ident, $store:ident, $add:ident) => {
        impl Lanes<$number> for $number {
            #[inline(always)]
            unsafe fn load(from: *const $number) -> $number {
                // SAFETY: passed on.
                unsafe { *from }
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut $number) {
                // SAFETY: passed on.
                unsafe { *to = self }
            }
            #[inline(always)]
            fn plus(self, other: $number) -> $number {
                self + other
            }
        }
        #[cfg(target_arch = "x86_64")]
        impl Lanes<$number> for std::arch::x86_64::$vector {
            #[inline(always)]
            unsafe fn load(from: *const $number) -> Self {
                // SAFETY: passed on.
                unsafe { std::arch::x86_64::$load(from) }
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut $number) {
                // SAFETY: passed on.
                unsafe { std::arch::x86_64::$store(to, self) }
            }
            #[inline(always)]
            fn plus(self, other: Self) -> Self {
                // SAFETY: a value of this type was loaded, so the processor has the instructions.
                unsafe { std::arch::x86_64::$add(self, other) }
            }
        }
        impl Number for $number {
            #[cfg(target_arch = "x86_64")]
            type Avx = std::arch::x86_64::$vector;
        }
    };
}
number!(f32, __m256, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_add_ps);
number!(f64, __m256d, _mm256_loadu_pd, _mm256_storeu_pd, _mm256_add_pd);

#[cfg(test)]
mod tests {
    use super::*;

    /// The law as it is written at the head.
    fn oracle(x: &[f32]) -> f32 {
        match x.len() {
            1 => x[0],
            n => {
                let (low, high) = x.split_at(n.next_power_of_two() / 2);
                oracle(low) + oracle(high)
            }
        }
    }

    /// Values of very different sizes, so that every order of additions gives other bits.
    fn value(rank: usize, i: usize) -> f32 {
        let h = ((rank * 7919 + i * 104_729 + 12345) as u32).wrapping_mul(2_654_435_761);
        (h as f32 / u32::MAX as f32 - 0.5) * 10f32.powi((h % 9) as i32 - 4)
    }

    #[test]
    fn sums_follow_the_tree_bit_for_bit() {
        for world in [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 16, 17, 19, 33] {
            for elements in [0, 1, 15, 16, 17, 1000, 1024, 2500] {
                let data: Vec<Vec<f32>> =
                    (0..world).map(|r| (0..elements).map(|i| value(r, i)).collect()).collect();
                let sources: Vec<*const u8> = data.iter().map(|d| d.as_ptr().cast()).collect();
                for accumulate in [false, true] {
                    let mut out: Vec<f32> = (0..elements).map(|i| value(99, i)).collect();
                    // SAFETY: local buffers of the same length.
                    unsafe {
                        sum(DType::F32, &sources, out.as_mut_ptr().cast(), elements, accumulate);
                    }
                    for (i, got) in out.iter().enumerate() {
                        let column: Vec<f32> = data.iter().map(|d| d[i]).collect();
                        let tree = oracle(&column);
                        let expected = if accumulate { value(99, i) + tree } else { tree };
                        assert_eq!(got.to_bits(), expected.to_bits(), "{world} ranks, element {i}");
                    }
                }
            }
        }
    }
}
