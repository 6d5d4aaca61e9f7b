//! Sets a run up: tokens, model and plan are prepared and checked, and only then written into the run folder, together.

use std::iter;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use phalanx_checkpoint::Checkpoint;
use phalanx_data::{DataError, TOKENIZER_FILE, TokenFile, Tokenizer};
use phalanx_system::files::is_named;
use phalanx_tensor::ProductMethod;
use phalanx_train::base::{Base, is_whole};
use phalanx_train::config::{DeviceKind, Paths};
use phalanx_train::dataset::{self, DataDigests, DataRead, Prepared};
use phalanx_train::learned::Learned;
use phalanx_train::run_files::CONFIG_FILE;
use phalanx_train::spec::ModelPart;
use phalanx_train::token_data::TOKENS_FILE;
use phalanx_train::{Dataset, ResolvedConfig, RunConfig, RunPlan};

use crate::arguments::train_args::Show;
use crate::configuration::user_config::UserConfig;
use crate::configuration::{changes, shape};
use crate::folders::checksums::{Checksums, digest, digest_if_there};
use crate::folders::resume;
use crate::folders::resume::Resumed;
use crate::folders::run_folder::RunFolder;
use crate::folders::run_names::{CHECKSUMS_FILE, GIVEN_FILE, PLAN_FILE};
use crate::folders::staged::Staged;
use crate::host::environment::Environment;
use crate::host::output::note;
use crate::host::{cards, machine};
use crate::jobs::task::TrainTask;
use crate::plans::data_report::DataReport;
use crate::plans::planned::{Across, Planned};
use crate::plans::resolve::{Purpose, Resolved, Vocabulary, resolve};
use crate::plans::tokenizing;
use crate::plans::{disk_check, kept_budget, micro_choice};
use crate::reports::{final_report, plan_report};

/// A run whose files are prepared and whose plan fits; its folder has not changed yet.
pub struct Prepares {
    staged: Staged,
    /// The plan.
    pub planned: Planned,
    /// Data that it is trained on.
    pub data: DataReport,
    imported: Option<PathBuf>,
    digests: DataDigests,
}

/// Checks the configuration, prepares tokens, and plans. `across`: how ranks lie on several hosts, if they do; these hear by
/// `tell` how far it is.
///
/// # Errors
/// Errors of the user's input; then nothing in the run folder has changed.
pub fn prepare(
    folder: &RunFolder,
    started: &Resumed,
    show: Show,
    environment: Environment,
    across: Option<Across>,
    tell: &dyn Fn(&str),
) -> Result<Prepares> {
    let staged = Staged::new(folder.path())?;
    let fixed = started.checkpoint.as_ref().map(|(_, model)| model);
    let purpose = Purpose::Train(environment, across.as_ref().map(|across| across.ranks_of_a_machine));
    let (resolved, (tokens, kept)) = resolve(&started.given, purpose, fixed, |config, initial| {
        let learned = match &started.learned {
            Some(learned) => learned.clone(),
            None => initial.learned(config)?,
        };
        learned.notes().iter().for_each(|line| note(line));
        let tokens = tokens(folder, &staged, started, config, &learned, (show, tell))?;
        let kept = learned.generation_config().map(str::to_string);
        Ok((tokens.vocabulary(config), (tokens, kept)))
    })?;
    if started.starts {
        refuse_own_tokens(folder, &resolved.config)?;
    }
    let imported = resolved.imported.clone();
    resolved.unusable_ids.iter().for_each(|line| note(line));
    if show == Show::Progress {
        resolved.device.iter().for_each(|line| note(line));
    }
    if let Some(dir) = imported.as_deref().filter(|_| show == Show::Progress && started.checkpoint.is_none())
    {
        let (source, _) = shape::read_hugging_face(dir)?;
        shape::notes(&source, &*resolved.model, &resolved.config.model).iter().for_each(|line| note(line));
    }
    let (data, report, planned, digests) = plan(resolved, tokens, show, across)?;
    let checkpoint = started.checkpoint.as_ref().map(|(checkpoint, _)| checkpoint);
    let base = base_of(&planned.plan.spec.model, checkpoint)?;
    let digests = DataDigests { generation_config: kept, base, ..digests };
    if let Some((trained, (checkpoint, _))) = started.trained.as_ref().zip(started.checkpoint.as_ref()) {
        // Before the commit, which may replace these tokens.
        let (vocab, known) = (planned.plan.spec.model.definition.vocab(), DataDigests::of(checkpoint).tokens);
        let until_now = Dataset::open_checked(trained, folder.path(), vocab, known.as_deref());
        note(&changes::check_other_validation(&data, until_now.map(|(until_now, _)| until_now))?);
    }
    Ok(Prepares { staged, planned, data: report, imported, digests })
}

