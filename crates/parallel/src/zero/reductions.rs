//! Reductions of gradients over the data axis: their start, and what becomes of the sum when it has arrived.

use std::ops::Range;

use phalanx_collectives::CollectiveError;
use phalanx_plan::ZeroStage;
use phalanx_tensor::{Category, Device, Tensor};

use super::gradient_buffers::{Chunk, GradientBuffering, GradientBuffers, GradientPlace, ReducingCopy};
use super::gradients::{GradientChunks, PARTIAL, Surroundings, adding};
use super::update;

impl GradientChunks {
    /// With sums by a tree, adds the reduced gradients of a micro-batch to their neighbours.
    fn settled(&mut self, device: &Device, c: usize, reduced: GradientBuffers) -> GradientBuffers {
        match (reduced, &mut self.partial) {
            (GradientBuffers::Shard(shard), Some(partial)) => {
                GradientBuffers::Shard(partial[c].settle(shard, adding(device)))
            }
            (GradientBuffers::Both { whole, shard }, Some(partial)) => {
                GradientBuffers::Both { whole, shard: partial[c].settle(shard, adding(device)) }
            }
            (reduced, _) => reduced,
        }
    }

    /// Starts the reduction of a micro-batch, whose result is added to that of earlier ones if it `adds`.
    pub(super) fn start(
        &mut self,
        cx: &mut Surroundings,
        c: usize,
        adds: bool,
    ) -> Result<(), CollectiveError> {
        let Chunk::Here(held) = std::mem::replace(&mut self.chunks[c], Chunk::Moving) else {
            panic!("chunk {c} holds no gradients")
        };
        let held = match held {
            GradientBuffers::Bucket { whole, sum } => {
                let shard = match sum {
                    Some(arriving) => cx.states.fetched_gradients(c, *arriving)?,
                    None => self.shard_window(cx, c),
                };
                GradientBuffers::Both { whole, shard }
            }
            held => held,
        };
        let (held, adds) = match (held, &mut self.partial) {
            (GradientBuffers::Both { whole, shard }, Some(partial)) => {
                let (dtype, elements) = (shard.dtype(), shard.shape());
                let new = || cx.device.alloc(dtype, elements, Category::Gradients, PARTIAL);
                let (shard, adds) = partial[c].target(self.micro_batch, shard, new);
                (GradientBuffers::Both { whole, shard }, adds)
            }
            (held, _) => (held, adds),
        };
        self.chunks[c] = match held {
            held if self.precision.communicate != self.precision.accumulate => {
                self.start_copy(cx, held, (c, adds))
            }
            GradientBuffers::Whole(whole) if self.stage == ZeroStage::Zero => {
                Chunk::ReducingWhole(cx.group.all_reduce(whole))
            }
            GradientBuffers::Whole(whole) => Chunk::ReducingWhole(cx.group.reduce_scatter_in_place(whole)),
            GradientBuffers::Both { whole, shard } => {
                Chunk::ReducingBoth(cx.group.reduce_scatter(whole, shard, adds))
            }
            _ => panic!("chunk {c} holds no gradients"),
        };
        Ok(())
    }

    /// Device memory for the shard of a chunk that stays elsewhere.
    fn shard_window(&self, cx: &Surroundings, c: usize) -> Tensor {
        let elements = cx.map.shard(c).len();
        cx.device.alloc(self.precision.accumulate, [elements], Category::Workspace, "visitor")
    }

    /// Rounds the gradients to the communication type and starts to reduce the copy. A transient buffer is freed.
    fn start_copy(&self, cx: &Surroundings, held: GradientBuffers, (c, adds): (usize, bool)) -> Chunk {
        let Surroundings { device, group, .. } = cx;
        let (GradientBuffers::Whole(whole) | GradientBuffers::Both { whole, .. }) = &held else {
            panic!("no gradients are held")
        };
        let communicate = self.precision.communicate;
        let mut copy = device.alloc(communicate, whole.shape(), Category::Communication, "gradient_copy");
        device.convert(whole.view(), copy.view_mut());
        let copy = match held {
            GradientBuffers::Whole(_) if self.stage == ZeroStage::Zero => group.all_reduce(copy),
            _ => group.reduce_scatter_in_place(copy),
        };
        let held = match held {
            GradientBuffers::Both { shard, .. } if self.is_transient(c) => GradientBuffers::Shard(shard),
            GradientBuffers::Whole(_) if self.is_in_parameters(c) => GradientBuffers::Away,
            held => held,
        };
        let accumulate = adds && self.buffering != GradientBuffering::InPlace;
        Chunk::ReducingCopy(Box::new(ReducingCopy { copy, held, accumulate }))
    }

