//! Instructions that compute: each is one loop over the 32 lanes, compiled once for every processor and once for
//! processors with AVX2 and FMA, where the loop becomes a few vector instructions.
//!
//! `find` maps an opcode to its function. The tables are by family: integers, floats, 16-bit floats, comparisons,
//! conversions.

mod approximate;
mod bits;
mod compare;
mod convert;
mod float;
mod half;
mod integer;

use crate::ptx::ScalarType;
use crate::registers::{Class, Registers};
use crate::vectors::{Level, level};

/// Slots of a result and up to four operands.
pub type Slots = [u16; 5];

/// Computes the lanes of a mask. It may only be called on a processor for which `Alu::new` selected it.
pub type Run = unsafe fn(&mut Registers, &Slots, u32);

/// An instruction that computes a result from operands.
#[derive(Clone, Copy)]
pub struct Alu {
    /// Its function.
    pub run: Run,
    /// The register file of the result.
    pub result: Class,
    /// The register files of the operands.
    pub operands: &'static [Class],
}

impl Alu {
    /// The version for this processor.
    fn new(portable: Run, vector: Run, result: Class, operands: &'static [Class]) -> Self {
        let run = if level() == Level::Portable { portable } else { vector };
        Self { run, result, operands }
    }
}

/// Makes an `Alu` from a closure on single lanes.
macro_rules! alu {
    (|$($name:ident: $kind:ty),+| -> $result:ty $body:block) => {{
        use $crate::registers::{LANES, Lane, Registers};
        #[inline(always)]
        fn lanes(registers: &mut Registers, slots: &$crate::alu::Slots, mask: u32) {
            let mut slot = slots[1..].iter();
            $(let $name = <$kind as Lane>::read(registers, *slot.next().expect("a slot per operand"));)+
            let mut result = [<$result>::default(); LANES];
            for lane in 0..LANES {
                $(let $name = $name[lane];)+
                result[lane] = $body;
            }
            <$result as Lane>::write(registers, slots[0], &result, mask);
        }
        fn portable(registers: &mut Registers, slots: &$crate::alu::Slots, mask: u32) {
            lanes(registers, slots, mask);
        }
        #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,bmi1,bmi2,lzcnt,popcnt"))]
        fn vector(registers: &mut Registers, slots: &$crate::alu::Slots, mask: u32) {
            lanes(registers, slots, mask);
        }
        $crate::alu::Alu::new(
            portable,
            vector,
            <$result as Lane>::CLASS,
            &[$(<$kind as Lane>::CLASS),+],
        )
    }};
}

/// The `Alu` of a closure for each listed type, in which the closure names the type `T`.
macro_rules! typed {
    ($kind:expr, [$($name:ident: $rust:ty),+ $(,)?], $lambda:tt) => {
        match $kind {
            $($crate::ptx::ScalarType::$name => Some({
                type T = $rust;
                $crate::alu::alu! $lambda
            }),)+
            _ => None,
        }
    };
}

use {alu, typed};

/// The function of an opcode, split at its dots; `None` if it is not known.
pub fn find(parts: &[&str]) -> Option<Alu> {
    let (&name, modifiers) = parts.split_first()?;
    let (&last, modifiers) = modifiers.split_last()?;
    let kind = ScalarType::from_name(last)?;
    match name {
        "cvt" => convert::find(modifiers, kind),
        "mov" => mov(modifiers, kind),
        "selp" => bits::select(modifiers, kind),
        _ if is_float(kind) => float::find(name, modifiers, kind),
        _ => integer::find(name, modifiers, kind).or_else(|| bits::find(name, modifiers, kind)),
    }
}

pub use compare::find as comparison;

fn is_float(kind: ScalarType) -> bool {
    use ScalarType::*;
    matches!(kind, F16 | F16x2 | Bf16 | Bf16x2 | F32 | F64)
}

fn mov(modifiers: &[&str], kind: ScalarType) -> Option<Alu> {
    use ScalarType::*;
    if !modifiers.is_empty() {
        return None;
    }
    Some(match kind {
        Pred => alu!(|a: bool| -> bool { a }),
        B64 | U64 | S64 | F64 => copy_long(),
        _ => alu!(|a: u32| -> u32 { a }),
    })
}

/// Copies a register of 64 bits.
pub fn copy_long() -> Alu {
    alu!(|a: u64| -> u64 { a })
}

/// Logic of predicates, by which `setp` combines its comparison with an operand.
pub fn predicate_logic(name: &str) -> Option<Alu> {
    Some(match name {
        "and" => alu!(|a: bool, b: bool| -> bool { a & b }),
        "or" => alu!(|a: bool, b: bool| -> bool { a | b }),
        "xor" => alu!(|a: bool, b: bool| -> bool { a ^ b }),
        "not" => alu!(|a: bool| -> bool { !a }),
        _ => return None,
    })
}

/// Packs two halves of 16 or 32 bits, the lower one first.
pub fn pack(bytes: usize) -> Option<Alu> {
    Some(match bytes {
        4 => alu!(|low: u16, high: u16| -> u32 { u32::from(low) | u32::from(high) << 16 }),
        8 => alu!(|low: u32, high: u32| -> u64 { u64::from(low) | u64::from(high) << 32 }),
        _ => return None,
    })
}

/// The lower or upper half of a register of 32 or 64 bits.
pub fn unpack(bytes: usize, upper: bool) -> Option<Alu> {
    Some(match (bytes, upper) {
        (4, false) => alu!(|a: u32| -> u16 { a as u16 }),
        (4, true) => alu!(|a: u32| -> u16 { (a >> 16) as u16 }),
        (8, false) => alu!(|a: u64| -> u32 { a as u32 }),
        (8, true) => alu!(|a: u64| -> u32 { (a >> 32) as u32 }),
        _ => return None,
    })
}

/// Adds a constant to an address; a shared window begins at it (`cvta`).
pub fn add_long() -> Alu {
    alu!(|a: u64, b: u64| -> u64 { a.wrapping_add(b) })
}
