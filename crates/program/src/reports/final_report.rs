//! The report at the end of a run: losses, measured against planned memory, a sample, the run folder, and commands to
//! try next. It is read from the run folder.

use anyhow::{Context, Result, bail};
use phalanx_models::Objective;
use phalanx_plan::trace::Memory;
use phalanx_train::RunConfig;
use phalanx_train::metrics::RankBytes;
use phalanx_train::metrics_lines::MetricsLines;
use phalanx_train::run::due;
use phalanx_train::run_files::METRICS_FILE;
use phalanx_train::sample::{Generator, Sampling};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::arguments::limits::MEMORY_BYTES;
use crate::configuration::learning_rate;
use crate::folders::run_folder::{RunFolder, model_of};
use crate::folders::{continuation, kept_checkpoints, resume};
use crate::host::environment::Environment;
use crate::host::machine;
use crate::host::output::TrainOutput;
use crate::plans::data_report::DataReport;
use crate::plans::planned::Planned;
use phalanx_drawing::report::{bytes, plural, seconds};

/// Tokens of the sample at the end.
const SAMPLE_TOKENS: usize = 200;

/// The last line of `train --json`, of a run on `data`.
///
/// # Errors
/// Those of [`Reached::read`].
pub fn line(folder: &RunFolder, data: &DataReport) -> Result<Value> {
    let reached = Reached::read(folder)?;
    Ok(json!({
        "run": folder.path(),
        "checkpoint": folder.file(&format!("checkpoints/step-{}", reached.step)),
        "steps": reached.step,
        "last_loss": reached.losses.map(|(_, last)| last),
        "last_val_loss": reached.val_loss.map(|(loss, _)| loss),
        "step_s_median": reached.step_s,
        "skipped_steps": reached.skipped,
        "data": data.to_json(),
    }))
}

/// Returns whether the run has made `step`, but not the evaluation after it, because it was stopped meanwhile.
pub fn lacks_evaluation(folder: &RunFolder, planned: &Planned, step: u64) -> bool {
    let train = &planned.config.train;
    if planned.plan.spec.batch.evaluated == 0 || !(step == train.steps || due(step, train.eval_every)) {
        return false;
    }
    // What cannot be read says nothing.
    let lines = MetricsLines::open(&folder.file(METRICS_FILE)).ok().flatten().into_iter().flatten();
    let (mut made, mut evaluated) = (false, false);
    for line in lines.map_while(Result::ok).filter(|line| line.step() == Some(step)) {
        let has = |key: &str| line.record().is_some_and(|record| record.get(key).is_some());
        made |= has("loss");
        evaluated |= has("val_loss");
    }
    made && !evaluated
}

/// Summary of `metrics.jsonl`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Reached {
    /// Last step.
    pub step: u64,
    /// Loss of the first step and of the last.
    pub losses: Option<(f64, f64)>,
    /// Last validation loss, and the number of its windows.
    pub val_loss: Option<(f64, Option<usize>)>,
    /// Accuracy, F1 over all classes, and F1 of the second of two, by the last evaluation of a model with classes.
    pub scores: [Option<f64>; 3],
    /// Median seconds of a step.
    pub step_s: Option<f64>,
    /// Steps that overflowed and were not applied.
    pub skipped: usize,
}

impl Reached {
    /// Reads the file; without a file, no step was reached. Lines that are not JSON are skipped: a run that was killed
    /// while it wrote leaves one.
    ///
    /// # Errors
    /// A file that cannot be read, or whose lines are longer than any that a run writes.
    pub fn read(folder: &RunFolder) -> Result<Reached> {
        let path = folder.file(METRICS_FILE);
        MetricsLines::open(&path)
            .map_err(Into::into)
            .and_then(Reached::from_lines)
            .with_context(|| format!("cannot read {}", path.display()))
    }

