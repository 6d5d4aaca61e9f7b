//! The shape of the model: what the configuration says, what an imported model says, what the tokenizer
//! needs. Each key has one source; two that contradict each other are an error that names both.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use phalanx_checkpoint::HuggingFaceDir;
use phalanx_data::{Masking, Tokenizer};
use phalanx_layers::{Checkpointing, Network};
use phalanx_models::{Bert, Dropouts, Gpt2, Model, ModelShape, check_contents, from_config};
use phalanx_parallel::TensorParallel;
use phalanx_train::RunConfig;
use phalanx_train::config::ModelConfig;

use crate::config::Given;

/// Variance offset of a norm where no imported model says another (GPT-2's).
const EPS: f32 = 1e-5;

/// The same of BERT.
const BERT_EPS: f32 = 1e-12;

/// Rows of the token table beyond the tokenizer's are padding up to a multiple of this; more is a mistake.
const PADDING: usize = 64;

/// A model whose weights a run starts from.
pub struct Imported {
    /// Its folder.
    pub dir: PathBuf,
    /// Its shape.
    pub model: Arc<dyn Model>,
}

/// The model that a configuration describes. What is dropped, the plan takes from the configuration.
///
/// # Errors
/// A family that is not computed here.
fn build(config: &ModelConfig, vocab: usize, positions: usize) -> Result<Arc<dyn Model>> {
    let ModelConfig { layers, hidden, heads, .. } = *config;
    let dropout = Dropouts::default();
    match config.arch.as_str() {
        "gpt2" => Ok(Gpt2 { layers, hidden, heads, vocab, positions, eps: EPS, dropout }.into()),
        "bert" => {
            let (intermediate, eps) = (4 * hidden, BERT_EPS);
            Ok(Bert { layers, hidden, heads, intermediate, vocab, positions, eps, dropout }.into())
        }
        other => bail!("model.arch = {other:?}: the known architectures are \"gpt2\" and \"bert\""),
    }
}

/// The whole network of a model, as one rank has it.
pub fn whole(model: &dyn Model) -> Network {
    model.network(&TensorParallel::solo(), Checkpointing::None)
}

/// Its family, by the name that `config.json` and configurations have for it.
fn family(model: &dyn Model) -> String {
    model.to_config()["model_type"].as_str().unwrap_or("gpt2").to_string()
}

/// Writes a model's shape into a configuration.
pub fn write(config: &mut ModelConfig, model: &dyn Model) {
    let ModelShape { layers, hidden, heads, vocab, positions } = model.shape();
    config.arch = family(model);
    (config.layers, config.hidden, config.heads) = (layers, hidden, heads);
    (config.vocab, config.positions) = (Some(vocab), Some(positions));
}

/// Opens the folder of `model.init`, if there is one, and takes over the shape that the user left out.
///
/// # Errors
/// A folder of no known family, or a given key that says something else than its `config.json`.
pub fn fill_from_init(config: &mut RunConfig, given: &Given) -> Result<Option<Imported>> {
    let Some(dir) = config.model.init.clone().map(PathBuf::from) else { return Ok(None) };
    let (_, model) =
        read_hugging_face(&dir).with_context(|| format!("model.init = {:?}", dir.display().to_string()))?;
    let (shape, family, own) = (model.shape(), family(&*model), &config.model);
    let shown = dir.display().to_string();
    if given.has("model.arch") && own.arch != family {
        bail!("model.arch = {:?}, but model.init = {shown:?} has model_type = {family:?}", own.arch);
    }
    let names = match family.as_str() {
        "gpt2" => ["n_layer", "n_embd", "n_head", "n_positions", "vocab_size"],
        _ => [
            "num_hidden_layers",
            "hidden_size",
            "num_attention_heads",
            "max_position_embeddings",
            "vocab_size",
        ],
    };
    let keys = [
        ("model.layers", Some(own.layers), shape.layers),
        ("model.hidden", Some(own.hidden), shape.hidden),
        ("model.heads", Some(own.heads), shape.heads),
        ("model.positions", own.positions, shape.positions),
        ("model.vocab", own.vocab, shape.vocab),
    ];
    for ((key, own, value), name) in keys.into_iter().zip(names) {
        if let Some(own) = own.filter(|own| given.has(key) && *own != value) {
            bail!(
                "{key} = {own}, but model.init = {shown:?} has {name} = {value}: leave {key} out, or start without init"
            );
        }
    }
    if config.model.seq > shape.positions {
        if given.has("model.seq") {
            bail!(
                "model.seq = {}: model.init = {shown:?} has {} = {}, which no sequence may exceed",
                config.model.seq,
                names[3],
                shape.positions
            );
        }
        config.model.seq = shape.positions;
    }
    write(&mut config.model, &*model);
    Ok(Some(Imported { dir, model }))
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

/// The model of a Hugging Face folder, whose tensors are its weights: all of them, and no others.
///
/// # Errors
/// As [`read_hugging_face`].
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

/// What is known about the tokens of a run.
pub struct Vocabulary {
    /// Rows that the token table needs; 0 when nobody knows.
    pub ids: usize,
    /// Where that comes from, for messages.
    pub origin: String,
}

impl Vocabulary {
    /// What `config` trains on where the data has `ids` ids (0 when nobody knows) of `tokenizer`: a masked
    /// model's tokens are hidden by an id, settled here in the configuration, which may need a row of its own.
    pub fn of(
        config: &mut RunConfig,
        tokenizer: Option<&Tokenizer>,
        ids: usize,
        origin: String,
    ) -> Vocabulary {
        if config.model.arch != "bert" || ids == 0 {
            return Vocabulary { ids, origin };
        }
        let mask = config.data.mask_token.or(tokenizer.and_then(Tokenizer::mask));
        let masking = Masking::new(config.train.seed, mask, ids);
        config.data.mask_token = Some(masking.mask_token());
        Vocabulary { ids: masking.rows(), origin }
    }
}

/// The model, with the vocabulary and positions written into the configuration. A model that is there already
/// (`fixed`: imported, or of a checkpoint) is taken as it is.
///
/// # Errors
/// A vocabulary that nobody knows, or one that does not fit the tokenizer's; a family not computed here.
pub fn complete(
    config: &mut RunConfig,
    fixed: Option<&Arc<dyn Model>>,
    vocabulary: &Vocabulary,
) -> Result<Arc<dyn Model>> {
    let Vocabulary { ids, origin } = vocabulary;
    let known = fixed.map(|model| model.shape().vocab).or(config.model.vocab);
    let vocab = match known {
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
    if fixed.is_none() && *ids > 0 && vocab > padded {
        bail!(
            "model.vocab = {vocab} is larger than the {ids} ids of {origin}: the rows above would never be trained; \
             leave it out, or give at most {padded} (padding to a multiple of {PADDING})"
        );
    }
    let positions = config.model.positions.unwrap_or(config.model.seq);
    let model = match fixed {
        Some(model) => Arc::clone(model),
        None => build(&config.model, vocab, positions)?,
    };
    write(&mut config.model, &*model);
    Ok(model)
}
