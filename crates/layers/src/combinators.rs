//! Composition: layers in sequence. It has a backward, as a [`Fork`](crate::Fork) has, so a model that is composed of existing
//! layers needs no derivatives of its own.
//!
//! The [`Saved`] of neighbouring layers in a sequence share the tensor between them. A sequence that
//! [rebuilds](Sequence::rebuilding) frees the tensors that the previous layer can recompute, and recomputes each when
//! backward reaches its first reader.

use crate::activation::Activation;
use crate::call::{Call, Parameters};
use crate::failure::Result;
use crate::layer::{AnyLayer, Context, Layer, Rebuild};
use crate::parameter::ParameterSpec;
use crate::saved::{AnySaved, Deferred, Saved, Shared};

/// One layer after another. Parameters are those of the layers, in order.
pub struct Sequence {
    layers: Parts,
    rebuilds: bool,
}

/// At least one layer, each with the number of its parameters.
pub(crate) struct Parts(Vec<(Box<dyn AnyLayer>, usize)>);

impl Parts {
    pub(crate) fn new(layers: Vec<Box<dyn AnyLayer>>) -> Parts {
        assert!(!layers.is_empty(), "layers are composed of at least one");
        let part = |layer: Box<dyn AnyLayer>| (layer.parameters().len(), layer);
        Parts(layers.into_iter().map(part).map(|(parameters, layer)| (layer, parameters)).collect())
    }

    pub(crate) fn layer(&self, index: usize) -> &dyn AnyLayer {
        &*self.0[index].0
    }

    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = &dyn AnyLayer> + ExactSizeIterator {
        self.0.iter().map(|(layer, _)| &**layer)
    }

    pub(crate) fn parameters(&self) -> Vec<ParameterSpec> {
        self.iter().flat_map(AnyLayer::parameters).collect()
    }

    /// The parameters of each layer.
    pub(crate) fn split<'a>(&self, all: Parameters<'a>) -> Vec<Parameters<'a>> {
        let mut rest = all;
        let own = |(_, parameters): &(Box<dyn AnyLayer>, usize)| {
            let (own, others) = rest.split_at(*parameters);
            rest = others;
            own
        };
        self.0.iter().map(own).collect()
    }
}

/// Tensors saved by those layers of a sequence that backward runs.
pub struct SavedSequence {
    /// The first of them.
    lowest: usize,
    /// In order, from `lowest` on.
    layers: Vec<AnySaved>,
}

impl Sequence {
    /// The layers run in the given order; there is at least one.
    pub fn new(layers: Vec<Box<dyn AnyLayer>>) -> Sequence {
        Sequence { layers: Parts::new(layers), rebuilds: false }
    }

    /// The same sequence, which does not save the tensor between two layers where the first can recompute it.
    #[must_use]
    pub fn rebuilding(self) -> Sequence {
        Sequence { rebuilds: true, ..self }
    }

    fn len(&self) -> usize {
        self.layers.0.len()
    }

    /// The first layer that backward runs: the first one that is trained, unless dx of the sequence is wanted.
    fn lowest(&self, parameters: &[Parameters], input_wanted: bool) -> usize {
        if input_wanted {
            return 0;
        }
        parameters.iter().position(|own| own.are_trained()).unwrap_or(self.len())
    }

    /// Method to recompute the input of layer `index`, if it is not saved. A layer below `lowest` has saved nothing.
    fn rebuild(&self, index: usize, lowest: usize) -> Option<Rebuild> {
        let before = index.checked_sub(1).filter(|before| *before >= lowest)?;
        let rebuild = self.layers.layer(before).rebuild()?;
        (self.rebuilds || rebuild.always).then_some(rebuild)
    }

