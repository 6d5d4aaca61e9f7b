//! Changes of a configuration that make a run need less memory, as options of a command: what can be changed, from mild to strong.

use phalanx_train::config::{Checkpointing, CheckpointingWord, Tier};

use crate::arguments::overrides::{Overrides, RANKS};
use crate::configuration::keys;
use crate::plans::planned::Planned;

/// The folder that stands for the user's in changes that use a disk, where the configuration names none.
pub const FOLDER: &str = "/mnt/nvme";

/// Largest number of times that the ranks of a run are doubled.
const DOUBLINGS: usize = 6;

/// Devices of a common machine, among which tensors are divided at most.
const TENSOR_RANKS: usize = 8;

/// Options of a command, each key once.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Changes {
    nproc: Option<usize>,
    set: Vec<(&'static str, String)>,
}

/// Changes of one kind, from mild to strong. Each holds what the ones before it do.
pub type Axis = Vec<Changes>;

impl Changes {
    /// One key.
    fn set(key: &'static str, value: impl ToString) -> Changes {
        Changes { nproc: None, set: vec![(key, value.to_string())] }
    }

    /// The number of ranks.
    fn ranks(ranks: usize) -> Changes {
        Changes { nproc: Some(ranks), set: Vec::new() }
    }

    /// Both. Of two values of a key, `other`'s counts.
    pub fn and(&self, other: &Changes) -> Changes {
        let kept = self.set.iter().filter(|(key, _)| !other.has(key)).cloned();
        let mut set: Vec<_> = kept.chain(other.set.iter().cloned()).collect();
        set.sort();
        Changes { nproc: other.nproc.or(self.nproc), set }
    }

    fn has(&self, key: &str) -> bool {
        key == RANKS && self.nproc.is_some() || self.set.iter().any(|(own, _)| *own == key)
    }

    /// The options of a command with these changes: they replace those of the same keys, and of keys that follow from them.
    pub fn applied_to(&self, given: &Overrides) -> Overrides {
        let replaced = |text: &str| {
            let key = text.split_once('=').map_or(text, |(key, _)| key).trim();
            self.has(key) || keys::either(key).is_some_and(|other| self.has(&other))
        };
        let kept = given.set.iter().filter(|text| !replaced(text)).cloned();
        let own = self.set.iter().map(|(key, value)| format!("{key}={value}"));
        let unset = given.unset.iter().filter(|key| !self.has(key.trim())).cloned().collect();
        Overrides {
            set: kept.chain(own).collect(),
            unset,
            nproc: self.nproc.or(given.nproc),
            ..given.clone()
        }
    }

    /// Returns whether an assumed folder stands for the user's.
    pub fn assumes_folder(&self) -> bool {
        self.set.iter().any(|(key, value)| *key == "memory.nvme_path" && value == FOLDER)
    }
}

/// Higher ZeRO stages.
pub fn zero(planned: &Planned) -> Axis {
    let config = &planned.config;
    let stages = (config.parallel.zero + 1..=3).filter(|_| config.data() > 1);
    stages.map(|stage| Changes::set("parallel.zero", stage)).collect()
}

/// More activations computed again.
pub fn checkpointing(planned: &Planned) -> Axis {
    use CheckpointingWord::{Block, None, Selective};
    let words: &[&str] = match planned.config.memory.checkpointing {
        Checkpointing::Word(None) => &["selective", "block"],
        Checkpointing::Word(Block) | Checkpointing::Every(1) => &[],
        Checkpointing::Word(Selective) | Checkpointing::Every(_) => &["block"],
    };
    words.iter().map(|word| Changes::set("memory.checkpointing", word)).collect()
}

/// Smaller micro-batches: halves, as long as they are whole.
pub fn micro(planned: &Planned) -> Axis {
    let halves = std::iter::successors(Some(planned.plan.spec.batch.micro_batch_size), |size| {
        size.is_multiple_of(2).then(|| size / 2)
    });
    halves.skip(1).map(|size| Changes::set("batch.micro", size)).collect()
}