/// Digest of what lies below the adapters of a run whose checkpoints have these alone; it is that of its checkpoint, if there is one.
fn base_of(model: &ModelPart, checkpoint: Option<&Checkpoint>) -> Result<Option<String>> {
    let Some(base) = Base::of(model, 1)? else { return Ok(None) };
    Ok(match checkpoint {
        Some(checkpoint) if is_whole(checkpoint) => None,
        Some(checkpoint) => Some(base.check(checkpoint)?),
        None => Some(base.digest()?),
    })
}

impl Prepares {
    /// Writes the run's files into its folder and returns the task of its ranks. `file` is the configuration as the user
    /// gave it.
    ///
    /// # Errors
    /// A folder that is full or cannot be written.
    pub fn commit(
        self,
        folder: &RunFolder,
        started: &Resumed,
        file: Option<&UserConfig>,
        show: Show,
        environment: Environment,
    ) -> Result<(TrainTask, Planned)> {
        let Prepares { staged, planned, imported, digests, data: _ } = self;
        staged.write(PLAN_FILE, &(serde_json::to_string_pretty(&plan_report::to_json(&planned))? + "\n"))?;
        let resume = started.checkpoint.as_ref().map(|(checkpoint, _)| checkpoint.dir().to_path_buf());
        write_config(folder, staged, &planned.config, file, digests.tokens.clone(), started.starts)?;
        let task = TrainTask {
            config: planned.config.clone(),
            model: planned.plan.spec.model.definition.to_config(),
            run: folder.path().to_path_buf(),
            import: imported,
            resume,
            digests,
            show,
            peak_flops_per_s: peak_flops_per_s(&planned, environment)?,
            pin: true,
            evaluates_first: match &started.checkpoint {
                None => planned.config.train.eval_first && planned.plan.spec.batch.evaluated > 0,
                Some((checkpoint, _)) => final_report::lacks_evaluation(folder, &planned, checkpoint.step()),
            },
        };
        Ok((task, planned))
    }
}

/// Adds the configuration and the checksums to `staged`, and commits it. `tokens` is the checksum of the token file. Files
/// that are not given and not staged stay as they are, unless the run `starts`.
///
/// # Errors
/// A folder that is full or cannot be written.
pub fn write_config(
    folder: &RunFolder,
    staged: Staged,
    config: &ResolvedConfig,
    file: Option<&UserConfig>,
    tokens: Option<String>,
    starts: bool,
) -> Result<()> {
    let text = toml::to_string_pretty(config).context("the configuration as TOML")?;
    let head = "# The configuration of this run, complete. `phalanx train --resume --run` reads it and refuses it when\n\
                # it was edited: change keys with --set.\n\n";
    let text = format!("{head}{text}");
    let given = match file {
        Some(file) => {
            staged.write(GIVEN_FILE, file.text())?;
            Some(digest(file.text()))
        }
        None if starts => None,
        None => folder.text(GIVEN_FILE)?.map(|text| digest(&text)),
    };
    let before = if starts { Checksums::default() } else { Checksums::before(folder.path())? };
    let of_staged = |name: &str| digest_if_there(&staged.path().join(name));
    let checksums = Checksums {
        config: Some(digest(&text)),
        given,
        plan: of_staged(PLAN_FILE)?.or(before.plan),
        own_tokens: if config.data.tokens.is_none() { tokens.clone() } else { before.own_tokens },
        tokens,
        tokenizer: of_staged(TOKENIZER_FILE)?.or(before.tokenizer),
        is_earlier: false,
    };
    staged.write(CONFIG_FILE, &text)?;
    staged.write(CHECKSUMS_FILE, &checksums.to_json())?;
    staged.commit(starts)
}

