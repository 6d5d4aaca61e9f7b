//! The files that a run writes for people and scripts: `metrics.jsonl` and `memory.json`.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use phalanx_checkpoint::Checkpoint;
use phalanx_plan::Peak;
use phalanx_plan::trace::Bytes;
use phalanx_system::files::AtomicFile;
use phalanx_tensor::{Arena, Device};
use serde::{Deserialize, Serialize};

use crate::config::MetricsSink;
use crate::engine::error::{RunError, writing};
use crate::engine::rank::{MeanLoss, Rewards};
use crate::jobs::metric_sinks::MetricSinks;
use crate::jobs::metrics_lines::{MetricsLine, MetricsLines};
use crate::jobs::run_file_names::METRICS_FILE;

/// When a line of `metrics.jsonl` was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Stamp {
    /// Unix time in seconds, to a millisecond.
    pub time_s: f64,
    /// Seconds in which the run has trained so far, to a millisecond: those before a resume are counted, and those between are not.
    pub elapsed_s: f64,
}

/// One line of `metrics.jsonl` after a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepRecord {
    /// Number of the step, from 1.
    pub step: u64,
    /// Mean loss over the targets of the global batch before the update, in nats per token.
    #[serde(with = "null_unless_finite")]
    pub loss: f32,
    /// Number of targets over which the loss is a mean, where samples may leave some out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub targets: Option<usize>,
    /// Rewards of pairs of answers.
    #[serde(flatten)]
    pub rewards: Option<RewardRecord>,
    /// Global gradient norm before clipping.
    #[serde(with = "null_unless_finite")]
    pub grad_norm: f32,
    /// Loss scale of the step, where there is one (f16).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f32>,
    /// True if the step was not applied: the gradients overflowed, or its batch had no target.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub skipped: bool,
    /// Learning rate of the step.
    pub lr: f64,
    /// Tokens seen so far.
    pub tokens: u64,
    /// Seconds of the step.
    pub step_s: f64,
    /// Tokens of the step over its seconds.
    pub tokens_per_s: f64,
    /// Model FLOPs utilisation: the share of the peak of all ranks that the model's products achieved.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mfu: Option<f64>,
    /// Hardware FLOPs utilisation: the same with the products that were recomputed, where there are any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hfu: Option<f64>,
    /// Bytes that rank 0 sent.
    pub comm_bytes: u64,
    /// Seconds that rank 0 waited for communication.
    pub exposed_comm_s: f64,
    /// With asynchronous updates: how old the parameters were for which gradients were computed. Loss, gradient norm
    /// and tokens are then those of all workers' steps since the previous line.
    #[serde(flatten)]
    pub staleness: Option<Staleness>,
    /// When it was written.
    #[serde(flatten)]
    pub at: Stamp,
}

/// Rewards of the answers of pairs, of a step or of an evaluation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RewardRecord {
    /// Mean reward of the chosen answers.
    #[serde(with = "null_unless_finite")]
    pub reward_chosen: f32,
    /// Mean reward of the rejected answers.
    #[serde(with = "null_unless_finite")]
    pub reward_rejected: f32,
    /// The first minus the second.
    #[serde(with = "null_unless_finite")]
    pub reward_margin: f32,
    /// Share of pairs whose chosen answer has the larger reward.
    #[serde(with = "null_unless_finite")]
    pub reward_accuracy: f32,
}

impl From<Rewards> for RewardRecord {
    fn from(rewards: Rewards) -> RewardRecord {
        RewardRecord {
            reward_chosen: rewards.chosen,
            reward_rejected: rewards.rejected,
            reward_margin: rewards.margin(),
            reward_accuracy: rewards.accuracy,
        }
    }
}

impl RewardRecord {
    /// `, margin 0.1200, accuracy 0.7500`
    pub fn describe(&self) -> String {
        format!(", margin {:.4}, accuracy {:.4}", self.reward_margin, self.reward_accuracy)
    }
}

/// The staleness of the gradients that were applied since the previous line: the updates by other workers that the
/// parameters of a gradient did not include.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Staleness {
    /// Mean over the gradients of all workers.
    pub staleness: f64,
    /// Maximum.
    pub staleness_max: u64,
    /// The distribution: pairs of a staleness and the number of gradients with it, ascending.
    pub staleness_counts: Vec<(u64, u64)>,
    /// Seconds that rank 0 waited for the servers, including the staleness bound.
    pub waited_s: f64,
}

