//! Comparisons: the first step of `setp` and `set`. The combination with a predicate is a second instruction.

use super::{Alu, typed};
use crate::ptx::ScalarType::{self, *};
use crate::registers::{Flushed, Single};

/// The comparison of a name and type, with or without `.ftz`.
pub fn find(name: &str, ftz: bool, kind: ScalarType) -> Option<Alu> {
    match kind {
        F32 if ftz => flushed(name),
        F32 | F64 => float(name, kind),
        F16 | Bf16 => half(name, kind),
        _ => integer(name, kind),
    }
}

macro_rules! whole {
    ($kind:expr, $lambda:tt) => {
        typed!($kind, [U16: u16, S16: i16, B16: u16, U32: u32, S32: i32, B32: u32, U64: u64, S64: i64, B64: u64],
            $lambda)
    };
}

fn integer(name: &str, kind: ScalarType) -> Option<Alu> {
    match name {
        "eq" => whole!(kind, (|a: T, b: T| -> bool { a == b })),
        "ne" => whole!(kind, (|a: T, b: T| -> bool { a != b })),
        "lt" | "lo" => whole!(kind, (|a: T, b: T| -> bool { a < b })),
        "le" | "ls" => whole!(kind, (|a: T, b: T| -> bool { a <= b })),
        "gt" | "hi" => whole!(kind, (|a: T, b: T| -> bool { a > b })),
        "ge" | "hs" => whole!(kind, (|a: T, b: T| -> bool { a >= b })),
        _ => None,
    }
}

/// Whether an operand is a NaN.
macro_rules! unordered {
    ($a:expr, $b:expr) => {
        $a.is_nan() | $b.is_nan()
    };
}

macro_rules! real {
    ($kind:expr, $lambda:tt) => {
        typed!($kind, [F32: f32, F64: f64], $lambda)
    };
}

/// The names with `u` are true if an operand is a NaN, the others false.
fn float(name: &str, kind: ScalarType) -> Option<Alu> {
    match name {
        "eq" => real!(kind, (|a: T, b: T| -> bool { a == b })),
        "ne" => real!(kind, (|a: T, b: T| -> bool { (a != b) & !unordered!(a, b) })),
        "lt" => real!(kind, (|a: T, b: T| -> bool { a < b })),
        "le" => real!(kind, (|a: T, b: T| -> bool { a <= b })),
        "gt" => real!(kind, (|a: T, b: T| -> bool { a > b })),
        "ge" => real!(kind, (|a: T, b: T| -> bool { a >= b })),
        "equ" => real!(kind, (|a: T, b: T| -> bool { (a == b) | unordered!(a, b) })),
        "neu" => real!(kind, (|a: T, b: T| -> bool { a != b })),
        "ltu" => real!(kind, (|a: T, b: T| -> bool { (a < b) | unordered!(a, b) })),
        "leu" => real!(kind, (|a: T, b: T| -> bool { (a <= b) | unordered!(a, b) })),
        "gtu" => real!(kind, (|a: T, b: T| -> bool { (a > b) | unordered!(a, b) })),
        "geu" => real!(kind, (|a: T, b: T| -> bool { (a >= b) | unordered!(a, b) })),
        "num" => real!(kind, (|a: T, b: T| -> bool { !unordered!(a, b) })),
        "nan" => real!(kind, (|a: T, b: T| -> bool { unordered!(a, b) })),
        _ => None,
    }
}

fn flushed(name: &str) -> Option<Alu> {
    macro_rules! single {
        ($lambda:tt) => {
            typed!(F32, [F32: Flushed], $lambda)
        };
    }
    match name {
        "eq" => single!((|a: T, b: T| -> bool { a.get() == b.get() })),
        "neu" => single!((|a: T, b: T| -> bool { a.get() != b.get() })),
        "lt" => single!((|a: T, b: T| -> bool { a.get() < b.get() })),
        "le" => single!((|a: T, b: T| -> bool { a.get() <= b.get() })),
        "gt" => single!((|a: T, b: T| -> bool { a.get() > b.get() })),
        "ge" => single!((|a: T, b: T| -> bool { a.get() >= b.get() })),
        _ => None,
    }
}

fn half(name: &str, kind: ScalarType) -> Option<Alu> {
    use crate::numbers::{Bfloat16, Binary16, Narrow};
    macro_rules! narrow {
        ($lambda:tt) => {
            typed!(kind, [F16: Binary16, Bf16: Bfloat16], $lambda)
        };
    }
    match name {
        "eq" => narrow!((|a: T, b: T| -> bool { a.wide() == b.wide() })),
        "neu" => narrow!((|a: T, b: T| -> bool { a.wide() != b.wide() })),
        "lt" => narrow!((|a: T, b: T| -> bool { a.wide() < b.wide() })),
        "le" => narrow!((|a: T, b: T| -> bool { a.wide() <= b.wide() })),
        "gt" => narrow!((|a: T, b: T| -> bool { a.wide() > b.wide() })),
        "ge" => narrow!((|a: T, b: T| -> bool { a.wide() >= b.wide() })),
        _ => None,
    }
}
