//! nanoGPT's `config/*.py`, with the defaults of its `train.py`.

use anyhow::Result;
use phalanx_train::config::declare::NANOGPT as PROGRAM;

use super::Type::{Any, Flag, Number, Text};
use super::Verdict::{Differs, Only, Unneeded};
use super::{Draft, Format, LOGS, Other, python};

/// The format.
pub const NANOGPT: Format =
    Format { name: "nanoGPT", programs: &[PROGRAM], read: python::read, others: OTHERS, rules };

const OTHERS: &[Other] = &[
    ("wandb_log", Flag, Differs(LOGS)),
    ("wandb_project", Any, Unneeded(LOGS)),
    ("wandb_run_name", Any, Unneeded(LOGS)),
    ("log_interval", Number, Unneeded(LOGS)),
    ("backend", Text, Unneeded("ranks find the fastest way between them")),
    ("compile", Flag, Unneeded("kernels are compiled already")),
    ("eval_only", Flag, Only(&["false"], "a run evaluates after its last step: set max_iters to 1")),
];

/// Defaults of `train.py` that are not ours: the name, our key, the value.
const NUMBERS: [(&str, &str, f64); 6] = [
    ("min_lr", "schedule.min_lr", 6e-5),
    ("warmup_iters", "schedule.warmup", 2000.0),
    ("max_iters", "train.steps", 600_000.0),
    ("eval_interval", "train.eval_every", 2000.0),
    ("n_layer", "model.layers", 12.0),
    ("n_head", "model.heads", 12.0),
];

fn rules(draft: &mut Draft) -> Result<()> {
    start(draft);
    batch(draft)?;
    let is_constant = schedule(draft);
    for (name, key, value) in NUMBERS {
        let is_of_model = key.starts_with("model.")
            && draft.rows.iter().any(|row| row.ours.as_ref().is_some_and(|of| of.0 == "model.init"));
        let is_known = draft.peek(name).is_some()
            || draft.rows.iter().any(|row| row.ours.as_ref().is_some_and(|of| of.0 == key));
        let is_of_decay = is_constant && key.starts_with("schedule.");
        if !(is_known || is_of_model || is_of_decay) {
            let whole = key != "schedule.min_lr";
            let value = if whole { toml::Value::Integer(value as i64) } else { value.into() };
            draft.default(name, key, value, "the default of train.py");
        }
    }
    let is_bias = draft.take_flag("bias");
    match is_bias {
        Some((entry, true)) => draft.unneeded(&entry, "GPT-2 has biases here"),
        Some((entry, false)) => draft.row(&entry, None, super::Outcome::Differs, "GPT-2 has biases here"),
        None => {}
    }
    saves(draft);
    let device = draft.take("device");
    if let Some(entry) = device {
        match entry.value.word().split(':').next() {
            Some("cpu") => draft.give(&entry, "device.kind", "cpu", ""),
            Some("cuda") => draft.give(&entry, "device.kind", "cuda", ""),
            _ => draft.wrong(&entry, "\"cpu\" or \"cuda\""),
        }
    }
    if draft.peek("dtype").is_none() {
        draft.default(
            "dtype",
            "precision.compute",
            "bf16",
            "the default of train.py on a GPU; parameters are bf16, with f32 master weights",
        );
    }
    Ok(())
}

/// `init_from` and `dataset`.
fn start(draft: &mut Draft) {
    if let Some(entry) = draft.take("init_from") {
        match entry.value.text() {
            Some("scratch") => draft.unneeded(&entry, "a run starts from initial values"),
            Some("resume") => draft.refuse(&entry, "phalanx train --resume continues a run"),
            Some(model) => draft.give(&entry, "model.init", model.to_string(), "a folder with config.json and safetensors files, or a model in the cache of Hugging Face's hub"),
            None => draft.wrong(&entry, "text"),
        }
    }
    if let Some(entry) = draft.take("dataset") {
        let Some(name) = entry.value.text().map(str::to_string) else { return draft.wrong(&entry, "text") };
        let why = "the files of its prepare.py; meta.pkl is not read, so give model.vocab for characters";
        draft.give(&entry, "data.tokens", format!("data/{name}/train.bin"), why);
        draft.default(
            "dataset",
            "data.validation_tokens",
            format!("data/{name}/val.bin"),
            "the files of its prepare.py",
        );
        draft.default("dataset", "data.token_type", "u16", "the type of its files");
    }
}

/// `batch_size` is a micro-batch; `gradient_accumulation_steps` counts those of all ranks.
fn batch(draft: &mut Draft) -> Result<()> {
    let micro = draft.take_count("batch_size");
    let count = draft.take_count("gradient_accumulation_steps");
    let [m, c] = [micro.as_ref().map_or(12, |of| of.1), count.as_ref().map_or(40, |of| of.1)];
    let ranks = draft.mesh()?.data as u64;
    let product = format!("{m} x {c} over all ranks");
    let global = i64::try_from(m.saturating_mul(c)).unwrap_or(i64::MAX);
    if !c.is_multiple_of(ranks) {
        let line = count.as_ref().map_or(1, |(entry, _)| entry.line);
        draft.faults.push((line, format!("gradient_accumulation_steps = {c} counts the micro-batches of all ranks, and must be a multiple of the {ranks} data-parallel ranks")));
    }
    match &micro {
        Some((entry, _)) => draft.give(entry, "batch.micro", m as i64, ""),
        None => draft.default("batch_size", "batch.micro", m as i64, "the default of train.py"),
    }
    match &count {
        Some((entry, _)) => draft.give(entry, "batch.global", global, &product),
        None => draft.default("gradient_accumulation_steps", "batch.global", global, &product),
    }
    if let Some((entry, batches)) = draft.take_count("eval_iters") {
        let samples = i64::try_from(batches.saturating_mul(m)).unwrap_or(i64::MAX);
        draft.give(
            &entry,
            "train.eval_samples",
            samples,
            "counted in sequences; theirs counts batches, drawn anew for each evaluation",
        );
    }
    Ok(())
}

/// `decay_lr`; returns whether it is off.
fn schedule(draft: &mut Draft) -> bool {
    let decays = draft.take_flag("decay_lr");
    let is_constant = decays.as_ref().is_some_and(|(_, on)| !on);
    let kind = if is_constant { "constant" } else { "cosine" };
    match decays {
        Some((entry, _)) => draft.give(&entry, "schedule.kind", kind, ""),
        None => draft.default("decay_lr", "schedule.kind", kind, "the default of train.py"),
    }
    if !is_constant && draft.peek("lr_decay_iters").is_none() {
        draft.default("lr_decay_iters", "schedule.decay_steps", 600_000, "the default of train.py");
    }
    if is_constant {
        for name in ["lr_decay_iters", "min_lr", "warmup_iters"] {
            if let Some(entry) = draft.take(name) {
                draft.unneeded(&entry, "decay_lr is False");
            }
        }
        // Their constant rate has no warm-up.
        draft.default("decay_lr", "schedule.warmup", 0, "their constant rate has none");
    }
    is_constant
}

/// Checkpoints are saved at evaluations.
fn saves(draft: &mut Draft) {
    let always = draft.take_flag("always_save_checkpoint");
    let every = draft.peek("eval_interval").and_then(|entry| entry.value.whole()).unwrap_or(2000) as i64;
    draft.default("eval_interval", "train.save_every", every, "they save at evaluations");
    if let Some((entry, on)) = always {
        match on {
            true => draft.unneeded(&entry, "every checkpoint is saved"),
            false => draft.give(&entry, "train.keep_best", true, "the best state is kept beside the newest"),
        }
    }
}