/// JSON has no infinity or NaN; numbers that are not finite are written as null, and null is read as NaN.
mod null_unless_finite {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub fn serialize<S: Serializer>(value: &f32, to: S) -> Result<S::Ok, S::Error> {
        value.is_finite().then_some(*value).serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<f32, D::Error> {
        Option::<f32>::deserialize(from).map(|value| value.unwrap_or(f32::NAN))
    }
}

/// One line of `metrics.jsonl` after an evaluation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvaluationRecord {
    /// Steps done.
    pub step: u64,
    /// Mean loss over the targets of the held-out windows, in nats per token.
    pub val_loss: f32,
    /// Number of windows.
    pub windows: usize,
    /// Number of their targets.
    pub targets: usize,
    /// Share of windows whose class was right, of a model with classes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f32>,
    /// The mean F1 of its classes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub f1_macro: Option<f32>,
    /// With two classes: F1 of the second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub f1: Option<f32>,
    /// Rewards of pairs of answers.
    #[serde(flatten)]
    pub rewards: Option<RewardRecord>,
    /// When it was written.
    #[serde(flatten)]
    pub at: Stamp,
}

impl EvaluationRecord {
    /// The record of an evaluation of `windows` windows after `step` steps.
    pub fn new(step: u64, windows: usize, evaluated: MeanLoss, at: Stamp) -> EvaluationRecord {
        let MeanLoss { loss: val_loss, targets, scores, rewards } = evaluated;
        EvaluationRecord {
            step,
            val_loss,
            windows,
            targets,
            accuracy: scores.map(|scores| scores.accuracy),
            f1_macro: scores.map(|scores| scores.f1_macro),
            f1: scores.and_then(|scores| scores.f1),
            rewards: rewards.map(RewardRecord::from),
            at,
        }
    }

    /// Describes the rewards of pairs: `, margin 0.1200, accuracy 0.7500`; "" for other samples.
    pub fn describe_rewards(&self) -> String {
        self.rewards.as_ref().map_or(String::new(), RewardRecord::describe)
    }

    /// Describes the scores of a model with classes: `, accuracy 0.9120, F1 0.9014`; "" for another one.
    pub fn describe_scores(&self) -> String {
        let parts =
            [("accuracy", self.accuracy), ("F1 (macro)", self.f1_macro), ("F1 of the second class", self.f1)];
        let shown =
            parts.iter().filter_map(|(name, share)| share.map(|share| format!(", {name} {share:.4}")));
        shown.collect()
    }
}

/// Digest of the metrics of a run up to a checkpoint's step, which the checkpoint stores.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetricsDigest {
    /// Number of bytes.
    pub bytes: u64,
    /// Their blake3, in hexadecimal.
    pub blake3: String,
}

impl MetricsDigest {
    /// Returns the digest stored in `from`; `None` in a checkpoint of an earlier version, and of an import.
    pub fn of(from: &Checkpoint) -> Option<MetricsDigest> {
        MetricsDigest::deserialize(&from.state()["metrics"]).ok()
    }

    /// Returns whether a file begins with these bytes.
    ///
    /// # Errors
    /// I/O errors.
    pub fn begins(&self, path: &Path) -> io::Result<bool> {
        let file = match phalanx_system::files::open_regular(path) {
            Err(cause) if cause.kind() == ErrorKind::NotFound => return Ok(self.bytes == 0),
            opened => opened?,
        };
        let mut hasher = blake3::Hasher::new();
        hasher.update_reader(file.take(self.bytes))?;
        Ok(hasher.count() == self.bytes && hasher.finalize().to_hex().as_str() == self.blake3)
    }
}

/// Appends JSON lines, and what is made of them to the files of other sinks.
pub struct MetricsFile {
    path: PathBuf,
    file: File,
    /// All that is in the file.
    written: blake3::Hasher,
    /// Seconds of the run before it was opened.
    elapsed_s: f64,
    sinks: MetricSinks,
}

impl MetricsFile {
    /// Opens the file of the run folder `run` for appending, and those of `sinks`. It first removes lines of steps after `resumed_at` (from a run
    /// that ended before its next checkpoint) and lines that are not records, so that the file has every step once.
    ///
    /// # Errors
    /// [`RunError::Write`] with the file.
    pub fn open(run: &Path, sinks: &[MetricsSink], resumed_at: u64) -> Result<MetricsFile, RunError> {
        let path = run.join(METRICS_FILE);
        let (file, written, elapsed_s) = MetricsFile::settled(&path, resumed_at).map_err(writing(&path))?;
        let lines = || Ok(MetricsLines::open(&path)?.into_iter().flatten());
        let sinks = MetricSinks::open(run, sinks, lines)?;
        Ok(MetricsFile { path, file, written, elapsed_s, sinks })
    }

