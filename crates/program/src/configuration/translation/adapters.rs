//! Low-rank adapters of axolotl and LLaMA-Factory: which layers have one, and what is theirs by default.

use super::Draft;
use super::value::{Entry, Value};

/// Names that mean nothing without adapters.
const NAMES: [&str; 15] = [
    "lora_r",
    "lora_rank",
    "lora_alpha",
    "lora_dropout",
    "lora_target",
    "lora_target_linear",
    "lora_target_modules",
    "lora_model_dir",
    "adapter_name_or_path",
    "use_rslora",
    "peft_use_rslora",
    "use_dora",
    "peft_use_dora",
    "pissa_init",
    "peft_init_lora_weights",
];

const BELOW: &str = "quantised weights are those below adapters: leave it out";
const NF4: &str = "codes are bitsandbytes', and scales have 8 bits by a rule of their own";
const Q8_0: &str = "32 weights share a scale, and there a row";
const OTHERS: &str = "adapters here are LoRA's: set it to lora, or leave it out";
const PATTERNS: &str = "give a list of names: patterns here are a shell's, not regular expressions";

/// axolotl's `adapter`, and the layers that have one.
pub fn axolotl(draft: &mut Draft) {
    let adapter = draft.take("adapter").filter(|entry| !entry.value.word().is_empty());
    let Some(adapter) = adapter.filter(|entry| entry.value != Value::Null) else { return off(draft) };
    match adapter.value.word().as_str() {
        "lora" => draft.unneeded(&adapter, "lora.rank says it"),
        "qlora" if draft.peek("load_in_4bit").is_none_or(|entry| entry.value.flag() != Some(true)) => {
            draft.refuse(&adapter, "it needs load_in_4bit: true: give it");
        }
        "qlora" => draft.unneeded(&adapter, "lora.rank and lora.base say it"),
        _ => return draft.refuse(&adapter, OTHERS),
    }
    for (name, base, differs) in [("load_in_4bit", "nf4", NF4), ("load_in_8bit", "q8_0", Q8_0)] {
        match draft.take_flag(name) {
            Some((entry, true)) => draft.give(&entry, "lora.base", base, differs),
            Some((entry, false)) => draft.unneeded(&entry, "off here, too"),
            None => {}
        }
    }
    for name in ["lora_r", "lora_alpha"] {
        if draft.peek(name).is_none() {
            draft.refuse(&adapter, &format!("it needs {name}: give it"));
        }
    }
    let is_all = draft.take_flag("lora_target_linear").is_some_and(|(entry, is_all)| {
        match is_all {
            true => draft.give(&entry, "lora.targets", "all-linear", ""),
            false => draft.unneeded(&entry, "off here, too"),
        }
        is_all
    });
    match draft.take("lora_target_modules").filter(|entry| entry.value != Value::Null) {
        Some(entry) if is_all => draft.unneeded(&entry, "lora_target_linear adds all others"),
        Some(entry) => targets(draft, &entry),
        None if is_all => {}
        None => {
            draft.refuse(
                &adapter,
                "it needs lora_target_linear: true, or lora_target_modules: give one of them",
            );
        }
    }
}

/// LLaMA-Factory's `finetuning_type`, and what it has by default.
pub fn llama_factory(draft: &mut Draft) {
    // Where it is left out, it is LoRA.
    if let Some(entry) = draft.take("finetuning_type") {
        match entry.value.word().as_str() {
            "full" => {
                draft.unneeded(&entry, "all parameters are trained here, too");
                return off(draft);
            }
            "lora" => draft.unneeded(&entry, "lora.rank says it"),
            "freeze" => {
                return draft.refuse(&entry, "set model.trainable or model.frozen: patterns of names");
            }
            _ => return draft.refuse(&entry, OTHERS),
        }
    }
    let rank = draft.peek("lora_rank").and_then(|entry| entry.value.whole());
    let has_adapter = draft.peek("adapter_name_or_path").is_some_and(|entry| entry.value != Value::Null);
    if draft.peek("lora_rank").is_none() && !has_adapter {
        draft.default("lora_rank", "lora.rank", 8, "LLaMA-Factory's default");
    }
    if draft.peek("lora_alpha").is_none_or(|entry| entry.value == Value::Null) && !has_adapter {
        let alpha = 2.0 * rank.unwrap_or(8) as f64;
        draft.default("lora_alpha", "lora.alpha", alpha, "LLaMA-Factory's default: twice the rank");
    }
    match draft.take("quantization_bit").filter(|entry| entry.value != Value::Null) {
        Some(entry) if entry.value.whole() == Some(4) => draft.give(&entry, "lora.base", "nf4", NF4),
        Some(entry) if entry.value.whole() == Some(8) => draft.give(&entry, "lora.base", "q8_0", Q8_0),
        Some(entry) => draft.refuse(&entry, "frozen weights have 4 or 8 bits here, or those of computing"),
        None => {}
    }
    match draft.take_flag("pissa_init") {
        Some((entry, true)) => draft.give(&entry, "lora.init", "pissa", ""),
        Some((entry, false)) => draft.unneeded(&entry, "off here, too"),
        None => {}
    }
    let Some(entry) = draft.take("lora_target") else { return };
    match entry.value.text() {
        Some("all") => draft.give(&entry, "lora.targets", "all-linear", ""),
        Some(names) => {
            let names: Vec<toml::Value> = names.split(',').map(|name| name.trim().into()).collect();
            draft.give(&entry, "lora.targets", names, "");
        }
        None => targets(draft, &entry),
    }
}

/// Without adapters, their names mean nothing.
fn off(draft: &mut Draft) {
    for name in ["load_in_4bit", "load_in_8bit", "quantization_bit"] {
        let Some(entry) = draft.take(name) else { continue };
        match entry.value == Value::Null || entry.value.flag() == Some(false) {
            true => draft.unneeded(&entry, "off here, too"),
            false => draft.refuse(&entry, BELOW),
        }
    }
    for entry in NAMES.iter().filter_map(|name| draft.take(name)).collect::<Vec<_>>() {
        draft.unneeded(&entry, "all parameters are trained, without adapters");
    }
}

/// A list of names.
fn targets(draft: &mut Draft, entry: &Entry) {
    match (&entry.value, entry.value.to_toml()) {
        (Value::List(_), Some(names)) => draft.give(entry, "lora.targets", names, ""),
        _ if entry.value.text() == Some("all-linear") => {
            draft.give(entry, "lora.targets", "all-linear", "");
        }
        _ => draft.refuse(entry, PATTERNS),
    }
}
