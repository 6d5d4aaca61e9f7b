//! The gradient norm of a stage, and the update of its parameters.

use std::ops::Range;

use phalanx_collectives::CollectiveError;
use phalanx_plan::ZeroStage;
use phalanx_tensor::{Category, DType, Device, DeviceError, Tensor, View, ViewMut};

use super::floats::Numbers;
use super::rules::Tensors;
use super::states::Updated;
use super::visits::Tile;
use super::{Map, Zero};

/// Elements that are read at a time for host memory.
const WINDOW: usize = 1 << 20;

/// The numbers of one update: its number, from 1, and the learning rate.
#[derive(Clone, Copy)]
pub(super) struct Step {
    pub(super) number: u64,
    pub(super) lr: f32,
    /// False after a gradient that is not finite, in updates within backward: tiles are still moved, as planned, but no parameter
    /// changes (rounded ones are written again).
    pub(super) applies: bool,
}

/// The elements of a chunk that this rank updates: all of them under stage 0, otherwise its shard.
pub(super) fn stepped(map: &Map, stage: ZeroStage, chunk: usize) -> Range<usize> {
    match stage {
        ZeroStage::Zero => map.whole(chunk),
        _ => map.shard(chunk),
    }
}

/// Rounds master weights that have not changed: the place of `rounded` may be one that only an update fills.
pub(super) fn write_again(device: &Device, parameters: ViewMut, rounded: Option<ViewMut>) {
    if let Some(rounded) = rounded {
        device.convert(parameters.as_view(), rounded);
    }
}

impl Zero {
    /// Writes this stage's sums of squares into `sums` `[parameters * slots]` f64: the sum of parameter p of the
    /// model is element `p * slots + slot`. Each rank of the data axis squares its own blocks of 4,096 elements; the
    /// blocks of a parameter are summed along one tree, so that no layout changes a bit. Elements of parameters that
    /// another rank counts do not change.
    ///
    /// # Errors
    /// When the all_reduce of the block sums fails.
    pub fn squares(&mut self, sums: &mut Tensor, slots: usize, slot: usize) -> Result<(), CollectiveError> {
        if self.map.trained == 0 {
            return Ok(());
        }
        let Zero { device, map, states, gradients, squares, options, parameters, .. } = self;
        let (away, here): (Vec<usize>, Vec<usize>) =
            squares.begin_rest(device).into_iter().partition(|c| states.has_gradients(*c));
        for c in here {
            let shard = map.shard(c);
            squares.count(device, map, c, gradients.summed(parameters, map, c, shard));
        }
        let first = |c| stepped(map, options.stage, c).start;
        let shard = |c| (c, map.shard(c).start - first(c)..map.shard(c).end - first(c));
        states.show_gradients(away.into_iter().map(shard).collect(), |c, part, gradient| {
            squares.add(device, map, c, first(c) + part.start..first(c) + part.end, gradient);
        })?;
        let squares = self.squares.blocks.take().expect("taken only here, and put back below");
        let squares = self.group.all_reduce(squares).wait()?;
        if self.group.rank() == 0 {
            let answers = |p: usize| self.map.answers[p] && self.map.is_trained(p);
            for (p, number) in self.map.numbers.iter().enumerate().filter(|(p, _)| answers(*p)) {
                let blocks = self.map.layout.blocks_of_parameter(p);
                let blocks = squares.view().range(blocks.start as usize..blocks.end as usize);
                self.device.record_counted(*number, self.map.layout.placed[p].elements);
                let place = number * slots + slot;
                self.device.tree_sum(blocks, sums.view_mut().range(place..place + 1));
            }
        }
        self.squares.blocks = Some(squares);
        Ok(())
    }

    /// Calls `see` with the summed gradients of this rank's shards, on the device: the parameter of the stage's network, the
    /// elements of this rank's part of it, and the gradient, which is still multiplied by the loss scale. Over the data axis
    /// each element comes once.
    ///
    /// # Errors
    /// When gradients lie outside of device memory, and the device failed.
    pub fn reduced_gradients(
        &mut self,
        mut see: impl FnMut(usize, Range<u64>, View),
    ) -> Result<(), CollectiveError> {
        let Zero { map, states, gradients, options, parameters, .. } = self;
        let mut of_chunk = |c: usize, range: Range<usize>, gradient: View| {
            for segment in map.layout.segments(c, range.start as u64..range.end as u64) {
                let inside = segment.in_chunk.start as usize - range.start
                    ..segment.in_chunk.end as usize - range.start;
                see(segment.parameter, segment.in_parameter, gradient.range(inside));
            }
        };
        let first = |c| stepped(map, options.stage, c).start;
        for c in 0..map.trained {
            let shard = map.shard(c);
            match states.has_gradients(c) {
                true => {
                    let part = shard.start - first(c)..shard.end - first(c);
                    states.show_gradients(vec![(c, part)], |c, part, gradient| {
                        of_chunk(c, first(c) + part.start..first(c) + part.end, gradient);
                    })?;
                }
                false => of_chunk(c, shard.clone(), gradients.summed(parameters, map, c, shard)),
            }
        }
        Ok(())
    }

