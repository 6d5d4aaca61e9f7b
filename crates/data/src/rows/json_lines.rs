//! Rows in JSON lines: an object in each line. Empty lines are passed over.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Map, Value as Json};

use super::{Fields, Value, refused};
use crate::Result;

/// Characters of a value that a message shows.
const SHOWN: usize = 40;

/// Gives each row to `take`; returns all keys.
pub(super) fn each(
    path: &Path,
    text: &str,
    take: &mut dyn FnMut(Fields) -> Result<()>,
) -> Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let number = number as u64 + 1;
        let object: Map<String, Json> = serde_json::from_str(line).map_err(|error| {
            refused(path, number, format!("it is not a JSON object in one line: {error}"))
        })?;
        let get = |key: &str| object.get(key).map(value);
        let keys: Vec<String> = object.keys().map(|key| format!("{key:?}")).collect();
        take(Fields { line: number, get: &get, names: keys.join(", ") })?;
        for key in object.keys().filter(|key| !names.contains(*key)).cloned().collect::<Vec<_>>() {
            names.insert(key);
        }
    }
    Ok(names)
}

fn value(json: &Json) -> Value {
    match json {
        Json::String(text) => Value::Text(text.clone()),
        Json::Number(number) if number.is_i64() || number.is_u64() => Value::Number(number.to_string()),
        Json::Null => Value::Null,
        other => Value::Other(other.to_string().chars().take(SHOWN).collect()),
    }
}
