//! A linear layer of which each rank has some outputs (Megatron's f in front of it).
//!
//! Cost for a micro-batch of S bytes of activations: nothing in forward, an all_reduce of S in backward. With
//! sequence parallelism: an all_gather of S in forward; in backward the same all_gather again (the gathered rows are
//! not saved) and a reduce_scatter of S. The collective of backward overlaps the product of the weight gradient.

use phalanx_layers::{
    Activation, AnyLayer, AnyOwn, AnySaved, Call, Context, Deferred, Layer, ParameterSpec, Parameters,
    Rebuild, Result, Saved, Shared,
};

use super::exchange::{Exchange, Summing};

/// A layer ([`phalanx_layers::Cut`]) of which this rank computes some outputs.
pub struct ColumnParallel {
    /// The layer with this rank's outputs.
    inner: Box<dyn AnyLayer>,
    exchange: Exchange,
    sequence: bool,
}

impl ColumnParallel {
    /// `inner` computes this rank's outputs.
    pub fn new(inner: Box<dyn AnyLayer>, exchange: Exchange, sequence: bool) -> ColumnParallel {
        ColumnParallel { inner, exchange, sequence }
    }

    /// The tensors that the inner layer saved, with its input, which may have to be gathered again.
    fn reopen(&self, cx: &Context, saved: AnySaved) -> Result<AnySaved> {
        if !self.sequence || saved.x.is_unread() {
            return Ok(saved);
        }
        Ok(Saved { x: Shared::Held(self.exchange.all_gather(cx, saved.x.held())?), ..saved })
    }

    /// Sums dx over the ranks, each of which has one term: the conjugate of the all_gather (or of the identity) in
    /// forward.
    #[track_caller]
    fn sum(&self, cx: &Context, dx: Activation) -> Summing {
        match self.sequence {
            false => self.exchange.all_reduce(cx.owned(dx, "exchange.copy")),
            true => self.exchange.reduce_scatter(cx, cx.owned(dx, "exchange.copy")),
        }
    }

    /// Computes this rank's term of dx and starts to sum it; the sum of the call, and what parameter gradients need.
    #[track_caller]
    fn begin_backward(
        &self,
        cx: &Context,
        saved: AnySaved,
        call: Call,
    ) -> Result<(Option<Summing>, Option<Activation>, Deferred)> {
        let inner = self.reopen(cx, saved)?;
        let Call { sum, .. } = call;
        let (dx, deferred) = self.inner.backward_input(cx, inner, Call { sum: None, ..call })?;
        Ok((dx.map(|dx| self.sum(cx, dx)), sum, deferred))
    }
}

impl Layer for ColumnParallel {
    type Own = AnyOwn;

    fn parameters(&self) -> Vec<ParameterSpec> {
        self.inner.parameters()
    }

    /// x: `[batch, seq, in]`, or this rank's rows of it -> y: `[batch, seq, out / t]`
    fn forward(&self, cx: &Context, call: Call) -> Result<(Activation, AnySaved)> {
        if !self.sequence {
            return self.inner.forward(cx, call);
        }
        let x = call.x;
        let gathered = self.exchange.all_gather(cx, &x)?;
        let (y, saved) = self.inner.forward(cx, Call { x: gathered, ..call })?;
        Ok((y, if saved.x.is_unread() { saved } else { saved.with_input(x) }))
    }

    /// dx = the sum over ranks of dy · wᵀ; gradients as the inner layer's.
    fn backward(&self, cx: &Context, saved: AnySaved, call: Call) -> Result<Option<Activation>> {
        let parameters = call.parameters;
        let (summing, sum, deferred) = self.begin_backward(cx, saved, call)?;
        self.inner.backward_weight(cx, parameters, deferred)?;
        summing.map(|summing| Ok(cx.plus(summing.wait()?, sum))).transpose()
    }

    /// Under sequence parallelism, that of an inner layer which does not read its gathered input.
    fn rebuild(&self) -> Option<Rebuild> {
        self.inner.rebuild().filter(|inner| !(self.sequence && inner.reads_input))
    }

    fn output(
        &self,
        cx: &Context,
        parameters: Parameters,
        x: &Shared,
        own: &mut AnyOwn,
    ) -> Result<Activation> {
        self.inner.output(cx, parameters, x, own)
    }

    fn backward_input(
        &self,
        cx: &Context,
        saved: AnySaved,
        call: Call,
    ) -> Result<(Option<Activation>, Deferred)> {
        let (summing, sum, deferred) = self.begin_backward(cx, saved, call)?;
        let dx = summing.map(|summing| Ok(cx.plus(summing.wait()?, sum))).transpose()?;
        Ok((dx, deferred))
    }

    fn backward_weight(&self, cx: &Context, parameters: Parameters, deferred: Deferred) -> Result<()> {
        self.inner.backward_weight(cx, parameters, deferred)
    }
}
