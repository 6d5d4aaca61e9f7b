//! What the registry knows of a model architecture.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use serde::{Serialize, Serializer};
use serde_json::Value;

use crate::{Model, ModelError, ModelShape, Objective};

/// A model architecture: its names, and the constructors of its models.
#[derive(Debug)]
pub struct Architecture {
    /// Its name in `model.arch` of a configuration, and in `model_type` of a `config.json` of transformers.
    pub name: &'static str,
    /// Its name in messages.
    pub title: &'static str,
    /// Training objective of its models.
    pub objective: Objective,
    /// The keys of `config.json` that hold its sizes.
    pub keys: ShapeKeys,
    /// Makes a model with the given sizes and default values for everything else.
    pub build: fn(ModelShape) -> Arc<dyn Model>,
    /// Makes the model that a `config.json` describes.
    pub from_config: fn(&Value) -> Result<Arc<dyn Model>, ModelError>,
}

/// The keys of `config.json` that hold the sizes of a [`ModelShape`].
#[derive(Clone, Copy, Debug)]
pub struct ShapeKeys {
    /// Transformer blocks.
    pub layers: &'static str,
    /// Width.
    pub hidden: &'static str,
    /// Attention heads.
    pub heads: &'static str,
    /// Rows of the position table.
    pub positions: &'static str,
    /// Rows of the token table.
    pub vocab: &'static str,
}

/// An architecture of the registry; displayed as its name.
#[derive(Clone, Copy)]
pub struct Arch(&'static Architecture);

impl Arch {
    /// The handle of an architecture that is in the registry.
    pub(crate) const fn of(architecture: &'static Architecture) -> Arch {
        Arch(architecture)
    }
}

impl Deref for Arch {
    type Target = Architecture;

    fn deref(&self) -> &Architecture {
        self.0
    }
}

impl PartialEq for Arch {
    fn eq(&self, other: &Arch) -> bool {
        self.name == other.name
    }
}

impl Eq for Arch {}

impl fmt::Debug for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.name)
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.name)
    }
}

impl Serialize for Arch {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name)
    }
}
