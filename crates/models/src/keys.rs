//! The keys of `[model]` in a configuration that architectures read.
//!
//! Each architecture declares its own ([`Architecture::keys`](crate::Architecture)): name, bounds, and the value of a key that is left
//! out. A key of a name has the same type in all architectures. The engine reads none of them: it asks the model that is made of them.

use std::collections::BTreeMap;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use crate::Arch;
use crate::labels;
use crate::limits::{MAX_HIDDEN, MAX_INTERMEDIATE, MAX_LABELS, MAX_LAYERS, MAX_POSITIONS};

/// A key of `[model]` that an architecture reads.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// Its name in `[model]`.
    pub name: &'static str,
    /// Its name in a `config.json` of transformers.
    pub file: &'static str,
    /// Its values.
    pub values: Values,
    /// Help text.
    pub help: &'static str,
}

/// The values of a key, and its value where it is left out, unless that follows from other keys.
#[derive(Clone, Copy, Debug)]
pub enum Values {
    /// Whole numbers from 1 to `max`.
    Count {
        /// The value where it is left out.
        absent: Option<usize>,
        /// The largest value.
        max: usize,
    },
    /// Numbers above 0.
    Positive {
        /// The value where it is left out.
        absent: Option<f32>,
    },
    /// True or false.
    Flag,
    /// A word.
    Word,
    /// A table, whose entries the architecture reads.
    Table,
    /// Names of classes, from 2 to [`MAX_LABELS`], each another one.
    Names,
}

impl Key {
    /// A key whose values are whole numbers from 1 to `max`.
    pub(crate) const fn count(
        name: &'static str,
        help: &'static str,
        file: &'static str,
        absent: Option<usize>,
        max: usize,
    ) -> Key {
        Key { name, file, values: Values::Count { absent, max }, help }
    }

    /// A key whose values are numbers above 0. Where it is left out, the architecture has its value.
    pub(crate) const fn positive(name: &'static str, help: &'static str, file: &'static str) -> Key {
        Key { name, file, values: Values::Positive { absent: None }, help }
    }

    /// `layers`
    pub(crate) const fn layers(file: &'static str, absent: Option<usize>) -> Key {
        Key::count("layers", "Transformer blocks.", file, absent, MAX_LAYERS)
    }

    /// `hidden`
    pub(crate) const fn hidden(file: &'static str, absent: Option<usize>) -> Key {
        Key::count("hidden", "Width of the residual stream.", file, absent, MAX_HIDDEN)
    }

    /// `heads`
    pub(crate) const fn heads(file: &'static str, absent: Option<usize>) -> Key {
        Key::count(
            "heads",
            "Heads of attention; of queries, where there are fewer of keys and values.",
            file,
            absent,
            MAX_HIDDEN,
        )
    }

    /// `positions`
    pub(crate) const fn positions(file: &'static str) -> Key {
        let help =
            "Rows of the position table, or the longest sequence of rotary positions; `seq` when left out.";
        Key::count("positions", help, file, None, MAX_POSITIONS)
    }

    /// `intermediate`
    pub(crate) const fn intermediate(file: &'static str) -> Key {
        let help = "Width within the MLP. When left out: 4 x `hidden`, with a gate 8/3 x `hidden` rounded up to a multiple of 256.";
        Key::count("intermediate", help, file, None, MAX_INTERMEDIATE)
    }

    /// `labels`
    pub(crate) const fn labels() -> Key {
        let help = "Names of classes of whole sequences: a head over the first token predicts one of them, for rows of `data.rows`. When left out: those of the folder `model.init`, else those of the rows.";
        Key { name: "labels", file: "id2label", values: Values::Names, help }
    }

    /// `norm_eps`
    pub(crate) const fn norm_eps(file: &'static str, absent: Option<f32>) -> Key {
        let help = "Added to the variance of a norm; when left out, what the published models have.";
        Key { name: "norm_eps", file, values: Values::Positive { absent }, help }
    }
}

impl Values {
    /// Returns whether a value has the right type; its bounds are not checked.
    fn has_type(self, value: &Value) -> bool {
        match self {
            Values::Count { .. } => value.is_u64(),
            Values::Positive { .. } => value.is_number(),
            Values::Flag => value.is_boolean(),
            Values::Word => value.is_string(),
            Values::Table => value.is_object(),
            Values::Names => value.as_array().is_some_and(|names| names.iter().all(Value::is_string)),
        }
    }

    fn words(self) -> String {
        match self {
            Values::Count { max, .. } => format!("a whole number from 1 to {max}"),
            Values::Positive { .. } => "a number above 0".to_string(),
            Values::Flag => "true or false".to_string(),
            Values::Word => "a word in quotes".to_string(),
            Values::Table => "a table, as { rope_type = \"linear\", factor = 4 }".to_string(),
            Values::Names => format!("a list of 2 to {MAX_LABELS} names, as [\"no\", \"yes\"]"),
        }
    }

