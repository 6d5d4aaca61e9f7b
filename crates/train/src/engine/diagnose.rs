//! Finds the first tensor that is not finite.
//!
//! A step whose loss or gradient norm is not finite is not applied (or only in part, with updates within backward: then the gradient
//! that stopped them is named, and nothing of what follows is done). When no smaller loss scale is left to try, the
//! run ends, and first the ranks look for the reason: they run the same micro-batches again, on parameters that have
//! not changed, and count the elements of every tensor that are not finite. Tensors are numbered in the order in
//! which a single rank would compute them, micro-batch after micro-batch. The ranks exchange the number of the first
//! tensor that they found, and all of them name the first one, on the lowest rank.

use std::sync::Arc;

use phalanx_collectives::CollectiveError;
use phalanx_optim::LossScaling;
use phalanx_optim::loss_scale::{Dynamic, STATIC_PATIENCE};
use phalanx_parallel::Seen;
use phalanx_parallel::zero::NotFinite;
use phalanx_plan::trace::PhaseName;
use phalanx_tensor::{Category, DType, Device, DeviceError, Tensor, View};

use crate::engine::error::RunError;
use crate::engine::non_finite::{Found, NonFinite};
use crate::engine::rank::{Batch, Outline, Rank};
use crate::engine::step::Outcome;

/// Numbers that a rank sends about its search: the tensor, the number of its elements that are not finite, and the
/// number of its elements.
const TOLD: usize = 3;

/// A tensor of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum StepTensor {
    /// A tensor of forward or backward of a micro-batch.
    Walk { micro_batch: usize, seen: Seen },
    /// The sum over ranks of a parameter's gradient.
    Sum { parameter: usize },
}

/// The tensors of a step, numbered in the order in which a single rank computes them.
struct Numbering<'a> {
    outline: &'a Outline,
    micro_batches: usize,
    /// For each block: the number of its first tensor in the forward of the first micro-batch.
    forward: Vec<usize>,
    /// For each block: the number of its last parameter's gradient in the backward of the first micro-batch.
    backward: Vec<usize>,
    /// Tensors of a micro-batch.
    each: usize,
}

impl<'a> Numbering<'a> {
    fn new(outline: &'a Outline, micro_batches: usize) -> Numbering<'a> {
        let mut each = 0;
        // The parameters of a block, and what it computes.
        let mut number = |block: usize| {
            let first = each;
            each += outline.uses[block].len() + 1;
            first
        };
        let blocks = outline.uses.len();
        let forward = (0..blocks).map(&mut number).collect();
        let mut backward: Vec<usize> = (0..blocks).rev().map(&mut number).collect();
        backward.reverse();
        Numbering { outline, micro_batches, forward, backward, each }
    }

    fn number(&self, tensor: StepTensor) -> usize {
        let (micro_batch, seen) = match tensor {
            StepTensor::Walk { micro_batch, seen } => (micro_batch, seen),
            StepTensor::Sum { parameter } => return self.micro_batches * self.each + parameter,
        };
        let parameters = |block: usize| self.outline.uses[block].len();
        let within = match seen {
            Seen::Parameter { block, index } => self.forward[block] + index,
            Seen::Output { block } => self.forward[block] + parameters(block),
            Seen::Loss => self.backward[self.outline.uses.len() - 1] - 1,
            Seen::Gradient { block, index } => self.backward[block] + parameters(block) - 1 - index,
            Seen::InputGradient { block } => self.backward[block] + parameters(block),
        };
        micro_batch * self.each + within
    }

    fn tensor(&self, number: usize) -> StepTensor {
        let (micro_batch, within) = (number / self.each, number % self.each);
        if micro_batch >= self.micro_batches {
            return StepTensor::Sum { parameter: number - self.micro_batches * self.each };
        }
        let head = self.outline.uses.len() - 1;
        let of_block = |block: usize| {
            let uses = 0..self.outline.uses[block].len();
            let parameters = uses
                .flat_map(move |index| [Seen::Parameter { block, index }, Seen::Gradient { block, index }]);
            let output = if block == head { Seen::Loss } else { Seen::Output { block } };
            parameters.chain([output, Seen::InputGradient { block }])
        };
        let all = (0..=head).flat_map(of_block).map(|seen| StepTensor::Walk { micro_batch, seen });
        let found = all.into_iter().find(|tensor| self.number(*tensor) == micro_batch * self.each + within);
        found.expect("every number has a tensor")
    }
}

/// The search of a rank through the tensors of a step.
struct Search<'a> {
    device: &'a Device,
    count: &'a mut Tensor,
    numbering: &'a Numbering<'a>,
    /// StepTensor, elements that are not finite, elements.
    found: [f64; TOLD],
    /// Set if the device failed while it counted.
    failed: Option<DeviceError>,
}