    fn from_lines(lines: Option<MetricsLines>) -> Result<Reached> {
        let mut reached = Reached::default();
        let mut times = Vec::new();
        for line in lines.into_iter().flatten() {
            let Some(line) = line?.record() else { continue };
            reached.step = line["step"].as_u64().unwrap_or(reached.step);
            if let Some(loss) = line["loss"].as_f64() {
                reached.losses = Some((reached.losses.map_or(loss, |(first, _)| first), loss));
            }
            let windows = line["windows"].as_u64().map(|windows| windows as usize);
            reached.val_loss = line["val_loss"].as_f64().map(|loss| (loss, windows)).or(reached.val_loss);
            if line["accuracy"].is_number() {
                reached.scores = ["accuracy", "f1_macro", "f1"].map(|score| line[score].as_f64());
            }
            times.extend(line["step_s"].as_f64());
            reached.skipped += usize::from(line["skipped"] == true);
        }
        times.sort_by(f64::total_cmp);
        reached.step_s = times.get(times.len() / 2).copied();
        Ok(reached)
    }
}

#[derive(Deserialize)]
struct Measured {
    ranks: Vec<RankBytes>,
}

/// Compares `memory.json` with the plan.
///
/// # Errors
/// A rank that used other bytes than planned, which is a bug of the engine.
pub fn memory(folder: &RunFolder, planned: &Planned) -> Result<String> {
    let path = folder.file("memory.json");
    let text =
        phalanx_system::files::read_text(&path, MEMORY_BYTES).with_context(|| path.display().to_string())?;
    let measured: Measured = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
    let world = planned.plan.spec.world_size();
    if measured.ranks.iter().map(|rank| rank.rank).ne(0..world) {
        bail!("{} does not have the {world} ranks of this run, each once and in order", path.display());
    }
    for rank in &measured.ranks {
        let own = planned.plan.of(rank.rank);
        for (memory, took) in
            [(Memory::Device, &rank.device), (Memory::Host, &rank.host), (Memory::Disk, &rank.disk)]
        {
            let (plan, memory) = (own.peak_of(memory), memory.name());
            if took.peak_bytes != plan.bytes || took.categories != plan.categories {
                bail!(
                    "rank {} used {took:?} of {memory} memory, but {plan:?} was planned: please report this bug",
                    rank.rank
                );
            }
        }
    }
    let max = measured.ranks.iter().map(|rank| rank.device.peak_bytes).max().unwrap_or(0);
    let alike = measured.ranks.iter().all(|rank| rank.device.peak_bytes == max);
    let above = |rank: &RankBytes| {
        rank.resident_bytes_peak.unwrap_or(0).saturating_sub(rank.device.peak_bytes + rank.host.peak_bytes)
    };
    let outside = measured.ranks.iter().map(above).max().unwrap_or(0);
    Ok(format!(
        "memory      peak == plan: {}{max} bytes ({}) on each of {}; resident above the plan {} (estimated {})",
        if alike { "" } else { "at most " },
        bytes(max),
        plural(measured.ranks.len(), "rank"),
        bytes(outside),
        bytes(planned.outside_bytes())
    ))
}

/// The report of a run that reached its last step.
///
/// # Errors
/// Files of the run folder that cannot be read.
pub fn complete(
    folder: &RunFolder,
    planned: &Planned,
    environment: Environment,
    output: &TrainOutput,
) -> Result<()> {
    let reached = Reached::read(folder)?;
    output.print_line("");
    if let Some((first, last)) = reached.losses {
        let mean = reached.step_s.map_or(String::new(), |s| format!("; {} a step", seconds(s)));
        output
            .print_line(&format!("training    loss {first:.4} -> {last:.4} in {} steps{mean}", reached.step));
    }
    if reached.skipped > 0 {
        let skipped = plural(reached.skipped, "step");
        output.print_line(&format!(
            "            {skipped} of them overflowed and changed nothing but the loss scale"
        ));
    }
    if let Some((val_loss, windows)) = reached.val_loss {
        let over = windows.map_or(String::new(), |windows| format!(", over {}", plural(windows, "window")));
        let bits = val_loss / std::f64::consts::LN_2;
        let [accuracy, f1_macro, f1] = reached.scores;
        match accuracy.zip(f1_macro) {
            None => {
                output.print_line(&format!("validation  loss {val_loss:.4} ({bits:.2} bits a token{over})"));
            }
            Some((accuracy, f1_macro)) => {
                let second = f1.map_or(String::new(), |f1| format!(", {f1:.4} of the second class"));
                output.print_line(&format!("validation  loss {val_loss:.4} ({bits:.2} bits a row{over})"));
                output.print_line(&format!(
                    "            accuracy {accuracy:.4}, F1 {f1_macro:.4} (macro){second}"
                ));
            }
        }
    }
    output.print_line(&memory(folder, planned)?);
    sample(folder, planned, environment, output)?;
    output.print_line(&format!("\nrun folder  {}", folder.path().display()));
    output.print_line(&kept_checkpoints::left(folder, &planned.config)?);
    output.print_line("            config.toml  plan.json  memory.json  metrics.jsonl  checkpoints/");
    output.print_line(&next(folder, planned));
    Ok(())
}

