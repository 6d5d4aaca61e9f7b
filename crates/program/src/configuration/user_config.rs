//! The configuration as the user gave it: a TOML file, then `--set`, `--nproc` and `--data`.
//!
//! Keys that the user gave are kept apart from values that follow from them: only then can a key that contradicts an imported model be told
//! from a default, and a resumed run know what the user has changed since.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use phalanx_train::RunConfig;
use phalanx_train::config::Key;
use serde::Deserialize;
use toml::{Table, Value};

use crate::arguments::limits::CONFIG_BYTES;
use crate::arguments::overrides::{Overrides, RANKS};
use crate::configuration::{earlier, keys, schedule_file};

/// Key of the token files that `--data` replaces.
const TOKENS: &str = "data.tokens";

/// The key that may have the word `auto`: the planner then chooses its value (`plans::micro_choice`).
pub const MICRO: &str = "batch.micro";
const AUTO: &str = "auto";

/// Keys of which only one is given: a number of steps, or from what it is counted.
const COUNTED: [(&str, &str); 2] =
    [("train.epochs", "train.steps"), ("schedule.warmup_share", "schedule.warmup")];

/// Keys that were given, each known and of the right type.
#[derive(Clone, Debug, Default)]
pub struct UserConfig {
    tables: Table,
    text: String,
    /// True if `batch.micro` was given as `auto`, and no value since.
    micro_is_auto: bool,
}

/// Takes the word `auto` of `batch.micro` out of the tables; true if it was there.
fn take_auto(tables: &mut Table) -> bool {
    let is_auto = keys::lookup(tables, MICRO).and_then(Value::as_str) == Some(AUTO);
    if let (true, Some(Value::Table(batch))) = (is_auto, tables.get_mut("batch")) {
        batch.remove("micro");
    }
    is_auto
}

