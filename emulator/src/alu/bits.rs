//! Bits: logic, shifts, fields, counts, permutations and selection.

use super::{Alu, alu, predicate_logic, typed};
use crate::ptx::ScalarType::{self, *};

/// The function of an opcode on bits.
pub fn find(name: &str, modifiers: &[&str], kind: ScalarType) -> Option<Alu> {
    match (name, modifiers) {
        ("and" | "or" | "xor" | "not", []) if kind == Pred => predicate_logic(name),
        ("and", []) => typed!(kind, [B16: u16, B32: u32, B64: u64], (|a: T, b: T| -> T { a & b })),
        ("or", []) => typed!(kind, [B16: u16, B32: u32, B64: u64], (|a: T, b: T| -> T { a | b })),
        ("xor", []) => typed!(kind, [B16: u16, B32: u32, B64: u64], (|a: T, b: T| -> T { a ^ b })),
        ("not", []) => typed!(kind, [B16: u16, B32: u32, B64: u64], (|a: T| -> T { !a })),
        ("cnot", []) => typed!(kind, [B16: u16, B32: u32, B64: u64], (|a: T| -> T { T::from(a == 0) })),
        ("lop3", []) if kind == B32 => {
            Some(alu!(|a: u32, b: u32, c: u32, table: u32| -> u32 { logic_of_three(a, b, c, table) }))
        }
        ("shl", []) => typed!(kind, [B16: u16, B32: u32, B64: u64],
            (|a: T, b: u32| -> T { a.checked_shl(b).unwrap_or(0) })),
        ("shr", []) => shift_right(kind),
        ("shf", [direction, mode]) if kind == B32 => funnel(direction, mode),
        ("prmt", []) if kind == B32 => {
            Some(alu!(|a: u32, b: u32, order: u32| -> u32 { permute(a, b, order) }))
        }
        ("popc", []) => Some(match kind {
            B32 => alu!(|a: u32| -> u32 { a.count_ones() }),
            B64 => alu!(|a: u64| -> u32 { a.count_ones() }),
            _ => return None,
        }),
        ("clz", []) => Some(match kind {
            B32 => alu!(|a: u32| -> u32 { a.leading_zeros() }),
            B64 => alu!(|a: u64| -> u32 { a.leading_zeros() }),
            _ => return None,
        }),
        ("brev", []) => typed!(kind, [B32: u32, B64: u64], (|a: T| -> T { a.reverse_bits() })),
        ("bfind", _) => find_highest(modifiers, kind),
        ("bfe", []) => extract(kind),
        ("bfi", []) => insert(kind),
        _ => None,
    }
}

/// `selp`: the first operand where the predicate is set, else the second.
pub fn select(modifiers: &[&str], kind: ScalarType) -> Option<Alu> {
    if !modifiers.is_empty() || kind == Pred {
        return None;
    }
    Some(match kind.bytes() {
        8 => alu!(|a: u64, b: u64, c: bool| -> u64 { if c { a } else { b } }),
        _ => alu!(|a: u32, b: u32, c: bool| -> u32 { if c { a } else { b } }),
    })
}

/// Bit `i` of the table is the result where the bits of `a`, `b`, `c` are `i`.
#[inline(always)]
fn logic_of_three(a: u32, b: u32, c: u32, table: u32) -> u32 {
    let mut result = 0;
    for case in 0..8 {
        let matches = |value: u32, bit: u32| if case >> bit & 1 == 1 { value } else { !value };
        let chosen = if table >> case & 1 == 1 { u32::MAX } else { 0 };
        result |= matches(a, 2) & matches(b, 1) & matches(c, 0) & chosen;
    }
    result
}

fn shift_right(kind: ScalarType) -> Option<Alu> {
    Some(match kind {
        B16 | U16 => alu!(|a: u16, b: u32| -> u16 { a.checked_shr(b).unwrap_or(0) }),
        B32 | U32 => alu!(|a: u32, b: u32| -> u32 { a.checked_shr(b).unwrap_or(0) }),
        B64 | U64 => alu!(|a: u64, b: u32| -> u64 { a.checked_shr(b).unwrap_or(0) }),
        S16 => alu!(|a: i16, b: u32| -> i16 { a >> b.min(15) }),
        S32 => alu!(|a: i32, b: u32| -> i32 { a >> b.min(31) }),
        S64 => alu!(|a: i64, b: u32| -> i64 { a >> b.min(63) }),
        _ => return None,
    })
}

/// `shf`: shifts the 64 bits of `b` and `a`, and keeps one half.
fn funnel(direction: &str, mode: &str) -> Option<Alu> {
    Some(match (direction, mode) {
        ("l", "wrap") => alu!(|a: u32, b: u32, c: u32| -> u32 { left(a, b, c & 31) }),
        ("l", "clamp") => alu!(|a: u32, b: u32, c: u32| -> u32 { left(a, b, c.min(32)) }),
        ("r", "wrap") => alu!(|a: u32, b: u32, c: u32| -> u32 { right(a, b, c & 31) }),
        ("r", "clamp") => alu!(|a: u32, b: u32, c: u32| -> u32 { right(a, b, c.min(32)) }),
        _ => return None,
    })
}

