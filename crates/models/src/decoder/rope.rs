//! The frequencies of rotary positions, as keys of a configuration and of a `config.json` give them.

use std::sync::Arc;

use phalanx_tensor::{LongRope, Rotary, RotaryScaling, Yarn};
use serde_json::{Map, Value, json};

use super::Family;
use crate::ModelError;
use crate::config::{contradiction, wrong};

/// Frequencies of the rotary positions of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies (`rope_theta`).
    pub theta: f64,
    /// Which share of a head's elements turns, its first ones (`partial_rotary_factor`).
    pub share: f64,
    /// Base in layers with a window, if it differs (`rope_local_base_freq`). Their frequencies are not scaled.
    pub local_theta: Option<f64>,
    /// Scaling of the frequencies for longer sequences than the model was first trained on.
    pub scaling: RotaryScaling,
}

/// Error in a table of RoPE scaling: the key, its value, and the expected value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key} = {given}: {expected}")]
pub struct WrongScaling {
    /// The key in the table.
    pub key: String,
    /// Its value.
    pub given: String,
    /// The expected value.
    pub expected: String,
}

/// The types that are computed here.
const TYPES: [&str; 6] = ["default", "linear", "dynamic", "llama3", "yarn", "longrope"];

/// Key of the share of a head that turns.
const SHARE: &str = "partial_rotary_factor";

/// Key of the base in layers with a window.
const LOCAL: &str = "rope_local_base_freq";

/// Key of the positions before the stretching.
const ORIGINAL: &str = "original_max_position_embeddings";

/// The base of frequencies.
fn base(key: &'static str, value: &Value) -> Result<f64, ModelError> {
    let base = value.as_f64().filter(|theta| *theta > 1.0 && theta.is_finite());
    base.ok_or_else(|| wrong(key, value, "a number above 1"))
}

/// `rope_parameters` of layers that see all keys, and the base of those with a window, where a family has one for each.
#[allow(clippy::type_complexity, reason = "two parts of one table")]
fn by_kind<'a>(
    new: Option<&'a Map<String, Value>>,
    family: &Family,
) -> Result<(Option<&'a Map<String, Value>>, Option<&'a Value>), ModelError> {
    let has_kinds =
        |table: &&Map<String, Value>| family.local_theta.is_some() && !table.contains_key("rope_theta");
    let Some(table) = new.filter(has_kinds) else { return Ok((new, None)) };
    let of = |kind| table.get(kind).and_then(Value::as_object);
    let sliding = of("sliding_attention");
    if let Some(other) = sliding.filter(|sliding| type_of(sliding) != "default") {
        return Err(wrong("rope_parameters", json!(other), "rope_type default for sliding_attention"));
    }
    Ok((of("full_attention"), sliding.and_then(|sliding| sliding.get("rope_theta"))))
}

/// Returns whether a number is a share: above 0 and at most 1.
pub(super) fn is_share(number: f64) -> bool {
    number > 0.0 && number <= 1.0
}

/// The type that a table of scaling gives.
fn type_of(table: &Map<String, Value>) -> Value {
    table.get("rope_type").or_else(|| table.get("type")).cloned().unwrap_or_else(|| json!("default"))
}

/// Returns whether the type of a table has the key [`ORIGINAL`].
fn has_original(table: &Map<String, Value>) -> bool {
    !["default", "linear"].iter().any(|kind| type_of(table) == *kind)
}

impl Rope {
    /// Positions of the longest sequence for which the frequencies are meant, of a model for `positions`.
    pub fn longest(&self, positions: usize) -> usize {
        let stretched = |trained: usize, factor: f64| positions.max((trained as f64 * factor) as usize);
        match self.scaling {
            RotaryScaling::Linear { factor } => stretched(positions, factor),
            RotaryScaling::Yarn(Yarn { factor, original, .. })
            | RotaryScaling::Llama3 { factor, original, .. } => stretched(original, factor),
            RotaryScaling::Default | RotaryScaling::Dynamic { .. } | RotaryScaling::LongRope(_) => positions,
        }
    }

    /// Elements that turn of heads of `head_dim`.
    pub fn rotated(&self, head_dim: usize) -> usize {
        (head_dim as f64 * self.share) as usize
    }

