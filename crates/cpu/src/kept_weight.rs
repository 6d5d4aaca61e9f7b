//! Weights that are packed once, for several products.
//!
//! Their panels are those that each product would pack by itself: the format and the blocks of the inner dimension follow
//! from the element types and the inner dimension alone, so the products read the same numbers in the same order.

use phalanx_tensor::arguments::{Layout, Weight};
use phalanx_tensor::{PackedFor, ViewMut};
use phalanx_trace::DType;

use crate::Cpu;
use crate::format::Format;
use crate::matrix::Matrix;
use crate::side::Side;
use crate::tile_packing::Operand;

/// The right operand of a product, `[inner, lanes]`, and its panels if it is packed already.
#[derive(Clone, Copy)]
pub(crate) struct RightOperand<'a> {
    pub(crate) matrix: Matrix<'a>,
    /// Panels of the whole inner dimension, in the blocks of the product.
    pub(crate) panels: Option<&'a [f32]>,
}

impl<'a> RightOperand<'a> {
    /// A matrix that the product packs.
    pub(crate) fn unpacked(matrix: Matrix<'a>) -> RightOperand<'a> {
        RightOperand { matrix, panels: None }
    }

    /// A weight as the operand of `product`.
    pub(crate) fn of(w: &Weight<'a>, product: PackedFor) -> RightOperand<'a> {
        let matrix = match product {
            PackedFor::Forward | PackedFor::Logits => weight(w),
            PackedFor::InputGradient => weight(w).t(),
        };
        RightOperand { matrix, panels: w.panels.map(|panels| panels.as_slice()) }
    }
}

/// The weight as a matrix `[in, out]`, whatever its layout.
fn weight<'a>(w: &Weight<'a>) -> Matrix<'a> {
    let matrix = Matrix::of(&w.matrix);
    match w.layout {
        Layout::InOut => matrix,
        Layout::OutIn => matrix.t(),
    }
}

/// Packs a weight as the right operand of `product`.
pub(crate) fn pack(cpu: &Cpu, w: Weight, product: PackedFor, to: ViewMut) {
    let matrix = RightOperand::of(&w, product).matrix;
    let format = Format::of(cpu, matrix.dtype);
    // Results are stored in the type of the weight; logits are not stored, and what is not stored has blocks as 16-bit
    // results have.
    let result = if product == PackedFor::Logits { DType::F16 } else { matrix.dtype };
    let packed = format.packed(matrix.rows);
    let side = Side::new(matrix, Operand::Right, (cpu.isa, format), format.depth(result, packed));
    let to = to.into_slice::<f32>();
    let length = side.length(side.panels(), packed);
    assert!(length <= to.len(), "{length} packed elements of {w:?} for {product:?} in {}", to.len());
    side.pack_all(cpu, 0..packed, &mut to[..length]);
}
