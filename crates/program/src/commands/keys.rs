//! `phalanx keys`: the keys of the configuration, as they are declared.

use anyhow::{Result, bail};
use phalanx_models::Arch;
use phalanx_train::RunConfig;
use phalanx_train::config::{Bounds, Key, Kind};
use serde_json::{Map, Value, json};
use toml::Table;

use crate::args::KeysArgs;
use crate::{keys, output};

/// Prints the keys whose table or name is asked for, or all; or a JSON schema of a configuration.
///
/// # Errors
/// A name that is neither a table nor a key.
pub fn keys(args: &KeysArgs) -> Result<()> {
    let all = RunConfig::keys();
    if args.schema {
        return output::print_json(&schema(&all));
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

/// `table.name = default`, and what it says.
fn line(key: &Key) -> String {
    let given = default(key).map_or(String::new(), |value| format!(" = {value}"));
    let help = help(key);
    let first = help.split_inclusive(". ").next().unwrap_or_default().trim();
    format!("{:<34} {first}\n", format!("{}{given}", key.path()))
}

/// All that is known of a key.
fn page(key: &Key) -> String {
    let mut text = format!("{}\n  {}\n", key.path(), help(key));
    text += &format!("  values: {}\n", key.expected());
    if let Kind::Words(words) = key.kind {
        words.iter().for_each(|(word, help)| text += &format!("    {word:?}: {}\n", joined(help)));
    }
    if let Kind::Tables(keys) = key.kind {
        keys.iter().for_each(|key| {
            text += &format!("    {}: {} Values: {}.\n", key.name, help(key), key.expected())
        });
    }
    text += &match default(key) {
        Some(value) => format!("  default: {value}\n"),
        None => "  left out by default\n".to_string(),
    };
    text
}

fn joined(lines: &[&str]) -> String {
    lines.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ")
}

/// Help text of a key. That of a key of architectures names those that have it, and its names in their files.
fn help(key: &Key) -> String {
    if !key.help.is_empty() {
        return joined(key.help);
    }
    let having = || Arch::all().filter(|arch| arch.keys.iter().any(|own| own.name == key.name));
    let mut files: Vec<&str> = having().map(|arch| arch.file_name(key.name)).collect();
    files.sort_unstable();
    files.dedup();
    let of: Vec<&str> = having().map(|arch| arch.name).collect();
    format!("Of {}; {} in config.json.", of.join(", "), files.join(", "))
}

/// The value of a key that is left out, where the configuration has one.
fn default(key: &Key) -> Option<toml::Value> {
    let defaults = Table::try_from(RunConfig::default()).expect("a configuration is a table of tables");
    keys::lookup(&defaults, &key.path()).cloned()
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
        Kind::Whole => json!({ "type": "integer", "minimum": 0 }),
        Kind::Number => json!({ "type": "number" }),
        Kind::Text => text(),
        Kind::Texts => texts(),
        Kind::Paths => json!({ "anyOf": [text(), texts()] }),
        Kind::Names(names) => json!({ "enum": names() }),
        Kind::WordOrNumber(_) => json!({ "type": ["string", "number"] }),
        Kind::Table => json!({ "type": "object" }),
        Kind::Words(words) => {
            let word = |(word, help): &(&str, &[&str])| json!({ "const": word, "description": joined(help) });
            json!({ "oneOf": words.iter().map(word).collect::<Vec<_>>() })
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_has_a_page_and_a_place_in_the_schema() {
        let all = RunConfig::keys();
        let schema = schema(&all);
        for key in &all {
            let page = page(key);
            assert!(page.contains("values: ") && page.contains("default") && !help(key).is_empty(), "{page}");
            let described = &schema["properties"][key.table]["properties"][key.name];
            assert!(described["description"].is_string(), "{} in the schema: {described}", key.path());
        }
        let words = &schema["properties"]["memory"]["properties"]["gradients"]["oneOf"];
        assert!(words.as_array().unwrap().iter().any(|word| word["const"] == "nvme"), "{words}");
        assert_eq!(schema["properties"]["parallel"]["properties"]["zero"]["maximum"], 3.0);
    }
}
