//! Optimizers and schedules of Hugging Face's Trainer.

use super::Draft;
use super::value::{Entry, Value};

/// Optimizers by name: the word here.
const OPTIMIZERS: [(&str, &str); 8] = [
    ("adamw_torch", "adamw"),
    ("adamw_torch_fused", "adamw"),
    ("adamw_hf", "adamw"),
    ("adamw", "adamw"),
    ("adamw_apex_fused", "adamw"),
    ("sgd", "sgd"),
    ("lion_32bit", "lion"),
    ("adafactor", "adafactor"),
];

/// Schedules by name: the word here.
const SCHEDULES: [(&str, &str); 9] = [
    ("linear", "linear"),
    ("cosine", "cosine"),
    ("constant", "constant"),
    ("constant_with_warmup", "constant"),
    ("cosine_with_restarts", "cosine_with_restarts"),
    ("cosine_with_min_lr", "cosine"),
    ("polynomial", "polynomial"),
    ("inverse_sqrt", "inverse_sqrt"),
    ("warmup_stable_decay", "wsd"),
];

/// Takes the optimizer, which `name` names.
pub(super) fn optimizer(draft: &mut Draft, name: &str) {
    let entry = draft.take(name);
    let word = entry.as_ref().map_or("adamw_torch".to_string(), |entry| entry.value.word());
    let known = OPTIMIZERS.iter().find(|(theirs, _)| *theirs == word).map(|(_, ours)| *ours);
    if let Some(entry) = entry {
        match known {
            Some(kind) => draft.give(&entry, "optimizer.kind", kind, ""),
            None => {
                draft.refuse(
                    &entry,
                    "the optimizers here are AdamW, SGD, Lion and Adafactor: set adamw_torch",
                );
            }
        }
    }
    let moments = matches!(known, Some("adamw" | "lion") | None);
    for (name, key, value) in [
        ("learning_rate", "optimizer.lr", 5e-5),
        ("weight_decay", "optimizer.weight_decay", 0.0),
        ("adam_beta2", "optimizer.beta2", 0.999),
    ] {
        let is_of_kind = moments || name != "adam_beta2";
        if is_of_kind && draft.peek(name).is_none_or(|entry| entry.value == Value::Null) {
            draft.default(name, key, value, "Trainer's default");
        }
    }
    if !moments {
        let others = ["adam_beta1", "adam_beta2", "adam_epsilon"];
        let others: Vec<Entry> = others.iter().filter_map(|name| draft.take(name)).collect();
        others.iter().for_each(|entry| draft.unneeded(entry, "the optimizer has no moments of Adam"));
    }
}

/// Takes the schedule, which `name` names, and its arguments.
pub(super) fn schedule(draft: &mut Draft, name: &str) {
    let Some(entry) = draft.take(name) else {
        return draft.default(name, "schedule.kind", "linear", "Trainer's default");
    };
    let theirs = entry.value.word();
    let Some((_, kind)) = SCHEDULES.iter().find(|(known, _)| *known == theirs) else {
        let known: Vec<&str> = SCHEDULES.iter().map(|(known, _)| *known).collect();
        return draft.refuse(&entry, &format!("the schedules here are {}", known.join(", ")));
    };
    draft.give(&entry, "schedule.kind", *kind, "");
    let lr = draft.peek("learning_rate").and_then(|entry| entry.value.number()).unwrap_or(5e-5);
    let of = |name: &str| format!("lr_scheduler_kwargs.{name}");
    match theirs.as_str() {
        "cosine_with_restarts" => {
            if let Some((entry, cycles)) = draft.take_count(&of("num_cycles")) {
                draft.give(&entry, "schedule.cycles", cycles as i64, "");
            }
        }
        "cosine_with_min_lr" => {
            if let Some((entry, min)) = draft.take_number(&of("min_lr")) {
                draft.give(&entry, "schedule.min_lr", min, "");
            }
            minimum(draft, &of("min_lr_rate"), lr, "");
        }
        "polynomial" => {
            if let Some((entry, power)) = draft.take_number(&of("power")) {
                draft.give(&entry, "schedule.power", power, "");
            }
            match draft.take_number(&of("lr_end")) {
                Some((entry, min)) => draft.give(&entry, "schedule.min_lr", min, ""),
                None => draft.default(&of("lr_end"), "schedule.min_lr", 1e-7, "their default"),
            }
        }
        "inverse_sqrt" => {
            if let Some((entry, scale)) = draft.take_count(&of("timescale")) {
                draft.give(&entry, "schedule.timescale", scale as i64, "");
            }
        }
        "warmup_stable_decay" => {
            match draft.take_count(&of("num_decay_steps")) {
                Some((entry, steps)) => draft.give(&entry, "schedule.last_steps", steps as i64, ""),
                None => draft.faults.push((entry.line, "warmup_stable_decay needs num_decay_steps".into())),
            }
            if let Some((entry, at)) = draft.take_word(&of("decay_type"), &["cosine", "linear", "1-sqrt"]) {
                draft.give(&entry, "schedule.last_shape", ["cosine", "linear", "1-sqrt"][at], "");
            }
            if let Some((entry, _)) = draft.take_word(&of("warmup_type"), &["linear"]) {
                draft.unneeded(&entry, "the warm-up is linear here, too");
            }
            minimum(draft, &of("min_lr_ratio"), lr, "the warm-up begins at 0, theirs at this rate");
        }
        _ => {}
    }
}

/// Takes the lowest rate, a share of the highest.
fn minimum(draft: &mut Draft, name: &str, lr: f64, differs: &str) {
    if let Some((entry, share)) = draft.take_number(name) {
        draft.give(&entry, "schedule.min_lr", share * lr, if share > 0.0 { differs } else { "" });
    }
}