#[inline(always)]
fn left(low: u32, high: u32, count: u32) -> u32 {
    (((u64::from(high) << 32 | u64::from(low)) << count) >> 32) as u32
}

#[inline(always)]
fn right(low: u32, high: u32, count: u32) -> u32 {
    ((u64::from(high) << 32 | u64::from(low)) >> count) as u32
}

/// Each nibble of the order selects one of eight bytes, or with its top bit that byte's sign.
#[inline(always)]
fn permute(a: u32, b: u32, order: u32) -> u32 {
    let bytes = u64::from(b) << 32 | u64::from(a);
    let mut result = 0;
    for index in 0..4 {
        let selector = order >> (4 * index);
        let byte = (bytes >> (8 * (selector & 7))) as u8;
        let byte = if selector & 8 == 0 { byte } else { ((byte as i8) >> 7) as u8 };
        result |= u32::from(byte) << (8 * index);
    }
    result
}

/// `bfind`: the position of the highest bit that differs from the sign, or how far it lies from the top.
fn find_highest(modifiers: &[&str], kind: ScalarType) -> Option<Alu> {
    Some(match (modifiers, kind) {
        ([], U32) => alu!(|a: u32| -> u32 { 31u32.wrapping_sub(a.leading_zeros()) }),
        ([], S32) => {
            alu!(|a: u32| -> u32 { 31u32.wrapping_sub((a ^ ((a as i32) >> 31) as u32).leading_zeros()) })
        }
        ([], U64) => alu!(|a: u64| -> u32 { 63u32.wrapping_sub(a.leading_zeros()) }),
        (["shiftamt"], U32) => alu!(|a: u32| -> u32 { if a == 0 { u32::MAX } else { a.leading_zeros() } }),
        (["shiftamt"], U64) => alu!(|a: u64| -> u32 { if a == 0 { u32::MAX } else { a.leading_zeros() } }),
        _ => return None,
    })
}

/// `bfe`: a field of bits; of a signed number with its sign.
fn extract(kind: ScalarType) -> Option<Alu> {
    Some(match kind {
        U32 => alu!(|a: u32, at: u32, count: u32| -> u32 {
            (u64::from(a).checked_shr(at & 255).unwrap_or(0) & field(count & 255)) as u32
        }),
        S32 => alu!(|a: i32, at: u32, count: u32| -> i32 {
            extract_signed(i64::from(a), at & 255, count & 255, 32) as i32
        }),
        U64 => alu!(|a: u64, at: u32, count: u32| -> u64 {
            a.checked_shr(at & 255).unwrap_or(0) & field(count & 255)
        }),
        S64 => alu!(|a: i64, at: u32, count: u32| -> i64 { extract_signed(a, at & 255, count & 255, 64) }),
        _ => return None,
    })
}

/// `count` ones.
#[inline(always)]
fn field(count: u32) -> u64 {
    if count >= 64 { u64::MAX } else { (1 << count) - 1 }
}

fn extract_signed(a: i64, at: u32, count: u32, size: u32) -> i64 {
    if count == 0 {
        return 0;
    }
    let top = (at + count - 1).min(size - 1);
    let sign = a >> top & 1;
    let value = (a >> at.min(63)) as u64;
    let kept = count.min(size.saturating_sub(at));
    (value & field(kept) | if sign == 1 { !field(kept) } else { 0 }) as i64
}

/// `bfi`: puts the low bits of `a` into `b`.
fn insert(kind: ScalarType) -> Option<Alu> {
    Some(match kind {
        B32 => alu!(|a: u32, b: u32, at: u32, count: u32| -> u32 {
            let mask = field(count & 255).checked_shl(at & 255).unwrap_or(0) as u32;
            b & !mask | (u64::from(a).checked_shl(at & 255).unwrap_or(0) as u32) & mask
        }),
        B64 => alu!(|a: u64, b: u64, at: u32, count: u32| -> u64 {
            let mask = field(count & 255).checked_shl(at & 255).unwrap_or(0);
            b & !mask | a.checked_shl(at & 255).unwrap_or(0) & mask
        }),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields() {
        assert_eq!(extract_signed(0b1110_1000, 3, 5, 32), -3);
        assert_eq!(extract_signed(0b0110_1000, 3, 5, 32), 13);
        assert_eq!(extract_signed(-1, 30, 10, 32), -1);
        assert_eq!(field(0), 0);
    }

    #[test]
    fn permutations_and_logic() {
        assert_eq!(permute(0x3322_1100, 0x7766_5544, 0x3210), 0x3322_1100);
        assert_eq!(permute(0x3322_1100, 0x7766_5584, 0xc047), 0xff00_8477);
        assert_eq!(logic_of_three(0b1100, 0b1010, 0b0110, 0x96) & 15, 0b1100 ^ 0b1010 ^ 0b0110);
        assert_eq!(left(0x8000_0000, 1, 1), 3);
        assert_eq!(right(0x8000_0000, 1, 31), 3);
    }
}
