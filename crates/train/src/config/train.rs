//! `[train]`: steps, evaluations and checkpoints.

use serde::{Deserialize, Serialize};

/// Which checkpoints of a run stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Keep {
    /// So many of the newest; 0 is another word for all.
    Newest(usize),
    /// In words.
    Word(KeepWord),
}

/// Words for [`Keep`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KeepWord {
    /// Every checkpoint.
    All,
}

impl Keep {
    /// The number of newest checkpoints that stay; None for all.
    pub fn newest(self) -> Option<usize> {
        match self {
            Keep::Newest(0) | Keep::Word(KeepWord::All) => None,
            Keep::Newest(count) => Some(count),
        }
    }
}

/// `[train]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainConfig {
    /// Optimizer steps.
    pub steps: u64,
    /// Steps between evaluations; 0 evaluates only after the last step.
    pub eval_every: u64,
    /// Largest number of sequences of an evaluation.
    pub eval_samples: usize,
    /// Steps between checkpoints; 0 saves only after the last step.
    pub save_every: u64,
    /// Checkpoints kept: the newest ones, or all. Older ones are removed after a newer one is complete.
    pub keep: Keep,
    /// Whether a state with the smallest validation loss so far is saved, and kept beside the newest ones.
    pub keep_best: bool,
    /// Seed of initial values, the order of samples, and dropout.
    pub seed: u64,
    /// Threads of a rank; the machine's cores over its ranks when left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// Prompt of the sample that is shown at the end of the run; no sample when empty.
    pub sample: String,
}

impl Default for TrainConfig {
    fn default() -> Self {
        TrainConfig {
            steps: 1000,
            eval_every: 250,
            eval_samples: 256,
            save_every: 500,
            keep: Keep::Newest(2),
            keep_best: false,
            seed: 1,
            threads: None,
            sample: String::new(),
        }
    }
}