/// A sample from the last checkpoint.
fn sample(
    folder: &RunFolder,
    planned: &Planned,
    environment: Environment,
    output: &TrainOutput,
) -> Result<()> {
    let prompt = &planned.config.train.sample;
    if prompt.is_empty() || planned.plan.spec.model.definition.objective() != Objective::Causal {
        return Ok(());
    }
    let checkpoint = folder.checkpoint(None)?;
    let Some(tokenizer) = folder.tokenizer_of(&checkpoint)? else { return Ok(()) };
    let [begin, _] = tokenizer.framing();
    let mut tokens = begin.to_vec();
    tokens.extend(tokenizer.encode(prompt)?);
    if tokens.is_empty() {
        return Ok(());
    }
    let model = model_of(&checkpoint)?;
    if let Err(error) = continuation::check_prompt(&tokens, model.vocab(), &tokenizer) {
        output.print_line(&format!("no sample   train.sample: {error:#}"));
        return Ok(());
    }
    output.print_line(&format!(
        "\nsample of step {} ({} tokens after the prompt)\n",
        checkpoint.step(),
        SAMPLE_TOKENS
    ));
    let device = environment.unplanned_device(machine::cores())?;
    let generator =
        Generator::load(&*model, &checkpoint, &tokenizer, device, planned.config.precision.compute.into())?;
    let how = Sampling { temperature: 0.8, seed: planned.config.train.seed, ..Sampling::default() };
    output.print(prompt);
    let mut show = |text: &str| {
        output.print(text);
        Ok(())
    };
    let mut growing = generator.growing(tokens.len() + SAMPLE_TOKENS, how.shift);
    continuation::stream(&mut growing, &tokenizer, &mut tokens, (SAMPLE_TOKENS, &[]), how, &mut show)?;
    output.print_line("");
    Ok(())
}

fn next(folder: &RunFolder, planned: &Planned) -> String {
    let run = resume::shell_word(&folder.path().display().to_string());
    let more = learning_rate::more_steps(&planned.config);
    let ranks = planned.plan.spec.world_size() * 2;
    let continues = planned.plan.spec.model.definition.objective() == Objective::Causal;
    let data = &planned.config.data;
    let sample = continues.then(|| match data.chat.is_some() || data.pairs.is_some() {
        true => format!("phalanx chat {run}"),
        false => format!("phalanx sample {run} --prompt 'fn main'"),
    });
    let mut lines: Vec<String> = sample.into_iter().collect();
    lines.push(format!("phalanx train --run {run} --resume {more}    train on"));
    lines.extend(learning_rate::more_steps_with_restart(&planned.config).map(|more| {
        format!("phalanx train --run {run} --resume {more}    with a warm restart: the loss rises first")
    }));
    let own = "phalanx train CONFIG --data YOUR-TEXTS --run runs/mine    your own text".to_string();
    lines.extend((!planned.config.data.has_rows()).then_some(own));
    lines.push(format!("phalanx export {run} --out hf-folder    for transformers"));
    let sharded = |config: &mut RunConfig| {
        (config.parallel.ranks, config.parallel.data, config.parallel.zero) = (Some(ranks), None, 3);
    };
    if planned.with(sharded).is_ok() {
        let line = format!("phalanx plan {run}/config.toml --nproc {ranks} --set parallel.zero=3");
        lines.push(format!("{line}    more ranks, less memory on each"));
    }
    format!("next        {}", lines.join("\n            "))
}
