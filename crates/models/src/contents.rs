//! Checks that a Hugging Face file holds the tensors of the model that its `config.json` describes: all of them, in
//! their shapes, and no others.
//!
//! An extra tensor is a layer that would be dropped silently, or a variant that is not computed here. So it is an error,
//! unless the programs of the architecture are known to write it beside the weights. The number of layers is
//! compared first, from names alone: a network of a billion layers is never built.

use std::collections::BTreeMap;

use phalanx_layers::{Network, ParameterSpec};

use crate::{Model, ModelError};

/// Numbering of the layers in the files of an architecture.
#[derive(Clone, Copy, Debug)]
pub struct NumberedLayers {
    /// Their number in the model.
    pub count: usize,
    /// The key of `config.json` with their number.
    pub key: &'static str,
    /// Prefixes of a layer's number in tensor names: the one that is written now, then those of older files.
    pub prefixes: &'static [&'static str],
}

impl NumberedLayers {
    /// The number of the layer that a tensor belongs to.
    pub fn of(&self, name: &str) -> Option<usize> {
        let rest = self.prefixes.iter().find_map(|prefix| name.strip_prefix(prefix))?;
        rest.split_once('.')?.0.parse().ok()
    }
}

/// Minimum number of tensors per layer for which a network is built to find out which tensors are missing.
const MIN_TENSORS_OF_LAYER: usize = 3;

/// Compares the number of layers of `model` with those that tensors called `names` belong to.
///
/// # Errors
/// [`ModelError::Layers`], [`ModelError::Missing`] where most tensors of most layers are missing.
pub fn check_layers<'a>(model: &dyn Model, names: impl Iterator<Item = &'a str>) -> Result<(), ModelError> {
    let Some(numbered) = model.numbered_layers() else { return Ok(()) };
    let mut tensors: BTreeMap<usize, usize> = BTreeMap::new();
    for layer in names.filter_map(|name| numbered.of(name)) {
        *tensors.entry(layer).or_default() += 1;
    }
    let (given, found) = (numbered.count, tensors.len());
    let last = tensors.last_key_value().map(|(layer, _)| *layer);
    if found != given || last != given.checked_sub(1) {
        return Err(ModelError::Layers { key: numbered.key, given, found, last });
    }
    let few = tensors.iter().find(|(_, count)| **count < MIN_TENSORS_OF_LAYER);
    match few.filter(|_| tensors.values().sum::<usize>() < MIN_TENSORS_OF_LAYER * given) {
        None => Ok(()),
        Some((layer, _)) => Err(ModelError::Missing { name: format!("{}{layer}.*", numbered.prefixes[0]) }),
    }
}

/// The parts of the model's head ([`Model::head_prefixes`]) that a file lacks, which `has` tensors of some names.
pub fn heads_lacking(model: &dyn Model, has: impl Fn(&str) -> bool) -> Vec<&'static str> {
    let prefixes = model.head_prefixes();
    let network = (!prefixes.is_empty()).then(|| model.whole());
    let is_there = |prefix: &str| {
        let mut members = network.iter().flat_map(Network::members);
        members.any(|member| member.name.starts_with(prefix) && has(&name_in(model, &member.name, &has)))
    };
    prefixes.iter().copied().filter(|prefix| !is_there(prefix)).collect()
}

/// The first of a parameter's names that a file has; its own name where the file has none of them.
pub fn name_in(model: &dyn Model, name: &str, has: impl Fn(&str) -> bool) -> String {
    let mut names = std::iter::once(name.to_string()).chain(model.aliases(name));
    names.find(|name| has(name)).unwrap_or_else(|| name.to_string())
}

/// The tensors of a Hugging Face file with the whole `network` of `model`, in order: the name of each, and the parameter or the joined
/// parameters that it holds.
pub fn stored_tensors<'a>(
    model: &'a dyn Model,
    network: &'a Network,
) -> impl Iterator<Item = (String, &'a ParameterSpec)> {
    network.parameters.iter().flat_map(|parameter| {
        let members = parameter.members();
        match model.source(&members[0]) {
            Some(rows) => {
                assert_eq!(rows.shape, parameter.shape, "{} holds what is joined", rows.name);
                vec![(rows.name, parameter)]
            }
            None => members.iter().map(|member| (member.name.clone(), member)).collect(),
        }
    })
}

/// Compares the tensors of a file, names and shapes, with those of `model`.
///
/// # Errors
/// [`ModelError::Layers`], [`ModelError::Missing`], [`ModelError::Shape`], [`ModelError::Foreign`].
pub fn check_contents<'a>(
    model: &dyn Model,
    tensors: impl Iterator<Item = (&'a str, &'a [usize])>,
) -> Result<(), ModelError> {
    let mut tensors: BTreeMap<&str, &[usize]> = tensors.collect();
    check_layers(model, tensors.keys().copied())?;
    let new_heads = heads_lacking(model, |name| tensors.contains_key(name));
    let network = model.whole();
    for (own, parameter) in stored_tensors(model, &network) {
        let name = name_in(model, &own, |name| tensors.contains_key(name));
        let Some(shape) = tensors.remove(name.as_str()) else {
            match new_heads.iter().any(|prefix| name.starts_with(prefix)) {
                true => continue,
                false => return Err(ModelError::Missing { name }),
            }
        };
        expect_shape(&name, shape, &parameter.shape)?;
        for copy in model.copies_of(&own) {
            if let Some(shape) = tensors.remove(copy) {
                expect_shape(copy, shape, &parameter.shape)?;
            }
        }
    }
    let mut foreign = tensors.into_keys().filter(|name| !model.is_ignored(name));
    match foreign.next() {
        None => Ok(()),
        Some(first) => Err(ModelError::Foreign { name: first.to_string(), more: foreign.count() }),
    }
}

fn expect_shape(name: &str, given: &[usize], expected: &[usize]) -> Result<(), ModelError> {
    if given == expected {
        return Ok(());
    }
    Err(ModelError::Shape { name: name.to_string(), given: given.to_vec(), expected: expected.to_vec() })
}
