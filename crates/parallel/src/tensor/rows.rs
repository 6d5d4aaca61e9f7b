//! A layer that every rank has whole and that computes only this rank's rows (sequence parallelism).
//!
//! The computation is unchanged. Its parameter gradients are sums over this rank's rows, so they are terms of the
//! whole sum.

use phalanx_layers::{
    Activation, Call, Context, Deferred, Layer, ParameterSpec, Parameters, Rebuild, Result, Saved, Shared,
};

/// A layer whose parameter gradients are terms of a sum over the tensor axis.
pub struct OnRows<L>(pub L);

impl<L: Layer> Layer for OnRows<L> {
    type Own = L::Own;

    fn parameters(&self) -> Vec<ParameterSpec> {
        self.0.parameters().into_iter().map(|spec| ParameterSpec { partial: true, ..spec }).collect()
    }

    fn forward(&self, cx: &Context, call: Call) -> Result<(Activation, Saved<L::Own>)> {
        self.0.forward(cx, call)
    }

    fn backward(&self, cx: &Context, saved: Saved<L::Own>, call: Call) -> Result<Option<Activation>> {
        self.0.backward(cx, saved, call)
    }

    fn save(&self, cx: &Context, call: Call) -> Result<Saved<L::Own>> {
        self.0.save(cx, call)
    }

    fn rebuild(&self) -> Option<Rebuild> {
        self.0.rebuild()
    }

    fn output(
        &self,
        cx: &Context,
        parameters: Parameters,
        x: &Shared,
        own: &mut L::Own,
    ) -> Result<Activation> {
        self.0.output(cx, parameters, x, own)
    }

    fn each_input(&self, x: &mut Shared, own: &mut L::Own, see: &mut dyn FnMut(&mut Shared)) {
        self.0.each_input(x, own, see);
    }

    fn backward_input(
        &self,
        cx: &Context,
        saved: Saved<L::Own>,
        call: Call,
    ) -> Result<(Option<Activation>, Deferred)> {
        self.0.backward_input(cx, saved, call)
    }

    fn backward_weight(&self, cx: &Context, parameters: Parameters, deferred: Deferred) -> Result<()> {
        self.0.backward_weight(cx, parameters, deferred)
    }
}
