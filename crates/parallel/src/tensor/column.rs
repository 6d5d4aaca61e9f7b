//! A linear layer of which each rank has some outputs (Megatron's f in front of it).
//!
//! Cost for a micro-batch of S bytes of activations: nothing in forward, an all_reduce of S in backward. With
//! sequence parallelism: an all_gather of S in forward; in backward the same all_gather again (the gathered rows are
//! not saved) and a reduce_scatter of S. The collective of backward overlaps the product of the weight gradient.

use phalanx_layers::saved::{restore, restore_mut};
use phalanx_layers::{
    Activation, Context, Deferred, Gradient, Layer, ParameterSpec, Part, Rebuild, Result, Saved, Shared,
    add_residual,
};
use phalanx_tensor::View;

use super::exchange::{Exchange, Summing, owned};

/// A linear layer, possibly with GELU, of which this rank computes some outputs.
pub struct ColumnParallel {
    /// The layer with this rank's outputs.
    inner: Box<dyn Layer>,
    parts: Vec<Part>,
    exchange: Exchange,
    sequence: bool,
}

/// What the inner layer saved, without its gathered input.
struct SavedColumnParallel {
    inner: Saved,
}

impl ColumnParallel {
    /// `inner` computes this rank's outputs; `parts` says for each parameter which part of the whole it is.
    pub fn new(
        inner: Box<dyn Layer>,
        parts: Vec<Part>,
        exchange: Exchange,
        sequence: bool,
    ) -> ColumnParallel {
        ColumnParallel { inner, parts, exchange, sequence }
    }

    /// The tensors that the inner layer saved, with its input gathered again.
    fn reopen(&self, cx: &Context, saved: Saved) -> Result<Saved> {
        if !self.sequence {
            return Ok(saved);
        }
        let SavedColumnParallel { inner } = restore(saved.own);
        let gathered = self.exchange.all_gather(cx, saved.x.held())?;
        Ok(Saved { x: Shared::Held(gathered), ..inner })
    }

    /// Sums dx over the ranks, each of which has one term: the conjugate of the all_gather (or of the identity) in
    /// forward.
    #[track_caller]
    fn sum(&self, cx: &Context, dx: Activation) -> Summing {
        match self.sequence {
            false => self.exchange.all_reduce(owned(cx, dx)),
            true => self.exchange.reduce_scatter(cx, owned(cx, dx)),
        }
    }
}

impl Layer for ColumnParallel {
    fn parameters(&self) -> Vec<ParameterSpec> {
        let parts = self.parts.iter().cloned().map(Some);
        self.inner
            .parameters()
            .into_iter()
            .zip(parts)
            .map(|(spec, part)| ParameterSpec { part, ..spec })
            .collect()
    }

    /// x: `[batch, seq, in]`, or this rank's rows of it -> y: `[batch, seq, out / t]`
    fn forward(
        &self,
        cx: &Context,
        parameters: &[View],
        x: Activation,
        residual: Option<Activation>,
    ) -> Result<(Activation, Saved)> {
        if !self.sequence {
            return self.inner.forward(cx, parameters, x, residual);
        }
        let gathered = self.exchange.all_gather(cx, &x)?;
        let (y, mut inner) = self.inner.forward(cx, parameters, gathered, residual)?;
        inner.x = Shared::Unread;
        Ok((y, Saved::new(SavedColumnParallel { inner }).with_input(x)))
    }

    fn rebuild(&self) -> Option<&dyn Rebuild> {
        let inner = self.inner.rebuild()?;
        if self.sequence { (!inner.reads_input()).then_some(self) } else { Some(inner) }
    }

    /// dx = the sum over ranks of dy · wᵀ; gradients as the inner layer's.
    fn backward(
        &self,
        cx: &Context,
        parameters: &[View],
        gradients: &mut [Gradient],
        saved: Saved,
        dy: Activation,
        residual: Option<Activation>,
    ) -> Result<Option<Activation>> {
        let inner = self.reopen(cx, saved)?;
        let (dx, deferred) = self.inner.backward_input(cx, parameters, inner, dy, None)?;
        let summing = self.sum(cx, dx.expect("a linear layer has dx"));
        self.inner.backward_weight(cx, gradients, deferred)?;
        Ok(Some(add_residual(cx, summing.wait()?, residual)))
    }

    fn backward_input(
        &self,
        cx: &Context,
        parameters: &[View],
        saved: Saved,
        dy: Activation,
        residual: Option<Activation>,
    ) -> Result<(Option<Activation>, Deferred)> {
        let inner = self.reopen(cx, saved)?;
        let (dx, deferred) = self.inner.backward_input(cx, parameters, inner, dy, None)?;
        let summing = self.sum(cx, dx.expect("a linear layer has dx"));
        Ok((Some(add_residual(cx, summing.wait()?, residual)), deferred))
    }

    fn backward_weight(&self, cx: &Context, gradients: &mut [Gradient], deferred: Deferred) -> Result<()> {
        self.inner.backward_weight(cx, gradients, deferred)
    }
}

/// Rebuilds the output of an inner layer that does not read its input, under sequence parallelism.
impl Rebuild for ColumnParallel {
    fn reads_input(&self) -> bool {
        false
    }

    fn output(&self, cx: &Context, parameters: &[View], saved: &mut Saved) -> Result<Activation> {
        let SavedColumnParallel { inner } = restore_mut(&mut *saved.own);
        let rebuild = self.inner.rebuild().expect("called only if the inner layer can rebuild");
        rebuild.output(cx, parameters, inner)
    }
}
