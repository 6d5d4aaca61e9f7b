//! `[[optimizer.group]]`: which parameters have another learning rate or weight decay.

use phalanx_layers::{Network, ParameterSpec};
use phalanx_optim::{OwnRates, RatesByName};

use super::check::refuse;
use super::declare::KEY;
use super::trainable::{check_patterns, match_any};
use super::{ConfigError, OptimizerConfig, RunConfig};

table! {
    /// `[[optimizer.group]]`
    "optimizer.group" ParameterGroup {
        /// Patterns of the names of its parameters, as those of `model.trainable`.
        parameters: Vec<String> = Vec::new(), KEY;
        /// Peak learning rate, in place of `optimizer.lr`: the schedule is multiplied by the ratio of both.
        lr: Option<f64> = None, KEY.from(0.0, f64::MAX);
        /// Weight decay of all its parameters, biases and norms among them, in place of `optimizer.weight_decay`.
        weight_decay: Option<f64> = None, KEY.from(0.0, f64::MAX);
    }
}

/// The trained parameters of a group, or those of none.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupOfParameters {
    /// The group; None for the parameters that are in none.
    pub group: Option<ParameterGroup>,
    /// Number of trained parameters.
    pub parameters: usize,
    /// Number of their elements.
    pub elements: u64,
}

impl RunConfig {
    /// Refuses groups whose numbers cannot be.
    pub(super) fn check_groups(&self) -> Result<(), ConfigError> {
        let OptimizerConfig { lr: of_all, ref group, .. } = self.optimizer;
        for group in group {
            let ParameterGroup { parameters, lr, weight_decay } = group;
            if parameters.is_empty() {
                let expected = "gives no pattern of names: set it, as parameters = [\"*.wte.*\"]";
                return Err(refuse("optimizer.group.parameters", "[]", expected));
            }
            if let Some(lr) = lr.filter(|lr| !(lr / of_all).is_finite()) {
                let expected = format!(
                    "of {parameters:?} is a multiple of the schedule's rate, whose peak is optimizer.lr = {of_all}: set \
                     optimizer.lr above 0, and a group that matches \"*\" with lr = 0 last"
                );
                return Err(refuse("optimizer.group.lr", lr, expected));
            }
            if lr.is_none() && weight_decay.is_none() {
                let expected = "sets nothing: set lr, weight_decay or both, or leave the group out";
                return Err(refuse(
                    "optimizer.group",
                    format!("{{ parameters = {parameters:?} }}"),
                    expected,
                ));
            }
        }
        Ok(())
    }
}

impl OptimizerConfig {
    /// The rates of the parameters of `whole`, the model's network, that are in a group.
    ///
    /// # Errors
    /// A pattern that matches no parameter; a group without a trained parameter that is in no group before it.
    pub fn rates(&self, whole: &Network) -> Result<RatesByName, ConfigError> {
        for group in &self.group {
            check_patterns("optimizer.group.parameters", &group.parameters, whole)?;
        }
        let unused = |group: &GroupOfParameters| group.parameters == 0 && group.group.is_some();
        if let Some(GroupOfParameters { group: Some(group), .. }) =
            self.groups(whole).into_iter().find(unused)
        {
            let expected = "has no trained parameter that is in no group before it: leave it out, or put it before the others";
            return Err(refuse("optimizer.group.parameters", format!("{:?}", group.parameters), expected));
        }
        let rates = |spec: &ParameterSpec| {
            let ParameterGroup { lr, weight_decay, .. } = &self.group[self.number(spec)?];
            let lr_factor = lr.map_or(1.0, |lr| lr / self.lr);
            Some((
                spec.name.clone(),
                OwnRates { lr_factor, weight_decay: weight_decay.map(|decay| decay as f32) },
            ))
        };
        Ok(whole.members().filter_map(rates).collect())
    }

    /// Parameters of `whole` in each group, and last those in no group; empty without groups.
    pub fn groups(&self, whole: &Network) -> Vec<GroupOfParameters> {
        if self.group.is_empty() {
            return Vec::new();
        }
        let groups = self.group.iter().map(|group| Some(group.clone())).chain([None]);
        let empty = |group| GroupOfParameters { group, parameters: 0, elements: 0 };
        let mut groups: Vec<GroupOfParameters> = groups.map(empty).collect();
        for spec in whole.parameters.iter().filter(|spec| spec.trained).flat_map(ParameterSpec::members) {
            let group = &mut groups[self.number(spec).unwrap_or(self.group.len())];
            group.parameters += 1;
            group.elements += spec.elements() as u64;
        }
        groups
    }

    /// The first group that has a parameter.
    fn number(&self, spec: &ParameterSpec) -> Option<usize> {
        self.group.iter().position(|group| match_any(&group.parameters, spec))
    }
}
