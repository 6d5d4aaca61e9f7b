//! The files that a run writes into its folder: metrics, checkpoints, measured memory. Every engine uses them.
//!
//! Rank 0 writes. Before a checkpoint is committed, the folder must still be the one in which the run began, and the
//! metrics up to that step must be on disk.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Instant;

use phalanx_checkpoint::purge;
use phalanx_data::TOKENIZER_FILE;
use phalanx_system::files::HeldFolder;
use serde::Serialize;
use serde_json::{Value, json};

use crate::data::token_data::TOKENS_FILE;
use crate::engine::error::{RunError, writing};
use crate::jobs::best::{Best, EvaluatedWindows};
use crate::jobs::job::Job;
use crate::jobs::metric_record::{in_ms, now_s};
use crate::jobs::metrics::{EvaluationRecord, MetricsFile, RankBytes, Stamp};
use crate::jobs::position::Position;
pub use crate::jobs::run_file_names::{CHECKPOINTS, CONFIG_FILE, MEMORY_FILE, METRICS_FILE};

/// Largest number of bytes of `memory.rank-N.json`; it has about 500.
const MEMORY_PART_BYTES: u64 = 64 << 10;

/// Files without which a run cannot be resumed.
const NEEDED: [&str; 3] = [CONFIG_FILE, TOKENS_FILE, TOKENIZER_FILE];

/// Files that one rank writes into the run folder. Only rank 0 keeps files open.
pub struct RunFiles<'a> {
    job: &'a Job,
    /// The files that rank 0 keeps open; None on other ranks.
    open: Option<(MetricsFile, HeldFolder)>,
    /// When they were opened.
    opened: Instant,
    /// The evaluation with the smallest loss so far, of the windows of this run.
    best: Option<Best>,
    /// True if the run ends before its last step, because of `train.patience`.
    pub ended_early: bool,
}