    /// Waits for the reduction of a chunk. A transient buffer is freed, and what stays elsewhere leaves.
    pub(super) fn arrive(&mut self, cx: &mut Surroundings, c: usize) -> Result<(), CollectiveError> {
        let reduced = match std::mem::replace(&mut self.chunks[c], Chunk::Moving) {
            Chunk::ReducingWhole(pending) => GradientBuffers::Whole(pending.wait()?),
            Chunk::ReducingBoth(pending) => {
                let (whole, shard) = pending.wait()?;
                if self.is_transient(c) {
                    GradientBuffers::Shard(shard)
                } else {
                    GradientBuffers::Both { whole, shard }
                }
            }
            Chunk::ReducingCopy(reducing) => self.add_copy(cx, *reducing, c)?,
            here => {
                self.chunks[c] = here;
                return Ok(());
            }
        };
        self.in_flight.retain(|other| *other != c);
        let reduced = self.settled(cx.device, c, reduced);
        let stays = self.partial.is_some() && self.done[c] < self.micro_batches;
        self.chunks[c] = Chunk::Here(match self.places[c] {
            GradientPlace::Buffer => reduced,
            GradientPlace::Elsewhere if stays => reduced,
            GradientPlace::Elsewhere => self.put_away(cx, reduced, c)?,
            GradientPlace::Parameters => self.put_over_parameters(cx, reduced, c),
            GradientPlace::Update => {
                self.reduced.push_back(c);
                reduced
            }
        });
        Ok(())
    }

    /// A sum overwrites the parameters of this rank. A reduced copy has done so when it was converted.
    fn put_over_parameters(
        &self,
        cx: &mut Surroundings,
        reduced: GradientBuffers,
        c: usize,
    ) -> GradientBuffers {
        if let GradientBuffers::Whole(whole) = reduced {
            let stepped = update::stepped(cx.map, self.stage, c);
            let place = cx.parameters.part_mut(cx.map, c, &stepped);
            cx.device.copy(whole.view().range(stepped), place);
        }
        GradientBuffers::Away
    }

    /// Waits for a reduced copy and writes or adds it to the sum.
    fn add_copy(
        &self,
        cx: &mut Surroundings,
        reducing: ReducingCopy,
        c: usize,
    ) -> Result<GradientBuffers, CollectiveError> {
        let ReducingCopy { copy, mut held, accumulate } = reducing;
        let copy = copy.wait()?;
        let (part, sum) = match &mut held {
            GradientBuffers::Whole(whole) if self.stage == ZeroStage::Zero => {
                (cx.map.whole(c), whole.view_mut())
            }
            GradientBuffers::Whole(whole) => (cx.map.shard(c), whole.view_mut().range(cx.map.shard(c))),
            GradientBuffers::Shard(shard) | GradientBuffers::Both { shard, .. } => {
                (cx.map.shard(c), shard.view_mut())
            }
            GradientBuffers::Away if self.is_in_parameters(c) => {
                let stepped = update::stepped(cx.map, self.stage, c);
                (stepped.clone(), cx.parameters.part_mut(cx.map, c, &stepped))
            }
            _ => panic!("chunk {c} holds no sum"),
        };
        let arrived = copy.view().range(part);
        if accumulate {
            cx.device.add(arrived, sum)
        } else {
            cx.device.convert(arrived, sum)
        }
        Ok(held)
    }

    /// Gradients that were reduced leave for the memory in which they stay. The last ones of a step are counted in the norm
    /// before, if nothing is added to them later.
    fn put_away(
        &self,
        cx: &mut Surroundings,
        reduced: GradientBuffers,
        c: usize,
    ) -> Result<GradientBuffers, CollectiveError> {
        let is_last = self.done[c] == self.micro_batches;
        let (buffer, start) = match reduced {
            GradientBuffers::Whole(whole) => (whole, 0),
            GradientBuffers::Shard(shard) if is_last && self.stage == ZeroStage::Zero => {
                let mut whole = self.bucket(cx, c);
                cx.device.copy(shard.view(), whole.view_mut().range(cx.map.shard(c)));
                (cx.group.all_gather_in_place(whole).wait()?, 0)
            }
            GradientBuffers::Shard(shard) => (shard, cx.map.shard(c).start),
            _ => panic!("chunk {c} holds no sum"),
        };
        let part = |range: Range<usize>| range.start - start..range.end - start;
        if is_last && cx.map.is_summed_over_data_alone(c) {
            let shard = buffer.view().range(part(cx.map.shard(c)));
            cx.squares.count(cx.device, cx.map, c, shard);
        }
        let stays = if is_last { update::stepped(cx.map, self.stage, c) } else { cx.map.shard(c) };
        cx.states.send_gradients(c, buffer, part(stays))?;
        Ok(GradientBuffers::Away)
    }
}
