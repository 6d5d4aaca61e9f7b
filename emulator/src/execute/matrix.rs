//! `ldmatrix` and `mma.sync`, with the fragment layouts of the PTX manual (section "Warp Level Matrix Instructions").
//!
//! Products are exact in f64 and summed in f64 in the order of k, then rounded once: a tensor core's sum has other
//! roundings, which are not documented. Tests against a card need a tolerance for the length of the sum.
//!
//! Word `4 * r + c` of a register is lane `4 * r + c`'s, so a register is a matrix of 8 rows of 4 words. Those of the sum
//! have the even columns in one register and the odd ones in the next: here they stay in this order.

use crate::checks::Finding;
use crate::kernel::{LoadMatrix, MatrixKind, Multiply};
use crate::memory::Fault;
use crate::numbers::{Bfloat16, Binary16, Narrow, truncated_tf32};
use crate::registers::{LANES, Words};
use crate::vectors::{Level, level, vectorised};

use super::access::{SHARED, addresses};
use super::block::{Block, Stop};
use super::spans::{Span, Spans};
use super::values::LaneBytes;
use super::warp::Warp;

/// Rows of a and of the sum.
const ROWS: usize = 16;

/// Columns of b and of the sum.
const COLUMNS: usize = 8;

/// The most columns of a and rows of b.
const DEPTH: usize = 16;

/// Bytes of a row of a matrix that `ldmatrix` loads.
const ROW_BYTES: usize = 16;

impl Block<'_> {
    /// Loads matrices of 8 by 8: lane `8 * m + r` has the address of row `r` of matrix `m`.
    pub(super) fn load_matrix(&mut self, warp: &mut Warp, load: &LoadMatrix, at: usize) -> Result<(), Stop> {
        self.whole_warp(warp, at)?;
        let addresses = addresses(warp, &load.address);
        let by = self.accessor(warp.number, at, false);
        let mut rows = [[0u8; ROW_BYTES]; LANES];
        let mask = u32::MAX >> (LANES - 8 * load.results.len());
        for span in Spans::new(&addresses, mask, ROW_BYTES, true) {
            let Some(address) = Self::shared_address(load.space, span.address) else {
                let detail = "a row of a matrix is not in shared memory".to_string();
                return Err(self.stop(Fault { finding: Finding::OutOfBounds, detail }, span, &by));
            };
            self.read::<SHARED, ROW_BYTES>(Span { address, ..span }, &by, &mut rows)?;
        }
        for (matrix, &slot) in load.results.iter().enumerate() {
            let result = if load.transposed { transposed(&rows, matrix) } else { plain(&rows, matrix) };
            warp.registers.words[usize::from(slot)] = Words(result);
        }
        Ok(())
    }

    /// d = a * b + c.
    pub(super) fn multiply(&mut self, warp: &mut Warp, multiply: &Multiply, at: usize) -> Result<(), Stop> {
        self.whole_warp(warp, at)?;
        self.statistics.multiplies += 1;
        self.statistics.multiply_adds += (ROWS * COLUMNS * multiply.depth) as u64;
        let words = |slot: u16| &warp.registers.words[usize::from(slot)].0;
        let (mut a, mut b): (Left, Right) = ([[0.0; DEPTH]; ROWS], [[0.0; COLUMNS]; DEPTH]);
        let per_register = if multiply.kind == MatrixKind::Tf32 { 4 } else { 8 };
        for (index, &slot) in multiply.a.iter().enumerate() {
            let rows = &mut a[index % 2 * 8..index % 2 * 8 + 8];
            let first = index / 2 * per_register;
            match multiply.kind {
                MatrixKind::Tf32 => left_tf32(rows, first, words(slot)),
                MatrixKind::Bf16 => left_bf16(rows, first, words(slot)),
                MatrixKind::F16 => left_f16(rows, first, words(slot)),
            }
        }
        for (index, &slot) in multiply.b.iter().enumerate() {
            let rows = &mut b[index * per_register..(index + 1) * per_register];
            match multiply.kind {
                MatrixKind::Tf32 => right_tf32(rows, words(slot)),
                MatrixKind::Bf16 => right_bf16(rows, words(slot)),
                MatrixKind::F16 => right_f16(rows, words(slot)),
            }
        }
        let mut sums = [[0.0; COLUMNS]; ROWS];
        for (index, half) in sums.chunks_exact_mut(8).enumerate() {
            match multiply.half_sum {
                true => sums_of_halves(half, words(multiply.c[index])),
                false => {
                    sums_of_singles(half, words(multiply.c[2 * index]), words(multiply.c[2 * index + 1]))
                }
            }
        }
        let order = if multiply.kind == MatrixKind::Tf32 { &IN_ORDER } else { &PAIRS };
        add(&a, &b, &order[..multiply.depth], &mut sums);
        for (index, half) in sums.chunks_exact(8).enumerate() {
            let mut put = |slot: u16, row: [u32; LANES]| warp.registers.words[usize::from(slot)] = Words(row);
            if multiply.half_sum {
                put(multiply.d[index], halves_of_sums(half));
            } else {
                put(multiply.d[2 * index], singles_of_sums(half, 0));
                put(multiply.d[2 * index + 1], singles_of_sums(half, 4));
            }
        }
        Ok(())
    }

    fn whole_warp(&self, warp: &Warp, at: usize) -> Result<(), Stop> {
        if warp.active == u32::MAX {
            return Ok(());
        }
        let lane = warp.active.trailing_zeros() as usize;
        let detail = format!("a matrix instruction needs all lanes, found {:#010x}", warp.active);
        Err(Box::new(self.report(Finding::Divergence, at, (warp.number, lane), detail)))
    }
}

