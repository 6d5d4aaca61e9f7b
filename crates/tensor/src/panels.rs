//! Weights that stay packed from one product to the next.
//!
//! The kernels of a processor copy the weight of a product into panels, in which it lies as the inner loops read it. A caller
//! that multiplies with the same weight several times may let [`PackWeight`](crate::operations::PackWeight) do this once, and
//! pass the panels along with the weight ([`Weight::with_panels`](crate::Weight::with_panels)). The bits are the same.

use serde::{Deserialize, Serialize};

/// The product for which a weight is packed. Each has panels of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PackedFor {
    /// `x · w`: [`Linear`](crate::operations::Linear) and [`LinearGelu`](crate::operations::LinearGelu).
    Forward,
    /// `x · w` whose result is not stored: [`VocabularyStatistics`](crate::operations::VocabularyStatistics).
    Logits,
    /// `dy · wᵀ`: [`InputGradient`](crate::operations::InputGradient).
    InputGradient,
}

impl PackedFor {
    /// `[steps of the inner dimension, lanes]` of a weight `[in, out]`.
    pub fn steps_and_lanes(self, [inner, out]: [usize; 2]) -> [usize; 2] {
        match self {
            PackedFor::Forward | PackedFor::Logits => [inner, out],
            PackedFor::InputGradient => [out, inner],
        }
    }
}

/// Sizes of packed weights of one element type, as the kernels of one processor want them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WeightPanels {
    /// Lanes of a panel.
    pub lanes: usize,
    /// Steps of the inner dimension that are packed into one.
    pub steps: usize,
    /// Elements of four bytes of a packed step of a panel.
    pub width: usize,
    /// Packed steps of a block of the inner dimension, at least.
    pub block: usize,
    /// Elements of four bytes between two panels.
    pub gap: usize,
}

impl WeightPanels {
    /// Elements of four bytes in which a weight `[in, out]` fits when it is packed for a product.
    pub fn elements(&self, product: PackedFor, in_out: [usize; 2]) -> usize {
        let [steps, lanes] = product.steps_and_lanes(in_out);
        let packed = steps.div_ceil(self.steps);
        lanes.div_ceil(self.lanes) * (self.width * packed + self.gap * packed.div_ceil(self.block))
    }
}
