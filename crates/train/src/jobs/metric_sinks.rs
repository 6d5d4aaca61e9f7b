//! The files of metrics beside `metrics.jsonl`, for other programs: CSV and TensorBoard's event files.
//!
//! `metrics.jsonl` is the record of a run. A sink turns each of its lines into bytes of a file of its own. When a run starts or is resumed, these
//! files are made anew from the lines that stay: every step is there once, with the time of its line, also in a file that was lost, cut
//! off, or not asked for before.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

use phalanx_system::files::{AtomicFile, append, is_named, open_regular, read_text};

use crate::config::MetricsSink;
use crate::engine::error::{RunError, writing};
use crate::jobs::event_file::EventFile;
use crate::jobs::metric_names::METRICS;
use crate::jobs::metric_record::{Measured, Sink, now_s};
use crate::jobs::metrics_lines::MetricsLine;
use crate::jobs::run_file_names::CONFIG_FILE;

/// Name of the metrics as CSV in a run folder.
pub const CSV_FILE: &str = "metrics.csv";

/// Name of the folder of event files in a run folder.
pub const EVENTS: &str = "tensorboard";

/// End of the names of our event files.
const OWN_EVENTS: &str = ".phalanx";

/// Largest number of bytes of a configuration.
const CONFIG_BYTES: u64 = 1 << 20;

/// Metrics as CSV: a column for each name, empty where a record has no number.
struct Csv;

impl Sink for Csv {
    fn head(&self) -> Vec<u8> {
        let names: String = METRICS.iter().map(|metric| format!(",{}", metric.name)).collect();
        format!("step,time_s,elapsed_s{names}\n").into_bytes()
    }

    fn record(&self, measured: &Measured) -> Vec<u8> {
        let Measured { step, time_s, elapsed_s, values } = measured;
        let cell = |name: &str| values.iter().find(|(other, _)| *other == name).map(|(_, value)| value);
        let cells: String = METRICS
            .iter()
            .map(|metric| cell(metric.name).map_or(",".to_string(), |value| format!(",{value}")))
            .collect();
        format!("{step},{time_s},{elapsed_s}{cells}\n").into_bytes()
    }
}

/// The files of all sinks, open.
pub struct MetricSinks {
    open: Vec<(PathBuf, File, Box<dyn Sink>)>,
}

impl MetricSinks {
    /// Makes the files of `sinks` in the folder `run` from the lines of its `metrics.jsonl`, `lines`, and leaves them open.
    ///
    /// # Errors
    /// [`RunError::Write`] with the file: a folder that cannot be written, something there that no run has written.
    pub fn open<L>(
        run: &Path,
        sinks: &[MetricsSink],
        lines: impl Fn() -> io::Result<L>,
    ) -> Result<MetricSinks, RunError>
    where
        L: Iterator<Item = io::Result<MetricsLine>>,
    {
        let mut open: Vec<(PathBuf, File, Box<dyn Sink>)> = Vec::new();
        for kind in
            [MetricsSink::Csv, MetricsSink::TensorBoard].into_iter().filter(|kind| sinks.contains(kind))
        {
            let folder = run.join(EVENTS);
            let named = if kind == MetricsSink::Csv { run.join(CSV_FILE) } else { folder.clone() };
            let mut make = || -> io::Result<()> {
                let (path, sink) = match kind {
                    MetricsSink::Csv => csv(run)?,
                    _ => events(run, &folder)?,
                };
                let mut file = AtomicFile::create(&path)?;
                file.write_all(&sink.head())?;
                for line in lines()? {
                    if let Some(measured) = Measured::of(&line?) {
                        file.write_all(&sink.record(&measured))?;
                    }
                }
                file.commit()?;
                if kind == MetricsSink::TensorBoard {
                    remove_earlier(&folder, &path)?;
                }
                let file = append(&path)?;
                open.push((path, file, sink));
                Ok(())
            };
            make().map_err(writing(&named))?;
        }
        Ok(MetricSinks { open })
    }

    /// Appends a line of `metrics.jsonl`.
    ///
    /// # Errors
    /// [`RunError::Write`] with the file.
    pub fn write(&mut self, line: &MetricsLine) -> Result<(), RunError> {
        let Some(measured) = (!self.open.is_empty()).then(|| Measured::of(line)).flatten() else {
            return Ok(());
        };
        for (path, file, sink) in &mut self.open {
            file.write_all(&sink.record(&measured)).map_err(writing(path))?;
        }
        Ok(())
    }
}

/// The CSV file of a run, which replaces only what begins as it does.
fn csv(run: &Path) -> io::Result<(PathBuf, Box<dyn Sink>)> {
    use io::Read;
    let (path, mut begins) = (run.join(CSV_FILE), Vec::new());
    if is_named(&path) {
        open_regular(&path)?.take(4).read_to_end(&mut begins)?;
        if !begins.is_empty() && !Csv.head().starts_with(&begins) {
            let reason = "no run has written this file: move it away, or take \"csv\" from metrics.sinks";
            return Err(io::Error::new(ErrorKind::AlreadyExists, reason));
        }
    }
    Ok((path, Box::new(Csv)))
}

/// A new event file in `folder`. Its name says when it begins: TensorBoard reads the files of a folder in the order of their names, and goes
/// on with a new one.
fn events(run: &Path, folder: &Path) -> io::Result<(PathBuf, Box<dyn Sink>)> {
    if is_named(folder) && !folder.symlink_metadata()?.is_dir() {
        return Err(io::Error::new(ErrorKind::NotADirectory, "a folder of event files is expected here"));
    }
    let config = read_text(&run.join(CONFIG_FILE), CONFIG_BYTES)?;
    let began_s = now_s();
    let named = |second: u64| folder.join(format!("events.out.tfevents.{second:010}{OWN_EVENTS}"));
    let path = (began_s as u64..).map(named).find(|path| !is_named(path)).expect("a second without a file");
    Ok((path, Box::new(EventFile { config, began_s })))
}

/// Removes the event files of this folder that runs have written, but for the new one, which has what they have.
fn remove_earlier(folder: &Path, new: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let is_own =
            path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.ends_with(OWN_EVENTS));
        if is_own && path != new {
            std::fs::remove_file(path)?;
        }
    }
    Ok(())
}
