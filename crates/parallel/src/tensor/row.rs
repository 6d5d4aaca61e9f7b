//! A linear layer of which each rank has some inputs (Megatron's g behind it).
//!
//! Cost for a micro-batch of S bytes of activations: an all_reduce of S in forward, nothing in backward. With sequence
//! parallelism: a reduce_scatter of S in forward, an all_gather of S in backward. The bias is added once, to the sum.

use phalanx_layers::{
    Activation, AnyLayer, AnyOwn, AnySaved, Call, Context, Deferred, Layer, ParameterSpec, Parameters, Result,
};
use phalanx_tensor::{Positions, Tensor};

use super::exchange::Exchange;

/// A layer ([`phalanx_layers::Cut`]) of which this rank has some inputs.
pub struct RowParallel {
    /// The layer with this rank's inputs, without a bias.
    inner: Box<dyn AnyLayer>,
    /// Number of its parameters.
    parameters: usize,
    /// The bias, if there is one, which every rank has whole.
    bias: Option<ParameterSpec>,
    exchange: Exchange,
    sequence: bool,
}

/// Tensors that the first part of backward saves for the second.
struct DeferredRowParallel {
    inner: Deferred,
    /// The derivative of this rank's rows, for the bias.
    dy: Activation,
}

impl RowParallel {
    /// `inner` has this rank's inputs; `bias` is added to the sum.
    pub fn new(
        inner: Box<dyn AnyLayer>,
        bias: Option<ParameterSpec>,
        exchange: Exchange,
        sequence: bool,
    ) -> RowParallel {
        let bias = bias.map(|bias| ParameterSpec { partial: sequence, ..bias });
        RowParallel { parameters: inner.parameters().len(), inner, bias, exchange, sequence }
    }

    /// The parameters of the inner layer, and the bias.
    fn split<'a>(&self, parameters: Parameters<'a>) -> (Parameters<'a>, Parameters<'a>) {
        parameters.split_at(self.parameters)
    }

    /// Sums `term` over the ranks: the sum, or this rank's rows of it.
    #[track_caller]
    fn sum(&self, cx: &Context, term: Tensor) -> Result<Tensor> {
        match self.sequence {
            false => self.exchange.all_reduce(term).wait(),
            true => self.exchange.reduce_scatter(cx, term).wait(),
        }
    }

    fn add_bias(&self, cx: &Context, bias: Parameters, y: &mut Tensor) {
        if let Some(bias) = bias.get(0) {
            let table = bias.reshape([1, bias.elements()]);
            cx.device.add_positions(Positions { table, first_row: 0, seq: 1 }, y.view_mut());
        }
    }

    fn bias_gradient(cx: &Context, bias: Parameters, dy: &Activation) {
        if let Some(mut gradient) = bias.gradient(0) {
            let (view, accumulate) = gradient.write();
            cx.device.bias_gradient(dy.view(), view, accumulate);
        }
    }

    /// All rows of dy: the conjugate of the sum in forward.
    #[track_caller]
    fn all_rows(&self, cx: &Context, dy: &Activation) -> Result<Activation> {
        match self.sequence {
            false => Ok(dy.clone()),
            true => self.exchange.all_gather(cx, dy),
        }
    }
}

impl Layer for RowParallel {
    type Own = AnyOwn;

    fn parameters(&self) -> Vec<ParameterSpec> {
        self.inner.parameters().into_iter().chain(self.bias.clone()).collect()
    }

    /// x: `[batch, seq, in / t]` -> y: `[batch, seq, out]`, or this rank's rows of it
    fn forward(&self, cx: &Context, call: Call) -> Result<(Activation, AnySaved)> {
        let Call { parameters, sum, .. } = call;
        let (parameters, bias) = self.split(parameters);
        let (term, saved) = self.inner.forward(cx, Call { parameters, sum: None, ..call })?;
        let mut y = self.sum(cx, cx.owned(term, "exchange.copy"))?;
        self.add_bias(cx, bias, &mut y);
        Ok((cx.plus(y, sum), saved))
    }

    /// Saves the input only: nothing is computed.
    fn save(&self, cx: &Context, call: Call) -> Result<AnySaved> {
        self.inner.save(cx, call)
    }

    /// dx = dy · wᵀ, this rank's inputs; dw, db where they are wanted.
    fn backward(&self, cx: &Context, saved: AnySaved, call: Call) -> Result<Option<Activation>> {
        let (parameters, bias) = self.split(call.parameters);
        RowParallel::bias_gradient(cx, bias, &call.x);
        let x = self.all_rows(cx, &call.x)?;
        self.inner.backward(cx, saved, Call { parameters, x, ..call })
    }

    fn backward_input(
        &self,
        cx: &Context,
        saved: AnySaved,
        call: Call,
    ) -> Result<(Option<Activation>, Deferred)> {
        let (parameters, dy) = (self.split(call.parameters).0, call.x);
        let x = self.all_rows(cx, &dy)?;
        let (dx, inner) = self.inner.backward_input(cx, saved, Call { parameters, x, ..call })?;
        Ok((dx, Deferred::new(DeferredRowParallel { inner, dy })))
    }

    fn backward_weight(&self, cx: &Context, parameters: Parameters, deferred: Deferred) -> Result<()> {
        let DeferredRowParallel { inner, dy } = deferred.restore();
        let (parameters, bias) = self.split(parameters);
        RowParallel::bias_gradient(cx, bias, &dy);
        self.inner.backward_weight(cx, parameters, inner)
    }
}
