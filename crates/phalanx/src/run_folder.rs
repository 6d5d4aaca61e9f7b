//! The folder of a run: what lies where, what may be overwritten, where to go on.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use phalanx_checkpoint::{Checkpoint, Newest, newest};
use phalanx_models::{Model, check_layers, from_config};
use phalanx_train::RunConfig;
use phalanx_train::dataset::TOKENS_FILE;
use phalanx_train::state::PARAMETERS;
use serde_json::Value;

use crate::config::Given;
use crate::output;

/// The configuration file as the user gave it first: what a resume compares a changed one with.
const GIVEN_FILE: &str = "given.toml";

/// See the module's head.
#[derive(Clone, Debug)]
pub struct RunFolder {
    path: PathBuf,
}

impl RunFolder {
    /// At `path`.
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

    /// Where checkpoints are.
    pub fn checkpoints(&self) -> PathBuf {
        self.file("checkpoints")
    }

    /// Whether the run's own token file is there.
    pub fn has_tokens(&self) -> bool {
        self.file(TOKENS_FILE).exists()
    }

    /// Whether there is anything that a new run would destroy.
    pub fn has_results(&self) -> bool {
        let has_metrics = std::fs::metadata(self.file("metrics.jsonl")).is_ok_and(|file| file.len() > 0);
        let mut entries = std::fs::read_dir(self.checkpoints()).into_iter().flatten();
        has_metrics || entries.next().is_some()
    }

    /// Refuses a folder with results.
    ///
    /// # Errors
    /// With what is there and what to do; nothing was changed.
    pub fn refuse_results(&self) -> Result<()> {
        if !self.has_results() {
            return Ok(());
        }
        let path = self.path.display();
        let held = match newest(&self.checkpoints())?.checkpoint {
            Some(checkpoint) => format!("its newest checkpoint is step {}", checkpoint.step()),
            None => "it has metrics and no checkpoint".to_string(),
        };
        bail!(
            "the run folder {path} already holds a run ({held}); nothing was changed. Go on with --resume, \
             or choose another folder with --run"
        )
    }

    /// Makes the folder; whether it was not there before.
    ///
    /// # Errors
    /// A folder that cannot be made or written.
    pub fn create(&self) -> Result<bool> {
        let is_new = !self.path.exists();
        let advice = "give this user the right to write there, or choose another folder with --run";
        std::fs::create_dir_all(&self.path)
            .with_context(|| format!("cannot make the run folder {} ({advice})", self.path.display()))?;
        Ok(is_new)
    }

    /// Writes the resolved configuration, and the file it came from.
    ///
    /// # Errors
    /// A folder that is full or cannot be written.
    pub fn write_config(&self, config: &RunConfig, given: Option<&Given>) -> Result<()> {
        let text = toml::to_string_pretty(config).context("the configuration as TOML")?;
        let head = "# The configuration of this run, complete. `phalanx train --resume --run` reads it.\n\n";
        self.write("config.toml", &format!("{head}{text}"))?;
        given.map_or(Ok(()), |given| self.write(GIVEN_FILE, given.text()))
    }

    /// Writes `plan.json`.
    ///
    /// # Errors
    /// A folder that is full or cannot be written.
    pub fn write_plan(&self, plan: &Value) -> Result<()> {
        self.write("plan.json", &(serde_json::to_string_pretty(plan)? + "\n"))
    }

    /// Writes a file beside its name and renames it.
    fn write(&self, name: &str, text: &str) -> Result<()> {
        let (path, next) = (self.file(name), self.file(&format!(".{name}.tmp")));
        std::fs::write(&next, text).and_then(|()| std::fs::rename(&next, &path)).with_context(|| {
            let advice =
                "free space, give this user the right to write there, or choose another folder with --run";
            format!("cannot write {} ({advice})", path.display())
        })
    }

    /// The configuration that the run was started or resumed with; `None` in a folder without.
    ///
    /// # Errors
    /// A file that is damaged.
    pub fn config(&self) -> Result<Option<Given>> {
        let path = self.file("config.toml");
        if path.exists() { Given::read(&path).map(Some) } else { Ok(None) }
    }

    /// The configuration file as it was first given; empty for a folder that was not made from one.
    ///
    /// # Errors
    /// A file that is damaged.
    pub fn first_given(&self) -> Result<Given> {
        let path = self.file(GIVEN_FILE);
        if path.exists() { Given::read(&path) } else { Ok(Given::default()) }
    }

    /// The newest checkpoint that is whole, and those that are not.
    ///
    /// # Errors
    /// A folder that cannot be read.
    pub fn newest(&self) -> Result<Newest> {
        Ok(newest(&self.checkpoints())?)
    }

    /// Checkpoint `step`, or the newest.
    ///
    /// # Errors
    /// A folder that is no run or holds no such checkpoint.
    pub fn checkpoint(&self, step: Option<u64>) -> Result<Checkpoint> {
        if let Some(step) = step {
            let dir = self.checkpoints().join(format!("step-{step}"));
            return Checkpoint::open(&dir)
                .with_context(|| format!("checkpoint {step} of {}", self.path.display()));
        }
        let found = self.newest()?;
        for skipped in &found.skipped {
            output::note(&format!("skipping {}: {}", skipped.path.display(), skipped.reason));
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
        check_layers(&*model, parameters.map(|tensor| tensor.name.as_str()))?;
        Ok(model)
    });
    model.with_context(|| format!("the model of {}", checkpoint.dir().display()))
}
