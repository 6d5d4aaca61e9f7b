//! The textbook formulas of ZeRO (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
//! Trillion Parameter Models", 2020, figure 1 and section 7), for f32 AdamW.
//!
//! For P parameters: 4P bytes of parameters, 4P of gradients, 8P of optimizer states (two moments).
//! Stage 1 divides the optimizer states by N ranks, stage 2 also the gradients, stage 3 also the
//! parameters. Printed beside the plan for people; nothing is decided by them.

use phalanx_trace::Bytes;
use serde::Serialize;

/// Bytes of an f32.
const F32: u64 = 4;

/// What is sharded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Nothing: plain data parallelism.
    Zero,
    /// Optimizer states.
    One,
    /// Optimizer states and gradients.
    Two,
    /// Optimizer states, gradients and parameters.
    Three,
}

impl Stage {
    /// All stages.
    pub const ALL: [Stage; 4] = [Stage::Zero, Stage::One, Stage::Two, Stage::Three];

    /// The number by which configurations know it.
    pub const fn number(self) -> u8 {
        self as u8
    }

    /// The stage with this number, 0 to 3.
    pub fn from_number(number: u8) -> Option<Stage> {
        Stage::ALL.into_iter().find(|stage| stage.number() == number)
    }
}

/// What the formulas say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Textbook {
    /// Bytes of model states on one rank. Activations, communication and workspace are 0: the formulas
    /// do not know them.
    pub state: Bytes,
    /// Elements moved per parameter and step, of N ranks, N large: 2, 2, 2, 3.
    pub moved_per_parameter: u64,
    /// Bytes that one rank sends in a step: the above times 4P (N - 1) / N.
    pub sent_bytes: u64,
}

/// The formulas for `parameters` parameters on `world` ranks. Shares are rounded up.
///
/// # Panics
/// If `world` is 0.
pub fn textbook(parameters: u64, world: u64, stage: Stage) -> Textbook {
    assert!(world > 0, "a world has at least one rank");
    let share = |sharded: bool| if sharded { parameters.div_ceil(world) } else { parameters };
    let state = Bytes {
        parameters: F32 * share(stage >= Stage::Three),
        gradients: F32 * share(stage >= Stage::Two),
        optimizer: 2 * F32 * share(stage >= Stage::One),
        ..Bytes::default()
    };
    let moved_per_parameter = if stage == Stage::Three { 3 } else { 2 };
    let sent_bytes = moved_per_parameter * F32 * share(true) * (world - 1);
    Textbook { state, moved_per_parameter, sent_bytes }
}
