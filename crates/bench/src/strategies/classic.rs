//! The classic comparison: model parallelism against a pipeline, on a BERT.
//!
//! Two ranks have one half of the layers each. Model parallel, the whole batch goes through the first, then through the
//! second, and one of them always waits; cut in micro-batches, both compute at the same time. What PyTorch's tutorial
//! "Single-Machine Model Parallel Best Practices" shows with a ResNet-50 cut in two, here with the schedules of the
//! engine; batch 16, 4 micro-batches.

use std::sync::Arc;

use anyhow::{Context, Result};
use phalanx_drawing::report::{Table, bytes, count, percent, plural};
use phalanx_models::Model;
use phalanx_train::{ResolvedConfig, RunConfig};
use serde_json::{Value, json};

use super::report::step_time;
use super::run::{Bench, Launcher, StrategyFigures};

/// The model and its batch.
pub const CONFIG: &str = include_str!("../../../../examples/bert_classic.toml");

/// Number of token ids of the data, which are bytes; the mask token is one more.
pub const VOCABULARY: usize = 256;

/// Number of ranks, each with one half of the layers.
const RANKS: usize = 2;

/// Steps before the first that is timed.
const WARMUP: usize = 2;

/// The compared runs: name, schedule, whether the batch is cut into micro-batches.
const RUNS: [(&str, &str, bool); 3] = [
    ("model parallel", "model", false),
    ("pipeline, gpipe", "gpipe", true),
    ("pipeline, 1f1b", "1f1b", true),
];

/// The comparison.
pub struct Classic {
    config: ResolvedConfig,
    /// Transformer blocks, width and parameters.
    sizes: (usize, usize, u64),
    steps: usize,
    threads: usize,
    runs: Vec<(&'static str, StrategyFigures)>,
}

/// Runs the comparison, `steps` steps each; `config` is [`CONFIG`], completed for its `model`.
///
/// # Errors
/// Not enough memory, a rank that died, a signal.
pub fn compare(
    (config, model): (ResolvedConfig, Arc<dyn Model>),
    steps: usize,
    threads: usize,
    launcher: &dyn Launcher,
    progress: &mut dyn FnMut(&str),
) -> Result<Classic> {
    let config = config.with(|config| config.train.threads = Some((threads / RANKS).max(1)))?;
    let mut runs = Vec::new();
    let network = model.whole();
    let sizes = (network.layers(), network.width(), network.elements() as u64);
    let bench = Bench { config, model, ranks: RANKS, threads, warmup: WARMUP, steps, launcher };
    for (name, schedule, cut) in RUNS {
        progress(name);
        let mut config = RunConfig::clone(&bench.config);
        config.parallel.schedule = schedule.into();
        if !cut {
            config.parallel.micro_batches = Some(1);
        }
        let ran = bench.ranks(config);
        launcher.check_signals()?;
        runs.push((name, ran.with_context(|| format!("the classic comparison, {name}"))?));
    }
    let config = bench.config;
    let threads = config.train.threads.unwrap_or(1);
    Ok(Classic { config, sizes, steps, threads, runs })
}

impl Classic {
    /// Mean step time of the first run divided by that of this run.
    fn speed_up(&self, ran: &StrategyFigures) -> f64 {
        self.runs[0].1.mean_and_deviation().0 / ran.mean_and_deviation().0
    }
}

/// Bytes of the rank with the largest peak.
fn largest_peak(ran: &StrategyFigures) -> u64 {
    ran.ranks[ran.largest_and_smallest().0].measured.bytes
}

/// The comparison as text.
pub fn to_text(classic: &Classic) -> String {
    let table = Table::of(
        &classic.runs,
        &[
            ("", &|(name, _)| name.to_string()),
            ("micro-batches", &|(_, ran)| ran.micro_batches.to_string()),
            ("step, mean", &|(_, ran)| step_time(ran.mean_and_deviation().0)),
            ("deviation", &|(_, ran)| step_time(ran.mean_and_deviation().1)),
            ("speed-up", &|(_, ran)| format!("{:.2}", classic.speed_up(ran))),
            ("bubble, simulated", &|(_, ran)| percent(ran.bubble.unwrap_or(0.0))),
            ("measured", &|(_, ran)| percent(ran.waited_fraction())),
            ("largest rank", &|(_, ran)| bytes(largest_peak(ran))),
            ("loss", &|(_, ran)| format!("{:.4}", ran.loss())),
        ],
    );
    let (layers, width, parameters) = classic.sizes;
    format!(
        "Model parallel against pipeline: a BERT of {} x {} ({} parameters), batch {} of {} tokens, {} of {}, {} after \
         {WARMUP} of warm-up\n{table}  A bubble is the time in which ranks wait: simulated with the operations of each \
         stage, measured as waiting over step\n",
        layers,
        width,
        count(parameters as f64),
        classic.config.batch.global,
        classic.config.model.seq,
        plural(RANKS, "rank"),
        plural(classic.threads, "thread"),
        plural(classic.steps, "step"),
    )
}

/// The comparison as JSON.
pub fn to_json(classic: &Classic) -> Value {
    let run = |(name, ran): &(&str, StrategyFigures)| {
        let (mean, deviation) = ran.mean_and_deviation();
        json!({
            "name": name, "micro_batches": ran.micro_batches, "step_s_mean": mean, "step_s_deviation": deviation,
            "step_s": ran.step_s(), "speed_up": classic.speed_up(ran), "bubble_fraction": ran.bubble,
            "bubble_fraction_measured": ran.waited_fraction(), "peak_bytes_most": largest_peak(ran),
            "as_planned": ran.as_planned(), "sent_bytes_per_step": ran.sent_bytes(), "loss": ran.loss(),
        })
    };
    let (layers, width, parameters) = classic.sizes;
    json!({
        "batch": classic.config.batch.global, "seq": classic.config.model.seq, "layers": layers,
        "hidden": width, "parameters": parameters, "ranks": RANKS,
        "threads": classic.threads, "steps": classic.steps,
        "runs": classic.runs.iter().map(run).collect::<Vec<_>>(),
    })
}
