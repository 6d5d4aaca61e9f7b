//! Matrix products: the layouts of their operands, and the tiles in which blocks compute them.

use phalanx_tensor::operations::Products;
use phalanx_tensor::{DType, Layout, View, ViewMut, Weight};

use crate::blas::ALIGN;
use crate::error::Error;
use crate::launch::elementwise::form;
use crate::launch::sums::RowBlocks;
use crate::launch::{Issue, numbers};
use crate::modules::Launch;
use crate::programs::{Program, Source};

/// Buffers in shared memory of each operand.
const STAGES: usize = 3;

/// Bytes of a row of a buffer along the inner dimension.
const DEPTH_BYTES: usize = 64;

/// Bytes by which rows in shared memory are padded.
pub(super) const PADDING: usize = 16;

/// Memory layouts of the operands of `a · b`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layouts {
    /// Both as they are multiplied, `[m, k]` and `[k, n]`.
    Plain,
    /// The left one as `[k, m]`.
    LeftTransposed,
    /// The right one as `[n, k]`.
    RightTransposed,
}

impl Layouts {
    fn kernel(self) -> &'static str {
        match self {
            Layouts::Plain => "product",
            Layouts::LeftTransposed => "product_of_transposed",
            Layouts::RightTransposed => "product_with_transposed",
        }
    }
}

/// The part of a result that a block computes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tiles {
    rows: usize,
    pub(super) columns: usize,
    pub(super) threads: u32,
}

impl Tiles {
    pub(super) const LARGE: Tiles = Tiles { rows: 128, columns: 128, threads: 256 };
    const SMALL: Tiles = Tiles { rows: 64, columns: 64, threads: 128 };

    /// Blocks for a result.
    pub(super) fn blocks(self, rows: usize, columns: usize) -> u64 {
        (rows.div_ceil(self.rows) * columns.div_ceil(self.columns)) as u64
    }

    /// Bytes of shared memory: both operands' tiles, in all buffers.
    pub(super) fn shared_bytes(self, layouts: Layouts, element: DType) -> u32 {
        let size = element.bytes();
        let depth = DEPTH_BYTES / size;
        let along = |lanes: usize| lanes * (DEPTH_BYTES + PADDING);
        let across = |lanes: usize| depth * (lanes * size + PADDING);
        let [left, right] = match layouts {
            Layouts::Plain => [along(self.rows), across(self.columns)],
            Layouts::LeftTransposed => [across(self.rows), across(self.columns)],
            Layouts::RightTransposed => [along(self.rows), along(self.columns)],
        };
        (STAGES * (left + right)) as u32
    }
}

/// One product `to = a · b`, and what is done to it before it is stored.
#[derive(Clone, Copy)]
pub(super) struct Product<'a> {
    pub(super) a: View<'a>,
    pub(super) b: View<'a>,
    pub(super) layouts: Layouts,
    /// `[m, n, k]`
    pub(super) size: [usize; 3],
    /// Elements from one row of a and of b to the next, as they are stored.
    pub(super) strides: [usize; 2],
    pub(super) to: &'a ViewMut<'a>,
    /// Elements of the result in front of what is computed.
    skip: usize,
    pub(super) bias: Option<View<'a>>,
    /// Added; may be the result itself.
    pub(super) add: Option<u64>,
    /// Output for the argument of GELU, and GELU's form.
    pub(super) gelu: Option<(&'a ViewMut<'a>, u32)>,
}

impl<'a> Product<'a> {
    fn new(a: View<'a>, b: View<'a>, layouts: Layouts, size: [usize; 3], to: &'a ViewMut<'a>) -> Product<'a> {
        let strides = [a, b].map(|matrix| matrix.shape().rows_cols()[1]);
        Product { a, b, layouts, size, strides, to, skip: 0, bias: None, add: None, gelu: None }
    }

    /// The same, added to what is there.
    fn accumulating(self, accumulate: bool) -> Product<'a> {
        let add = accumulate.then(|| super::address(self.to.as_view()));
        Product { add, ..self }
    }

    /// Two products in its place, one after the other, where an extent along which operands lie in memory is no multiple of 16 bytes: up to
    /// such a multiple, and the rest. None where it is one, or where more than a sum is done to the result.
    fn split(&self) -> Option<[Product<'a>; 2]> {
        let Product { a, b, layouts, size: [m, n, k], strides: [_, b_stride], to, add, .. } = *self;
        let step = ALIGN as usize / a.dtype().bytes();
        let extent = if layouts == Layouts::LeftTransposed { m } else { k };
        let even = extent / step * step;
        let result = super::address(to.as_view());
        let is_plain = self.bias.is_none() && self.gelu.is_none() && add.is_none_or(|at| at == result);
        if !is_plain || even == 0 || even == extent {
            return None;
        }
        let rest = Product { a: a.range(even..a.elements()), ..*self };
        Some(match layouts {
            // Rows of the result.
            Layouts::LeftTransposed => {
                let skip = even * n;
                let add = add.map(|at| at + (skip * to.dtype().bytes()) as u64);
                [
                    Product { size: [even, n, k], ..*self },
                    Product { size: [m - even, n, k], skip, add, ..rest },
                ]
            }
            // Terms of its elements.
            Layouts::Plain | Layouts::RightTransposed => {
                let first = if layouts == Layouts::Plain { even * b_stride } else { even };
                let (b, add) = (b.range(first..b.elements()), Some(result));
                [Product { size: [m, n, even], ..*self }, Product { size: [m, n, k - even], b, add, ..rest }]
            }
        })
    }

    /// `x · w`.
    fn forward(x: View<'a>, w: Weight<'a>, to: &'a ViewMut<'a>) -> Product<'a> {
        let [rows, inner] = x.shape().rows_cols();
        let [_, out] = w.in_out();
        let layouts = match w.layout {
            Layout::InOut => Layouts::Plain,
            Layout::OutIn => Layouts::RightTransposed,
        };
        Product::new(x, w.matrix, layouts, [rows, out, inner], to)
    }
}

