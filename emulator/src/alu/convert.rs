//! `cvt`: between integers, between floats, and from one to the other, with rounding modes and saturation.

use super::{Alu, alu, typed};
use crate::numbers::{Bfloat16, Binary16, Narrow, Pair, nearest_tf32};
use crate::ptx::ScalarType::{self, *};
use crate::registers::{Flushed, FlushedSaturated, Saturated, Single};

/// The conversion to `last` of the modifiers before it: `[modes..., result type, operand type]`.
pub fn find(words: &[&str], from: ScalarType) -> Option<Alu> {
    let (&result, modes) = words.split_last()?;
    let to = ScalarType::from_name(result)?;
    let mut rounding = "";
    let (mut ftz, mut saturate) = (false, false);
    for &mode in modes {
        match mode {
            "ftz" => ftz = true,
            "sat" => saturate = true,
            "rn" | "rz" | "rm" | "rp" | "rni" | "rzi" | "rmi" | "rpi" | "rna" => rounding = mode,
            _ => return None,
        }
    }
    match (is_float(to), is_float(from)) {
        (false, false) if saturate => saturated_integer(to, from),
        (false, false) => integer(to, from),
        (true, false) if rounding == "rn" => from_integer(to, from),
        (false, true) => to_integer(to, from, rounding),
        (true, true) => float(to, from, rounding, (ftz, saturate)),
        _ => None,
    }
}

fn is_float(kind: ScalarType) -> bool {
    matches!(kind, F16 | F16x2 | Bf16 | Bf16x2 | Tf32 | F32 | F64)
}

macro_rules! to_any_integer {
    ($kind:expr, $lambda:tt) => {
        typed!($kind, [U8: u8, S8: i8, U16: u16, S16: i16, U32: u32, S32: i32, U64: u64, S64: i64], $lambda)
    };
}

/// Integers are cut or extended by the sign of the operand's type.
fn integer(to: ScalarType, from: ScalarType) -> Option<Alu> {
    match from {
        U8 => to_any_integer!(to, (|a: u8| -> T { a as T })),
        S8 => to_any_integer!(to, (|a: i8| -> T { a as T })),
        U16 => to_any_integer!(to, (|a: u16| -> T { a as T })),
        S16 => to_any_integer!(to, (|a: i16| -> T { a as T })),
        U32 => to_any_integer!(to, (|a: u32| -> T { a as T })),
        S32 => to_any_integer!(to, (|a: i32| -> T { a as T })),
        U64 => to_any_integer!(to, (|a: u64| -> T { a as T })),
        S64 => to_any_integer!(to, (|a: i64| -> T { a as T })),
        _ => None,
    }
}

fn saturated_integer(to: ScalarType, from: ScalarType) -> Option<Alu> {
    match from {
        S32 => typed!(to, [U8: u8, S8: i8, U16: u16, S16: i16, U32: u32],
            (|a: i32| -> T { i64::from(a).clamp(i64::from(T::MIN), i64::from(T::MAX)) as T })),
        U32 => typed!(to, [U8: u8, S8: i8, U16: u16, S16: i16, S32: i32],
            (|a: u32| -> T { i64::from(a).clamp(i64::from(T::MIN), i64::from(T::MAX)) as T })),
        S64 => typed!(to, [U8: u8, S8: i8, U16: u16, S16: i16, U32: u32, S32: i32],
            (|a: i64| -> T { a.clamp(i64::from(T::MIN), i64::from(T::MAX)) as T })),
        _ => None,
    }
}

/// Integers to the nearest float. f16 and bf16 are rounded once, from f64.
fn from_integer(to: ScalarType, from: ScalarType) -> Option<Alu> {
    macro_rules! from_any_integer {
        ($lambda:tt) => {
            typed!(from, [U8: u8, S8: i8, U16: u16, S16: i16, U32: u32, S32: i32, U64: u64, S64: i64], $lambda)
        };
    }
    match to {
        F32 => from_any_integer!((|a: T| -> f32 { a as f32 })),
        F64 => from_any_integer!((|a: T| -> f64 { a as f64 })),
        F16 => from_any_integer!((|a: T| -> Binary16 { Binary16::nearest64(a as f64) })),
        Bf16 => from_any_integer!((|a: T| -> Bfloat16 { Bfloat16::nearest64(a as f64) })),
        _ => None,
    }
}

