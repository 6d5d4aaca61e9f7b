//! The registers of a warp: one row of 32 values per register, so that one instruction is one loop over a row.
//!
//! Registers of at most 32 bits are rows of `u32`, those of 64 bits rows of `u64`, predicates are masks. A `Lane` is a
//! type as which an instruction reads or writes a row.

use crate::numbers::{Bfloat16, Binary16, Pair};

/// Lanes of a warp.
pub const LANES: usize = 32;

/// A row of a register of at most 32 bits. Narrow values lie in the low bits; readers ignore the others.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub struct Words(pub [u32; LANES]);

/// A row of a register of 64 bits.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub struct Longs(pub [u64; LANES]);

/// All registers of a warp.
#[derive(Clone)]
pub struct Registers {
    /// Registers of at most 32 bits.
    pub words: Vec<Words>,
    /// Registers of 64 bits.
    pub longs: Vec<Longs>,
    /// Predicates: bit `l` is lane `l`.
    pub predicates: Vec<u32>,
}

/// The file that a register lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// `Registers::words`
    Word,
    /// `Registers::longs`
    Long,
    /// `Registers::predicates`
    Predicate,
}

/// A type as which rows are read and written.
pub trait Lane: Copy + Default {
    /// The file of its rows.
    const CLASS: Class;
    /// Reads a row.
    fn read(registers: &Registers, slot: u16) -> [Self; LANES];
    /// Writes the lanes of the mask.
    fn write(registers: &mut Registers, slot: u16, values: &[Self; LANES], mask: u32);
}

/// Stores the lanes of the mask.
#[inline(always)]
pub(crate) fn store<T: Copy>(row: &mut [T; LANES], values: &[T; LANES], mask: u32) {
    if mask == u32::MAX {
        *row = *values;
        return;
    }
    for lane in 0..LANES {
        row[lane] = if mask >> lane & 1 == 1 { values[lane] } else { row[lane] };
    }
}

macro_rules! lanes {
    ($file:ident, $class:ident, $($kind:ty: |$bits:ident| $from:expr, |$value:ident| $into:expr;)*) => {$(
        impl Lane for $kind {
            const CLASS: Class = Class::$class;

            #[inline(always)]
            fn read(registers: &Registers, slot: u16) -> [Self; LANES] {
                let row = &registers.$file[slot as usize].0;
                let mut values = [Self::default(); LANES];
                for lane in 0..LANES {
                    let $bits = row[lane];
                    values[lane] = $from;
                }
                values
            }

            #[inline(always)]
            fn write(registers: &mut Registers, slot: u16, values: &[Self; LANES], mask: u32) {
                let mut bits = [0; LANES];
                for lane in 0..LANES {
                    let $value = values[lane];
                    bits[lane] = $into;
                }
                store(&mut registers.$file[slot as usize].0, &bits, mask);
            }
        }
    )*};
}

lanes! { words, Word,
    u32: |bits| bits, |value| value;
    i32: |bits| bits as i32, |value| value as u32;
    f32: |bits| f32::from_bits(bits), |value| value.to_bits();
    u16: |bits| bits as u16, |value| u32::from(value);
    i16: |bits| bits as i16, |value| value as i32 as u32;
    u8: |bits| bits as u8, |value| u32::from(value);
    i8: |bits| bits as i8, |value| value as i32 as u32;
    Binary16: |bits| Binary16(bits as u16), |value| u32::from(value.0);
    Bfloat16: |bits| Bfloat16(bits as u16), |value| u32::from(value.0);
    Pair<Binary16>: |bits| Pair(Binary16(bits as u16), Binary16((bits >> 16) as u16)),
        |value| u32::from(value.0.0) | u32::from(value.1.0) << 16;
    Pair<Bfloat16>: |bits| Pair(Bfloat16(bits as u16), Bfloat16((bits >> 16) as u16)),
        |value| u32::from(value.0.0) | u32::from(value.1.0) << 16;
    Flushed: |bits| Flushed(flush(f32::from_bits(bits))), |value| flush(value.0).to_bits();
    Saturated: |bits| Saturated(f32::from_bits(bits)), |value| saturate(value.0).to_bits();
    FlushedSaturated: |bits| FlushedSaturated(flush(f32::from_bits(bits))),
        |value| flush(saturate(value.0)).to_bits();
}

lanes! { longs, Long,
    u64: |bits| bits, |value| value;
    i64: |bits| bits as i64, |value| value as u64;
    f64: |bits| f64::from_bits(bits), |value| value.to_bits();
}

impl Lane for bool {
    const CLASS: Class = Class::Predicate;

    #[inline(always)]
    fn read(registers: &Registers, slot: u16) -> [Self; LANES] {
        let bits = registers.predicates[slot as usize];
        std::array::from_fn(|lane| bits >> lane & 1 == 1)
    }

    #[inline(always)]
    fn write(registers: &mut Registers, slot: u16, values: &[Self; LANES], mask: u32) {
        let mut bits = 0;
        for (lane, &value) in values.iter().enumerate() {
            bits |= u32::from(value) << lane;
        }
        let row = &mut registers.predicates[slot as usize];
        *row = *row & !mask | bits & mask;
    }
}

/// An f32 as the modifiers of an instruction treat it.
pub trait Single: Lane {
    /// The number that the instruction computes with.
    fn get(self) -> f32;
    /// The result that the instruction stores.
    fn new(value: f32) -> Self;
}

/// `.ftz`: subnormal operands and results are zeros.
#[derive(Clone, Copy, Default)]
pub struct Flushed(f32);

/// `.sat`: results are clamped to 0 to 1.
#[derive(Clone, Copy, Default)]
pub struct Saturated(f32);

/// `.ftz.sat`
#[derive(Clone, Copy, Default)]
pub struct FlushedSaturated(f32);

macro_rules! singles {
    ($($kind:ident),*) => {$(
        impl Single for $kind {
            #[inline(always)]
            fn get(self) -> f32 {
                self.0
            }

            #[inline(always)]
            fn new(value: f32) -> Self {
                Self(value)
            }
        }
    )*};
}

singles!(Flushed, Saturated, FlushedSaturated);

impl Single for f32 {
    #[inline(always)]
    fn get(self) -> f32 {
        self
    }

    #[inline(always)]
    fn new(value: f32) -> Self {
        value
    }
}

#[inline(always)]
fn flush(value: f32) -> f32 {
    let bits = value.to_bits();
    f32::from_bits(if bits & 0x7f80_0000 == 0 { bits & 0x8000_0000 } else { bits })
}

/// Clamps to 0 to 1; a NaN becomes 0.
#[inline(always)]
fn saturate(value: f32) -> f32 {
    let above = if value > 0.0 { value } else { 0.0 };
    if above < 1.0 { above } else { 1.0 }
}
