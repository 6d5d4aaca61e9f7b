//! Dropout of what a layer gives (Srivastava et al., 2014).
//!
//! No mask is kept: which elements fall is a function of seed, step, name and the element's number in the whole
//! global batch ([`Draw`]), and backward asks again. So the bits are the same however the batch is cut, and
//! whenever a layer is computed again.

use std::sync::Arc;

use phalanx_tensor::View;

use crate::layer::{Activation, Context, Draw, Gradient, Layer, ParameterSpec};
use crate::saved::{Saved, Shared, restore};

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

    /// x: `[batch, ..]` -> its dropout, in memory of its own; x is given back.
    fn apply(&self, cx: &Context, draw: Draw, x: Activation, residual: Option<Activation>) -> Activation {
        let per_sample = x.shape().elements() / x.shape().as_slice()[0];
        let dropout = draw.dropout(self.p, &self.name, per_sample);
        let mut y = cx.activation(x.shape(), "dropout.y");
        cx.device.dropout(x.view(), dropout, residual.as_ref().map(|r| r.view()), y.view_mut());
        Arc::new(y)
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
    ) -> (Activation, Saved) {
        let Some(draw) = cx.draws(self.p) else {
            let (y, layer) = self.layer.forward(cx, parameters, x, residual);
            return (y, self.saved(cx, layer));
        };
        let (y, layer) = self.layer.forward(cx, parameters, x, None);
        (self.apply(cx, draw, y, residual), self.saved(cx, layer))
    }

    fn save(&self, cx: &Context, parameters: &[View], x: Activation) -> Saved {
        self.saved(cx, self.layer.save(cx, parameters, x))
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
    ) -> Option<Activation> {
        let SavedDropped { layer, draw } = restore(saved.own);
        let layer = Saved { x: saved.x, ..layer };
        let dy = match draw {
            None => dy,
            Some(draw) => self.apply(cx, draw, dy, None),
        };
        self.layer.backward(cx, parameters, gradients, layer, dy, residual)
    }
}
