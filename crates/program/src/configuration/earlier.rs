//! Stored settings of an earlier version that this version does not know.

use anyhow::Result;
use phalanx_train::RunConfig;
use serde::Deserialize;
use serde_json::Value as Json;
use toml::Table;

/// Keys of which something is gone.
const KEYS: [&str; 3] = ["parallel.timeout_s", "memory.keep_packed_weights", "precision.products"];

/// Checks whether a stored value no longer exists. Returns notes on the consequences for the run, which are empty if there are none; `None`
/// for a value that still exists.
fn gone(key: &str, value: &str) -> Option<Vec<String>> {
    let now = match (key, value) {
        ("parallel.timeout_s", _) | ("memory.keep_packed_weights", "off") => return Some(Vec::new()),
        ("memory.keep_packed_weights", _) => {
            "every product packs its weight, with the same bits and less memory"
        }
        ("precision.products", "split2") => {
            "products are those of \"auto\" from here on, which round no f32 to 16 bits"
        }
        _ => return None,
    };
    Some(vec![format!("{key} = {value:?} of the run is left out, since this version has it no more: {now}")])
}

/// Budgets, each with the key in which earlier versions wrote what they had decided for it.
const BUDGETS: [(&str, &str); 2] =
    [("device_budget_mb", "device_budget_filled_mb"), ("host_budget_mb", "host_budget_filled_mb")];

/// Removes from a stored configuration what is gone; returns notes that name what had a meaning.
fn strip(stored: &mut Json) -> Vec<String> {
    let mut notes = Vec::new();
    for name in KEYS {
        let place = name.split_once('.').and_then(|(table, key)| Some((stored.get_mut(table)?, key)));
        if let Some((Json::Object(table), key)) = place
            && let Some(value) = table.get(key)
            && let Some(note) = gone(name, value.as_str().unwrap_or_default())
        {
            table.remove(key);
            notes.extend(note);
        }
    }
    for (budget, filled) in BUDGETS {
        if let Some(Json::Object(memory)) = stored.get_mut("memory")
            && let Some(filled) = memory.remove(filled)
            && memory.get(budget) == Some(&filled)
        {
            let decided = &mut stored["recorded"]["decided"];
            let mut all = decided.as_array().cloned().unwrap_or_default();
            all.push(format!("memory.{budget}").into());
            *decided = all.into();
        }
    }
    notes
}

/// Removes from a stored configuration what is gone; returns notes that name what had a meaning.
///
/// # Errors
/// None for what was read from TOML.
pub fn leave_out(stored: &mut Table) -> Result<Vec<String>> {
    let mut json = serde_json::to_value(&*stored)?;
    let notes = strip(&mut json);
    *stored = Table::try_from(json)?;
    Ok(notes)
}

/// The configuration that a checkpoint holds, without what is gone, and notes that name what had a meaning.
///
/// # Errors
/// A configuration that this version cannot read.
pub fn config_of_checkpoint(state: &Json) -> serde_json::Result<(RunConfig, Vec<String>)> {
    let mut config = state["config"].clone();
    let notes = strip(&mut config);
    Ok((RunConfig::deserialize(config)?, notes))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::configuration::keys;

    /// Settings that earlier versions stored are read, and those that were not the default are named.
    #[test]
    fn what_earlier_versions_stored_is_read_and_named() {
        for (stored, named) in [
            ("[parallel]\ntimeout_s = 9.0", ""),
            ("[memory]\nkeep_packed_weights = \"off\"", ""),
            ("[memory]\nkeep_packed_weights = \"on\"", "memory.keep_packed_weights = \"on\""),
            ("[precision]\nproducts = \"split2\"", "precision.products = \"split2\""),
        ] {
            let tables: Table = toml::from_str(stored).unwrap();
            assert!(keys::check(&tables, "stored", stored).is_err(), "{stored}");
            let mut left = tables.clone();
            let notes = leave_out(&mut left).unwrap();
            assert_eq!(
                RunConfig::deserialize(toml::Value::Table(left)).unwrap(),
                RunConfig::default(),
                "{stored}"
            );
            assert!(notes.concat().starts_with(named) && notes.is_empty() == named.is_empty(), "{notes:?}");
            let of_checkpoint = config_of_checkpoint(&json!({ "config": tables })).unwrap();
            assert_eq!(of_checkpoint, (RunConfig::default(), notes), "{stored}");
        }
        assert!(config_of_checkpoint(&json!({ "config": { "memory": { "placment": 1 } } })).is_err());
    }

    /// Earlier versions wrote a budget that they had decided into a second key.
    #[test]
    fn budgets_that_were_decided_are_known_as_such() {
        for (filled, is_decided) in [(300.0, true), (200.0, false)] {
            let memory = json!({ "device_budget_mb": 300.0, "device_budget_filled_mb": filled });
            let (config, _) = config_of_checkpoint(&json!({ "config": { "memory": memory } })).unwrap();
            assert_eq!(config.memory.device_budget_mb, Some(300.0));
            assert_eq!(config.is_decided("memory.device_budget_mb"), is_decided);
            assert!(!config.is_decided("memory.host_budget_mb"));
        }
    }
}
