//! Gradients in chunks, from the layers that write them to the ranks that own them.
//!
//! There are three kinds of buffers ([`GradientBuffering`]):
//! - *in place*: one buffer of the whole chunk is kept, and reduced in place after the last micro-batch (stages 0 and 1
//!   with one micro-batch or `defer`, and one rank);
//! - *pair*: one buffer of the whole chunk is kept, and a shard that accumulates the reduced micro-batches (stages 0
//!   and 1 with several micro-batches);
//! - *transient*: the buffer of the whole chunk exists only from its first gradient to its reduction; a shard is kept
//!   (stages 2 and 3).
//!
//! Gradients *in the place of parameters* (Gemini's reuse of chunks) have no memory of their own: the buffer of the whole
//! chunk exists until its reduction, and the sum then overwrites the parameters, which nothing uses any more in the step. The
//! update reads it there and writes the new parameters over it. So there is one micro-batch, and master weights.
//!
//! Gradients of chunks that are *updated within backward* (`in_backward`) have none either: the buffer of the whole chunk exists
//! until that update.
//!
//! Gradients that stay in another memory than the device's are on the device from their first writer in a micro-batch
//! to its end, or to their reduction: in place, the whole buffer then leaves and comes back for the next micro-batch; in the
//! other kinds, the shard leaves after each reduction and comes back for the next one, and the whole is transient.
//!
//! With *sums by a tree* over the micro-batches ([`PartialSums`]), layers find an unused buffer in each micro-batch, and sums that wait for
//! their neighbour have further buffers, which stay on the device until the last micro-batch, wherever gradients lie.
//!
//! Buffers have the accumulation type. When gradients are communicated in another type, a copy is rounded to that
//! type and reduced, and the result is written or added to the sum. This happens on one rank too, so that the result
//! depends on the types and not on the number of ranks.

use std::collections::VecDeque;

use phalanx_collectives::{CollectiveError, Group};
use phalanx_layers::Gradient;
use phalanx_plan::{PartialSums, Precision, ZeroStage};
use phalanx_tensor::{Category, DType, Device, Tensor, View};

use super::gradient_buffers::{Chunk, GradientBuffering, GradientBuffers, GradientPlace};
use super::parameters::ParameterChunks;
use super::squares::Squares;
use super::states::States;
use super::{Arithmetic, Map, Options};

/// Name of a sum that waits for its neighbour.
pub(super) const PARTIAL: &str = "partial_sum";

/// Largest number of reductions in flight; each holds a whole chunk.
const IN_FLIGHT: usize = 2;

/// Objects with which gradients are reduced, and their destinations.
pub(super) struct Surroundings<'a> {
    pub(super) device: &'a Device,
    pub(super) group: &'a dyn Group,
    pub(super) map: &'a Map,
    /// Destination of gradients that are not in device memory.
    pub(super) states: &'a mut States,
    /// The norm's sums: gradients are counted before they leave the device.
    pub(super) squares: &'a mut Squares,
    /// Parameters, whose place gradients may take.
    pub(super) parameters: &'a mut ParameterChunks,
}

/// Adds a buffer to another, and frees it.
pub(super) fn adding(device: &Device) -> impl FnMut(Tensor, &mut Tensor) {
    |from, into| device.add(from.view(), into.view_mut())
}

pub(super) struct GradientChunks {
    pub(super) buffering: GradientBuffering,
    /// For each chunk: where its gradients lie when they are reduced.
    pub(super) places: Vec<GradientPlace>,
    pub(super) stage: ZeroStage,
    overlap: bool,
    pub(super) precision: Precision,
    pub(super) chunks: Vec<Chunk>,
    /// For each parameter: whether this micro-batch has written its gradient.
    written: Vec<bool>,
    /// For each chunk: the number of blocks that write to it in a micro-batch.
    writers: Vec<usize>,
    /// For each chunk: the number of blocks that have not yet written to it in its current micro-batch.
    awaited: Vec<usize>,
    /// For each chunk: the number of micro-batches of this step that all its blocks have written.
    pub(super) done: Vec<usize>,
    pub(super) micro_batches: usize,
    /// The micro-batch whose backward runs.
    pub(super) micro_batch: usize,
    /// For each chunk: its sums that wait for a neighbour, with sums by a tree.
    pub(super) partial: Option<Vec<PartialSums<Tensor>>>,
    /// Chunks that are being reduced, oldest first.
    pub(super) in_flight: VecDeque<usize>,
    /// Largest number of them while backward goes on.
    in_flight_max: usize,
    /// Chunks that are reduced and whose update, within backward, has not begun; oldest first.
    pub(super) reduced: VecDeque<usize>,
}

