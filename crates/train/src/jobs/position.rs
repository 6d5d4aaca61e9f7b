//! Progress of a run, as checkpoints store it.

use phalanx_checkpoint::Checkpoint;
use serde::Deserialize;
use serde_json::Value;

use crate::engine::error::RunError;
use crate::engine::state::{LARGEST_COUNT, bad_state};
use crate::jobs::best::Best;

/// Progress of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Position {
    /// Steps done.
    pub step: u64,
    /// Samples consumed.
    pub samples: u64,
    /// Tokens in these samples.
    pub tokens: u64,
    /// The checkpoint with the smallest validation loss so far.
    pub best: Option<Best>,
    /// True if the run ended there, before its last step, because of `train.patience`.
    pub ended_early: bool,
}

/// Reads the progress of a run from a checkpoint.
///
/// # Errors
/// Counts that are missing, invalid or too large.
pub fn position(from: &Checkpoint) -> Result<Position, RunError> {
    let count = |key: &str| {
        let given = from.state().get(key).unwrap_or(&Value::Null);
        let number = given.as_u64().filter(|number| *number <= LARGEST_COUNT);
        let reason = || format!("it is {given}; expected an integer from 0 to {LARGEST_COUNT}");
        number.ok_or_else(|| bad_state(from, key, &reason()))
    };
    let (step, samples) = (count("step")?, count("samples")?);
    if step != from.step() {
        let reason = format!("it is {step}, but the checkpoint is of step {}", from.step());
        return Err(bad_state(from, "step", &reason));
    }
    let state = from.state();
    // RowsOf versions stored no tokens; samples had one length then, or were counted as if they had.
    let seq = state["config"]["model"]["seq"].as_u64().unwrap_or(0);
    let tokens = state["tokens"].as_u64().unwrap_or(samples.saturating_mul(seq)).min(u64::MAX >> 1);
    let best = Option::<Best>::deserialize(&state["best"]);
    let best = best.map_err(|cause| bad_state(from, "best", &cause.to_string()))?;
    let ended_early = state["ended_early"].as_bool().unwrap_or(false);
    Ok(Position { step, samples, tokens, best, ended_early })
}
