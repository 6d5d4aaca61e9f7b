//! Gradients in chunks, from the layers that write them to the ranks that own them.
//!
//! Three ways, by stage and accumulation:
//! - *in place*: a whole buffer stays; after the last micro-batch it is reduced where it lies
//!   (stages 0 and 1 with one micro-batch, or `defer`);
//! - *pair*: a whole buffer stays, and a shard that gathers the sum over micro-batches (stages 0 and 1,
//!   several micro-batches, each reduced);
//! - *transient*: the whole buffer exists from the first gradient of a chunk to its reduction, the shard
//!   stays (stages 2 and 3).

use std::collections::VecDeque;

use phalanx_collectives::{CollectiveError, Group, Pending};
use phalanx_layers::Gradient;
use phalanx_plan::Stage;
use phalanx_tensor::{Category, DType, Device, Tensor, View};

use super::{Map, Options};

/// Reductions under way at once; each holds a whole chunk.
const IN_FLIGHT: usize = 2;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    InPlace,
    Pair,
    Transient,
}

/// One chunk of gradients.
enum Chunk {
    /// A whole buffer (in place).
    Whole(Tensor),
    /// This rank's part of the sum (transient, between uses).
    Shard(Tensor),
    /// A whole buffer being written, and this rank's part of the sum.
    Both { whole: Tensor, shard: Tensor },
    /// A whole buffer being reduced where it lies.
    ReducingWhole(Pending<Tensor>),
    /// A whole buffer being reduced into this rank's part.
    ReducingBoth(Pending<(Tensor, Tensor)>),
    /// Between two states, within one function.
    Moving,
}

pub(super) struct GradientChunks {
    way: Way,
    chunks: Vec<Chunk>,
    /// By parameter: whether this micro-batch has written its gradient.
    written: Vec<bool>,
    /// By chunk: blocks that will still write to it in this micro-batch.
    awaited: Vec<usize>,
    /// Chunks being reduced, oldest first.
    in_flight: VecDeque<usize>,
    first: bool,
    last: bool,
}

impl GradientChunks {
    pub(super) fn new(device: &Device, map: &Map, options: &Options) -> GradientChunks {
        let several = options.micro_batches > 1;
        let way = match options.stage {
            _ if several && options.defer => Way::InPlace,
            Stage::Zero | Stage::One if several => Way::Pair,
            Stage::Zero | Stage::One => Way::InPlace,
            Stage::Two | Stage::Three => Way::Transient,
        };
        let alloc = |elements| device.alloc(DType::F32, [elements], Category::Gradients, "gradient_chunk");
        let chunk = |c: usize| match way {
            Way::InPlace => Chunk::Whole(alloc(map.whole(c).len())),
            Way::Pair => Chunk::Both { whole: alloc(map.whole(c).len()), shard: alloc(map.shard(c).len()) },
            Way::Transient => Chunk::Shard(alloc(map.shard(c).len())),
        };
        GradientChunks {
            way,
            chunks: (0..map.chunk_count()).map(chunk).collect(),
            written: vec![false; map.shapes.len()],
            awaited: vec![0; map.chunk_count()],
            in_flight: VecDeque::new(),
            first: true,
            last: true,
        }
    }

    pub(super) fn begin_micro_batch(&mut self, map: &Map, index: usize, micro_batches: usize) {
        self.first = index == 0;
        self.last = index + 1 == micro_batches;
        self.awaited.fill(0);
        for c in map.chunks.iter().flatten() {
            self.awaited[*c] += 1;
        }
    }

