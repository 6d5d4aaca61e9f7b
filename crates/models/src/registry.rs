//! The model architectures, found by name.
//!
//! Each model's file has its [`Architecture`], and `architectures` lists them: adding a model touches its file and one
//! line here.

use std::sync::{Arc, LazyLock};

use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use crate::architecture::{Arch, Architecture};
use crate::{Model, ModelError, bert, decoder, gpt2};

/// All architectures.
fn architectures() -> impl Iterator<Item = &'static Architecture> {
    [&gpt2::ARCHITECTURE, &bert::ARCHITECTURE].into_iter().chain(&decoder::ARCHITECTURES)
}

/// Their names.
static NAMES: LazyLock<Vec<&str>> =
    LazyLock::new(|| architectures().map(|architecture| architecture.name).collect());

impl Arch {
    /// GPT-2, the default architecture.
    pub const GPT2: Arch = Arch::of(&gpt2::ARCHITECTURE);

    /// BERT.
    pub const BERT: Arch = Arch::of(&bert::ARCHITECTURE);

    /// All architectures.
    pub fn all() -> impl Iterator<Item = Arch> {
        architectures().map(Arch::of)
    }

    /// The architecture with this name.
    pub fn named(name: &str) -> Option<Arch> {
        Arch::all().find(|arch| arch.name == name)
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
    arch.map_or_else(|| Err(unknown(config)), |arch| (arch.from_config)(arch, config))
}

/// The error for a `config.json` of another architecture.
fn unknown(config: &Value) -> ModelError {
    let given = config.get("model_type").unwrap_or(&Value::Null).to_string();
    let known: Vec<String> = NAMES.iter().map(|name| format!("{name:?}")).collect();
    ModelError::Architecture { given, known: known.join(", ") }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::Keys;

    #[test]
    fn every_architecture_is_found_by_its_name_and_builds_what_its_config_says() {
        let counts = [("layers", 2), ("hidden", 8), ("heads", 2), ("positions", 16), ("intermediate", 24)];
        let mut given = Keys::from([("norm_eps", json!(0.25))]);
        counts.iter().for_each(|(key, count)| given.set(key, *count));
        for arch in Arch::all() {
            let model = arch.model(&given, 50, 8).unwrap();
            assert_eq!((model.architecture(), model.objective()), (Some(arch), arch.objective));
            let config = model.to_config();
            let read = from_config(&config).unwrap();
            assert_eq!((read.keys(), read.vocab(), read.longest()), (model.keys(), 50, Some(16)), "{arch}");
            assert_eq!(read.to_config(), config);
            assert_eq!(config[arch.file_name("vocab")], 50);
            for (key, value) in given.iter() {
                assert_eq!(
                    (read.keys().get(key), &config[arch.file_name(key)]),
                    (Some(value), value),
                    "{arch}: {key}"
                );
            }
            assert_eq!(serde_json::from_value::<Arch>(json!(arch.name)).unwrap(), arch);
        }
    }

    #[test]
    fn an_unknown_name_is_refused_with_the_known_ones() {
        let error = serde_json::from_value::<Arch>(json!("t5")).unwrap_err().to_string();
        let names = Arch::all().map(|arch| format!("`{arch}`")).collect::<Vec<_>>().join(", ");
        assert_eq!(error, format!("unknown variant `t5`, expected one of {names}"));
        assert!(names.starts_with("`gpt2`, `bert`, `llama`, `mistral`"), "{names}");
        for (config, given) in [(json!({ "model_type": "t5" }), "\"t5\""), (json!({}), "null")] {
            let error = from_config(&config).unwrap_err().to_string();
            assert!(
                error.contains(&format!("model_type is {given}, expected \"gpt2\", \"bert\", \"llama\"")),
                "{error}"
            );
        }
    }
}