    /// The file without what a resumed run removes, the hash of its lines, and the seconds that the last one has.
    fn settled(path: &Path, resumed_at: u64) -> io::Result<(File, blake3::Hasher, f64)> {
        let (mut dropped, mut written, mut elapsed_s) = (false, blake3::Hasher::new(), 0.0);
        for line in MetricsLines::open(path)?.into_iter().flatten() {
            let line = line?;
            match is_kept(&line, resumed_at) {
                true => {
                    written.update(&line.bytes);
                    let stated = line.record().and_then(|record| record["elapsed_s"].as_f64());
                    elapsed_s = stated.unwrap_or(elapsed_s);
                }
                false => dropped = true,
            }
        }
        if dropped {
            let mut next = AtomicFile::create(path)?;
            for line in MetricsLines::open(path)?.into_iter().flatten() {
                let line = line?;
                if is_kept(&line, resumed_at) {
                    next.write_all(&line.bytes)?;
                }
            }
            next.commit()?;
        }
        Ok((phalanx_system::files::append(path)?, written, elapsed_s))
    }

    /// Appends one line.
    ///
    /// # Errors
    /// [`RunError::Write`] with the file, such as for a full disk.
    pub fn write(&mut self, record: &impl Serialize) -> Result<(), RunError> {
        let mut bytes = serde_json::to_vec(record).map_err(|cause| writing(&self.path)(cause.into()))?;
        bytes.push(b'\n');
        self.file.write_all(&bytes).map_err(writing(&self.path))?;
        self.written.update(&bytes);
        self.sinks.write(&MetricsLine { number: 0, bytes })
    }

    /// Seconds of the run before it was opened.
    pub fn elapsed_s(&self) -> f64 {
        self.elapsed_s
    }

    /// Digest of the file.
    pub fn digest(&self) -> MetricsDigest {
        MetricsDigest { bytes: self.written.count(), blake3: self.written.finalize().to_hex().to_string() }
    }

    /// Syncs all lines to disk; the files of other sinks can be made anew from them.
    ///
    /// # Errors
    /// [`RunError::Write`] with the file.
    pub fn sync(&self) -> Result<(), RunError> {
        self.file.sync_data().map_err(writing(&self.path))
    }
}

fn is_kept(line: &MetricsLine, resumed_at: u64) -> bool {
    line.step().is_some_and(|step| step <= resumed_at)
}

/// The numbers, from 1, of the lines of a metrics file that are not records. A last line without a line feed does not
/// count: a run that is killed leaves one.
///
/// # Errors
/// I/O errors, and a line that is longer than any record.
pub fn damaged_lines(path: &Path) -> io::Result<Vec<usize>> {
    let mut damaged = Vec::new();
    for line in MetricsLines::open(path)?.into_iter().flatten() {
        let line = line?;
        if line.is_whole() && line.step().is_none() {
            damaged.push(line.number);
        }
    }
    Ok(damaged)
}

/// Bytes of one device of one rank, as in `plan.json` and `memory.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Default)]
pub struct DeviceBytes {
    /// Bytes of the arena.
    pub peak_bytes: u64,
    /// Bytes of each category at the peak.
    pub categories: Bytes,
}

impl From<Peak> for DeviceBytes {
    fn from(peak: Peak) -> Self {
        DeviceBytes { peak_bytes: peak.bytes, categories: peak.categories }
    }
}

/// One rank in `plan.json` and `memory.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankBytes {
    /// Number of the rank.
    pub rank: usize,
    /// Memory of its device.
    pub device: DeviceBytes,
    /// Host memory: what passes through the host on its way to or from the device.
    #[serde(default)]
    pub host: DeviceBytes,
    /// Disk memory: what lies in a file while no kernel needs it.
    #[serde(default)]
    pub disk: DeviceBytes,
    /// Largest measured resident size of the process in bytes, without other ranks' arenas.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resident_bytes_peak: Option<u64>,
}

impl RankBytes {
    /// Measurements of a rank so far: the peaks of its arenas, if they measure one, and `resident` bytes.
    pub fn measured(rank: usize, device: &Device, resident: u64) -> RankBytes {
        let peak = |arena: &Arena| arena.peak().map_or(DeviceBytes::default(), DeviceBytes::from);
        RankBytes {
            rank,
            device: peak(device.arena()),
            host: peak(device.host_arena()),
            disk: peak(device.disk_arena()),
            resident_bytes_peak: Some(resident),
        }
    }
}

/// Largest resident size of this process so far in bytes (`VmHWM`), less `foreign` bytes of other ranks' memory that
/// are mapped here. 0 where the system does not report it.
pub fn resident_bytes_peak(foreign: u64) -> u64 {
    let peak = phalanx_system::host::process::resident_bytes_peak(std::process::id());
    peak.unwrap_or(0).saturating_sub(foreign)
}