/// Refuses data in the token file of an earlier start, whose place a new one takes.
fn refuse_own_tokens(folder: &RunFolder, config: &RunConfig) -> Result<()> {
    let own = folder.file(TOKENS_FILE);
    let mut data = config.data.clone();
    let named = data.files_mut().map(|paths| &*paths);
    match named.flat_map(Paths::paths).find(|file| same_file(file, &own)) {
        Some(file) => bail!(
            "{} is the token file of an earlier start in this folder, which this one takes the place of: copy it elsewhere, and \
             name that one in the configuration; nothing was changed",
            file.display()
        ),
        None => Ok(()),
    }
}

/// Returns whether two paths lead to one file, which exists.
fn same_file(one: &Path, other: &Path) -> bool {
    std::fs::canonicalize(one).is_ok_and(|one| std::fs::canonicalize(other).is_ok_and(|other| one == other))
}

/// The tokens of a run before they are read.
struct Tokens {
    prepared: Prepared,
    /// Folder of the token file, if the configuration names none.
    folder: PathBuf,
    /// True if they were created or opened now, instead of found in the run folder.
    is_new: bool,
    /// Checksum that it must have.
    expected: Option<String>,
}

impl Tokens {
    fn vocabulary(&self, config: &RunConfig) -> Vocabulary {
        let tokenizer = self.prepared.tokenizer.as_ref();
        let origin = match (tokenizer, &config.data.tokens) {
            (Some(tokenizer), _) => format!("the tokenizer {}", tokenizer.describe()),
            (None, Some(files)) => files.shown(),
            (None, None) => "the data".to_string(),
        };
        Vocabulary::of(self.prepared.vocab, origin, tokenizer).with_labels(self.prepared.labels.clone())
    }
}

/// The tokens with which the run was started, or those of a changed configuration, prepared in `staged`.
fn tokens(
    folder: &RunFolder,
    staged: &Staged,
    started: &Resumed,
    config: &RunConfig,
    learned: &Learned,
    (show, tell): (Show, &dyn Fn(&str)),
) -> Result<Tokens> {
    let expected = started.tokens.clone();
    if started.same_data && config.data.tokens.is_none() && folder.has_tokens() {
        let prepared = stored_tokens(folder, staged)?;
        if let (Some((checkpoint, _)), Some(tokenizer)) = (&started.checkpoint, &prepared.tokenizer) {
            resume::check_vocabulary(folder, checkpoint, tokenizer)?;
        }
        return Ok(Tokens { prepared, folder: folder.path().to_path_buf(), is_new: false, expected });
    }
    let prepared = tokenizing::with_progress(show == Show::Nothing, tell, |watch| {
        dataset::prepare(config, staged.path(), machine::cores(), learned, watch)
    })?;
    prepared.notes.iter().for_each(|line| note(line));
    Ok(Tokens { prepared, folder: staged.path().to_path_buf(), is_new: true, expected })
}

/// The tokens in the run folder, which hold their tokenizer.
fn stored_tokens(folder: &RunFolder, staged: &Staged) -> Result<Prepared> {
    let path = folder.file(TOKENS_FILE);
    let file = TokenFile::open(&path)?;
    let Some(tokenizer) = file.tokenizer()? else {
        bail!("{} holds no tokenizer: it is not the file that a run writes; put it back", path.display());
    };
    let beside = folder.file(TOKENIZER_FILE);
    if !is_named(&beside) {
        tokenizer.save(staged.path())?;
    } else if Tokenizer::load(folder.path())?.digest() != tokenizer.digest() {
        bail!(
            "{} is not the tokenizer of {}: remove it, and --resume makes it again",
            beside.display(),
            path.display()
        );
    }
    let (tokens, vocab) = (file.len() as u64, tokenizer.vocab_size());
    let read = DataRead::of_tokens(iter::once(&file))?;
    Ok(Prepared { tokens, vocab, tokenizer: Some(tokenizer), read, labels: Vec::new(), notes: Vec::new() })
}