/// Floats to integers: rounded, then clamped to the range of the type. A NaN is 0.
fn to_integer(to: ScalarType, from: ScalarType, rounding: &str) -> Option<Alu> {
    macro_rules! rounded {
        ($from:ty, $method:ident) => {
            to_any_integer!(to, (|a: $from| -> T { a.$method() as T }))
        };
    }
    macro_rules! narrow {
        ($from:ty, $method:ident) => {
            to_any_integer!(to, (|a: $from| -> T { a.wide().$method() as T }))
        };
    }
    match (from, rounding) {
        (F32, "rni") => rounded!(f32, round_ties_even),
        (F32, "rzi") => rounded!(f32, trunc),
        (F32, "rmi") => rounded!(f32, floor),
        (F32, "rpi") => rounded!(f32, ceil),
        (F64, "rni") => rounded!(f64, round_ties_even),
        (F64, "rzi") => rounded!(f64, trunc),
        (F64, "rmi") => rounded!(f64, floor),
        (F64, "rpi") => rounded!(f64, ceil),
        (F16, "rzi") => narrow!(Binary16, trunc),
        (F16, "rni") => narrow!(Binary16, round_ties_even),
        (Bf16, "rzi") => narrow!(Bfloat16, trunc),
        (Bf16, "rni") => narrow!(Bfloat16, round_ties_even),
        _ => None,
    }
}

fn float(to: ScalarType, from: ScalarType, rounding: &str, modes: (bool, bool)) -> Option<Alu> {
    match (to, from, rounding) {
        (F32, F32, _) => single(rounding, modes),
        _ if modes != (false, false) => None,
        (F64, F32, "") => Some(alu!(|a: f32| -> f64 { f64::from(a) })),
        (F32, F64, "rn") => Some(alu!(|a: f64| -> f32 { a as f32 })),
        (F64, F64, "rni") => Some(alu!(|a: f64| -> f64 { a.round_ties_even() })),
        (F64, F64, "rzi") => Some(alu!(|a: f64| -> f64 { a.trunc() })),
        (F64, F64, "rmi") => Some(alu!(|a: f64| -> f64 { a.floor() })),
        (F64, F64, "rpi") => Some(alu!(|a: f64| -> f64 { a.ceil() })),
        (F32, F16, "") => Some(alu!(|a: Binary16| -> f32 { a.wide() })),
        (F32, Bf16, "") => Some(alu!(|a: Bfloat16| -> f32 { a.wide() })),
        (F64, F16, "") => Some(alu!(|a: Binary16| -> f64 { f64::from(a.wide()) })),
        (F64, Bf16, "") => Some(alu!(|a: Bfloat16| -> f64 { f64::from(a.wide()) })),
        (F16, F64, "rn") => Some(alu!(|a: f64| -> Binary16 { Binary16::nearest64(a) })),
        (Bf16, F64, "rn") => Some(alu!(|a: f64| -> Bfloat16 { Bfloat16::nearest64(a) })),
        (_, F32, _) => from_single(to, rounding),
        _ => None,
    }
}

/// f32 to narrower types; into a pair, the first operand is the upper one.
fn from_single(to: ScalarType, rounding: &str) -> Option<Alu> {
    Some(match (to, rounding) {
        (F16, "rn") => alu!(|a: f32| -> Binary16 { Binary16::nearest(a) }),
        (F16, "rz") => alu!(|a: f32| -> Binary16 { Binary16::towards_zero(a) }),
        (Bf16, "rn") => alu!(|a: f32| -> Bfloat16 { Bfloat16::nearest(a) }),
        (Bf16, "rz") => alu!(|a: f32| -> Bfloat16 { Bfloat16::towards_zero(a) }),
        (F16x2, "rn") => {
            alu!(|a: f32, b: f32| -> Pair<Binary16> { Pair(Binary16::nearest(b), Binary16::nearest(a)) })
        }
        (Bf16x2, "rn") => {
            alu!(|a: f32, b: f32| -> Pair<Bfloat16> { Pair(Bfloat16::nearest(b), Bfloat16::nearest(a)) })
        }
        (Tf32, "rna") => alu!(|a: f32| -> f32 { nearest_tf32(a) }),
        _ => return None,
    })
}

/// f32 to f32: rounded to an integer, flushed, clamped.
fn single(rounding: &str, modes: (bool, bool)) -> Option<Alu> {
    macro_rules! single {
        ($lambda:tt) => {
            Some(match modes {
                (false, false) => {
                    type T = f32;
                    alu! $lambda
                }
                (true, false) => {
                    type T = Flushed;
                    alu! $lambda
                }
                (false, true) => {
                    type T = Saturated;
                    alu! $lambda
                }
                (true, true) => {
                    type T = FlushedSaturated;
                    alu! $lambda
                }
            })
        };
    }
    match rounding {
        "" => single!((|a: T| -> T { T::new(a.get()) })),
        "rni" => single!((|a: T| -> T { T::new(a.get().round_ties_even()) })),
        "rzi" => single!((|a: T| -> T { T::new(a.get().trunc()) })),
        "rmi" => single!((|a: T| -> T { T::new(a.get().floor()) })),
        "rpi" => single!((|a: T| -> T { T::new(a.get().ceil()) })),
        _ => None,
    }
}
