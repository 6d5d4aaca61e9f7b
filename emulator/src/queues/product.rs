//! Products of matrices, which a library queues: each matrix is checked column by column, as a copy is.

use crate::checks::Finding;
use crate::numbers::{Bfloat16, Binary16, Narrow, nearest_tf32};
use crate::vectors::vectorised;

use super::{Clock, Queues};

/// What reports call a product.
const NAME: &str = "a product of cuBLASLt";

/// A type of elements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Element {
    #[default]
    F32,
    F16,
    Bf16,
}

impl Element {
    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        if self == Self::F32 { 4 } else { 2 }
    }

    fn read(self, bytes: &[u8]) -> f32 {
        match self {
            Self::F32 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
            Self::F16 => Binary16(u16::from_le_bytes([bytes[0], bytes[1]])).wide(),
            Self::Bf16 => Bfloat16(u16::from_le_bytes([bytes[0], bytes[1]])).wide(),
        }
    }

    fn write(self, value: f32, bytes: &mut [u8]) {
        match self {
            Self::F32 => bytes.copy_from_slice(&value.to_le_bytes()),
            Self::F16 => bytes.copy_from_slice(&Binary16::nearest(value).0.to_le_bytes()),
            Self::Bf16 => bytes.copy_from_slice(&Bfloat16::nearest(value).0.to_le_bytes()),
        }
    }
}

/// A matrix in device memory, stored by columns.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    /// Its address.
    pub address: u64,
    /// Its type.
    pub element: Element,
    /// Its size.
    pub rows: usize,
    /// Its size.
    pub columns: usize,
    /// From column to column, in elements.
    pub leading: usize,
}

/// `d = alpha * a * b + beta * c`, with what is done to it before it is stored.
#[derive(Clone, Debug)]
pub struct Product {
    /// The left factor.
    pub a: Matrix,
    /// The right factor.
    pub b: Matrix,
    /// What is added, unless beta is zero. It may be `d`.
    pub c: Option<Matrix>,
    /// The result.
    pub d: Matrix,
    /// Whether a and b are transposed.
    pub transposed: [bool; 2],
    /// The dimension that is summed over.
    pub depth: usize,
    /// Whether factors are rounded to TF32.
    pub tf32: bool,
    /// Alpha and beta.
    pub factors: [f32; 2],
    /// A column that is added to all.
    pub bias: Option<Matrix>,
    /// Whether GELU is applied.
    pub gelu: bool,
    /// Where the results before GELU are stored.
    pub aux: Option<Matrix>,
    /// The results before GELU, by whose derivative results are multiplied.
    pub gelu_gradient: Option<Matrix>,
    /// Where the sums of rows are stored.
    pub bias_gradient: Option<Matrix>,
    /// Address and size of memory for partial sums.
    pub workspace: (u64, usize),
}

/// The operation by which memory is used.
type By<'a> = (u32, &'a Clock);

impl Queues {
    /// Computes a product. Without its matrices, it does nothing more.
    pub(super) fn product(&mut self, product: &Product, by: By) {
        if self.try_product(product, by).is_some() {
            self.products += 1;
        }
    }

    fn try_product(&mut self, product: &Product, by: By) -> Option<()> {
        let Product { d, depth, factors: [alpha, beta], .. } = *product;
        let mut a = self.read_matrix(product.a, by)?;
        let mut b = self.read_matrix(product.b, by)?;
        // The elements of a step of the sum follow each other in a, those of a sum in b.
        if product.transposed[0] {
            a = transposed(&a, depth);
        }
        if product.transposed[1] {
            b = transposed(&b, d.columns);
        }
        if product.tf32 {
            a.iter_mut().chain(&mut b).for_each(|value| *value = nearest_tf32(*value));
        }
        let c = self.read_if(product.c, by)?;
        let bias = self.read_if(product.bias, by)?;
        let aux = self.read_if(product.gelu_gradient, by)?;
        self.use_workspace(product.workspace, by)?;
        let mut results = vec![0f32; d.rows * d.columns];
        let mut sums = vec![0f64; d.rows];
        for (column, results) in results.chunks_exact_mut(d.rows).enumerate() {
            sums.fill(0.0);
            for (a, &b) in a.chunks_exact(d.rows).zip(&b[column * depth..]).take(depth) {
                add_column(&mut sums, a, f64::from(b));
            }
            for (row, (result, sum)) in results.iter_mut().zip(&sums).enumerate() {
                let mut value = f64::from(alpha) * sum;
                if let Some(c) = &c {
                    value += f64::from(beta) * f64::from(c[column * d.rows + row]);
                }
                if let Some(bias) = &bias {
                    value += f64::from(bias[row]);
                }
                *result = value as f32;
            }
        }
        self.store(product, results, aux, by)
    }

