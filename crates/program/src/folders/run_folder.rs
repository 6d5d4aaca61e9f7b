//! The folder of a run: its files, what may be overwritten, and which checkpoint to resume from.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use phalanx_checkpoint::{Checkpoint, Newest, newest, saved_steps};
use phalanx_data::{TOKENIZER_FILE, Tokenizer};
use phalanx_models::{Model, check_layers, from_config};
use phalanx_system::files::is_named;
use phalanx_train::base::is_whole;
use phalanx_train::dataset::DataDigests;
use phalanx_train::run_files::{CHECKPOINTS, METRICS_FILE};
use phalanx_train::state::PARAMETERS;
use phalanx_train::token_data::TOKENS_FILE;

use crate::arguments::limits::CONFIG_BYTES;
use crate::folders::ownership::{check_free, check_own, is_run};
use crate::folders::run_names::SETUP_FILES;

/// The folder of a run.
#[derive(Clone, Debug)]
pub struct RunFolder {
    path: PathBuf,
}

impl RunFolder {
    /// The run folder at `path`.
    pub fn at(path: &Path) -> RunFolder {
        RunFolder { path: path.to_path_buf() }
    }

    /// `run`, or else `runs/NAME` of the configuration file.
    pub fn named(run: Option<&Path>, config: Option<&Path>) -> Result<RunFolder> {
        match (run, config.and_then(Path::file_stem)) {
            (Some(run), _) => Ok(RunFolder::at(run)),
            (None, Some(name)) => Ok(RunFolder::at(&Path::new("runs").join(name))),
            (None, None) => bail!("give a configuration, or the run folder: --run DIR --resume"),
        }
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A file or folder in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Folder of the checkpoints.
    pub fn checkpoints(&self) -> PathBuf {
        self.file(CHECKPOINTS)
    }

    /// Returns whether the run's own token file exists.
    pub fn has_tokens(&self) -> bool {
        is_named(&self.file(TOKENS_FILE))
    }

    /// Returns whether it holds metrics or checkpoints, which a new run would destroy.
    ///
    /// # Errors
    /// A folder that cannot be read.
    pub fn has_results(&self) -> Result<bool> {
        let has_metrics = std::fs::metadata(self.file(METRICS_FILE)).is_ok_and(|file| file.len() > 0);
        Ok(has_metrics || !saved_steps(&self.checkpoints())?.is_empty())
    }

    /// Refuses a folder in which a new run would destroy something; its lock must be held. Returns what is said of a start
    /// that has made no step, if there was one.
    ///
    /// # Errors
    /// An error with the contents and advice; nothing was changed.
    pub fn check_start(&self) -> Result<Option<String>> {
        let path = self.path.display();
        let (is_run, checkpoint) = (is_run(&self.path)?, self.newest()?.checkpoint);
        if checkpoint.is_none() && !is_run {
            return check_free(&self.path).map(|()| None);
        }
        if self.has_results()? {
            let held = match checkpoint {
                Some(checkpoint) => format!("its newest checkpoint is step {}", checkpoint.step()),
                None => "it has metrics and no checkpoint".to_string(),
            };
            bail!(
                "the run folder {path} already holds a run ({held}); nothing was changed. Continue with --resume, \
                 or choose another folder with --run"
            )
        }
        check_own(&self.path, SETUP_FILES)?;
        Ok(Some(format!("{path} holds a start that has made no step: this one takes its place")))
    }

    /// Creates the folder; returns it and those above it that were made.
    ///
    /// # Errors
    /// A folder that cannot be made or written.
    pub fn create(&self) -> Result<Vec<PathBuf>> {
        let advice = "give this user the right to write there, or choose another folder with --run";
        phalanx_system::files::create_folders(&self.path)
            .with_context(|| format!("cannot make the run folder {} ({advice})", self.path.display()))
    }

    /// A text file in it; `None` when it is not there.
    ///
    /// # Errors
    /// A file that is not text or cannot be read.
    pub fn text(&self, name: &str) -> Result<Option<String>> {
        let path = self.file(name);
        match phalanx_system::files::read_text(&path, CONFIG_BYTES) {
            Err(cause) if cause.kind() == ErrorKind::NotFound => Ok(None),
            other => other.map(Some).with_context(|| format!("cannot read {}", path.display())),
        }
    }

    /// The run's tokenizer, which must be the one whose ids the model of `checkpoint` learned; `None` for a run
    /// on tokens that came without one.
    ///
    /// # Errors
    /// Another tokenizer, or one that is damaged.
    pub fn tokenizer_of(&self, checkpoint: &Checkpoint) -> Result<Option<Tokenizer>> {
        let path = self.file(TOKENIZER_FILE);
        let learned = DataDigests::of(checkpoint).tokenizer;
        if !is_named(&path) {
            return match learned {
                None => Ok(None),
                Some(_) => bail!(
                    "{} is missing: put it back; `phalanx train --resume` makes it again from tokens.bin",
                    path.display()
                ),
            };
        }
        let tokenizer = Tokenizer::load(&self.path)?;
        if learned.is_some_and(|learned| learned != tokenizer.digest()) {
            bail!(
                "{} ({}) is not the tokenizer of {}, whose model learned other ids: put the run's tokenizer back",
                path.display(),
                tokenizer.describe(),
                checkpoint.dir().display()
            );
        }
        Ok(Some(tokenizer))
    }

    /// The newest complete checkpoint, and newer ones that are damaged.
    ///
    /// # Errors
    /// A folder that cannot be read.
    pub fn newest(&self) -> Result<Newest> {
        Ok(newest(&self.checkpoints())?)
    }

    /// Checkpoint `step`, or the newest.
    ///
    /// # Errors
    /// A folder that is not a run or does not hold this checkpoint; a newest one that is damaged.
    pub fn checkpoint(&self, step: Option<u64>) -> Result<Checkpoint> {
        if let Some(step) = step {
            let dir = self.checkpoints().join(format!("step-{step}"));
            return Checkpoint::open(&dir)
                .with_context(|| format!("checkpoint {step} of {}", self.path.display()));
        }
        let found = self.newest()?;
        if let Some(newer) = found.skipped.first() {
            let instead = found.checkpoint.map_or("there is no older one".to_string(), |checkpoint| {
                format!("to take the newest one that can, give --step {}", checkpoint.step())
            });
            bail!(
                "the newest checkpoint of {} cannot be used ({}); {instead}",
                self.path.display(),
                newer.describe()
            );
        }
        found.checkpoint.with_context(|| {
            let path = self.path.display();
            format!("{path} holds no checkpoint; give the folder of a run that has saved one (runs/NAME)")
        })
    }
}

/// The model that a checkpoint was saved from.
///
/// # Errors
/// A checkpoint without that record.
pub fn model_of(checkpoint: &Checkpoint) -> Result<Arc<dyn Model>> {
    let parameters = checkpoint.tensors().iter().filter(|tensor| tensor.state == PARAMETERS);
    let model = from_config(&checkpoint.state()["model"]).and_then(|model| {
        // Adapters may be those of some layers.
        if is_whole(checkpoint) {
            check_layers(&*model, parameters.map(|tensor| tensor.name.as_str()))?;
        }
        Ok(model)
    });
    model.with_context(|| format!("the model of {}", checkpoint.dir().display()))
}
