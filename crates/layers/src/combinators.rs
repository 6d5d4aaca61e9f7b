//! Composition: layers in sequence, and a residual path around a layer. Both have their backward, so a
//! model composed of existing layers needs no derivative of its own.

use phalanx_tensor::View;

use crate::layer::{Activation, Context, Gradient, Layer, ParameterSpec, Saved, add_residual, restore};

/// One layer after another. Parameters are those of the layers, in order.
pub struct Sequence {
    layers: Vec<(Box<dyn Layer>, usize)>,
}

struct SavedSequence {
    /// Of each layer, in order.
    layers: Vec<Saved>,
}

impl Sequence {
    /// In the order given; at least one.
    pub fn new(layers: Vec<Box<dyn Layer>>) -> Sequence {
        assert!(!layers.is_empty(), "a sequence has at least one layer");
        let counted = |layer: Box<dyn Layer>| {
            let count = layer.parameters().len();
            (layer, count)
        };
        Sequence { layers: layers.into_iter().map(counted).collect() }
    }
}

impl Layer for Sequence {
    fn parameters(&self) -> Vec<ParameterSpec> {
        self.layers.iter().flat_map(|(layer, _)| layer.parameters()).collect()
    }

    /// The residual is added by the last layer.
    fn forward(
        &self,
        cx: &Context,
        mut parameters: &[View],
        mut x: Activation,
        mut residual: Option<Activation>,
    ) -> (Activation, Saved) {
        let mut saved = Vec::with_capacity(self.layers.len());
        for (i, (layer, count)) in self.layers.iter().enumerate() {
            let (own, rest) = parameters.split_at(*count);
            parameters = rest;
            let last = i + 1 == self.layers.len();
            let (y, kept) = layer.forward(cx, own, x, if last { residual.take() } else { None });
            x = y;
            if cx.keep {
                saved.push(kept);
            }
        }
        (x, Box::new(SavedSequence { layers: saved }))
    }

    /// The residual is added by the first layer, the last to run.
    fn backward(
        &self,
        cx: &Context,
        mut parameters: &[View],
        mut gradients: &mut [Gradient],
        saved: Saved,
        mut dy: Activation,
        mut residual: Option<Activation>,
    ) -> Option<Activation> {
        let SavedSequence { layers: mut saved } = restore(saved);
        for (i, (layer, count)) in self.layers.iter().enumerate().rev() {
            let (rest, own) = parameters.split_at(parameters.len() - count);
            parameters = rest;
            let (rest, own_gradients) = gradients.split_at_mut(gradients.len() - count);
            gradients = rest;
            let kept = saved.pop().expect("forward saved one entry a layer");
            let residual = if i == 0 { residual.take() } else { None };
            let dx = layer.backward(cx, own, own_gradients, kept, dy, residual);
            if i == 0 {
                return dx;
            }
            dy = dx.expect("only a first layer has an input without gradient");
        }
        unreachable!("a sequence has at least one layer")
    }
}

/// `y = x + f(x)`. The sum is formed by f's last layer, the sum of gradients by its first, in the memory
/// of dy.
pub struct Residual<L>(pub L);

impl<L: Layer> Layer for Residual<L> {
    fn parameters(&self) -> Vec<ParameterSpec> {
        self.0.parameters()
    }

    fn forward(
        &self,
        cx: &Context,
        parameters: &[View],
        x: Activation,
        residual: Option<Activation>,
    ) -> (Activation, Saved) {
        let (y, saved) = self.0.forward(cx, parameters, x.clone(), Some(x));
        (with_outer(cx, y, residual), saved)
    }

    fn backward(
        &self,
        cx: &Context,
        parameters: &[View],
        gradients: &mut [Gradient],
        saved: Saved,
        dy: Activation,
        residual: Option<Activation>,
    ) -> Option<Activation> {
        let dx = self.0.backward(cx, parameters, gradients, saved, dy.clone(), Some(dy))?;
        Some(with_outer(cx, dx, residual))
    }
}

/// Adds a second, outer residual, which nested residual paths may ask for.
fn with_outer(cx: &Context, y: Activation, residual: Option<Activation>) -> Activation {
    if residual.is_none() {
        return y;
    }
    let mut sum = cx.activation(y.shape(), "residual.outer");
    cx.device.copy(y.view(), sum.view_mut());
    add_residual(cx, sum, residual)
}