    /// Applies what is left to the results, and stores them.
    fn store(
        &mut self,
        product: &Product,
        mut results: Vec<f32>,
        aux: Option<Vec<f32>>,
        by: By,
    ) -> Option<()> {
        if let Some(matrix) = product.aux {
            self.write_matrix(matrix, &results, by)?;
        }
        if product.gelu {
            results.iter_mut().for_each(|value| *value = gelu(f64::from(*value)) as f32);
        }
        for (value, aux) in results.iter_mut().zip(aux.into_iter().flatten()) {
            *value = (f64::from(*value) * gelu_derivative(f64::from(aux))) as f32;
        }
        if let Some(matrix) = product.bias_gradient {
            let mut sums = vec![0f64; matrix.rows];
            results.chunks_exact(matrix.rows).for_each(|column| add_column(&mut sums, column, 1.0));
            let sums: Vec<f32> = sums.into_iter().map(|sum| sum as f32).collect();
            self.write_matrix(matrix, &sums, by)?;
        }
        self.write_matrix(product.d, &results, by)
    }

    /// The elements of a matrix that may not be there; `None` if it is out of bounds.
    fn read_if(&mut self, matrix: Option<Matrix>, by: By) -> Option<Option<Vec<f32>>> {
        match matrix {
            None => Some(None),
            Some(matrix) => self.read_matrix(matrix, by).map(Some),
        }
    }

    /// The elements of a matrix by columns; `None` if it is out of bounds.
    fn read_matrix(&mut self, matrix: Matrix, by: By) -> Option<Vec<f32>> {
        let size = matrix.element.bytes();
        let mut all = Vec::with_capacity(matrix.rows * matrix.columns);
        for (address, bytes) in matrix.pieces() {
            let place = self.range(NAME, address, bytes, false, by)?;
            if self.checks.unwritten && !self.memory.is_range_written(place, bytes) {
                let detail = format!("among {bytes} bytes of a matrix");
                self.report(Finding::Unwritten, NAME, Some(address), detail);
            }
            let bytes = self.memory.bytes(place, bytes);
            all.extend(bytes.chunks_exact(size).map(|bytes| matrix.element.read(bytes)));
        }
        Some(all)
    }

    /// Writes the elements of a matrix; `None` if it is out of bounds.
    fn write_matrix(&mut self, matrix: Matrix, values: &[f32], by: By) -> Option<()> {
        let size = matrix.element.bytes();
        let mut values = values.iter();
        for (address, bytes) in matrix.pieces() {
            let place = self.range(NAME, address, bytes, true, by)?;
            for (bytes, &value) in self.memory.bytes(place, bytes).chunks_exact_mut(size).zip(&mut values) {
                matrix.element.write(value, bytes);
            }
            self.memory.mark_range_written(place, bytes);
        }
        Some(())
    }

    /// Leaves numbers in the workspace that nobody can use: the library's own.
    fn use_workspace(&mut self, (address, bytes): (u64, usize), by: By) -> Option<()> {
        if bytes > 0 {
            let place = self.range(NAME, address, bytes, true, by)?;
            self.memory.bytes(place, bytes).fill(0xff);
            self.memory.mark_range_written(place, bytes);
        }
        Some(())
    }
}

impl Matrix {
    /// Address and bytes of the parts that are in one piece: the matrix, or each of its columns.
    fn pieces(self) -> impl Iterator<Item = (u64, usize)> {
        let size = self.element.bytes();
        let (pieces, rows) =
            if self.leading == self.rows { (1, self.rows * self.columns) } else { (self.columns, self.rows) };
        (0..pieces).map(move |piece| (self.address + (piece * self.leading * size) as u64, rows * size))
    }
}

/// Rows of `of_row` numbers each as columns.
fn transposed(values: &[f32], of_row: usize) -> Vec<f32> {
    let rows = values.len() / of_row;
    (0..values.len()).map(|index| values[index % rows * of_row + index / rows]).collect()
}

vectorised! {
    /// Adds a column times a factor.
    fn add_column(sums: &mut [f64], column: &[f32], factor: f64) {
        for (sum, &value) in sums.iter_mut().zip(column) {
            *sum += f64::from(value) * factor;
        }
    }
}

/// The argument of the hyperbolic tangent in GELU, and its derivative.
fn inner(x: f64) -> (f64, f64) {
    const SCALE: f64 = 0.797_884_560_802_865_4;
    const CUBE: f64 = 0.044715;
    (SCALE * (x + CUBE * x * x * x), SCALE * (1.0 + 3.0 * CUBE * x * x))
}

/// GELU by the hyperbolic tangent, as the library has it.
fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + inner(x).0.tanh())
}

fn gelu_derivative(x: f64) -> f64 {
    let (inner, slope) = inner(x);
    let tangent = inner.tanh();
    0.5 * (1.0 + tangent) + 0.5 * x * (1.0 - tangent * tangent) * slope
}
