//! A pipeline schedule of the user's own: a file in PyTorch's text form, read and checked before anything else
//! happens. Its text takes the place of its path in the configuration, so that every rank and a resumed run have
//! it, whatever becomes of the file.

use std::path::Path;

use anyhow::{Result, bail};
use phalanx_plan::{PipelineSchedule, Plan, check};
use strsim::levenshtein;

use crate::arguments::limits::SCHEDULE_BYTES;

/// The schedule text, if a value of `parallel.schedule` is the path of a file; None if it is a name or already a text.
///
/// # Errors
/// A value that is neither, a file that cannot be read, or a schedule that cannot be run.
pub fn text_of(value: &str) -> Result<Option<String>> {
    if value.parse::<Plan>().is_ok() {
        return Ok(None);
    }
    if value.contains([',', '\n']) && !Path::new(value).exists() {
        return Ok(None);
    }
    let schedule = read(value)?;
    // Written again in canonical form, so that equal schedules have equal texts.
    Ok(Some(schedule.to_string()))
}

/// Returns whether a file holds a schedule as this program writes it.
pub fn is_canonical(path: &Path) -> bool {
    let text = phalanx_system::files::read_text(path, SCHEDULE_BYTES).unwrap_or_default();
    PipelineSchedule::parse(&text).is_ok_and(|schedule| schedule.to_string() == text)
}

/// Reads a schedule and checks that it can be run.
///
/// # Errors
/// As for [`text_of`].
pub fn read(path: &str) -> Result<PipelineSchedule> {
    let text = match phalanx_system::files::read_text(Path::new(path), SCHEDULE_BYTES) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let near = Plan::NAMES.into_iter().min_by_key(|name| levenshtein(path, name)).unwrap_or("1f1b");
            bail!(
                "neither a schedule nor a file; schedules are {} (did you mean {near}?), and there is no file \
                 {path} (paths start at the current folder)",
                Plan::NAMES.join(", ")
            )
        }
        Err(error) => bail!(
            "cannot read the schedule file {path}: {error}; give a text file with a line of cells for each rank, or \
             one of {}",
            Plan::NAMES.join(", ")
        ),
    };
    let schedule = PipelineSchedule::parse(&text)?;
    check(&schedule)?;
    Ok(schedule)
}
