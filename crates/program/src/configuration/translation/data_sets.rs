//! LLaMA-Factory's `dataset`: names of a `dataset_info.json`, which has the file of each.

use std::path::{Path, PathBuf};

use super::Draft;
use super::value::{Entry, Value};

/// Its name.
const INFO: &str = "dataset_info.json";

/// Its largest size in bytes.
const INFO_BYTES: u64 = 4 << 20;

/// Names of columns that are read as they are, by what they are for LLaMA-Factory.
const COLUMNS: [(&str, &[&str]); 10] = [
    ("prompt", &["instruction"]),
    ("query", &["input"]),
    ("response", &["output"]),
    ("history", &["history"]),
    ("system", &["system"]),
    ("tools", &["tools"]),
    ("messages", &["conversations", "messages"]),
    ("chosen", &["chosen"]),
    ("rejected", &["rejected"]),
    ("kto_tag", &["kto_tag", "label"]),
];

/// Gives `key` the files of the names under `name`, which are separated by commas.
pub fn files(draft: &mut Draft, name: &str, key: &str) {
    let folder = draft.take("dataset_dir");
    if let Some(entry) = draft.take(name).filter(|entry| entry.value != Value::Null) {
        match draft.given.has(key) {
            true => draft.unneeded(&entry, &format!("{key} is given")),
            false => match found(&draft.folder, folder.as_ref(), &entry, key) {
                Ok(paths) => draft.give(&entry, key, paths, ""),
                Err(reason) => draft.refuse(&entry, &format!("{reason}; or set {key} to the files")),
            },
        }
    }
    folder.iter().for_each(|entry| draft.unneeded(entry, &format!("{key} has paths")));
}

/// The files of the names, for a key.
fn found(
    beside: &Path,
    folder: Option<&Entry>,
    names: &Entry,
    key: &str,
) -> Result<Vec<toml::Value>, String> {
    let folder = folder.map_or_else(|| "data".to_string(), |entry| entry.value.word());
    let places = [PathBuf::from(&folder), beside.join(&folder), beside.to_path_buf()];
    let info = places.iter().find(|place| place.join(INFO).is_file());
    let info = info.ok_or_else(|| {
        format!("the files of these names are in a {INFO}, and there is none in {folder} or beside this file")
    })?;
    let path = info.join(INFO);
    let refuse = |reason: String| format!("{}: {reason}", path.display());
    let text =
        phalanx_system::files::read_text(&path, INFO_BYTES).map_err(|error| refuse(error.to_string()))?;
    let all: serde_json::Value = serde_json::from_str(&text).map_err(|error| refuse(error.to_string()))?;
    let words = names.value.word();
    let one = |name: &str| {
        let set = all.get(name).ok_or_else(|| refuse(format!("there is no {name:?}")))?;
        let file = set["file_name"].as_str().ok_or_else(|| {
            refuse(format!("{name:?} has no \"file_name\": data here is files, so download the set first"))
        })?;
        let has_answers = set["ranking"] == true || set["columns"].get("kto_tag").is_some();
        if has_answers != (key == "data.pairs") {
            let (has, stage) = if has_answers { ("has", "dpo or kto") } else { ("has no", "sft") };
            return Err(refuse(format!("{name:?} {has} pairs of answers: they are for the stage {stage}")));
        }
        for (column, theirs) in set["columns"].as_object().into_iter().flatten() {
            let known = COLUMNS.iter().find(|(name, _)| name == column).map_or(&[][..], |(_, known)| known);
            if !theirs.as_str().is_some_and(|theirs| known.contains(&theirs)) {
                return Err(refuse(format!(
                    "{name:?} names the column {column} {theirs}, and records here have {}",
                    if known.is_empty() { "no such one".to_string() } else { known.join(" or ") }
                )));
            }
        }
        Ok(toml::Value::String(info.join(file).display().to_string()))
    };
    words.split(',').map(|name| one(name.trim())).collect()
}