/// States outside of device memory: first what a step uses once, then parameters, then the inputs of blocks.
pub fn away(planned: &Planned, tier: Tier) -> Axis {
    let (memory, word) = (&planned.config.memory, if tier == Tier::Nvme { "nvme" } else { "host" });
    let folder = match tier {
        Tier::Nvme if memory.nvme_path.is_none() => Changes::set("memory.nvme_path", FOLDER),
        _ => Changes::default(),
    };
    let stage = Changes::set("parallel.zero", 3);
    let mut levels = match memory.placement {
        // It decides for all parts.
        Some(_) => vec![vec![Changes::set("memory.placement", word)], vec![stage]],
        None => vec![
            vec![Changes::set("memory.optimizer", word)],
            vec![Changes::set("memory.gradients", word)],
            vec![stage, Changes::set("memory.parameters", word)],
        ],
    };
    if memory.update_in_backward && memory.placement.is_none() {
        // No gradients are kept.
        levels.remove(1);
    }
    levels.push(vec![Changes::set("memory.activations", word)]);
    let mut sum = folder;
    let mut level = |changes: Vec<Changes>| {
        sum = changes.iter().fold(sum.clone(), |sum, change| sum.and(change));
        sum.clone()
    };
    levels.into_iter().map(&mut level).collect()
}

/// As much outside of device memory as its budget asks for.
pub fn auto(planned: &Planned) -> Axis {
    let memory = &planned.config.memory;
    let mut changes = Changes::set("memory.placement", "auto");
    if planned.plan.spec.device.host_addressable && memory.nvme_path.is_none() {
        changes = changes.and(&Changes::set("memory.nvme_path", FOLDER));
    }
    vec![changes.clone(), changes.and(&Changes::set("parallel.zero", 3))]
}

/// Fewer replicas, for ranks that share a memory.
pub fn fewer_ranks(planned: &Planned) -> Axis {
    let mesh = planned.plan.spec.mesh.axes;
    let fewer = (1..mesh.data).rev().filter(|data| mesh.data.is_multiple_of(*data));
    fewer.map(|data| Changes::ranks(mesh.pipeline * data * mesh.tensor)).collect()
}

/// More replicas, which share the states under ZeRO.
pub fn more_replicas(planned: &Planned, stage: u8) -> Axis {
    let (own, ranks) = (planned.config.parallel.zero, planned.plan.spec.world_size());
    let with = |ranks| match stage == own {
        true => Changes::ranks(ranks),
        false => Changes::ranks(ranks).and(&Changes::set("parallel.zero", stage)),
    };
    doubled(ranks).map(with).collect()
}

/// More tensor ranks, among which heads can be divided, then more pipeline ranks as well.
pub fn larger_meshes(planned: &Planned) -> Axis {
    let mesh = planned.plan.spec.mesh.axes;
    let model = &planned.plan.spec.model.definition;
    let tensors = doubled(mesh.tensor).take_while(|tensor| *tensor <= TENSOR_RANKS);
    let tensors: Vec<usize> = tensors.filter(|tensor| model.check_cut(*tensor).is_ok()).collect();
    let largest = tensors.last().copied().unwrap_or(mesh.tensor);
    let of = |pipeline: usize, tensor: usize| {
        let ranks = Changes::ranks(pipeline * mesh.data * tensor);
        let keys = [("parallel.tensor", tensor, mesh.tensor), ("parallel.pipeline", pipeline, mesh.pipeline)];
        let changed = keys.into_iter().filter(|(_, value, own)| value != own);
        changed.fold(ranks, |ranks, (key, value, _)| ranks.and(&Changes::set(key, value)))
    };
    let pipelines = doubled(mesh.pipeline).take_while(|pipeline| *pipeline <= model.whole().layers());
    let flat = tensors.iter().map(|tensor| of(mesh.pipeline, *tensor));
    flat.chain(pipelines.map(|pipeline| of(pipeline, largest))).collect()
}

fn doubled(from: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(2 * from), |n| Some(2 * n)).take(DOUBLINGS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_replace_the_options_that_they_contradict() {
        let words = |set: &[&str], nproc| Overrides {
            set: set.iter().map(ToString::to_string).collect(),
            nproc,
            ..Overrides::default()
        };
        let given = words(
            &["train.seed=2", "parallel.data = 2", "parallel.micro_batches=4", "parallel.zero=1"],
            Some(4),
        );
        let changes =
            Changes::ranks(8).and(&Changes::set("parallel.zero", 2)).and(&Changes::set("batch.micro", 1));
        let applied = changes.and(&Changes::set("parallel.zero", 3)).applied_to(&given);
        assert_eq!(applied.set, ["train.seed=2", "batch.micro=1", "parallel.zero=3"]);
        assert_eq!(applied.nproc, Some(8));
        assert_eq!(Changes::set("parallel.zero", 3).applied_to(&given).nproc, Some(4));
    }
}
