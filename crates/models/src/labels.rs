//! Names of classes: in a configuration a list, in a `config.json` of transformers `id2label`, `label2id` and `num_labels`.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::ModelError;
use crate::config::{contradiction, wrong};
use crate::limits::MAX_LABELS;

/// Name of a model with a class head in `architectures`, behind the name of its family.
pub(crate) const CLASSIFIER: &str = "ForSequenceClassification";

/// The requirement that names do not meet; None if they meet all.
pub(crate) fn refuse(names: &[String]) -> Option<String> {
    if !(2..=MAX_LABELS).contains(&names.len()) {
        return Some(format!("must have 2 to {MAX_LABELS} names, one for each class"));
    }
    let mut seen = std::collections::BTreeSet::new();
    names.iter().find_map(|name| match name.trim().is_empty() {
        true => Some("has a class without a name".to_string()),
        false => (!seen.insert(name)).then(|| format!("has the class {name:?} twice")),
    })
}

/// The names in a list.
pub(crate) fn listed(list: &Value) -> Vec<String> {
    list.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_string).collect()
}

/// Names of classes that have none: those of transformers.
pub fn numbered(count: usize) -> Vec<String> {
    (0..count).map(|class| format!("LABEL_{class}")).collect()
}

/// The names of the classes that a model with a class head has, by its `config.json`; none for a model with another head.
///
/// # Errors
/// Numbers and names that do not go together, and a head that does not choose one class of several.
pub(crate) fn read(config: &Value) -> Result<Vec<String>, ModelError> {
    let architectures = listed(&config["architectures"]);
    if !architectures.iter().any(|name| name.ends_with(CLASSIFIER)) {
        return Ok(Vec::new());
    }
    match &config["problem_type"] {
        Value::Null => {}
        Value::String(given) if given == "single_label_classification" => {}
        given => {
            let expected = "null or \"single_label_classification\": one class of several for each row. Regression and several \
                            classes of one row are not computed here";
            return Err(wrong("problem_type", given, expected));
        }
    }
    let given = config.get("num_labels").filter(|given| !given.is_null());
    let names = match config.get("id2label").filter(|given| !given.is_null()) {
        Some(map) => in_order(map)?,
        None => numbered(given.map_or(2, |given| given.as_u64().unwrap_or(0).min(1 << 20) as usize)),
    };
    if let Some(given) = given.filter(|given| given.as_u64() != Some(names.len() as u64)) {
        return Err(contradiction(["num_labels", "id2label"], given, &config["id2label"]));
    }
    if names.len() == 1 {
        let expected = "at least 2: one is a regression in transformers, which is not computed here";
        return Err(wrong("num_labels", 1, expected));
    }
    if let Some(expected) = refuse(&names) {
        return Err(wrong("id2label", &config["id2label"], &format!("names of classes; it {expected}")));
    }
    let ids = config.get("label2id").filter(|given| !given.is_null());
    match ids.filter(|ids| **ids != Value::from(ids_of(&names))) {
        Some(ids) => Err(contradiction(["label2id", "id2label"], ids, &config["id2label"])),
        None => Ok(names),
    }
}

/// The names of `id2label`, whose keys are 0, 1, 2 ...
fn in_order(map: &Value) -> Result<Vec<String>, ModelError> {
    let expected = "a table with a name for each of the numbers 0, 1, 2 ...";
    let refused = || wrong("id2label", map, expected);
    let by_number =
        |(number, name): (&String, &Value)| Some((number.parse::<usize>().ok()?, name.as_str()?.to_string()));
    let entries = map.as_object().ok_or_else(refused)?.iter();
    let names: BTreeMap<usize, String> = entries.map(by_number).collect::<Option<_>>().ok_or_else(refused)?;
    match names.keys().copied().eq(0..names.len()) {
        true => Ok(names.into_values().collect()),
        false => Err(refused()),
    }
}

fn ids_of(names: &[String]) -> Map<String, Value> {
    names.iter().enumerate().map(|(class, name)| (name.clone(), class.into())).collect()
}

/// Writes the names into a `config.json`.
pub(crate) fn write(config: &mut Value, family: &str, names: &[String]) {
    let id2label: Map<String, Value> =
        names.iter().enumerate().map(|(class, name)| (class.to_string(), name.as_str().into())).collect();
    config["architectures"] = json!([format!("{family}{CLASSIFIER}")]);
    config["id2label"] = id2label.into();
    config["label2id"] = ids_of(names).into();
    config["problem_type"] = "single_label_classification".into();
}