impl Search<'_> {
    /// Counts the elements of `x` that are not finite, and keeps the earliest tensor that has some. The work does not
    /// depend on the values, because it is planned.
    fn look(&mut self, place: StepTensor, x: View) {
        let number = self.numbering.number(place) as f64;
        self.device.count_non_finite(x, self.count.view_mut());
        match self.device.fetch([self.count.view()]) {
            Ok([count]) if count > 0.0 && number < self.found[0] => {
                self.found = [number, count.into(), x.elements() as f64]
            }
            Ok(_) => {}
            Err(error) => self.failed = Some(error),
        }
    }
}

impl Rank {
    /// The error of step `number`, which had `outcome` and cannot be applied.
    pub(crate) fn stuck(
        &mut self,
        number: u64,
        batch: &Batch,
        outcome: &Outcome,
    ) -> Result<RunError, CollectiveError> {
        let Outcome { loss, targets, grad_norm, loss_scale, lr, .. } = *outcome;
        let first = self.diagnose(number, batch, targets, loss_scale.unwrap_or(1.0))?;
        let in_sum = first.as_ref().is_some_and(|first| first.in_sum);
        let advice = match self.spec.precision.loss_scaling {
            _ if self.spec.zero.update_in_backward && self.spec.precision.types.communicate == DType::F16 => {
                "where gradients or their sum over ranks exceed f16 (65,504), set precision.communicate to \"bf16\" or \"f32\"; \
                 else lower optimizer.lr or raise schedule.warmup"
                    .to_string()
            }
            _ if self.spec.zero.update_in_backward => {
                "lower optimizer.lr or raise schedule.warmup; without memory.update_in_backward, a run names the first tensor \
                 that is not finite, and can clip gradients (optimizer.clip)"
                    .to_string()
            }
            LossScaling::Off if in_sum && self.spec.precision.types.communicate == DType::F16 => {
                "the sum over ranks exceeds f16: set precision.communicate to \"bf16\" or \"f32\"".to_string()
            }
            LossScaling::Off => "lower optimizer.lr, raise schedule.warmup or set optimizer.clip".to_string(),
            LossScaling::Static(_) => format!(
                "{STATIC_PATIENCE} steps in a row have overflowed: lower precision.loss_scale, or leave it out \
                 for a dynamic one, or lower optimizer.lr"
            ),
            LossScaling::Dynamic(Dynamic { min_scale, .. }) => format!(
                "the loss scale is precision.min_loss_scale = {min_scale} already: set precision.compute to \
                 \"bf16\", which has the range of f32, or lower optimizer.lr"
            ),
        };
        let step = number;
        let in_part = self.spec.zero.update_in_backward;
        let error = NonFinite { step, first, loss, grad_norm, loss_scale, lr, in_part, advice };
        Ok(RunError::NonFinite(Box::new(error)))
    }

    /// Runs the micro-batches of step `number` again and finds the first tensor that is not finite; the
    /// same answer on all ranks. With updates within backward, the parameters of the step are gone, and the first gradient that
    /// stopped them is named.
    ///
    /// # Errors
    /// When a collective fails.
    pub fn diagnose(
        &mut self,
        number: u64,
        batch: &Batch,
        targets: usize,
        loss_scale: f32,
    ) -> Result<Option<Found>, CollectiveError> {
        let device = self.device.clone();
        if self.spec.zero.update_in_backward {
            return device.try_phase(PhaseName::Diagnose, || self.found_in_backward());
        }
        device.try_phase(PhaseName::Diagnose, || {
            let mut count = self.count.take().expect("taken only here, and put back below");
            let outline = Arc::clone(&self.outline);
            let numbering = Numbering::new(&outline, self.spec.batch.micro_batches);
            let found = [f64::INFINITY, 0.0, 0.0];
            let mut search =
                Search { device: &device, count: &mut count, numbering: &numbering, found, failed: None };
            let mut watch = |micro_batch: usize, seen: Seen, x: View| {
                search.look(StepTensor::Walk { micro_batch, seen }, x)
            };
            self.gradients(PhaseName::Diagnose, (number, batch), targets, loss_scale, Some(&mut watch))?;
            self.chunks.pause()?;
            let stages = &self.stages;
            let mut see = |stage: usize, p: usize, x: View| {
                search.look(StepTensor::Sum { parameter: stages[stage].network.numbers[p] }, x);
            };
            self.chunks.finish(true, Some(&mut see))?;
            let Search { found, failed, .. } = search;
            self.count = Some(count);
            failed.map_or(Ok(()), Err)?;
            let first = self.first_of_all(found)?;
            Ok(first.map(|(rank, [place, count, elements])| {
                let place = numbering.tensor(place as usize);
                let in_sum = matches!(place, StepTensor::Sum { .. });
                let (count, elements) = (count as u64, elements as u64);
                Found { tensor: self.describe(place), rank, count, elements, in_sum }
            }))
        })
    }

