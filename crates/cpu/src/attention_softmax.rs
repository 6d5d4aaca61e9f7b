//! The softmax of attention: scores become probabilities (with dropout), and in backward derivatives. They are rounded to
//! pairs of bf16 where the matrix products multiply pairs.
//!
//! Scores lie `[key][query]`, a panel of queries at a time, so every statistic of a query is a lane of a vector.
//! Everything is in powers of two: `p = 2^(score * log2(e) * scale - largest)` is one multiply-add and one
//! [`exp2`](lanes::exp2).

use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use phalanx_simd::{Avx2, Avx512};
use phalanx_simd::{Isa, Lanes, Portable, lanes, vectorized};

use crate::attention_panel::Panel;
use crate::microkernel::Packing;
use crate::random::DropoutMask;

/// The lanes `kept` of `x`, and `other` in the others.
///
/// # Safety
/// Compiled for `L`.
#[inline(always)]
unsafe fn keep<L: Lanes>(x: L::V, other: L::V, kept: &Range<usize>) -> L::V {
    // SAFETY: the caller's promise.
    unsafe { L::keep_first(L::keep_first(other, x, kept.start), other, kept.end) }
}

/// The online softmax of a panel of queries over the keys so far.
pub(crate) struct RunningSoftmax<'a> {
    /// Largest score of each query, times the factor.
    pub(crate) largest: &'a mut [f32],
    /// Sum of probabilities of each query.
    pub(crate) total: &'a mut [f32],
    /// Factor for earlier sums, because the largest score grew.
    pub(crate) fade: &'a mut [f32],
}

/// A source of dropout factors (a mask, or always 1 without dropout), and whether scores are capped.
trait Draw: Copy {
    const SOME: bool;
    const CAPPED: bool = false;
    /// The factors of 16 neighbouring elements, as [`DropoutMask::factors`] gives them.
    unsafe fn factors<L: Lanes>(&self, first: u64) -> L::V;
}

#[derive(Clone, Copy)]
struct Nothing;

impl Draw for Nothing {
    const SOME: bool = false;
    #[inline(always)]
    unsafe fn factors<L: Lanes>(&self, _: u64) -> L::V {
        // SAFETY: the caller's promise.
        unsafe { L::splat(1.0) }
    }
}

impl Draw for DropoutMask {
    const SOME: bool = true;
    #[inline(always)]
    unsafe fn factors<L: Lanes>(&self, first: u64) -> L::V {
        // SAFETY: the caller's promise.
        unsafe { DropoutMask::factors::<L>(self, first) }
    }
}

/// The same under a cap.
#[derive(Clone, Copy)]
struct Capped<D>(D);

impl<D: Draw> Draw for Capped<D> {
    const SOME: bool = D::SOME;
    const CAPPED: bool = true;
    #[inline(always)]
    unsafe fn factors<L: Lanes>(&self, first: u64) -> L::V {
        // SAFETY: the caller's promise.
        unsafe { self.0.factors::<L>(first) }
    }
}

/// Packing of rows; a row has `VECTORS` vectors.
trait Packed<L: Lanes, const VECTORS: usize> {
    /// Two rows in the form in which they are stored.
    type Rows: Copy;
    unsafe fn rows(rows: [[L::V; VECTORS]; 2]) -> Self::Rows;
    /// Stores rows `row` and, if `both`, `row + 1` at `to` as a left operand whose steps run along the rows.
    unsafe fn store_along(rows: Self::Rows, to: *mut f32, row: usize, both: bool);
    /// Stores the two rows as two steps at `to`.
    unsafe fn store_steps(rows: Self::Rows, to: *mut f32, row: usize, both: bool);
}

struct Single;

