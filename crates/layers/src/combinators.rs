//! Composition: layers in sequence, and a residual path around a layer. Both have a backward, so a model that is
//! composed of existing layers needs no derivatives of its own.
//!
//! The [`Saved`] of neighbouring layers in a sequence share the tensor between them. A sequence that
//! [rebuilds](Sequence::rebuilding) frees the tensors that the previous layer can recompute, and recomputes each when
//! backward reaches its first reader.

use crate::activation::Activation;
use crate::call::{Call, Parameters};
use crate::failure::Result;
use crate::layer::{AnyLayer, Context, Layer, ParameterSpec, Rebuild, last_row_of};
use crate::saved::{AnySaved, Deferred, Saved, Shared};

/// One layer after another. Parameters are those of the layers, in order.
pub struct Sequence {
    layers: Vec<Part>,
    rebuilds: bool,
}

/// A layer of a sequence, and the number of its parameters.
struct Part {
    layer: Box<dyn AnyLayer>,
    parameters: usize,
}

/// What the layers of a sequence saved that backward runs.
pub struct SavedSequence {
    /// The first of them.
    lowest: usize,
    /// In order, from `lowest` on.
    layers: Vec<AnySaved>,
}

impl Sequence {
    /// The layers run in the given order; there is at least one.
    pub fn new(layers: Vec<Box<dyn AnyLayer>>) -> Sequence {
        assert!(!layers.is_empty(), "a sequence has at least one layer");
        let part = |layer: Box<dyn AnyLayer>| Part { parameters: layer.parameters().len(), layer };
        Sequence { layers: layers.into_iter().map(part).collect(), rebuilds: false }
    }

    /// The same sequence, which does not save the tensor between two layers where the first can recompute it.
    #[must_use]
    pub fn rebuilding(self) -> Sequence {
        Sequence { rebuilds: true, ..self }
    }

    /// The parameters of each layer.
    fn split<'a>(&self, all: Parameters<'a>) -> Vec<Parameters<'a>> {
        let mut rest = all;
        let own = |part: &Part| {
            let (own, others) = rest.split_at(part.parameters);
            rest = others;
            own
        };
        self.layers.iter().map(own).collect()
    }

    /// The first layer that backward runs: the first one that is trained, unless dx of the sequence is wanted.
    fn lowest(&self, parameters: &[Parameters], input_wanted: bool) -> usize {
        if input_wanted {
            return 0;
        }
        parameters.iter().position(|own| own.are_trained()).unwrap_or(self.layers.len())
    }

    /// How the tensor before layer `index` is recomputed, when it is not saved. A layer below `lowest` has saved nothing.
    fn rebuild(&self, index: usize, lowest: usize) -> Option<Rebuild> {
        let before = index.checked_sub(1).filter(|before| *before >= lowest)?;
        let rebuild = self.layers[before].layer.rebuild()?;
        (self.rebuilds || rebuild.always).then_some(rebuild)
    }

    /// Runs all layers but the last: the call of the last, and what the others saved.
    fn forward_to_last<'a>(&self, cx: &Context, call: Call<'a>) -> Result<(Call<'a>, SavedSequence)> {
        let Call { parameters, mut x, sum, input_wanted } = call;
        let parameters = self.split(parameters);
        let lowest = self.lowest(&parameters, input_wanted);
        let mut saved = SavedSequence { lowest, layers: Vec::with_capacity(self.layers.len()) };
        let last = self.layers.len() - 1;
        for (i, (part, parameters)) in self.layers[..last].iter().zip(&parameters).enumerate() {
            let call =
                Call { parameters: *parameters, x, sum: None, input_wanted: input_wanted || i > lowest };
            let (y, kept) = part.layer.forward(&Context { keep: cx.keep && i >= lowest, ..*cx }, call)?;
            x = y;
            self.keep(cx, &mut saved, i, kept);
        }
        let input_wanted = input_wanted || last > lowest;
        Ok((Call { parameters: parameters[last], x, sum, input_wanted }, saved))
    }

    /// Adds what layer `index` saved, if backward runs it, and frees the tensor before it if it can be recomputed.
    fn keep(&self, cx: &Context, saved: &mut SavedSequence, index: usize, mut kept: AnySaved) {
        if !cx.keep || index < saved.lowest {
            return;
        }
        if self.rebuild(index, saved.lowest).is_some() {
            kept.x.forget();
            saved.layers.last_mut().expect("there is an earlier layer").y.forget();
        }
        saved.layers.push(kept);
    }

    /// Recomputes the tensor before layer `index`, if it was freed.
    fn recall(
        &self,
        cx: &Context,
        parameters: &[Parameters],
        saved: &mut SavedSequence,
        index: usize,
    ) -> Result<()> {
        let Some(rebuild) = self.rebuild(index, saved.lowest) else { return Ok(()) };
        let (before, at) = (index - 1, index - saved.lowest);
        if !(saved.layers[at - 1].y.is_forgotten() || saved.layers[at].x.is_forgotten()) {
            return Ok(());
        }
        if rebuild.reads_input {
            self.recall(cx, parameters, saved, before)?;
        }
        let Saved { x, own, .. } = &mut saved.layers[at - 1];
        let tensor = self.layers[before].layer.output(cx, parameters[before], x, own)?;
        saved.layers[at - 1].y.recall(&tensor);
        saved.layers[at].x.recall(&tensor);
        Ok(())
    }

    /// Calls `run` with each layer that backward runs, what it saved and its call, the last layer first; `run` returns its dx. The
    /// sum is added by the first layer, the last to run.
    fn each_backward<'a>(
        &self,
        cx: &Context,
        mut saved: SavedSequence,
        call: Call<'a>,
        mut run: impl FnMut(&dyn AnyLayer, AnySaved, Call<'a>) -> Result<Option<Activation>>,
    ) -> Result<Option<Activation>> {
        let Call { parameters, mut x, mut sum, input_wanted } = call;
        let parameters = self.split(parameters);
        let lowest = saved.lowest;
        for (i, part) in self.layers.iter().enumerate().skip(lowest).rev() {
            self.recall(cx, &parameters, &mut saved, i)?;
            let kept = saved.layers.pop().expect("forward saved one entry per layer");
            let call = Call {
                parameters: parameters[i],
                x,
                sum: sum.take_if(|_| i == 0),
                input_wanted: input_wanted || i > lowest,
            };
            let dx = run(&*part.layer, kept, call)?;
            if i == lowest {
                return Ok(dx.filter(|_| input_wanted));
            }
            x = dx.expect("only the lowest layer may have an input without gradient");
        }
        Ok(None)
    }
}

