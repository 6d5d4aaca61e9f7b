//! `batch.micro = "auto"`: the largest micro-batch that fits, by plans of whole runs.
//!
//! Of the sizes that divide the sequences of a replica the search bisects: a larger micro-batch needs no less. The choice is recorded as decided,
//! and a resumed run keeps it.

use anyhow::Result;
use phalanx_train::RunConfig;

use crate::configuration::user_config::MICRO as KEY;
use crate::plans::budgets::{self, Budget};
use crate::plans::planned::{Across, Planned};
use crate::plans::resolve::Resolved;
use phalanx_drawing::report::bytes;

/// A configuration with its choice, and the line that says what was chosen, if something was.
///
/// # Errors
/// A configuration that cannot be planned with one sequence.
pub fn choose(
    resolved: Resolved,
    (evaluated, across): (usize, Option<&Across>),
    limits: &dyn Fn(&Planned) -> Vec<Budget>,
) -> Result<(Resolved, Option<String>)> {
    if !resolved.micro_is_auto {
        return Ok((resolved, None));
    }
    let sequences = resolved.config.batch.global / resolved.config.data();
    let sizes: Vec<usize> = (1..=sequences).filter(|size| sequences.is_multiple_of(*size)).collect();
    let with = |micro: usize| {
        let decided = |config: &mut RunConfig| {
            config.batch.micro = Some(micro);
            config.decide(KEY);
        };
        Ok::<_, anyhow::Error>(Resolved {
            config: resolved.config.with(decided)?,
            model: resolved.model.clone(),
            imported: resolved.imported.clone(),
            device: resolved.device.clone(),
            unusable_ids: resolved.unusable_ids.clone(),
            micro_is_auto: false,
        })
    };
    // Bytes that are missing; none where it fits.
    let missing = |micro: usize| -> Result<Option<u64>> {
        let planned = Planned::to_show(with(micro)?, evaluated)?.across(across.cloned());
        let limits = limits(&planned);
        Ok(budgets::exceeded(&planned, &limits).map(|budget| budget.needed(&planned) - budget.bytes()))
    };
    let (mut fitting, mut larger, mut why) = (0, sizes.len(), None);
    while fitting + 1 < larger {
        let middle = (fitting + larger) / 2;
        match missing(sizes[middle]) {
            Ok(None) => fitting = middle,
            Ok(Some(bytes)) => (larger, why) = (middle, Some(bytes)),
            // Too few micro-batches for the schedule, or too large a plan.
            Err(_) => (larger, why) = (middle, None),
        }
    }
    let micro = sizes[fitting];
    let next = sizes.get(fitting + 1).map(|next| match why {
        Some(missing) => format!("; {next} would need {} more than there is", bytes(missing)),
        None => format!("; {next} is not possible"),
    });
    let line = format!("{KEY} = \"auto\": {micro}, the largest that fits{}", next.unwrap_or_default());
    Ok((with(micro)?, Some(line)))
}

/// Text for a run that does not fit with a micro-batch that was chosen when it began.
pub fn advice(config: &RunConfig) -> String {
    match config.batch.micro.filter(|_| config.is_decided(KEY)) {
        Some(micro) => format!(
            " (the run keeps {KEY} = {micro}, which \"auto\" chose when it began; another size changes the rounding of sums: --set \
             {KEY}=auto chooses again)"
        ),
        None => String::new(),
    }
}
