//! Stored settings of an earlier version that this version does not know.

use anyhow::Result;
use phalanx_train::RunConfig;
use serde::Deserialize;
use serde_json::Value as Json;
use toml::Table;

use crate::user_config::UserConfig;

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

/// Writes down the step at which the learning rate's decay ends, which the earliest versions did not: it is their `train.steps`.
///
/// # Errors
/// None for a configuration that was read.
pub fn record_decay(given: &mut UserConfig) -> Result<()> {
    let config = given.config()?;
    if let (None, Some(end)) = (config.schedule.decay_steps, config.decay_end()) {
        given.set_whole("schedule.decay_steps", end);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use phalanx_train::ResolvedConfig;
    use serde_json::json;

    use super::*;
    use crate::overrides::Overrides;
    use crate::{keys, left_out};

    /// The configuration of a resumed run, from the stored one and what is set now.
    fn resumed(stored: &str, set: &[&str]) -> ResolvedConfig {
        let mut stored = UserConfig::of_text(stored).unwrap();
        record_decay(&mut stored).unwrap();
        let overrides =
            Overrides { set: set.iter().map(|set| set.to_string()).collect(), ..Overrides::default() };
        let mut given = stored.clone().with(&overrides, &[]).unwrap();
        let (before, now) = (stored.config().unwrap(), given.config().unwrap());
        left_out::leave_out(&mut given, [&before, &now], |key| overrides.sets(key)).unwrap();
        ResolvedConfig::new(given.config().unwrap()).unwrap()
    }
    /// Runs of earlier versions wrote no `decay_steps`.
    #[test]
    fn a_run_without_the_end_of_its_decay_keeps_every_rate() {
        let old = "[schedule]\nkind = \"cosine\"\nwarmup = 10\nmin_lr = 1e-5\n[train]\nsteps = 100";
        let before = UserConfig::of_text(old).unwrap().config().unwrap().learning_rate();
        assert_eq!(resumed(old, &[]).learning_rate(), before);
        let longer = resumed(old, &["train.steps=200"]);
        assert_eq!((longer.schedule.decay_steps, longer.learning_rate()), (Some(100), before));
        assert_eq!((100..200).map(|step| longer.learning_rate().lr(step)).fold(0.0, f64::max), 1e-5);
        assert_eq!(resumed(old, &["train.steps=50"]).learning_rate(), before);
        assert_eq!(
            resumed(old, &["train.steps=200", "schedule.decay_steps=150"]).schedule.decay_steps,
            Some(150)
        );
    }

    /// A run that ended within its warm-up has no decay to keep.
    #[test]
    fn a_decay_that_never_began_follows_the_steps() {
        let short = "[schedule]\nwarmup = 10\n[train]\nsteps = 5";
        assert_eq!(resumed(short, &[]).schedule.decay_steps, None);
        assert_eq!(resumed(short, &["train.steps=200"]).schedule.decay_steps, Some(200));
    }

    #[test]
    fn a_change_of_kind_needs_no_other_key() {
        let cosine = "[schedule]\ndecay_steps = 100\nrestart_step = 50\n[train]\nsteps = 100";
        let constant = resumed(cosine, &["schedule.kind=constant", "train.steps=200"]);
        assert_eq!((constant.schedule.decay_steps, constant.schedule.restart_step), (None, None));
        let back = "[schedule]\nkind = \"constant\"\n[train]\nsteps = 100";
        let decays = resumed(back, &["schedule.kind=linear", "train.steps=200"]);
        assert_eq!(decays.schedule.decay_steps, Some(200));
    }

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
