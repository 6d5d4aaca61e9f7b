//! `phalanx keys`: the keys of the configuration, as they are declared, for people and for editors.

use anyhow::{Result, bail};
use phalanx_train::RunConfig;
use phalanx_train::config::{Bounds, Key, Kind};
use serde_json::{Map, Value, json};

use crate::arguments::args::KeysArgs;
use crate::configuration::key_reference::{help, joined, line, markdown, page};
use crate::configuration::keys;
use crate::host::output;

/// Prints the keys whose table or name is asked for, or all; or the page of docs, or a JSON schema of a configuration.
///
/// # Errors
/// A name that is neither a table nor a key.
pub fn keys(args: &KeysArgs) -> Result<()> {
    let all = RunConfig::keys();
    if args.schema {
        return output::print_json(&schema(&all));
    }
    if args.markdown {
        return Ok(output::print(&markdown(&all))?);
    }
    let asked = |key: &&Key| {
        args.name.as_deref().is_none_or(|name| name == key.path() || name == key.table || name == key.name)
    };
    let text = match &all.iter().filter(asked).collect::<Vec<_>>()[..] {
        [] => bail!("{}", keys::unknown(args.name.as_deref().unwrap_or_default())),
        [one] => page(one),
        several => several.iter().map(|key| line(key)).collect(),
    };
    Ok(output::print(&text)?)
}

/// A JSON schema (Draft 2020-12) of configurations, for editors.
fn schema(keys: &[Key]) -> Value {
    let mut tables = Map::new();
    for key in keys {
        let table = tables
            .entry(key.table)
            .or_insert_with(|| json!({ "type": "object", "additionalProperties": false, "properties": {} }));
        table["properties"][key.name] = schema_of(key);
    }
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration of a Phalanx run",
        "type": "object",
        "additionalProperties": false,
        "properties": tables,
    })
}

fn schema_of(key: &Key) -> Value {
    let text = || json!({ "type": "string" });
    let texts = || json!({ "type": "array", "items": { "type": "string" } });
    let mut schema = match key.kind {
        Kind::Flag => json!({ "type": "boolean" }),
        // The planner may choose it ("auto").
        Kind::Whole if key.path() == "batch.micro" => json!({ "type": ["string", "integer"] }),
        Kind::Whole => json!({ "type": "integer", "minimum": 0 }),
        Kind::Number => json!({ "type": "number" }),
        Kind::Text => text(),
        Kind::Texts => texts(),
        Kind::Paths | Kind::TextOrTexts(_) => json!({ "anyOf": [text(), texts()] }),
        Kind::Names(names) => json!({ "enum": names() }),
        Kind::WordOrNumber(_) => json!({ "type": ["string", "number"] }),
        Kind::Table => json!({ "type": "object" }),
        Kind::Words(words) => one_of(words),
        Kind::WordList(words) => json!({ "type": "array", "items": one_of(words) }),
        Kind::Tables(keys) => {
            let properties: Map<String, Value> =
                keys.iter().map(|key| (key.name.to_string(), schema_of(key))).collect();
            let item = json!({ "type": "object", "additionalProperties": false, "properties": properties });
            json!({ "type": "array", "items": item })
        }
    };
    if let Bounds::From(min, max) | Bounds::Above(min, max) = key.bounds {
        let bound = if matches!(key.bounds, Bounds::From(..)) { "minimum" } else { "exclusiveMinimum" };
        schema[bound] = json!(min);
        if max < f64::MAX {
            schema["maximum"] = json!(max);
        }
    }
    schema["description"] = help(key).into();
    schema
}

/// The schema of one of some words.
fn one_of(words: &[(&str, &[&str])]) -> Value {
    let word = |(word, help): &(&str, &[&str])| json!({ "const": word, "description": joined(help) });
    json!({ "oneOf": words.iter().map(word).collect::<Vec<_>>() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_has_a_place_in_the_schema() {
        let all = RunConfig::keys();
        let schema = schema(&all);
        for key in &all {
            let described = &schema["properties"][key.table]["properties"][key.name];
            assert!(described["description"].is_string(), "{} in the schema: {described}", key.path());
        }
        let words = &schema["properties"]["memory"]["properties"]["gradients"]["oneOf"];
        assert!(words.as_array().unwrap().iter().any(|word| word["const"] == "nvme"), "{words}");
        assert_eq!(schema["properties"]["parallel"]["properties"]["zero"]["maximum"], 3.0);
    }
}
