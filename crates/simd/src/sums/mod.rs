//! Sums of the values of several ranks, along one fixed balanced binary tree over the rank index.
//!
//! `sum(lo..hi) = sum(lo..mid) + sum(mid..hi)` with `mid = lo + next_power_of_two(hi - lo) / 2`, element by element; with
//! `accumulate`, `target = target + sum`. So a sum has the same bits whatever moves the bytes, and with every instruction
//! set. bf16 and f16 are widened to f32, added in f32 as above, and rounded once, when the target is written: to nearest
//! even, f16 beyond 65,504 to infinity, every NaN to the same one.
//! Up to eight sources are read in one pass, so that a sum reads each source once and writes once. More sources are summed
//! in tiles that stay in the first-level cache, eight at a time, which is the same tree because its cuts lie at multiples
//! of eight. Tiles hold sums, so f32 also for 16-bit elements.

mod partial;
mod summand;

use std::marker::PhantomData;

use half::{bf16, f16};
pub use partial::{Partial, SumTree, combine, sum_wide};
use summand::{Sum, Summand};

use crate::{Isa, Lanes, vectorized};

/// Bytes of a tile of a sum that takes several passes.
const TILE_BYTES: usize = 4096;
/// Maximum number of sources in one pass.
const PASS_SOURCES: usize = 8;

/// The element types that can be summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "their names say all")]
pub enum Element {
    F64,
    F32,
    Bf16,
    F16,
}

impl Element {
    /// Bytes of a sum of such elements, as it is added ([`sum_wide`]).
    pub fn wide_bytes(self) -> usize {
        if self == Element::F64 { 8 } else { 4 }
    }
}

/// `target (+)= sum of sources`, `elements` each, with the instructions of `isa`.
///
/// # Safety
/// The processor has `isa`. All pointers are aligned to the element and valid for `elements`, and nobody writes the
/// sources meanwhile. The target may be one of the sources, but may not overlap one otherwise.
pub unsafe fn sum(
    isa: Isa,
    element: Element,
    sources: &[*const u8],
    target: *mut u8,
    elements: usize,
    accumulate: bool,
) {
    assert!(!sources.is_empty());
    // SAFETY: the caller's promise.
    unsafe {
        match element {
            Element::F64 => sum_of::<f64>(isa, sources, target.cast(), elements, accumulate),
            Element::F32 => sum_of::<f32>(isa, sources, target.cast(), elements, accumulate),
            Element::Bf16 => sum_of::<bf16>(isa, sources, target.cast(), elements, accumulate),
            Element::F16 => sum_of::<f16>(isa, sources, target.cast(), elements, accumulate),
        }
    }
}

/// # Safety
/// As [`sum`].
unsafe fn sum_of<N: Summand>(
    isa: Isa,
    sources: &[*const u8],
    target: *mut N,
    elements: usize,
    accumulate: bool,
) {
    // SAFETY: the caller's promise; a tile lies inside the buffers.
    unsafe {
        if sources.len() <= PASS_SOURCES {
            return pass(isa, &Pass::<N, N>::new(sources, 0, target, elements, accumulate));
        }
        let tile = TILE_BYTES / size_of::<N::Sum>();
        let mut from = 0;
        while from < elements {
            let here = tile.min(elements - from);
            sum_tile(isa, &Pass::<N, N>::new(sources, from, target.add(from), here, accumulate));
            from += here;
        }
    }
}

/// One tile of a sum of any number of sources: sources of `S` into a target of `T`, which is `S` or its sum.
fn sum_tile<S: Summand, T: Summand<Sum = S::Sum>>(isa: Isa, whole: &Pass<S, T>) {
    let Pass { sources, from, target, elements, accumulate, .. } = *whole;
    if sources.len() <= PASS_SOURCES {
        return pass(isa, whole);
    }
    let (low, high) = sources.split_at(sources.len().next_power_of_two() / 2);
    let mut left = [S::Sum::default(); TILE_BYTES / 4];
    let mut right = [S::Sum::default(); TILE_BYTES / 4];
    // SAFETY: the sources are those of `whole`; a tile has at most as many elements as `left` and `right`, which are
    // this function's own.
    unsafe {
        sum_tile(isa, &Pass::<S, S::Sum>::new(low, from, left.as_mut_ptr(), elements, false));
        sum_tile(isa, &Pass::<S, S::Sum>::new(high, from, right.as_mut_ptr(), elements, false));
        let halves = [left.as_ptr().cast(), right.as_ptr().cast()];
        pass(isa, &Pass::<S::Sum, T>::new(&halves, 0, target, elements, accumulate));
    }
}

/// Sources of `S` from element `from` on, and the target of `T` that their sum goes to.
struct Pass<'a, S, T> {
    sources: &'a [*const u8],
    from: usize,
    target: *mut T,
    elements: usize,
    accumulate: bool,
    element: PhantomData<S>,
}