    pub(super) fn open(&mut self, device: &Device, map: &Map, block: usize) -> Result<(), CollectiveError> {
        for c in &map.chunks[block] {
            self.arrive(*c)?;
            let slot = &mut self.chunks[*c];
            *slot = match std::mem::replace(slot, Chunk::Moving) {
                Chunk::Shard(shard) => {
                    let elements = map.whole(*c).len();
                    let whole =
                        device.alloc(DType::F32, [elements], Category::Communication, "gradient_bucket");
                    Chunk::Both { whole, shard }
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
            let (Chunk::Whole(whole) | Chunk::Both { whole, .. }) = chunk else {
                panic!("gradients of block {block} were not opened")
            };
            let mut inside: Vec<usize> =
                (0..uses.len()).filter(|i| map.layout.placed[uses[*i]].chunk == c).collect();
            inside.sort_by_key(|i| map.range(uses[*i]).start);
            let pieces = inside.iter().map(|i| (map.range(uses[*i]), map.shapes[uses[*i]]));
            for (view, i) in whole.view_mut().into_pieces(pieces).into_iter().zip(&inside) {
                views[*i] = Some(view);
            }
        }
        let mut flags: Vec<Option<&mut bool>> = self.written.iter_mut().map(Some).collect();
        let slot = |(p, view): (&usize, Option<_>)| {
            let flag = flags[*p].take().expect("a block uses a parameter once");
            Gradient::new(view.expect("every parameter lies in a chunk"), flag)
        };
        uses.iter().zip(views).map(slot).collect()
    }

    pub(super) fn reduce(
        &mut self,
        device: &Device,
        group: &dyn Group,
        map: &Map,
        options: &Options,
        block: usize,
    ) -> Result<(), CollectiveError> {
        for c in &map.chunks[block] {
            self.awaited[*c] -= 1;
            if self.awaited[*c] > 0 || (self.way == Way::InPlace && !self.last) {
                continue;
            }
            self.clear_unwritten(device, map, *c);
            self.start(group, options.stage, *c);
            self.in_flight.push_back(*c);
            let allowed = if options.overlap { IN_FLIGHT } else { 0 };
            while self.in_flight.len() > allowed {
                let oldest = self.in_flight.pop_front().expect("not empty");
                self.arrive(oldest)?;
            }
        }
        Ok(())
    }

    /// A parameter that took no part has gradient zero; what its memory held is not a gradient.
    fn clear_unwritten(&mut self, device: &Device, map: &Map, c: usize) {
        let (Chunk::Whole(whole) | Chunk::Both { whole, .. }) = &mut self.chunks[c] else {
            panic!("chunk {c} holds no gradients")
        };
        for p in map.layout.parameters(c) {
            if !std::mem::replace(&mut self.written[p], false) {
                device.fill(whole.view_mut().range(map.range(p)), 0.0);
            }
        }
    }

    fn start(&mut self, group: &dyn Group, stage: Stage, c: usize) {
        let slot = &mut self.chunks[c];
        *slot = match std::mem::replace(slot, Chunk::Moving) {
            Chunk::Whole(whole) if stage == Stage::Zero => Chunk::ReducingWhole(group.all_reduce(whole)),
            Chunk::Whole(whole) => Chunk::ReducingWhole(group.reduce_scatter_in_place(whole)),
            Chunk::Both { whole, shard } => {
                Chunk::ReducingBoth(group.reduce_scatter(whole, shard, !self.first))
            }
            _ => panic!("chunk {c} holds no gradients"),
        };
    }

    /// Waits for the reduction of a chunk; a transient buffer ends here.
    fn arrive(&mut self, c: usize) -> Result<(), CollectiveError> {
        let slot = &mut self.chunks[c];
        *slot = match std::mem::replace(slot, Chunk::Moving) {
            Chunk::ReducingWhole(pending) => Chunk::Whole(pending.wait()?),
            Chunk::ReducingBoth(pending) => {
                let (whole, shard) = pending.wait()?;
                if self.way == Way::Transient { Chunk::Shard(shard) } else { Chunk::Both { whole, shard } }
            }
            here => here,
        };
        Ok(())
    }

    /// Everything has arrived; under stage 0 every rank has the whole sum.
    pub(super) fn finish(
        &mut self,
        device: &Device,
        group: &dyn Group,
        map: &Map,
        stage: Stage,
    ) -> Result<(), CollectiveError> {
        self.in_flight.clear();
        for c in 0..self.chunks.len() {
            self.arrive(c)?;
            if self.way == Way::Pair && stage == Stage::Zero {
                let slot = &mut self.chunks[c];
                let Chunk::Both { mut whole, shard } = std::mem::replace(slot, Chunk::Moving) else {
                    panic!("chunk {c} holds no sum")
                };
                device.copy(shard.view(), whole.view_mut().range(map.shard(c)));
                let whole = group.all_gather_in_place(whole).wait()?;
                self.chunks[c] = Chunk::Both { whole, shard };
            }
        }
        Ok(())
    }

    /// The summed gradient of elements `range` of chunk `c`: this rank's shard, or under stage 0 any.
    pub(super) fn summed(
        &self,
        map: &Map,
        stage: Stage,
        c: usize,
        range: std::ops::Range<usize>,
    ) -> View<'_> {
        let (view, start) = match &self.chunks[c] {
            Chunk::Whole(whole) => (whole.view(), 0),
            Chunk::Both { whole, .. } if stage == Stage::Zero => (whole.view(), 0),
            Chunk::Shard(shard) | Chunk::Both { shard, .. } => (shard.view(), map.shard(c).start),
            _ => panic!("gradients of chunk {c} are on their way"),
        };
        view.range(range.start - start..range.end - start)
    }
}
