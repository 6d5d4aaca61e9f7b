//! Tile registers in plain Rust, with the bits of the processor's.
//!
//! It follows the pseudocode of `tdpbf16ps` in Intel's manual. Which NaN a result is, is left open. A product of two bf16
//! has 16 bits, so it is exact in f32 unless it is subnormal or overflows: a multiplication and an addition are a fused
//! multiply-add then. Other products take the slow path.

use super::{REGISTERS, ROW_BYTES, ROWS, Shapes, Tiles};
use crate::{Isa, Lanes, vectorized};

/// Words of a row.
const WORDS: usize = ROW_BYTES / 4;

type Register = [[u32; WORDS]; ROWS];

/// Tile registers in memory.
pub struct Model {
    shapes: Shapes,
    registers: [Register; REGISTERS],
}

impl Tiles for Model {
    unsafe fn new(shapes: &Shapes) -> Model {
        Model { shapes: *shapes, registers: [[[0; WORDS]; ROWS]; REGISTERS] }
    }
    unsafe fn configure(&mut self, shapes: &Shapes) {
        // SAFETY: no promise is needed here.
        *self = unsafe { Model::new(shapes) };
    }
    unsafe fn zero<const REGISTER: usize>(&mut self) {
        self.registers[REGISTER] = [[0; WORDS]; ROWS];
    }
    unsafe fn load<const REGISTER: usize>(&mut self, from: *const u8, stride: usize) {
        let mut loaded = [[0; WORDS]; ROWS];
        for (row, to) in loaded.iter_mut().enumerate().take(self.shapes.rows(REGISTER)) {
            // SAFETY: the rows are valid (the caller's promise); any alignment.
            *to = unsafe { from.add(row * stride).cast::<[u32; WORDS]>().read_unaligned() };
        }
        self.registers[REGISTER] = loaded;
    }
    unsafe fn load_passing<const REGISTER: usize>(&mut self, from: *const u8, stride: usize) {
        // SAFETY: the caller's promise.
        unsafe { self.load::<REGISTER>(from, stride) };
    }
    unsafe fn store<const REGISTER: usize>(&self, to: *mut u8, stride: usize) {
        for (row, from) in self.registers[REGISTER].iter().enumerate().take(self.shapes.rows(REGISTER)) {
            // SAFETY: as above.
            unsafe { to.add(row * stride).cast::<[u32; WORDS]>().write_unaligned(*from) };
        }
    }
    unsafe fn multiply_bf16<const SUMS: usize, const A: usize, const B: usize>(&mut self) {
        let rows = self.shapes.rows(SUMS);
        // Other shapes raise an exception in the processor.
        assert_eq!([rows, ROWS], [self.shapes.rows(A), self.shapes.rows(B)]);
        let [a, b] = [A, B].map(|register| self.registers[register]);
        multiply(Isa::detect(), &mut self.registers[SUMS][..rows], &a, &b);
    }
}

// Compiled for each instruction set only to be faster: every operation is one of single numbers.
vectorized!(fn multiply(sums: &mut [[u32; WORDS]], a: &Register, b: &Register) = multiply_body);

#[inline(always)]
#[expect(clippy::extra_unused_type_parameters, reason = "what the macro calls")]
fn multiply_body<L: Lanes>(sums: &mut [[u32; WORDS]], a: &Register, b: &Register) {
    let [mut even, mut odd] = [[[0f32; WORDS]; ROWS]; 2];
    for step in 0..ROWS {
        for column in 0..WORDS {
            even[step][column] = low(b[step][column]);
            odd[step][column] = high(b[step][column]);
        }
    }
    for (sums, a) in sums.iter_mut().zip(a) {
        let mut chains = [[0f32; WORDS]; 2];
        for (step, pair) in a.iter().enumerate() {
            add_products(&mut chains[0], low(*pair), &even[step]);
            add_products(&mut chains[1], high(*pair), &odd[step]);
        }
        for (column, sum) in sums.iter_mut().enumerate() {
            let both = flush(chains[0][column] + chains[1][column]);
            *sum = flush(flush(f32::from_bits(*sum)) + both).to_bits();
        }
    }
}

/// The first number of a pair, zero if subnormal.
#[inline(always)]
fn low(pair: u32) -> f32 {
    flush(f32::from_bits(pair << 16))
}

/// The second number of a pair, zero if subnormal.
#[inline(always)]
fn high(pair: u32) -> f32 {
    flush(f32::from_bits(pair & 0xffff_0000))
}

/// Replaces a subnormal number by a zero of its sign.
#[inline(always)]
fn flush(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE { 0f32.copysign(x) } else { x }
}

/// `sums += a * b`, element by element.
#[inline(always)]
fn add_products(sums: &mut [f32; WORDS], a: f32, b: &[f32; WORDS]) {
    let mut exact = true;
    let mut out = [0f32; WORDS];
    for i in 0..WORDS {
        let product = a * b[i];
        let size = product.abs();
        exact &= (size > f32::MIN_POSITIVE) & (size < f32::INFINITY) | (a == 0.0) | (b[i] == 0.0);
        out[i] = flush(product + sums[i]);
    }
    if exact {
        *sums = out;
    } else {
        add_fused(sums, a, b);
    }
}

/// The same for any numbers.
#[cold]
#[inline(never)]
fn add_fused(sums: &mut [f32; WORDS], a: f32, b: &[f32; WORDS]) {
    for (sum, b) in sums.iter_mut().zip(b) {
        *sum = fused(a, *b, *sum);
    }
}

