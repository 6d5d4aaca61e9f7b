//! The checkpoint with the smallest validation loss (`train.keep_best`).

use serde::{Deserialize, Serialize};

use crate::jobs::job::Job;
use crate::jobs::metrics::EvaluationRecord;

/// The evaluation with the smallest loss, whose checkpoint is kept. Every later checkpoint stores it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// The step that was evaluated and saved.
    pub step: u64,
    /// Its validation loss.
    pub val_loss: f32,
    /// Windows that were evaluated: losses of other windows do not compare.
    pub windows: EvaluatedWindows,
}

/// Values that determine the windows of an evaluation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvaluatedWindows {
    /// Checksum of the token file.
    pub tokens: Option<String>,
    /// `data.validation`
    pub validation: f64,
    /// `model.seq`
    pub seq: usize,
    /// Number of windows.
    pub count: usize,
}

impl EvaluatedWindows {
    /// Those of a run.
    pub fn of(job: &Job) -> EvaluatedWindows {
        EvaluatedWindows {
            tokens: job.digests.tokens.clone(),
            validation: job.config.data.validation,
            seq: job.config.model.seq,
            count: job.data.evaluated(),
        }
    }
}

impl Best {
    /// The better of `known` and a new evaluation; of equal ones the earlier. Losses that are not numbers never count.
    pub fn better(known: Option<Best>, new: &EvaluationRecord, windows: EvaluatedWindows) -> Option<Best> {
        let is_better =
            new.val_loss.is_finite() && known.as_ref().is_none_or(|best| new.val_loss < best.val_loss);
        match is_better {
            true => Some(Best { step: new.step, val_loss: new.val_loss, windows }),
            false => known,
        }
    }
}
