//! Resumes a run: its own configuration, what the user has changed since, and its newest checkpoint.
//!
//! The mesh, ZeRO stage, chunks and micro-batches may change freely. A key on which the stored tensors depend may not: its
//! change is refused by name before anything is touched.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Result, bail};
use phalanx_checkpoint::Checkpoint;
use phalanx_data::Tokenizer;
use phalanx_models::Model;
use phalanx_train::RunConfig;
use phalanx_train::base::is_whole;
use phalanx_train::config::Resume;
use phalanx_train::dataset::DataDigests;
use phalanx_train::learned::Learned;
use phalanx_train::token_data::TOKENS_FILE;

use crate::arguments::train_args::TrainArgs;
use crate::configuration::changed_keys::{ChangedKey, changed_keys, has_other_data, words};
use crate::configuration::changes::{Changes, is_file};
use crate::configuration::learning_rate::Ahead;
use crate::configuration::user_config::{MICRO, UserConfig};
use crate::configuration::{kept_kernels, keys, learning_rate, left_out, shape};
use crate::folders::run_folder::{RunFolder, model_of};
use crate::folders::stored::Stored;
use crate::host::environment::Environment;

/// Everything from which a run is resumed.
pub struct Resumed {
    /// The stored configuration with the changes made since.
    pub given: UserConfig,
    /// The checkpoint to start from and its model; `None` when the run has saved nothing yet.
    pub checkpoint: Option<(Checkpoint, Arc<dyn Model>)>,
    /// True if the run starts from the beginning and uses nothing in the folder.
    pub starts: bool,
    /// True if the configuration still names the data of the stored configuration.
    pub same_data: bool,
    /// Checksum that the token file must have, where it is known.
    pub tokens: Option<String>,
    /// The configuration whose data the model was trained on until now, if other data follows.
    pub trained: Option<RunConfig>,
    /// Token ids that the model of the checkpoint has learned, if there is one and its data changes.
    pub learned: Option<Learned>,
    /// Notes for the user.
    pub notes: Vec<String>,
}

impl Resumed {
    /// A run from its beginning.
    pub fn start(given: UserConfig, notes: Vec<String>) -> Resumed {
        Resumed {
            given,
            checkpoint: None,
            starts: true,
            same_data: false,
            tokens: None,
            trained: None,
            learned: None,
            notes,
        }
    }
}

