//! The textbook formulas of ZeRO (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
//! Trillion Parameter Models", 2020, figure 1 and section 7).
//!
//! For P parameters in f32: 4P bytes of parameters, 4P of gradients, 4P for each state of the optimizer (8P under AdamW,
//! with two moments; 4P under SGD, with a momentum). In a 16-bit type: 2P of parameters, 2P or 4P of gradients by the
//! type that sums them, and 4P more of optimizer states, the f32 master weights. Stage 1 divides the optimizer states by
//! N ranks, stage 2 also the gradients, stage 3 also the parameters. Printed beside the plan for people; nothing is
//! decided by them.

use crate::trace::{Bytes, DType};
use serde::Serialize;

/// Bytes of an f32.
const F32: u64 = 4;

/// A ZeRO stage: what is sharded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ZeroStage {
    /// Nothing: plain data parallelism.
    Zero,
    /// Optimizer states.
    One,
    /// Optimizer states and gradients.
    Two,
    /// Optimizer states, gradients and parameters.
    Three,
}

impl ZeroStage {
    /// All stages.
    pub const ALL: [ZeroStage; 4] = [ZeroStage::Zero, ZeroStage::One, ZeroStage::Two, ZeroStage::Three];

    /// The stage's number in configurations.
    pub const fn number(self) -> u8 {
        self as u8
    }

    /// The stage with this number, 0 to 3.
    pub fn from_number(number: u8) -> Option<ZeroStage> {
        ZeroStage::ALL.into_iter().find(|stage| stage.number() == number)
    }
}

/// Element types of a run (mixed precision with master weights: Micikevicius et al., arXiv 1710.03740).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Precision {
    /// Type of parameters and activations.
    pub compute: DType,
    /// Type of the gradient buffers in which micro-batches are summed.
    pub accumulate: DType,
    /// Type in which gradients are communicated.
    pub communicate: DType,
}

impl Precision {
    /// Everything in f32.
    pub const F32: Precision =
        Precision { compute: DType::F32, accumulate: DType::F32, communicate: DType::F32 };

    /// Returns whether f32 master weights are kept beside the parameters.
    pub fn has_master(self) -> bool {
        self.compute != DType::F32
    }
}

/// The results of the textbook formulas.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Textbook {
    /// Bytes of model states on one rank. Activations, communication and workspace are 0: the formulas
    /// do not know them.
    pub state: Bytes,
    /// Elements moved per parameter and step, of N ranks, N large: 2, 2, 2, 3.
    pub moved_per_parameter: u64,
    /// Bytes that one rank sends in a step of one micro-batch: P (N - 1) / N times the bytes per element of gradients
    /// (twice under stage 0) and of parameters (once under stages 1 and 2, twice under 3).
    pub sent_bytes: u64,
}

impl Textbook {
    /// The same with gradients in the place of parameters: 14 bytes per parameter under AdamW with 16-bit gradients instead
    /// of 16.
    #[must_use]
    pub fn with_gradients_in_place(self) -> Textbook {
        Textbook { state: Bytes { gradients: 0, ..self.state }, ..self }
    }
}

/// The formulas for `all` parameters, of which `trained` are trained, on `world` ranks, with an optimizer that keeps `states`
/// numbers for each trained one. Shares are rounded up.
///
/// # Panics
/// If `world` is 0.
pub fn textbook(
    [all, trained]: [u64; 2],
    world: u64,
    stage: ZeroStage,
    precision: Precision,
    states: u64,
) -> Textbook {
    assert!(world > 0, "a world has at least one rank");
    let share = |of: u64, sharded: bool| if sharded { of.div_ceil(world) } else { of };
    let Precision { compute, accumulate, communicate } = precision;
    let [compute, accumulate, communicate] = [compute, accumulate, communicate].map(|t| t.bytes() as u64);
    let states = states + u64::from(precision.has_master());
    let state = Bytes {
        parameters: compute * share(all, stage >= ZeroStage::Three),
        gradients: accumulate * share(trained, stage >= ZeroStage::Two),
        optimizer: states * F32 * share(trained, stage >= ZeroStage::One),
        ..Bytes::default()
    };
    let (gradients, gathers) = match stage {
        ZeroStage::Zero => (2, 0),
        ZeroStage::One | ZeroStage::Two => (1, 1),
        ZeroStage::Three => (1, 2),
    };
    let gathered = if stage == ZeroStage::Three { all } else { trained };
    let sent = gradients * communicate * share(trained, true) + gathers * compute * share(gathered, true);
    let sent_bytes = sent * (world - 1);
    Textbook { state, moved_per_parameter: gradients + gathers, sent_bytes }
}
