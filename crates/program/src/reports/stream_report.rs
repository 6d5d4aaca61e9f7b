//! When the streams of ranks work in a step: printed, or written as a picture or as events (`--timeline`).

use std::path::Path;

use anyhow::{Context, Result, bail};
use phalanx_drawing::report::seconds;
use phalanx_drawing::{draw_streams_svg, draw_streams_terminal, stream_events};
use phalanx_plan::{Machine, Stretch};

use crate::folders::ownership::{begins_with, check_output, is_drawing};
use crate::host::output::{self, note};
use crate::plans::planned::Planned;

/// Letters of a line where the output is no terminal.
const WIDTH: usize = 80;

/// The beginning of a file of events.
const EVENTS: &str = "{\"displayTimeUnit\"";

/// Refuses a file that is neither a picture nor of events, or that something else has written.
///
/// # Errors
/// An error with the path.
pub fn check(path: &Path) -> Result<()> {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("svg") => check_output(path, "--timeline", is_drawing),
        Some("json") => check_output(path, "--timeline", |path| begins_with(path, EVENTS)),
        _ => bail!(
            "--timeline {}: expected a file ending in .svg (a picture) or .json (for Perfetto and Chrome's tracing)",
            path.display()
        ),
    }
}

/// Works of ranks, with their names for people.
pub struct Streams(pub Vec<(String, Vec<Stretch>)>);

impl Streams {
    /// Those of a planned step on a machine: of one rank of each pipeline stage.
    ///
    /// # Errors
    /// A machine that lacks a rate.
    pub fn planned(planned: &Planned, machine: &Machine) -> Result<Streams> {
        let all = planned.plan.step_stretches(machine);
        let all = all.context("--timeline: the profile of the machine has no rate for the disk or the transport that the step uses")?;
        Ok(Streams(all.into_iter().map(|(rank, all)| (format!("rank {rank}"), all)).collect()))
    }

    fn rows(&self) -> Vec<(String, &[Stretch])> {
        self.0.iter().map(|(name, all)| (name.clone(), &all[..])).collect()
    }

    /// For terminals.
    pub fn to_text(&self) -> String {
        let width = output::terminal_width().unwrap_or(WIDTH);
        format!(
            "Streams over a step: how much of the time of each letter they work\n{}",
            draw_streams_terminal(&self.rows(), width)
        )
    }

    /// Writes a picture, or events, as the name of the file says.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn write(&self, path: &Path, title: &str) -> Result<()> {
        let rows = self.rows();
        let content = if path.extension().is_some_and(|extension| extension == "svg") {
            draw_streams_svg(title, &rows)
        } else {
            let (events, until) = stream_events(&rows);
            if let Some(until) = until {
                note(&format!(
                    "{}: the step has more events than viewers show; those of the first {} are written",
                    path.display(),
                    seconds(until)
                ));
            }
            events.to_string()
        };
        phalanx_system::files::write_output(path, content)
            .with_context(|| format!("cannot write {}; choose another file", path.display()))
    }
}
