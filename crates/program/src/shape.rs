//! The model: from the keys of a configuration, or from a Hugging Face folder.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, anyhow};
use phalanx_checkpoint::HuggingFaceDir;
use phalanx_layers::{Checkpointing, Network};
use phalanx_models::{Arch, Model, ModelShape, check_contents, from_config};
use phalanx_parallel::TensorParallel;
use phalanx_train::config::ModelConfig;
use serde_json::Value;

/// The whole network of a model, on one rank.
pub fn whole(model: &dyn Model) -> Network {
    model.network(&TensorParallel::solo(), Checkpointing::None)
}

/// Writes a model's shape into a configuration.
pub fn write(config: &mut ModelConfig, model: &dyn Model) {
    let ModelShape { layers, hidden, heads, vocab, positions } = model.shape();
    config.arch = model.architecture().unwrap_or(config.arch);
    (config.layers, config.hidden, config.heads) = (layers, hidden, heads);
    (config.vocab, config.positions) = (Some(vocab), Some(positions));
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

/// What transformers trains otherwise than Phalanx, for the model of a `config.json`.
pub fn trained_otherwise(config: &Value, model: &dyn Model) -> Option<String> {
    // The default of transformers' BertConfig; null means that there is none.
    let row = match &config["pad_token_id"] {
        Value::Null if config.get("pad_token_id").is_some() => return None,
        Value::Null => 0,
        id => id.as_u64()?,
    };
    (model.architecture() == Some(Arch::BERT)).then(|| {
        format!(
            "transformers does not train row {row} (pad_token_id) of the token table, and Phalanx trains it like the \
             others: losses differ slightly from the second step on"
        )
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
