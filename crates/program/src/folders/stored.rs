//! The stored state of a run in its folder, checked before anything of it is used.
//!
//! `config.toml` counts when it is what the run wrote (`checksums.json`); without it, the configuration of the newest
//! checkpoint does. A run with checkpoints of which none can be used is not started anew by itself.

use anyhow::{Context, Error, Result, anyhow, bail};
use phalanx_checkpoint::{Checkpoint, Skipped};
use phalanx_system::files::is_named;
use phalanx_train::RunConfig;
use phalanx_train::dataset::DataDigests;
use phalanx_train::metrics::{MetricsDigest, damaged_lines};
use phalanx_train::run_files::{CONFIG_FILE, METRICS_FILE};

use crate::configuration::changed_keys::changed_keys;
use crate::configuration::earlier;
use crate::configuration::user_config::UserConfig;
use crate::folders::checksums::{Checksums, digest};
use crate::folders::ownership::{ADVICE, check_own};
use crate::folders::run_folder::RunFolder;
use crate::folders::run_names::{CHECKSUMS_FILE, GIVEN_FILE, PLAN_FILE};

/// Maximum number of differences in a message.
const SHOWN: usize = 8;

/// A run that was started before.
pub struct Stored {
    /// Its configuration.
    pub given: UserConfig,
    /// The configuration file that it was first given, if needed and known.
    pub first_given: UserConfig,
    /// Checksum of its token file, where it is known.
    pub tokens: Option<String>,
    /// The newest checkpoint that can be used; `None` for a run that has saved nothing.
    pub checkpoint: Option<Checkpoint>,
    /// Problems that do not stop the run.
    pub warnings: Vec<String>,
}

impl Stored {
    /// Reads `folder`; `None` for a folder without a run.
    ///
    /// # Errors
    /// Files that are damaged or were changed, and checkpoints of which none can be used.
    pub fn read(folder: &RunFolder) -> Result<Option<Stored>> {
        let found = folder.newest()?;
        if found.checkpoint.is_none() {
            refuse_all_damaged(folder, &found.skipped)?;
        }
        let skipping = |skipped: &Skipped| format!("skipping {}", skipped.describe());
        let mut warnings: Vec<String> = found.skipped.iter().map(skipping).collect();
        warnings.extend(metrics_warnings(folder, found.checkpoint.as_ref())?);
        let checkpoint = found.checkpoint;
        let checksums = Checksums::read(folder.path())?;
        let path = folder.file(CONFIG_FILE);
        let Some(text) = folder.text(CONFIG_FILE)? else {
            let Some(checkpoint) = checkpoint else { return Ok(None) };
            if checksums.is_none() {
                check_own(folder.path(), [GIVEN_FILE, PLAN_FILE])?;
            }
            warnings.push(format!(
                "{} is missing: using the configuration of {}",
                path.display(),
                checkpoint.dir().display()
            ));
            let (config, left_out) = config_of(&checkpoint)?;
            warnings.extend(left_out);
            let given = UserConfig::of(&config)?;
            let tokens = DataDigests::of(&checkpoint).tokens;
            let first_given = UserConfig::default();
            return Ok(Some(Stored { given, first_given, tokens, checkpoint: Some(checkpoint), warnings }));
        };
        let parsed = UserConfig::parse_stored(text.clone(), &path.display().to_string());
        let recorded = checksums.as_ref().and_then(|checksums| checksums.config.as_deref());
        if recorded != Some(&digest(&text)) {
            return Err(edited(folder, &parsed, checkpoint.as_ref(), checksums.is_some())?);
        }
        let (mut given, left_out) = parsed?;
        warnings.extend(left_out);
        let first_given = first_given(folder, checksums.as_ref(), &mut warnings)?;
        if !given.has("recorded.decided") {
            // A folder of a version that did not record it.
            given.decide(&["device.communication"], &first_given);
        }
        record_decay(&mut given)?;
        let tokens = match checksums {
            Some(checksums) => checksums.tokens,
            None => checkpoint.as_ref().and_then(|checkpoint| DataDigests::of(checkpoint).tokens),
        };
        Ok(Some(Stored { given, first_given, tokens, checkpoint, warnings }))
    }
}

