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
//! Buffers have the accumulation type. When gradients are communicated in another type, a copy is rounded to that
//! type and reduced, and the result is written or added to the sum. This happens on one rank too, so that the result
//! depends on the types and not on the number of ranks.

use std::collections::VecDeque;
use std::ops::Range;

use phalanx_collectives::{CollectiveError, Group, Pending};
use phalanx_layers::Gradient;
use phalanx_plan::{Precision, Stage};
use phalanx_tensor::{Category, DType, Device, Tensor, View, ViewMut};

use super::{Map, Options};

/// Largest number of reductions in flight; each holds a whole chunk.
const IN_FLIGHT: usize = 2;

/// Which buffers a chunk of gradients has.
#[derive(Clone, Copy, PartialEq, Eq)]
enum GradientBuffering {
    /// A whole buffer, reduced in place.
    InPlace,
    /// A whole buffer and a shard, both kept.
    Pair,
    /// A shard that is kept, and a whole buffer until it is reduced.
    Transient,
}

/// The buffers of a chunk that no collective uses.
enum GradientBuffers {
    /// A whole buffer (in place).
    Whole(Tensor),
    /// This rank's shard of the sum (transient, between uses).
    Shard(Tensor),
    /// A whole buffer that layers write, and this rank's shard of the sum.
    Both { whole: Tensor, shard: Tensor },
}

/// One chunk of gradients.
enum Chunk {
    /// No collective uses it.
    Here(GradientBuffers),
    /// A whole buffer is being reduced in place.
    ReducingWhole(Pending<Tensor>),
    /// A whole buffer is being reduced into this rank's shard.
    ReducingBoth(Pending<(Tensor, Tensor)>),
    /// A copy in the communication type is being reduced.
    ReducingCopy(Box<ReducingCopy>),
    /// Placeholder while a function changes the state.
    Moving,
}

/// A copy that is being reduced in place, and the buffers that its sum is written or added to.
struct ReducingCopy {
    copy: Pending<Tensor>,
    held: GradientBuffers,
    accumulate: bool,
}

pub(super) struct GradientChunks {
    buffering: GradientBuffering,
    stage: Stage,
    overlap: bool,
    precision: Precision,
    chunks: Vec<Chunk>,
    /// For each parameter: whether this micro-batch has written its gradient.
    written: Vec<bool>,
    /// For each chunk: the number of blocks that write to it in a micro-batch.
    writers: Vec<usize>,
    /// For each chunk: the number of blocks that have not yet written to it in its current micro-batch.
    awaited: Vec<usize>,
    /// For each chunk: the number of micro-batches of this step that all its blocks have written.
    done: Vec<usize>,
    micro_batches: usize,
    /// Chunks that are being reduced, oldest first.
    in_flight: VecDeque<usize>,
}

impl GradientChunks {
    pub(super) fn new(device: &Device, map: &Map, options: &Options) -> GradientChunks {
        let Options { stage, overlap, precision, .. } = *options;
        let several = options.micro_batches > 1;
        // With one rank and equal types, nothing is communicated or rounded, so micro-batches accumulate in one buffer.
        let alone = map.world == 1 && precision.communicate == precision.accumulate;
        let buffering = match stage {
            _ if alone || (several && options.defer) => GradientBuffering::InPlace,
            Stage::Zero | Stage::One if several => GradientBuffering::Pair,
            Stage::Zero | Stage::One => GradientBuffering::InPlace,
            Stage::Two | Stage::Three => GradientBuffering::Transient,
        };
        let alloc =
            |elements| device.alloc(precision.accumulate, [elements], Category::Gradients, "gradient_chunk");
        let held = |c: usize| match buffering {
            GradientBuffering::InPlace => GradientBuffers::Whole(alloc(map.whole(c).len())),
            GradientBuffering::Pair => {
                GradientBuffers::Both { whole: alloc(map.whole(c).len()), shard: alloc(map.shard(c).len()) }
            }
            GradientBuffering::Transient => GradientBuffers::Shard(alloc(map.shard(c).len())),
        };
        let mut writers = vec![0; map.chunk_count()];
        map.chunks.iter().flatten().for_each(|c| writers[*c] += 1);
        GradientChunks {
            buffering,
            stage,
            overlap,
            precision,
            chunks: (0..map.chunk_count()).map(|c| Chunk::Here(held(c))).collect(),
            written: vec![false; map.shapes.len()],
            awaited: writers.clone(),
            writers,
            done: vec![0; map.chunk_count()],
            micro_batches: options.micro_batches,
            in_flight: VecDeque::new(),
        }
    }

    /// Starts a step: every chunk waits for its first micro-batch.
    pub(super) fn begin(&mut self, device: &Device) {
        for chunk in &self.chunks {
            if let Chunk::Here(GradientBuffers::Whole(whole) | GradientBuffers::Both { whole, .. }) = chunk {
                device.forget_placements(whole.view());
            }
        }
        self.awaited.clone_from(&self.writers);
        self.done.fill(0);
    }