/// A matrix as a register: its rows are consecutive words.
fn plain(rows: &LaneBytes<ROW_BYTES>, matrix: usize) -> [u32; LANES] {
    let (words, _) = rows[matrix * 8..matrix * 8 + 8].as_flattened().as_chunks::<4>();
    std::array::from_fn(|lane| u32::from_le_bytes(words[lane]))
}

vectorised! {
    /// The transpose of a matrix as a register.
    fn transposed(rows: &LaneBytes<ROW_BYTES>, matrix: usize) -> [u32; LANES] {
        let rows = &rows[matrix * 8..matrix * 8 + 8];
        let element = |row: usize, column: usize| {
            u32::from(u16::from_le_bytes([rows[row][2 * column], rows[row][2 * column + 1]]))
        };
        let mut result = [0; LANES];
        for row in 0..8 {
            for pair in 0..4 {
                result[row * 4 + pair] = element(2 * pair, row) | element(2 * pair + 1, row) << 16;
            }
        }
        result
    }
}

/// Rows of a, in the order of `PAIRS` or of the summed dimension.
type Left = [[f64; DEPTH]; ROWS];
/// Where the elements of a row of a are, if registers hold single elements.
const IN_ORDER: [usize; DEPTH] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

/// Where they are, if registers hold pairs.
const PAIRS: [usize; DEPTH] = [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15];

/// Rows of b, in the order of columns of the sums.
type Right = [[f64; COLUMNS]; DEPTH];
/// Rows of the sums: even columns, then odd ones.
type Sums = [[f64; COLUMNS]; ROWS];

/// Defines how registers of a type become the rows of a and b.
macro_rules! fragments {
    ($($kind:ident: $left:ident, $right:ident;)*) => {$(
        vectorised! {
            /// 8 rows of 8 elements of a, at a column: even ones, then odd ones.
            fn $left(rows: &mut [[f64; DEPTH]], first: usize, words: &[u32; LANES]) {
                for (row, words) in rows.iter_mut().zip(words.as_chunks::<4>().0) {
                    let row = &mut row[first..first + 8];
                    for pair in 0..4 {
                        row[pair] = f64::from($kind(words[pair] as u16).wide());
                        row[4 + pair] = f64::from($kind((words[pair] >> 16) as u16).wide());
                    }
                }
            }
        }

        vectorised! {
            /// 8 rows of b. The register has its columns.
            fn $right(rows: &mut [[f64; COLUMNS]], words: &[u32; LANES]) {
                for (pair, rows) in rows.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                    for column in 0..COLUMNS {
                        let word = words[(column % 4 * 2 + column / 4) * 4 + pair];
                        rows[0][column] = f64::from($kind(word as u16).wide());
                        rows[1][column] = f64::from($kind((word >> 16) as u16).wide());
                    }
                }
            }
        }
    )*};
}

fragments! {
    Bfloat16: left_bf16, right_bf16;
    Binary16: left_f16, right_f16;
}

/// 8 rows of 4 elements of a, at a column.
fn left_tf32(rows: &mut [[f64; DEPTH]], first: usize, words: &[u32; LANES]) {
    for (row, words) in rows.iter_mut().zip(words.as_chunks::<4>().0) {
        for (out, &word) in row[first..first + 4].iter_mut().zip(words) {
            *out = f64::from(truncated_tf32(word));
        }
    }
}

/// 4 rows of b. The register has its columns.
fn right_tf32(rows: &mut [[f64; COLUMNS]], words: &[u32; LANES]) {
    for (index, row) in rows.iter_mut().enumerate() {
        for (column, out) in row.iter_mut().enumerate() {
            *out = f64::from(truncated_tf32(words[(column % 4 * 2 + column / 4) * 4 + index]));
        }
    }
}