    /// The rotation of heads of `head_dim` elements, of a layer with a window or without, and that of texts of more positions than so many,
    /// where it is another one.
    pub fn rotary(&self, head_dim: usize, has_window: bool) -> (Rotary, Option<(usize, Rotary)>) {
        if let Some(theta) = self.local_theta.filter(|_| has_window) {
            return (Rotary::new(head_dim, self.rotated(head_dim), theta, RotaryScaling::Default), None);
        }
        let of = |scaling| Rotary::new(head_dim, self.rotated(head_dim), self.theta, scaling);
        let beyond = match &self.scaling {
            RotaryScaling::LongRope(rope) => {
                let long = LongRope { length: usize::MAX, ..rope.clone() };
                Some((rope.original, of(RotaryScaling::LongRope(long))))
            }
            _ => None,
        };
        (of(self.scaling.clone()), beyond)
    }

    /// The scaling as transformers 5 writes it; None without one.
    pub fn scaling_value(&self) -> Option<Value> {
        let mut value = match &self.scaling {
            RotaryScaling::Default => return None,
            RotaryScaling::Linear { factor } => json!({ "rope_type": "linear", "factor": factor }),
            RotaryScaling::Dynamic { factor, .. } => json!({ "rope_type": "dynamic", "factor": factor }),
            RotaryScaling::Llama3 { factor, low, high, original } => json!({
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }),
            RotaryScaling::Yarn(yarn) => json!({
                "rope_type": "yarn",
                "factor": yarn.factor,
                "original_max_position_embeddings": yarn.original,
                "beta_fast": yarn.beta_fast,
                "beta_slow": yarn.beta_slow,
                "truncate": yarn.truncate,
            }),
            RotaryScaling::LongRope(rope) => json!({
                "rope_type": "longrope",
                "factor": rope.factor,
                "original_max_position_embeddings": rope.original,
                "short_factor": rope.short.to_vec(),
                "long_factor": rope.long.to_vec(),
            }),
        };
        let (attention_factor, mscales) = match &self.scaling {
            RotaryScaling::Yarn(yarn) => (yarn.attention_factor, yarn.mscales),
            RotaryScaling::LongRope(rope) => (rope.attention_factor, None),
            _ => (None, None),
        };
        let [mscale, all] = mscales.map_or([None; 2], |mscales| mscales.map(Some));
        let given = [("attention_factor", attention_factor), ("mscale", mscale), ("mscale_all_dim", all)];
        for (key, number) in given.into_iter().filter_map(|(key, number)| Some((key, number?))) {
            value[key] = json!(number);
        }
        Some(value)
    }

    /// Writes the keys of both versions into a `config.json` of a model for `positions` tokens.
    pub(super) fn write(&self, config: &mut Value, is_partial: bool, positions: usize) {
        let scaling = self.scaling_value();
        let mut parameters = scaling.clone().unwrap_or_else(|| json!({ "rope_type": "default" }));
        parameters["rope_theta"] = json!(self.theta);
        if is_partial {
            (config[SHARE], parameters[SHARE]) = (json!(self.share), json!(self.share));
        }
        if let Some(original) = parameters.get(ORIGINAL) {
            config[ORIGINAL] = original.clone();
        }
        let (theta, mut old) = (json!(self.theta), json!(scaling));
        if let RotaryScaling::LongRope(LongRope { factor, original, attention_factor: None, .. }) =
            self.scaling
            && factor == positions as f64 / original as f64
        {
            // Version 4 takes three keys and no others.
            old = json!({ "type": "longrope", "short_factor": old["short_factor"], "long_factor": old["long_factor"] });
        }
        if let Some(local) = self.local_theta {
            config[LOCAL] = json!(local);
            parameters = json!({
                "full_attention": parameters,
                "sliding_attention": { "rope_type": "default", "rope_theta": local },
            });
        }
        for (key, value) in [("rope_theta", theta), ("rope_scaling", old), ("rope_parameters", parameters)] {
            config[key] = value;
        }
    }