/// Writes down the step at which the learning rate's decay ends, which the earliest versions did not: it is their `train.steps`.
///
/// # Errors
/// None for a configuration that was read.
fn record_decay(given: &mut UserConfig) -> Result<()> {
    let config = given.config()?;
    if let (None, Some(end)) = (config.schedule.decay_steps, config.decay_end()) {
        given.set_whole("schedule.decay_steps", end);
    }
    Ok(())
}

fn config_of(checkpoint: &Checkpoint) -> Result<(RunConfig, Vec<String>)> {
    earlier::config_of_checkpoint(checkpoint.state())
        .with_context(|| format!("the configuration in {}", checkpoint.dir().display()))
}

fn refuse_all_damaged(folder: &RunFolder, skipped: &[Skipped]) -> Result<()> {
    let Some(first) = skipped.first() else { return Ok(()) };
    let path = folder.path().display();
    let others = match skipped.len() - 1 {
        0 => String::new(),
        others => format!(" (and {others} more)"),
    };
    bail!(
        "no checkpoint of {path} can be used: {}{others}; nothing was changed. `phalanx inspect {} --verify` says \
         what is damaged; to start a new run, choose another folder with --run, or move {} away",
        first.reason,
        first.path.display(),
        folder.checkpoints().display()
    );
}

/// The error for a configuration that the run did not write: what differs from the one in the checkpoint.
fn edited(
    folder: &RunFolder,
    parsed: &Result<(UserConfig, Vec<String>)>,
    checkpoint: Option<&Checkpoint>,
    has_checksums: bool,
) -> Result<Error> {
    let path = folder.file(CONFIG_FILE);
    let path = path.display();
    let resolved = parsed
        .as_ref()
        .map_err(|error| format!("{error:#}"))
        .and_then(|(given, _)| given.config().map_err(|error| format!("{error:#}")));
    let Some(checkpoint) = checkpoint else {
        if !has_checksums {
            return Ok(anyhow!(
                "{} is not a run folder: no run has written {path} (there is no {CHECKSUMS_FILE} that says so), and there is \
                 no checkpoint: {ADVICE}",
                folder.path().display()
            ));
        }
        let reason =
            resolved.err().unwrap_or_else(|| "its checksum does not match checksums.json".to_string());
        return Ok(anyhow!(
            "{path} is damaged or was edited: {reason}. There is no checkpoint yet: start a new run with your \
             configuration and another --run, or remove {path}; nothing was changed"
        ));
    };
    let dir = checkpoint.dir().display();
    let found = match resolved {
        Err(reason) => vec![reason],
        Ok(config) => {
            let changed = changed_keys(&config_of(checkpoint)?.0, &config)?;
            changed.iter().map(ToString::to_string).collect()
        }
    };
    if found.is_empty() && !has_checksums {
        check_own(folder.path(), [CONFIG_FILE, GIVEN_FILE, PLAN_FILE])?;
    }
    let more = match found.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!(", and {more} more"),
    };
    let differences = match found.is_empty() {
        true => format!("the same values in another text, unless {CHECKSUMS_FILE} is of another run"),
        false => found[..found.len().min(SHOWN)].join(", "),
    };
    Ok(anyhow!(
        "{path} is damaged or was edited; compared with {dir}: {differences}{more}. To change keys, use --set TABLE.KEY=VALUE \
         with --resume; to use the configuration of {dir}, remove {path}; nothing was changed"
    ))
}

fn first_given(
    folder: &RunFolder,
    checksums: Option<&Checksums>,
    warnings: &mut Vec<String>,
) -> Result<UserConfig> {
    let path = folder.file(GIVEN_FILE);
    let recorded = checksums.and_then(|checksums| checksums.given.as_deref());
    let Some(text) = folder.text(GIVEN_FILE)? else {
        if recorded.is_some() {
            warnings.push(format!(
                "{} is missing: every key of a configuration file that is given now counts as changed",
                path.display()
            ));
        }
        return Ok(UserConfig::default());
    };
    if recorded.is_none() {
        check_own(folder.path(), [GIVEN_FILE])?;
    } else if recorded != Some(&digest(&text)) {
        bail!(
            "{} is damaged or was edited (its checksum does not match checksums.json): put it back, or remove it, \
             and every key of a configuration file that is given now counts as changed; nothing was changed",
            path.display()
        );
    }
    Ok(UserConfig::parse_stored(text, &path.display().to_string())?.0)
}