    /// Returns the requirement that a value does not meet; None if it meets all.
    fn refuse(self, value: &Value) -> Option<String> {
        match self {
            Values::Count { .. } if value.as_u64() == Some(0) => Some("must be at least 1".to_string()),
            Values::Count { max, .. } => {
                let is_more = value.as_u64().is_none_or(|count| count > max as u64);
                is_more.then(|| format!("must be at most {max}"))
            }
            Values::Positive { .. } => {
                let number = value.as_f64().unwrap_or(f64::NAN) as f32;
                (!(number > 0.0 && number.is_finite())).then(|| "must be a number above 0".to_string())
            }
            Values::Names => labels::refuse(&labels::listed(value)),
            Values::Flag | Values::Word | Values::Table => None,
        }
    }

    fn absent(self) -> Option<Value> {
        match self {
            Values::Count { absent, .. } => absent.map(Value::from),
            Values::Positive { absent } => absent.map(|number| crate::config::decimal(number).into()),
            Values::Flag | Values::Word | Values::Table | Values::Names => None,
        }
    }
}

/// A key of `[model]` with a value that its architecture cannot have.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("model.{key} = {given}: {expected}")]
pub struct KeyError {
    /// The key.
    pub key: String,
    /// Its value.
    pub given: String,
    /// The requirement that it does not meet.
    pub expected: String,
}

/// Keys that architectures read, with their values, each of the right type.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Keys(BTreeMap<String, Value>);

impl<const N: usize> From<[(&str, Value); N]> for Keys {
    fn from(values: [(&str, Value); N]) -> Keys {
        Keys(values.into_iter().map(|(name, value)| (name.to_string(), value)).collect())
    }
}

/// Refuses names that no architecture knows, and values of another type.
impl<'de> Deserialize<'de> for Keys {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Keys, D::Error> {
        let keys = Keys(BTreeMap::deserialize(deserializer)?);
        for (name, value) in keys.iter() {
            match Keys::known().find(|key| key.name == name) {
                None => {
                    let known: Vec<&str> = Keys::known().map(|key| key.name).collect();
                    let known = known.join("`, `");
                    return Err(D::Error::custom(format!(
                        "unknown field `{name}`, expected one of `{known}`"
                    )));
                }
                Some(key) if !key.values.has_type(value) => {
                    return Err(D::Error::custom(format!(
                        "{name} = {value}: expected {}",
                        key.values.words()
                    )));
                }
                Some(_) => {}
            }
        }
        Ok(keys)
    }
}

