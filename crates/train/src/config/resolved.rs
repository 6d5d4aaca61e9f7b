//! A configuration that is complete and checked, and never changes again.

use std::ops::Deref;

use serde::{Deserialize, Serialize};

use super::{ConfigError, RunConfig};

/// The complete, checked configuration of a run: every key has a value, and all values are consistent. It is stored in
/// `config.toml` of the run folder, sent to the ranks, and recorded in checkpoints.
///
/// It dereferences to a [`RunConfig`] and cannot be modified; [`ResolvedConfig::with`] creates a changed copy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ResolvedConfig(#[serde(deserialize_with = "resolved")] RunConfig);

impl ResolvedConfig {
    /// Checks `config`, in which every key that depends on the model, the data and the machine is filled in, and fills
    /// in the steps of warm-up and the step at which the learning rate's decay ends.
    ///
    /// # Errors
    /// The first key that is wrong.
    pub fn new(mut config: RunConfig) -> Result<ResolvedConfig, ConfigError> {
        config.check()?;
        if config.train.epochs.is_some() {
            // Steps are not counted yet, of which the rest are shares.
            return Ok(ResolvedConfig(config));
        }
        config.schedule.warmup = config.warmup_steps();
        config.schedule.warmup_share = None;
        config.schedule.decay_steps = config.decay_end();
        Ok(ResolvedConfig(config))
    }

    /// The same with `train.steps` where `train.epochs` counts passes over `sequences` sequences.
    ///
    /// # Errors
    /// The first key that is wrong with this number of steps.
    pub fn counting_steps(self, sequences: u64) -> Result<ResolvedConfig, ConfigError> {
        match self.train.epochs {
            None => Ok(self),
            Some(_) => self.with(|config| {
                config.train.steps = config.steps(sequences);
                config.train.epochs = None;
            }),
        }
    }

    /// A copy of the configuration, modified by `change`.
    ///
    /// # Errors
    /// The first key that is wrong after the change.
    pub fn with(&self, change: impl FnOnce(&mut RunConfig)) -> Result<ResolvedConfig, ConfigError> {
        let mut config = self.0.clone();
        change(&mut config);
        ResolvedConfig::new(config)
    }
}

impl Deref for ResolvedConfig {
    type Target = RunConfig;

    fn deref(&self) -> &RunConfig {
        &self.0
    }
}

/// Reads a configuration and checks it.
fn resolved<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<RunConfig, D::Error> {
    let config = RunConfig::deserialize(deserializer)?;
    ResolvedConfig::new(config).map(|ResolvedConfig(config)| config).map_err(serde::de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_is_neither_made_nor_read() {
        let resolved = ResolvedConfig::new(RunConfig::default()).unwrap();
        assert_eq!(resolved.schedule.decay_steps, Some(resolved.train.steps));
        let refusal = resolved.with(|config| config.train.steps = 0).unwrap_err();
        assert_eq!(refusal.key, "train.steps");
        let text = serde_json::to_string(&resolved).unwrap();
        assert_eq!(serde_json::from_str::<ResolvedConfig>(&text).unwrap(), resolved);
        let changed = text.replace("\"steps\":1000", "\"steps\":0");
        let error = serde_json::from_str::<ResolvedConfig>(&changed).unwrap_err().to_string();
        assert!(error.contains("train.steps = 0"), "{error}");
    }
}
