//! Arithmetic in f32 and f64, with the modifiers `.ftz`, `.sat` and the rounding modes.
//!
//! Sums, products, fused products, quotients and roots are rounded as IEEE 754 says. The approximate functions of the
//! card (`ex2.approx` and its peers) are computed in f64 and rounded to f32: at least as exact as a card, not equal
//! to one bit for bit.

use super::approximate::{cosine, exponential, logarithm, sine, tangent};
use super::{Alu, alu, half, typed};
use crate::numbers::{Rounding, fused};
use crate::ptx::ScalarType::{self, *};
use crate::registers::{Flushed, FlushedSaturated, Saturated, Single};

/// The modifiers of an instruction.
#[derive(Default)]
struct Modifiers {
    rounding: Option<Rounding>,
    ftz: bool,
    saturate: bool,
    approximate: bool,
    nan: bool,
}

fn modifiers(words: &[&str]) -> Option<Modifiers> {
    let mut found = Modifiers::default();
    for word in words {
        match *word {
            "rn" => found.rounding = Some(Rounding::Nearest),
            "rz" => found.rounding = Some(Rounding::Zero),
            "rm" => found.rounding = Some(Rounding::Down),
            "rp" => found.rounding = Some(Rounding::Up),
            "ftz" => found.ftz = true,
            "sat" => found.saturate = true,
            "approx" | "full" => found.approximate = true,
            "NaN" => found.nan = true,
            _ => return None,
        }
    }
    Some(found)
}

/// The function of an opcode on floating-point numbers.
pub fn find(name: &str, words: &[&str], kind: ScalarType) -> Option<Alu> {
    let modifiers = modifiers(words)?;
    match kind {
        F32 => single(name, &modifiers),
        F64 => double(name, &modifiers),
        _ => {
            let only_nearest = matches!(modifiers.rounding, None | Some(Rounding::Nearest));
            let plain = only_nearest && !modifiers.ftz && !modifiers.saturate;
            if plain { half::find(name, modifiers.nan, kind) } else { None }
        }
    }
}

