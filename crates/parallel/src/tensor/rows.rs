//! A layer that every rank has whole and that computes only this rank's rows (sequence parallelism).
//!
//! The computation is unchanged. Its parameter gradients are sums over this rank's rows, so they are terms of the
//! whole sum.

use phalanx_layers::{
    Activation, Context, Deferred, Gradient, Layer, ParameterSpec, Rebuild, Result, Saved, Shared,
};
use phalanx_tensor::View;

/// A layer whose parameter gradients are terms of a sum over the tensor axis.
pub struct OnRows<L>(pub L);

impl<L: Layer> Layer for OnRows<L> {
    fn parameters(&self) -> Vec<ParameterSpec> {
        self.0.parameters().into_iter().map(|spec| ParameterSpec { partial: true, ..spec }).collect()
    }

    fn forward(
        &self,
        cx: &Context,
        parameters: &[View],
        x: Activation,
        residual: Option<Activation>,
    ) -> Result<(Activation, Saved)> {
        self.0.forward(cx, parameters, x, residual)
    }

    fn save(&self, cx: &Context, parameters: &[View], x: Activation) -> Result<Saved> {
        self.0.save(cx, parameters, x)
    }

    fn rebuild(&self) -> Option<&dyn Rebuild> {
        self.0.rebuild()
    }

    fn each_input(&self, saved: &mut Saved, see: &mut dyn FnMut(&mut Shared)) {
        self.0.each_input(saved, see);
    }

    fn backward(
        &self,
        cx: &Context,
        parameters: &[View],
        gradients: &mut [Gradient],
        saved: Saved,
        dy: Activation,
        residual: Option<Activation>,
    ) -> Result<Option<Activation>> {
        self.0.backward(cx, parameters, gradients, saved, dy, residual)
    }

    fn backward_input(
        &self,
        cx: &Context,
        parameters: &[View],
        saved: Saved,
        dy: Activation,
        residual: Option<Activation>,
    ) -> Result<(Option<Activation>, Deferred)> {
        self.0.backward_input(cx, parameters, saved, dy, residual)
    }

    fn backward_weight(&self, cx: &Context, gradients: &mut [Gradient], deferred: Deferred) -> Result<()> {
        self.0.backward_weight(cx, gradients, deferred)
    }
}