impl<'a, S: Summand, T: Summand<Sum = S::Sum>> Pass<'a, S, T> {
    /// # Safety
    /// The promises of [`sum`] hold while the pass lives; the target is written from its start.
    unsafe fn new(
        sources: &'a [*const u8],
        from: usize,
        target: *mut T,
        elements: usize,
        accumulate: bool,
    ) -> Pass<'a, S, T> {
        Pass { sources, from, target, elements, accumulate, element: PhantomData }
    }
}

vectorized!(
    fn pass<S: Summand, T: Summand<Sum = S::Sum>>(pass: &Pass<S, T>) = pass_body
);

#[cfg(debug_assertions)]
thread_local! {
    /// The vectors that this thread's last sum was compiled for, for tests; builds with debug assertions only.
    pub static LAST_VECTORS: std::cell::Cell<&'static str> = const { std::cell::Cell::new("none") };
}

/// Adds up to eight sources in one pass.
#[inline(always)]
fn pass_body<L: Lanes, S: Summand, T: Summand<Sum = S::Sum>>(pass: &Pass<S, T>) {
    #[cfg(debug_assertions)]
    LAST_VECTORS.set(std::any::type_name::<L>());
    macro_rules! by_number_of_sources {
        ($($n:literal)*) => {
            match pass.sources.len() {
                $($n => {
                    // SAFETY: the sources are valid from this element on (Pass::new).
                    let sources = std::array::from_fn::<*const S, $n, _>(|i| unsafe {
                        pass.sources[i].cast::<S>().add(pass.from)
                    });
                    // SAFETY: sources and target are valid for these elements (Pass::new).
                    unsafe {
                        if pass.accumulate { over::<L, S, T, $n, true>(sources, pass.target, pass.elements) }
                        else { over::<L, S, T, $n, false>(sources, pass.target, pass.elements) }
                    }
                })*
                n => unreachable!("{n} sources in one pass"),
            }
        };
    }
    by_number_of_sources!(1 2 3 4 5 6 7 8)
}

/// Adds `P` sources vector by vector. All sources of a vector are loaded before it is stored, so the target may be one of
/// the sources. One vector per iteration: memory bounds the sum, and four took 2.5 times as long to compile.
///
/// # Safety
/// Compiled for `L`; sources and target are valid for `elements`.
#[inline(always)]
unsafe fn over<L: Lanes, S, T, const P: usize, const ACCUMULATE: bool>(
    sources: [*const S; P],
    target: *mut T,
    elements: usize,
) where
    S: Summand,
    T: Summand<Sum = S::Sum>,
{
    let lanes = S::Sum::LANES;
    let whole = elements / lanes * lanes;
    // SAFETY: the caller's promise; whole vectors lie before `whole`, the rest behind.
    unsafe {
        for at in (0..whole).step_by(lanes) {
            add_vector::<L, S, T, P, ACCUMULATE>(sources, target, at, lanes);
        }
        if whole < elements {
            add_vector::<L, S, T, P, ACCUMULATE>(sources, target, whole, elements - whole);
        }
    }
}

/// Adds the `count` elements from element `at` on.
///
/// # Safety
/// Compiled for `L`; sources and target are valid for these elements.
#[inline(always)]
unsafe fn add_vector<L: Lanes, S, T, const P: usize, const ACCUMULATE: bool>(
    sources: [*const S; P],
    target: *mut T,
    at: usize,
    count: usize,
) where
    S: Summand,
    T: Summand<Sum = S::Sum>,
{
    // SAFETY: the caller's promise.
    unsafe {
        // No closure: vectors must not pass through a function that is compiled without the vector instructions.
        let mut x = [S::load::<L>(sources[0].add(at), count); P];
        let mut i = 1;
        while i < P {
            x[i] = S::load::<L>(sources[i].add(at), count);
            i += 1;
        }
        let mut sum = tree::<L, S::Sum, P>(x);
        if ACCUMULATE {
            sum = S::Sum::add::<L>(T::load::<L>(target.add(at), count), sum);
        }
        T::store::<L>(target.add(at), sum, count);
    }
}

/// The tree over up to eight leaves, written out. Its left subtree has the largest power of two below P.
///
/// # Safety
/// Compiled for `L`.
#[inline(always)]
unsafe fn tree<L: Lanes, N: Sum, const P: usize>(x: [N::Vector<L>; P]) -> N::Vector<L> {
    macro_rules! plus {
        ($a:expr, $b:expr) => {
            N::add::<L>($a, $b)
        };
    }
    macro_rules! two {
        ($i:expr) => {
            plus!(x[$i], x[$i + 1])
        };
    }
    macro_rules! four {
        ($i:expr) => {
            plus!(two!($i), two!($i + 2))
        };
    }
    // SAFETY: the caller's promise.
    unsafe {
        match P {
            1 => x[0],
            2 => two!(0),
            3 => plus!(two!(0), x[2]),
            4 => four!(0),
            5 => plus!(four!(0), x[4]),
            6 => plus!(four!(0), two!(4)),
            7 => plus!(four!(0), plus!(two!(4), x[6])),
            8 => plus!(four!(0), four!(4)),
            _ => unreachable!("at most eight leaves"),
        }
    }
}