    pub(super) fn open(&mut self, device: &Device, map: &Map, block: usize) -> Result<(), CollectiveError> {
        for c in &map.chunks[block] {
            self.arrive(device, map, *c)?;
            let accumulate = self.precision.accumulate;
            let slot = &mut self.chunks[*c];
            *slot = match std::mem::replace(slot, Chunk::Moving) {
                Chunk::Here(GradientBuffers::Shard(shard)) => {
                    let elements = map.whole(*c).len();
                    let whole =
                        device.alloc(accumulate, [elements], Category::Communication, "gradient_bucket");
                    Chunk::Here(GradientBuffers::Both { whole, shard })
                }
                here => here,
            };
        }
        Ok(())
    }

    pub(super) fn slots(&mut self, map: &Map, block: usize) -> Vec<Gradient<'_>> {
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
            let flag = flags[*p].take().expect("a block uses each parameter once");
            Gradient::new(view.expect("every parameter lies in a chunk"), flag)
        };
        uses.iter().zip(views).map(slot).collect()
    }

    /// The gradients that the layer of a block has written and that are not reduced yet, each with its index in the
    /// uses of the block.
    pub(super) fn written(&self, map: &Map, block: usize) -> Vec<(usize, View<'_>)> {
        let view = |(index, p): (usize, &usize)| {
            let c = map.layout.placed[*p].chunk;
            let Chunk::Here(GradientBuffers::Whole(whole) | GradientBuffers::Both { whole, .. }) =
                &self.chunks[c]
            else {
                panic!("chunk {c} holds no gradients")
            };
            (index, whole.view().range(map.range(*p)).reshape(map.shapes[*p]))
        };
        map.uses[block].iter().enumerate().filter(|(_, p)| self.written[**p]).map(view).collect()
    }

    pub(super) fn reduce(
        &mut self,
        device: &Device,
        group: &dyn Group,
        map: &Map,
        block: usize,
    ) -> Result<(), CollectiveError> {
        for c in &map.chunks[block] {
            self.awaited[*c] -= 1;
            if self.awaited[*c] > 0 {
                continue;
            }
            self.awaited[*c] = self.writers[*c];
            let first = self.done[*c] == 0;
            self.done[*c] += 1;
            if self.buffering == GradientBuffering::InPlace && self.done[*c] < self.micro_batches {
                continue;
            }
            self.clear_unwritten(device, map, *c);
            self.start(device, group, *c, first);
            self.in_flight.push_back(*c);
            let allowed = if self.overlap { IN_FLIGHT } else { 0 };
            while self.in_flight.len() > allowed {
                let oldest = self.in_flight.pop_front().expect("not empty");
                self.arrive(device, map, oldest)?;
            }
        }
        Ok(())
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

    /// Starts the reduction of a micro-batch; `first` says whether it is the first of the step.
    fn start(&mut self, device: &Device, group: &dyn Group, c: usize, first: bool) {
        let Chunk::Here(held) = std::mem::replace(&mut self.chunks[c], Chunk::Moving) else {
            panic!("chunk {c} holds no gradients")
        };
        self.chunks[c] = match held {
            held if self.precision.communicate != self.precision.accumulate => {
                self.start_copy(device, group, held, first)
            }
            GradientBuffers::Whole(whole) if self.stage == Stage::Zero => {
                Chunk::ReducingWhole(group.all_reduce(whole))
            }
            GradientBuffers::Whole(whole) => Chunk::ReducingWhole(group.reduce_scatter_in_place(whole)),
            GradientBuffers::Both { whole, shard } => {
                Chunk::ReducingBoth(group.reduce_scatter(whole, shard, !first))
            }
            GradientBuffers::Shard(_) => panic!("chunk {c} holds no gradients"),
        };
    }

    /// Rounds the gradients to the communication type and starts to reduce the copy. A transient buffer is freed.
    fn start_copy(&self, device: &Device, group: &dyn Group, held: GradientBuffers, first: bool) -> Chunk {
        let (GradientBuffers::Whole(whole) | GradientBuffers::Both { whole, .. }) = &held else {
            panic!("no gradients are held")
        };
        let communicate = self.precision.communicate;
        let mut copy = device.alloc(communicate, whole.shape(), Category::Communication, "gradient_copy");
        device.convert(whole.view(), copy.view_mut());
        let held = match held {
            GradientBuffers::Both { shard, .. } if self.buffering == GradientBuffering::Transient => {
                GradientBuffers::Shard(shard)
            }
            held => held,
        };
        let copy = match held {
            GradientBuffers::Whole(_) if self.stage == Stage::Zero => group.all_reduce(copy),
            _ => group.reduce_scatter_in_place(copy),
        };
        let accumulate = !first && self.buffering != GradientBuffering::InPlace;
        Chunk::ReducingCopy(Box::new(ReducingCopy { copy, held, accumulate }))
    }

    /// Waits for the reduction of a chunk. A transient buffer is freed.
    fn arrive(&mut self, device: &Device, map: &Map, c: usize) -> Result<(), CollectiveError> {
        let slot = &mut self.chunks[c];
        *slot = match std::mem::replace(slot, Chunk::Moving) {
            Chunk::ReducingWhole(pending) => Chunk::Here(GradientBuffers::Whole(pending.wait()?)),
            Chunk::ReducingBoth(pending) => {
                let (whole, shard) = pending.wait()?;
                let transient = self.buffering == GradientBuffering::Transient;
                Chunk::Here(if transient {
                    GradientBuffers::Shard(shard)
                } else {
                    GradientBuffers::Both { whole, shard }
                })
            }
            Chunk::ReducingCopy(reducing) => {
                let ReducingCopy { copy, mut held, accumulate } = *reducing;
                let copy = copy.wait()?;
                let (part, sum) = match &mut held {
                    GradientBuffers::Whole(whole) if self.stage == Stage::Zero => {
                        (map.whole(c), whole.view_mut())
                    }
                    GradientBuffers::Whole(whole) => (map.shard(c), whole.view_mut().range(map.shard(c))),
                    GradientBuffers::Shard(shard) | GradientBuffers::Both { shard, .. } => {
                        (map.shard(c), shard.view_mut())
                    }
                };
                let arrived = copy.view().range(part);
                if accumulate {
                    device.add(arrived, sum)
                } else {
                    device.convert(arrived, sum)
                }
                Chunk::Here(held)
            }
            here => here,
        };
        Ok(())
    }

    /// Waits for all reductions; under stage 0 every rank then has the whole sum.
    pub(super) fn finish(
        &mut self,
        device: &Device,
        group: &dyn Group,
        map: &Map,
    ) -> Result<(), CollectiveError> {
        self.in_flight.clear();
        for c in 0..self.chunks.len() {
            self.arrive(device, map, c)?;
            if self.buffering == GradientBuffering::Pair && self.stage == Stage::Zero {
                let slot = &mut self.chunks[c];
                let Chunk::Here(GradientBuffers::Both { mut whole, shard }) =
                    std::mem::replace(slot, Chunk::Moving)
                else {
                    panic!("chunk {c} holds no sum")
                };
                device.copy(shard.view(), whole.view_mut().range(map.shard(c)));
                let whole = group.all_gather_in_place(whole).wait()?;
                self.chunks[c] = Chunk::Here(GradientBuffers::Both { whole, shard });
            }
        }
        Ok(())
    }

    /// The summed gradient of elements `range` of chunk `c`: elements of this rank's shard, or under stage 0 any
    /// elements.
    pub(super) fn summed(&self, map: &Map, c: usize, range: Range<usize>) -> View<'_> {
        let Chunk::Here(held) = &self.chunks[c] else {
            panic!("gradients of chunk {c} are still being reduced")
        };
        let (view, start) = match held {
            GradientBuffers::Whole(whole) => (whole.view(), 0),
            GradientBuffers::Both { whole, .. } if self.stage == Stage::Zero => (whole.view(), 0),
            GradientBuffers::Shard(shard) | GradientBuffers::Both { shard, .. } => {
                (shard.view(), map.shard(c).start)
            }
        };
        view.range(range.start - start..range.end - start)
    }

    /// The mutable form of [`GradientChunks::summed`].
    pub(super) fn summed_mut(&mut self, map: &Map, c: usize, range: Range<usize>) -> ViewMut<'_> {
        let stage = self.stage;
        let Chunk::Here(held) = &mut self.chunks[c] else {
            panic!("gradients of chunk {c} are still being reduced")
        };
        let (view, start) = match held {
            GradientBuffers::Whole(whole) => (whole.view_mut(), 0),
            GradientBuffers::Both { whole, .. } if stage == Stage::Zero => (whole.view_mut(), 0),
            GradientBuffers::Shard(shard) | GradientBuffers::Both { shard, .. } => {
                (shard.view_mut(), map.shard(c).start)
            }
        };
        view.range(range.start - start..range.end - start)
    }

    /// The accumulation type.
    pub(super) fn accumulate(&self) -> DType {
        self.precision.accumulate
    }
}

impl Chunk {
    /// The whole buffer of chunk `c`, mutable.
    fn whole_mut(&mut self, c: usize) -> ViewMut<'_> {
        match self {
            Chunk::Here(GradientBuffers::Whole(whole) | GradientBuffers::Both { whole, .. }) => {
                whole.view_mut()
            }
            _ => panic!("gradients of chunk {c} were not opened"),
        }
    }
}