impl<'a> RunFiles<'a> {
    /// Opens the files that `rank` writes; `at` is where the run is.
    ///
    /// # Errors
    /// [`RunError::Write`].
    pub fn open(job: &'a Job, rank: usize, at: &Position) -> Result<RunFiles<'a>, RunError> {
        let is_kept = |best: &Best| job.config.train.keep_best && best.windows == EvaluatedWindows::of(job);
        let best = at.best.clone().filter(is_kept);
        let opened = Instant::now();
        if rank > 0 {
            return Ok(RunFiles { job, open: None, opened, best, ended_early: false });
        }
        let metrics = MetricsFile::open(&job.run, &job.config.metrics.sinks, at.step)?;
        let folder = HeldFolder::hold(&job.run, &NEEDED).map_err(writing(&job.run))?;
        Ok(RunFiles { job, open: Some((metrics, folder)), opened, best, ended_early: false })
    }

    /// Appends an evaluation to the metrics. Returns whether a checkpoint is due because it is the best so far
    /// (`train.keep_best`).
    ///
    /// # Errors
    /// [`RunError::Write`].
    pub fn evaluated(&mut self, record: &EvaluationRecord) -> Result<bool, RunError> {
        self.write(record)?;
        // Nothing is saved before the first step.
        if self.job.config.train.keep_best && record.step > 0 {
            self.best = Best::better(self.best.take(), record, EvaluatedWindows::of(self.job));
        }
        Ok(self.best.as_ref().is_some_and(|best| best.step == record.step))
    }

    /// Appends a line to the metrics.
    ///
    /// # Errors
    /// [`RunError::Write`].
    pub fn write(&mut self, record: &impl Serialize) -> Result<(), RunError> {
        let Some((metrics, _)) = &mut self.open else { return Ok(()) };
        metrics.write(record)
    }

    /// The time of a line that is written now.
    pub fn stamp(&self) -> Stamp {
        let before_s = self.open.as_ref().map_or(0.0, |(metrics, _)| metrics.elapsed_s());
        Stamp { time_s: now_s(), elapsed_s: in_ms(before_s + self.opened.elapsed().as_secs_f64()) }
    }

    /// The folder of checkpoints.
    pub fn checkpoints(&self) -> PathBuf {
        self.job.run.join(CHECKPOINTS)
    }

    /// The state for the manifest of a checkpoint after `step` steps, `samples` samples and `tokens` tokens.
    pub fn state(&self, [step, samples, tokens]: [u64; 3]) -> Value {
        json!({
            "step": step,
            "samples": samples,
            "tokens": tokens,
            "best": self.best,
            "ended_early": self.ended_early,
            "metrics": self.open.as_ref().map(|(metrics, _)| metrics.digest()),
            "config": self.job.config,
            "model": self.job.plan.spec.model.definition.to_config(),
            "data": self.job.digests,
        })
    }

    /// Must be called before a checkpoint is saved: checks that the folder and the data are unchanged, and syncs the
    /// metrics.
    ///
    /// # Errors
    /// [`RunError::FolderGone`], [`RunError::Data`] for tokens that were changed, [`RunError::Write`].
    pub fn before_save(&self) -> Result<(), RunError> {
        let Some((metrics, folder)) = &self.open else { return Ok(()) };
        folder.check().map_err(|cause| match cause.kind() {
            ErrorKind::NotFound => {
                RunError::FolderGone { path: self.job.run.clone(), what: cause.to_string() }
            }
            _ => writing(&self.job.run)(cause),
        })?;
        self.job.data.check_unchanged(&self.job.digests)?;
        metrics.sync()
    }

    /// To be called after checkpoint `step` was saved: removes the oldest beyond `train.keep`, but never the best one with
    /// `train.keep_best`.
    ///
    /// # Errors
    /// A checkpoint that cannot be removed.
    pub fn after_save(&self, step: u64) -> Result<(), RunError> {
        let kept: Vec<u64> = self.best.iter().map(|best| best.step).chain([step]).collect();
        if let Some(newest) = self.job.config.train.keep.newest()
            && self.open.is_some()
        {
            purge(&self.checkpoints(), newest, &kept)?;
        }
        Ok(())
    }

    /// Writes the measurements of one rank, for [`RunFiles::write_memory`].
    ///
    /// # Errors
    /// [`RunError::Write`].
    pub fn write_memory_part(&self, bytes: &RankBytes) -> Result<(), RunError> {
        write_json(&self.memory_part(bytes.rank), bytes)
    }

    /// Writes `memory.json` from what all ranks have measured.
    ///
    /// # Errors
    /// [`RunError::Write`], also when the part of a rank is missing or damaged.
    pub fn write_memory(&self, world: usize) -> Result<(), RunError> {
        if self.open.is_none() {
            return Ok(());
        }
        let mut ranks = Vec::with_capacity(world);
        for path in (0..world).map(|rank| self.memory_part(rank)) {
            let text =
                phalanx_system::files::read_bounded(&path, MEMORY_PART_BYTES).map_err(writing(&path))?;
            let bytes = serde_json::from_slice::<RankBytes>(&text);
            ranks.push(bytes.map_err(|cause| writing(&path)(cause.into()))?);
            // The next start of a run removes files that remain.
            let _ = std::fs::remove_file(path);
        }
        let resident: u64 = ranks.iter().filter_map(|rank| rank.resident_bytes_peak).max().unwrap_or(0);
        let memory = json!({ "ranks": ranks, "resident_bytes_peak": resident });
        write_json(&self.job.run.join(MEMORY_FILE), &memory)
    }

    fn memory_part(&self, rank: usize) -> PathBuf {
        self.job.run.join(format!("memory.rank-{rank}.json"))
    }
}

/// Returns whether a name in a run folder is that of the measurements of one rank. A run leaves such a file when it is killed
/// between [`RunFiles::write_memory_part`] and [`RunFiles::write_memory`].
pub fn is_memory_part(name: &str) -> bool {
    let rank = name.strip_prefix("memory.rank-").and_then(|rest| rest.strip_suffix(".json"));
    rank.is_some_and(|rank| !rank.is_empty() && rank.bytes().all(|byte| byte.is_ascii_digit()))
}

fn write_json(path: &Path, value: &impl Serialize) -> Result<(), RunError> {
    let text = serde_json::to_string_pretty(value).map_err(|cause| writing(path)(cause.into()))?;
    phalanx_system::files::write(path, text + "\n").map_err(writing(path))
}
