//! The names of phases.

use serde::{Deserialize, Serialize};

/// Name of a part of a rank's life: what a phase allocates, and in which order, is planned.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PhaseName {
    /// Allocates what stays for the whole run; the first phase of every trace.
    Init,
    /// Fills parameters and optimizer states.
    Load,
    /// One optimizer step.
    Step,
    /// Runs the micro-batches of a step again and finds the first tensor that is not finite.
    Diagnose,
    /// Computes the loss of held-out samples.
    Evaluate,
    /// Writes a checkpoint.
    Save,
    /// Lets every rank write what it measured.
    Report,
    /// Gathers parameters that asynchronous servers hold in parts.
    Gather,
    /// Forward of a layer, where it is measured alone.
    Forward,
    /// Backward of a layer, where it is measured alone.
    Backward,
    /// The first part of a layer's backward: the derivative of its input.
    BackwardInput,
    /// The second part of a layer's backward: its parameter gradients.
    BackwardWeight,
    /// A loss, where it is measured alone.
    Loss,
    /// The operations of a benchmark.
    Bench,
}

impl PhaseName {
    /// The name in messages and files.
    pub const fn name(self) -> &'static str {
        match self {
            PhaseName::Init => "init",
            PhaseName::Load => "load",
            PhaseName::Step => "step",
            PhaseName::Diagnose => "diagnose",
            PhaseName::Evaluate => "evaluate",
            PhaseName::Save => "save",
            PhaseName::Report => "report",
            PhaseName::Gather => "gather",
            PhaseName::Forward => "forward",
            PhaseName::Backward => "backward",
            PhaseName::BackwardInput => "backward_input",
            PhaseName::BackwardWeight => "backward_weight",
            PhaseName::Loss => "loss",
            PhaseName::Bench => "bench",
        }
    }
}

impl std::fmt::Display for PhaseName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::fmt::Debug for PhaseName {
    /// The name in quotes, as messages list phases.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.name())
    }
}
