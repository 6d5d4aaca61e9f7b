//! The keys in which two configurations of a run differ.

use std::fmt;

use anyhow::Result;
use phalanx_train::RunConfig;
use phalanx_train::config::{Key, Resume};
use toml::{Table, Value};

use crate::configuration::keys;

/// A key with two values: as it is displayed, `train.seed is 2 and was 1`.
pub struct ChangedKey {
    /// The key.
    pub key: &'static Key,
    /// Its value before.
    pub was: Option<Value>,
    /// Its value now.
    pub is: Option<Value>,
}

impl fmt::Display for ChangedKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [is, was] = [&self.is, &self.was].map(words);
        write!(f, "{} is {is} and was {was}", self.key.path())
    }
}

/// A value, or that there is none, in words.
pub fn words(value: &Option<Value>) -> String {
    value.as_ref().map_or("left out".to_string(), Value::to_string)
}

/// The keys in which a run's configurations differ, in the order in which they are declared.
///
/// # Errors
/// None for a configuration that was read.
pub fn changed_keys(before: &RunConfig, now: &RunConfig) -> Result<Vec<ChangedKey>> {
    let (before, now) = (Table::try_from(before)?, Table::try_from(now)?);
    let pair = |key: &'static Key| {
        let path = key.path();
        let [was, is] = [&before, &now].map(|table| keys::lookup(table, &path).cloned());
        ChangedKey { key, was, is }
    };
    Ok(keys::all().iter().map(pair).filter(|key| key.was != key.is).collect())
}

/// Returns whether a run's configurations name other data, by a key for which `counts` is true.
pub fn has_other_data(changed: &[ChangedKey], counts: impl Fn(&Key) -> bool) -> bool {
    changed.iter().any(|change| change.key.resume == Resume::Data && counts(change.key))
}
