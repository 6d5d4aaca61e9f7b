//! Number of targets of a step or an evaluation over all replicas: its loss is the mean over them.
//!
//! A sample of a token file has the same number of targets as every other one, so the plan knows them. A source of the
//! caller's own may leave targets out: then the replicas exchange their counts before they compute (8 bytes from each).

use phalanx_collectives::{CollectiveError, Group};
use phalanx_layers::TARGETS;
use phalanx_plan::trace::Axis;
use phalanx_tensor::preference::PREFERENCE_SUMS;
use phalanx_tensor::{Category, CrossEntropy, DType, Device};

use crate::engine::batch::Batch;
use crate::engine::scores::ClassScores;
use crate::engine::spec::{BatchPart, LossPart, Spec};

/// The targets that the plan expects in a batch.
#[derive(Clone, Copy, Debug)]
pub struct PlannedTargets {
    /// On this replica.
    pub here: usize,
    /// On all replicas.
    pub all: usize,
}

/// A mean loss over targets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MeanLoss {
    /// The mean; NaN without targets, as in PyTorch.
    pub loss: f32,
    /// Number of targets.
    pub targets: usize,
    /// Scores of a model that chooses a class for each sample; None for another one.
    pub scores: Option<ClassScores>,
    /// Rewards of the answers, of pairs.
    pub rewards: Option<Rewards>,
}

/// Rewards of answers by a model that learns preferences.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rewards {
    /// Mean over the chosen answers.
    pub chosen: f32,
    /// Mean over the rejected answers.
    pub rejected: f32,
    /// Share of the pairs whose chosen answer has the larger reward; of single answers, of those that lie on their label's side.
    pub accuracy: f32,
}

impl Rewards {
    /// The rewards in the sums of a loss of preferences that are scaled by the number of pairs; None of another loss.
    pub(crate) fn of(sums: &[f32]) -> Option<Rewards> {
        let [_, chosen, rejected, accuracy, share] = sums.first_chunk::<PREFERENCE_SUMS>()?;
        // Answers of KTO are chosen or rejected; pairs have one of each.
        let of_rejected = if *share < 1.0 { 1.0 - share } else { 1.0 };
        let (chosen, rejected) = (chosen / share, rejected / of_rejected);
        Some(Rewards { chosen, rejected, accuracy: *accuracy })
    }

    /// Chosen minus rejected.
    pub fn margin(&self) -> f32 {
        self.chosen - self.rejected
    }
}

impl MeanLoss {
    /// `loss` over `targets` targets.
    pub fn over(targets: usize, loss: f32) -> MeanLoss {
        MeanLoss { loss: if targets == 0 { f32::NAN } else { loss }, targets, scores: None, rewards: None }
    }
}

/// The factor that makes a sum over `targets` losses their mean; 0 for none.
pub fn mean_over(targets: usize) -> f32 {
    if targets == 0 { 0.0 } else { 1.0 / targets as f32 }
}

impl Spec {
    /// The same run on samples that may leave targets out: each step, and each evaluation, is a mean over the targets that it has.
    #[must_use]
    pub fn counting_targets(mut self) -> Spec {
        self.batch.counts_targets = true;
        self
    }
}

impl LossPart {
    /// The factors of the loss of a step whose global batch has `targets` tokens with a target: the mean over them.
    /// Gradients are multiplied by `loss_scale`.
    pub fn cross_entropy(self, targets: usize, loss_scale: f32) -> CrossEntropy {
        let (scale, LossPart { label_smoothing, z_loss }) = (mean_over(targets), self);
        CrossEntropy { scale, gradient_scale: scale * loss_scale, label_smoothing, z_loss }
    }
}

impl BatchPart {
    /// Returns whether the model reads targets.
    pub(crate) fn has_targets(&self) -> bool {
        self.inputs.iter().any(|input| input.name == TARGETS)
    }

    /// The targets of a step on each replica, where no sample leaves any out.
    pub fn step_targets(&self) -> PlannedTargets {
        let here = self.micro_batch_size * self.micro_batches * self.targets_per_sequence;
        PlannedTargets { here, all: self.targets_per_step }
    }

    /// Rows of an evaluation on each replica, over all its parts.
    pub fn evaluation_rows(&self) -> usize {
        self.evaluation_parts * self.evaluation_batches * self.micro_batch_size
    }

    /// The targets of an evaluation on replica `data`, where no window leaves any out: rows beyond the last window
    /// have none.
    pub fn evaluation_targets(&self, data: usize) -> PlannedTargets {
        let rows = self.evaluation_rows();
        let windows = self.evaluated.saturating_sub(data * rows).min(rows);
        let [here, all] = [windows, self.evaluated].map(|windows| windows * self.targets_per_sequence);
        PlannedTargets { here, all }
    }

    /// Checks, in a dry run, that the weights of all tokens of all `replicas` in the loss add up to 1.
    pub(crate) fn check_weights(&self, device: &Device, replicas: usize, scale: f32) {
        let tokens = self.step_targets().here * replicas;
        let weight = f64::from(scale) * tokens as f64;
        // The tolerance is one rounding of the scale.
        if (weight - 1.0).abs() > f64::from(f32::EPSILON) {
            let what = format!(
                "is a sum with weight {weight}: expected 1, the mean over the {tokens} tokens with a target of all \
                 micro-batches and replicas"
            );
            device.fault("the loss", Axis::Data, what);
        }
    }

    /// Counts the targets of `batch` over all `replicas`; all of them receive the same number. In a dry run it is the planned one.
    ///
    /// # Errors
    /// When a replica is lost.
    ///
    /// # Panics
    /// When targets are left out although the plan does not count them: their mean would be wrong in silence.
    pub fn count_targets(
        &self,
        device: &Device,
        replicas: &dyn Group,
        batch: &Batch,
        planned: PlannedTargets,
    ) -> Result<usize, CollectiveError> {
        // The batch of a dry run is not read: it may be larger than any that is filled.
        let here = match (device.is_meta(), self.has_pairs) {
            (true, _) => planned.here,
            (false, true) => batch.counted_pairs(self.seq),
            (false, false) => batch.counted_targets(),
        };
        if !self.has_targets() {
            return Ok(planned.all);
        }
        if self.counts_targets {
            return sum(device, replicas, here, planned);
        }
        assert!(
            here == planned.here,
            "the batch of replica {} has {here} targets where {} are planned: samples that leave targets out \
             (phalanx_tensor::IGNORED) need a plan that counts them (Spec::counting_targets)",
            replicas.rank(),
            planned.here
        );
        Ok(planned.all)
    }
}

/// The sum of `here` over all replicas, exact in f64.
fn sum(
    device: &Device,
    replicas: &dyn Group,
    here: usize,
    planned: PlannedTargets,
) -> Result<usize, CollectiveError> {
    let mut counts = vec![0.0; replicas.world_size()];
    counts[replicas.rank()] = here as f64;
    let mut told = device.alloc(DType::F64, [counts.len()], Category::Workspace, "targets");
    device.upload(&counts, told.view_mut());
    let told = replicas.all_gather_in_place(told).wait()?;
    device.download(told.view(), &mut counts)?;
    Ok(if device.is_meta() { planned.all } else { counts.iter().sum::<f64>() as usize })
}
