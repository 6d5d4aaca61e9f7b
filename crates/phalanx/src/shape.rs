//! The shape of the model: what the configuration says, what an imported model says, what the tokenizer
//! needs. Each key has one source; two that contradict each other are an error that names both.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use phalanx_checkpoint::HuggingFaceDir;
use phalanx_models::{Dropouts, Gpt2};
use phalanx_train::RunConfig;

use crate::config::Given;

/// Variance offset of a norm where no imported model says another (GPT-2's).
const EPS: f32 = 1e-5;

/// Rows of the token table beyond the tokenizer's are padding up to a multiple of this; more is a mistake.
const PADDING: usize = 64;

/// A model whose weights a run starts from.
pub struct Imported {
    /// Its folder.
    pub dir: PathBuf,
    /// Its shape.
    pub model: Gpt2,
}

/// Opens the folder of `model.init`, if there is one, and takes over the shape that the user left out.
///
/// # Errors
/// A folder that is no GPT-2, or a given key that says something else than its `config.json`.
pub fn fill_from_init(config: &mut RunConfig, given: &Given) -> Result<Option<Imported>> {
    let Some(dir) = config.model.init.clone().map(PathBuf::from) else { return Ok(None) };
    let model = read_hugging_face(&dir)?;
    for (key, name, value, slot) in [
        ("model.layers", "n_layer", model.layers, &mut config.model.layers),
        ("model.hidden", "n_embd", model.hidden, &mut config.model.hidden),
        ("model.heads", "n_head", model.heads, &mut config.model.heads),
        (
            "model.positions",
            "n_positions",
            model.positions,
            config.model.positions.get_or_insert(model.positions),
        ),
        ("model.vocab", "vocab_size", model.vocab, config.model.vocab.get_or_insert(model.vocab)),
    ] {
        if given.has(key) && *slot != value {
            bail!(
                "{key} = {slot}, but model.init = {:?} has {name} = {value}: leave {key} out, or start without init",
                dir.display().to_string()
            );
        }
        *slot = value;
    }
    if config.model.seq > model.positions {
        if given.has("model.seq") {
            bail!(
                "model.seq = {}: model.init = {:?} has n_positions = {}, which no sequence may exceed",
                config.model.seq,
                dir.display().to_string(),
                model.positions
            );
        }
        config.model.seq = model.positions;
    }
    Ok(Some(Imported { dir, model }))
}

/// The shape of a Hugging Face folder's model.
///
/// # Errors
/// A folder without the files, or of another architecture.
pub fn read_hugging_face(dir: &Path) -> Result<Gpt2> {
    let folder = HuggingFaceDir::open(dir)?;
    let model = Gpt2::from_config(folder.config())
        .map_err(|error| anyhow::anyhow!("{} cannot be imported: {error}", dir.display()))?;
    Ok(model)
}

/// What is known about the tokens of a run.
pub struct Vocabulary {
    /// Rows that the token table needs; 0 when nobody knows.
    pub ids: usize,
    /// Where that comes from, for messages.
    pub origin: String,
}

/// The model, with the vocabulary and positions written into the configuration.
///
/// # Errors
/// A vocabulary that nobody knows, or one that does not fit the tokenizer's.
pub fn complete(config: &mut RunConfig, imported: Option<&Gpt2>, vocabulary: &Vocabulary) -> Result<Gpt2> {
    let Vocabulary { ids, origin } = vocabulary;
    let vocab = match config.model.vocab {
        Some(vocab) => vocab,
        None if *ids > 0 => *ids,
        None => bail!(
            "model.vocab was left out, and {origin} does not say how many ids there are: give model.vocab"
        ),
    };
    if vocab < *ids {
        bail!(
            "model.vocab = {vocab} is smaller than the {ids} ids of {origin}: leave it out, or give at least {ids}"
        );
    }
    let padded = ids.next_multiple_of(PADDING);
    if imported.is_none() && *ids > 0 && vocab > padded {
        bail!(
            "model.vocab = {vocab} is larger than the {ids} ids of {origin}: the rows above would never be trained; \
             leave it out, or give at most {padded} (padding to a multiple of {PADDING})"
        );
    }
    let positions = config.model.positions.unwrap_or(config.model.seq);
    config.model.vocab = Some(vocab);
    config.model.positions = Some(positions);
    let model = &config.model;
    let eps = imported.map_or(EPS, |imported| imported.eps);
    // What is dropped, the plan takes from the configuration.
    let dropout = Dropouts::default();
    Ok(Gpt2 {
        layers: model.layers,
        hidden: model.hidden,
        heads: model.heads,
        vocab,
        positions,
        eps,
        dropout,
    })
}
