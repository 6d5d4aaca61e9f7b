//! Reading and writing a `config.json` of transformers: what is wrong with one, and its numbers.

use serde_json::Value;

/// An error of a `config.json`, or of weights that do not match it.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum ModelError {
    /// Another architecture.
    #[error(
        "config.json: model_type is {given}, expected {known}; other architectures cannot be imported yet"
    )]
    Architecture {
        /// `model_type` in the file.
        given: String,
        /// The known architectures.
        known: String,
    },
    /// A key that is absent or of the wrong kind.
    #[error("config.json: {key} is {given}, expected {expected}")]
    Key {
        /// The key.
        key: &'static str,
        /// Its value in the file.
        given: String,
        /// The supported value.
        expected: String,
    },
    /// Two names of one key with different values.
    #[error("config.json: {keys:?} mean the same, and their values are {values:?}: remove the wrong one")]
    Contradiction {
        /// The names.
        keys: [&'static str; 2],
        /// The value of each in the file.
        values: [String; 2],
    },
    /// Another number of layers than the file with the weights has.
    #[error(
        "config.json: {key} is {given}, but the weights have {found} layers{}: the two do not belong together",
        last_is(*.last)
    )]
    Layers {
        /// The key.
        key: &'static str,
        /// Its value: the number of layers in `config.json`.
        given: usize,
        /// Number of layers in the weights.
        found: usize,
        /// The number of the last of them, counted from 0.
        last: Option<usize>,
    },
    /// A tensor that the model needs.
    #[error(
        "the weights have no {name}: the file is of another variant, or incomplete{}",
        if name == "lm_head.weight" { "; a model that ties it to the token table says \"tie_word_embeddings\": true in config.json" } else { "" }
    )]
    Missing {
        /// Its name.
        name: String,
    },
    /// A tensor of another shape.
    #[error(
        "{name} has shape {given:?}, but config.json implies {expected:?}: the folder's files do not belong \
         together"
    )]
    Shape {
        /// The tensor.
        name: String,
        /// Its shape in the file.
        given: Vec<usize>,
        /// Its shape in the model.
        expected: Vec<usize>,
    },
    /// A tensor that the model does not have.
    #[error(
        "the weights have {name}{}, which the model of config.json does not have: it would be lost", and_more(*.more)
    )]
    Foreign {
        /// The first of them.
        name: String,
        /// Number of further such tensors.
        more: usize,
    },
}

fn last_is(last: Option<usize>) -> String {
    last.map_or_else(String::new, |last| format!(" (the last is number {last}, counted from 0)"))
}

fn and_more(more: usize) -> String {
    if more == 0 { String::new() } else { format!(" and {more} more") }
}

/// The error for a key with another value than `expected`.
pub(crate) fn wrong(key: &'static str, given: impl std::fmt::Display, expected: &str) -> ModelError {
    ModelError::Key { key, given: given.to_string(), expected: expected.to_string() }
}

/// Refuses a file whose architecture is not `name`.
pub(crate) fn expect_architecture(config: &Value, name: &str) -> Result<(), ModelError> {
    let given = config.get("model_type").unwrap_or(&Value::Null);
    if given != name { Err(wrong("model_type", given, &format!("{name:?}"))) } else { Ok(()) }
}

/// Refuses a file in which one of these keys has another value. Absent keys have transformers' defaults, which are
/// supported.
pub(crate) fn expect_computed(config: &Value, keys: &[(&'static str, Value)]) -> Result<(), ModelError> {
    for (key, computed) in keys {
        let given = config.get(key).unwrap_or(computed);
        if given != computed {
            return Err(wrong(key, given, &computed.to_string()));
        }
    }
    Ok(())
}

/// The file with the keys that are read here: each of `others`, pairs of another name and this one, is renamed.
///
/// # Errors
/// [`ModelError::Contradiction`].
pub(crate) fn renamed(config: &Value, others: &[(&'static str, &'static str)]) -> Result<Value, ModelError> {
    let mut renamed = config.clone();
    for (other, key) in others {
        match (config.get(other), config.get(key)) {
            (Some(value), None) => renamed[key] = value.clone(),
            (Some(value), Some(given)) if value != given => {
                return Err(contradiction([key, other], given, value));
            }
            _ => {}
        }
    }
    Ok(renamed)
}

/// The error for two names of one key with different values.
pub(crate) fn contradiction(keys: [&'static str; 2], one: &Value, other: &Value) -> ModelError {
    ModelError::Contradiction { keys, values: [one.to_string(), other.to_string()] }
}

/// A key that is true or false; `absent` if the file does not give one.
pub(crate) fn flag(config: &Value, key: &'static str, absent: bool) -> Result<bool, ModelError> {
    let Some(given) = config.get(key).filter(|given| !given.is_null()) else { return Ok(absent) };
    given.as_bool().ok_or_else(|| wrong(key, given, "true or false"))
}

/// The number of heads under `key`, which divides the width under `width_key`.
pub(crate) fn heads(
    config: &Value,
    key: &'static str,
    hidden: usize,
    width_key: &str,
) -> Result<usize, ModelError> {
    let heads = number(config, key, hidden)?;
    if !hidden.is_multiple_of(heads) {
        return Err(wrong(key, &config[key], &format!("a divisor of {width_key} = {hidden}")));
    }
    Ok(heads)
}

/// A size of at most `max` (see [`crate::limits`]).
pub(crate) fn number(config: &Value, key: &'static str, max: usize) -> Result<usize, ModelError> {
    let given = config.get(key).unwrap_or(&Value::Null);
    let number = given.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| (1..=max).contains(n));
    number.ok_or_else(|| wrong(key, given, &format!("an integer from 1 to {max}")))
}

/// An epsilon; `absent` if the file does not give one.
pub(crate) fn epsilon(config: &Value, key: &'static str, absent: f32) -> Result<f32, ModelError> {
    let Some(given) = config.get(key) else { return Ok(absent) };
    let value = given.as_f64().map(|eps| eps as f32).filter(|eps| *eps > 0.0 && eps.is_finite());
    value.ok_or_else(|| wrong(key, given, "a number above 0"))
}

/// A dropout probability; transformers' default is 0.1.
pub(crate) fn probability(config: &Value, key: &'static str) -> Result<f32, ModelError> {
    let Some(given) = config.get(key) else { return Ok(0.1) };
    let value = given.as_f64().map(|p| p as f32).filter(|p| (0.0..1.0).contains(p));
    value.ok_or_else(|| wrong(key, given, "a number from 0 to below 1"))
}

/// The shortest decimal that rounds to this f32: 1e-5, not 9.999999747378752e-6.
pub(crate) fn decimal(number: f32) -> f64 {
    number.to_string().parse().unwrap_or(f64::from(number))
}
