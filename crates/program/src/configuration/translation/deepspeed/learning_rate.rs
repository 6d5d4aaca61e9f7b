//! Optimizers and schedules.

use anyhow::Result;

use crate::configuration::translation::Draft;
use crate::configuration::translation::value::{Entry, Value};

/// Optimizers by type: the word here.
const TYPES: [(&str, &str); 5] =
    [("adam", "adamw"), ("adamw", "adamw"), ("fusedadam", "adamw"), ("sgd", "sgd"), ("lion", "lion")];

/// Names of the parameters that are translated, and of those that change nothing.
const DECAY: &str = "biases and norms have no weight decay here";

fn param(name: &str) -> String {
    format!("optimizer.params.{name}")
}

/// `optimizer`, with the defaults of its type for what it leaves out.
pub(super) fn optimizer(draft: &mut Draft) {
    let Some(entry) = draft.take("optimizer.type") else {
        return refuse_rest(draft, "optimizer.params.", "give optimizer.type");
    };
    let name = entry.value.word().to_lowercase();
    let Some((_, kind)) = TYPES.iter().find(|(theirs, _)| *theirs == name) else {
        draft.refuse(
            &entry,
            "of DeepSpeed's optimizers, AdamW, SGD and Lion are here: set optimizer.kind, and what it needs",
        );
        return pass_rest(draft, "optimizer.params.", "it belongs to the optimizer that is refused");
    };
    let mode = draft.take_flag(&param("adam_w_mode"));
    let decay = draft.take_number(&param("weight_decay"));
    let is_coupled = mode.as_ref().is_some_and(|(_, on)| !on);
    let has_decay = decay.as_ref().is_some_and(|(_, decay)| *decay > 0.0);
    let differs = if name == "adam" && !is_coupled && has_decay {
        "their Adam is AdamW unless adam_w_mode is false"
    } else {
        ""
    };
    draft.give(&entry, "optimizer.kind", *kind, differs);
    if let Some((entry, on)) = mode {
        match on || !has_decay {
            true => draft.unneeded(
                &entry,
                if on {
                    "weight decay is decoupled here, too"
                } else {
                    "without weight decay both are the same"
                },
            ),
            false => draft.refuse(
                &entry,
                "weight decay is decoupled here: leave adam_w_mode out, or set weight_decay to 0",
            ),
        }
    }
    match decay {
        Some((entry, decay)) => {
            draft.give(&entry, "optimizer.weight_decay", decay, if decay > 0.0 { DECAY } else { "" })
        }
        None => draft.default(&param("weight_decay"), "optimizer.weight_decay", 0.0, "their default"),
    }
    match draft.take_number(&param("lr")) {
        Some((entry, lr)) => draft.give(&entry, "optimizer.lr", lr, ""),
        None if draft.peek("scheduler.params.warmup_max_lr").is_none() => {
            draft.default(&param("lr"), "optimizer.lr", 1e-3, "their default");
        }
        None => {}
    }
    if *kind == "sgd" {
        match draft.take_number(&param("momentum")) {
            Some((entry, momentum)) => draft.give(&entry, "optimizer.beta1", momentum, ""),
            None => draft.default(&param("momentum"), "optimizer.beta1", 0.0, "their default"),
        }
        return refuse_rest(draft, "optimizer.params.", "SGD here has lr, momentum and weight_decay");
    }
    moments(draft, kind);
}

/// The numbers of AdamW and Lion.
fn moments(draft: &mut Draft, kind: &str) {
    match draft.take(&param("betas")) {
        Some(entry) => {
            let numbers = match &entry.value {
                Value::List(values) => values.iter().filter_map(Value::number).collect(),
                _ => Vec::new(),
            };
            match numbers[..] {
                [first, second] => {
                    draft.give(&entry, "optimizer.beta1", first, "");
                    draft.give(&entry, "optimizer.beta2", second, "");
                }
                _ => draft.wrong(&entry, "two numbers, as [0.9, 0.999]"),
            }
        }
        None => {
            draft.default(&param("betas"), "optimizer.beta1", 0.9, "their default");
            let second = if kind == "lion" { 0.99 } else { 0.999 };
            draft.default(&param("betas"), "optimizer.beta2", second, "their default");
        }
    }
    if kind == "lion" {
        return refuse_rest(draft, "optimizer.params.", "Lion has lr, betas and weight_decay");
    }
    match draft.take_number(&param("eps")) {
        Some((entry, eps)) => draft.give(&entry, "optimizer.eps", eps, ""),
        None => draft.default(&param("eps"), "optimizer.eps", 1e-8, "their default"),
    }
}

/// Takes all names left that begin with `prefix`.
fn take_rest(draft: &mut Draft, prefix: &str) -> Vec<Entry> {
    let of = |entry: &Entry| entry.name.starts_with(prefix);
    let (taken, left) = std::mem::take(&mut draft.left).into_iter().partition(of);
    draft.left = left;
    taken
}

/// Refuses all names left that begin with `prefix`.
fn refuse_rest(draft: &mut Draft, prefix: &str, instead: &str) {
    take_rest(draft, prefix).iter().for_each(|entry| draft.refuse(entry, instead));
}