/// Finds out how to resume the run in `folder`. `file` is the configuration named on the command line. Problems that do
/// not stop the run are passed to `warn`.
///
/// # Errors
/// A folder without a run, damaged files, a change that the stored tensors do not allow.
pub fn resume(
    folder: &RunFolder,
    args: &TrainArgs,
    file: Option<UserConfig>,
    environment: Environment,
    warn: &mut dyn FnMut(&str),
) -> Result<Resumed> {
    let Some(stored) = Stored::read(folder)? else {
        let Some(file) = file else {
            bail!("{} is not a run folder; give a configuration to start a run", folder.path().display());
        };
        folder.check_start()?.iter().for_each(|line| warn(line));
        let notes =
            vec![format!("{} holds no run yet: starting from the beginning", folder.path().display())];
        return Ok(Resumed::start(file.with(&args.overrides, &args.data)?, notes));
    };
    stored.warnings.iter().for_each(|warning| warn(warning));
    let mut notes = Vec::new();
    let changed = match &file {
        Some(file) => stored.given.clone().changed_by(file, &stored.first_given),
        None => stored.given.clone(),
    };
    let mut given = changed.with(&args.overrides, &args.data)?;
    let before = stored.given.config()?;
    let said = |key: &str| args.overrides.says(key);
    let said_or_in_file = |key: &str| file.as_ref().is_some_and(|file| file.has(key)) || said(key);
    leave_out_decided(&mut given, &before);
    let mut config = given.config()?;
    notes.extend(kept_kernels::keep(&mut given, &before, environment, said("device.kernels")));
    notes.extend(left_out::leave_out(&mut given, [&before, &config], said_or_in_file)?);
    config = given.config()?;
    let checkpoint = match stored.checkpoint {
        None => {
            notes.push(format!(
                "{} has no checkpoint yet: starting from the beginning",
                folder.path().display()
            ));
            None
        }
        Some(checkpoint) => {
            let model = from_checkpoint(&mut given, [&before, &config], &checkpoint, warn, &mut notes)?;
            Some((checkpoint, model))
        }
    };
    let changed = changed_keys(&before, &config)?;
    let same_data = !has_other_data(&changed, |_| true);
    if same_data && !args.data.is_empty() && checkpoint.is_some() {
        warn(
            "--data names the text that the run has: it goes on with its own tokens.bin, and what was changed in these files \
             since its start is not read; for that, give them under another path",
        );
    }
    // A token file that is named again may have changed.
    let names_tokens = said("data.tokens") || said("data.validation_tokens");
    let tokens = stored.tokens.filter(|_| same_data && !names_tokens);
    let learned = match &checkpoint {
        None => None,
        Some((checkpoint, _)) => {
            let changed = config.data.tokenizer != before.data.tokenizer || said("data.tokenizer");
            Some(learned(folder, checkpoint, &config, changed, same_data)?)
        }
    };
    let has_learned = checkpoint.as_ref().is_some_and(|(checkpoint, _)| checkpoint.step() > 0);
    let other_data = names_tokens || has_other_data(&changed, is_file);
    let trained = (has_learned && other_data).then_some(before);
    Ok(Resumed { given, checkpoint, starts: false, same_data, tokens, trained, learned, notes })
}

/// Leaves out what the program had decided for the machine, ranks and cards of the run until now, unless it was given since. The
/// micro-batch that was chosen stays: another one rounds otherwise.
fn leave_out_decided(given: &mut UserConfig, before: &RunConfig) {
    let is_kept = |key: &&String| *key == MICRO || keys::find(key).is_some_and(|key| key.keeps);
    let decided = before.recorded.decided.iter().filter(|key| !is_kept(key));
    decided
        .filter(|key| given.is_decided(key))
        .cloned()
        .collect::<Vec<_>>()
        .iter()
        .for_each(|key| given.leave_out(key));
}

/// Checks the configuration against the checkpoint from which the run goes on, and says what changes; returns its model.
fn from_checkpoint(
    given: &mut UserConfig,
    [before, config]: [&RunConfig; 2],
    checkpoint: &Checkpoint,
    warn: &mut dyn FnMut(&str),
    notes: &mut Vec<String>,
) -> Result<Arc<dyn Model>> {
    let model = model_of(checkpoint)?;
    fill_shape(given, config, checkpoint, &*model)?;
    let changed = changed_keys(before, config)?;
    refuse_fixed(&changed)?;
    check_steps(config, checkpoint)?;
    Changes { before, now: config, changed: &changed, checkpoint }
        .lines()?
        .iter()
        .for_each(|line| warn(line));
    let ahead = Ahead::of(config, checkpoint)?;
    if let Some(line) = ahead.refuse_zeros()? {
        warn(&line);
    }
    notes.extend(learning_rate::note(before, ahead));
    notes.push(format!("resuming from step {} ({})", checkpoint.step(), checkpoint.dir().display()));
    Ok(model)
}

/// Token ids that the model of `checkpoint` has learned. The tokenizer of a run whose data stays is in its token file.
fn learned(
    folder: &RunFolder,
    checkpoint: &Checkpoint,
    config: &RunConfig,
    is_given: bool,
    same_data: bool,
) -> Result<Learned> {
    let stays = same_data && (config.data.tokens.is_some() || folder.has_tokens());
    let tokenizer = match stays || config.data.new_tokenizer {
        true => None,
        false => folder.tokenizer_of(checkpoint)?,
    };
    // Ids that are learned anew mean something else than those of its generation_config.json.
    let kept = DataDigests::of(checkpoint).generation_config.filter(|_| !config.data.new_tokenizer);
    let learned = Learned::of_run(checkpoint.dir().display().to_string(), tokenizer);
    Ok(learned.with_given(is_given).with_generation_config(kept))
}

