//! Integer arithmetic.

use super::{Alu, alu, typed};
use crate::ptx::ScalarType::{self, *};

/// The function of an integer opcode.
pub fn find(name: &str, modifiers: &[&str], kind: ScalarType) -> Option<Alu> {
    match (name, modifiers) {
        ("add", []) => sum(kind),
        ("sub", []) => typed!(kind, [U16: u16, S16: i16, U32: u32, S32: i32, U64: u64, S64: i64],
            (|a: T, b: T| -> T { a.wrapping_sub(b) })),
        ("mul", ["lo"]) => typed!(kind, [U16: u16, S16: i16, U32: u32, S32: i32, U64: u64, S64: i64],
            (|a: T, b: T| -> T { a.wrapping_mul(b) })),
        ("mad", ["lo"]) => typed!(kind, [U16: u16, S16: i16, U32: u32, S32: i32, U64: u64, S64: i64],
            (|a: T, b: T, c: T| -> T { a.wrapping_mul(b).wrapping_add(c) })),
        ("mul" | "mad", ["hi"]) => high(name, kind),
        ("mul" | "mad", ["wide"]) => wide(name, kind),
        ("div" | "rem", []) => quotient(name, kind),
        ("min", []) => typed!(kind, [U16: u16, S16: i16, U32: u32, S32: i32, U64: u64, S64: i64],
            (|a: T, b: T| -> T { a.min(b) })),
        ("max", []) => typed!(kind, [U16: u16, S16: i16, U32: u32, S32: i32, U64: u64, S64: i64],
            (|a: T, b: T| -> T { a.max(b) })),
        ("neg", []) => typed!(kind, [S16: i16, S32: i32, S64: i64], (|a: T| -> T { a.wrapping_neg() })),
        ("abs", []) => typed!(kind, [S16: i16, S32: i32, S64: i64], (|a: T| -> T { a.wrapping_abs() })),
        ("sad", []) => typed!(kind, [U32: u32, S32: i32],
            (|a: T, b: T, c: T| -> T { c.wrapping_add(a.max(b).wrapping_sub(a.min(b))) })),
        _ => None,
    }
}

fn sum(kind: ScalarType) -> Option<Alu> {
    typed!(kind, [U16: u16, S16: i16, U32: u32, S32: i32, U64: u64, S64: i64],
        (|a: T, b: T| -> T { a.wrapping_add(b) }))
}

/// The upper half of a product.
fn high(name: &str, kind: ScalarType) -> Option<Alu> {
    if name == "mad" {
        return match kind {
            U32 => Some(alu!(|a: u32, b: u32, c: u32| -> u32 {
                (((u64::from(a) * u64::from(b)) >> 32) as u32).wrapping_add(c)
            })),
            S32 => Some(alu!(|a: i32, b: i32, c: i32| -> i32 {
                (((i64::from(a) * i64::from(b)) >> 32) as i32).wrapping_add(c)
            })),
            _ => None,
        };
    }
    Some(match kind {
        U16 => alu!(|a: u16, b: u16| -> u16 { ((u32::from(a) * u32::from(b)) >> 16) as u16 }),
        S16 => alu!(|a: i16, b: i16| -> i16 { ((i32::from(a) * i32::from(b)) >> 16) as i16 }),
        U32 => alu!(|a: u32, b: u32| -> u32 { ((u64::from(a) * u64::from(b)) >> 32) as u32 }),
        S32 => alu!(|a: i32, b: i32| -> i32 { ((i64::from(a) * i64::from(b)) >> 32) as i32 }),
        U64 => alu!(|a: u64, b: u64| -> u64 { ((u128::from(a) * u128::from(b)) >> 64) as u64 }),
        S64 => alu!(|a: i64, b: i64| -> i64 { ((i128::from(a) * i128::from(b)) >> 64) as i64 }),
        _ => return None,
    })
}

/// A whole product, of twice the size.
fn wide(name: &str, kind: ScalarType) -> Option<Alu> {
    Some(match (name, kind) {
        ("mul", U16) => alu!(|a: u16, b: u16| -> u32 { u32::from(a) * u32::from(b) }),
        ("mul", S16) => alu!(|a: i16, b: i16| -> i32 { i32::from(a) * i32::from(b) }),
        ("mul", U32) => alu!(|a: u32, b: u32| -> u64 { u64::from(a) * u64::from(b) }),
        ("mul", S32) => alu!(|a: i32, b: i32| -> i64 { i64::from(a) * i64::from(b) }),
        ("mad", U16) => {
            alu!(|a: u16, b: u16, c: u32| -> u32 { (u32::from(a) * u32::from(b)).wrapping_add(c) })
        }
        ("mad", S16) => {
            alu!(|a: i16, b: i16, c: i32| -> i32 { (i32::from(a) * i32::from(b)).wrapping_add(c) })
        }
        ("mad", U32) => {
            alu!(|a: u32, b: u32, c: u64| -> u64 { (u64::from(a) * u64::from(b)).wrapping_add(c) })
        }
        ("mad", S32) => {
            alu!(|a: i32, b: i32, c: i64| -> i64 { (i64::from(a) * i64::from(b)).wrapping_add(c) })
        }
        _ => return None,
    })
}

/// Quotients and remainders. A division by zero gives ones, or the dividend, as cards do.
fn quotient(name: &str, kind: ScalarType) -> Option<Alu> {
    if name == "div" {
        typed!(kind, [U16: u16, S16: i16, U32: u32, S32: i32, U64: u64, S64: i64],
            (|a: T, b: T| -> T { if b == 0 { !0 } else { a.wrapping_div(b) } }))
    } else {
        typed!(kind, [U16: u16, S16: i16, U32: u32, S32: i32, U64: u64, S64: i64],
            (|a: T, b: T| -> T { if b == 0 { a } else { a.wrapping_rem(b) } }))
    }
}
