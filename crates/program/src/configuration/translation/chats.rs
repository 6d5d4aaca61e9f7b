//! Chats and pairs of answers of axolotl and LLaMA-Factory: their files, template and packing.

use super::value::Entry;
use super::{Draft, data_sets};

const FILES: &str = "data here is files: download the set, and name its files";
const TEMPLATE: &str =
    "templates here are the tokenizer's own (leave it out), chatml, llama3, or a file in data.template";
const OF_PAIRS: &str = "records have prompt, chosen and rejected, or keys that docs/data.md names, and the template of chat_template.default: set that type";
const TYPES: [&str; 4] = ["chat_template", "sharegpt", "alpaca", "input_output"];

/// The value of data.template for one of theirs.
fn template(draft: &mut Draft, entry: &Entry) {
    match entry.value.word().as_str() {
        "" | "null" | "tokenizer_default" | "default" => {
            draft.unneeded(entry, "the tokenizer's own template is used")
        }
        name @ ("chatml" | "llama3") => {
            draft.give(entry, "data.template", name, "tools and dates are not in it")
        }
        _ => draft.refuse(entry, TEMPLATE),
    }
}

/// Gives `key` the files that are under `name`, once for each data set.
fn files(draft: &mut Draft, name: &str, key: &str) -> bool {
    let entries: Vec<Entry> = std::iter::from_fn(|| draft.take(name)).collect();
    let is_file = |entry: &Entry| {
        entry
            .value
            .text()
            .is_some_and(|path| [".json", ".jsonl", ".ndjson"].iter().any(|end| path.ends_with(end)))
    };
    if let Some(other) = entries.iter().find(|entry| !is_file(entry)) {
        draft.refuse(other, &format!("{FILES} in {key}"));
        return !entries.is_empty();
    }
    let Some((first, others)) = entries.split_first() else { return false };
    let paths = entries.iter().map(|entry| toml::Value::String(entry.value.word()));
    draft.give(first, key, paths.collect::<Vec<_>>(), "");
    others.iter().for_each(|entry| draft.unneeded(entry, &format!("in {key}, with the first")));
    true
}

/// axolotl's `datasets`, `test_datasets`, `chat_template`, `sample_packing` and `train_on_inputs`; of `pairs` of answers, or of chats.
pub fn axolotl(draft: &mut Draft, pairs: bool) {
    if draft.peek("datasets.path").is_none() {
        return;
    }
    let [key, held_out] = match pairs {
        true => ["data.pairs", "data.validation_pairs"],
        false => ["data.chat", "data.validation_chat"],
    };
    files(draft, "datasets.path", key);
    files(draft, "test_datasets.path", held_out);
    for table in ["datasets", "test_datasets"] {
        while let Some(entry) = draft.take(&format!("{table}.type")) {
            if pairs {
                match entry.value.text().is_some_and(|name| name.contains("chat_template")) {
                    true => draft.unneeded(&entry, "the keys of each record show its format"),
                    false => draft.refuse(&entry, OF_PAIRS),
                }
                continue;
            }
            match TYPES.iter().find(|known| entry.value.text() == Some(**known)) {
                Some(&"alpaca") => draft.row(
                    &entry,
                    None,
                    super::Outcome::Differs,
                    "the text is the chat template's, not Alpaca's prompt",
                ),
                Some(&"input_output") | None => draft.refuse(
                    &entry,
                    "the format is that of the keys of each record: messages, sharegpt, alpaca, prompt",
                ),
                Some(_) => draft.unneeded(&entry, "the keys of each record show its format"),
            }
        }
        while let Some(entry) = draft.take(&format!("{table}.ds_type")) {
            draft.unneeded(&entry, "files of JSON are read");
        }
    }
    if let Some(entry) = draft.take("chat_template") {
        template(draft, &entry);
    }
    if pairs {
        return of_pairs(draft, &["sample_packing", "train_on_inputs"]);
    }
    match draft.take_flag("sample_packing") {
        Some((entry, true)) => draft.give(&entry, "data.pack", "documents", ""),
        Some((entry, false)) => draft.give(&entry, "data.pack", "off", ""),
        None => draft.default("sample_packing", "data.pack", "off", "axolotl's default"),
    }
    match draft.take_flag("train_on_inputs") {
        Some((entry, true)) => draft.give(&entry, "data.train_on", "all", ""),
        Some((entry, false)) => draft.give(&entry, "data.train_on", "answers", ""),
        None => {}
    }
}

/// Answers are trained alone, and each has a sequence of its own.
fn of_pairs(draft: &mut Draft, names: &[&str]) {
    for entry in names.iter().filter_map(|name| draft.take(name)).collect::<Vec<_>>() {
        draft.unneeded(&entry, "each answer has a sequence of its own, and prompts do not count");
    }
}

/// LLaMA-Factory's stage `sft`: `dataset`, `template`, `packing`, `mask_history` and `train_on_prompt`; of `pairs` of answers `dataset` and
/// `template`.
pub fn llama_factory(draft: &mut Draft, pairs: bool) {
    if !pairs {
        let Some(stage) = draft.peek("stage").filter(|entry| entry.value.text() == Some("sft")).cloned()
        else {
            return;
        };
        draft.take("stage");
        draft.unneeded(&stage, "data.chat says it");
    }
    data_sets::files(draft, "dataset", if pairs { "data.pairs" } else { "data.chat" });
    if let Some(entry) = draft.take("template") {
        template(draft, &entry);
    }
    if pairs {
        return of_pairs(draft, &["packing", "neat_packing", "train_on_prompt", "mask_history"]);
    }
    let neat = draft.take_flag("neat_packing");
    match (draft.take_flag("packing"), neat) {
        (Some((entry, true)), None) => {
            draft.give(&entry, "data.pack", "documents", "chats in a sequence do not see each other")
        }
        (packing, Some((entry, true))) => {
            draft.give(&entry, "data.pack", "documents", "");
            packing.iter().for_each(|(entry, _)| draft.unneeded(entry, "data.pack says it"));
        }
        (packing, neat) => {
            for (entry, _) in packing.into_iter().chain(neat) {
                draft.unneeded(&entry, "data.pack says it");
            }
            draft.default("packing", "data.pack", "off", "LLaMA-Factory's default");
        }
    }
    for (name, word) in [("train_on_prompt", "all"), ("mask_history", "last-answer")] {
        match draft.take_flag(name) {
            Some((entry, true)) => draft.give(&entry, "data.train_on", word, ""),
            Some((entry, false)) => draft.unneeded(&entry, "off here, too"),
            None => {}
        }
    }
}
