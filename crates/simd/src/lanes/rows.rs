//! Loops over rows of numbers, by vectors: sums, maxima, exponentials.
//!
//! A row that is not a whole number of vectors ends in one whose first lanes count; they are the same
//! operations.

use super::Lanes;

/// Folds a row: `fold_row!(L, len, start, |state, at, count| next, join)`. `next` adds `count` elements starting at
/// `at`, in the first lanes. Element i goes to lane i mod 64, that is, to four vectors in turn, which hide the latency
/// of an addition and are joined at the end.
///
/// A macro, because the body of a closure would be compiled without the features of the function around it, and be slow
/// where it is not inlined. To be used inside `unsafe`, compiled for `L`.
#[macro_export]
macro_rules! fold_row {
    ($L:ty, $len:expr, $start:expr, |$state:ident, $at:ident, $count:ident| $next:expr, $join:expr) => {{
        let len: usize = $len;
        let (mut a, mut b) = (<$L>::splat($start), <$L>::splat($start));
        let (mut c, mut d) = (a, b);
        let mut base = 0;
        macro_rules! take {
            ($chain:ident, $offset:expr, $n:expr) => {{
                let ($state, $at, $count) = ($chain, base + $offset, $n);
                $chain = $next;
            }};
        }
        while base + 64 <= len {
            take!(a, 0, 16);
            take!(b, 16, 16);
            take!(c, 32, 16);
            take!(d, 48, 16);
            base += 64;
        }
        if base < len {
            take!(a, 0, (len - base).min(16));
        }
        if base + 16 < len {
            take!(b, 16, (len - base - 16).min(16));
        }
        if base + 32 < len {
            take!(c, 32, (len - base - 32).min(16));
        }
        if base + 48 < len {
            take!(d, 48, (len - base - 48).min(16));
        }
        $join($join(a, b), $join(c, d))
    }};
}

/// Sum over a row: `sum_row!(L, len, |at, count| value)`; lanes of the value from `count` on do not matter.
/// As [`fold_row!`].
#[macro_export]
macro_rules! sum_row {
    ($L:ty, $len:expr, |$at:ident, $count:ident| $value:expr) => {
        $crate::lanes::sum::<$L>($crate::fold_row!(
            $L,
            $len,
            0.0,
            |state, $at, $count| {
                let x = $value;
                <$L>::add(state, if $count == 16 { x } else { <$L>::keep_first(x, <$L>::splat(0.0), $count) })
            },
            <$L>::add
        ))
    };
}

/// Largest number of a row; minus infinity for an empty one.
///
/// # Safety
/// Compiled for `L`.
#[inline(always)]
pub unsafe fn max_row<L: Lanes>(row: &[f32]) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        let folded = fold_row!(
            L,
            row.len(),
            f32::NEG_INFINITY,
            |state, at, count| {
                let x = load::<L>(row, at, count);
                L::max(
                    if count == 16 { x } else { L::keep_first(x, L::splat(f32::NEG_INFINITY), count) },
                    state,
                )
            },
            L::max
        );
        largest::<L>(folded)
    }
}

/// Loads `count` elements starting at `at` into the first lanes.
///
/// # Safety
/// Compiled for `L`; the elements lie inside the row.
#[inline(always)]
pub unsafe fn load<L: Lanes>(row: &[f32], at: usize, count: usize) -> L::V {
    debug_assert!(at + count <= row.len());
    // SAFETY: the caller's promise.
    unsafe {
        let from = row.as_ptr().add(at);
        if count == 16 { L::load(from) } else { L::load_first(from, count) }
    }
}

/// Stores the first `count` lanes, starting at element `at`.
///
/// # Safety
/// Compiled for `L`; the elements lie inside the row.
#[inline(always)]
pub unsafe fn store<L: Lanes>(row: &mut [f32], at: usize, x: L::V, count: usize) {
    debug_assert!(at + count <= row.len());
    // SAFETY: the caller's promise.
    unsafe {
        let to = row.as_mut_ptr().add(at);
        if count == 16 { L::store(to, x) } else { L::store_first(to, x, count) }
    }
}

/// Sum of the lanes along a balanced tree.
///
/// # Safety
/// Compiled for `L`.
#[inline(always)]
pub unsafe fn sum<L: Lanes>(x: L::V) -> f32 {
    let mut lanes = [0f32; 16];
    // SAFETY: the caller's promise; 16 numbers.
    unsafe { L::store(lanes.as_mut_ptr(), x) };
    for width in [8, 4, 2, 1] {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
    }
    lanes[0]
}