/// Says of all names left that begin with `prefix` that they need nothing.
fn pass_rest(draft: &mut Draft, prefix: &str, why: &str) {
    take_rest(draft, prefix).iter().for_each(|entry| draft.unneeded(entry, why));
}

/// `scheduler`.
pub(super) fn scheduler(draft: &mut Draft) -> Result<()> {
    let Some(entry) = draft.take("scheduler.type").filter(|entry| entry.value != Value::Null) else {
        refuse_rest(draft, "scheduler.params.", "give scheduler.type");
        if draft.rows.iter().any(|row| row.name == "optimizer.type") {
            let (kind, why) = match draft.autos.is_empty() {
                true => ("constant", "without a scheduler their rate stays"),
                false => ("linear", "Trainer's, where DeepSpeed has no scheduler"),
            };
            draft.default("scheduler", "schedule.kind", kind, why);
        }
        return Ok(());
    };
    let kinds = [("WarmupLR", "constant"), ("WarmupDecayLR", "linear"), ("WarmupCosineLR", "cosine")];
    let Some((name, kind)) = kinds.iter().find(|(name, _)| entry.value.text() == Some(*name)) else {
        draft.refuse(
            &entry,
            "the schedules here are constant, linear and cosine with a warm-up: set schedule.kind",
        );
        pass_rest(draft, "scheduler.params.", "it belongs to the schedule that is refused");
        return Ok(());
    };
    draft.give(&entry, "schedule.kind", *kind, "");
    warmup(draft);
    let lr = rate(draft)?;
    if *kind == "constant" {
        refuse_rest(
            draft,
            "scheduler.params.",
            "WarmupLR has warmup_min_lr, warmup_max_lr, warmup_num_steps and warmup_type",
        );
        return Ok(());
    }
    match draft.take_count("scheduler.params.total_num_steps") {
        Some((entry, steps)) => draft.give(&entry, "schedule.decay_steps", steps as i64, ""),
        None => draft
            .faults
            .push((entry.line, format!("{name} needs total_num_steps, the steps of the whole run"))),
    }
    let min = draft.take_number("scheduler.params.cos_min_ratio");
    match (*kind, min) {
        ("cosine", Some((entry, ratio))) => {
            draft.give(&entry, "schedule.min_lr", ratio * lr, &format!("{ratio} x the rate {lr}"))
        }
        ("cosine", None) => {
            draft.default(
                "scheduler.params.cos_min_ratio",
                "schedule.min_lr",
                1e-4 * lr,
                "their default: 0.0001 x the rate",
            );
        }
        (_, Some((entry, _))) => draft.refuse(&entry, "it belongs to WarmupCosineLR"),
        _ => draft.default("scheduler", "schedule.min_lr", 0.0, "it ends at 0"),
    }
    refuse_rest(draft, "scheduler.params.", "it belongs to another schedule");
    Ok(())
}

/// The steps of the warm-up and its shape.
fn warmup(draft: &mut Draft) {
    let name = "scheduler.params.warmup_num_steps";
    let steps = match draft.take_number(name) {
        Some((entry, _)) if entry.value.whole().is_none() => return draft.wrong(&entry, "a whole number"),
        Some((entry, 1.0)) => {
            draft.give(&entry, "schedule.warmup", 2, "as theirs, which makes two of one");
            2.0
        }
        Some((entry, steps)) => {
            draft.give(&entry, "schedule.warmup", steps as i64, "");
            steps
        }
        None => {
            draft.default(name, "schedule.warmup", 1000, "their default");
            1000.0
        }
    };
    let (name, key) = ("scheduler.params.warmup_type", "schedule.warmup_shape");
    match draft.take_word(name, &["log", "linear"]) {
        Some((entry, _)) if steps == 0.0 => draft.unneeded(&entry, "there is no warm-up"),
        Some((entry, shape)) => draft.give(&entry, key, ["deepspeed-log", "deepspeed-linear"][shape], ""),
        None if steps == 0.0 => {}
        None => draft.default(name, key, "deepspeed-log", "their default"),
    }
}

/// The rate after the warm-up, which replaces that of the optimizer, and the one before it.
fn rate(draft: &mut Draft) -> Result<f64> {
    for name in ["scheduler.params.warmup_min_lr", "scheduler.params.warmup_min_ratio"] {
        match draft.take_number(name) {
            Some((entry, min)) if min > 0.0 => {
                draft.refuse(&entry, "the warm-up begins at 0 here: set it to 0")
            }
            Some((entry, _)) => draft.unneeded(&entry, "0 here, too"),
            None => {}
        }
    }
    let optimizer = draft.rows.iter().position(|row| row.name == param("lr"));
    let of_row = |at: usize| draft.rows[at].ours.as_ref().and_then(|(_, value)| value.as_float());
    let lr = optimizer.and_then(of_row);
    let Some((entry, max)) = draft.take_number("scheduler.params.warmup_max_lr") else {
        return Ok(lr.unwrap_or(draft.given.config()?.optimizer.lr));
    };
    draft.give(&entry, "optimizer.lr", max, "");
    if let Some(at) = optimizer.filter(|_| lr != Some(max)) {
        let row = &mut draft.rows[at];
        (row.ours, row.outcome) = (None, crate::configuration::translation::Outcome::Unneeded);
        row.why = "warmup_max_lr replaces it, as theirs does".into();
    }
    Ok(max)
}