    /// Runs all layers but the last: the call of the last, and what the others saved.
    fn forward_to_last<'a>(&self, cx: &Context, call: Call<'a>) -> Result<(Call<'a>, SavedSequence)> {
        let Call { parameters, mut x, sum, input_wanted } = call;
        let parameters = self.layers.split(parameters);
        let lowest = self.lowest(&parameters, input_wanted);
        let mut saved = SavedSequence { lowest, layers: Vec::with_capacity(self.len()) };
        let last = self.len() - 1;
        for (i, (layer, parameters)) in self.layers.iter().take(last).zip(&parameters).enumerate() {
            let call =
                Call { parameters: *parameters, x, sum: None, input_wanted: input_wanted || i > lowest };
            let (y, kept) = layer.forward(&Context { keep: cx.keep && i >= lowest, ..*cx }, call)?;
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
        let tensor = cx.device.again(|| self.layers.layer(before).output(cx, parameters[before], x, own))?;
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
        let parameters = self.layers.split(parameters);
        let lowest = saved.lowest;
        for (i, layer) in self.layers.iter().enumerate().skip(lowest).rev() {
            self.recall(cx, &parameters, &mut saved, i)?;
            let kept = saved.layers.pop().expect("forward saved one entry per layer");
            let call = Call {
                parameters: parameters[i],
                x,
                sum: sum.take_if(|_| i == 0),
                input_wanted: input_wanted || i > lowest,
            };
            let dx = run(layer, kept, call)?;
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
        self.layers.parameters()
    }

    /// The sum is added by the last layer.
    fn forward(&self, cx: &Context, call: Call) -> Result<(Activation, Saved<SavedSequence>)> {
        let (call, mut saved) = self.forward_to_last(cx, call)?;
        let last = self.len() - 1;
        let (y, kept) = self.layers.layer(last).forward(cx, call)?;
        self.keep(cx, &mut saved, last, kept);
        Ok((y, Saved::new(saved)))
    }

    fn backward(&self, cx: &Context, saved: Saved<SavedSequence>, call: Call) -> Result<Option<Activation>> {
        self.each_backward(cx, saved.own, call, |layer, saved, call| layer.backward(cx, saved, call))
    }

    fn is_row_wise(&self) -> bool {
        self.layers.iter().all(|layer| layer.is_row_wise())
    }

    /// All rows up to the last layer that mixes rows, and one row from there on.
    fn last_row(&self, cx: &Context, call: Call) -> Result<Activation> {
        let Call { parameters, mut x, mut sum, input_wanted } = call;
        let mixing = self.layers.iter().rposition(|layer| !layer.is_row_wise()).unwrap_or(0);
        for ((i, layer), parameters) in self.layers.iter().enumerate().zip(self.layers.split(parameters)) {
            let sum = sum.take_if(|_| i + 1 == self.len());
            let call = Call { parameters, x, sum, input_wanted };
            x = match i < mixing {
                true => layer.forward(cx, call)?.0,
                false => layer.last_row(cx, call)?,
            };
        }
        Ok(x)
    }

    fn save(&self, cx: &Context, call: Call) -> Result<Saved<SavedSequence>> {
        let (call, mut saved) = self.forward_to_last(cx, call)?;
        let last = self.len() - 1;
        let kept = self.layers.layer(last).save(cx, call)?;
        self.keep(cx, &mut saved, last, kept);
        Ok(Saved::new(saved))
    }

    fn each_input(&self, _: &mut Shared, own: &mut SavedSequence, see: &mut dyn FnMut(&mut Shared)) {
        if let Some(first) = own.layers.first_mut().filter(|_| own.lowest == 0) {
            self.layers.layer(0).each_input(&mut first.x, &mut first.own, see);
        }
    }

    fn backward_input(
        &self,
        cx: &Context,
        saved: Saved<SavedSequence>,
        call: Call,
    ) -> Result<(Option<Activation>, Deferred)> {
        // Last layer first, as they ran.
        let mut deferred = Vec::with_capacity(self.len());
        let dx = self.each_backward(cx, saved.own, call, |layer, saved, call| {
            let (dx, later) = layer.backward_input(cx, saved, call)?;
            deferred.push(later);
            Ok(dx)
        })?;
        Ok((dx, Deferred::new(deferred)))
    }

    fn backward_weight(&self, cx: &Context, parameters: Parameters, deferred: Deferred) -> Result<()> {
        let deferred: Vec<Deferred> = deferred.restore();
        let own = self.layers.split(parameters).into_iter().rev();
        for ((layer, own), later) in self.layers.iter().rev().zip(own).zip(deferred) {
            layer.backward_weight(cx, own, later)?;
        }
        Ok(())
    }
}