impl GradientChunks {
    pub(super) fn new(
        device: &Device,
        map: &Map,
        options: &Options,
        arithmetic: &Arithmetic,
    ) -> GradientChunks {
        let (&Options { stage, overlap, .. }, precision) = (options, arithmetic.precision);
        let buffering = GradientBuffering::of(map, options, arithmetic);
        let place = |c: usize| GradientPlace::of(map, options, c);
        let alloc =
            |elements| device.alloc(precision.accumulate, [elements], Category::Gradients, "gradient_chunk");
        let held = |c: usize| match buffering {
            _ if place(c) != GradientPlace::Buffer => GradientBuffers::Away,
            GradientBuffering::InPlace => GradientBuffers::Whole(alloc(map.whole(c).len())),
            GradientBuffering::Pair => {
                GradientBuffers::Both { whole: alloc(map.whole(c).len()), shard: alloc(map.shard(c).len()) }
            }
            GradientBuffering::Transient => GradientBuffers::Shard(alloc(map.shard(c).len())),
        };
        let mut writers = vec![0; map.trained];
        (0..map.uses.len()).flat_map(|block| map.written(block)).for_each(|c| writers[c] += 1);
        // A single rank has nothing to wait for: its chunks are updated at once.
        let is_alone = options.update_in_backward && map.world == 1;
        let in_flight_max = if overlap && !is_alone { IN_FLIGHT } else { 0 };
        GradientChunks {
            buffering,
            places: (0..map.trained).map(place).collect(),
            stage,
            overlap,
            precision,
            chunks: (0..map.trained).map(|c| Chunk::Here(held(c))).collect(),
            written: vec![false; map.shapes.len()],
            awaited: writers.clone(),
            writers,
            done: vec![0; map.trained],
            micro_batches: arithmetic.micro_batches,
            micro_batch: 0,
            partial: arithmetic.has_tree().then(Vec::new),
            in_flight: VecDeque::new(),
            in_flight_max,
            reduced: VecDeque::new(),
        }
    }

    /// Starts a step: every chunk waits for its first micro-batch.
    pub(super) fn begin(&mut self, device: &Device) {
        for chunk in &self.chunks {
            if let Some(whole) = chunk.whole() {
                device.forget_placements(whole.view());
            }
        }
        self.awaited.clone_from(&self.writers);
        self.done.fill(0);
        if let Some(partial) = &mut self.partial {
            *partial = self.chunks.iter().map(|_| PartialSums::new(self.micro_batches)).collect();
        }
    }

    pub(super) fn open(&mut self, cx: &mut Surroundings, block: usize) -> Result<(), CollectiveError> {
        let map = cx.map;
        for c in map.written(block) {
            self.arrive(cx, c)?;
            self.chunks[c] = match std::mem::replace(&mut self.chunks[c], Chunk::Moving) {
                Chunk::Here(GradientBuffers::Shard(shard)) => {
                    Chunk::Here(GradientBuffers::Both { whole: self.bucket(cx, c), shard })
                }
                Chunk::Here(GradientBuffers::Whole(whole)) => {
                    Chunk::Here(GradientBuffers::Whole(self.unused(cx.device, c, whole)))
                }
                Chunk::Here(GradientBuffers::Away) => Chunk::Here(self.open_away(cx, c)?),
                Chunk::Here(GradientBuffers::Coming(arriving)) => {
                    let whole = cx.states.fetched_gradients(c, *arriving)?;
                    Chunk::Here(GradientBuffers::Whole(whole))
                }
                here => here,
            };
        }
        if self.overlap { self.fetch_for_next(cx, block) } else { Ok(()) }
    }

    /// A whole buffer for the gradients of a micro-batch: `whole`, unless it has the sum of others.
    fn unused(&mut self, device: &Device, c: usize, whole: Tensor) -> Tensor {
        let Some(partial) = &mut self.partial else { return whole };
        let (dtype, elements) = (whole.dtype(), whole.shape());
        partial[c].unused(whole, || device.alloc(dtype, elements, Category::Gradients, PARTIAL))
    }

