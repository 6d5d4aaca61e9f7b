//! Arithmetic in f16 and bf16, alone and in pairs. Each operation is rounded once.

use super::approximate::{exponential, tangent};
use super::{Alu, typed};
use crate::numbers::{Bfloat16, Binary16, Narrow, Pair};
use crate::ptx::ScalarType;

/// A number or a pair, to which an operation is applied element by element.
trait Elements: Copy {
    fn each(self, other: Self, third: Self, operation: impl Fn(f64, f64, f64) -> f64) -> Self;
    /// `each` for operations that return one of their operands, or its negative.
    fn chosen(self, other: Self, operation: impl Fn(f32, f32) -> f32) -> Self;
}

impl<N: Narrow> Elements for Pair<N> {
    #[inline(always)]
    fn each(self, other: Self, third: Self, operation: impl Fn(f64, f64, f64) -> f64) -> Self {
        let wide = |value: N| f64::from(value.wide());
        Pair(
            N::nearest64(operation(wide(self.0), wide(other.0), wide(third.0))),
            N::nearest64(operation(wide(self.1), wide(other.1), wide(third.1))),
        )
    }

    #[inline(always)]
    fn chosen(self, other: Self, operation: impl Fn(f32, f32) -> f32) -> Self {
        let element = |a: N, b: N| N::nearest(operation(a.wide(), b.wide()));
        Pair(element(self.0, other.0), element(self.1, other.1))
    }
}

macro_rules! elements {
    ($($kind:ty),*) => {$(
        impl Elements for $kind {
            #[inline(always)]
            fn each(self, other: Self, third: Self, operation: impl Fn(f64, f64, f64) -> f64) -> Self {
                let wide = |value: Self| f64::from(value.wide());
                Self::nearest64(operation(wide(self), wide(other), wide(third)))
            }

            #[inline(always)]
            fn chosen(self, other: Self, operation: impl Fn(f32, f32) -> f32) -> Self {
                Self::nearest(operation(self.wide(), other.wide()))
            }
        }
    )*};
}

elements!(Binary16, Bfloat16);

/// Rounds the f32 of an approximate function, as a card does.
#[inline(always)]
fn approximate(value: f64, function: impl Fn(f32) -> f32) -> f64 {
    f64::from(function(value as f32))
}

macro_rules! narrow {
    ($kind:expr, $lambda:tt) => {
        typed!($kind, [F16: Binary16, Bf16: Bfloat16, F16x2: Pair<Binary16>, Bf16x2: Pair<Bfloat16>], $lambda)
    };
}

/// The function of an opcode on numbers of 16 bits.
pub fn find(name: &str, nan: bool, kind: ScalarType) -> Option<Alu> {
    match name {
        "add" => narrow!(kind, (|a: T, b: T| -> T { a.each(b, b, |a, b, _| a + b) })),
        "sub" => narrow!(kind, (|a: T, b: T| -> T { a.each(b, b, |a, b, _| a - b) })),
        "mul" => narrow!(kind, (|a: T, b: T| -> T { a.each(b, b, |a, b, _| a * b) })),
        "fma" => narrow!(kind, (|a: T, b: T, c: T| -> T { a.each(b, c, |a, b, c| a.mul_add(b, c)) })),
        "neg" => narrow!(kind, (|a: T| -> T { a.chosen(a, |a, _| -a) })),
        "abs" => narrow!(kind, (|a: T| -> T { a.chosen(a, |a, _| a.abs()) })),
        "min" if nan => narrow!(
            kind,
            (|a: T, b: T| -> T {
                a.chosen(b, |a, b| if a.is_nan() || b.is_nan() { f32::NAN } else { a.min(b) })
            })
        ),
        "max" if nan => narrow!(
            kind,
            (|a: T, b: T| -> T {
                a.chosen(b, |a, b| if a.is_nan() || b.is_nan() { f32::NAN } else { a.max(b) })
            })
        ),
        "min" => narrow!(kind, (|a: T, b: T| -> T { a.chosen(b, f32::min) })),
        "max" => narrow!(kind, (|a: T, b: T| -> T { a.chosen(b, f32::max) })),
        "ex2" => narrow!(kind, (|a: T| -> T { a.each(a, a, |a, _, _| approximate(a, exponential)) })),
        "tanh" => narrow!(kind, (|a: T| -> T { a.each(a, a, |a, _, _| approximate(a, tangent)) })),
        _ => None,
    }
}
