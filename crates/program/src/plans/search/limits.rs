//! The limits of a search: keys that are kept, and those that alone are tried.

use std::collections::BTreeMap;

use anyhow::{Result, bail};

use crate::arguments::search_args::SearchArgs;
use crate::configuration::keys;

/// The keys that a search tries.
pub const SEARCHED: [&str; 14] = [
    "batch.global",
    "batch.micro",
    "batch.reduce",
    "parallel.pipeline",
    "parallel.data",
    "parallel.tensor",
    "parallel.sequence_parallel",
    "parallel.zero",
    "parallel.schedule",
    "parallel.chunks",
    "memory.checkpointing",
    "memory.optimizer",
    "memory.gradients",
    "memory.parameters",
];

/// The type of gradients on the wire, which is tried, too.
const COMMUNICATE: &str = "precision.communicate";

/// The limits of a search.
#[derive(Clone, Debug, Default)]
pub struct Limits {
    /// Values that keys may have; none for that of the configuration.
    kept: BTreeMap<String, Vec<String>>,
    only: Vec<String>,
    global: Option<(usize, usize)>,
}

impl Limits {
    /// Reads the limits of a command, and the assignments to keys that are not searched.
    ///
    /// # Errors
    /// An unknown key, a value of the wrong type; `--only` with a key that is not searched.
    pub fn of(args: &SearchArgs) -> Result<(Limits, Vec<String>)> {
        let mut limits = Limits { global: args.global, ..Limits::default() };
        let mut others = Vec::new();
        for text in &args.keep {
            let name = text.split_once('=').map_or(text.as_str(), |(key, _)| key).trim();
            if keys::find(name).is_none() {
                bail!("--keep: {}", keys::unknown(name));
            }
            let (key, value) = match text.split_once('=') {
                None => (text.trim().to_string(), None),
                Some(_) => {
                    let (key, value) = keys::assignment(text)?;
                    let value = value.as_str().map_or_else(|| value.to_string(), ToString::to_string);
                    (key, Some(value))
                }
            };
            match value {
                Some(_) if !is_searched(&key) => others.push(text.clone()),
                value => limits.kept.entry(key).or_default().extend(value),
            }
        }
        for key in args.only.iter().map(|key| key.trim()) {
            if !is_searched(key) {
                let meant =
                    keys::nearest(key, all()).map_or(String::new(), |near| format!("did you mean {near}? "));
                let all: Vec<&str> = all().collect();
                bail!("--only {key}: {meant}a search tries {}", all.join(", "));
            }
            limits.only.push(key.to_string());
        }
        if limits.global.is_some() && limits.keeps("batch.global") {
            bail!(
                "--global gives batch.global several values: leave it out of --keep, and name it in --only, if that is given"
            );
        }
        Ok((limits, others))
    }

    /// The same limits, which also keep keys at a value, unless they keep them already.
    #[must_use]
    pub fn keeping(mut self, keys: &[&str], value: &str) -> Limits {
        for key in keys {
            self.kept.entry(key.to_string()).or_insert_with(|| vec![value.to_string()]);
        }
        self
    }

    /// Returns whether a key is not tried.
    pub fn keeps(&self, key: &str) -> bool {
        self.kept.contains_key(key) || (!self.only.is_empty() && self.only.iter().all(|only| only != key))
    }

    /// The values of a key: those that are kept, `own` of the configuration, or all that are `tried`.
    pub fn values(&self, key: &str, own: String, tried: Vec<String>) -> Vec<String> {
        match self.kept.get(key) {
            Some(given) if !given.is_empty() => given.clone(),
            Some(_) => vec![own],
            None if self.keeps(key) => vec![own],
            None => tried,
        }
    }

    /// Sequences of a step.
    pub fn globals(&self, own: usize) -> Vec<usize> {
        match self.global {
            None => vec![own],
            Some((low, high)) => std::iter::successors(Some(low), |size| Some(2 * size))
                .take_while(|size| *size <= high)
                .collect(),
        }
    }

    /// Returns whether several batches are compared.
    pub fn has_global_range(&self) -> bool {
        self.global.is_some()
    }

    /// The limits as options, each for itself.
    pub fn options(&self) -> Vec<String> {
        let kept = self.kept.iter().map(|(key, values)| match values.is_empty() {
            true => format!("--keep {key}"),
            false => format!("--keep {key}={}", values.join(" or ")),
        });
        let only = (!self.only.is_empty()).then(|| format!("--only {}", self.only.join(",")));
        kept.chain(only).collect()
    }

    /// The same limits without the n-th option.
    #[must_use]
    pub fn without(&self, option: usize) -> Limits {
        let mut less = self.clone();
        match self.kept.keys().nth(option) {
            Some(key) => drop(less.kept.remove(key)),
            None => less.only.clear(),
        }
        less
    }
}

fn all() -> impl Iterator<Item = &'static str> {
    SEARCHED.into_iter().chain([COMMUNICATE])
}

fn is_searched(key: &str) -> bool {
    all().any(|searched| searched == key)
}
