//! Variants of a sound file: of its bytes, or of the JSON that it holds.

use serde_json::{Map, Value, json};

use crate::hostile::Random;

/// Texts that replace a number or value.
const EXTREMES: [&str; 16] = [
    "0",
    "-1",
    "1",
    "0.5",
    "1e308",
    "1e999",
    "4294967295",
    "4294967296",
    "9223372036854775807",
    "18446744073709551615",
    "18446744073709551616",
    "NaN",
    "null",
    "true",
    "\"\"",
    "[]",
];

/// Values that replace a little-endian integer.
const INTEGERS: [u64; 9] = [0, 1, 2, 0x7fff_ffff, 0xffff_ffff, 1 << 32, i64::MAX as u64, 1 << 63, u64::MAX];

/// Pieces that are repeated many times at one place of a file.
const NESTED: [&[u8]; 7] = [b"[", b"{\"a\":", b"\"", b",", b"[[],", b"\xff", b"\n"];

/// One to three changes of `original`.
pub fn mutate(random: &mut Random, original: &[u8]) -> Vec<u8> {
    let mut bytes = original.to_vec();
    for _ in 0..1 + random.below(3) {
        change(random, &mut bytes);
    }
    bytes
}

fn change(random: &mut Random, bytes: &mut Vec<u8>) {
    if bytes.is_empty() {
        bytes.extend(random.next_u64().to_le_bytes());
        return;
    }
    let start = random.below(bytes.len());
    let longest = 1 << random.below(10);
    let end = start + 1 + random.below((bytes.len() - start).min(longest));
    let end = end.min(bytes.len());
    match random.below(10) {
        0 => bytes[start] ^= 1 << random.below(8),
        1 => bytes[start..end].iter_mut().for_each(|byte| *byte = random.next_u64() as u8),
        2 | 3 => replace_number(random, bytes, start),
        4 => replace_integer(random, bytes, start),
        5 => drop(bytes.drain(start..end)),
        6 => {
            let span = bytes[start..end].to_vec();
            bytes.splice(start..start, span);
        }
        7 => bytes.truncate(start),
        8 => {
            let span: Vec<u8> = bytes.drain(start..end).collect();
            let to = random.below(bytes.len() + 1);
            bytes.splice(to..to, span);
        }
        _ => {
            let nested = *random.pick(&NESTED);
            let times = 1 << random.below(13);
            bytes.splice(start..start, nested.repeat(times));
        }
    }
}

/// Puts an extreme in the place of the first number written in digits from `start` on.
fn replace_number(random: &mut Random, bytes: &mut Vec<u8>, start: usize) {
    let Some(first) = bytes[start..].iter().position(u8::is_ascii_digit) else { return };
    let first = start + first;
    let digits = bytes[first..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    bytes.splice(first..first + digits, random.pick(&EXTREMES).bytes());
}

/// Puts an extreme in the place of four or eight bytes near `start`.
fn replace_integer(random: &mut Random, bytes: &mut [u8], start: usize) {
    let width = *random.pick(&[4, 8]);
    let at = start / width * width;
    let integer = random.pick(&INTEGERS).to_le_bytes();
    for (byte, new) in bytes[at..].iter_mut().zip(&integer[..width]) {
        *byte = *new;
    }
}

/// Changes one value somewhere in `value`: to an extreme, or an entry is removed, doubled or renamed.
pub fn mutate_json(random: &mut Random, value: &mut Value) {
    let is_leaf = !matches!(value, Value::Object(fields) if !fields.is_empty())
        && !matches!(value, Value::Array(items) if !items.is_empty());
    if is_leaf || random.below(12) == 0 {
        *value = extreme(random, value);
        return;
    }
    match value {
        Value::Object(fields) => mutate_object(random, fields),
        Value::Array(items) => {
            let at = random.below(items.len());
            match random.below(8) {
                0 => drop(items.remove(at)),
                1 => items.insert(at, items[at].clone()),
                2 => items.swap(0, at),
                _ => mutate_json(random, &mut items[at]),
            }
        }
        _ => {}
    }
}

fn mutate_object(random: &mut Random, fields: &mut Map<String, Value>) {
    let names: Vec<String> = fields.keys().cloned().collect();
    let name = random.pick(&names);
    match random.below(8) {
        0 => drop(fields.remove(name)),
        1 => {
            let moved = fields.remove(name).unwrap_or_default();
            fields.insert(format!("../{name}"), moved);
        }
        _ => mutate_json(random, &mut fields[name.as_str()]),
    }
}

/// Another value in the place of `old`, often near to it.
fn extreme(random: &mut Random, old: &Value) -> Value {
    let numbers = [
        json!(0),
        json!(-1),
        json!(1),
        json!(0.5),
        json!(1e308),
        json!(u32::MAX),
        json!(1u64 << 32),
        json!(i64::MAX),
        json!(u64::MAX),
    ];
    let near = match old {
        Value::Number(number) => {
            number.as_u64().map(|n| json!(n.wrapping_add(random.next_u64() % 3).wrapping_sub(1)))
        }
        Value::String(text) => {
            Some(json!(*random.pick(&["f64", "u32", "bf16", "..", "/", "", &format!("{text}x")])))
        }
        _ => None,
    };
    match (near, random.below(4)) {
        (Some(near), 0 | 1) => near,
        (_, 2) => {
            random.pick(&[Value::Null, json!(""), json!([]), json!({}), json!(true), json!("NaN")]).clone()
        }
        _ => random.pick(&numbers).clone(),
    }
}
