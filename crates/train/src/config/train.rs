//! `[train]`: steps, evaluations and checkpoints.

use serde::{Deserialize, Serialize};

use super::OTHER_WINDOWS;
use super::bounds::{MAX_SEQUENCES, MAX_STEPS, MAX_THREADS};
use super::declare::Conversion::{Rule, Same};
use super::declare::{AXOLOTL, HUGGING_FACE, KEY, Kind, MEGATRON, NANOGPT, Resume, TORCHTITAN};
use super::key_types::KeyType;
use super::needs::{Need, SET};

/// Which checkpoints of a run stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Keep {
    /// So many of the newest; 0 is another word for all.
    Newest(usize),
    /// In words.
    Word(KeepWord),
}

words! {
    /// Words for [`Keep`].
    KeepWord {
        /// Every checkpoint.
        All = "all",
    }
}

impl KeyType for Keep {
    const KIND: Kind = Kind::WordOrNumber("a number of checkpoints, or \"all\"");

    fn number(&self) -> Option<f64> {
        self.newest().map(|count| count as f64)
    }
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

const OTHER_SEED: &str =
    "the samples that are left of this epoch are others, and so are the masks of dropout";

table! {
    /// `[train]`
    "train" TrainConfig {
        /// Optimizer steps.
        steps: u64 = 1000, KEY.resume(Resume::Unsaid).from(1.0, MAX_STEPS)
            .foreign(&[
                (NANOGPT, "max_iters", Same, ""), (TORCHTITAN, "training.steps", Same, ""),
                (HUGGING_FACE, "max_steps", Rule, ""),
                (MEGATRON, "train_iters", Rule, ""),
            ]);
        /// Passes over the training part of the data, rounded up to whole steps. The run records `train.steps`.
        epochs: Option<f64> = None, KEY.quiet().either("train.steps").from(1.0 / MAX_STEPS, MAX_STEPS).resume(Resume::Unsaid)
            .foreign(&[(HUGGING_FACE, "num_train_epochs", Rule, ""), (AXOLOTL, "num_epochs", Rule, "")]);
        /// Steps between evaluations; 0 evaluates only after the last step.
        eval_every: u64 = 250, KEY.from(0.0, MAX_STEPS)
            .foreign(&[
                (NANOGPT, "eval_interval", Same, ""),
                (TORCHTITAN, "validation.freq", Same, ""),
                (HUGGING_FACE, "eval_steps", Same, ""),
            ]);
        /// Evaluates before the first step, too. That state is not saved, and is none for `keep_best`.
        eval_first: bool = false, KEY.foreign(&[(HUGGING_FACE, "eval_on_start", Same, "")]);
        /// Ends the run after this many evaluations in a row whose loss is not the smallest so far (early stopping). The best checkpoint stays,
        /// and a resumed run counts anew.
        patience: Option<u64> = None, KEY.from(1.0, MAX_STEPS).resume(Resume::Unsaid)
            .needs(&[
                Need::any(&[("train.keep_best", &["true"])], "it counts from the smallest validation loss, whose checkpoint it keeps"),
                Need::any(&[("train.eval_every", &["1.."])], "it counts evaluations"),
            ])
            .foreign(&[(HUGGING_FACE, "early_stopping_patience", Rule, "")]);
        /// Largest number of sequences of an evaluation, which lie spread over the held-out part.
        eval_samples: usize = 256, KEY.resume(Resume::Said(OTHER_WINDOWS)).from(1.0, MAX_SEQUENCES).hint("for no evaluation, set data.validation = 0")
            .foreign(&[(NANOGPT, "eval_iters", Rule, "counted in sequences, not in batches")]);
        /// Steps between checkpoints; 0 saves only after the last step.
        save_every: u64 = 500, KEY.from(0.0, MAX_STEPS)
            .foreign(&[
                (HUGGING_FACE, "save_steps", Same, ""),
                (TORCHTITAN, "checkpoint.interval", Same, ""),
                (MEGATRON, "save_interval", Rule, ""),
            ]);
        /// Checkpoints kept: the newest ones, or all. Older ones are removed after a newer one is complete.
        keep: Keep = Keep::Newest(2), KEY.resume(Resume::Unsaid).from(0.0, MAX_STEPS)
            .foreign(&[(HUGGING_FACE, "save_total_limit", Same, ""), (TORCHTITAN, "checkpoint.keep_latest_k", Same, "")]);
        /// Saves a state with the smallest validation loss so far, and keeps it beside the newest ones.
        keep_best: bool = false, KEY
            .needs(&[Need::any(&[("data.validation", &["above 0"]), ("data.validation_tokens", SET), ("data.validation_rows", SET)], "it keeps the checkpoint with the smallest validation loss")])
            .foreign(&[(NANOGPT, "always_save_checkpoint", Rule, "true for False")]);
        /// Seed of initial values, the order of samples, and dropout.
        seed: u64 = 1, KEY.resume(Resume::Said(OTHER_SEED))
            .foreign(&[(HUGGING_FACE, "seed", Same, ""), (TORCHTITAN, "training.seed", Same, "")]);
        /// Threads of a rank; the machine's cores over its ranks when left out.
        threads: Option<usize> = None, KEY.resume(Resume::Unsaid).from(1.0, MAX_THREADS).hint("leave it out for this machine's cores");
        /// Prompt of the sample that is shown at the end of the run; no sample when empty.
        sample: String = String::new(), KEY.resume(Resume::Unsaid);
    }
}
