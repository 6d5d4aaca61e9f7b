//! The end of a language model: output projection and cross entropy as one.
//!
//! The logits of all tokens are the largest tensor of a small model (`[tokens, vocab]`), and nobody
//! needs them: they are made in slices of rows that fit a workspace, and when training each slice's
//! derivatives are taken while it is there. So the loss and its gradient come from one pass, in forward.

use std::sync::Arc;

use phalanx_tensor::{Category, CrossEntropy, CrossEntropyGradients, Epilogue, Layout, Tensor, View, Weight};

use crate::init::Init;
use crate::layer::{Activation, Context, Gradient, ParameterSpec};

/// Most bytes of a slice of logits.
const SLICE_BYTES: usize = 64 << 20;

/// The last part of a model: activations and targets to a loss.
pub trait Head: Send + Sync {
    /// Its parameters, in the order in which the methods receive them.
    fn parameters(&self) -> Vec<ParameterSpec>;

    /// Sum of losses times `numbers.scale`, `[1]` f32.
    fn loss(
        &self,
        cx: &Context,
        parameters: &[View],
        x: Activation,
        targets: &Tensor,
        numbers: CrossEntropy,
    ) -> Tensor;

    /// The same, with dx and parameter gradients of the sum times `numbers.gradient_scale`.
    fn loss_and_gradient(
        &self,
        cx: &Context,
        parameters: &[View],
        gradients: &mut [Gradient],
        x: Activation,
        targets: &Tensor,
        numbers: CrossEntropy,
    ) -> (Tensor, Activation);

    /// Logits of some rows, for sampling: x `[rows, hidden]` -> `[rows, vocab]`.
    fn logits(&self, cx: &Context, parameters: &[View], x: View) -> Tensor;
}

/// `softmax(x · wᵀ)` against targets; w is often the token table (tied).
pub struct LinearCrossEntropy {
    /// Name of the weight.
    pub weight: String,
    /// Classes.
    pub vocab: usize,
    /// Width.
    pub hidden: usize,
    /// Initial weight, the same as the table's when tied.
    pub init: Init,
}

impl LinearCrossEntropy {
    fn weight<'a>(&self, matrix: View<'a>) -> Weight<'a> {
        Weight { matrix, layout: Layout::OutIn }
    }

    /// Workspace for a slice of logits: at least two slices, at most [`SLICE_BYTES`].
    fn logits_slice(&self, cx: &Context, rows: usize) -> Tensor {
        let fit = (SLICE_BYTES / (cx.compute.bytes() * self.vocab)).max(1);
        let fit = if fit > 64 { fit / 64 * 64 } else { fit };
        let slice = fit.min(rows.div_ceil(2));
        cx.device.alloc(cx.compute, [slice, self.vocab], Category::Workspace, "head.logits_slice")
    }
}

impl Head for LinearCrossEntropy {
    fn parameters(&self) -> Vec<ParameterSpec> {
        let shape = vec![self.vocab, self.hidden];
        vec![ParameterSpec { name: self.weight.clone(), shape, init: self.init }]
    }

    /// x: `[batch, seq, hidden]`, targets: `[batch, seq]` u32 -> `[1]`
    fn loss(
        &self,
        cx: &Context,
        parameters: &[View],
        x: Activation,
        targets: &Tensor,
        numbers: CrossEntropy,
    ) -> Tensor {
        let [rows, _] = x.shape().rows_cols();
        let mut logits = self.logits_slice(cx, rows);
        let mut loss = cx.statistics([1], "head.loss");
        let weight = self.weight(parameters[0]);
        let (slice, out) = (logits.view_mut(), loss.view_mut());
        cx.device.linear_cross_entropy(x.view(), weight, targets.view(), numbers, slice, out, None);
        loss
    }

    /// As [`Head::loss`], and dx `[batch, seq, hidden]`; dw as `gradients` says.
    fn loss_and_gradient(
        &self,
        cx: &Context,
        parameters: &[View],
        gradients: &mut [Gradient],
        x: Activation,
        targets: &Tensor,
        numbers: CrossEntropy,
    ) -> (Tensor, Activation) {
        let [rows, _] = x.shape().rows_cols();
        let mut logits = self.logits_slice(cx, rows);
        let mut loss = cx.statistics([1], "head.loss");
        let mut dx = cx.activation(x.shape(), "head.dx");
        let (dw, accumulate) = gradients[0].write();
        let derivatives = CrossEntropyGradients { dx: dx.view_mut(), dw, accumulate };
        let weight = self.weight(parameters[0]);
        let (slice, out) = (logits.view_mut(), loss.view_mut());
        cx.device.linear_cross_entropy(
            x.view(),
            weight,
            targets.view(),
            numbers,
            slice,
            out,
            Some(derivatives),
        );
        (loss, Arc::new(dx))
    }

    fn logits(&self, cx: &Context, parameters: &[View], x: View) -> Tensor {
        let [rows, _] = x.shape().rows_cols();
        let mut y = cx.device.alloc(cx.compute, [rows, self.vocab], Category::Workspace, "head.logits");
        cx.device.linear(x, self.weight(parameters[0]), Epilogue::default(), y.view_mut());
        y
    }
}