vectorised! {
    /// 8 rows of c of f32: registers of even and odd columns.
    fn sums_of_singles(rows: &mut [[f64; COLUMNS]], even: &[u32; LANES], odd: &[u32; LANES]) {
        for (index, row) in rows.iter_mut().enumerate() {
            for pair in 0..4 {
                row[pair] = f64::from(f32::from_bits(even[index * 4 + pair]));
                row[4 + pair] = f64::from(f32::from_bits(odd[index * 4 + pair]));
            }
        }
    }
}

vectorised! {
    /// 4 columns of 8 rows of d as a register of f32.
    fn singles_of_sums(rows: &[[f64; COLUMNS]], first: usize) -> [u32; LANES] {
        let mut words = [0; LANES];
        for (index, row) in rows.iter().enumerate().take(8) {
            for pair in 0..4 {
                words[index * 4 + pair] = (row[first + pair] as f32).to_bits();
            }
        }
        words
    }
}

/// 8 rows of c of f16.
fn sums_of_halves(rows: &mut [[f64; COLUMNS]], words: &[u32; LANES]) {
    for (row, words) in rows.iter_mut().zip(words.as_chunks::<4>().0) {
        for (pair, &word) in words.iter().enumerate() {
            row[pair] = f64::from(Binary16(word as u16).wide());
            row[4 + pair] = f64::from(Binary16((word >> 16) as u16).wide());
        }
    }
}

/// 8 rows of d as a register of f16.
fn halves_of_sums(rows: &[[f64; COLUMNS]]) -> [u32; LANES] {
    std::array::from_fn(|lane| {
        let bits = |column: usize| u32::from(Binary16::nearest64(rows[lane / 4][column]).0);
        bits(lane % 4) | bits(4 + lane % 4) << 16
    })
}

/// Adds the products of rows and columns to the sums. The products are exact in f64, so that a fused operation gives the
/// same bits as two.
fn add(a: &Left, b: &Right, order: &[usize], sums: &mut Sums) {
    match level() {
        // SAFETY: the processor has the instructions of its level.
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => unsafe { vectors::add_avx512(a, b, order, sums) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => unsafe { vectors::add_avx2(a, b, order, sums) },
        _ => {
            for (row, sums) in a.iter().zip(sums) {
                for (&step, right) in order.iter().zip(b) {
                    for (sum, &right) in sums.iter_mut().zip(right) {
                        *sum += row[step] * right;
                    }
                }
            }
        }
    }
}

/// `add` with the sums of several rows in registers. Left to itself, the compiler gathers and scatters them.
#[cfg(target_arch = "x86_64")]
mod vectors {
    use std::arch::x86_64::*;

    use super::{Left, Right, Sums};

    #[target_feature(enable = "avx512f")]
    pub(super) fn add_avx512(a: &Left, b: &Right, order: &[usize], sums: &mut Sums) {
        for (rows, sums) in a.as_chunks::<8>().0.iter().zip(sums.as_chunks_mut::<8>().0) {
            // SAFETY: each row of sums has 8 numbers.
            let mut all: [__m512d; 8] =
                std::array::from_fn(|row| unsafe { _mm512_loadu_pd(sums[row].as_ptr()) });
            for (&step, right) in order.iter().zip(b) {
                // SAFETY: each row of b has 8 numbers.
                let right = unsafe { _mm512_loadu_pd(right.as_ptr()) };
                for row in 0..8 {
                    all[row] = _mm512_fmadd_pd(_mm512_set1_pd(rows[row][step]), right, all[row]);
                }
            }
            for row in 0..8 {
                // SAFETY: each row of sums has 8 numbers.
                unsafe { _mm512_storeu_pd(sums[row].as_mut_ptr(), all[row]) };
            }
        }
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn add_avx2(a: &Left, b: &Right, order: &[usize], sums: &mut Sums) {
        for (rows, sums) in a.as_chunks::<4>().0.iter().zip(sums.as_chunks_mut::<4>().0) {
            let halves = |row: &[f64; 8]| {
                // SAFETY: the row has 8 numbers.
                unsafe { [_mm256_loadu_pd(row.as_ptr()), _mm256_loadu_pd(row[4..].as_ptr())] }
            };
            let mut all: [[__m256d; 2]; 4] = std::array::from_fn(|row| halves(&sums[row]));
            for (&step, right) in order.iter().zip(b) {
                let right = halves(right);
                for row in 0..4 {
                    let left = _mm256_set1_pd(rows[row][step]);
                    for half in 0..2 {
                        all[row][half] = _mm256_fmadd_pd(left, right[half], all[row][half]);
                    }
                }
            }
            for row in 0..4 {
                for half in 0..2 {
                    // SAFETY: the row has 8 numbers.
                    unsafe { _mm256_storeu_pd(sums[row][4 * half..].as_mut_ptr(), all[row][half]) };
                }
            }
        }
    }
}
