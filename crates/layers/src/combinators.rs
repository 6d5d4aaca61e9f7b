//! Composition: layers in sequence, and a residual path around a layer. Both have a backward, so a model that is
//! composed of existing layers needs no derivatives of its own.
//!
//! The [`Saved`] of neighbouring layers in a sequence share the tensor between them. A sequence that
//! [rebuilds](Sequence::rebuilding) frees the tensors that the previous layer can recompute, and recomputes each when
//! backward reaches its first reader.

use std::ops::Range;

use phalanx_tensor::View;

use crate::activation::Activation;
use crate::failure::Result;
use crate::layer::{Context, Gradient, Layer, ParameterSpec, Rebuild, add_residual, last_row_of};
use crate::saved::{Deferred, Saved, Shared, restore, restore_mut};

/// One layer after another. Parameters are those of the layers, in order.
pub struct Sequence {
    layers: Vec<Part>,
    rebuilds: bool,
}

/// A layer of a sequence, and the range of its parameters within the sequence's.
struct Part {
    layer: Box<dyn Layer>,
    parameters: Range<usize>,
}

struct SavedSequence {
    /// What each layer saved, in order.
    layers: Vec<Saved>,
}

impl Sequence {
    /// The layers run in the given order; there is at least one.
    pub fn new(layers: Vec<Box<dyn Layer>>) -> Sequence {
        assert!(!layers.is_empty(), "a sequence has at least one layer");
        let mut end = 0;
        let part = |layer: Box<dyn Layer>| {
            let start = end;
            end += layer.parameters().len();
            Part { layer, parameters: start..end }
        };
        Sequence { layers: layers.into_iter().map(part).collect(), rebuilds: false }
    }

    /// The same sequence, which does not save the tensor between two layers where the first can recompute it.
    #[must_use]
    pub fn rebuilding(self) -> Sequence {
        Sequence { rebuilds: true, ..self }
    }

    /// Recomputes the tensor before layer `index`, when it is not saved.
    fn rebuild(&self, index: usize) -> Option<&dyn Rebuild> {
        let rebuild = self.layers[index.checked_sub(1)?].layer.rebuild()?;
        (self.rebuilds || rebuild.always()).then_some(rebuild)
    }

    /// Runs all layers but the last: the input of the last, and what the others saved.
    fn forward_to_last(
        &self,
        cx: &Context,
        parameters: &[View],
        mut x: Activation,
    ) -> Result<(Activation, Vec<Saved>)> {
        let mut saved = Vec::with_capacity(self.layers.len());
        for part in &self.layers[..self.layers.len() - 1] {
            let (y, kept) = part.layer.forward(cx, &parameters[part.parameters.clone()], x, None)?;
            x = y;
            self.keep(cx, &mut saved, kept);
        }
        Ok((x, saved))
    }

    /// Adds what the next layer saved, and frees the tensor before it if it can be recomputed.
    fn keep(&self, cx: &Context, saved: &mut Vec<Saved>, mut kept: Saved) {
        if !cx.keep {
            return;
        }
        if self.rebuild(saved.len()).is_some() {
            kept.x.forget();
            saved.last_mut().expect("there is an earlier layer").y.forget();
        }
        saved.push(kept);
    }

    /// Recomputes the tensor before layer `index`, if it was freed.
    fn recall(&self, cx: &Context, parameters: &[View], saved: &mut [Saved], index: usize) -> Result<()> {
        let Some(rebuild) = self.rebuild(index) else { return Ok(()) };
        let before = index - 1;
        if !(saved[before].y.is_forgotten() || saved[index].x.is_forgotten()) {
            return Ok(());
        }
        if rebuild.reads_input() {
            self.recall(cx, parameters, saved, before)?;
        }
        let own = self.layers[before].parameters.clone();
        let tensor = rebuild.output(cx, &parameters[own], &mut saved[before])?;
        saved[before].y.recall(&tensor);
        saved[index].x.recall(&tensor);
        Ok(())
    }
}

impl Layer for Sequence {
    fn parameters(&self) -> Vec<ParameterSpec> {
        self.layers.iter().flat_map(|part| part.layer.parameters()).collect()
    }

    /// The residual is added by the last layer.
    fn forward(
        &self,
        cx: &Context,
        parameters: &[View],
        x: Activation,
        residual: Option<Activation>,
    ) -> Result<(Activation, Saved)> {
        let (x, mut layers) = self.forward_to_last(cx, parameters, x)?;
        let last = &self.layers[self.layers.len() - 1];
        let (y, kept) = last.layer.forward(cx, &parameters[last.parameters.clone()], x, residual)?;
        self.keep(cx, &mut layers, kept);
        Ok((y, Saved::new(SavedSequence { layers })))
    }

    fn is_row_wise(&self) -> bool {
        self.layers.iter().all(|part| part.layer.is_row_wise())
    }

    /// All rows up to the last layer that mixes rows, and one row from there on.
    fn last_row(
        &self,
        cx: &Context,
        parameters: &[View],
        mut x: Activation,
        mut residual: Option<Activation>,
    ) -> Result<Activation> {
        let mixing = self.layers.iter().rposition(|part| !part.layer.is_row_wise()).unwrap_or(0);
        for (i, part) in self.layers.iter().enumerate() {
            let own = &parameters[part.parameters.clone()];
            let residual = if i + 1 == self.layers.len() { residual.take() } else { None };
            x = match i < mixing {
                true => part.layer.forward(cx, own, x, None)?.0,
                false => part.layer.last_row(cx, own, x, residual)?,
            };
        }
        Ok(x)
    }