impl Issue<'_> {
    pub(super) fn product(&mut self, operation: Products) -> Result<(), Error> {
        match operation {
            Products::Linear(o) => {
                let add = o.epilogue.residual.map(super::address);
                self.multiply(Product { bias: o.epilogue.bias, add, ..Product::forward(o.x, o.w, &o.y) })
            }
            Products::LinearGelu(o) => {
                let gelu = Some((&o.pre, form(o.gelu)));
                self.multiply(Product { bias: o.bias, gelu, ..Product::forward(o.x, o.w, &o.y) })
            }
            Products::InputGradient(o) => {
                let [rows, _] = o.dy.shape().rows_cols();
                let [inner, out] = o.w.in_out();
                let layouts = match o.w.layout {
                    Layout::InOut => Layouts::RightTransposed,
                    Layout::OutIn => Layouts::Plain,
                };
                let product = Product::new(o.dy, o.w.matrix, layouts, [rows, inner, out], &o.dx);
                self.multiply(product.accumulating(o.accumulate))
            }
            Products::WeightGradient(o) => {
                let [rows, inner] = o.x.shape().rows_cols();
                let [_, out] = o.layout.in_out(o.dw.dims());
                let (a, b, size) = match o.layout {
                    Layout::InOut => (o.x, o.dy, [inner, out, rows]),
                    Layout::OutIn => (o.dy, o.x, [out, inner, rows]),
                };
                let product = Product::new(a, b, Layouts::LeftTransposed, size, &o.dw);
                self.multiply(product.accumulating(o.accumulate))
            }
            Products::BiasGradient(o) => {
                let [rows, stride] = o.dy.shape().rows_cols();
                let columns = o.db.elements();
                let blocks = RowBlocks::new(rows, columns, 1);
                let partial = self.scratch(blocks.bytes())?;
                let program = Program::of(Source::Bias, o.dy.dtype());
                let arguments = numbers![o.dy, partial, rows, columns, stride, blocks.grain];
                self.over_blocks(program, "bias_sums", &blocks, arguments)?;
                self.add_blocks(&blocks, [Some(&o.db)], o.accumulate, partial, o.dy.dtype())
            }
        }
    }

    fn multiply(&self, product: Product) -> Result<(), Error> {
        let Some(blas) = self.blas else { return self.multiply_by_kernel(&product) };
        if let Some([even, rest]) = product.split().filter(|_| blas.splits_odd)
            && self.multiply_by_library(blas, &even)?
        {
            return self.multiply_by_kernel(&rest);
        }
        if self.multiply_by_library(blas, &product)? { Ok(()) } else { self.multiply_by_kernel(&product) }
    }

    fn multiply_by_kernel(&self, product: &Product) -> Result<(), Error> {
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
            skip,
        } = *product;
        let element = a.dtype();
        // With fewer large tiles than multiprocessors, small ones use more of them. An element's sum is the same.
        let small = Tiles::LARGE.blocks(m, n) < self.multiprocessors;
        let tiles = if small { Tiles::SMALL } else { Tiles::LARGE };
        let tf32 = self.tf32 && element == DType::F32;
        let program = Program { small, tf32, ..Program::of(Source::Matmul, element).with_other(to.dtype()) };
        let launch = Launch {
            program,
            kernel: layouts.kernel(),
            grid: [tiles.blocks(m, n), 1],
            threads: tiles.threads,
            shared_bytes: tiles.shared_bytes(layouts, element),
        };
        let (pre, form) = gelu.map_or((None, 0), |(pre, form)| (Some(pre), form));
        let to = super::address(to.as_view()) + (skip * to.dtype().bytes()) as u64;
        self.launch(launch, numbers![a, b, to, bias, add, pre, form, m, n, k, a_stride, b_stride])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_is_that_of_the_kernels() {
        // product.cuh: three buffers of both tiles; rows are padded by 16 bytes.
        let bytes = |layouts, element| Tiles::LARGE.shared_bytes(layouts, element);
        assert_eq!(bytes(Layouts::Plain, DType::BF16), 3 * 2 * (128 * (32 + 8) + 32 * (128 + 8)));
        assert_eq!(bytes(Layouts::RightTransposed, DType::F16), 3 * 2 * 2 * 128 * (32 + 8));
        assert_eq!(bytes(Layouts::LeftTransposed, DType::F32), 3 * 4 * 2 * 16 * (128 + 4));
        assert_eq!(
            Tiles::SMALL.shared_bytes(Layouts::Plain, DType::F32),
            3 * 4 * (64 * (16 + 4) + 16 * (64 + 4))
        );
    }

    #[test]
    fn every_element_of_a_result_has_a_block() {
        assert_eq!(Tiles::LARGE.blocks(129, 128), 2);
        assert_eq!(Tiles::SMALL.blocks(1, 1), 1);
        assert_eq!(Tiles::SMALL.blocks(0, 5), 0);
    }
}
