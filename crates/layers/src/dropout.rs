//! Dropout of a layer's output (Srivastava et al., 2014).
//!
//! No mask is saved: it is a function of seed, step, name and the element's number in the global batch ([`Draw`]), and
//! backward computes it again. So it does not depend on how the batch is cut, nor on whether a layer is recomputed.

use std::sync::Arc;

use phalanx_tensor::View;

use crate::activation::Activation;
use crate::failure::Result;
use crate::layer::{Context, Draw, Gradient, Layer, ParameterSpec};
use crate::saved::{Deferred, Saved, Shared, restore};

/// `y = dropout(f(x)) (+ residual)`; outside of training, and when p is 0, `y = f(x) (+ residual)`.
pub struct Dropped<L> {
    /// f
    pub layer: L,
    /// Probability that training drops an element of f(x); the others are divided by `1 - p`.
    pub p: f32,
    /// Key of the dropout random numbers.
    pub name: String,
}

struct SavedDropped {
    /// What f saved, without its input.
    layer: Saved,
    /// What the mask depends on; None when nothing was dropped.
    draw: Option<Draw>,
}

impl<L> Dropped<L> {
    /// What forward saves: the input is that of f.
    fn saved(&self, cx: &Context, mut layer: Saved) -> Saved {
        let x = std::mem::replace(&mut layer.x, Shared::Unread);
        Saved { x, ..Saved::new(SavedDropped { layer, draw: cx.draws(self.p) }) }
    }

    /// Drops elements of x `[.., width]` into a new tensor. Where x has only some rows of the micro-batch, they start
    /// at `cx.first_row`.
    fn apply(&self, cx: &Context, draw: Draw, x: Activation, residual: Option<Activation>) -> Activation {
        let [rows, width] = x.shape().rows_cols();
        let [batch, seq] = cx.tokens;
        let mut dropout = draw.dropout(self.p, &self.name, seq * width);
        if rows < batch * seq {
            dropout.first += (cx.first_row * width) as u64;
        }
        let mut y = cx.activation(x.shape(), "dropout.y");
        cx.device.dropout(x.view(), dropout, residual.as_ref().map(|r| r.view()), y.view_mut());
        Arc::new(y)
    }
}

impl<L> Dropped<L> {
    /// What f saved, and the derivative of f(x).
    fn undo(&self, cx: &Context, saved: Saved, dy: Activation) -> (Saved, Activation) {
        let SavedDropped { layer, draw } = restore(saved.own);
        let dy = match draw {
            None => dy,
            Some(draw) => self.apply(cx, draw, dy, None),
        };
        (Saved { x: saved.x, ..layer }, dy)
    }
}

impl<L: Layer> Layer for Dropped<L> {
    fn parameters(&self) -> Vec<ParameterSpec> {
        self.layer.parameters()
    }

    fn is_row_wise(&self) -> bool {
        self.layer.is_row_wise()
    }

    fn forward(
        &self,
        cx: &Context,
        parameters: &[View],
        x: Activation,
        residual: Option<Activation>,
    ) -> Result<(Activation, Saved)> {
        let Some(draw) = cx.draws(self.p) else {
            let (y, layer) = self.layer.forward(cx, parameters, x, residual)?;
            return Ok((y, self.saved(cx, layer)));
        };
        let (y, layer) = self.layer.forward(cx, parameters, x, None)?;
        Ok((self.apply(cx, draw, y, residual), self.saved(cx, layer)))
    }

    fn save(&self, cx: &Context, parameters: &[View], x: Activation) -> Result<Saved> {
        Ok(self.saved(cx, self.layer.save(cx, parameters, x)?))
    }

    /// dx = fᵀ(dropout(dy)); parameter gradients as f writes them.
    fn backward(
        &self,
        cx: &Context,
        parameters: &[View],
        gradients: &mut [Gradient],
        saved: Saved,
        dy: Activation,
        residual: Option<Activation>,
    ) -> Result<Option<Activation>> {
        let (layer, dy) = self.undo(cx, saved, dy);
        self.layer.backward(cx, parameters, gradients, layer, dy, residual)
    }

    fn backward_input(
        &self,
        cx: &Context,
        parameters: &[View],
        saved: Saved,
        dy: Activation,
        residual: Option<Activation>,
    ) -> Result<(Option<Activation>, Deferred)> {
        let (layer, dy) = self.undo(cx, saved, dy);
        self.layer.backward_input(cx, parameters, layer, dy, residual)
    }

    fn backward_weight(&self, cx: &Context, gradients: &mut [Gradient], deferred: Deferred) -> Result<()> {
        self.layer.backward_weight(cx, gradients, deferred)
    }
}