impl UserConfig {
    /// Reads a configuration file.
    ///
    /// # Errors
    /// A file that is missing or not TOML, or has unknown keys or values of the wrong type.
    pub fn read(path: &Path) -> Result<UserConfig> {
        let text = match phalanx_system::files::read_text(path, CONFIG_BYTES) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => bail!(
                "no configuration file {}; check the spelling (paths start at the current folder), or begin with \
                 examples/quickstart.toml",
                path.display()
            ),
            Err(error) => bail!("cannot read the configuration {}: {error}", path.display()),
        };
        UserConfig::parse(text, &path.display().to_string())
    }

    /// The content of a configuration file; `origin` names it in errors.
    ///
    /// # Errors
    /// As for [`UserConfig::read`].
    pub fn parse(text: String, origin: &str) -> Result<UserConfig> {
        let mut tables: Table =
            toml::from_str(&text).with_context(|| format!("{origin} is not valid TOML"))?;
        let micro_is_auto = take_auto(&mut tables);
        keys::check(&tables, origin, &text)?;
        Ok(UserConfig { tables, text, micro_is_auto })
    }

    /// The content of a configuration file that a run folder holds, perhaps since an earlier version; with notes on what of it
    /// is left out.
    ///
    /// # Errors
    /// As for [`UserConfig::read`].
    pub fn parse_stored(text: String, origin: &str) -> Result<(UserConfig, Vec<String>)> {
        let mut tables: Table =
            toml::from_str(&text).with_context(|| format!("{origin} is not valid TOML"))?;
        let notes = earlier::leave_out(&mut tables)?;
        let micro_is_auto = take_auto(&mut tables);
        keys::check(&tables, origin, &text)?;
        Ok((UserConfig { tables, text, micro_is_auto }, notes))
    }

    /// A configuration from a text.
    #[cfg(test)]
    pub fn of_text(text: &str) -> Result<UserConfig> {
        UserConfig::parse(text.to_string(), "the text")
    }

    /// A configuration in which every key counts as given.
    ///
    /// # Errors
    /// None for a configuration that was read.
    pub fn of(config: &RunConfig) -> Result<UserConfig> {
        let tables = Table::try_from(config).context("the configuration as TOML")?;
        Ok(UserConfig { tables, text: String::new(), micro_is_auto: false })
    }

    /// The file as it was read.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Applies the command line, and replaces the path of a schedule file by its text.
    ///
    /// # Errors
    /// A malformed assignment, an unknown key, a value of the wrong type; a schedule file that is missing or cannot be
    /// run.
    pub fn with(mut self, overrides: &Overrides, data: &[PathBuf]) -> Result<UserConfig> {
        for key in overrides.unset.iter().map(|key| key.trim()) {
            if keys::find(key).is_none() {
                bail!("--unset: {}", keys::unknown(key));
            }
            if overrides.sets(key) {
                bail!("--unset {key}: another option gives this key; leave one of them out");
            }
            self.forget(key);
        }
        for text in &overrides.set {
            if is_auto(text) {
                self.forget(MICRO);
                self.micro_is_auto = true;
                continue;
            }
            let (key, value) = keys::assignment(text)?;
            self.give(&key, value);
        }
        if let Some(ranks) = overrides.nproc {
            let ranks = i64::try_from(ranks).context("--nproc")?;
            keys::insert(&mut self.tables, RANKS, Value::Integer(ranks));
        }
        self.settle(|key| overrides.sets(key));
        if !data.is_empty() {
            let paths = data.iter().map(|path| Value::String(path.display().to_string())).collect();
            keys::insert(&mut self.tables, "data.text", Value::Array(paths));
            self.leave_out(TOKENS);
            let is_of_tokens = |key: &&Key| key.needs.iter().any(|need| need.is_for_key(TOKENS));
            keys::all().iter().filter(is_of_tokens).for_each(|key| self.leave_out(&key.path()));
        }
        if let Some(Value::String(schedule)) = keys::lookup(&self.tables, "parallel.schedule")
            && let Some(text) = schedule_file::text_of(schedule)
                .with_context(|| format!("parallel.schedule = {schedule:?}"))?
        {
            keys::insert(&mut self.tables, "parallel.schedule", Value::String(text));
        }
        Ok(self)
    }

    /// Applies every key of `changes` whose value differs from that in `before`.
    pub fn changed_by(mut self, changes: &UserConfig, before: &UserConfig) -> UserConfig {
        let differs = |key: &str, value: &Value| keys::lookup(&before.tables, key) != Some(value);
        for (key, value) in keys::flat(&changes.tables).filter(|(key, value)| differs(key, value)) {
            self.give(&key, value.clone());
        }
        let said = |key: &str| keys::lookup(&changes.tables, key).is_some_and(|value| differs(key, value));
        self.settle(said);
        if changes.micro_is_auto && !before.micro_is_auto {
            self.forget(MICRO);
            self.leave_out("parallel.micro_batches");
            self.micro_is_auto = true;
        }
        self
    }

    /// Returns whether the planner is to choose `batch.micro`.
    pub fn micro_is_auto(&self) -> bool {
        self.micro_is_auto
    }

    /// Sets a key to what the user gives: it is decided no more.
    fn give(&mut self, key: &str, value: Value) {
        self.forget(key);
        keys::insert(&mut self.tables, key, value);
    }

    /// Leaves a key out, and that it was decided.
    fn forget(&mut self, key: &str) {
        // What the same is said by replaces it, too.
        self.micro_is_auto &= key != MICRO && key != "parallel.micro_batches";
        if self.is_decided(key) {
            self.decided().retain(|decided| decided.as_str() != Some(key));
        }
        self.leave_out(key);
    }

    /// The keys that the program has decided.
    fn decided(&mut self) -> &mut Vec<Value> {
        let recorded = self.tables.entry("recorded").or_insert_with(|| Value::Table(Table::new()));
        let recorded = recorded.as_table_mut().expect("checked tables");
        let decided = recorded.entry("decided").or_insert_with(|| Value::Array(Vec::new()));
        decided.as_array_mut().expect("checked values")
    }

    /// Returns whether the program has decided a key, and nobody has given it since.
    pub fn is_decided(&self, key: &str) -> bool {
        let decided = keys::lookup(&self.tables, "recorded.decided").and_then(Value::as_array);
        decided.is_some_and(|decided| decided.iter().any(|decided| decided.as_str() == Some(key)))
    }

    /// Records that the program has decided these keys, where they have a value that `first_given` has not.
    pub fn decide(&mut self, keys: &[&str], first_given: &UserConfig) {
        for key in
            keys.iter().filter(|key| self.has(key) && !first_given.has(key)).copied().collect::<Vec<_>>()
        {
            self.decided().push(key.into());
        }
    }

    /// Keeps the later given of two keys that say the same, and removes the other.
    fn settle(&mut self, said: impl Fn(&str) -> bool) {
        for key in keys::all().iter().filter(|key| !key.either.is_empty()) {
            let (one, other) = (key.path(), key.either);
            match [said(&one), said(other)] {
                [true, false] => self.leave_out(other),
                [false, true] => self.leave_out(&one),
                [true, true] | [false, false] => {}
            }
        }
    }

    /// Returns whether a key was given.
    pub fn has(&self, key: &str) -> bool {
        keys::lookup(&self.tables, key).is_some()
    }

    /// The value of a key that was given.
    pub fn value(&self, key: &str) -> Option<&Value> {
        keys::lookup(&self.tables, key)
    }

    /// The line of a key in the file.
    pub fn line(&self, key: &str) -> Option<usize> {
        keys::line_of(&self.text, key)
    }

    /// The configuration with its keys as its text, after a first line.
    ///
    /// # Errors
    /// None for keys that were checked.
    pub fn retext(self, head: &str) -> Result<UserConfig> {
        let mut tables = self.tables.clone();
        if self.micro_is_auto && !self.has(MICRO) {
            keys::insert(&mut tables, MICRO, AUTO.into());
        }
        let text = toml::to_string_pretty(&tables).context("the configuration as TOML")?;
        Ok(UserConfig { text: format!("{head}{text}"), ..self })
    }

    /// Removes a key, as if it had been left out.
    pub fn leave_out(&mut self, key: &str) {
        let table = key.split_once('.').and_then(|(table, key)| Some((self.tables.get_mut(table)?, key)));
        if let Some((Value::Table(table), key)) = table {
            table.remove(key);
        }
    }

    /// The keys that were given, with their values.
    #[cfg(test)]
    pub fn keys(&self) -> impl Iterator<Item = (String, Value)> {
        keys::flat(&self.tables).map(|(key, value)| (key, value.clone()))
    }

    /// Sets a key.
    pub fn set(&mut self, key: &str, value: Value) {
        keys::insert(&mut self.tables, key, value);
    }

    /// Sets a key to an integer.
    pub fn set_whole(&mut self, key: &str, value: u64) {
        // TOML has integers up to 2^63 - 1; larger ones are clamped.
        let value = i64::try_from(value).unwrap_or(i64::MAX);
        keys::insert(&mut self.tables, key, Value::Integer(value));
    }

    /// The configuration, with defaults for what was left out.
    ///
    /// # Errors
    /// None for keys that were checked.
    pub fn config(&self) -> Result<RunConfig> {
        for (one, other) in COUNTED {
            if self.has(one) && self.has(other) {
                bail!("{one} and {other} both say how many steps there are: leave one of them out");
            }
        }
        let mut config =
            RunConfig::deserialize(Value::Table(self.tables.clone())).context("the configuration")?;
        let data = &config.data;
        let has_files = data.validation_paths().is_some()
            || data.validation_chat.is_some()
            || data.validation_pairs.is_some();
        if has_files && !self.has("data.validation") {
            // Files are evaluated in place of the default fraction.
            config.data.validation = 0.0;
        }
        Ok(config)
    }
}