impl Layer for Sequence {
    type Own = SavedSequence;

    fn parameters(&self) -> Vec<ParameterSpec> {
        self.layers.iter().flat_map(|part| part.layer.parameters()).collect()
    }

    /// The sum is added by the last layer.
    fn forward(&self, cx: &Context, call: Call) -> Result<(Activation, Saved<SavedSequence>)> {
        let (call, mut saved) = self.forward_to_last(cx, call)?;
        let last = self.layers.len() - 1;
        let (y, kept) = self.layers[last].layer.forward(cx, call)?;
        self.keep(cx, &mut saved, last, kept);
        Ok((y, Saved::new(saved)))
    }

    fn backward(&self, cx: &Context, saved: Saved<SavedSequence>, call: Call) -> Result<Option<Activation>> {
        self.each_backward(cx, saved.own, call, |layer, saved, call| layer.backward(cx, saved, call))
    }

    fn is_row_wise(&self) -> bool {
        self.layers.iter().all(|part| part.layer.is_row_wise())
    }

    /// All rows up to the last layer that mixes rows, and one row from there on.
    fn last_row(&self, cx: &Context, call: Call) -> Result<Activation> {
        let Call { parameters, mut x, mut sum, input_wanted } = call;
        let mixing = self.layers.iter().rposition(|part| !part.layer.is_row_wise()).unwrap_or(0);
        for ((i, part), parameters) in self.layers.iter().enumerate().zip(self.split(parameters)) {
            let sum = sum.take_if(|_| i + 1 == self.layers.len());
            let call = Call { parameters, x, sum, input_wanted };
            x = match i < mixing {
                true => part.layer.forward(cx, call)?.0,
                false => part.layer.last_row(cx, call)?,
            };
        }
        Ok(x)
    }

    fn save(&self, cx: &Context, call: Call) -> Result<Saved<SavedSequence>> {
        let (call, mut saved) = self.forward_to_last(cx, call)?;
        let last = self.layers.len() - 1;
        let kept = self.layers[last].layer.save(cx, call)?;
        self.keep(cx, &mut saved, last, kept);
        Ok(Saved::new(saved))
    }

