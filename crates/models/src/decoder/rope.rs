//! The frequencies of rotary positions, as keys of a configuration and of a `config.json` give them.

use phalanx_tensor::{Rotary, RotaryScaling, Yarn};
use serde_json::{Map, Value, json};

use crate::ModelError;
use crate::config::{contradiction, wrong};

/// Frequencies of the rotary positions of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies (`rope_theta`).
    pub theta: f64,
    /// What stretches them over longer sequences than the model was first trained on.
    pub scaling: RotaryScaling,
}

/// What a table of scaling must be, where it is not that: the key, and what is expected of it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key} = {given}: {expected}")]
pub struct WrongScaling {
    /// The key in the table.
    pub key: String,
    /// Its value.
    pub given: String,
    /// What it must be.
    pub expected: String,
}

/// The types that are computed here.
const TYPES: [&str; 5] = ["default", "linear", "dynamic", "llama3", "yarn"];

impl Rope {
    /// Positions of the longest sequence for which the frequencies are meant, of a model for `positions`.
    pub fn longest(&self, positions: usize) -> usize {
        let stretched = |trained: usize, factor: f64| positions.max((trained as f64 * factor) as usize);
        match self.scaling {
            RotaryScaling::Linear { factor } => stretched(positions, factor),
            RotaryScaling::Yarn(Yarn { factor, original, .. })
            | RotaryScaling::Llama3 { factor, original, .. } => stretched(original, factor),
            RotaryScaling::Default | RotaryScaling::Dynamic { .. } => positions,
        }
    }

    /// The rotation of heads of `head_dim` elements.
    pub fn rotary(&self, head_dim: usize) -> Rotary {
        Rotary::new(head_dim, head_dim, self.theta, self.scaling)
    }

    /// The scaling as transformers writes it; None without one.
    pub fn scaling_value(&self) -> Option<Value> {
        let mut value = match self.scaling {
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
        };
        if let RotaryScaling::Yarn(Yarn { attention_factor, mscales, .. }) = self.scaling {
            let [mscale, all] = mscales.map_or([None; 2], |mscales| mscales.map(Some));
            for (key, number) in
                [("attention_factor", attention_factor), ("mscale", mscale), ("mscale_all_dim", all)]
            {
                if let Some(number) = number {
                    value[key] = json!(number);
                }
            }
        }
        Some(value)
    }

    /// Base and scaling of the frequencies, of either version. Of both tables of scaling, transformers 5 reads that of version 4.
    pub(super) fn of_config(config: &Value, absent: f64, positions: usize) -> Result<Rope, ModelError> {
        let table = |key: &'static str| match config.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Object(table)) => Ok(Some(table)),
            Some(other) => Err(wrong(key, other, "a table of numbers")),
        };
        let (old, new) = (table("rope_scaling")?, table("rope_parameters")?);
        let theta_in =
            |table: Option<&Map<String, Value>>| table.and_then(|table| table.get("rope_theta")).cloned();
        let thetas = [config.get("rope_theta").cloned(), theta_in(new), theta_in(old)];
        let mut given = thetas.into_iter().flatten().filter(|theta| !theta.is_null());
        let first = given.next();
        if let (Some(first), Some(other)) =
            (&first, given.find(|theta| theta.as_f64() != first.as_ref().and_then(Value::as_f64)))
        {
            return Err(contradiction(["rope_theta", "rope_parameters.rope_theta"], first, &other));
        }
        let theta = match &first {
            None => absent,
            Some(value) => value
                .as_f64()
                .filter(|theta| *theta > 1.0 && theta.is_finite())
                .ok_or_else(|| wrong("rope_theta", value, "a number above 1"))?,
        };
        let (key, table) = match (old, new) {
            (Some(old), _) => ("rope_scaling", old),
            (None, Some(new)) => ("rope_parameters", new),
            (None, None) => return Ok(Rope { theta, scaling: RotaryScaling::Default }),
        };
        let scaling = Rope::read_scaling(table, positions).map_err(
            |WrongScaling { key: inner, given, expected }| {
                wrong(key, format!("{inner} = {given}"), &expected)
            },
        )?;
        Ok(Rope { theta, scaling })
    }

    /// Reads a table of scaling, of a model for `positions` tokens. `rope_theta` in it is left to the caller.
    ///
    /// # Errors
    /// A type or a key that is not computed here, and values that it cannot have.
    pub fn read_scaling(table: &Map<String, Value>, positions: usize) -> Result<RotaryScaling, WrongScaling> {
        let given = table.get("rope_type").or_else(|| table.get("type")).cloned();
        let given = given.unwrap_or_else(|| json!("default"));
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
            let is_whole = *key == "partial_rotary_factor" && value.as_f64() == Some(1.0);
            !always.contains(&key.as_str()) && !keys.contains(&key.as_str()) && !value.is_null() && !is_whole
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
        let key = "original_max_position_embeddings";
        let whole = |number: f64| number >= 1.0 && number.fract() == 0.0 && number < 1e9;
        let number = self.number(key, Some(self.positions as f64), whole, "a number of positions")?;
        Ok(number as usize)
    }

    fn yarn(&self) -> Result<Yarn, WrongScaling> {
        let original = self.original()?;
        let given = |key: &str| self.get(key).map(|_| self.positive(key, None)).transpose();
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
            attention_factor: given("attention_factor")?,
            mscales: given("mscale")?.zip(given("mscale_all_dim")?).map(|(mscale, all)| [mscale, all]),
        })
    }
}
