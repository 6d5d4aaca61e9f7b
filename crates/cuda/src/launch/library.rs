//! Products by cuBLASLt, where it is there and the shape suits it.
//!
//! Which products it computes depends on their shapes and types alone, so that results do not depend on where tensors lie:
//! rows of whole 16 bytes. A matrix at an address that is no multiple of 16, as a part of another tensor may be (parameters in
//! chunks never are), is copied to scratch and back.

use phalanx_tensor::{DType, View};

use crate::blas::{ALIGN, Addresses, Blas, Matrix, Problem};
use crate::error::Error;
use crate::factory::SCRATCH_BYTES;
use crate::launch::products::{Layouts, Product};
use crate::launch::{Issue, address, numbers};
use crate::programs::{Program, Source};
use crate::segment::{CopyEnd, Step};

/// Addresses of workspaces are multiples of this.
const WORKSPACE_ALIGN: u64 = 256;

impl Issue<'_> {
    /// Computes a product by the library; false if it is left to the kernel.
    pub(super) fn multiply_by_library(&self, blas: &Blas, product: &Product) -> Result<bool, Error> {
        let Some(scratch) = self.scratch.clone().filter(|_| suits(product)) else { return Ok(false) };
        let Product {
            a,
            b,
            layouts,
            size: [m, n, k],
            strides: [a_stride, b_stride],
            to,
            bias,
            add,
            gelu,
            ..
        } = *product;
        let result = gelu.map_or(to, |(pre, _)| pre);
        // The workspace lies in front, the rest holds copies. It does not grow with the scratch, which depends on the micro-batch: algorithms
        // depend on it.
        let start = scratch.start.next_multiple_of(WORKSPACE_ALIGN);
        let workspace_bytes = (scratch.end - start).min(SCRATCH_BYTES - WORKSPACE_ALIGN) / 2;
        let workspace_bytes = (workspace_bytes / WORKSPACE_ALIGN * WORKSPACE_ALIGN) as usize;
        let matrix = |[rows, columns]: [usize; 2], stride: usize, transposed: bool| match transposed {
            false => Matrix { rows, columns, stride, transposed },
            true => Matrix { rows: columns, columns: rows, stride, transposed },
        };
        let problem = Problem {
            a: matrix([m, k], a_stride, layouts == Layouts::LeftTransposed),
            b: matrix([k, n], b_stride, layouts == Layouts::RightTransposed),
            to: matrix([m, n], n, false),
            element: a.dtype(),
            result: result.dtype(),
            has_bias: bias.is_some(),
            tf32: self.tf32 && a.dtype() == DType::F32,
            workspace_bytes,
        };
        // Looking for an algorithm may load a kernel.
        let computes = || blas.computes(&problem);
        let is_computed = if blas.knows(&problem) { computes() } else { self.modules.gate().load(computes) };
        if !is_computed? {
            return Ok(false);
        }
        let mut copies = Copies { next: start + workspace_bytes as u64, end: scratch.end };
        let [a_at, b_at] = [copies.read(self, a)?, copies.read(self, b)?];
        let bias_at = bias.map(|bias| copies.read(self, bias)).transpose()?;
        let accumulates = add == Some(address(result.as_view()));
        let to_at = match is_aligned(result.as_view()) {
            true => address(result.as_view()),
            false if accumulates => copies.read(self, result.as_view())?,
            false => copies.room(self, result.bytes())?,
        };
        let add_at = match add {
            Some(_) if accumulates => Some(to_at),
            Some(other) if !other.is_multiple_of(ALIGN) => Some(copies.copy(self, other, result.bytes())?),
            other => other,
        };
        let addresses =
            Addresses { a: a_at, b: b_at, to: to_at, bias: bias_at, add: add_at, workspace: start };
        self.push(Step::Product(problem, addresses));
        if to_at != address(result.as_view()) {
            copy(self, address(result.as_view()), to_at, result.bytes());
        }
        // GELU is of what is stored, so that it can be computed again: the library's own would be of the sums.
        let Some((pre, form)) = gelu else { return Ok(true) };
        let (program, elements) = (Program::of(Source::Gelu, pre.dtype()), pre.elements());
        self.over_fours(program, "gelu", elements, numbers![pre.as_view(), to, elements, form])?;
        Ok(true)
    }
}

/// Returns whether all rows are multiples of 16 bytes, and the library has the types.
fn suits(product: &Product) -> bool {
    let Product { a, size: [m, n, k], strides: [a_stride, b_stride], to, bias, .. } = *product;
    let step = ALIGN as usize / a.dtype().bytes();
    let has_elements = [m, n, k].iter().all(|&size| size > 0);
    let whole = [a_stride, b_stride, n].iter().all(|row| row.is_multiple_of(step));
    has_elements && whole && bias.is_none_or(|bias| bias.dtype() == to.dtype())
}

fn is_aligned(view: View) -> bool {
    address(view).is_multiple_of(ALIGN)
}

/// Scratch for copies of matrices at addresses that the library does not take.
struct Copies {
    next: u64,
    end: u64,
}

impl Copies {
    /// Room for a matrix.
    fn room(&mut self, issue: &Issue, bytes: usize) -> Result<u64, Error> {
        let at = self.next;
        self.next += (bytes as u64).next_multiple_of(ALIGN);
        if self.next > self.end {
            return Err(Error::Unsupported(format!(
                "`{}` needs {} bytes of scratch more for copies of tensors at addresses that are no multiple of {ALIGN}: give the \
                 device more (`Options::scratch_bytes`)",
                issue.call,
                self.next - self.end
            )));
        }
        Ok(at)
    }

    fn copy(&mut self, issue: &Issue, from: u64, bytes: usize) -> Result<u64, Error> {
        let at = self.room(issue, bytes)?;
        copy(issue, at, from, bytes);
        Ok(at)
    }

    /// Returns an address at which the library can read a matrix: its own, or that of a copy.
    fn read(&mut self, issue: &Issue, view: View) -> Result<u64, Error> {
        if is_aligned(view) { Ok(address(view)) } else { self.copy(issue, address(view), view.bytes()) }
    }
}

fn copy(issue: &Issue, to: u64, from: u64, bytes: usize) {
    issue.push(Step::Copy { to: CopyEnd::Card(to), from: CopyEnd::Card(from), bytes });
}
