//! A linear layer of which each rank has some inputs (Megatron's g behind it).
//!
//! Cost for a micro-batch of S bytes of activations: an all_reduce of S in forward, nothing in backward. With sequence
//! parallelism: a reduce_scatter of S in forward, an all_gather of S in backward. The bias is added once, to the sum.

use phalanx_layers::{
    Activation, Context, Deferred, Gradient, Init, Layer, Linear, ParameterSpec, Part, Result, Saved,
    add_residual,
};
use phalanx_tensor::{Positions, Tensor, View};

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

    fn add_bias(&self, cx: &Context, parameters: &[View], y: &mut Tensor) {
        if self.bias {
            let bias = parameters[1].reshape([1, self.linear.outputs]);
            cx.device.add_positions(Positions { table: bias, first_row: 0, seq: 1 }, y.view_mut());
        }
    }

    fn bias_gradient(&self, cx: &Context, gradients: &mut [Gradient], dy: &Activation) {
        if self.bias {
            let (view, accumulate) = gradients[1].write();
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
    fn parameters(&self) -> Vec<ParameterSpec> {
        let mut parameters = self.linear.parameters();
        parameters[0].part = Some(self.part.clone());
        if self.bias {
            let name = format!("{}.bias", self.linear.prefix);
            let bias = ParameterSpec::new(name, [self.linear.outputs], Init::Zeros);
            parameters.push(ParameterSpec { partial: self.sequence, ..bias });
        }
        parameters
    }

    /// x: `[batch, seq, in / t]` -> y: `[batch, seq, out]`, or this rank's rows of it
    fn forward(
        &self,
        cx: &Context,
        parameters: &[View],
        x: Activation,
        residual: Option<Activation>,
    ) -> Result<(Activation, Saved)> {
        let (term, saved) = self.linear.forward(cx, &parameters[..1], x, None)?;
        let mut y = self.sum(cx, owned(cx, term))?;
        self.add_bias(cx, parameters, &mut y);
        Ok((add_residual(cx, y, residual), saved))
    }

    /// Saves the input only: nothing is computed.
    fn save(&self, cx: &Context, parameters: &[View], x: Activation) -> Result<Saved> {
        self.linear.save(cx, parameters, x)
    }

    /// dx = dy · wᵀ, this rank's inputs; dw, db as `gradients` says.
    fn backward(
        &self,
        cx: &Context,
        parameters: &[View],
        gradients: &mut [Gradient],
        saved: Saved,
        dy: Activation,
        residual: Option<Activation>,
    ) -> Result<Option<Activation>> {
        self.bias_gradient(cx, gradients, &dy);
        let dy = self.all_rows(cx, &dy)?;
        self.linear.backward(cx, &parameters[..1], &mut gradients[..1], saved, dy, residual)
    }

    fn backward_input(
        &self,
        cx: &Context,
        parameters: &[View],
        saved: Saved,
        dy: Activation,
        residual: Option<Activation>,
    ) -> Result<(Option<Activation>, Deferred)> {
        let whole = self.all_rows(cx, &dy)?;
        let (dx, linear) = self.linear.backward_input(cx, &parameters[..1], saved, whole, residual)?;
        Ok((dx, Deferred::new(DeferredRowParallel { linear, dy })))
    }

    fn backward_weight(&self, cx: &Context, gradients: &mut [Gradient], deferred: Deferred) -> Result<()> {
        let DeferredRowParallel { linear, dy } = deferred.restore();
        self.bias_gradient(cx, gradients, &dy);
        self.linear.backward_weight(cx, &mut gradients[..1], linear)
    }
}