    /// Starts to bring the whole buffers back into which the micro-batch accumulates next: those of the nearest earlier block
    /// that has any, since backward runs from the last block to the first.
    fn fetch_for_next(&mut self, cx: &mut Surroundings, block: usize) -> Result<(), CollectiveError> {
        if self.buffering != GradientBuffering::InPlace {
            return Ok(());
        }
        let is_coming = |chunk: &Chunk| matches!(chunk, Chunk::Here(GradientBuffers::Coming(_)));
        for earlier in (0..block).rev() {
            let chunks: Vec<usize> = cx.map.written(earlier).collect();
            if chunks.iter().any(|c| is_coming(&self.chunks[*c])) {
                return Ok(());
            }
            let awaited: Vec<usize> = chunks.into_iter().filter(|c| self.comes_back(*c)).collect();
            for c in &awaited {
                let arriving = cx.states.fetch_gradients(*c, cx.map.whole(*c).len())?;
                self.chunks[*c] = Chunk::Here(GradientBuffers::Coming(Box::new(arriving)));
            }
            if !awaited.is_empty() {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Returns whether the sum of earlier micro-batches lies elsewhere, and another micro-batch will add to it.
    fn comes_back(&self, c: usize) -> bool {
        self.places[c] == GradientPlace::Elsewhere
            && matches!(self.chunks[c], Chunk::Here(GradientBuffers::Away))
            && (1..self.micro_batches).contains(&self.done[c])
    }

    /// Memory of a whole chunk that exists until it is reduced.
    pub(super) fn bucket(&self, cx: &Surroundings, c: usize) -> Tensor {
        let elements = cx.map.whole(c).len();
        let accumulate = self.precision.accumulate;
        cx.device.alloc(accumulate, [elements], Category::Communication, "gradient_bucket")
    }

    /// The buffers of a chunk whose gradients stay elsewhere, for its next micro-batch.
    fn open_away(&self, cx: &mut Surroundings, c: usize) -> Result<GradientBuffers, CollectiveError> {
        let is_first = self.done[c] == 0;
        if matches!(self.places[c], GradientPlace::Parameters | GradientPlace::Update) {
            return Ok(GradientBuffers::Whole(self.bucket(cx, c)));
        }
        if self.buffering == GradientBuffering::InPlace {
            return Ok(GradientBuffers::Whole(if is_first {
                self.bucket(cx, c)
            } else {
                let arriving = cx.states.fetch_gradients(c, cx.map.whole(c).len())?;
                cx.states.fetched_gradients(c, arriving)?
            }));
        }
        let whole = self.bucket(cx, c);
        let shard = cx.map.shard(c).len();
        let sum = if is_first { None } else { Some(Box::new(cx.states.fetch_gradients(c, shard)?)) };
        Ok(GradientBuffers::Bucket { whole, sum })
    }

    /// For each parameter that a block uses: the memory of its gradient; None where it is frozen.
    pub(super) fn slots(&mut self, map: &Map, block: usize) -> Vec<Option<Gradient<'_>>> {
        let uses = &map.uses[block];
        let mut views: Vec<_> = uses.iter().map(|_| None).collect();
        for (c, chunk) in self.chunks.iter_mut().enumerate() {
            if !map.chunks[block].contains(&c) {
                continue;
            }
            let mut inside: Vec<usize> =
                (0..uses.len()).filter(|i| map.layout.placed[uses[*i]].chunk == c).collect();
            inside.sort_by_key(|i| map.range(uses[*i]).start);
            let pieces = inside.iter().map(|i| (map.range(uses[*i]), map.shapes[uses[*i]]));
            for (view, i) in chunk.whole_mut(c).into_pieces(pieces).into_iter().zip(&inside) {
                views[*i] = Some(view);
            }
        }
        let mut flags: Vec<Option<&mut bool>> = self.written.iter_mut().map(Some).collect();
        let slot = |(p, view): (&usize, Option<_>)| {
            Some(Gradient::new(view?, flags[*p].take().expect("a block uses each parameter once")))
        };
        uses.iter().zip(views).map(slot).collect()
    }

    /// The gradients that the layer of a block has written and that are not reduced yet, each with its index in the
    /// uses of the block.
    pub(super) fn written(&self, map: &Map, block: usize) -> Vec<(usize, View<'_>)> {
        let view = |(index, p): (usize, &usize)| {
            let c = map.layout.placed[*p].chunk;
            let Some(whole) = self.chunks[c].whole() else { panic!("chunk {c} holds no gradients") };
            (index, whole.view().range(map.range(*p)).reshape(map.shapes[*p]))
        };
        map.uses[block].iter().enumerate().filter(|(_, p)| self.written[**p]).map(view).collect()
    }

    pub(super) fn reduce(&mut self, cx: &mut Surroundings, block: usize) -> Result<(), CollectiveError> {
        let map = cx.map;
        for c in map.written(block) {
            self.awaited[c] -= 1;
            if self.awaited[c] > 0 {
                continue;
            }
            self.awaited[c] = self.writers[c];
            let first = self.done[c] == 0;
            self.done[c] += 1;
            let is_whole = self.buffering == GradientBuffering::InPlace;
            let waits = is_whole && self.done[c] < self.micro_batches;
            if self.partial.is_some() || !waits {
                self.clear_unwritten(cx.device, map, c);
            }
            if is_whole {
                self.add_to_neighbours(cx.device, c);
            }
            if waits {
                self.leave_unreduced(cx, c)?;
                continue;
            }
            self.start(cx, c, !first)?;
            self.in_flight.push_back(c);
            while self.in_flight.len() > self.in_flight_max {
                self.arrive_first(cx)?;
            }
        }
        Ok(())
    }

    /// Waits for the reduction that was started first; returns whether there was one.
    pub(super) fn arrive_first(&mut self, cx: &mut Surroundings) -> Result<bool, CollectiveError> {
        let Some(oldest) = self.in_flight.front() else { return Ok(false) };
        self.arrive(cx, *oldest)?;
        Ok(true)
    }

    /// A micro-batch is over, and the next one accumulates in the same buffer: if it stays elsewhere, it leaves until then.
    fn leave_unreduced(&mut self, cx: &mut Surroundings, c: usize) -> Result<(), CollectiveError> {
        if self.places[c] != GradientPlace::Elsewhere || self.partial.is_some() {
            return Ok(());
        }
        let held = std::mem::replace(&mut self.chunks[c], Chunk::Here(GradientBuffers::Away));
        let Chunk::Here(GradientBuffers::Whole(whole)) = held else { panic!("chunk {c} holds no gradients") };
        Ok(cx.states.send_gradients(c, whole, cx.map.whole(c))?)
    }

    /// With sums by a tree, adds the gradients of a micro-batch, in a whole buffer, to their neighbours.
    fn add_to_neighbours(&mut self, device: &Device, c: usize) {
        let Some(partial) = &mut self.partial else { return };
        let Chunk::Here(GradientBuffers::Whole(whole)) =
            std::mem::replace(&mut self.chunks[c], Chunk::Moving)
        else {
            panic!("chunk {c} holds no gradients")
        };
        partial[c].written(self.micro_batch);
        self.chunks[c] = Chunk::Here(GradientBuffers::Whole(partial[c].settle(whole, adding(device))));
    }

    /// Sets the gradients that no layer has written to zero: their memory holds old values.
    fn clear_unwritten(&mut self, device: &Device, map: &Map, c: usize) {
        let mut whole = self.chunks[c].whole_mut(c);
        for p in map.layout.parameters(c) {
            if !std::mem::replace(&mut self.written[p], false) {
                device.fill(whole.reborrow().range(map.range(p)), 0.0);
            }
        }
    }

    /// Returns whether the whole buffer of a chunk exists only until it is reduced.
    pub(super) fn is_transient(&self, c: usize) -> bool {
        self.buffering == GradientBuffering::Transient || self.places[c] != GradientPlace::Buffer
    }

    /// Returns whether the reduced gradients of a chunk lie in the place of its parameters.
    pub(super) fn is_in_parameters(&self, c: usize) -> bool {
        self.places[c] == GradientPlace::Parameters
    }

    /// Waits for all reductions; under stage 0 every rank then has the whole sum.
    pub(super) fn finish(&mut self, cx: &mut Surroundings) -> Result<(), CollectiveError> {
        for c in 0..self.chunks.len() {
            self.arrive(cx, c)?;
            if self.buffering == GradientBuffering::Pair
                && self.stage == ZeroStage::Zero
                && self.places[c] == GradientPlace::Buffer
            {
                let slot = &mut self.chunks[c];
                let Chunk::Here(GradientBuffers::Both { mut whole, shard }) =
                    std::mem::replace(slot, Chunk::Moving)
                else {
                    panic!("chunk {c} holds no sum")
                };
                cx.device.copy(shard.view(), whole.view_mut().range(cx.map.shard(c)));
                let whole = cx.group.all_gather_in_place(whole).wait()?;
                self.chunks[c] = Chunk::Here(GradientBuffers::Both { whole, shard });
            }
        }
        Ok(cx.states.settle_gradients()?)
    }

    /// The accumulation type.
    pub(super) fn accumulate(&self) -> DType {
        self.precision.accumulate
    }
}