    fn save(&self, cx: &Context, parameters: &[View], x: Activation) -> Result<Saved> {
        let (x, mut layers) = self.forward_to_last(cx, parameters, x)?;
        let last = &self.layers[self.layers.len() - 1];
        let kept = last.layer.save(cx, &parameters[last.parameters.clone()], x)?;
        self.keep(cx, &mut layers, kept);
        Ok(Saved::new(SavedSequence { layers }))
    }

    fn each_input(&self, saved: &mut Saved, see: &mut dyn FnMut(&mut Shared)) {
        let SavedSequence { layers } = restore_mut(&mut *saved.own);
        if let Some(first) = layers.first_mut() {
            self.layers[0].layer.each_input(first, see);
        }
    }

    /// The residual is added by the first layer, the last to run.
    fn backward(
        &self,
        cx: &Context,
        parameters: &[View],
        gradients: &mut [Gradient],
        saved: Saved,
        mut dy: Activation,
        mut residual: Option<Activation>,
    ) -> Result<Option<Activation>> {
        let SavedSequence { layers: mut saved } = restore(saved.own);
        for (i, part) in self.layers.iter().enumerate().rev() {
            self.recall(cx, parameters, &mut saved, i)?;
            let own = part.parameters.clone();
            let kept = saved.pop().expect("forward saved one entry per layer");
            let residual = if i == 0 { residual.take() } else { None };
            let (own, slots) = (&parameters[own.clone()], &mut gradients[own]);
            let dx = part.layer.backward(cx, own, slots, kept, dy, residual)?;
            if i == 0 {
                return Ok(dx);
            }
            dy = dx.expect("only the first layer may have an input without gradient");
        }
        unreachable!("a sequence has at least one layer")
    }

    fn backward_input(
        &self,
        cx: &Context,
        parameters: &[View],
        saved: Saved,
        mut dy: Activation,
        mut residual: Option<Activation>,
    ) -> Result<(Option<Activation>, Deferred)> {
        let SavedSequence { layers: mut saved } = restore(saved.own);
        // Last layer first, as they ran.
        let mut deferred = Vec::with_capacity(self.layers.len());
        for (i, part) in self.layers.iter().enumerate().rev() {
            self.recall(cx, parameters, &mut saved, i)?;
            let kept = saved.pop().expect("forward saved one entry per layer");
            let residual = if i == 0 { residual.take() } else { None };
            let own = &parameters[part.parameters.clone()];
            let (dx, later) = part.layer.backward_input(cx, own, kept, dy, residual)?;
            deferred.push(later);
            if i == 0 {
                return Ok((dx, Deferred::new(deferred)));
            }
            dy = dx.expect("only the first layer may have an input without gradient");
        }
        unreachable!("a sequence has at least one layer")
    }

    fn backward_weight(&self, cx: &Context, gradients: &mut [Gradient], deferred: Deferred) -> Result<()> {
        let deferred: Vec<Deferred> = deferred.restore();
        for (part, later) in self.layers.iter().rev().zip(deferred) {
            part.layer.backward_weight(cx, &mut gradients[part.parameters.clone()], later)?;
        }
        Ok(())
    }
}

/// `y = x + f(x)`. The last layer of f adds x to its output; in backward the first layer of f adds to dy, in its
/// memory.
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
    ) -> Result<(Activation, Saved)> {
        let (y, saved) = self.0.forward(cx, parameters, x.clone(), Some(x))?;
        Ok((with_outer(cx, y, residual), saved))
    }

    fn is_row_wise(&self) -> bool {
        self.0.is_row_wise()
    }

    fn last_row(
        &self,
        cx: &Context,
        parameters: &[View],
        x: Activation,
        residual: Option<Activation>,
    ) -> Result<Activation> {
        let own = last_row_of(cx, x.clone());
        let y = self.0.last_row(cx, parameters, x, Some(own))?;
        Ok(with_outer(cx, y, residual))
    }

    /// The addition itself saves nothing.
    fn save(&self, cx: &Context, parameters: &[View], x: Activation) -> Result<Saved> {
        self.0.save(cx, parameters, x)
    }

    fn each_input(&self, saved: &mut Saved, see: &mut dyn FnMut(&mut Shared)) {
        self.0.each_input(saved, see);
    }

    fn backward(
        &self,
        cx: &Context,
        parameters: &[View],
        gradients: &mut [Gradient],
        saved: Saved,
        dy: Activation,
        residual: Option<Activation>,
    ) -> Result<Option<Activation>> {
        let dx = self.0.backward(cx, parameters, gradients, saved, dy.clone(), Some(dy))?;
        Ok(dx.map(|dx| with_outer(cx, dx, residual)))
    }

    fn backward_input(
        &self,
        cx: &Context,
        parameters: &[View],
        saved: Saved,
        dy: Activation,
        residual: Option<Activation>,
    ) -> Result<(Option<Activation>, Deferred)> {
        let (dx, deferred) = self.0.backward_input(cx, parameters, saved, dy.clone(), Some(dy))?;
        Ok((dx.map(|dx| with_outer(cx, dx, residual)), deferred))
    }

    fn backward_weight(&self, cx: &Context, gradients: &mut [Gradient], deferred: Deferred) -> Result<()> {
        self.0.backward_weight(cx, gradients, deferred)
    }
}

/// Adds a second residual, for nested residual paths.
fn with_outer(cx: &Context, y: Activation, residual: Option<Activation>) -> Activation {
    if residual.is_none() {
        return y;
    }
    let mut sum = cx.activation(y.shape(), "residual.outer");
    cx.device.copy(y.view(), sum.view_mut());
    add_residual(cx, sum, residual)
}
