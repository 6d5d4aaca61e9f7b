//! Which checkpoints of a run stay, as its start and its end say it.

use anyhow::Result;
use phalanx_train::RunConfig;
use phalanx_train::position::position;

use crate::folders::run_folder::RunFolder;
use phalanx_drawing::report::plural;

/// Note before the first step on the checkpoints that are kept and removed; `None` if none is removed.
pub fn rule(config: &RunConfig) -> Option<String> {
    let train = &config.train;
    let newest = train.keep.newest()?;
    let best = if train.keep_best { " and the one with the smallest validation loss" } else { "" };
    let every = match train.save_every {
        0 => "after the last step".to_string(),
        every => format!("every {}", plural(every as usize, "step")),
    };
    Some(format!(
        "checkpoints: saved {every}; the newest {newest}{best} stay, older ones are removed (train.keep = {newest}; \"all\" keeps every one)"
    ))
}

/// The checkpoints that are there at the end of a run.
///
/// # Errors
/// A folder that cannot be read.
pub fn left(folder: &RunFolder, config: &RunConfig) -> Result<String> {
    let newest = folder.checkpoint(None)?;
    let steps = phalanx_checkpoint::saved_steps(&folder.checkpoints())?;
    let added = |step| phalanx_checkpoint::added(&folder.checkpoints().join(format!("step-{step}")));
    let mut kept = Vec::new();
    for step in steps.iter().rev() {
        kept.extend(added(step)?.map(|path| path.display().to_string()));
    }
    let kept = match kept.is_empty() || config.train.keep.newest().is_none() {
        true => String::new(),
        false => format!("; not removed, because no save has written {}", kept.join(", ")),
    };
    let names: Vec<String> = steps.iter().rev().map(|step| format!("step-{step}")).collect();
    let rule = match config.train.keep.newest() {
        Some(count) => format!("the newest {count}; older ones are removed (train.keep)"),
        None => "all".to_string(),
    };
    let best = position(&newest)?.best.map_or(String::new(), |best| {
        format!("; smallest validation loss: {:.4}, step-{}", best.val_loss, best.step)
    });
    Ok(format!("checkpoints {}    {rule}{kept}{best}", names.join(" ")))
}