impl<L: Lanes, const VECTORS: usize> Packed<L, VECTORS> for Single {
    type Rows = [[L::V; VECTORS]; 2];
    #[inline(always)]
    unsafe fn rows(rows: [[L::V; VECTORS]; 2]) -> Self::Rows {
        rows
    }
    #[inline(always)]
    unsafe fn store_along(rows: Self::Rows, to: *mut f32, row: usize, both: bool) {
        // SAFETY: the caller's promise.
        unsafe {
            for (v, x) in rows[0].into_iter().enumerate() {
                L::store(to.add((row * VECTORS + v) * 16), x);
            }
            if both {
                for (v, x) in rows[1].into_iter().enumerate() {
                    L::store(to.add(((row + 1) * VECTORS + v) * 16), x);
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn store_steps(rows: Self::Rows, to: *mut f32, row: usize, both: bool) {
        // SAFETY: the caller's promise.
        unsafe { <Single as Packed<L, VECTORS>>::store_along(rows, to, row, both) }
    }
}

#[cfg(target_arch = "x86_64")]
struct Pairs;

#[cfg(target_arch = "x86_64")]
impl Packed<Avx512, 2> for Pairs {
    type Rows = [std::arch::x86_64::__m512i; 2];
    #[inline(always)]
    unsafe fn rows(rows: [[std::arch::x86_64::__m512; 2]; 2]) -> Self::Rows {
        use std::arch::x86_64::{__m512bh, __m512i, _mm512_cvtne2ps_pbh};
        // SAFETY: `Kind::Pairs` is chosen only where the processor has the instruction; both are 64 bytes.
        unsafe {
            let [a, b] = rows;
            [
                std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(a[1], a[0])),
                std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(b[1], b[0])),
            ]
        }
    }
    #[inline(always)]
    unsafe fn store_along(rows: Self::Rows, to: *mut f32, row: usize, both: bool) {
        // SAFETY: the caller's promise; two panels of queries share one panel of pairs; each fills half of its columns.
        unsafe {
            to.add(row * 32).cast::<std::arch::x86_64::__m512i>().write_unaligned(rows[0]);
            if both {
                to.add((row + 1) * 32).cast::<std::arch::x86_64::__m512i>().write_unaligned(rows[1]);
            }
        }
    }
    #[inline(always)]
    unsafe fn store_steps(rows: Self::Rows, to: *mut f32, row: usize, _: bool) {
        use std::arch::x86_64::{__m512i, _mm512_loadu_si512, _mm512_permutex2var_epi16};
        const LOW: [u16; 32] = interleaved(0);
        const HIGH: [u16; 32] = interleaved(16);
        // SAFETY: the caller's promise; the tables are 64 bytes.
        unsafe {
            let to = to.add(row / 2 * 32).cast::<__m512i>();
            let [a, b] = rows;
            let low = _mm512_permutex2var_epi16(a, _mm512_loadu_si512(LOW.as_ptr().cast()), b);
            let high = _mm512_permutex2var_epi16(a, _mm512_loadu_si512(HIGH.as_ptr().cast()), b);
            to.write_unaligned(low);
            to.add(1).write_unaligned(high);
        }
    }
}

/// Indices that interleave two rows of 32 elements, starting at element `first`; those of the second row count from 32.
#[cfg(target_arch = "x86_64")]
const fn interleaved(first: u16) -> [u16; 32] {
    let mut all = [0; 32];
    let mut i = 0;
    while i < 32 {
        all[i] = first + i as u16 / 2 + 32 * (i as u16 % 2);
        i += 1;
    }
    all
}

/// `pub fn name(isa, packing, keep, capped, args)` that runs `body::<L, P, D, VECTORS>(draw, args)`, compiled for the
/// instruction set, the packing of numbers, and with or without dropout and a cap.
macro_rules! packed {
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) = $body:ident) => {
        $(#[$doc])*
        $vis unsafe fn $name(isa: Isa, packing: Packing, keep: Option<&DropoutMask>, capped: bool, $($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx512bf16,avx2,fma,f16c")]
            unsafe fn pairs<D: Draw>(draw: D, $($arg: $ty),*) {
                // SAFETY: the caller's promise.
                unsafe { $body::<Avx512, Pairs, D, 2>(draw, $($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c")]
            unsafe fn avx512<D: Draw>(draw: D, $($arg: $ty),*) {
                // SAFETY: the caller's promise.
                unsafe { $body::<Avx512, Single, D, 2>(draw, $($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn avx2<D: Draw>(draw: D, $($arg: $ty),*) {
                // SAFETY: the caller's promise.
                unsafe { $body::<Avx2, Single, D, 1>(draw, $($arg),*) }
            }
            unsafe fn by_isa<D: Draw>(isa: Isa, packing: Packing, draw: D, $($arg: $ty),*) {
                // SAFETY: the caller's promise.
                unsafe {
                    match (isa, packing) {
                        #[cfg(target_arch = "x86_64")]
                        (Isa::Avx512Bf16, Packing::Pairs) => pairs(draw, $($arg),*),
                        #[cfg(target_arch = "x86_64")]
                        (Isa::Avx512 | Isa::Avx512Bf16, Packing::Single) => avx512(draw, $($arg),*),
                        #[cfg(target_arch = "x86_64")]
                        (Isa::Avx2, Packing::Single) => avx2(draw, $($arg),*),
                        (_, Packing::Single) => $body::<Portable, Single, D, 1>(draw, $($arg),*),
                        (_, Packing::Pairs) => unreachable!("pairs are multiplied on Avx512Bf16 only"),
                    }
                }
            }
            // SAFETY: the caller's promise.
            unsafe {
                match (keep, capped) {
                    (Some(keep), false) => by_isa(isa, packing, *keep, $($arg),*),
                    (None, false) => by_isa(isa, packing, Nothing, $($arg),*),
                    (Some(keep), true) => by_isa(isa, packing, Capped(*keep), $($arg),*),
                    (None, true) => by_isa(isa, packing, Capped(Nothing), $($arg),*),
                }
            }
        }
    };
}

vectorized!(pub(crate) fn cap(scores: &mut [f32], factor: f32) = cap_body);
/// Replaces q·kᵀ by `tanh(q·kᵀ * factor)`.
#[inline(always)]
fn cap_body<L: Lanes>(scores: &mut [f32], factor: f32) {
    for x in scores.chunks_exact_mut(16) {
        // SAFETY: compiled for L; 16 numbers.
        unsafe { L::store(x.as_mut_ptr(), lanes::tanh::<L>(L::mul(L::load(x.as_ptr()), L::splat(factor)))) };
    }
}

/// Runs `$pair!(key, masked)` for each two keys, ascending: packed rows take the places of scores.
macro_rules! each_pair {
    ($pair:ident, $panel:expr, $vectors:expr) => {
        let (keys, clear) = ($panel.keys, $panel.clear(16 * $vectors));
        let whole = clear.end - clear.end % 2;
        let start = clear.start.next_multiple_of(2).min(whole);
        for [masked, clear] in [[0..start, start..whole], [whole..keys, keys..keys]] {
            for key in masked.step_by(2) {
                $pair!(key, true);
            }
            for key in clear.step_by(2) {
                $pair!(key, false);
            }
        }
    };
}

packed!(
    /// Replaces scores by `2^(factor * score - new largest)` with dropout, packed as steps, and rescales the earlier
    /// sums.
    ///
    /// # Safety
    /// The processor has the instruction set; `scores` holds the panel, with rows padded to an even number.
    pub(crate) fn online_softmax(panel: Panel, scores: &mut [f32], seen: &mut RunningSoftmax) = online_softmax_body
);
#[inline(always)]
unsafe fn online_softmax_body<L: Lanes, P: Packed<L, VECTORS>, D: Draw, const VECTORS: usize>(
    draw: D,
    panel: Panel,
    scores: &mut [f32],
    seen: &mut RunningSoftmax,
) {
    let Panel { keys, factor, .. } = panel;
    assert!(keys.next_multiple_of(2) * VECTORS * 16 <= scores.len());
    let at = |key: usize, v: usize| (key * VECTORS + v) * 16;
    let scores = scores.as_mut_ptr();
    // SAFETY: compiled for L; the panel lies in the scores (asserted).
    unsafe {
        let factor = L::splat(factor);
        let (negated_max, mut total) = grown::<L, VECTORS>(panel, scores, seen);
        macro_rules! pair_of_rows {
            ($key:expr, $masked:expr) => {
                let mut rows = [[L::splat(0.0); VECTORS]; 2];
                for (i, row) in rows.iter_mut().enumerate() {
                    let key = $key + i;
                    if $masked && key >= keys {
                        continue;
                    }
                    for v in 0..VECTORS {
                        let seeing = if $masked { panel.seeing(key, v) } else { 0..16 };
                        if seeing.is_empty() {
                            continue;
                        }
                        let score = L::load(scores.add(at(key, v)));
                        let mut p = lanes::exp2::<L>(L::mul_add(score, factor, negated_max[v]));
                        if $masked {
                            p = keep::<L>(p, L::splat(0.0), &seeing);
                        }
                        total[v] = L::add(total[v], p);
                        if D::SOME {
                            let element = panel.element + key as u64 * panel.next_key + 16 * v as u64;
                            p = L::mul(p, draw.factors::<L>(element));
                        }
                        row[v] = p;
                    }
                }
                P::store_steps(P::rows(rows), scores, $key, $key + 1 < keys);
            };
        }
        each_pair!(pair_of_rows, panel, VECTORS);
        for (v, total) in total.into_iter().enumerate() {
            lanes::store::<L>(seen.total, 16 * v, total, 16);
        }
    }
}

/// Updates each query's largest score with the panel's scores and rescales the earlier total. Returns the negated
/// largest scores and the rescaled totals.
///
/// # Safety
/// Compiled for `L`; the panel lies in the scores.
#[inline(always)]
unsafe fn grown<L: Lanes, const VECTORS: usize>(
    panel: Panel,
    scores: *const f32,
    seen: &mut RunningSoftmax,
) -> ([L::V; VECTORS], [L::V; VECTORS]) {
    let (keys, clear) = (panel.keys, panel.clear(16 * VECTORS));
    let end = clear.end - clear.end % 4;
    let start = clear.start.next_multiple_of(4).min(end);
    let at = |key: usize, v: usize| (key * VECTORS + v) * 16;
    // SAFETY: the caller's promise.
    unsafe {
        let none = L::splat(f32::NEG_INFINITY);
        let factor = L::splat(panel.factor);
        let mut negated_max = [none; VECTORS];
        let mut total = [L::splat(0.0); VECTORS];
        for v in 0..VECTORS {
            let mut chains = [none; 4];
            for key in (start..end).step_by(4) {
                for (i, chain) in chains.iter_mut().enumerate() {
                    *chain = L::max(L::load(scores.add(at(key + i, v))), *chain);
                }
            }
            for key in (0..start).chain(end..keys) {
                let score = keep::<L>(L::load(scores.add(at(key, v))), none, &panel.seeing(key, v));
                chains[key % 4] = L::max(score, chains[key % 4]);
            }
            let [a, b, c, d] = chains;
            let score_max = L::max(L::max(a, b), L::max(c, d));
            let before = lanes::load::<L>(seen.largest, 16 * v, 16);
            let largest = L::max(L::mul(score_max, factor), before);
            let fade = lanes::exp2::<L>(L::sub(before, largest));
            negated_max[v] = L::sub(L::splat(0.0), largest);
            total[v] = L::mul(lanes::load::<L>(seen.total, 16 * v, 16), fade);
            lanes::store::<L>(seen.largest, 16 * v, largest, 16);
            lanes::store::<L>(seen.fade, 16 * v, fade, 16);
        }
        (negated_max, total)
    }
}

/// Values of a panel's queries that backward needs.
#[derive(Clone, Copy)]
pub(crate) struct QueryRows<'a> {
    /// Base-2 log-sum-exp of the scores; infinite for padding queries.
    pub(crate) log_sum_exp2: &'a [f32],
    /// Sum of dout * out, times the scale of the scores.
    pub(crate) delta: &'a [f32],
    /// Factor of the scores.
    pub(crate) scale: f32,
}

/// Buffers of a panel in backward.
#[derive(Clone, Copy)]
pub(crate) struct PanelBuffers {
    /// Scores (under a cap c, score / c), and dout·vᵀ.
    pub(crate) scores: *const f32,
    pub(crate) dp: *const f32,
    /// Probabilities and score gradients, as left operands whose steps are queries. In f32 they may overwrite the
    /// buffers that they are computed from.
    pub(crate) p: *mut f32,
    pub(crate) ds: *mut f32,
    /// Score gradients packed as steps; not written if that is the same layout.
    pub(crate) ds_steps: *mut f32,
}

packed!(
    /// p = 2^(factor * score - lse), then dropout; ds = p * (dropout(dp) - delta) * scale, with p before dropout. Under a
    /// cap, ds is that of the score before it.
    ///
    /// # Safety
    /// The processor has the instruction set; the buffers hold the panel, with rows padded to an even number.
    pub(crate) fn probabilities(panel: Panel, rows: QueryRows, places: PanelBuffers) = probabilities_body
);
#[inline(always)]
unsafe fn probabilities_body<L: Lanes, P: Packed<L, VECTORS>, D: Draw, const VECTORS: usize>(
    draw: D,
    panel: Panel,
    rows: QueryRows,
    places: PanelBuffers,
) {
    let Panel { keys, factor, .. } = panel;
    let at = |key: usize, v: usize| (key * VECTORS + v) * 16;
    // SAFETY: compiled for L; the buffers hold the panel (the caller's promise).
    unsafe {
        let (zero, one) = (L::splat(0.0), L::splat(1.0));
        let (factor, scale) = (L::splat(factor), L::splat(rows.scale));
        let mut lse = [zero; VECTORS];
        let mut delta = [zero; VECTORS];
        for v in 0..VECTORS {
            lse[v] = L::sub(zero, lanes::load::<L>(rows.log_sum_exp2, 16 * v, 16));
            delta[v] = L::sub(zero, lanes::load::<L>(rows.delta, 16 * v, 16));
        }
        macro_rules! pair_of_rows {
            ($key:expr, $masked:expr) => {
                let mut p_rows = [[zero; VECTORS]; 2];
                let mut ds_rows = [[zero; VECTORS]; 2];
                for i in 0..2 {
                    let key = $key + i;
                    if $masked && key >= keys {
                        continue;
                    }
                    for v in 0..VECTORS {
                        let seeing = if $masked { panel.seeing(key, v) } else { 0..16 };
                        if seeing.is_empty() {
                            continue;
                        }
                        let score = L::load(places.scores.add(at(key, v)));
                        let mut dp = L::load(places.dp.add(at(key, v)));
                        let mut p = lanes::exp2::<L>(L::mul_add(score, factor, lse[v]));
                        let mut kept = p;
                        if D::SOME {
                            let element = panel.element + key as u64 * panel.next_key + 16 * v as u64;
                            let factors = draw.factors::<L>(element);
                            dp = L::mul(dp, factors);
                            kept = L::mul(p, factors);
                        }
                        if $masked {
                            p = keep::<L>(p, zero, &seeing);
                            kept = keep::<L>(kept, zero, &seeing);
                            dp = keep::<L>(dp, zero, &seeing);
                        }
                        if D::CAPPED {
                            p = L::mul(p, L::sub(one, L::mul(score, score)));
                        }
                        p_rows[i][v] = kept;
                        ds_rows[i][v] = L::mul(p, L::mul_add(dp, scale, delta[v]));
                    }
                }
                let both = $key + 1 < keys;
                P::store_along(P::rows(p_rows), places.p, $key, both);
                let ds = P::rows(ds_rows);
                P::store_along(ds, places.ds, $key, both);
                if !places.ds_steps.is_null() {
                    P::store_steps(ds, places.ds_steps, $key, both);
                }
            };
        }
        each_pair!(pair_of_rows, panel, VECTORS);
    }
}
