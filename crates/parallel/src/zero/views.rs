//! The parameters and gradients of the block run that comes next, or was the last.

use phalanx_layers::{Gradient, Parameter};
use phalanx_plan::program::Buffer;
use phalanx_tensor::{Tensor, View, ViewMut};

use super::held::Held;
use super::map::Map;
use super::{Chunks, Running};

impl Chunks {
    /// The values of the parameters of a block that was entered, in its layer's order.
    pub(crate) fn views(&self, stage: usize, block: usize) -> Vec<View<'_>> {
        let (reads, _) = self.running.program.operands(self.running.operands);
        let chunks = reads.iter().map(|buffer| self.view(*buffer)).collect();
        values(&self.held[self.place_of(stage)].map, block, chunks)
    }

    /// The parameters of a block that was entered, to be read.
    pub(crate) fn parameters(&self, stage: usize, block: usize) -> Vec<Parameter<'_>> {
        let map = &self.held[self.place_of(stage)].map;
        let trained = map.uses[block].iter().map(|p| map.is_trained(*p));
        let parameters = self.views(stage, block).into_iter().zip(trained);
        map.joining(block, parameters.map(|(view, trained)| Parameter::read(view, trained)))
    }

    /// The parameters of a block whose backward was entered, and the memory of their gradients.
    pub(crate) fn parameters_with_gradients(&mut self, stage: usize, block: usize) -> Vec<Parameter<'_>> {
        let place = self.place_of(stage);
        let (read, written) = operands(&self.running, &mut self.buffers);
        let Held { map, written: flags, .. } = &mut self.held[place];
        let values = values(map, block, read);
        let parameters = values.into_iter().zip(slots(map, flags, block, written));
        map.joining(block, parameters.map(|(value, slot)| Parameter::with_gradient(value, slot)))
    }

    /// The memory of the gradients of a block's trained parameters, whose second part of backward was entered.
    pub(crate) fn gradients(&mut self, stage: usize, block: usize) -> Vec<Parameter<'_>> {
        let place = self.place_of(stage);
        let (_, written) = operands(&self.running, &mut self.buffers);
        let Held { map, written: flags, .. } = &mut self.held[place];
        map.joining(block, slots(map, flags, block, written).into_iter().map(Parameter::gradient))
    }

    /// The gradients that the layer of the last block run has written, each with the index of its parameter in the layer.
    pub(crate) fn written_gradients(&self, stage: usize, block: usize) -> Vec<(usize, View<'_>)> {
        let Held { map, written, .. } = &self.held[self.place_of(stage)];
        let (_, writes) = self.running.program.operands(self.running.operands);
        let chunk = |c: usize| map.chunks[block].iter().position(|own| *own == c).map(|at| writes[at]);
        let view = |(index, p): (usize, &usize)| {
            let buffer = chunk(map.layout.placed[*p].chunk).expect("a chunk that the block writes");
            (index, self.view(buffer).range(map.range(*p)).reshape(map.shapes[*p]))
        };
        map.uses[block].iter().enumerate().filter(|(_, p)| written[**p]).map(view).collect()
    }

    /// Ranks of the data axis.
    pub(crate) fn data_ranks(&self) -> usize {
        self.groups.data.world_size()
    }
}

/// The buffers that the block run reads, and those that it writes.
fn operands<'a>(running: &Running, buffers: &'a mut [Option<Tensor>]) -> (Vec<View<'a>>, Vec<ViewMut<'a>>) {
    let (reads, writes) = running.program.operands(running.operands);
    let mut read: Vec<Option<View>> = reads.iter().map(|_| None).collect();
    let mut written: Vec<Option<ViewMut>> = writes.iter().map(|_| None).collect();
    for (at, tensor) in (0..).zip(buffers) {
        let Some(tensor) = tensor else { continue };
        let is_it = |buffer: &Buffer| *buffer == Buffer(at);
        if let Some(place) = writes.iter().position(is_it) {
            written[place] = Some(tensor.view_mut());
        } else if let Some(place) = reads.iter().position(is_it) {
            read[place] = Some(tensor.view().typed(running.program.spec(Buffer(at)).dtype));
        }
    }
    let missing = "operands of the run that was entered are in their places";
    (
        read.into_iter().map(|view| view.expect(missing)).collect(),
        written.into_iter().map(|view| view.expect(missing)).collect(),
    )
}

/// The values of the parameters of a block, from the chunks that it uses.
fn values<'a>(map: &Map, block: usize, chunks: Vec<View<'a>>) -> Vec<View<'a>> {
    let view = |p: &usize| {
        let at = map.chunks[block].iter().position(|c| *c == map.layout.placed[*p].chunk);
        chunks[at.expect("the chunks of a block have its parameters")]
            .range(map.range(*p))
            .reshape(map.shapes[*p])
    };
    map.uses[block].iter().map(view).collect()
}

/// For each parameter that a block uses: the memory of its gradient, in the chunks that it writes; None where it is frozen.
fn slots<'a>(
    map: &Map,
    flags: &'a mut [bool],
    block: usize,
    written: Vec<ViewMut<'a>>,
) -> Vec<Option<Gradient<'a>>> {
    let uses = &map.uses[block];
    let mut views: Vec<Option<ViewMut>> = uses.iter().map(|_| None).collect();
    for (c, whole) in map.chunks[block].iter().zip(written) {
        let mut inside: Vec<usize> =
            (0..uses.len()).filter(|i| map.layout.placed[uses[*i]].chunk == *c).collect();
        inside.sort_by_key(|i| map.range(uses[*i]).start);
        let pieces = inside.iter().map(|i| (map.range(uses[*i]), map.shapes[uses[*i]]));
        for (view, i) in whole.into_pieces(pieces).into_iter().zip(&inside) {
            views[*i] = Some(view);
        }
    }
    let mut flags: Vec<Option<&mut bool>> = flags.iter_mut().map(Some).collect();
    let slot = |(p, view): (&usize, Option<ViewMut<'a>>)| {
        Some(Gradient::new(view?, flags[*p].take().expect("a block uses each parameter once")))
    };
    uses.iter().zip(views).map(slot).collect()
}
