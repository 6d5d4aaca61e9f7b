//! Dropout of what a layer gives (Srivastava et al., 2014).
//!
//! No mask is kept: which elements fall is a function of seed, step, name and the element's number in the whole
//! global batch ([`Draw`]), and backward asks again. So the bits are the same however the batch is cut, and
//! whenever a layer is computed again.

use std::sync::Arc;

use phalanx_tensor::View;

use crate::failure::Result;
use crate::layer::{Activation, Context, Draw, Gradient, Layer, ParameterSpec};
use crate::saved::{Deferred, Saved, Shared, restore};

/// `y = dropout(f(x)) (+ residual)`; just f where p is 0 and outside of training.
pub struct Dropped<L> {
    /// f
    pub layer: L,
    /// Share of f's elements that is dropped in training; the others are divided by `1 - p`.
    pub p: f32,
    /// Of the random numbers.
    pub name: String,
}

struct SavedDropped {
    /// Of f, its input aside.
    layer: Saved,
    /// What elements were dropped by.
    draw: Option<Draw>,
}

impl<L> Dropped<L> {
    /// f's input is that of the whole.
    fn saved(&self, cx: &Context, mut layer: Saved) -> Saved {
        let x = std::mem::replace(&mut layer.x, Shared::Unread);
        Saved { x, ..Saved::new(SavedDropped { layer, draw: cx.draws(self.p) }) }
    }

    /// x: `[.., width]` -> its dropout, in memory of its own; x is given back. Rows that are not all of the
    /// micro-batch's are those from `cx.first_row` on.
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
    /// What f saved, and the derivative of its output.
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
