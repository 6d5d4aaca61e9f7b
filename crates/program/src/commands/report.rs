//! `phalanx report`: a page about one run or several.

use std::path::Path;

use anyhow::{Context, Result, bail};
use phalanx_train::metrics_lines::MetricsLines;
use phalanx_train::run_files::{CONFIG_FILE, MEMORY_FILE, METRICS_FILE};
use serde_json::Value;

use crate::arguments::limits::MEMORY_BYTES;
use crate::arguments::report_args::ReportArgs;
use crate::folders::ownership::{begins_with, check_output};
use crate::folders::run_folder::RunFolder;
use crate::folders::run_names::PLAN_FILE;
use crate::host::output;
use crate::reports::run_page::{BEGINS, Shown, page};

/// Name of the page in a run folder.
const PAGE: &str = "report.html";

/// Writes the page, and prints where it is.
///
/// # Errors
/// A folder without a run, files that cannot be read, a file in the place of the page that no report is.
pub fn report(args: &ReportArgs) -> Result<()> {
    let runs = args.runs.iter().map(|run| read(run)).collect::<Result<Vec<_>>>()?;
    let target = args.out.clone().unwrap_or_else(|| args.runs[0].join(PAGE));
    check_output(&target, "--out", |path| begins_with(path, BEGINS))?;
    phalanx_system::files::write_output(&target, page(&runs))
        .with_context(|| format!("cannot write {}; choose another file with --out", target.display()))?;
    Ok(output::print_line(&target.display().to_string())?)
}

/// The files of a run.
fn read(path: &Path) -> Result<Shown> {
    let folder = RunFolder::at(path);
    let Some(config) = folder.text(CONFIG_FILE)? else {
        bail!("{} is not a run folder: it has no {CONFIG_FILE}", path.display());
    };
    let metrics = folder.file(METRICS_FILE);
    let reading = || format!("cannot read {}", metrics.display());
    let mut lines = Vec::new();
    for line in MetricsLines::open(&metrics).with_context(reading)?.into_iter().flatten() {
        let line = line.with_context(reading)?;
        lines.extend(line.record().filter(|_| line.is_whole()));
    }
    let json = |name: &str| -> Result<Option<Value>> {
        let path = folder.file(name);
        if !phalanx_system::files::is_named(&path) {
            return Ok(None);
        }
        let text = phalanx_system::files::read_text(&path, MEMORY_BYTES)
            .with_context(|| path.display().to_string())?;
        Ok(Some(serde_json::from_str(&text).with_context(|| path.display().to_string())?))
    };
    Ok(Shown {
        name: path.display().to_string(),
        config,
        lines,
        planned: json(PLAN_FILE)?,
        measured: json(MEMORY_FILE)?,
    })
}
