//! PEFT's folder of a low-rank adapter (LoRA): `adapter_config.json` and `adapter_model.safetensors`.
//!
//! Names of tensors are those of the model's layers, between [`ADAPTER_PREFIX`] and `.lora_A.weight`, `.lora_B.weight` or, with DoRA,
//! `.lora_magnitude_vector`. What the configuration says beyond rank, factor, dropout, DoRA and targets is refused unless it is off: an adapter that is read otherwise than it was
//! trained gives other results.

use std::ops::Range;
use std::path::Path;

use serde_json::{Value, json};

use crate::hugging_face::{ADAPTER_CONFIG, HuggingFaceDir};
use crate::{CheckpointError, Result};

/// Beginning of the names of all tensors: the wrappers of PEFT around the model.
pub const ADAPTER_PREFIX: &str = "base_model.model.";

/// End of the names of rows of tokens that are trained beside a frozen table, behind the name of its layer.
pub const TOKENS_END: &str = ".token_adapter.trainable_tokens_delta";

/// Keys that say nothing about what the adapter computes.
const IGNORED: [&str; 12] = [
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",
    "fan_in_fan_out",
    "inference_mode",
    "loftq_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
];

/// The content of `adapter_config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterConfig {
    /// `r`
    pub rank: usize,
    /// `lora_alpha`
    pub alpha: f64,
    /// `lora_dropout`
    pub dropout: f64,
    /// `use_rslora`: the factor is `alpha / sqrt(rank)`, not `alpha / rank`.
    pub rslora: bool,
    /// `use_dora`: results have magnitudes.
    pub dora: bool,
    /// Names, or ends of names after a dot, of the layers that have an adapter.
    pub targets: Vec<String>,
    /// `trainable_token_indices`: neighbouring tokens whose rows are trained, in all tables that have tensors.
    pub tokens: Option<Range<usize>>,
}

impl AdapterConfig {
    /// Reads the configuration of a folder that was opened by [`HuggingFaceDir::open_adapter`].
    ///
    /// # Errors
    /// [`CheckpointError::HuggingFace`]: a value that is missing or wrong, or something that adapters here do not have.
    pub fn of(dir: &HuggingFaceDir) -> Result<AdapterConfig> {
        let path = dir.path().join(ADAPTER_CONFIG);
        let bad = |reason: String| CheckpointError::HuggingFace { path: path.clone(), reason };
        let config = dir.config().as_object().ok_or_else(|| bad("it is not a JSON object".into()))?;
        let (mut found, mut kind) = (AdapterConfig::default(), false);
        for (key, value) in config {
            let wrong = |expected: &str| bad(format!("{key} is {value}, expected {expected}"));
            let number = || value.as_f64().filter(|number| number.is_finite() && *number >= 0.0);
            match key.as_str() {
                "peft_type" if value == "LORA" => kind = true,
                "peft_type" => return Err(wrong("\"LORA\": other adapters are not here")),
                "r" => {
                    let rank = value.as_u64().filter(|rank| (1..1 << 20).contains(rank));
                    found.rank = rank.ok_or_else(|| wrong("a rank of 1 or more"))? as usize;
                }
                "lora_alpha" => found.alpha = number().ok_or_else(|| wrong("a number"))?,
                "lora_dropout" => found.dropout = number().ok_or_else(|| wrong("a probability"))?,
                "use_rslora" => found.rslora = value.as_bool().ok_or_else(|| wrong("true or false"))?,
                "use_dora" => found.dora = value.as_bool().ok_or_else(|| wrong("true or false"))?,
                "target_modules" => found.targets = targets(dir, value).ok_or_else(|| wrong("names"))?,
                "trainable_token_indices" if !is_off(value) => {
                    let tokens =
                        tokens(value).ok_or_else(|| wrong("neighbouring tokens, the same of each table"))?;
                    found.tokens = Some(tokens);
                }
                "bias" if value == "none" => {}
                "init_lora_weights" if value.is_boolean() || value == "gaussian" => {}
                key if IGNORED.contains(&key) || is_off(value) => {}
                _ => return Err(bad(format!("{key} is {value}: adapters here have no such thing"))),
            }
        }
        if !kind || found.rank == 0 || found.targets.is_empty() {
            return Err(bad("it lacks one of peft_type, r and target_modules".into()));
        }
        found.targets.sort();
        Ok(found)
    }

    /// The file of this adapter of a model with this path. `fan_in_fan_out`: weights of the model's layers are `[in, out]`.
    /// `tables`: the layers that have rows of tokens, by the ends of their names.
    pub fn to_json(&self, base: Option<&str>, fan_in_fan_out: bool, tables: &[&str]) -> Value {
        let of_table =
            |table: &&str| (table.to_string(), self.tokens.clone().into_iter().flatten().collect());
        let tokens: serde_json::Map<String, Value> = tables.iter().map(of_table).collect();
        json!({
            "base_model_name_or_path": base,
            "bias": "none",
            "fan_in_fan_out": fan_in_fan_out,
            "inference_mode": true,
            "init_lora_weights": true,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "peft_type": "LORA",
            "r": self.rank,
            "target_modules": self.targets,
            "task_type": "CAUSAL_LM",
            "trainable_token_indices": if tokens.is_empty() { Value::Null } else { tokens.into() },
            "use_dora": self.dora,
            "use_rslora": self.rslora,
        })
    }

    /// Reads the configuration of the adapter in `dir`, and opens its tensors.
    ///
    /// # Errors
    /// Those of [`HuggingFaceDir::open_adapter`] and [`AdapterConfig::of`].
    pub fn read(dir: &Path) -> Result<(HuggingFaceDir, AdapterConfig)> {
        let dir = HuggingFaceDir::open_adapter(dir)?;
        let config = AdapterConfig::of(&dir)?;
        Ok((dir, config))
    }
}

/// PEFT's values for keys that are left out; no rank and no targets.
impl Default for AdapterConfig {
    fn default() -> AdapterConfig {
        AdapterConfig {
            rank: 0,
            alpha: 8.0,
            dropout: 0.0,
            rslora: false,
            dora: false,
            targets: Vec::new(),
            tokens: None,
        }
    }
}

/// Neighbouring tokens, of which each table has all.
fn tokens(value: &Value) -> Option<Range<usize>> {
    let lists: Vec<&Vec<Value>> = match value {
        Value::Array(list) => vec![list],
        Value::Object(tables) => tables.values().map(Value::as_array).collect::<Option<_>>()?,
        _ => return None,
    };
    let first = usize::try_from(lists.first()?.first()?.as_u64()?).ok()?;
    let found = first..first + lists[0].len();
    let is_same = |list: &&Vec<Value>| {
        list.len() == found.len()
            && list.iter().zip(found.clone()).all(|(token, expected)| token.as_u64() == Some(expected as u64))
    };
    lists.iter().all(is_same).then_some(found)
}

/// A list as it is; for a regular expression, the layers of the tensors that are there.
fn targets(dir: &HuggingFaceDir, value: &Value) -> Option<Vec<String>> {
    if value.is_string() {
        let layer = |name: &str| {
            let name = name.strip_prefix(ADAPTER_PREFIX)?.strip_suffix(".lora_A.weight")?;
            Some(name.to_string())
        };
        return Some(dir.names().filter_map(layer).collect());
    }
    value.as_array()?.iter().map(|name| name.as_str().map(str::to_string)).collect()
}

/// Returns whether a value turns something off.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(values) => values.is_empty(),
        Value::Object(values) => values.is_empty(),
        _ => false,
    }
}