/// The `Alu` of a closure in which `T` treats numbers as the modifiers say.
macro_rules! single {
    ($modifiers:expr, $lambda:tt) => {
        Some(match ($modifiers.ftz, $modifiers.saturate) {
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

fn single(name: &str, modifiers: &Modifiers) -> Option<Alu> {
    let nearest = matches!(modifiers.rounding, None | Some(Rounding::Nearest));
    match name {
        "add" | "sub" | "mul" | "fma" | "mad" if !nearest => directed(name, modifiers),
        "add" => single!(modifiers, (|a: T, b: T| -> T { T::new(a.get() + b.get()) })),
        "sub" => single!(modifiers, (|a: T, b: T| -> T { T::new(a.get() - b.get()) })),
        "mul" => single!(modifiers, (|a: T, b: T| -> T { T::new(a.get() * b.get()) })),
        "fma" | "mad" => {
            single!(modifiers, (|a: T, b: T, c: T| -> T { T::new(a.get().mul_add(b.get(), c.get())) }))
        }
        "div" if nearest => single!(modifiers, (|a: T, b: T| -> T { T::new(a.get() / b.get()) })),
        "rcp" if nearest => single!(modifiers, (|a: T| -> T { T::new(1.0 / a.get()) })),
        "sqrt" if nearest => single!(modifiers, (|a: T| -> T { T::new(a.get().sqrt()) })),
        "min" if modifiers.nan => {
            single!(modifiers, (|a: T, b: T| -> T { T::new(smaller_nan(a.get(), b.get())) }))
        }
        "max" if modifiers.nan => {
            single!(modifiers, (|a: T, b: T| -> T { T::new(-smaller_nan(-a.get(), -b.get())) }))
        }
        "min" => single!(modifiers, (|a: T, b: T| -> T { T::new(smaller(a.get(), b.get())) })),
        "max" => single!(modifiers, (|a: T, b: T| -> T { T::new(-smaller(-a.get(), -b.get())) })),
        "neg" => single!(modifiers, (|a: T| -> T { T::new(-a.get()) })),
        "abs" => single!(modifiers, (|a: T| -> T { T::new(a.get().abs()) })),
        "copysign" => Some(alu!(|a: f32, b: f32| -> f32 { b.copysign(a) })),
        _ if modifiers.approximate => approximate(name, modifiers),
        _ => None,
    }
}

fn approximate(name: &str, modifiers: &Modifiers) -> Option<Alu> {
    match name {
        "rsqrt" => single!(modifiers, (|a: T| -> T { T::new((1.0 / f64::from(a.get()).sqrt()) as f32) })),
        "ex2" => single!(modifiers, (|a: T| -> T { T::new(exponential(a.get())) })),
        "lg2" => single!(modifiers, (|a: T| -> T { T::new(logarithm(a.get())) })),
        "tanh" => single!(modifiers, (|a: T| -> T { T::new(tangent(a.get())) })),
        "sin" => single!(modifiers, (|a: T| -> T { T::new(sine(a.get())) })),
        "cos" => single!(modifiers, (|a: T| -> T { T::new(cosine(a.get())) })),
        _ => None,
    }
}

/// The smaller number; a NaN only if both are. Of two zeros, the negative one.
#[inline(always)]
fn smaller(a: f32, b: f32) -> f32 {
    let both = if a < b || (a == b && a.is_sign_negative()) { a } else { b };
    if a.is_nan() {
        b
    } else if b.is_nan() {
        a
    } else {
        both
    }
}

/// The smaller number; a NaN if any is.
#[inline(always)]
fn smaller_nan(a: f32, b: f32) -> f32 {
    if a.is_nan() || b.is_nan() { f32::NAN } else { smaller(a, b) }
}

/// Sums and products that round in a direction.
fn directed(name: &str, modifiers: &Modifiers) -> Option<Alu> {
    if modifiers.ftz || modifiers.saturate {
        return None;
    }
    use Rounding::{Down, Up, Zero};
    Some(match (name, modifiers.rounding?) {
        ("add", Zero) => alu!(|a: f32, b: f32| -> f32 { fused(a, 1.0, b, Rounding::Zero) }),
        ("add", Down) => alu!(|a: f32, b: f32| -> f32 { fused(a, 1.0, b, Rounding::Down) }),
        ("add", Up) => alu!(|a: f32, b: f32| -> f32 { fused(a, 1.0, b, Rounding::Up) }),
        ("mul", Zero) => alu!(|a: f32, b: f32| -> f32 { fused(a, b, 0.0, Rounding::Zero) }),
        ("mul", Down) => alu!(|a: f32, b: f32| -> f32 { fused(a, b, 0.0, Rounding::Down) }),
        ("mul", Up) => alu!(|a: f32, b: f32| -> f32 { fused(a, b, 0.0, Rounding::Up) }),
        ("fma", Zero) => alu!(|a: f32, b: f32, c: f32| -> f32 { fused(a, b, c, Rounding::Zero) }),
        ("fma", Down) => alu!(|a: f32, b: f32, c: f32| -> f32 { fused(a, b, c, Rounding::Down) }),
        ("fma", Up) => alu!(|a: f32, b: f32, c: f32| -> f32 { fused(a, b, c, Rounding::Up) }),
        _ => return None,
    })
}

fn double(name: &str, modifiers: &Modifiers) -> Option<Alu> {
    let nearest = matches!(modifiers.rounding, None | Some(Rounding::Nearest));
    if !nearest || modifiers.saturate {
        return None;
    }
    match name {
        "add" => typed!(F64, [F64: f64], (|a: T, b: T| -> T { a + b })),
        "sub" => typed!(F64, [F64: f64], (|a: T, b: T| -> T { a - b })),
        "mul" => typed!(F64, [F64: f64], (|a: T, b: T| -> T { a * b })),
        "fma" | "mad" => typed!(F64, [F64: f64], (|a: T, b: T, c: T| -> T { a.mul_add(b, c) })),
        "div" => typed!(F64, [F64: f64], (|a: T, b: T| -> T { a / b })),
        "rcp" => typed!(F64, [F64: f64], (|a: T| -> T { 1.0 / a })),
        "sqrt" => typed!(F64, [F64: f64], (|a: T| -> T { a.sqrt() })),
        "rsqrt" => typed!(F64, [F64: f64], (|a: T| -> T { 1.0 / a.sqrt() })),
        "min" => typed!(F64, [F64: f64], (|a: T, b: T| -> T { a.min(b) })),
        "max" => typed!(F64, [F64: f64], (|a: T, b: T| -> T { a.max(b) })),
        "neg" => typed!(F64, [F64: f64], (|a: T| -> T { -a })),
        "abs" => typed!(F64, [F64: f64], (|a: T| -> T { a.abs() })),
        "copysign" => typed!(F64, [F64: f64], (|a: T, b: T| -> T { b.copysign(a) })),
        _ => None,
    }
}
