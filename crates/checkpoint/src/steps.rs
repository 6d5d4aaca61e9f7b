//! The names of checkpoints: `step-N` is one, `step-N.tmp` may become one, and `step-N.replaced` was one
//! until a save of the same step took its place (it counts again if a crash came between the renames).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::{CheckpointError, Result};

/// A checkpoint folder, described by its name.
pub(crate) struct StepFolder {
    pub(crate) step: u64,
    pub(crate) path: PathBuf,
    pub(crate) stage: SaveStage,
}

/// State of a save, as its folder's name says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SaveStage {
    Unfinished,
    Committed,
    Replaced,
}

/// `step-N`
pub(crate) fn committed(checkpoints: &Path, step: u64) -> PathBuf {
    checkpoints.join(format!("step-{step}"))
}

/// `step-N.tmp`
pub(crate) fn unfinished(checkpoints: &Path, step: u64) -> PathBuf {
    checkpoints.join(format!("step-{step}.tmp"))
}

/// `step-N.replaced`
pub(crate) fn replaced(checkpoints: &Path, step: u64) -> PathBuf {
    checkpoints.join(format!("step-{step}.replaced"))
}

/// Step and stage from a folder's name; `None` for any other name.
pub(crate) fn parse(name: &str) -> Option<(u64, SaveStage)> {
    let rest = name.strip_prefix("step-")?;
    let (digits, stage) = if let Some(digits) = rest.strip_suffix(".tmp") {
        (digits, SaveStage::Unfinished)
    } else if let Some(digits) = rest.strip_suffix(".replaced") {
        (digits, SaveStage::Replaced)
    } else {
        (rest, SaveStage::Committed)
    };
    let step: u64 = digits.parse().ok()?;
    (step.to_string() == digits).then_some((step, stage))
}

/// All folders of checkpoints, highest step first. A folder that does not exist has none.
pub(crate) fn list(checkpoints: &Path) -> Result<Vec<StepFolder>> {
    let entries = match fs::read_dir(checkpoints) {
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(CheckpointError::reading(checkpoints))?,
    };
    let mut folders = Vec::new();
    for entry in entries {
        let entry = entry.map_err(CheckpointError::reading(checkpoints))?;
        if let Some((step, stage)) = entry.file_name().to_str().and_then(parse) {
            folders.push(StepFolder { step, path: entry.path(), stage });
        }
    }
    folders.sort_by_key(|folder| (std::cmp::Reverse(folder.step), folder.stage != SaveStage::Committed));
    Ok(folders)
}

/// The steps of the checkpoints in a folder, whole or damaged, the highest first.
///
/// # Errors
/// [`CheckpointError::Read`].
pub fn saved_steps(checkpoints: &Path) -> Result<Vec<u64>> {
    let folders = list(checkpoints)?.into_iter();
    Ok(folders.filter(|folder| folder.stage == SaveStage::Committed).map(|folder| folder.step).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for (name, expected) in [
            ("step-0", Some((0, SaveStage::Committed))),
            ("step-120.tmp", Some((120, SaveStage::Unfinished))),
            ("step-7.replaced", Some((7, SaveStage::Replaced))),
            ("step-007", None),
            ("step-", None),
            ("step-+7", None),
            ("step--1", None),
            ("step-7.bak", None),
            ("best", None),
        ] {
            assert_eq!(parse(name), expected, "{name}");
        }
    }
}