impl Keys {
    /// The keys of all architectures; those of the same name are alike but for their bounds.
    pub fn known() -> impl Iterator<Item = &'static Key> {
        Arch::all().flat_map(|arch| arch.keys)
    }

    /// Refuses a value that no architecture takes.
    ///
    /// # Errors
    /// The first key, with what its value must be.
    pub fn check_bounds(&self) -> Result<(), KeyError> {
        for (name, value) in self.iter() {
            let mut refusals =
                Keys::known().filter(|key| key.name == name).map(|key| key.values.refuse(value));
            if let Some(Some(expected)) = refusals.next()
                && refusals.all(|refusal| refusal.is_some())
            {
                return Err(self.refused(name, expected));
            }
        }
        Ok(())
    }

    /// The keys with their values.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value))
    }

    /// The value of a key.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name)
    }

    /// Sets a key.
    pub fn set(&mut self, name: &str, value: impl Into<Value>) {
        self.0.insert(name.to_string(), value.into());
    }

    /// The count of a key that was given.
    pub(crate) fn given_count(&self, name: &str) -> Option<usize> {
        self.get(name)?.as_u64().and_then(|count| usize::try_from(count).ok())
    }

    /// The number of a key that was given.
    pub(crate) fn given_number(&self, name: &str) -> Option<f64> {
        self.get(name)?.as_f64()
    }

    /// Returns the value of a Boolean key; None if it was not given.
    pub(crate) fn flag(&self, name: &str) -> Option<bool> {
        self.get(name)?.as_bool()
    }

    /// Names of classes that were given; none if they were not.
    pub fn labels(&self) -> Vec<String> {
        self.get("labels").map(labels::listed).unwrap_or_default()
    }

    /// The count of a key that was given or filled in.
    pub(crate) fn count(&self, name: &str) -> usize {
        self.given_count(name).unwrap_or_else(|| panic!("{name} has no value where it is left out"))
    }

    /// The number of a key that was given or filled in.
    pub(crate) fn number(&self, name: &str) -> f32 {
        self.given_number(name).unwrap_or_else(|| panic!("{name} has no value where it is left out")) as f32
    }

    /// Refuses what `known` does not have, and values outside of the bounds; fills in what was left out.
    pub(crate) fn completed(&self, known: &[Key], arch: &str) -> Result<Keys, KeyError> {
        for (name, value) in self.iter() {
            let Some(key) = known.iter().find(|key| key.name == name) else {
                let names: Vec<&str> = known.iter().map(|key| key.name).collect();
                let of = Arch::all().filter(|arch| arch.keys.iter().any(|key| key.name == name));
                let of: Vec<&str> = of.map(|arch| arch.name).collect();
                let expected =
                    format!("is a key of {}, and arch {arch:?} has {}", of.join(", "), names.join(", "));
                return Err(self.refused(name, expected));
            };
            if let Some(expected) = key.values.refuse(value) {
                return Err(self.refused(name, expected));
            }
        }
        let mut all = self.clone();
        for key in known {
            if let (None, Some(absent)) = (self.get(key.name), key.values.absent()) {
                all.set(key.name, absent);
            }
        }
        Ok(all)
    }

    /// The error for key `name`.
    pub(crate) fn refused(&self, name: &str, expected: String) -> KeyError {
        let given = self.get(name).map_or_else(|| "left out".to_string(), Value::to_string);
        self.refused_as(name, given, expected)
    }

    /// The error for key `name`, whose value follows from other keys where it is left out.
    pub(crate) fn refused_as(&self, name: &str, value: impl std::fmt::Display, expected: String) -> KeyError {
        KeyError { key: name.to_string(), given: value.to_string(), expected }
    }

    /// The count of key `part`, which divides that of key `whole`.
    pub(crate) fn divisor(&self, part: &str, whole: &str) -> Result<usize, KeyError> {
        let (n, of) = (self.count(part), self.count(whole));
        if of.is_multiple_of(n) {
            return Ok(n);
        }
        let near = nearest_divisor(of, n);
        Err(self.refused(part, format!("must divide model.{whole} = {of}; the nearest that does is {near}")))
    }

    /// Rows of a table of positions for sequences of `seq` tokens: as many, where key `positions` is left out.
    pub(crate) fn positions(&self, seq: usize) -> Result<usize, KeyError> {
        let positions = self.given_count("positions").unwrap_or(seq);
        if positions < seq {
            return Err(self.refused("positions", format!("must be at least model.seq = {seq}")));
        }
        Ok(positions)
    }
}

/// The divisor of `n` nearest to `wanted`.
fn nearest_divisor(n: usize, wanted: usize) -> usize {
    (1..=n).filter(|d| n.is_multiple_of(*d)).min_by_key(|d| d.abs_diff(wanted)).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn keys(value: Value) -> Result<Keys, String> {
        serde_json::from_value(value).map_err(|error| error.to_string())
    }

    #[test]
    fn keys_of_one_name_have_one_type() {
        for key in Keys::known() {
            let same = Keys::known().filter(|other| other.name == key.name);
            let kind = |key: &Key| std::mem::discriminant(&key.values);
            assert!(same.into_iter().all(|other| kind(other) == kind(key)), "{}", key.name);
        }
    }

    #[test]
    fn what_no_architecture_has_is_refused_by_name() {
        assert!(
            keys(json!({ "hiden": 8 }))
                .unwrap_err()
                .contains("unknown field `hiden`, expected one of `layers`")
        );
        let error = keys(json!({ "hidden": -8 })).unwrap_err();
        assert!(error.contains("hidden = -8: expected a whole number from 1 to 262144"), "{error}");
        assert!(keys(json!({ "norm_eps": 1, "layers": 2 })).is_ok());
    }

    #[test]
    fn values_out_of_bounds_say_what_they_must_be() {
        for (given, refusal) in [
            (json!({ "layers": 0 }), "model.layers = 0: must be at least 1"),
            (json!({ "layers": 5000 }), "model.layers = 5000: must be at most 1024"),
            (json!({ "norm_eps": -0.5 }), "model.norm_eps = -0.5: must be a number above 0"),
            (
                json!({ "hidden": 30, "heads": 4 }),
                "model.heads = 4: must divide model.hidden = 30; the nearest that does is 3",
            ),
            (json!({ "positions": 8 }), "model.positions = 8: must be at least model.seq = 16"),
        ] {
            for arch in [Arch::GPT2, Arch::BERT] {
                let error = arch.model(&keys(given.clone()).unwrap(), 50, 16).unwrap_err().to_string();
                assert_eq!(error, refusal, "{arch}");
            }
        }
        let known = [Key {
            name: "layers",
            file: "n_layer",
            values: Values::Count { absent: Some(1), max: 2 },
            help: "",
        }];
        let error = keys(json!({ "heads": 4 })).unwrap().completed(&known, "linear").unwrap_err().to_string();
        assert!(error.ends_with(", and arch \"linear\" has layers"), "{error}");
    }
}
