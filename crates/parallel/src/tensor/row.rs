//! A linear layer of which each rank has some inputs (Megatron's g behind it).
//!
//! Cost for a micro-batch of S bytes of activations: an all_reduce of S in forward, nothing in backward. With sequence
//! parallelism: a reduce_scatter of S in forward, an all_gather of S in backward. The bias is added once, to the sum.

use phalanx_layers::{
    Activation, Call, Context, Deferred, Init, Kind, Layer, Linear, ParameterSpec, Parameters, Part, Result,
    Saved,
};
use phalanx_tensor::{Positions, Tensor};

use super::exchange::{Exchange, owned};

/// A linear layer of which this rank has some inputs.
pub struct RowParallel {
    /// The layer with this rank's inputs, without a bias.
    linear: Linear,
    part: Part,
    /// Whether there is a bias, which every rank has whole.
    bias: bool,
    exchange: Exchange,
    sequence: bool,
}

/// What the first part of backward saves for the second.
struct DeferredRowParallel {
    linear: Deferred,
    /// The derivative of this rank's rows, for the bias.
    dy: Activation,
}

impl RowParallel {
    /// `linear` has this rank's inputs; `part` says which part of the whole weight it is.
    pub fn new(linear: Linear, part: Part, exchange: Exchange, sequence: bool) -> RowParallel {
        let bias = linear.bias;
        RowParallel { linear: Linear { bias: false, ..linear }, part, bias, exchange, sequence }
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
            let table = bias.reshape([1, self.linear.outputs]);
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
    type Own = ();

    fn parameters(&self) -> Vec<ParameterSpec> {
        let mut parameters = self.linear.parameters();
        parameters[0].part = Some(self.part.clone());
        if self.bias {
            let name = format!("{}.bias", self.linear.prefix);
            let bias = ParameterSpec::new(name, Kind::Bias, [self.linear.outputs], Init::Zeros);
            parameters.push(ParameterSpec { partial: self.sequence, ..bias });
        }
        parameters
    }

    /// x: `[batch, seq, in / t]` -> y: `[batch, seq, out]`, or this rank's rows of it
    fn forward(&self, cx: &Context, call: Call) -> Result<(Activation, Saved<()>)> {
        let Call { parameters, sum, .. } = call;
        let (parameters, bias) = parameters.split_at(1);
        let (term, saved) = self.linear.forward(cx, Call { parameters, sum: None, ..call })?;
        let mut y = self.sum(cx, owned(cx, term))?;
        self.add_bias(cx, bias, &mut y);
        Ok((cx.plus(y, sum), saved))
    }

    /// Saves the input only: nothing is computed.
    fn save(&self, cx: &Context, call: Call) -> Result<Saved<()>> {
        self.linear.save(cx, call)
    }

    /// dx = dy · wᵀ, this rank's inputs; dw, db where they are wanted.
    fn backward(&self, cx: &Context, saved: Saved<()>, call: Call) -> Result<Option<Activation>> {
        let (parameters, bias) = call.parameters.split_at(1);
        RowParallel::bias_gradient(cx, bias, &call.x);
        let x = self.all_rows(cx, &call.x)?;
        self.linear.backward(cx, saved, Call { parameters, x, ..call })
    }

    fn backward_input(
        &self,
        cx: &Context,
        saved: Saved<()>,
        call: Call,
    ) -> Result<(Option<Activation>, Deferred)> {
        let (parameters, dy) = (call.parameters.split_at(1).0, call.x);
        let x = self.all_rows(cx, &dy)?;
        let (dx, linear) = self.linear.backward_input(cx, saved, Call { parameters, x, ..call })?;
        Ok((dx, Deferred::new(DeferredRowParallel { linear, dy })))
    }

    fn backward_weight(&self, cx: &Context, parameters: Parameters, deferred: Deferred) -> Result<()> {
        let DeferredRowParallel { linear, dy } = deferred.restore();
        let (parameters, bias) = parameters.split_at(1);
        RowParallel::bias_gradient(cx, bias, &dy);
        self.linear.backward_weight(cx, parameters, linear)
    }
}