/// Largest lane.
///
/// # Safety
/// Compiled for `L`.
#[inline(always)]
pub unsafe fn largest<L: Lanes>(x: L::V) -> f32 {
    let mut lanes = [0f32; 16];
    // SAFETY: the caller's promise; 16 numbers.
    unsafe { L::store(lanes.as_mut_ptr(), x) };
    lanes.into_iter().fold(f32::NEG_INFINITY, |a, b| if a > b { a } else { b })
}

/// e to the x, lane by lane, after Cephes (Moshier): reduction by ln 2 in two parts and a polynomial, at most 1 ulp off
/// in [-87, 88]. Zero below -87.3 (no subnormals), infinity above 88.7; NaN stays NaN.
///
/// # Safety
/// Compiled for `L`.
#[inline(always)]
pub unsafe fn exp<L: Lanes>(x: L::V) -> L::V {
    // SAFETY: the caller's promise.
    unsafe {
        let splat = L::splat;
        // 1.5 * 2^23: adding it rounds to a whole number.
        let round = splat(12_582_912.0);
        // The bounds come first, so that NaN stays NaN.
        let clamped = L::max(splat(-88.0), L::min(splat(89.0), x));
        let n = L::sub(L::mul_add(clamped, splat(std::f32::consts::LOG2_E), round), round);
        let r = L::mul_add(n, splat(-0.693_359_4), clamped);
        let r = L::mul_add(n, splat(2.121_944_4e-4), r);
        let mut p = splat(1.987_569_1e-4);
        for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
            p = L::mul_add(p, r, splat(c));
        }
        let y = L::add(L::mul_add(p, L::mul(r, r), r), splat(1.0));
        L::scale2(y, L::max(splat(-126.0), n), x, splat(-87.336_54))
    }
}

/// 2 to the x for x below 128, lane by lane: at most 2.5 ulp off; 0 below -126, NaN stays NaN. The polynomial minimises
/// the largest relative error on [-1/2, 1/2] for its degree.
///
/// # Safety
/// Compiled for `L`.
#[inline(always)]
#[expect(clippy::approx_constant, reason = "a coefficient of the polynomial, near ln 2 but not it")]
pub unsafe fn exp2<L: Lanes>(x: L::V) -> L::V {
    // SAFETY: the caller's promise.
    unsafe {
        // 1.5 * 2^23: adding it rounds to a whole number.
        let round = L::splat(12_582_912.0);
        let gate_min = L::splat(-126.0);
        let clamped = L::max(gate_min, x);
        let n = L::sub(L::add(clamped, round), round);
        let r = L::sub(clamped, n);
        let mut p = L::splat(1.326_472_7e-3);
        for c in [9.671_513e-3, 5.550_733_7e-2, 2.402_224_2e-1, 6.931_47e-1, 1.0] {
            p = L::mul_add(p, r, L::splat(c));
        }
        L::scale2(p, n, x, gate_min)
    }
}

/// The hyperbolic tangent, lane by lane, at most 3 ulp off; NaN stays NaN. Near 0 it is Cephes' tanhf, elsewhere
/// `1 - 2 / (1 + exp(2x))`.
///
/// # Safety
/// Compiled for `L`.
#[inline(always)]
pub unsafe fn tanh<L: Lanes>(x: L::V) -> L::V {
    // SAFETY: the caller's promise.
    unsafe {
        let one = L::splat(1.0);
        // The bounds are the first operands, so that NaN stays NaN.
        let x = L::max(L::splat(-9.5), L::min(L::splat(9.5), x));
        let square = L::mul(x, x);
        let mut p = L::splat(-5.704_988_7e-3);
        for c in [2.063_909e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328e-1] {
            p = L::mul_add(p, square, L::splat(c));
        }
        let near = L::mul_add(L::mul(p, square), x, x);
        let e = exp2::<L>(L::mul(x, L::splat(2.0 * std::f32::consts::LOG2_E)));
        let far = L::sub(one, L::div(L::splat(2.0), L::add(one, e)));
        // 1 where |x| is below 0.625, else 0.
        let is_near = L::scale2(one, L::splat(0.0), L::sub(L::splat(0.390_625), square), L::splat(0.0));
        L::mul_add(is_near, near, L::mul(L::sub(one, is_near), far))
    }
}