/// Returns whether an assignment gives `batch.micro` the word `auto`.
fn is_auto(text: &str) -> bool {
    let pair = text.split_once('=').map(|(key, value)| (key.trim(), value.trim().trim_matches('"')));
    pair == Some((MICRO, AUTO))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(text: &str) -> UserConfig {
        UserConfig { tables: toml::from_str(text).unwrap(), text: text.to_string(), micro_is_auto: false }
    }

    /// The word stays until a value is given, and is written where the configuration is.
    #[test]
    fn a_micro_batch_may_be_left_to_the_planner() {
        let read = |text: &str| UserConfig::of_text(text).unwrap();
        let set = |config: UserConfig, set: &[&str]| {
            let set = set.iter().map(ToString::to_string).collect();
            config.with(&Overrides { set, ..Overrides::default() }, &[]).unwrap()
        };
        let auto = read("[batch]\nglobal = 8\nmicro = \"auto\"");
        assert!(auto.micro_is_auto() && !auto.has(MICRO) && auto.config().unwrap().batch.micro.is_none());
        assert!(auto.clone().retext("").unwrap().text().contains("micro = \"auto\""));
        for value in ["batch.micro=2", "parallel.micro_batches=2"] {
            assert!(!set(auto.clone(), &[value]).micro_is_auto(), "{value}");
        }
        let again =
            set(read("[batch]\nmicro = 2\n[recorded]\ndecided = [\"batch.micro\"]"), &["batch.micro=auto"]);
        assert!(again.micro_is_auto() && !again.has(MICRO) && !again.is_decided(MICRO));
        // A run that has a value keeps it, as long as its configuration says the same as before.
        let stored = read("[batch]\nmicro = 2");
        assert!(!stored.clone().changed_by(&auto, &auto).micro_is_auto());
        assert!(stored.changed_by(&auto, &read("")).micro_is_auto());
    }

    #[test]
    fn the_command_line_wins_over_the_file() {
        let overrides = Overrides {
            set: vec!["train.steps=7".into(), "parallel.zero=3".into()],
            nproc: Some(4),
            ..Overrides::default()
        };
        let file = given("[train]\nsteps = 5\nseed = 9\n[data]\ntokens = \"x.bin\"");
        let config = file.with(&overrides, &["a".into(), "b".into()]).unwrap().config().unwrap();
        assert_eq!((config.train.steps, config.train.seed), (7, 9));
        assert_eq!((config.world_size(), config.parallel.zero), (4, 3));
        assert_eq!((config.data.text, config.data.tokens), (vec!["a".to_string(), "b".to_string()], None));
    }

    #[test]
    fn of_two_keys_that_follow_from_each_other_the_later_counts() {
        let text = "[parallel]\ndata = 2\n[batch]\nglobal = 24\nmicro = 4";
        let with = |text: &str, set: &[&str], nproc| {
            let set = set.iter().map(|set| set.to_string()).collect();
            let config = given(text)
                .with(&Overrides { set, nproc, ..Overrides::default() }, &[])
                .unwrap()
                .config()
                .unwrap();
            (config.world_size(), config.data(), config.micro_batches())
        };
        assert_eq!(with(text, &[], None), (2, 2, 3));
        assert_eq!(with(text, &["parallel.tensor=2"], Some(6)), (6, 3, 2));
        assert_eq!(with(text, &["parallel.micro_batches=6"], None), (2, 2, 6));
        let resolved = "[parallel]\nranks = 4\ntensor = 2\nmicro_batches = 2\n[batch]\nglobal = 24";
        assert_eq!(with(resolved, &["parallel.data=3"], None), (6, 3, 2));
        assert_eq!(with(resolved, &["batch.micro=1"], None), (4, 2, 12));
        // A key in a file that was changed since also counts as given later.
        let now = given("[parallel]\nranks = 8");
        let config = given(text).changed_by(&now, &UserConfig::default()).config().unwrap();
        assert_eq!((config.world_size(), config.parallel.data), (8, None));
    }

    #[test]
    fn a_key_that_is_unset_is_as_if_it_had_never_been_given() {
        let text =
            "[train]\nsteps = 5\n[parallel]\nmicro_batches = 2\n[recorded]\ndecided = [\"train.steps\"]";
        let unset = |set: &[&str], unset: &[&str]| {
            let [set, unset] = [set, unset].map(|keys| keys.iter().map(ToString::to_string).collect());
            given(text).with(&Overrides { set, unset, ..Overrides::default() }, &[])
        };
        let without = unset(&[], &["train.steps", "batch.micro"]).unwrap();
        assert!(!without.has("train.steps") && !without.is_decided("train.steps"));
        let config = without.config().unwrap();
        assert_eq!((config.train.steps, config.parallel.micro_batches), (1000, Some(2)));
        let refusal = |set: &[&str], keys: &[&str]| unset(set, keys).unwrap_err().to_string();
        assert!(
            refusal(&[], &["train.step"]).contains("--unset: unknown key train.step; did you mean steps")
        );
        assert!(refusal(&["train.steps=7"], &["train.steps"]).contains("leave one of them out"));
        // Nothing was decided where nothing is recorded.
        let set = Overrides { set: vec!["train.steps=7".into()], ..Overrides::default() };
        assert!(!given("[train]\nsteps = 5").with(&set, &[]).unwrap().has("recorded.decided"));
    }

    #[test]
    fn only_what_changed_since_replaces_what_is_stored() {
        let before = given("[train]\nsteps = 100\nseed = 3");
        let stored = given("[train]\nsteps = 50\nseed = 3\n[optimizer]\nlr = 0.5");
        let now = given("[train]\nsteps = 100\nseed = 4");
        let config = stored.changed_by(&now, &before).config().unwrap();
        assert_eq!((config.train.steps, config.train.seed, config.optimizer.lr), (50, 4, 0.5));
    }
}