/// Warnings about metrics up to `checkpoint` that are gone or were changed, and about lines that will be dropped.
///
/// # Errors
/// A file that cannot be read.
pub fn metrics_warnings(folder: &RunFolder, checkpoint: Option<&Checkpoint>) -> Result<Vec<String>> {
    let path = folder.file(METRICS_FILE);
    let (shown, reading) = (path.display(), || format!("cannot read {}", path.display()));
    let mut warnings = Vec::new();
    if let Some(checkpoint) = checkpoint.filter(|checkpoint| checkpoint.step() > 0) {
        let (step, dir) = (checkpoint.step(), checkpoint.dir().display());
        let digest = MetricsDigest::of(checkpoint);
        if !is_named(&path) {
            warnings.push(format!("{shown} is missing: its lines of steps 1 to {step} are lost"));
        } else if let Some(digest) = digest
            && !digest.begins(&path).with_context(reading)?
        {
            warnings.push(format!(
                "{shown} is damaged or was changed: its lines of steps 1 to {step} are not those that {dir} was saved with"
            ));
        }
    }
    let damaged = damaged_lines(&path).with_context(reading)?;
    if let Some(first) = damaged.first() {
        let others = match damaged.len() - 1 {
            0 => "is not a record and will be".to_string(),
            others => format!("and {others} more are not records and will be"),
        };
        warnings.push(format!("{shown}: line {first} {others} left out"));
    }
    Ok(warnings)
}

#[cfg(test)]
mod tests {
    use phalanx_train::ResolvedConfig;

    use super::*;
    use crate::arguments::overrides::Overrides;
    use crate::configuration::left_out;

    /// The configuration of a resumed run, from the stored one and what is set now.
    fn resumed(stored: &str, set: &[&str]) -> ResolvedConfig {
        let mut stored = UserConfig::of_text(stored).unwrap();
        record_decay(&mut stored).unwrap();
        let overrides =
            Overrides { set: set.iter().map(|set| set.to_string()).collect(), ..Overrides::default() };
        let mut given = stored.clone().with(&overrides, &[]).unwrap();
        let (before, now) = (stored.config().unwrap(), given.config().unwrap());
        left_out::leave_out(&mut given, [&before, &now], |key| overrides.sets(key)).unwrap();
        ResolvedConfig::new(given.config().unwrap()).unwrap()
    }
    /// Runs of earlier versions wrote no `decay_steps`.
    #[test]
    fn a_run_without_the_end_of_its_decay_keeps_every_rate() {
        let old = "[schedule]\nkind = \"cosine\"\nwarmup = 10\nmin_lr = 1e-5\n[train]\nsteps = 100";
        let before = UserConfig::of_text(old).unwrap().config().unwrap().learning_rate();
        assert_eq!(resumed(old, &[]).learning_rate(), before);
        let longer = resumed(old, &["train.steps=200"]);
        assert_eq!((longer.schedule.decay_steps, longer.learning_rate()), (Some(100), before));
        assert_eq!((100..200).map(|step| longer.learning_rate().lr(step)).fold(0.0, f64::max), 1e-5);
        assert_eq!(resumed(old, &["train.steps=50"]).learning_rate(), before);
        assert_eq!(
            resumed(old, &["train.steps=200", "schedule.decay_steps=150"]).schedule.decay_steps,
            Some(150)
        );
    }

    /// A run that ended within its warm-up has no decay to keep.
    #[test]
    fn a_decay_that_never_began_follows_the_steps() {
        let short = "[schedule]\nwarmup = 10\n[train]\nsteps = 5";
        assert_eq!(resumed(short, &[]).schedule.decay_steps, None);
        assert_eq!(resumed(short, &["train.steps=200"]).schedule.decay_steps, Some(200));
    }

    #[test]
    fn a_change_of_kind_needs_no_other_key() {
        let cosine = "[schedule]\ndecay_steps = 100\nrestart_step = 50\n[train]\nsteps = 100";
        let constant = resumed(cosine, &["schedule.kind=constant", "train.steps=200"]);
        assert_eq!((constant.schedule.decay_steps, constant.schedule.restart_step), (None, None));
        let back = "[schedule]\nkind = \"constant\"\n[train]\nsteps = 100";
        let decays = resumed(back, &["schedule.kind=linear", "train.steps=200"]);
        assert_eq!(decays.schedule.decay_steps, Some(200));
    }
}
