//! Keys of `tokenizer_config.json` that change ids. They are applied to the parts of a `tokenizer.json` as transformers
//! applies them; where this is not possible, they are refused by name. Those that name special tokens are read elsewhere
//! (`special_tokens`).

use serde_json::{Value, json};

use super::files::TOKENIZER_CONFIG;

/// Parts of a `tokenizer.json` that take the place of those in the file.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Changes {
    pub normalizer: Option<Value>,
    pub pre_tokenizer: Option<Value>,
    /// Special tokens that are spelled in a text are plain text (`split_special_tokens`).
    pub plain_special: bool,
}

impl Changes {
    /// For a checksum; `None` where nothing is changed.
    pub(super) fn to_json(&self) -> Option<Value> {
        let changes = json!([self.normalizer, self.pre_tokenizer]);
        (self.normalizer.is_some() || self.pre_tokenizer.is_some()).then_some(changes)
    }
}

/// Keys of BERT's classes, and what they are called in the normalizer of a `tokenizer.json`.
const OF_BERT: [(&str, &str); 3] = [
    ("do_lower_case", "lowercase"),
    ("strip_accents", "strip_accents"),
    ("tokenize_chinese_chars", "handle_chinese_chars"),
];

/// Keys that change ids in a way that a `tokenizer.json` does not show, and the value that changes nothing.
const REFUSED: [(&str, Value); 4] = [
    ("do_basic_tokenize", Value::Bool(true)),
    ("normalization", Value::Bool(false)),
    ("do_word_tokenize", Value::Bool(true)),
    ("do_subword_tokenize", Value::Bool(true)),
];

/// Changes by `config` (`tokenizer_config.json`) to a file with these parts, and notes for people on what was applied. The error is a
/// reason to print.
pub(super) fn changes(
    config: &Value,
    normalizer: &Value,
    pre_tokenizer: &Value,
) -> Result<(Changes, Vec<String>), String> {
    for (key, neutral) in REFUSED {
        if config.get(key).is_some_and(|given| *given != neutral && !given.is_null()) {
            return Err(refused(key, &config[key], "is not supported"));
        }
    }
    if config["never_split"].as_array().is_some_and(|words| !words.is_empty()) {
        return Err(refused("never_split", &config["never_split"], "is not supported"));
    }
    let mut changes = Changes {
        plain_special: boolean(config, "split_special_tokens")?.unwrap_or(false),
        ..Changes::default()
    };
    let mut applied = Vec::new();
    if let Some(given) = boolean(config, "add_prefix_space")?
        && given != has_prefix_space(normalizer, pre_tokenizer)
    {
        let mut changed = pre_tokenizer.clone();
        if !set_prefix_space(&mut changed, given) {
            return Err(refused("add_prefix_space", &json!(given), "does not fit tokenizer.json"));
        }
        changes.pre_tokenizer = Some(changed);
        applied.push(format!("add_prefix_space = {given}"));
    }
    for (key, name) in OF_BERT {
        let Some(given) = config.get(key) else { continue };
        boolean(config, key)?;
        match changed_normalizer(normalizer, changes.normalizer.take(), name, given) {
            Ok(None) => {}
            Ok(Some(changed)) => {
                if changed[name] != normalizer[name] {
                    applied.push(format!("{key} = {given}"));
                }
                changes.normalizer = Some(changed);
            }
            Err(()) => return Err(refused(key, given, "does not fit the normalizer of tokenizer.json")),
        }
    }
    if changes.plain_special {
        applied.push("split_special_tokens = true".to_string());
    }
    Ok((changes, applied))
}

/// A key that is true, false, or left out (also as null). The error is a reason to print.
pub(super) fn boolean(config: &Value, key: &str) -> Result<Option<bool>, String> {
    match config.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Bool(given)) => Ok(Some(*given)),
        Some(other) => Err(refused(key, other, "is neither true nor false")),
    }
}

fn refused(key: &str, given: &Value, why: &str) -> String {
    format!(
        "{key} = {given} of {TOKENIZER_CONFIG} changes the ids of a text, and it {why}: save the folder with transformers, \
         whose tokenizer.json then has the setting, or remove the key"
    )
}

/// The normalizer with the setting `name` as `given`; `None` where nothing changes.
fn changed_normalizer(
    normalizer: &Value,
    changed: Option<Value>,
    name: &str,
    given: &Value,
) -> Result<Option<Value>, ()> {
    if normalizer["type"] == "BertNormalizer" {
        let keeps = normalizer[name] == *given || given.is_null() && name != "strip_accents";
        if keeps {
            return Ok(changed);
        }
        let mut changed = changed.unwrap_or_else(|| normalizer.clone());
        changed[name] = given.clone();
        return Ok(Some(changed));
    }
    // Other normalizers either do what the key says, or cannot be told to.
    let does = match name {
        "lowercase" => contains(normalizer, &|part| part["type"] == "Lowercase"),
        "strip_accents" => contains(normalizer, &|part| part["type"] == "StripAccents"),
        _ => return Ok(changed),
    };
    if given.as_bool().is_none_or(|given| given == does) { Ok(changed) } else { Err(()) }
}

/// Returns whether a part, or one of those in a sequence, satisfies `is_such`.
fn contains(part: &Value, is_such: &dyn Fn(&Value) -> bool) -> bool {
    let inner = ["normalizers", "pretokenizers"].iter().filter_map(|key| part[*key].as_array());
    is_such(part) || inner.flatten().any(|part| contains(part, is_such))
}

