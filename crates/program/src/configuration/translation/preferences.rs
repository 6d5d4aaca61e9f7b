//! Losses of preferences of axolotl (`rl`) and LLaMA-Factory (the stages `dpo` and `kto`), and tokens that both add.

use super::value::{Entry, Value};
use super::{Draft, Outcome};

const RL: &str = "losses of answers that a model gives during the run are not here: leave it out";
const NO_LOSS: &str = "of losses of pairs here are sigmoid, ipo, orpo and simpo";
const ALONE: &str = "a loss of pairs has no other term here: leave it out";
const SMOOTHED: &str =
    "theirs is the conservative loss of DPO: leave it out, or set preference.kind = \"robust\" here";
const OF_NLL: &str = "TRL adds the loss of chosen answers unless cpo_alpha is 0: set cpo_alpha: 0.0";
const OF_ORPO: &str = "the first term is a mean over each chosen answer's tokens";
const SPECIAL: &str = "they are special tokens here";
const ROWS: &str = "of the tables, the rows of added tokens are trained";

/// Their names that mean nothing without pairs.
const NAMES: [&str; 18] = [
    "rl_beta",
    "orpo_alpha",
    "cpo_alpha",
    "rpo_alpha",
    "dpo_label_smoothing",
    "dpo_norm_loss",
    "dpo_use_weighting",
    "simpo_gamma",
    "kto_desirable_weight",
    "kto_undesirable_weight",
    "pref_beta",
    "pref_ftx",
    "pref_loss",
    "pref_bco_weight",
    "kto_chosen_weight",
    "kto_rejected_weight",
    "ref_model",
    "ref_model_adapters",
];

/// axolotl's `rl`; returns whether pairs are trained.
pub fn axolotl(draft: &mut Draft) -> bool {
    tokens(draft, &["tokens"]);
    let Some(rl) = draft.take("rl").filter(|entry| entry.value != Value::Null) else { return off(draft) };
    let norm = draft.take_flag("dpo_norm_loss");
    let kind = match rl.value.text() {
        Some("dpo") if norm.as_ref().is_some_and(|(_, is_on)| *is_on) => "dpo-norm",
        Some(known @ ("dpo" | "ipo" | "orpo" | "simpo" | "kto")) => known,
        _ => {
            draft.refuse(&rl, RL);
            return true;
        }
    };
    draft.give(&rl, "preference.kind", kind, if kind == "orpo" { OF_ORPO } else { "" });
    norm.iter().for_each(|(entry, _)| draft.unneeded(entry, "preference.kind says it"));
    if let Some(entry) = draft.take("orpo_alpha") {
        match (kind, entry.value.number()) {
            ("orpo", Some(beta)) => draft.give(&entry, "preference.beta", beta, ""),
            _ => draft.unneeded(&entry, "it is ORPO's"),
        }
    }
    match (kind, draft.take_number("cpo_alpha")) {
        ("simpo", Some((entry, 0.0))) => draft.unneeded(&entry, "off here, too"),
        ("simpo", Some((entry, _))) => draft.refuse(&entry, OF_NLL),
        ("simpo", None) => draft.refuse(&rl, OF_NLL),
        (_, of_another) => of_another.iter().for_each(|(entry, _)| draft.unneeded(entry, "it is CPO's")),
    }
    only_zero(draft, "rpo_alpha", ALONE);
    only_zero(draft, "dpo_label_smoothing", SMOOTHED);
    true
}

/// LLaMA-Factory's stages `dpo`, `kto` and `orpo`, with `pref_loss`; returns whether pairs are trained.
pub fn llama_factory(draft: &mut Draft) -> bool {
    tokens(draft, &["add_tokens", "add_special_tokens", "new_special_tokens"]);
    let is_known = |entry: &Entry| matches!(entry.value.text(), Some("dpo" | "kto" | "orpo"));
    let Some(stage) = draft.peek("stage").filter(|entry| is_known(entry)).cloned() else { return off(draft) };
    draft.take("stage");
    let loss = draft.take("pref_loss");
    match (stage.value.text(), loss) {
        (Some("dpo"), Some(entry)) => {
            draft.unneeded(&stage, "preference.kind says it");
            match entry.value.word().as_str() {
                "sigmoid" => draft.give(&entry, "preference.kind", "dpo", ""),
                known @ ("ipo" | "orpo" | "simpo") => draft.give(&entry, "preference.kind", known, ""),
                _ => draft.refuse(&entry, NO_LOSS),
            }
        }
        (kind, loss) => {
            draft.give(&stage, "preference.kind", kind.expect("known above"), "");
            loss.iter().for_each(|entry| draft.unneeded(entry, "the stage says it"));
        }
    }
    for (name, why) in [("pref_ftx", ALONE), ("pref_bco_weight", ALONE), ("dpo_label_smoothing", SMOOTHED)] {
        only_zero(draft, name, why);
    }
    for name in ["ref_model", "ref_model_adapters"] {
        let Some(entry) = draft.take(name) else { continue };
        match entry.value == Value::Null {
            true => draft.unneeded(&entry, "off by default"),
            false => draft.refuse(&entry, "the reference is the model before its first step: leave it out"),
        }
    }
    true
}

/// A number that is not 0 is refused.
fn only_zero(draft: &mut Draft, name: &str, instead: &str) {
    if draft.peek(name).is_some_and(|entry| entry.value == Value::Null) {
        let entry = draft.take(name).expect("it is there");
        return draft.unneeded(&entry, "off by default");
    }
    match draft.take_number(name) {
        Some((entry, 0.0)) => draft.unneeded(&entry, "off here, too"),
        Some((entry, _)) => draft.refuse(&entry, instead),
        None => {}
    }
}

/// Without pairs, their names mean nothing.
fn off(draft: &mut Draft) -> bool {
    for entry in NAMES.iter().filter_map(|name| draft.take(name)).collect::<Vec<_>>() {
        draft.unneeded(&entry, "no pairs of answers are trained");
    }
    false
}

/// Tokens that are added: lists, or words with commas. Their rows are trained beside adapters, where axolotl names the tables.
fn tokens(draft: &mut Draft, names: &[&str]) {
    let entries: Vec<Entry> = names.iter().filter_map(|name| draft.take(name)).collect();
    let mut all: Vec<toml::Value> = Vec::new();
    for entry in entries.iter().filter(|entry| entry.value != Value::Null) {
        match (&entry.value, entry.value.to_toml()) {
            (Value::List(_), Some(toml::Value::Array(tokens))) => all.extend(tokens),
            (Value::Text(words), _) => all.extend(words.split(',').map(|word| word.trim().into())),
            _ => draft.wrong(entry, "a list of tokens"),
        }
    }
    let Some((first, others)) = entries.split_first() else { return };
    match all.is_empty() {
        true => draft.unneeded(first, "no tokens are added"),
        false => draft.give(first, "model.add_tokens", all, SPECIAL),
    }
    others.iter().for_each(|entry| draft.unneeded(entry, "in model.add_tokens, with the first"));
    let is_table = |name: &Value| matches!(name.text(), Some("embed_tokens" | "lm_head"));
    let are_tables = |entry: &Entry| matches!(&entry.value, Value::List(names) if names.iter().all(is_table));
    if draft.peek("lora_modules_to_save").is_some_and(are_tables) {
        let entry = draft.take("lora_modules_to_save").expect("it is there");
        draft.row(&entry, None, Outcome::Differs, ROWS);
    }
}