    /// The gradient that stopped the updates within backward of the last step: of all ranks, that of the last parameter, since
    /// backward comes to it first.
    fn found_in_backward(&mut self) -> Result<Option<Found>, CollectiveError> {
        let last = self.outline.parameters.len() as f64;
        let told = |own: &NotFinite| [last - own.parameter as f64, own.count as f64, own.elements as f64];
        let found = self.not_finite.as_ref().map_or([f64::INFINITY, 0.0, 0.0], told);
        let first = self.first_of_all(found)?;
        Ok(first.map(|(rank, [from_last, count, elements])| {
            let name = &self.outline.parameters[(last - from_last) as usize];
            let (count, elements) = (count as u64, elements as u64);
            Found { tensor: format!("gradient of {name}"), rank, count, elements, in_sum: false }
        }))
    }

    /// The first tensor found by any rank, and the lowest rank that found it.
    fn first_of_all(&self, found: [f64; TOLD]) -> Result<Option<(usize, [f64; TOLD])>, CollectiveError> {
        let (rank, world) = (self.group().rank(), self.group().world_size());
        let mut told = self.device.alloc(DType::F64, [world * TOLD], Category::Workspace, "diagnose.found");
        let mut all = vec![[f64::INFINITY; TOLD]; world];
        all[rank] = found;
        self.device.upload(all.as_flattened(), told.view_mut());
        let told = self.group().all_gather_in_place(told).wait()?;
        self.device.download(told.view(), all.as_flattened_mut())?;
        let first = all.into_iter().enumerate().min_by(|(_, a), (_, b)| a[0].total_cmp(&b[0]));
        Ok(first.filter(|(_, found)| found[0].is_finite()))
    }

    fn describe(&self, place: StepTensor) -> String {
        let outline = &self.outline;
        let name = |parameter: usize| &outline.parameters[parameter];
        let (micro_batch, seen) = match place {
            StepTensor::Walk { micro_batch, seen } => (micro_batch, seen),
            StepTensor::Sum { parameter } => {
                return format!("sum over ranks of the gradient of {}", name(parameter));
            }
        };
        let of_micro = match self.spec.batch.micro_batches {
            1 => String::new(),
            of => format!("micro-batch {} of {of}", micro_batch + 1),
        };
        let behind = |text: String| if of_micro.is_empty() { text } else { format!("{text} ({of_micro})") };
        let of_block = |what: &str, block: usize, index: usize| {
            let comma = if of_micro.is_empty() { "" } else { ", " };
            let block_name = &outline.blocks[block];
            format!("{what} {} (block {block_name}{comma}{of_micro})", name(outline.uses[block][index]))
        };
        match seen {
            Seen::Parameter { block, index } => of_block("parameter", block, index),
            Seen::Output { block } => behind(format!("output of block {}", outline.blocks[block])),
            Seen::Loss => behind("loss".to_string()),
            Seen::Gradient { block, index } => of_block("gradient of", block, index),
            Seen::InputGradient { block } => {
                behind(format!("gradient of the input of block {}", outline.blocks[block]))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_are_numbered_in_the_order_of_one_rank() {
        let outline = Outline {
            blocks: ["a", "b", "head"].map(String::from).to_vec(),
            parameters: ["w", "x", "y"].map(String::from).to_vec(),
            uses: vec![vec![0], vec![1, 2], vec![0]],
        };
        let numbering = Numbering::new(&outline, 2);
        let walk = |seen| StepTensor::Walk { micro_batch: 1, seen };
        let order = [
            walk(Seen::Parameter { block: 0, index: 0 }),
            walk(Seen::Output { block: 0 }),
            walk(Seen::Parameter { block: 1, index: 0 }),
            walk(Seen::Parameter { block: 1, index: 1 }),
            walk(Seen::Output { block: 1 }),
            walk(Seen::Parameter { block: 2, index: 0 }),
            walk(Seen::Loss),
            walk(Seen::Gradient { block: 2, index: 0 }),
            walk(Seen::InputGradient { block: 2 }),
            walk(Seen::Gradient { block: 1, index: 1 }),
            walk(Seen::Gradient { block: 1, index: 0 }),
            walk(Seen::InputGradient { block: 1 }),
            walk(Seen::Gradient { block: 0, index: 0 }),
            walk(Seen::InputGradient { block: 0 }),
            StepTensor::Sum { parameter: 0 },
            StepTensor::Sum { parameter: 1 },
            StepTensor::Sum { parameter: 2 },
        ];
        for (number, tensor) in (14..).zip(order) {
            assert_eq!((numbering.number(tensor), numbering.tensor(number)), (number, tensor));
        }
    }
}
