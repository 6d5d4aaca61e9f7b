//! Stored keys that no longer hold on resume: those of another device, and those that contradict the keys given now.
//!
//! A resumed run's configuration is the stored one with the keys given now. Where a key needs another value of a key than the one that it has
//! (`phalanx_train::config::Need`), the stored one of the two gives way, if that leaves what is trained alone, and is named.

use std::iter;

use anyhow::{Result, bail};
use phalanx_train::RunConfig;
use phalanx_train::config::{Key, Resume};

use crate::configuration::changed_keys::changed_keys;
use crate::configuration::keys;
use crate::configuration::user_config::UserConfig;

/// Removes stored keys that belong to a value that another key has no more, and those that contradict the keys that are `said` now; returns
/// notes that name them.
///
/// # Errors
/// A stored key that contradicts what is said, and does not give way.
pub fn leave_out(
    given: &mut UserConfig,
    configs: [&RunConfig; 2],
    said: impl Fn(&str) -> bool,
) -> Result<Vec<String>> {
    let mut notes = leave_out_of_others(given, configs, &said)?;
    notes.extend(leave_out_contradicting(given, &said)?);
    Ok(notes)
}

/// Removes stored keys, each with the refusal of the configuration that they were part of, until it is valid: those that say where and how a
/// step is computed, those that mean nothing beside what is `said` now, and those that the program had decided. Nothing is removed where
/// that does not suffice; returns notes that name them.
///
/// # Errors
/// A stored key that contradicts what is said, and does not give way.
fn leave_out_contradicting(given: &mut UserConfig, said: impl Fn(&str) -> bool) -> Result<Vec<String>> {
    let (mut kept, mut notes) = (given.clone(), Vec::new());
    while let Err(error) = kept.config()?.check() {
        let is_stored = |key: &str| kept.has(key) && !said(key);
        let gives_way = |key: &&str| {
            let is_free = keys::find(key).is_some_and(|known| known.resume == Resume::Free);
            is_stored(key) && (is_free || kept.is_decided(key) || *key == error.key && error.means_nothing)
        };
        let involved = iter::once(&*error.key).chain(error.others.iter().copied());
        let Some(left) = involved.map(str::to_string).find(|key| gives_way(&key.as_str())) else {
            if is_stored(&error.key) && !error.key.starts_with("model.") {
                bail!(
                    "{error}; the run has this {0}: give another with --set {0}=VALUE, or --unset {0}",
                    error.key
                );
            }
            return Ok(Vec::new());
        };
        kept.leave_out(&left);
        notes.push(format!("{left} of before left out: {error}"));
    }
    *given = kept;
    Ok(notes)
}

