//! From what the user gave to the resolved configuration and its model, in one function.
//!
//! The configuration file, `--set` and the other arguments are in [`UserConfig`] by then. Here come the defaults, the shape of
//! an imported model, and what depends on the data: the vocabulary and the token that hides others. Each key has one
//! source; two that contradict each other are an error that names both.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use phalanx_data::{Day, Masking, Tokenizer, named_template, token_paths};
use phalanx_models::{Model, Objective};
use phalanx_train::config::{DeviceKind, Documents, Float, KernelChoice, Products};
use phalanx_train::dataset::NO_END;
use phalanx_train::learned::Learned;
use phalanx_train::{ResolvedConfig, RunConfig};

use crate::configuration::shape::{read_hugging_face, write};
use crate::configuration::user_config::UserConfig;
use crate::configuration::{adapter, shape};
use crate::folders::resume;
use crate::host::elsewhere::Elsewhere;
use crate::host::environment::Environment;
use crate::host::output::note;
use crate::host::{cards, hub, machine};
use crate::plans::data_report::DataReport;
use crate::plans::placement_budget;

/// Rows of the token table beyond the tokenizer's are padding up to a multiple of this; more is a mistake.
const PADDING: usize = 64;

/// Purpose for which a configuration is resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// For planning or measuring on this machine.
    Plan,
    /// For planning what another machine would run.
    Elsewhere(Elsewhere),
    /// For a run folder: paths are made absolute, and what depends on the machine is filled in: the number of threads, the
    /// kernels, and how products are computed. The second is how many of the ranks one machine runs, if not all.
    Train(Environment, Option<usize>),
}

/// A resolved configuration and its model.
pub struct Resolved {
    /// The configuration.
    pub config: ResolvedConfig,
    /// The model that it describes.
    pub model: Arc<dyn Model>,
    /// The Hugging Face folder whose weights the run starts from.
    pub imported: Option<PathBuf>,
    /// Device that the ranks compute on, and why, if that was to be found out.
    pub device: Option<String>,
    /// A tokenizer with more ids than the model has rows.
    pub unusable_ids: Option<String>,
    /// True if the planner is to choose `batch.micro`, which has no value yet.
    pub micro_is_auto: bool,
}

impl Resolved {
    /// The same, where no plan chooses `batch.micro`.
    ///
    /// # Errors
    /// `batch.micro = "auto"`.
    pub fn with_known_micro(self) -> Result<Resolved> {
        match self.micro_is_auto {
            true => bail!(
                "batch.micro = \"auto\" is chosen by `train` and `plan`: give a number here, as --set batch.micro=1"
            ),
            false => Ok(self),
        }
    }

    /// The same with `train.steps` where `train.epochs` was given, for data that are known.
    ///
    /// # Errors
    /// Epochs of unknown data; keys that are wrong with this number of steps.
    pub fn counting_steps(self, data: Option<&DataReport>) -> Result<Resolved> {
        let config = match (self.config.train.epochs, data) {
            (Some(epochs), None) => {
                bail!(
                    "train.epochs = {epochs} needs data: give data.text, tokens, rows or chat, or train.steps"
                )
            }
            (_, data) => self.config.counting_steps(data.map_or(0, DataReport::sequences))?,
        };
        Ok(Resolved { config, ..self })
    }
}

/// The token ids of a run's data.
#[derive(Clone)]
pub struct Vocabulary {
    /// Number of token ids of the data; 0 if unknown.
    pub ids: usize,
    /// The source of that number, for messages.
    pub origin: String,
    /// The tokenizer's `[MASK]`.
    pub mask: Option<u32>,
    /// The token that the tokenizer puts between documents.
    pub separator: Option<u32>,
    /// Names of the classes of labelled rows; none for other data, and for rows that were encoded before.
    pub labels: Vec<String>,
}

