//! Which parameters of the model a run trains.

use std::collections::BTreeSet;

use phalanx_data::is_match;
use phalanx_layers::{Network, ParameterSpec, lora::is_beside_base};

use super::check::refuse;
use super::{ConfigError, ModelConfig};

/// Which parameters are trained: those that match a pattern of `trainable`, or all where there is none, without those that match one
/// of `frozen`. With adapters, these alone are trained.
#[derive(Clone, Debug, Default)]
pub struct Trainable {
    trainable: Vec<String>,
    frozen: Vec<String>,
    /// True if the model has adapters.
    adapters: bool,
}

impl Trainable {
    /// As `model.trainable` and `model.frozen` say of the parameters of `whole`, the model's network, which may have `adapters`.
    ///
    /// # Errors
    /// A pattern that matches no parameter, or patterns that leave none to train.
    pub fn of(config: &ModelConfig, adapters: bool, whole: &Network) -> Result<Trainable, ConfigError> {
        let ModelConfig { trainable, frozen, .. } = config;
        for (key, patterns) in [("model.trainable", trainable), ("model.frozen", frozen)] {
            check_patterns(key, patterns, whole)?;
        }
        let found = Trainable { trainable: trainable.clone(), frozen: frozen.clone(), adapters };
        if whole.members().all(|spec| found.freezes(spec)) {
            // Each pattern matches a parameter, so those of `trainable` alone leave some to train.
            let expected = "leaves no parameter to train: leave a pattern out";
            return Err(refuse("model.frozen", format!("{frozen:?}"), expected));
        }
        Ok(found)
    }

    /// The network with the other parameters frozen.
    pub fn applied_to(&self, network: Network) -> Network {
        if self.trainable.is_empty() && self.frozen.is_empty() && !self.adapters {
            return network;
        }
        network.freezing(|spec| self.freezes(spec))
    }

    fn freezes(&self, spec: &ParameterSpec) -> bool {
        let any = |patterns: &[String]| match_any(patterns, spec);
        let is_base = self.adapters && !is_beside_base(&spec.name);
        is_base || any(&self.frozen) || !(self.trainable.is_empty() || any(&self.trainable))
    }
}

/// Returns whether one of the patterns matches this parameter.
pub(super) fn match_any(patterns: &[String], spec: &ParameterSpec) -> bool {
    patterns.iter().any(|pattern| is_match(pattern.as_bytes(), spec.name.as_bytes()))
}

/// Refuses a pattern that matches no parameter, with the names that there are.
pub(super) fn check_patterns(
    key: &'static str,
    patterns: &[String],
    whole: &Network,
) -> Result<(), ConfigError> {
    let unused =
        |pattern: &&String| !whole.members().any(|spec| match_any(std::slice::from_ref(pattern), spec));
    let Some(pattern) = patterns.iter().find(unused) else { return Ok(()) };
    let expected = format!(
        "matches no parameter: a pattern is for a whole name, as \"*.ln_f.*\", and the model has {}",
        kinds(whole)
    );
    Err(refuse(key, format!("\"{pattern}\""), expected))
}

/// The names of a model's parameters, with `*` for numbers, each once.
fn kinds(whole: &Network) -> String {
    let kind = |spec: &ParameterSpec| {
        let numbered = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
        let parts = spec.name.split('.').map(|part| if numbered(part) { "*" } else { part });
        parts.collect::<Vec<_>>().join(".")
    };
    let all: BTreeSet<String> = whole.members().map(kind).collect();
    all.into_iter().collect::<Vec<_>>().join(", ")
}