/// `a * b + c`, rounded once, flushed if it is subnormal after it was rounded to 24 bits.
fn fused(a: f32, b: f32, c: f32) -> f32 {
    let x = a.mul_add(b, c);
    if x.abs() != f32::MIN_POSITIVE {
        return flush(x);
    }
    // It may have become the smallest normal number only because subnormal numbers have fewer bits.
    let scale = 2f32.powi(64);
    let (smaller, larger) = if a.abs() < b.abs() { (a, b) } else { (b, a) };
    let scaled = (smaller * scale).mul_add(larger, c * scale);
    if scaled.abs() < f32::MIN_POSITIVE * scale { 0f32.copysign(x) } else { x }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    /// Multiplies a row `a` with a column `b` onto `start`.
    fn dot(start: f32, a: &[f32], b: &[f32]) -> f32 {
        let word = |x: &[f32], i: usize| {
            let half = |i: usize| u32::from(bf16::from_f32(x.get(i).copied().unwrap_or(0.0)).to_bits());
            half(2 * i) | half(2 * i + 1) << 16
        };
        let row: [u32; WORDS] = std::array::from_fn(|i| word(a, i));
        let column: [[u32; WORDS]; ROWS] = std::array::from_fn(|i| [word(b, i); WORDS]);
        let begin = [start; WORDS];
        let mut end = [[0f32; WORDS]; 2];
        // SAFETY: the model has no requirement but valid rows, which these arrays are.
        unsafe {
            let mut tiles = Model::new(&Shapes::new([1, 1, 1, 1, 16, 16, 16, 16]));
            tiles.load::<0>(begin.as_ptr().cast(), ROW_BYTES);
            tiles.load::<1>(row.as_ptr().cast(), ROW_BYTES);
            tiles.load::<4>(column.as_ptr().cast(), ROW_BYTES);
            tiles.multiply_bf16::<0, 1, 4>();
            tiles.store::<0>(end.as_mut_ptr().cast(), ROW_BYTES);
        }
        assert_eq!(end[0].map(f32::to_bits), [end[0][0].to_bits(); WORDS]);
        assert_eq!(end[1], [0.0; WORDS], "a row beyond the shape was stored");
        end[0][0]
    }

    #[test]
    fn two_chains_are_added_to_each_other_and_then_to_the_sum() {
        let tiny = 2f32.powi(-12);
        // In one chain, each of the products of 2^-24 would be lost beside 1. In two, they add up in the second one.
        let a = [1.0, tiny, 0.0, tiny];
        assert_eq!(dot(0.0, &a, &a), 1.0 + 2f32.powi(-23));
        // Within one chain they are lost, one after the other: ties to even.
        let a = [1.0, 0.0, tiny, 0.0, tiny, 0.0];
        assert_eq!(dot(0.0, &a, &a), 1.0);
        // The chains add up before they meet the sum.
        let a = [tiny, tiny];
        assert_eq!(dot(1.0, &a, &a), 1.0 + 2f32.powi(-23));
    }

    #[test]
    fn every_step_rounds_once() {
        // 255 * 255 has 16 bits; beside 2^32, whose spacing is 512, the sum is rounded up once.
        assert_eq!(dot(0.0, &[65536.0, 0.0, 255.0], &[65536.0, 0.0, 255.0]), 2f32.powi(32) + 65_024.0);
        // The product overflows, the fused sum does not.
        let big = 2f32.powi(64);
        assert_eq!(dot(0.0, &[-2f32.powi(63), 0.0, big], &[big, 0.0, big]), 2f32.powi(127));
        assert_eq!(dot(0.0, &[big], &[big]), f32::INFINITY);
    }

    #[test]
    fn subnormal_numbers_are_zero() {
        let smallest = f32::MIN_POSITIVE;
        // As results: of a chain, of the sum of the chains, and of the whole.
        assert_eq!(dot(0.0, &[smallest], &[0.5]), 0.0);
        assert_eq!(dot(0.0, &[smallest * 1.5, smallest], &[1.0, -1.0]), 0.0);
        assert_eq!(dot(smallest * 1.5, &[smallest], &[-1.0]), 0.0);
        // As numbers that are read: of an operand, and of the sum.
        assert_eq!(dot(1.0, &[smallest / 2.0], &[2f32.powi(127)]), 1.0);
        assert_eq!(dot(smallest / 2.0, &[smallest], &[1.0]), smallest);
        // The product alone is subnormal, the fused sum is not.
        let next = smallest * 1.5;
        assert_eq!(dot(0.0, &[next, 0.0, smallest], &[1.0, 0.0, 0.5]), smallest * 2.0);
        // The largest 24-bit number below the smallest normal one: only among subnormal numbers would it round up to that.
        assert_eq!(fused(smallest, 1.0 - 2f32.powi(-24), 0.0), 0.0);
        assert_eq!(fused(smallest, 1.0, 0.0), smallest);
    }

    #[test]
    fn what_is_not_finite_stays_so() {
        assert_eq!(dot(0.0, &[f32::INFINITY], &[2.0]), f32::INFINITY);
        assert!(dot(0.0, &[f32::INFINITY], &[0.0]).is_nan());
        assert!(dot(0.0, &[f32::INFINITY, 1.0, f32::NEG_INFINITY], &[1.0; 3]).is_nan());
        assert!(dot(f32::NAN, &[1.0], &[1.0]).is_nan());
    }
}