/// The folder with the weights of a new run, and whether the tokenizer was given beside it.
#[derive(Clone, Copy)]
pub struct Initial<'a> {
    /// The folder and its model.
    pub folder: Option<(&'a Path, &'a Arc<dyn Model>)>,
    /// True if `data.tokenizer` was given.
    pub has_tokenizer: bool,
}

impl Initial<'_> {
    /// Token ids that the model has learned.
    ///
    /// # Errors
    /// Tokenizer files that cannot be used.
    pub fn learned(&self, config: &RunConfig) -> Result<Learned> {
        let Some((dir, model)) = self.folder else { return Ok(Learned::default()) };
        // With another tokenizer, that of the folder does not matter, and need not be readable.
        let learned = match config.data.new_tokenizer {
            true => Learned::of_run(dir.display().to_string(), None),
            false => Learned::of_folder(dir, &**model)?,
        };
        Ok(learned.adding(&config.model.add_tokens)?.with_given(self.has_tokenizer))
    }
}

impl Vocabulary {
    /// An unknown vocabulary: only the configuration may give its size.
    pub fn unknown(origin: &str) -> Vocabulary {
        Vocabulary::of(0, origin.to_string(), None)
    }

    /// That of data with `ids` token ids, and of its tokenizer.
    pub fn of(ids: usize, origin: String, tokenizer: Option<&Tokenizer>) -> Vocabulary {
        let (mask, separator) =
            (tokenizer.and_then(Tokenizer::mask), tokenizer.and_then(Tokenizer::separator));
        Vocabulary { ids, origin, mask, separator, labels: Vec::new() }
    }

    /// The same for rows of these classes.
    #[must_use]
    pub fn with_labels(self, labels: Vec<String>) -> Vocabulary {
        Vocabulary { labels, ..self }
    }
}

/// Completes and checks the configuration `given`. `fixed` is the model of a checkpoint, which is used unchanged.
/// `data` reads the data of the configuration that it receives, which is checked and lacks only the keys that depend on
/// the data; it also receives the folder of `model.init`, and its second result is returned.
///
/// # Errors
/// A key that is invalid or contradicts another, an unknown vocabulary, and errors of `data`.
pub fn resolve<T>(
    given: &UserConfig,
    purpose: Purpose,
    fixed: Option<&Arc<dyn Model>>,
    data: impl FnOnce(&RunConfig, Initial) -> Result<(Vocabulary, T)>,
) -> Result<(Resolved, T)> {
    let mut config = given.config()?;
    if let Some(given) = &config.model.init {
        let found = hub::folder(Path::new(given)).with_context(|| format!("model.init = {given:?}"))?;
        config.model.init = Some(found.display().to_string());
    }
    let has_tokenizer = given.has("data.tokenizer");
    if let Some(dir) = config.model.init.as_ref().filter(|_| !has_tokenizer) {
        config.data.tokenizer = resume::absolute(dir);
    }
    let imported = config.model.init.clone().map(PathBuf::from);
    let initial = imported
        .as_deref()
        .map(|dir| import_shape(&mut config, given, (dir, fixed.is_some())))
        .transpose()?;
    let rows = initial.as_ref().map(|model| adapter::import(&mut config, given, &**model)).transpose()?;
    if let Purpose::Elsewhere(elsewhere) = purpose {
        elsewhere.decide_kind(&mut config)?;
    }
    config.check()?;
    for paths in config.data.files_mut() {
        *paths = token_paths(&paths.paths())?.into();
    }
    let ranks_here = match purpose {
        Purpose::Train(_, Some(ranks)) => ranks,
        Purpose::Train(_, None) | Purpose::Plan | Purpose::Elsewhere(_) => config.world_size(),
    };
    let mut device = match purpose {
        Purpose::Elsewhere(elsewhere) => elsewhere.decide_device(&mut config)?,
        Purpose::Plan | Purpose::Train(..) => {
            cards::decide(&mut config, matches!(purpose, Purpose::Train(..)), ranks_here)?
        }
    };
    config.check()?;
    if let Purpose::Train(environment, _) = purpose {
        device = decide_here(&mut config, environment, device)?;
    }
    let folder = imported.as_deref().zip(initial.as_ref());
    let (vocabulary, found) = data(&config, Initial { folder, has_tokenizer })?;
    // It is about this start alone: a resumed run keeps its tokenizer.
    config.data.new_tokenizer = false;
    let (grows, known) = (fixed.is_none(), initial.as_ref().map(|model| model.vocab()));
    let mut fixed = classifying(fixed, initial, &mut config, &vocabulary.labels)?;
    if grows {
        fixed = fixed.map(|model| growing(model, &config, vocabulary.ids, rows.flatten()));
    }
    if let Some((model, known)) = fixed.as_ref().zip(known) {
        decide_new_rows(&mut config, &vocabulary, [known, model.vocab()])?;
    }
    let (model, unusable_ids) = complete(&mut config, fixed.as_ref(), vocabulary)?;
    match purpose {
        Purpose::Elsewhere(elsewhere) => placement_budget::fill_elsewhere(&mut config, &elsewhere),
        Purpose::Plan | Purpose::Train(..) => placement_budget::fill(&mut config, ranks_here),
    }
    let config = ResolvedConfig::new(config)?;
    let micro_is_auto = given.micro_is_auto() && config.batch.micro.is_none();
    Ok((Resolved { config, model, imported, device, unusable_ids, micro_is_auto }, found))
}

