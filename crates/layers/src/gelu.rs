//! GELU, tanh form.

use std::sync::Arc;

use phalanx_tensor::View;

use crate::layer::{Activation, Context, Gradient, Layer, ParameterSpec, Saved, add_residual, restore};

/// `0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x³)))`, `gelu_new` in transformers.
pub struct Gelu;

struct SavedGelu {
    /// `[batch, seq, width]`
    x: Activation,
}

impl Layer for Gelu {
    fn parameters(&self) -> Vec<ParameterSpec> {
        Vec::new()
    }

    /// x: `[batch, seq, width]` -> y: the same
    fn forward(
        &self,
        cx: &Context,
        _: &[View],
        x: Activation,
        residual: Option<Activation>,
    ) -> (Activation, Saved) {
        let mut y = cx.activation(x.shape(), "gelu.y");
        cx.device.gelu(x.view(), y.view_mut());
        (add_residual(cx, y, residual), Box::new(SavedGelu { x }))
    }

    /// dx takes the place of dy when nobody else holds it.
    fn backward(
        &self,
        cx: &Context,
        _: &[View],
        _: &mut [Gradient],
        saved: Saved,
        dy: Activation,
        residual: Option<Activation>,
    ) -> Option<Activation> {
        let SavedGelu { x } = restore(saved);
        let mut dx = Arc::try_unwrap(dy).unwrap_or_else(|shared| {
            let mut copy = cx.activation(shared.shape(), "gelu.dx");
            cx.device.copy(shared.view(), copy.view_mut());
            copy
        });
        cx.device.gelu_backward(x.view(), dx.view_mut());
        Some(add_residual(cx, dx, residual))
    }
}