    /// Base, share and scaling, of either version, of heads of `head_dim`. Of both tables of scaling, transformers 5 reads that of
    /// version 4.
    pub(super) fn of_config(
        config: &Value,
        family: &Family,
        positions: usize,
        head_dim: usize,
    ) -> Result<Rope, ModelError> {
        let table = |key: &'static str| match config.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Object(table)) => Ok(Some(table)),
            Some(other) => Err(wrong(key, other, "a table of numbers")),
        };
        let (old, new) = (table("rope_scaling")?, table("rope_parameters")?);
        let (new, local) = by_kind(new, family)?;
        // The value of a key, at the top or in a table: where it is in several places, it is the same.
        let given = |key: &'static str, in_table: &'static str| {
            let places =
                [config.get(key), new.and_then(|new| new.get(key)), old.and_then(|old| old.get(key))];
            let mut given = places.into_iter().flatten().filter(|value| !value.is_null());
            let first = given.next();
            match (first, given.find(|other| other.as_f64() != first.and_then(Value::as_f64))) {
                (Some(first), Some(other)) => Err(contradiction([key, in_table], first, other)),
                _ => Ok(first),
            }
        };
        let theta = match given("rope_theta", "rope_parameters.rope_theta")? {
            None => family.theta,
            Some(value) => base("rope_theta", value)?,
        };
        let share = given(SHARE, "rope_parameters.partial_rotary_factor")?.map_or(Ok(1.0), |value| {
            let expected = if family.partial { "a number above 0, at most 1" } else { "1" };
            let share = value.as_f64().filter(|share| *share == 1.0 || family.partial && is_share(*share));
            share.ok_or_else(|| wrong(SHARE, value, expected))
        })?;
        let local_theta = match (local, config.get(LOCAL).filter(|value| !value.is_null())) {
            _ if family.local_theta.is_none() => None,
            (None, None) => family.local_theta,
            (Some(one), Some(other)) if one.as_f64() != other.as_f64() => {
                return Err(contradiction(
                    [LOCAL, "rope_parameters.sliding_attention.rope_theta"],
                    other,
                    one,
                ));
            }
            (Some(value), _) | (None, Some(value)) => Some(base(LOCAL, value)?),
        };
        let rope = Rope { theta, share, local_theta, scaling: RotaryScaling::Default };
        let Some((key, table)) =
            old.map(|old| ("rope_scaling", old)).or(new.map(|new| ("rope_parameters", new)))
        else {
            return Ok(rope);
        };
        let mut table = table.clone();
        table.remove(SHARE);
        let original = given(ORIGINAL, "rope_parameters.original_max_position_embeddings")?;
        if let Some(original) = original.filter(|_| has_original(&table)) {
            table.insert(ORIGINAL.to_string(), original.clone());
        }
        let scaling = Rope::read_scaling(&table, positions, rope.rotated(head_dim)).map_err(
            |WrongScaling { key: inner, given, expected }| {
                wrong(key, format!("{inner} = {given}"), &expected)
            },
        )?;
        Ok(Rope { scaling, ..rope })
    }

    /// Reads a table of scaling, of a model for `positions` tokens, of whose heads `rotated` elements turn. `rope_theta` in it is left to
    /// the caller.
    ///
    /// # Errors
    /// A type or a key that is not computed here, and values that it cannot have.
    pub fn read_scaling(
        table: &Map<String, Value>,
        positions: usize,
        rotated: usize,
    ) -> Result<RotaryScaling, WrongScaling> {
        let given = type_of(table);
        let one_of = || TYPES.map(|name| format!("{name:?}")).join(", ");
        let refused = |key: &str, given: &Value, expected: String| WrongScaling {
            key: key.to_string(),
            given: given.to_string(),
            expected,
        };
        let table = Entries { table, positions };
        let (scaling, keys): (_, &[&str]) = match given.as_str().unwrap_or_default() {
            "default" => (RotaryScaling::Default, &[]),
            "linear" => (RotaryScaling::Linear { factor: table.factor("factor", None)? }, &["factor"]),
            "dynamic" => {
                let factor = table.factor("factor", None)?;
                let original = table.original()?;
                if original != positions {
                    let expected =
                        format!("max_position_embeddings = {positions}, up to which frequencies stay");
                    return Err(refused("original_max_position_embeddings", &original.into(), expected));
                }
                let scaling = RotaryScaling::Dynamic { factor, trained: original, length: original };
                (scaling, &["factor", "original_max_position_embeddings"])
            }
            "llama3" => (
                RotaryScaling::Llama3 {
                    factor: table.factor("factor", None)?,
                    low: table.positive("low_freq_factor", None)?,
                    high: table.positive("high_freq_factor", None)?,
                    original: table.original()?,
                },
                &["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"],
            ),
            "yarn" => (RotaryScaling::Yarn(table.yarn()?), &YARN),
            "longrope" | "su" => (RotaryScaling::LongRope(table.long_rope(rotated / 2)?), &LONGROPE),
            _ => return Err(refused("rope_type", &given, format!("one of {}", one_of()))),
        };
        if let RotaryScaling::Llama3 { low, high, .. } = scaling
            && low >= high
        {
            return Err(refused(
                "high_freq_factor",
                &json!(high),
                format!("more than low_freq_factor = {low}"),
            ));
        }
        let always = ["rope_type", "type", "rope_theta"];
        let foreign = table.table.iter().find(|(key, value)| {
            !always.contains(&key.as_str()) && !keys.contains(&key.as_str()) && !value.is_null()
        });
        match foreign {
            None => Ok(scaling),
            Some((key, value)) => Err(refused(
                key,
                value,
                format!("no such key with rope_type = {given}: it would change the numbers"),
            )),
        }
    }
}