/// Decides what depends on this machine, for a run that starts here. Returns what is said about the device.
fn decide_here(
    config: &mut RunConfig,
    environment: Environment,
    mut device: Option<String>,
) -> Result<Option<String>> {
    keep_for_run(config);
    let environment = environment.decide(&config.device)?;
    if config.device.kernels == KernelChoice::Auto {
        config.decide("device.kernels");
    }
    config.device.kernels = environment.kernels().into();
    if config.train.threads.is_none() {
        config.train.threads = Some(machine::threads_per_rank(config.world_size()));
        config.decide("train.threads");
    }
    if config.device.kind != DeviceKind::Cuda {
        if config.precision.products == Products::Auto {
            config.decide("precision.products");
        }
        config.precision.products = environment.choose(&config.precision)?;
        let in_bf16 = config.precision.compute == Float::Bf16;
        let unused = environment.unused_tiles().filter(|_| in_bf16);
        device = device.or(unused.map(|why| format!("matrix products: {why}")));
    }
    Ok(device)
}

/// Makes paths absolute, so that the run can be resumed from any folder, and records the day of its first start, if its chats may read it.
fn keep_for_run(config: &mut RunConfig) {
    for paths in config.data.files_mut() {
        let absolute = |path: PathBuf| std::path::absolute(&path).unwrap_or(path);
        *paths = paths.paths().into_iter().map(absolute).collect::<Vec<_>>().into();
    }
    config.model.init = config.model.init.as_deref().map(resume::absolute);
    config.lora.adapter = config.lora.adapter.as_deref().map(resume::absolute);
    if let Some(template) = config.data.template.as_mut().filter(|given| named_template(given).is_none()) {
        *template = resume::absolute(template);
    }
    let has_chats = config.data.chat.is_some() || config.data.pairs.is_some();
    if has_chats && config.data.date.is_none() {
        config.data.date = Some(Day::today().to_string());
        config.decide("data.date");
    }
}