/// Makes the plan, which must fit, and checks every token.
fn plan(
    resolved: Resolved,
    tokens: Tokens,
    show: Show,
    across: Option<Across>,
) -> Result<(Dataset, DataReport, Planned, DataDigests)> {
    let Tokens { prepared, folder, is_new, expected } = tokens;
    let Resolved { config, model, .. } = &resolved;
    let opened = Dataset::open_checked(config, &folder, model.vocab(), expected.as_deref());
    let tokenizer = prepared.tokenizer.as_ref();
    let (data, scanned) = opened.map_err(|error| what_to_do(error, config, is_new, tokenizer))?;
    scanned.notes.iter().for_each(|line| note(line));
    if show == Show::Progress {
        scanned.files.iter().for_each(|line| note(line));
    }
    let notes = [&prepared.notes[..], &scanned.notes, &scanned.files].concat();
    let report = DataReport::new(prepared.read.clone(), &data, config).with_notes(notes);
    let resolved = resolved.counting_steps(Some(&report))?;
    let evaluated = data.evaluated();
    let (resolved, chosen) =
        micro_choice::choose(resolved, (evaluated, across.as_ref()), &crate::plans::budgets::budgets)?;
    chosen.iter().filter(|_| show == Show::Progress).for_each(|line| note(line));
    let planned = Planned::of(resolved, evaluated)?.across(across);
    let planned = kept_budget::keep(planned, crate::plans::budgets::budgets, RunPlan::new)?;
    crate::reports::fit::check_memory(&planned)?;
    let notes = disk_check::check(&planned)?;
    if show == Show::Progress {
        notes.iter().for_each(|line| note(line));
    }
    let tokenizer = tokenizer.map(Tokenizer::digest);
    Ok((
        data,
        report,
        planned,
        DataDigests { tokens: Some(scanned.checksums), tokenizer, ..DataDigests::default() },
    ))
}

/// Adds advice to the error for tokens that differ from those of the run, or for which the model has no rows.
fn what_to_do(
    error: DataError,
    config: &RunConfig,
    is_new: bool,
    tokenizer: Option<&Tokenizer>,
) -> anyhow::Error {
    let advice = match (&error, &config.data.tokens) {
        (DataError::TokenOutOfRange { id, .. }, _) => {
            let id = u32::try_from(*id).ok();
            let Some((tokenizer, token)) = tokenizer.and_then(|known| Some((known, known.token(id?)?))) else {
                return error.into();
            };
            format!(
                "it is {token:?} of the tokenizer {}, which has more ids than the model has rows: remove it from the text, \
                 or give the tokenizer that the model was trained with",
                tokenizer.describe()
            )
        }
        (DataError::NotTheTokens { .. }, Some(files)) => format!(
            "it was changed since (or checksums.json was, which has its checksum): put it back, or train on the files as \
             they are now with --set data.tokens={}",
            resume::shell_word(&assigned(files))
        ),
        (DataError::NotTheTokens { .. }, None) if is_new => {
            "tokens.bin is missing, and the text of data.text was changed since: put one of them \
                              back, or train on the text as it is now with --data"
                .to_string()
        }
        (DataError::NotTheTokens { .. }, None) => {
            "it (or checksums.json, which has its checksum) is damaged or was replaced: put it back, or remove \
                 it, and --resume makes it again from data.text"
                .to_string()
        }
        _ => return error.into(),
    };
    anyhow::anyhow!("{error}; {advice}; nothing was changed")
}

/// The files as `--set` takes them.
fn assigned(files: &Paths) -> String {
    match files {
        Paths::One(file) => file.clone(),
        Paths::Several(files) => format!("{files:?}"),
    }
}

/// Floating-point operations per second of the threads of all ranks together, at most those of all cores; or of their cards, by
/// published figures: those of this machine, for as many machines as there are.
fn peak_flops_per_s(planned: &Planned, environment: Environment) -> Result<f64> {
    if planned.config.device.kind == DeviceKind::Cuda {
        let (world, here) = (planned.plan.spec.world_size(), planned.ranks_here());
        let tf32 = planned.plan.spec.device.products == Some(ProductMethod::Tf32);
        return Ok(cards::peak_flops_per_s(planned.compute(), tf32, here) * world as f64 / here as f64);
    }
    let spec = &planned.plan.spec;
    let threads = (spec.world_size() * spec.device.threads).min(machine::cores());
    Ok(environment.processor(threads, spec.device.products)?.flops_per_s(planned.compute()))
}