/// The keys of type yarn.
const YARN: [&str; 8] = [
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
];

/// The keys of type longrope.
const LONGROPE: [&str; 5] = ["factor", ORIGINAL, "short_factor", "long_factor", "attention_factor"];

/// The entries of a table of scaling.
struct Entries<'a> {
    table: &'a Map<String, Value>,
    positions: usize,
}

impl Entries<'_> {
    /// The entry under a key, unless it is null.
    fn get(&self, key: &str) -> Option<&Value> {
        self.table.get(key).filter(|value| !value.is_null())
    }

    fn number(
        &self,
        key: &str,
        absent: Option<f64>,
        is_right: fn(f64) -> bool,
        expected: &str,
    ) -> Result<f64, WrongScaling> {
        let number = self.get(key).map_or(absent, Value::as_f64);
        number.filter(|number| number.is_finite() && is_right(*number)).ok_or_else(|| WrongScaling {
            key: key.to_string(),
            given: self.get(key).map_or_else(|| "left out".to_string(), Value::to_string),
            expected: expected.to_string(),
        })
    }

    fn positive(&self, key: &str, absent: Option<f64>) -> Result<f64, WrongScaling> {
        self.number(key, absent, |number| number > 0.0, "a number above 0")
    }

    fn factor(&self, key: &str, absent: Option<f64>) -> Result<f64, WrongScaling> {
        self.number(key, absent, |number| number >= 1.0, "a number of at least 1")
    }

    /// Positions before the stretching.
    fn original(&self) -> Result<usize, WrongScaling> {
        let whole = |number: f64| number >= 1.0 && number.fract() == 0.0 && number < 1e9;
        let number = self.number(ORIGINAL, Some(self.positions as f64), whole, "a number of positions")?;
        Ok(number as usize)
    }

    /// A number above 0 that may be left out.
    fn given(&self, key: &str) -> Result<Option<f64>, WrongScaling> {
        self.get(key).map(|_| self.positive(key, None)).transpose()
    }

    /// `count` numbers above 0.
    fn list(&self, key: &str, count: usize) -> Result<Arc<[f64]>, WrongScaling> {
        let given = self.get(key).unwrap_or(&Value::Null);
        let numbers = given.as_array().map(|list| list.iter().filter_map(Value::as_f64));
        let numbers: Option<Arc<[f64]>> = numbers.map(|list| list.filter(|n| *n > 0.0).collect());
        let is_whole =
            |list: &Arc<[f64]>| list.len() == count && given.as_array().map(Vec::len) == Some(count);
        numbers.filter(is_whole).ok_or_else(|| WrongScaling {
            key: key.to_string(),
            given: given.to_string(),
            expected: format!("{count} numbers above 0, one for each pair that turns"),
        })
    }

    fn long_rope(&self, pairs: usize) -> Result<LongRope, WrongScaling> {
        let original = self.original()?;
        Ok(LongRope {
            short: self.list("short_factor", pairs)?,
            long: self.list("long_factor", pairs)?,
            original,
            factor: self.positive("factor", Some(self.positions as f64 / original as f64))?,
            attention_factor: self.given("attention_factor")?,
            length: original,
        })
    }

    fn yarn(&self) -> Result<Yarn, WrongScaling> {
        let original = self.original()?;
        let truncate = match self.get("truncate") {
            None => true,
            Some(value) => value.as_bool().ok_or_else(|| WrongScaling {
                key: "truncate".to_string(),
                given: value.to_string(),
                expected: "true or false".to_string(),
            })?,
        };
        Ok(Yarn {
            factor: self.factor("factor", Some(self.positions as f64 / original as f64))?,
            original,
            beta_fast: self.positive("beta_fast", Some(32.0))?,
            beta_slow: self.positive("beta_slow", Some(1.0))?,
            truncate,
            attention_factor: self.given("attention_factor")?,
            mscales: self
                .given("mscale")?
                .zip(self.given("mscale_all_dim")?)
                .map(|(mscale, all)| [mscale, all]),
        })
    }
}