/// Opens the folder of `model.init` and fills in the sizes that the user left out.
///
/// # Errors
/// A folder of an unknown architecture, or a given key that contradicts its `config.json`.
fn import_shape(
    config: &mut RunConfig,
    given: &UserConfig,
    (dir, is_resumed): (&Path, bool),
) -> Result<Arc<dyn Model>> {
    let (_, mut model) =
        read_hugging_face(dir).with_context(|| format!("model.init = {:?}", dir.display().to_string()))?;
    let own = &config.model;
    let labels = own.keys.labels();
    if let Some(with_classes) =
        model.classifying(&labels).filter(|_| model.labels().is_empty() && !labels.is_empty())
    {
        model = with_classes;
    }
    // A run that goes on has the rows that its start has added to those of the folder.
    let grown = own.vocab.filter(|rows| is_resumed && *rows > model.vocab());
    if let Some(grown) = grown.and_then(|rows| model.with_vocab(rows)) {
        model = grown;
    }
    let arch = model.architecture().context("a model that was read from a file has an architecture")?;
    let shown = dir.display().to_string();
    if given.has("model.arch") && own.arch != arch {
        bail!("model.arch = {:?}, but model.init = {shown:?} has model_type = {arch:?}", own.arch);
    }
    if let Some((key, own, value)) = shape::contradiction(own, |key| given.has(key), &*model) {
        bail!(
            "model.{key} = {own}, but model.init = {shown:?} has {} = {value}: leave model.{key} out, or start without init",
            arch.file_name(&key)
        );
    }
    if let Some(longest) = model.longest().filter(|longest| config.model.seq > *longest) {
        if given.has("model.seq") {
            bail!(
                "model.seq = {}: model.init = {shown:?} has {} = {longest}, which no sequence may exceed",
                config.model.seq,
                arch.file_name("positions")
            );
        }
        config.model.seq = longest;
    }
    write(&mut config.model, &*model);
    Ok(model)
}

/// The folder's model, with the classes of labelled rows if it has none; a new model gets them by its key. A checkpoint's model is used
/// unchanged.
fn classifying(
    fixed: Option<&Arc<dyn Model>>,
    initial: Option<Arc<dyn Model>>,
    config: &mut RunConfig,
    labels: &[String],
) -> Result<Option<Arc<dyn Model>>> {
    let from_checkpoint = fixed.is_some();
    let Some(model) = fixed.cloned().or(initial) else {
        if !labels.is_empty() {
            config.model.keys.set("labels", labels.to_vec());
        }
        return Ok(None);
    };
    if from_checkpoint && config.data.rows.is_some() && model.labels().is_empty() {
        bail!(
            "data.rows: the model of the run has no classes: export it, and start another run with model.init from the folder"
        );
    }
    if labels.is_empty() || model.labels() == labels {
        return Ok(Some(model));
    }
    let classes = model.classifying(labels).filter(|_| model.labels().is_empty());
    let classes = classes.with_context(|| {
        format!("data.rows have the classes {labels:?}, and the model has {:?}", model.labels())
    })?;
    Ok(Some(classes))
}

/// The folder's model with rows for all ids of the tokenizer, and as many as the adapter that a run starts from has (`rows`).
fn growing(model: Arc<dyn Model>, config: &RunConfig, ids: usize, rows: Option<usize>) -> Arc<dyn Model> {
    let known = model.vocab();
    let wanted = ids.max(rows.unwrap_or(0)).max(known);
    let is_causal = config.model.arch.objective == Objective::Causal;
    let Some(grown) = model.with_vocab(wanted).filter(|_| is_causal && wanted > known) else { return model };
    note(&format!(
        "model.init has {known} rows of tokens, and {wanted} are wanted: new ones ({}) are near the mean of the others",
        wanted - known
    ));
    grown
}

/// Rows that adapters train beside the tables of a model with `all` rows: those of tokens that the folder's tokenizer lacks, or that have no
/// row there, among `known` ones.
fn decide_new_rows(config: &mut RunConfig, vocabulary: &Vocabulary, [known, all]: [usize; 2]) -> Result<()> {
    let (ids, added) = (vocabulary.ids, config.model.add_tokens.len());
    if added > 0 && ids == 0 {
        bail!("model.add_tokens: {} does not say how many ids there are", vocabulary.origin);
    }
    let first = if added > 0 { known.min(ids - added) } else { known };
    if config.lora.rank.is_some() && config.lora.new_rows.is_none() && all > first {
        config.lora.new_rows = Some(all - first);
        config.decide("lora.new_rows");
        note(&format!(
            "the rows of the tokens from {first} on, {} in all, are trained beside the adapters (lora.new_rows), and saved with them",
            all - first
        ));
    }
    Ok(())
}

