//! Registry entry of a model architecture: its names, its keys, and the constructors of its models.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use serde::{Serialize, Serializer};
use serde_json::Value;

use crate::keys::{Key, KeyError, Keys};
use crate::{Model, ModelError, Objective};

/// A model, or the key that is wrong.
type Made = Result<Arc<dyn Model>, KeyError>;

/// A model, or what is wrong with its `config.json`.
type Read = Result<Arc<dyn Model>, ModelError>;

/// A model architecture: its names, and the constructors of its models.
#[derive(Clone, Copy, Debug)]
pub struct Architecture {
    /// Its name in `model.arch` of a configuration, and in `model_type` of a `config.json` of transformers.
    pub name: &'static str,
    /// Its name in messages.
    pub title: &'static str,
    /// Training objective of its models.
    pub objective: Objective,
    /// The keys of `[model]` that it reads.
    pub keys: &'static [Key],
    /// Makes the model of these keys, which are complete and within their bounds, with `vocab` token ids, for sequences of `seq` tokens.
    pub build: fn(arch: Arch, keys: &Keys, vocab: usize, seq: usize) -> Made,
    /// Number of token ids of the published model whose size the keys name, if they name one.
    pub vocab: fn(arch: Arch, keys: &Keys) -> Option<usize>,
    /// Makes the model that a `config.json` describes.
    pub from_config: fn(Arch, &Value) -> Read,
}

impl Architecture {
    /// The name in a `config.json` of a key of `[model]`.
    pub fn file_name(&self, key: &str) -> &'static str {
        if key == "vocab" {
            return "vocab_size";
        }
        self.keys.iter().find(|known| known.name == key).map_or("nothing of that name", |known| known.file)
    }
}

/// An architecture of the registry; displayed as its name.
#[derive(Clone, Copy)]
pub struct Arch(&'static Architecture);

impl Arch {
    /// The model of the keys that were given, with `vocab` token ids, for sequences of `seq` tokens.
    ///
    /// # Errors
    /// A key that it does not have, or with a value that it cannot have.
    pub fn model(self, keys: &Keys, vocab: usize, seq: usize) -> Made {
        (self.build)(self, &keys.completed(self.keys, self.name)?, vocab, seq)
    }

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
