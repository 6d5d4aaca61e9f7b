//! DeepSpeed's `config.json` (0.19.6), with "auto" as Hugging Face's Trainer fills it, and what follows from several of its keys.

mod batch;
mod learning_rate;
mod others;

use anyhow::Result;
use phalanx_train::config::declare::DEEPSPEED as PROGRAM;

use super::value::{Entry, Value};
use super::{Draft, Format, hjson};
use others::OTHERS;

/// The format.
pub const DEEPSPEED: Format =
    Format { name: "DeepSpeed", programs: &[PROGRAM], read: hjson::read, others: OTHERS, rules };

/// Names of earlier versions, and those of today.
const EARLIER: [(&str, &str); 8] = [
    ("bfloat16.", "bf16."),
    (
        "zero_optimization.gather_16bit_weights_on_model_save",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    ),
    ("zero_optimization.prefetch_bucket_size", "zero_optimization.stage3_prefetch_bucket_size"),
    ("zero_optimization.param_persistence_threshold", "zero_optimization.stage3_param_persistence_threshold"),
    ("zero_optimization.model_persistence_threshold", "zero_optimization.stage3_model_persistence_threshold"),
    ("zero_optimization.max_live_parameters", "zero_optimization.stage3_max_live_parameters"),
    ("zero_optimization.max_reuse_distance", "zero_optimization.stage3_max_reuse_distance"),
    ("tensor_parallel.tp_size", "tensor_parallel.autotp_size"),
];

/// Values that Trainer fills in: the name, the key here that has Trainer's argument, and that argument's default. Without a
/// default, ours.
const FILLED: [(&str, &str, Option<f64>); 8] = [
    ("gradient_clipping", "optimizer.clip", Some(1.0)),
    ("optimizer.params.lr", "optimizer.lr", Some(5e-5)),
    ("optimizer.params.eps", "optimizer.eps", Some(1e-8)),
    ("optimizer.params.weight_decay", "optimizer.weight_decay", Some(0.0)),
    ("scheduler.params.warmup_min_lr", "", Some(0.0)),
    ("scheduler.params.warmup_max_lr", "optimizer.lr", Some(5e-5)),
    ("scheduler.params.warmup_num_steps", "schedule.warmup", Some(0.0)),
    ("scheduler.params.total_num_steps", "train.steps", None),
];

const AUTO: &str = "auto";

fn rules(draft: &mut Draft) -> Result<()> {
    for entry in &mut draft.left {
        if let Some((earlier, now)) = EARLIER.iter().find(|(earlier, _)| {
            entry.name == *earlier || earlier.ends_with('.') && entry.name.starts_with(earlier)
        }) {
            entry.name = entry.name.replacen(earlier, now, 1);
        }
    }
    fill(draft)?;
    stage(draft);
    precision(draft);
    offload(draft);
    learning_rate::optimizer(draft);
    learning_rate::scheduler(draft)?;
    mesh(draft);
    batch::batch(draft)?;
    if draft.peek("gradient_clipping").is_none() {
        draft.default("gradient_clipping", "optimizer.clip", 1.0, "theirs since June 2026, and none before");
    }
    Ok(())
}

/// Returns whether a value is left to the program that calls DeepSpeed.
fn is_auto(entry: &Entry) -> bool {
    entry.value.text() == Some(AUTO)
}