/// Refuses sizes that differ from the checkpoint's, and removes `lora.adapter` and, unless a checkpoint has adapters alone, `model.init`,
/// because the weights now come from the checkpoint.
fn fill_shape(
    given: &mut UserConfig,
    config: &RunConfig,
    checkpoint: &Checkpoint,
    model: &dyn Model,
) -> Result<()> {
    let dir = checkpoint.dir().display();
    if let Some((key, value, stored)) = shape::contradiction(&config.model, |key| given.has(key), model) {
        bail!(
            "model.{key} = {value}, but the checkpoint {dir} has {stored}: a resumed run keeps its model; leave model.{key} as \
             it was, or start a new run with another --run"
        );
    }
    let seq = config.model.seq;
    if let Some(longest) = model.longest().filter(|longest| seq > *longest) {
        bail!(
            "model.seq = {seq}, but the model of {dir} has {longest} positions, which no sequence may exceed"
        );
    }
    if is_whole(checkpoint) {
        given.leave_out("model.init");
    }
    given.leave_out("lora.adapter");
    Ok(())
}

/// Refuses other values of keys that a resumed run cannot change.
fn refuse_fixed(changed: &[ChangedKey]) -> Result<()> {
    for ChangedKey { key, was, is } in changed {
        if let Resume::Fixed(why) = key.resume {
            let had =
                was.as_ref().map_or("the run left it out".to_string(), |was| format!("the run has {was}"));
            bail!(
                "{} = {}, but {had}: {why}; leave it as it was, or export the run and start a new run with the folder as \
                 model.init",
                key.path(),
                words(is)
            );
        }
    }
    Ok(())
}

/// Refuses fewer steps than the checkpoint has done.
fn check_steps(config: &RunConfig, checkpoint: &Checkpoint) -> Result<()> {
    let dir = checkpoint.dir().display();
    if config.train.steps < checkpoint.step() {
        bail!(
            "train.steps = {}, but {dir} has done {} steps already: give a larger number",
            config.train.steps,
            checkpoint.step()
        );
    }
    Ok(())
}

/// Refuses a token file of the run whose tokenizer is not the one that the model has learned. At step 0, it may have been
/// replaced on purpose (`data.new_tokenizer`).
///
/// # Errors
/// An error with both tokenizers and advice.
pub fn check_vocabulary(folder: &RunFolder, checkpoint: &Checkpoint, tokenizer: &Tokenizer) -> Result<()> {
    let stored = || Tokenizer::load(folder.path()).ok();
    // Checkpoints of earlier versions do not record it; then the run's own tokenizer is used.
    let learned = DataDigests::of(checkpoint).tokenizer.or_else(|| Some(stored()?.digest()));
    if checkpoint.step() == 0 || learned.is_none_or(|learned| learned == tokenizer.digest()) {
        return Ok(());
    }
    bail!(
        "{} was made by a tokenizer ({}) other than the one whose ids the model of {} learned: put the run's files back; \
         nothing was changed",
        folder.file(TOKENS_FILE).display(),
        tokenizer.describe(),
        checkpoint.dir().display()
    )
}

/// The command that resumes a run.
pub fn command(folder: &RunFolder) -> String {
    format!("phalanx train --run {} --resume", shell_word(&folder.path().display().to_string()))
}

/// Quotes a word for a shell, if it needs quotes.
pub fn shell_word(text: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "/._-+=:,".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.to_string()
    } else {
        format!("'{}'", text.replace('\'', "'\\''"))
    }
}

/// Makes a path absolute, so that a run can be resumed from any folder.
pub fn absolute(path: &str) -> String {
    std::path::absolute(path).map_or_else(|_| path.to_string(), |path: PathBuf| path.display().to_string())
}