    /// Calls `see` with the summed gradients of this rank's shards as f32 in host memory, after a step: as
    /// [`Zero::reduced_gradients`], in pieces of any length. With delayed updates they belong to the update that runs; those of
    /// the step before are shown.
    ///
    /// # Errors
    /// When the device failed.
    ///
    /// # Panics
    /// With [`Options::gradients_in_place`](super::Options::gradients_in_place) and
    /// [`Options::update_in_backward`](super::Options::update_in_backward): the update overwrites or frees them.
    pub fn read_gradients(&self, mut see: impl FnMut(usize, Range<u64>, &[f32])) -> Result<(), DeviceError> {
        let Zero { device, map, states, gradients, parameters, .. } = self;
        for c in 0..map.trained {
            assert!(gradients.are_kept(c), "the update has used up the gradients of chunk {c}");
            let first = stepped(map, self.options.stage, c).start;
            let shard = map.shard(c);
            for start in shard.clone().step_by(WINDOW) {
                let window = start..(start + WINDOW).min(shard.end);
                let pieces = match states.has_gradients(c) {
                    true => states.gradient_pieces((c, start - first..window.end - first))?,
                    false => {
                        let here = Numbers::Device(gradients.summed(parameters, map, c, window.clone()));
                        vec![(start - first, here.read(device)?)]
                    }
                };
                for (start, piece) in pieces {
                    let range = first + start..first + start + piece.len();
                    for segment in map.layout.segments(c, range.start as u64..range.end as u64) {
                        let inside = segment.in_chunk.start as usize - range.start
                            ..segment.in_chunk.end as usize - range.start;
                        see(segment.parameter, segment.in_parameter, &piece[inside]);
                    }
                }
            }
        }
        Ok(())
    }

    /// Updates the parameters that this rank owns, chunk by chunk. Under stages 1 and 2 each chunk is sent to the
    /// other ranks while the next is computed. `number` counts updates from 1; gradients are multiplied by `factor`
    /// `[1]` first.
    ///
    /// # Errors
    /// When publishing fails, or a copy of optimizer states.
    pub fn update(&mut self, number: u64, lr: f32, factor: View) -> Result<(), CollectiveError> {
        let step = Step { number, lr, applies: true };
        if self.delayed.is_some() {
            return self.update_delayed(step, factor);
        }
        let mut on_host = self.begin_on_host(factor)?;
        self.read_first_tiles(on_host.as_mut());
        for c in 0..self.map.trained {
            self.update_chunk(c, step, factor, on_host.as_mut())?;
        }
        self.end_update(on_host)
    }

    /// Starts to send this rank's updated part of a chunk to the other ranks, where they have all of it.
    pub(super) fn publish_updated(&mut self, c: usize) -> Result<(), CollectiveError> {
        match self.options.stage {
            ZeroStage::Three if !self.map.residence.is_whole(c) => Ok(()),
            ZeroStage::One | ZeroStage::Two | ZeroStage::Three => {
                self.parameters.publish(&*self.group, c, self.options.overlap)
            }
            ZeroStage::Zero => Ok(()),
        }
    }

    /// Updates elements `tile` of this rank's part of a chunk, with its gradient or with one that is `given` for these elements.
    pub(super) fn update_tile(
        &mut self,
        at: Tile,
        tile: Range<usize>,
        step: Step,
        factor: View,
        given: Option<View>,
    ) {
        let c = at.0;
        let first = stepped(&self.map, self.options.stage, c).start;
        let range = first + tile.start..first + tile.end;
        let in_place = self.gradients_from_place(c, &range);
        let mut scaled = self.rules.scaled_elements_max(&self.map, c, &range).map(|elements| {
            self.device.alloc(DType::F32, [elements], Category::Workspace, "update.scaled_gradient")
        });
        for piece in self.rules.pieces(&self.map, c, &range) {
            let elements = self.rules.scaled_elements(&piece);
            let inside = piece.in_chunk;
            let local = inside.start - first..inside.end - first;
            let Updated { states, master, parameters, gradient } = self.states.updated(at, &local);
            let of_range = inside.start - range.start..inside.end - range.start;
            let window = given.or(in_place.as_ref().map(|window| window.view()));
            let gradient = gradient.unwrap_or_else(|| match window {
                Some(window) => window.range(of_range),
                None => self.gradients.summed_in_buffer(&self.map, c, inside.clone()),
            });
            let own = parameters.unwrap_or_else(|| self.parameters.part_mut(&self.map, c, &inside));
            let (p, rounded) = match master {
                Some(master) => (master, Some(own)),
                None => (own, None),
            };
            if !step.applies {
                write_again(&self.device, p, rounded);
                continue;
            }
            let scaled =
                scaled.as_mut().zip(elements).map(|(all, elements)| all.view_mut().range(0..elements));
            let tensors = Tensors { parameters: p, rounded, gradient, factor, scaled, states };
            let update = self.rules.update(piece.rule, (step.number, step.lr), tensors);
            self.optimizer.apply(&self.device, update);
        }
    }
}
