//! The model architectures, found by name.
//!
//! Each model's file has its [`Architecture`], and [`ARCHITECTURES`] lists them: adding a model touches its file and one
//! line here.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

use crate::{Model, ModelError, ModelShape, Objective, bert, gpt2};

/// All architectures.
const ARCHITECTURES: [&Architecture; 2] = [&gpt2::ARCHITECTURE, &bert::ARCHITECTURE];

/// The names of [`ARCHITECTURES`].
const NAMES: [&str; ARCHITECTURES.len()] = {
    let mut names = [""; ARCHITECTURES.len()];
    let mut index = 0;
    while index < names.len() {
        names[index] = ARCHITECTURES[index].name;
        index += 1;
    }
    names
};

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
    /// GPT-2, the default architecture.
    pub const GPT2: Arch = Arch(&gpt2::ARCHITECTURE);

    /// BERT.
    pub const BERT: Arch = Arch(&bert::ARCHITECTURE);

    /// The architecture with this name.
    pub fn named(name: &str) -> Option<Arch> {
        ARCHITECTURES.into_iter().find(|architecture| architecture.name == name).map(Arch)
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

impl<'de> Deserialize<'de> for Arch {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Arch, D::Error> {
        let name = String::deserialize(deserializer)?;
        Arch::named(&name).ok_or_else(|| D::Error::unknown_variant(&name, &NAMES))
    }
}

/// The model that a `config.json` of transformers describes.
///
/// # Errors
/// An unknown `model_type`, or a variant that is not computed here.
pub fn from_config(config: &Value) -> Result<Arc<dyn Model>, ModelError> {
    let arch = config.get("model_type").and_then(Value::as_str).and_then(Arch::named);
    arch.map_or_else(|| Err(unknown(config)), |arch| (arch.from_config)(config))
}

/// The error for a `config.json` of another architecture.
pub(crate) fn unknown(config: &Value) -> ModelError {
    let given = config.get("model_type").unwrap_or(&Value::Null).to_string();
    ModelError::Architecture { given, known: NAMES.map(|name| format!("{name:?}")).join(" or ") }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_architecture_is_found_by_its_name_and_builds_what_its_config_says() {
        let shape = ModelShape { layers: 2, hidden: 8, heads: 2, vocab: 50, positions: 16 };
        for name in NAMES {
            let arch = Arch::named(name).unwrap();
            let model = (arch.build)(shape);
            assert_eq!((model.architecture(), model.objective()), (Some(arch), arch.objective));
            let config = model.to_config();
            assert_eq!(from_config(&config).unwrap().shape(), shape);
            let ShapeKeys { layers, hidden, heads, positions, vocab } = arch.keys;
            let sizes = [layers, hidden, heads, positions, vocab].map(|key| config[key].as_u64().unwrap());
            assert_eq!(sizes, [2, 8, 2, 16, 50], "{name}");
            assert_eq!(serde_json::from_value::<Arch>(json!(name)).unwrap(), arch);
        }
    }

    #[test]
    fn an_unknown_name_is_refused_with_the_known_ones() {
        let error = serde_json::from_value::<Arch>(json!("t5")).unwrap_err().to_string();
        assert_eq!(error, "unknown variant `t5`, expected `gpt2` or `bert`");
        for (config, given) in [(json!({ "model_type": "t5" }), "\"t5\""), (json!({}), "null")] {
            let error = from_config(&config).unwrap_err().to_string();
            assert!(
                error.contains(&format!("model_type is {given}, expected \"gpt2\" or \"bert\"")),
                "{error}"
            );
        }
    }
}
