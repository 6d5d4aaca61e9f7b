//! A translated configuration beside one of ours: what both say must agree.

use std::path::Path;

use anyhow::{Result, bail};

use super::{DEEPSPEED, Outcome, Translation, with};
use crate::arguments::overrides::Overrides;
use crate::configuration::user_config::UserConfig;

/// Reads a configuration file and adds what `--deepspeed` says; also returns how that was translated.
///
/// # Errors
/// Files that are missing or wrong, and values that differ in both.
pub fn read_both(path: &Path, overrides: &Overrides) -> Result<(UserConfig, Option<Translation>)> {
    let file = UserConfig::read(path)?;
    let Some(theirs) = &overrides.deepspeed else { return Ok((file, None)) };
    let given = file.clone().with(overrides, &[])?;
    let mut translation = Translation::read(&DEEPSPEED, theirs, given, false)?;
    translation.refuse()?;
    let merged = translation.onto(file, &path.display().to_string(), |key| overrides.sets(key))?;
    Ok((merged, Some(translation)))
}

impl Translation {
    /// The user's configuration with the translated keys. `sets` says whether the command line gives a key, which wins.
    ///
    /// # Errors
    /// Values of a key that differ in both files.
    pub fn onto(&mut self, file: UserConfig, name: &str, sets: impl Fn(&str) -> bool) -> Result<UserConfig> {
        let mut merged = file.clone();
        let mut faults = Vec::new();
        for row in &mut self.rows {
            let Some((key, value)) = &row.ours else { continue };
            let own = file.value(key).filter(|own| !is_equal(own, value));
            match own {
                _ if sets(key) => row.why = with(&row.why, "--set wins"),
                Some(own) if row.outcome == Outcome::Default => {
                    row.why = with(&row.why, &format!("{name} says {own}"));
                }
                Some(own) => {
                    let line = |line: Option<usize>| line.map_or(String::new(), |line| format!(":{line}"));
                    faults.push(format!(
                        "{name}{}: {key} = {own}, but {}{}: {} = {} is {key} = {value}: remove one of the two, or decide with \
                         --set {key}=VALUE",
                        line(file.line(key)),
                        self.path,
                        line(row.line),
                        row.name,
                        row.value
                    ));
                }
                None => merged.set(key, value.clone()),
            }
        }
        if !faults.is_empty() {
            bail!("{}", faults.join("\n"));
        }
        let with = if name.is_empty() { String::new() } else { format!("{name} with ") };
        merged.retext(&format!("# {with}{}, a configuration of {}\n", self.path, self.program))
    }
}

/// Returns whether two values are the same; 1 and 1.0 are.
fn is_equal(one: &toml::Value, other: &toml::Value) -> bool {
    let number = |value: &toml::Value| value.as_float().or(value.as_integer().map(|whole| whole as f64));
    one == other || number(one).zip(number(other)).is_some_and(|(one, other)| one == other)
}
