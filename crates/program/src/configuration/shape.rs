//! The model: from the keys of a configuration, or from a Hugging Face folder.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, anyhow};
use phalanx_checkpoint::HuggingFaceDir;
use phalanx_data::Tokenizer;
use phalanx_models::{Arch, Model, check_contents, from_config, heads_lacking};
use phalanx_train::config::ModelConfig;
use serde_json::Value;

/// Writes what a model is made of into a configuration.
pub fn write(config: &mut ModelConfig, model: &dyn Model) {
    config.arch = model.architecture().unwrap_or(config.arch);
    (config.keys, config.vocab) = (model.keys(), Some(model.vocab()));
}

/// The first key of `config` that was given (`has`) with another value than the one that `model` is made of: its name, its value, and
/// that of the model.
pub fn contradiction(
    config: &ModelConfig,
    has: impl Fn(&str) -> bool,
    model: &dyn Model,
) -> Option<(String, String, String)> {
    let own = model.keys();
    let vocab = config.vocab.map(Value::from);
    let keys = config.keys.iter().chain(vocab.as_ref().map(|vocab| ("vocab", vocab)));
    keys.filter(|(key, _)| has(&format!("model.{key}"))).find_map(|(key, value)| {
        let theirs = match key {
            "vocab" => model.vocab().to_string(),
            _ => own.get(key).map_or_else(|| "no such key".to_string(), Value::to_string),
        };
        let value = value.to_string();
        (value != theirs).then(|| (key.to_string(), value, theirs))
    })
}

/// A Hugging Face folder and its model.
///
/// # Errors
/// A folder without the files, of another architecture, or whose weights are not those of its `config.json`.
pub fn read_hugging_face(dir: &Path) -> Result<(HuggingFaceDir, Arc<dyn Model>)> {
    let folder = HuggingFaceDir::open(dir)?;
    let model =
        model_in(&folder).map_err(|error| anyhow!("{} cannot be imported: {error}", dir.display()))?;
    Ok((folder, model))
}

/// For people: what of a folder is not read as it is there, and what transformers trains otherwise than a run of `config`.
pub fn notes(folder: &HuggingFaceDir, model: &dyn Model, config: &ModelConfig) -> Vec<String> {
    let mut notes = folder.notes().to_vec();
    let mut ignored = folder.names().filter(|name| model.is_ignored(name));
    if let Some(first) = ignored.next() {
        let more = match ignored.count() {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        notes.push(format!("{first}{more} not imported: the model computes without them"));
    }
    let new = heads_lacking(model, |name| folder.contains(name));
    if !new.is_empty() {
        notes.push(format!(
            "the folder has no {}*, the head of the model: it gets initial values and is to be trained, as in transformers",
            new.join("* and no ")
        ));
    }
    notes.extend(trained_otherwise(folder.config(), model));
    notes.extend(dropped_otherwise(model, config));
    notes
}

/// For people: that the rows of a model are not the ids of its tokenizer.
pub fn rows_and_ids(rows: usize, tokenizer: &Tokenizer) -> Option<String> {
    let described = tokenizer.describe();
    let without_id = (0..rows).filter(|row| tokenizer.token(*row as u32).is_none()).count();
    unusable_ids(rows, tokenizer.vocab_size(), &format!("the tokenizer ({described})")).or_else(|| {
        (without_id > 0).then(|| {
            format!("{without_id} of the model's {rows} rows are no id of the tokenizer ({described}): sample never draws them")
        })
    })
}

/// For people: that `origin` has more ids than a model has rows.
pub fn unusable_ids(rows: usize, ids: usize, origin: &str) -> Option<String> {
    (ids > rows).then(|| {
        format!(
            "{origin} has more ids than the model has rows ({rows}): a text or prompt with an id from {rows} on is refused"
        )
    })
}

/// Describes what transformers trains otherwise than Phalanx, for the model of a `config.json`.
fn trained_otherwise(config: &Value, model: &dyn Model) -> Option<String> {
    // The default of transformers' BertConfig; null means that there is none.
    let row = match &config["pad_token_id"] {
        Value::Null if config.get("pad_token_id").is_some() => return None,
        Value::Null => 0,
        id => id.as_u64()?,
    };
    (model.architecture() == Some(Arch::BERT)).then(|| {
        format!(
            "input tokens with id {row} do not train row {row} (pad_token_id) of the token table in transformers; in \
             Phalanx they do, so losses differ slightly if the text has such tokens"
        )
    })
}

/// Dropout that a `config.json` has and the run has not, or otherwise.
fn dropped_otherwise(model: &dyn Model, config: &ModelConfig) -> Option<String> {
    let [theirs, own] = [model.to_config(), model.dropping(config.dropouts()).to_config()];
    let differing = theirs.as_object()?.iter().filter(|(key, value)| own[key.as_str()] != **value);
    let words = differing.map(|(key, value)| format!("{key} = {value} (here {})", own[key.as_str()]));
    let words = words.collect::<Vec<_>>().join(", ");
    (!words.is_empty()).then(|| {
        format!("transformers trains with the dropout of config.json, {words}; here model.dropout and its parts count")
    })
}

/// The model of a Hugging Face folder. Checks that its tensors are exactly the weights of the model.
///
/// # Errors
/// As for [`read_hugging_face`].
pub fn model_in(folder: &HuggingFaceDir) -> Result<Arc<dyn Model>> {
    let model = from_config(folder.config())?;
    let shape = |name| folder.shape(name).map(|shape| (name, shape));
    let tensors = folder.names().map(shape).collect::<Result<Vec<_>, _>>()?;
    check_contents(&*model, tensors.into_iter())?;
    for name in folder.names().filter(|name| !model.is_ignored(name)) {
        folder.check_type(name)?;
    }
    Ok(model)
}