/// Removes the stored keys that belong to the value that another key had before, except those that are `said` again; returns notes that
/// name them.
fn leave_out_of_others(
    given: &mut UserConfig,
    [before, now]: [&RunConfig; 2],
    said: impl Fn(&str) -> bool,
) -> Result<Vec<String>> {
    let mut notes = Vec::new();
    for change in changed_keys(before, now)? {
        let path = change.key.path();
        let belonging = keys::all().iter().filter(|key| key.unset_by == path).map(Key::path);
        let left: Vec<String> = belonging.filter(|key| given.has(key) && !said(key)).collect();
        left.iter().for_each(|key| given.leave_out(key));
        if !left.is_empty() {
            notes.push(format!("{change}: {} of before left out", left.join(", ")));
        }
    }
    Ok(notes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arguments::overrides::Overrides;

    fn is_valid(given: &UserConfig) -> bool {
        given.config().is_ok_and(|config| config.check().is_ok())
    }

    #[test]
    fn another_device_has_memory_limits_of_its_own() {
        let card = "[device]\nkind = \"cuda\"\nmemory_mb = 9000\ncommunication = \"host\"\n[memory]\nplacement = \"auto\"\n\
                    device_budget_mb = 8000\nhost_budget_mb = 500";
        let processor = "[device]\nkind = \"cpu\"\n[memory]\nplacement = \"auto\"\ndevice_budget_mb = 300";
        let kept = |stored: &str, kind: &str, said: &str| {
            let stored = UserConfig::of_text(stored).unwrap();
            let set = vec![format!("device.kind={kind}")];
            let mut given = stored.clone().with(&Overrides { set, ..Overrides::default() }, &[]).unwrap();
            let (before, now) = (stored.config().unwrap(), given.config().unwrap());
            let notes = leave_out_of_others(&mut given, [&before, &now], |key| key == said).unwrap();
            let config = given.config().unwrap();
            assert!(kind == "cuda" || config.device.communication.is_auto(), "{kind}");
            let budgets =
                [config.device.memory_mb, config.memory.device_budget_mb, config.memory.host_budget_mb];
            (budgets, !notes.is_empty())
        };
        let none = "";
        assert_eq!(kept(card, "cuda", none), ([Some(9000.0), Some(8000.0), Some(500.0)], false));
        assert_eq!(kept(card, "cpu", none), ([None; 3], true));
        assert_eq!(kept(card, "cpu", "memory.host_budget_mb"), ([None, None, Some(500.0)], true));
        assert_eq!(kept(processor, "cpu", none), ([None, Some(300.0), None], false));
        assert_eq!(kept(processor, "cuda", none), ([None; 3], true));
    }

    /// Keys that say where a run keeps and computes what: each valid alone, for a new run.
    const PLACEMENTS: [&[&str]; 26] = [
        &["parallel.zero=0"],
        &["memory.placement=device"],
        &["memory.placement=host"],
        &["memory.placement=nvme", "memory.nvme_path=/a", "memory.nvme_checksums=true"],
        &["memory.placement=auto", "memory.device_budget_mb=9", "memory.nvme_path=/a"],
        &[
            "memory.placement=auto",
            "memory.device_budget_mb=9",
            "memory.host_budget_mb=9",
            "memory.headroom=0",
        ],
        &[
            "memory.placement=host",
            "parallel.zero=3",
            "memory.offload_optim_frac=1",
            "memory.offload_param_frac=0.5",
        ],
        &["memory.offload_optim_frac=0.5"],
        &["memory.placement=nvme", "memory.nvme_path=/b", "memory.offload_optim_frac=0.3"],
        &["memory.shard_param_frac=0.5", "parallel.zero=3"],
        &["memory.optimizer=host"],
        &["memory.optimizer=host", "memory.update=device", "memory.buffer_mb=0.5"],
        &["memory.gradients=host"],
        &["memory.optimizer=nvme", "memory.nvme_path=/a", "memory.gradients=nvme"],
        &["memory.parameters=host", "memory.optimizer=host", "memory.gradients=host", "parallel.zero=3"],
        &["memory.parameters=nvme", "memory.nvme_path=/a", "parallel.zero=3", "memory.prefetch=3"],
        &["memory.activations=nvme", "memory.nvme_path=/a", "memory.checkpointing=block"],
        &[
            "memory.optimizer=host",
            "memory.gradients=host",
            "memory.delayed_update=true",
            "precision.compute=bf16",
        ],
        &["memory.placement=host", "parallel.zero=2", "memory.delayed_update=true", "precision.compute=bf16"],
        &["memory.gradients_in_place=true", "precision.compute=bf16", "precision.accumulate=bf16"],
        &["memory.update_in_backward=true", "optimizer.clip=0", "memory.optimizer=host"],
        &["memory.partition_activations=true", "parallel.tensor=2", "parallel.data=1"],
        &["device.kind=simulated", "device.seed=3", "device.copy_gb_per_s=2", "device.memory_mb=64"],
        &["device.kind=simulated", "device.memory_mb=8", "memory.placement=auto"],
        &["device.kind=cuda", "device.memory_mb=9000", "device.communication=host"],
        &["device.kind=cpu", "memory.limit_mb=900", "memory.optimizer=nvme", "memory.nvme_path=/c"],
    ];

    fn overrides(set: &[&str]) -> Overrides {
        Overrides { set: set.iter().map(ToString::to_string).collect(), ..Overrides::default() }
    }

    fn with(config: UserConfig, set: &[&str]) -> UserConfig {
        config.with(&overrides(set), &[]).unwrap()
    }

    /// Every placement follows every other: what was said holds, and what is left out contradicts it.
    #[test]
    fn a_run_with_any_placement_resumes_into_any_other() {
        let base = "[model]\nlayers = 2\nhidden = 32\nheads = 4\n[batch]\nglobal = 4";
        for stored in PLACEMENTS {
            let config = with(UserConfig::of_text(base).unwrap(), stored).config().unwrap();
            config.check().unwrap_or_else(|error| panic!("{stored:?}: {error}"));
            for now in PLACEMENTS {
                let stored_keys = UserConfig::of(&config).unwrap();
                let mut given = with(stored_keys.clone(), now);
                let said = |key: &str| overrides(now).sets(key);
                let configs = [&config, &given.config().unwrap()];
                let notes = leave_out(&mut given, configs, said).unwrap();
                let resumed = given.config().unwrap();
                let refusal = resumed.check().err();
                assert!(refusal.is_none(), "{stored:?}, then {now:?}: {refusal:?}");
                // What is said holds.
                assert_eq!(with(given.clone(), now).config().unwrap(), resumed, "{stored:?}, then {now:?}");
                for (key, value) in stored_keys.keys().filter(|(key, _)| !given.has(key)) {
                    assert!(notes.concat().contains(&key), "{key}: {notes:?}");
                    let mut back = given.clone();
                    back.set(&key, value);
                    let unset_by = keys::find(&key).map_or("", |key| key.unset_by);
                    let is_of_device = unset_by == "device.kind" && config.device.kind != resumed.device.kind;
                    assert!(
                        !is_valid(&back) || is_of_device,
                        "{stored:?}, then {now:?}: {key} need not be left out"
                    );
                }
            }
        }
        // Keys that contradict each other, or something else, are refused as in a new run.
        for now in [
            &["memory.placement=host", "memory.optimizer=nvme"][..],
            &["model.heads=5"],
            &["memory.placement=nvme"],
        ] {
            let stored = UserConfig::of_text(base).unwrap();
            let mut given = with(stored.clone(), now);
            let configs = [&stored.config().unwrap(), &given.config().unwrap()];
            let said = |key: &str| overrides(now).sets(key);
            assert!(leave_out(&mut given, configs, said).unwrap().is_empty() && !is_valid(&given), "{now:?}");
        }
    }
}
