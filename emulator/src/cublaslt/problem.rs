//! A problem: an operation on matrices of some layouts, checked as the library does; and the product that it becomes when
//! it is queued.

use std::hash::{DefaultHasher, Hash, Hasher};

use super::descriptions::{Layout, Operation};
use super::{Algorithm, BlasStatus, Outcome};
use crate::queues::{Element, Matrix, Product};

/// Multiples that addresses of a workspace and of an auxiliary matrix must be.
const WORKSPACE_ALIGN: u64 = 256;
const AUX_ALIGN: u64 = 16;

/// Bytes of which columns are a multiple, where only such are taken.
const ROW: usize = 16;

/// Elements of which the columns of an auxiliary matrix are a multiple apart.
const AUX_LEADING: i64 = 8;

/// An operation on matrices.
pub struct Problem {
    operation: Operation,
    /// A, B, C, D.
    matrices: [Layout; 4],
    depth: usize,
}

/// Where the matrices of a product and its workspace are.
pub struct Addresses {
    /// A, B, C, D.
    pub matrices: [u64; 4],
    /// The workspace.
    pub workspace: u64,
    /// Its size.
    pub workspace_bytes: usize,
}

impl Problem {
    /// Checks sizes and types.
    pub fn new(operation: Operation, matrices: [Layout; 4]) -> Outcome<Self> {
        let [a, b, c, d] = matrices;
        if matrices
            .iter()
            .any(|matrix| matrix.leading < matrix.rows || matrix.rows == 0 || matrix.columns == 0)
        {
            return Err(BlasStatus::INVALID_VALUE);
        }
        let size = |matrix: Layout, transposed: bool| match transposed {
            false => (matrix.rows, matrix.columns),
            true => (matrix.columns, matrix.rows),
        };
        let ((m, depth), (depth_b, n)) = (size(a, operation.transposed[0]), size(b, operation.transposed[1]));
        if depth != depth_b || [c, d].iter().any(|matrix| (matrix.rows, matrix.columns) != (m, n)) {
            return Err(BlasStatus::INVALID_VALUE);
        }
        let known = match (a.element, d.element) {
            (Element::F32, Element::F32) => true,
            (from, to) => !operation.tf32 && from != Element::F32 && (to == from || to == Element::F32),
        };
        let is_odd = |matrix: &Layout| !(matrix.rows * matrix.element.bytes()).is_multiple_of(ROW);
        let refuses = crate::driver::config().whole_extents && matrices.iter().any(is_odd);
        if !known || refuses || a.element != b.element || c.element != d.element {
            return Err(BlasStatus::NOT_SUPPORTED);
        }
        let problem = Self { operation, matrices, depth };
        problem.check_epilogue()?;
        Ok(problem)
    }

    fn check_epilogue(&self) -> Outcome<()> {
        let Operation { epilogue, bias, bias_element, aux, aux_leading, aux_element, .. } = self.operation;
        let [.., d] = self.matrices;
        if epilogue.has_vector() && bias == 0 {
            return Err(BlasStatus::INVALID_VALUE);
        }
        if epilogue.has_aux() {
            let fits = aux_leading >= d.rows as i64 && aux_leading % AUX_LEADING == 0;
            if aux == 0 || !aux.is_multiple_of(AUX_ALIGN) || !fits {
                return Err(BlasStatus::INVALID_VALUE);
            }
        }
        let other = |element: Option<Element>| element.is_some_and(|element| element != d.element);
        if epilogue.has_vector() && other(bias_element) || epilogue.has_aux() && other(aux_element) {
            return Err(BlasStatus::NOT_SUPPORTED);
        }
        Ok(())
    }

    /// Bytes of a matrix of sums in f32.
    pub fn partial_sums_bytes(&self) -> u64 {
        let [.., d] = self.matrices;
        (d.rows * d.columns * 4) as u64
    }

    /// A number by which an algorithm knows its problem. Addresses do not count.
    pub fn hash(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        let Operation { tf32, transposed, epilogue, aux_leading, .. } = &self.operation;
        (tf32, transposed, epilogue, aux_leading, self.matrices).hash(&mut hasher);
        hasher.finish()
    }

    /// The product at addresses.
    pub fn product(
        self,
        [alpha, beta]: [f32; 2],
        addresses: Addresses,
        algorithm: Option<Algorithm>,
    ) -> Outcome<Product> {
        let workspace = match algorithm {
            None => 0,
            Some(algorithm) => {
                self.check_algorithm(&algorithm, &addresses)?;
                algorithm.workspace
            }
        };
        let Self { operation, matrices, depth } = self;
        let matrix = |which: usize| {
            let Layout { element, rows, columns, leading } = matrices[which];
            let size = element.bytes() as u64;
            if addresses.matrices[which] == 0 || !addresses.matrices[which].is_multiple_of(size) {
                return Err(BlasStatus::INVALID_VALUE);
            }
            Ok(Matrix { address: addresses.matrices[which], element, rows, columns, leading })
        };
        let d = matrix(3)?;
        let bias = Matrix { address: operation.bias, columns: 1, leading: d.rows, ..d };
        let aux = Matrix { address: operation.aux, leading: operation.aux_leading as usize, ..d };
        Ok(Product {
            a: matrix(0)?,
            b: matrix(1)?,
            c: if beta == 0.0 { None } else { Some(matrix(2)?) },
            d,
            transposed: operation.transposed,
            depth,
            tf32: operation.tf32,
            factors: [alpha, beta],
            bias: operation.epilogue.bias.then_some(bias),
            gelu: operation.epilogue.gelu,
            aux: operation.epilogue.aux.then_some(aux),
            gelu_gradient: operation.epilogue.gelu_gradient.then_some(aux),
            bias_gradient: operation.epilogue.bias_gradient.then_some(bias),
            workspace: (addresses.workspace, workspace as usize),
        })
    }

    /// Whether an algorithm may be used: for its problem, with what it was promised.
    fn check_algorithm(&self, algorithm: &Algorithm, addresses: &Addresses) -> Outcome<()> {
        let aligned = addresses.matrices.iter().zip(algorithm.alignment);
        let is_aligned = aligned.into_iter().all(|(address, align)| address.is_multiple_of(align.max(1)));
        if algorithm.problem != self.hash() || !is_aligned {
            return Err(BlasStatus::NOT_SUPPORTED);
        }
        let is_there = addresses.workspace != 0 && addresses.workspace.is_multiple_of(WORKSPACE_ALIGN);
        if algorithm.workspace > 0 && (!is_there || addresses.workspace_bytes < algorithm.workspace as usize)
        {
            return Err(BlasStatus::INVALID_VALUE);
        }
        Ok(())
    }
}