/// Fills in the keys that depend on the data, and returns the model. A model that exists already (`fixed`: imported, or
/// of a checkpoint) is used unchanged; its tokenizer may have ids for which it has no rows, which the second result says: the
/// text must not use them.
fn complete(
    config: &mut RunConfig,
    fixed: Option<&Arc<dyn Model>>,
    vocabulary: Vocabulary,
) -> Result<(Arc<dyn Model>, Option<String>)> {
    let Vocabulary { mut ids, origin, mask, separator, .. } = vocabulary;
    if config.data.documents == Documents::Apart {
        let given = config.data.end_token;
        config.data.end_token = end_of_documents(given, separator, ids > 0)?;
        if given.is_none() && config.data.end_token.is_some() {
            config.decide("data.end_token");
        }
    }
    let mut unusable = None;
    if let Some(model) = fixed {
        let rows = model.vocab();
        unusable = shape::unusable_ids(rows, ids, &origin);
        ids = ids.min(rows);
    }
    // A masked model replaces hidden tokens by an id, which may need an additional row.
    if config.model.arch.objective == Objective::Masked && config.data.rows.is_none() && ids > 0 {
        let masking = Masking::new(config.train.seed, config.data.mask_token.or(mask), ids);
        let token = masking.mask_token();
        if let Some(rows) = fixed.map(|model| model.vocab()).filter(|rows| token as usize >= *rows) {
            bail!(
                "the model has {rows} rows (0 to {}), and the token that hides others would be {token}, by data.mask_token \
                 or {origin}: set data.mask_token to the id that the model learned for this",
                rows - 1
            );
        }
        config.data.mask_token = Some(token);
        ids = masking.rows();
    }
    let known = fixed.map(|model| model.vocab()).or(config.model.vocab);
    let vocab = match known {
        Some(vocab) => vocab,
        None if ids > 0 => ids,
        None => config.model.published_vocab().with_context(|| {
            format!(
                "model.vocab was left out, and {origin} does not say how many ids there are: give model.vocab"
            )
        })?,
    };
    if vocab < ids {
        bail!(
            "model.vocab = {vocab} is smaller than the {ids} ids of {origin}: leave it out, or give at least {ids}"
        );
    }
    if let Some(end_token) = config.data.end_token.filter(|token| *token as usize >= vocab) {
        bail!("data.end_token = {end_token}: the model has {vocab} rows, ids 0 to {}", vocab - 1);
    }
    let padded = ids.next_multiple_of(PADDING);
    if fixed.is_none() && ids > 0 && vocab > padded {
        bail!(
            "model.vocab = {vocab} is larger than the {ids} ids of {origin}: the rows above would never be trained; \
             leave it out, or give at most {padded} (padding to a multiple of {PADDING})"
        );
    }
    let model = match fixed {
        Some(model) => Arc::clone(model),
        None => config.model.build(vocab)?,
    };
    write(&mut config.model, &*model);
    Ok((model, unusable))
}

/// The token that ends a document: that which was `given`, or the tokenizer's. Without both, data that `is_known` is refused.
fn end_of_documents(given: Option<u32>, separator: Option<u32>, is_known: bool) -> Result<Option<u32>> {
    match (given, separator) {
        (Some(given), Some(separator)) if given != separator => {
            note(&format!(
                "data.end_token = {given} ends documents, and the tokenizer puts {separator} between them"
            ));
        }
        (None, None) if is_known => bail!(NO_END),
        _ => {}
    }
    Ok(given.or(separator))
}
