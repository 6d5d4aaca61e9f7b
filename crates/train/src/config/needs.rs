//! Requirements of one key on others, as data beside the declaration of the key: `memory.gradients = "nvme"` needs `memory.nvme_path`. The
//! refusal follows from them, and so does what a resumed run leaves out. What is computed from several keys is a function elsewhere.

use std::sync::LazyLock;

use serde_json::Value;

use super::RunConfig;
use super::check::ConfigError;

/// Values of which a key must have one, as words: `"nvme"`, `"3"`, `"2.."` (2 or more), `"above 0"`, [`SET`], [`LEFT_OUT`].
pub type Words = &'static [&'static str];

/// Any value.
pub const SET: Words = &["set"];
/// None.
pub const LEFT_OUT: Words = &["left out"];

/// Requirement of a key's values on other keys.
#[derive(Clone, Copy, Debug)]
pub struct Need {
    /// The values that have it; any but the default where it is empty.
    of: Words,
    /// Keys, each with its values: one of them suffices.
    any: &'static [(&'static str, Words)],
    /// True if the key is for these values of the others, and means nothing without them.
    is_for: bool,
    /// Reason; "" where the names say it.
    why: &'static str,
}

impl Need {
    /// Any value but the default needs one of `any`.
    pub const fn any(any: &'static [(&'static str, Words)], why: &'static str) -> Need {
        Need { of: &[], any, is_for: false, why }
    }

    /// The values `of` need one of `any`.
    pub const fn of(of: Words, any: &'static [(&'static str, Words)], why: &'static str) -> Need {
        Need { of, any, is_for: false, why }
    }

    /// The key is for one of `any`, and means nothing without it.
    pub const fn is_for(any: &'static [(&'static str, Words)], why: &'static str) -> Need {
        Need { of: &[], any, is_for: true, why }
    }

    /// The alternatives in words: `device.kind = "cuda" or "simulated"`.
    pub fn describe(&self) -> String {
        let verb = if self.is_for { "is for" } else { "needs" };
        let one = |(key, values): &(&str, Words)| match *values {
            SET => key.to_string(),
            values => format!("{key} {}", alternatives(values)),
        };
        format!("{verb} {}", joined(self.any.iter().map(one)))
    }

    /// The reason in words, with a colon before it; "" without one.
    pub fn reason(&self) -> String {
        if self.why.is_empty() { String::new() } else { format!(": {}", self.why) }
    }

    /// Returns whether the key is for nothing but values of `other`.
    pub fn is_for_key(&self, other: &str) -> bool {
        self.is_for && matches!(self.any, [(key, _)] if *key == other)
    }

    /// Values of the key that have this requirement, in words; "" if all have it.
    pub fn values(&self) -> String {
        alternatives(self.of).trim_start_matches("= ").to_string()
    }

    fn applies(&self, value: Option<&Value>, default: Option<&Value>) -> bool {
        if self.of.is_empty() { value != default } else { is_one_of(value, self.of) }
    }

    fn is_met(&self, config: &RunConfig) -> bool {
        self.any.iter().any(|(key, values)| is_one_of(config.value(key).as_ref(), values))
    }

    fn refuse(&self, path: String, given: String, config: &RunConfig) -> ConfigError {
        let actual = match self.any {
            [(_, SET)] => String::new(),
            [(other, _)] => format!(" (it is {})", config.given(other)),
            _ => String::new(),
        };
        let expected = format!("{}{actual}{}", self.describe(), self.reason());
        // Others that give way if their defaults suffice.
        let is_enough = |(other, values): &&(&str, Words)| is_one_of(DEFAULTS.value(other).as_ref(), values);
        let others = self.any.iter().filter(is_enough).map(|(other, _)| *other).collect();
        ConfigError { others, means_nothing: self.is_for, ..ConfigError::new(path, given, expected) }
    }
}

/// Ranks that wait for each other: those of asynchronous updates apply gradients as they arrive.
pub(super) const SYNCHRONOUS: Need = Need::any(&[("parallel.updates", &["synchronous"])], "");

static DEFAULTS: LazyLock<RunConfig> = LazyLock::new(RunConfig::default);

/// Words as a sentence has them behind the name of a key: `= "a" or "b"`, `left out or = 1`, `= 2 or more`.
fn alternatives(words: Words) -> String {
    let quoted = |word: &&str| match word.strip_suffix("..") {
        Some(min) => format!("{min} or more"),
        None if word.parse::<f64>().is_ok() || word.parse::<bool>().is_ok() => word.to_string(),
        None => format!("{word:?}"),
    };
    let (bare, values): (Vec<&str>, Vec<&str>) =
        words.iter().partition(|word| **word == "left out" || word.starts_with("above "));
    let values = joined(values.iter().map(quoted));
    let values = (!values.is_empty()).then(|| format!("= {values}"));
    joined(bare.into_iter().map(str::to_string).chain(values))
}

fn joined(words: impl Iterator<Item = String>) -> String {
    let words: Vec<String> = words.collect();
    match &words[..] {
        [first @ .., last] if !first.is_empty() => format!("{} or {last}", first.join(", ")),
        _ => words.concat(),
    }
}

/// Returns whether a value is one of those in words.
fn is_one_of(value: Option<&Value>, words: Words) -> bool {
    let number = value.and_then(Value::as_f64);
    let min = |bound: &str| bound.parse::<f64>().ok();
    words.iter().any(|word| match (*word, value) {
        ("left out", value) => value.is_none(),
        (_, None) => false,
        ("set", Some(_)) => true,
        (word, Some(Value::String(text))) => text == word,
        (word, Some(Value::Bool(flag))) => word.parse() == Ok(*flag),
        (word, Some(_)) => match (word.strip_suffix(".."), word.strip_prefix("above ")) {
            (Some(bound), _) => number >= min(bound),
            (None, Some(bound)) => number > min(bound),
            (None, None) => number == min(word),
        },
    })
}

impl RunConfig {
    /// The value of `table.key`; `None` if it is left out.
    fn value(&self, path: &str) -> Option<Value> {
        let (table, name) = path.split_once('.')?;
        let value = self.tables().into_iter().find(|own| own.keys()[0].table == table)?.value(name)?;
        // An empty list is none.
        (value != Value::Array(Vec::new())).then_some(value)
    }

    /// The value of `table.key` as errors write it.
    fn given(&self, path: &str) -> String {
        let (table, name) = path.split_once('.').unwrap_or_default();
        let table = self.tables().into_iter().find(|own| own.keys()[0].table == table);
        table.map_or_else(String::new, |own| own.given(name))
    }

    /// Refuses the first key that needs another value of another key.
    pub(super) fn check_needs(&self) -> Result<(), ConfigError> {
        for table in self.tables() {
            for key in table.keys().iter().filter(|key| !key.needs.is_empty()) {
                let path = key.path();
                let [value, default] = [self, &*DEFAULTS].map(|config| config.value(&path));
                let broken =
                    |need: &&Need| need.applies(value.as_ref(), default.as_ref()) && !need.is_met(self);
                if let Some(need) = key.needs.iter().find(broken) {
                    return Err(need.refuse(path, table.given(key.name), self));
                }
            }
        }
        Ok(())
    }
}