    fn each_input(&self, _: &mut Shared, own: &mut SavedSequence, see: &mut dyn FnMut(&mut Shared)) {
        if let Some(first) = own.layers.first_mut().filter(|_| own.lowest == 0) {
            self.layers[0].layer.each_input(&mut first.x, &mut first.own, see);
        }
    }

    fn backward_input(
        &self,
        cx: &Context,
        saved: Saved<SavedSequence>,
        call: Call,
    ) -> Result<(Option<Activation>, Deferred)> {
        // Last layer first, as they ran.
        let mut deferred = Vec::with_capacity(self.layers.len());
        let dx = self.each_backward(cx, saved.own, call, |layer, saved, call| {
            let (dx, later) = layer.backward_input(cx, saved, call)?;
            deferred.push(later);
            Ok(dx)
        })?;
        Ok((dx, Deferred::new(deferred)))
    }

    fn backward_weight(&self, cx: &Context, parameters: Parameters, deferred: Deferred) -> Result<()> {
        let deferred: Vec<Deferred> = deferred.restore();
        let own = self.split(parameters).into_iter().rev();
        for ((part, own), later) in self.layers.iter().rev().zip(own).zip(deferred) {
            part.layer.backward_weight(cx, own, later)?;
        }
        Ok(())
    }
}

/// `y = x + f(x)`. The last layer of f adds x to its output; in backward the first layer of f adds to dy, in its
/// memory.
pub struct Residual<L>(pub L);

impl<L: Layer> Layer for Residual<L> {
    type Own = L::Own;

    fn parameters(&self) -> Vec<ParameterSpec> {
        self.0.parameters()
    }

    fn forward(&self, cx: &Context, call: Call) -> Result<(Activation, Saved<L::Own>)> {
        let (call, outer) = around(call);
        let (y, saved) = self.0.forward(cx, call)?;
        Ok((with_outer(cx, y, outer), saved))
    }

    fn backward(&self, cx: &Context, saved: Saved<L::Own>, call: Call) -> Result<Option<Activation>> {
        let (call, outer) = around_backward(call);
        let dx = self.0.backward(cx, saved, call)?;
        Ok(dx.map(|dx| with_outer(cx, dx, outer)))
    }

    fn is_row_wise(&self) -> bool {
        self.0.is_row_wise()
    }

    fn last_row(&self, cx: &Context, call: Call) -> Result<Activation> {
        let Call { x, sum: outer, .. } = call;
        let own = last_row_of(cx, x.clone());
        let y = self.0.last_row(cx, Call { x, sum: Some(own), ..call })?;
        Ok(with_outer(cx, y, outer))
    }

    /// The addition itself saves nothing.
    fn save(&self, cx: &Context, call: Call) -> Result<Saved<L::Own>> {
        self.0.save(cx, call)
    }

    fn each_input(&self, x: &mut Shared, own: &mut L::Own, see: &mut dyn FnMut(&mut Shared)) {
        self.0.each_input(x, own, see);
    }

    fn backward_input(
        &self,
        cx: &Context,
        saved: Saved<L::Own>,
        call: Call,
    ) -> Result<(Option<Activation>, Deferred)> {
        let (call, outer) = around_backward(call);
        let (dx, deferred) = self.0.backward_input(cx, saved, call)?;
        Ok((dx.map(|dx| with_outer(cx, dx, outer)), deferred))
    }

    fn backward_weight(&self, cx: &Context, parameters: Parameters, deferred: Deferred) -> Result<()> {
        self.0.backward_weight(cx, parameters, deferred)
    }
}

/// The call of f, to whose result x is added, and the sum of the call itself.
fn around(call: Call) -> (Call, Option<Activation>) {
    let Call { parameters, x, sum, input_wanted } = call;
    (Call { parameters, sum: Some(x.clone()), x, input_wanted }, sum)
}

/// The same of backward: dy is added to dx where that is wanted.
fn around_backward(call: Call) -> (Call, Option<Activation>) {
    let (call, outer) = around(call);
    let wanted = call.input_wanted;
    (Call { sum: call.sum.filter(|_| wanted), ..call }, outer)
}

/// Adds a second sum, for nested residual paths.
fn with_outer(cx: &Context, y: Activation, outer: Option<Activation>) -> Activation {
    if outer.is_none() {
        return y;
    }
    let mut sum = cx.activation(y.shape(), "residual.outer");
    cx.device.copy(y.view(), sum.view_mut());
    cx.plus(sum, outer)
}