/// Fills in what is "auto". Names without a row in [`FILLED`] keep the word: their rules or defaults have it.
fn fill(draft: &mut Draft) -> Result<()> {
    let config = draft.given.config()?;
    let mut left = std::mem::take(&mut draft.left);
    for entry in left.iter_mut().filter(|entry| is_auto(entry)) {
        let value = |number: f64| Value::Number(number, number.to_string());
        let given = |key: &str| {
            draft.given.value(key).and_then(|own| own.as_float().or(own.as_integer().map(|own| own as f64)))
        };
        let said = |key: &str, given: bool| match given {
            true => format!("auto: {key} as given"),
            false => "auto: Trainer's default".to_string(),
        };
        let name = entry.name.as_str();
        let (filled, source) =
            if let Some((_, key, default)) = FILLED.iter().find(|(filled, ..)| *filled == name) {
                let own = given(key).or(default.is_none().then_some(config.train.steps as f64));
                (value(own.or(*default).unwrap_or(0.0)), said(key, given(key).is_some() || default.is_none()))
            } else if name == "optimizer.params.betas" {
                let betas = [("optimizer.beta1", 0.9), ("optimizer.beta2", 0.999)];
                let values = betas.map(|(key, default)| value(given(key).unwrap_or(default)));
                (
                    Value::List(values.to_vec()),
                    said("optimizer.beta1", betas.iter().any(|(key, _)| given(key).is_some())),
                )
            } else if name == "fp16.enabled" || name == "bf16.enabled" {
                let compute = config.precision.compute.name();
                let is_given = draft.given.has("precision.compute");
                (
                    Value::Flag(name.starts_with(if compute == "f16" { "fp16" } else { compute })),
                    said("precision.compute", is_given),
                )
            } else {
                (entry.value.clone(), "auto".to_string())
            };
        draft.autos.push((entry.name.clone(), source));
        entry.value = filled;
    }
    draft.left = left;
    Ok(())
}

/// `fp16`, `bf16` and the types of gradients.
fn precision(draft: &mut Draft) {
    let flags = ["fp16.enabled", "bf16.enabled"].map(|name| draft.take_flag(name));
    let [f16, bf16] = flags.each_ref().map(|flag| flag.as_ref().is_some_and(|(_, on)| *on));
    let compute = match (f16, bf16) {
        (true, true) => {
            let lines: Vec<usize> = flags.iter().flatten().map(|(entry, _)| entry.line).collect();
            let fault = format!("fp16.enabled and bf16.enabled are both true (lines {lines:?}): choose one");
            return draft.faults.push((lines[0], fault));
        }
        (true, false) => "f16",
        (false, true) => "bf16",
        (false, false) => "f32",
    };
    for (flag, word) in flags.iter().zip(["f16", "bf16"]) {
        let Some((entry, on)) = flag else { continue };
        match (*on, word == compute || compute == "f32") {
            (false, false) => draft.unneeded(entry, &format!("precision.compute is {compute:?}")),
            _ => draft.give(entry, "precision.compute", compute, ""),
        }
    }
    if !f16 {
        let of_f16 = |entry: &Entry| entry.name.starts_with("fp16.");
        let (unused, left) = std::mem::take(&mut draft.left).into_iter().partition(of_f16);
        draft.left = left;
        let unused: Vec<Entry> = unused;
        unused.iter().for_each(|entry| draft.unneeded(entry, "fp16 is off"));
    }
    let is_open = draft.peek("data_types.grad_accum_dtype").is_none_or(|of| of.value == Value::Null);
    if compute != "f32" && is_open {
        let why = "as theirs: gradients of micro-batches are summed in the type of the model; data_types.grad_accum_dtype = \
                   \"fp32\" sums in f32";
        draft.default("data_types.grad_accum_dtype", "precision.accumulate", compute, why);
    }
}

/// Stages written as a flag, before DeepSpeed had several.
fn stage(draft: &mut Draft) {
    let is_flag = draft.peek("zero_optimization").is_some_and(|entry| entry.value.flag().is_some());
    if let Some((entry, on)) = is_flag.then(|| draft.take_flag("zero_optimization")).flatten() {
        draft.give(&entry, "parallel.zero", i64::from(on), "");
    }
}