/// Returns whether a text gets a space before its first word.
fn has_prefix_space(normalizer: &Value, pre_tokenizer: &Value) -> bool {
    contains(normalizer, &|part| part["type"] == "Prepend")
        || contains(pre_tokenizer, &|part| match part["type"].as_str() {
            Some("ByteLevel") => part["add_prefix_space"] != false,
            Some("Metaspace") => match part["prepend_scheme"].as_str() {
                Some(scheme) => scheme != "never",
                None => part["add_prefix_space"] != false,
            },
            _ => false,
        })
}

/// Sets it in the parts that add such a space; returns whether there is one.
fn set_prefix_space(part: &mut Value, given: bool) -> bool {
    match part["type"].as_str() {
        Some("ByteLevel") => part["add_prefix_space"] = json!(given),
        Some("Metaspace") => {
            let scheme = if given { "always" } else { "never" };
            part["prepend_scheme"] = json!(scheme);
            if let Some(part) = part.as_object_mut() {
                part.remove("add_prefix_space");
            }
        }
        Some("Sequence") => {
            let parts = part["pretokenizers"].as_array_mut().into_iter().flatten();
            // All of them, also behind the first that has the key.
            return parts.filter_map(|part| set_prefix_space(part, given).then_some(())).count() > 0;
        }
        _ => return false,
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(clippy::too_many_lines, reason = "a list of cases")]
    fn keys_are_applied_or_refused() {
        let bytes = |prefix: bool| json!({"type": "ByteLevel", "add_prefix_space": prefix});
        let sequence =
            |prefix: bool| json!({"type": "Sequence", "pretokenizers": [{"type": "Digits"}, bytes(prefix)]});
        let meta = |scheme: &str| json!({"type": "Metaspace", "prepend_scheme": scheme});
        let bert = |lower: bool, accents: Value| json!({"type": "BertNormalizer", "lowercase": lower, "strip_accents": accents});
        let lower = json!({"type": "Sequence", "normalizers": [{"type": "Lowercase"}]});
        let prepend = json!({"type": "Prepend", "prepend": "▁"});
        let none = Value::Null;
        let changed = |normalizer: Value, pre_tokenizer: Value| [normalizer, pre_tokenizer];
        let table = [
            (json!({}), &none, bytes(false), Ok(changed(none.clone(), none.clone()))),
            (json!({"add_prefix_space": true}), &none, bytes(false), Ok(changed(none.clone(), bytes(true)))),
            (json!({"add_prefix_space": true}), &none, bytes(true), Ok(changed(none.clone(), none.clone()))),
            (
                json!({"add_prefix_space": false}),
                &none,
                sequence(true),
                Ok(changed(none.clone(), sequence(false))),
            ),
            (
                json!({"add_prefix_space": false}),
                &none,
                meta("first"),
                Ok(changed(none.clone(), meta("never"))),
            ),
            (json!({"add_prefix_space": null}), &none, bytes(true), Ok(changed(none.clone(), none.clone()))),
            (
                json!({"add_prefix_space": true}),
                &none,
                json!({"type": "Whitespace"}),
                Err("add_prefix_space = true"),
            ),
            (
                json!({"add_prefix_space": true}),
                &prepend,
                none.clone(),
                Ok(changed(none.clone(), none.clone())),
            ),
            (json!({"add_prefix_space": false}), &prepend, none.clone(), Err("add_prefix_space = false")),
            (json!({"add_prefix_space": 1}), &none, bytes(true), Err("neither true nor false")),
            (
                json!({"do_lower_case": false}),
                &bert(true, none.clone()),
                none.clone(),
                Ok(changed(bert(false, none.clone()), none.clone())),
            ),
            (
                json!({"do_lower_case": false, "strip_accents": true}),
                &bert(true, none.clone()),
                none.clone(),
                Ok(changed(bert(false, json!(true)), none.clone())),
            ),
            (
                json!({"do_lower_case": true, "strip_accents": null}),
                &bert(true, json!(true)),
                none.clone(),
                Ok(changed(bert(true, none.clone()), none.clone())),
            ),
            (json!({"do_lower_case": true}), &lower, none.clone(), Ok(changed(none.clone(), none.clone()))),
            (json!({"do_lower_case": false}), &lower, none.clone(), Err("do_lower_case = false")),
            (json!({"do_lower_case": true}), &none, bytes(false), Err("do_lower_case = true")),
            (json!({"do_lower_case": false}), &none, bytes(false), Ok(changed(none.clone(), none.clone()))),
            (
                json!({"do_basic_tokenize": false}),
                &bert(true, none.clone()),
                none.clone(),
                Err("do_basic_tokenize"),
            ),
            (json!({"never_split": ["x"]}), &bert(true, none.clone()), none.clone(), Err("never_split")),
        ];
        for (config, normalizer, pre_tokenizer, expected) in table {
            let found = changes(&config, normalizer, &pre_tokenizer);
            match (found, expected) {
                (Ok((changes, applied)), Ok([normalizer, pre_tokenizer])) => {
                    let or_null = |part: Option<Value>| part.unwrap_or_default();
                    assert_eq!(or_null(changes.normalizer), normalizer, "{config}");
                    assert_eq!(or_null(changes.pre_tokenizer), pre_tokenizer, "{config}");
                    assert_eq!(
                        applied.is_empty(),
                        normalizer.is_null() && pre_tokenizer.is_null(),
                        "{config}"
                    );
                }
                (Err(reason), Err(part)) => assert!(reason.contains(part), "{config}: {reason}"),
                (found, expected) => panic!("{config}: {found:?} in place of {expected:?}"),
            }
        }
    }
}
