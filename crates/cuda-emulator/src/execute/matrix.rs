//! `ldmatrix` and `mma.sync`, with the fragment layouts of the PTX manual (section "Warp Level Matrix Instructions").
//!
//! Products are exact in f64 and summed in f64 in the order of k, then rounded once: a tensor core's sum has other
//! roundings, which are not documented. Tests against a card need a tolerance for the length of the sum.

use crate::alu::has_vectors;
use crate::checks::Finding;
use crate::kernel::{LoadMatrix, MatrixKind, Multiply};
use crate::memory::Fault;
use crate::numbers::{Bfloat16, Binary16, Narrow, truncated_tf32};
use crate::registers::{LANES, Words};

use super::access::{Who, addresses};
use super::block::{Block, Stop};
use super::warp::Warp;

/// Rows of a and of the sum.
const ROWS: usize = 16;

/// Columns of b and of the sum.
const COLUMNS: usize = 8;

impl Block<'_> {
    /// Loads matrices of 8 by 8: lane `8 * m + r` has the address of row `r` of matrix `m`.
    pub(super) fn load_matrix(&mut self, warp: &mut Warp, load: &LoadMatrix, at: usize) -> Result<(), Stop> {
        self.whole_warp(warp, at)?;
        let addresses = addresses(warp, &load.address);
        let by = self.accessor(warp.number, at, false);
        for (matrix, &slot) in load.results.iter().enumerate() {
            let mut rows = [[0u16; 8]; 8];
            for (row, elements) in rows.iter_mut().enumerate() {
                let lane = matrix * 8 + row;
                let who = Who { by: &by, lane };
                let Some(address) = Self::shared_address(load.space, addresses[lane]) else {
                    let detail = "a row of a matrix is not in shared memory".to_string();
                    return Err(self.stop(
                        Fault { finding: Finding::OutOfBounds, detail },
                        addresses[lane],
                        who,
                    ));
                };
                let bytes: [u8; 16] = self.read_shared(address, who)?;
                for (element, pair) in elements.iter_mut().zip(bytes.chunks_exact(2)) {
                    *element = u16::from_le_bytes([pair[0], pair[1]]);
                }
            }
            let result = std::array::from_fn(|lane| {
                let (row, column) = (lane / 4, lane % 4 * 2);
                let [low, high] = match load.transposed {
                    false => [rows[row][column], rows[row][column + 1]],
                    true => [rows[column][row], rows[column + 1][row]],
                };
                u32::from(low) | u32::from(high) << 16
            });
            warp.registers.words[usize::from(slot)] = Words(result);
        }
        Ok(())
    }

    /// d = a * b + c.
    pub(super) fn multiply(&mut self, warp: &mut Warp, multiply: &Multiply, at: usize) -> Result<(), Stop> {
        self.whole_warp(warp, at)?;
        self.statistics.multiplies += 1;
        let mut a = [[0f32; ROWS]; ROWS];
        let mut b = [[0f32; COLUMNS]; ROWS];
        for (index, &slot) in multiply.a.iter().enumerate() {
            let row_offset = index % 2 * 8;
            let words = &warp.registers.words[usize::from(slot)].0;
            each_element(multiply.kind, words, |lane, column, value| {
                a[lane / 4 + row_offset][column_offset(multiply, index / 2) + column] = value;
            });
        }
        for (index, &slot) in multiply.b.iter().enumerate() {
            let words = &warp.registers.words[usize::from(slot)].0;
            each_element(multiply.kind, words, |lane, row, value| {
                b[column_offset(multiply, index) + row][lane / 4] = value;
            });
        }
        let mut sums = sums(warp, multiply);
        if has_vectors() {
            #[allow(unused_unsafe)] // On other processors there are no such instructions.
            // SAFETY: the processor has the instructions, as just asked.
            unsafe {
                add_products_vector(&a, &b, multiply.depth, &mut sums)
            };
        } else {
            add_products(&a, &b, multiply.depth, &mut sums);
        }
        store_sums(warp, multiply, &sums);
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

type Left = [[f32; ROWS]; ROWS];
type Right = [[f32; COLUMNS]; ROWS];
type Sums = [[f64; COLUMNS]; ROWS];

/// Adds the products of rows and columns to the sums.
#[inline(always)]
fn add_products(a: &Left, b: &Right, depth: usize, sums: &mut Sums) {
    for (row, sums) in a.iter().zip(sums) {
        for (&left, right) in row.iter().zip(b).take(depth) {
            for (sum, &right) in sums.iter_mut().zip(right) {
                *sum += f64::from(left) * f64::from(right);
            }
        }
    }
}

/// `add_products` for processors with AVX2.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma"))]
fn add_products_vector(a: &Left, b: &Right, depth: usize, sums: &mut Sums) {
    add_products(a, b, depth, sums);
}

/// Where the elements of a register begin in the dimension that is summed over.
fn column_offset(multiply: &Multiply, index: usize) -> usize {
    match multiply.kind {
        MatrixKind::Tf32 => index * 4,
        _ => index * 8,
    }
}

/// Visits the elements of a register: lane, place within the register's part of the summed dimension, value.
#[inline]
fn each_element(kind: MatrixKind, words: &[u32; LANES], mut visit: impl FnMut(usize, usize, f32)) {
    for (lane, &word) in words.iter().enumerate() {
        let (low, high) = (word as u16, (word >> 16) as u16);
        match kind {
            MatrixKind::Tf32 => visit(lane, lane % 4, truncated_tf32(word)),
            MatrixKind::Bf16 => {
                visit(lane, lane % 4 * 2, Bfloat16(low).wide());
                visit(lane, lane % 4 * 2 + 1, Bfloat16(high).wide());
            }
            MatrixKind::F16 => {
                visit(lane, lane % 4 * 2, Binary16(low).wide());
                visit(lane, lane % 4 * 2 + 1, Binary16(high).wide());
            }
        }
    }
}

/// The matrix c.
fn sums(warp: &Warp, multiply: &Multiply) -> Sums {
    let mut sums = [[0f64; COLUMNS]; ROWS];
    for (index, &slot) in multiply.c.iter().enumerate() {
        for (lane, &word) in warp.registers.words[usize::from(slot)].0.iter().enumerate() {
            let column = lane % 4 * 2;
            if multiply.half_sum {
                let row = lane / 4 + index * 8;
                sums[row][column] = f64::from(Binary16(word as u16).wide());
                sums[row][column + 1] = f64::from(Binary16((word >> 16) as u16).wide());
            } else {
                sums[lane / 4 + index / 2 * 8][column + index % 2] = f64::from(f32::from_bits(word));
            }
        }
    }
    sums
}

fn store_sums(warp: &mut Warp, multiply: &Multiply, sums: &Sums) {
    for (index, &slot) in multiply.d.iter().enumerate() {
        let row = std::array::from_fn(|lane| {
            let column = lane % 4 * 2;
            if multiply.half_sum {
                let row = &sums[lane / 4 + index * 8];
                let bits = |column: usize| u32::from(Binary16::nearest64(row[column]).0);
                bits(column) | bits(column + 1) << 16
            } else {
                (sums[lane / 4 + index / 2 * 8][column + index % 2] as f32).to_bits()
            }
        });
        warp.registers.words[usize::from(slot)] = Words(row);
    }
}