/// `offload_optimizer` and `offload_param`, with the names of DeepSpeed before 0.4.
fn offload(draft: &mut Draft) {
    let stage = draft.peek("zero_optimization.stage").and_then(|entry| entry.value.whole()).unwrap_or(0);
    let parts = [
        ("offload_optimizer", "cpu_offload", "memory.optimizer", 1),
        ("offload_param", "cpu_offload_params", "memory.parameters", 3),
    ];
    let (mut paths, mut pins) = (Vec::new(), Vec::new());
    for (part, earlier, key, min) in parts {
        let name = |leaf: &str| format!("zero_optimization.{part}.{leaf}");
        let old = draft
            .take_flag(&format!("zero_optimization.{earlier}"))
            .map(|(entry, on)| (entry, usize::from(on)));
        let lies = draft.take_word(&name("device"), &["none", "cpu", "nvme"]).or(old);
        let tier = lies.as_ref().map_or("device", |(_, at)| ["device", "host", "nvme"][*at]);
        if let Some((entry, at)) = &lies {
            if *at > 0 && stage < min {
                let fault = format!(
                    "{} = {} needs zero_optimization.stage of {min} or more; it is {stage}",
                    entry.name, entry.value
                );
                draft.faults.push((entry.line, fault));
            }
            draft.give(entry, key, tier, "");
            if *at > 0 && part == "offload_optimizer" {
                let why = "as theirs: reduced gradients lie where the optimizer is";
                draft.default(&name("device"), "memory.gradients", tier, why);
            }
        }
        let path = draft.take(&name("nvme_path")).filter(|entry| entry.value != Value::Null);
        match path {
            Some(entry) if tier == "nvme" => paths.push(entry),
            Some(entry) => draft.unneeded(&entry, &format!("{key} is {tier:?}")),
            None if tier == "nvme" => {
                let line = lies.as_ref().map_or(1, |(entry, _)| entry.line);
                draft.faults.push((
                    line,
                    format!(
                        "{} = \"nvme\" needs {}: a folder on a local disk",
                        name("device"),
                        name("nvme_path")
                    ),
                ));
            }
            None => {}
        }
        let pin = draft.take_flag(&name("pin_memory"));
        match pin {
            Some((entry, _)) if tier == "device" => {
                draft.unneeded(&entry, "nothing of this part lies in host memory")
            }
            pin => pins.extend(pin.map(|(entry, _)| entry)),
        }
    }
    one_of(draft, &paths, "memory.nvme_path", "several folders of one list are for several disks");
    one_of(draft, &pins, "memory.pin_memory", "all of host memory is locked, or none");
    let ratio = draft.take_number("zero_optimization.offload_optimizer.ratio");
    match ratio {
        Some((entry, 1.0)) => draft.unneeded(&entry, "all states are where memory.optimizer says"),
        Some((entry, ratio)) => {
            draft.refuse(&entry, &format!("set memory.placement = \"host\" and memory.offload_optim_frac = {ratio} instead of offload_optimizer"));
        }
        None => {}
    }
}

/// Gives a key the value that two names have, which must be the same.
fn one_of(draft: &mut Draft, entries: &[Entry], key: &str, why: &str) {
    let [first, rest @ ..] = entries else { return };
    for entry in entries {
        draft.give(entry, key, entry.value.to_toml().unwrap_or_else(|| "".into()), "");
    }
    if let Some(other) = rest.iter().find(|other| other.value != first.value) {
        let fault = format!(
            "{} = {} and {} = {} (line {}) differ, and {key} is one here: {why}",
            other.name, other.value, first.name, first.value, first.line
        );
        draft.faults.push((other.line, fault));
    }
}

/// `tensor_parallel` and `activation_checkpointing`, which needs it.
fn mesh(draft: &mut Draft) {
    let tensor = draft.take_count("tensor_parallel.autotp_size");
    if let Some((entry, ranks)) = &tensor {
        draft.give(entry, "parallel.tensor", *ranks as i64, "");
    }
    let given = draft.given.config().map_or(1, |config| config.parallel.tensor as u64);
    let ranks = tensor.map_or(given, |(_, ranks)| ranks);
    if let Some((entry, on)) = draft.take_flag("activation_checkpointing.partition_activations") {
        match on && ranks < 2 {
            true => draft.unneeded(&entry, "one tensor-parallel rank has nothing to divide"),
            false => draft.give(&entry, "memory.partition_activations", on, ""),
        }
    }
}
