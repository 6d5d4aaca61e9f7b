//! The sealed memory file by which a launcher tells its ranks what to do, with the plan that it has made for them.
//!
//! Planning a run means running its ranks dry, so the launcher does it once. Each rank reads the head of the file and
//! its own plan, and no other rank's. The file may be of any length, and no other user can read it.
//!
//! ```text
//! 8 bytes     length of the head, little-endian
//! head        JSON: the task, the part of the plan that all ranks need, and where the plan of each rank lies
//! rank plans  JSON, one after another; ranks with equal plans share one
//! ```

use std::collections::HashMap;
use std::ops::Range;

use anyhow::{Context, Result};
use phalanx_collectives::SealedFile;
use phalanx_models::from_config;
use phalanx_train::planning::PlanForAllRanks;
use phalanx_train::{RankPlan, RunPlan, Spec};
use serde::{Deserialize, Serialize};

use crate::jobs::task::Task;
use crate::plans::planned::Planned;

/// Bytes that hold the length of the head.
const LENGTH_BYTES: u64 = 8;

/// The part of the file before the plans of the ranks.
#[derive(Serialize, Deserialize)]
struct Head {
    task: Task,
    /// For a task that trains or steps.
    plan: Option<PlanForAllRanks>,
    /// For each rank: its plan, as bytes counted from the end of the head.
    ranks: Vec<Range<u64>>,
}

/// The content of the file for a task, and for the plan of the run that the task is about.
///
/// # Errors
/// A rank that was represented by another and cannot be planned itself.
pub fn encode(task: &Task, plan: Option<&RunPlan>) -> Result<Vec<u8>> {
    let mut plans = Vec::new();
    let mut known: HashMap<Vec<u8>, Range<u64>> = HashMap::new();
    let mut ranks = Vec::new();
    if let Some(plan) = plan {
        for rank in 0..plan.spec.world_size() {
            let text = serde_json::to_vec(&*plan.exact(rank)?)?;
            let range = known.entry(text).or_insert_with_key(|text| {
                let first = plans.len() as u64;
                plans.extend_from_slice(text);
                first..plans.len() as u64
            });
            ranks.push(range.clone());
        }
    }
    let head = Head { task: task.clone(), plan: plan.map(RunPlan::for_all_ranks), ranks };
    let head = serde_json::to_vec(&head)?;
    Ok([&(head.len() as u64).to_le_bytes()[..], &head, &plans].concat())
}

/// The task of `rank`, and what the launcher has planned for it.
///
/// # Errors
/// A file that was not written by a launcher.
pub fn read(file: &SealedFile, rank: usize) -> Result<(Task, Option<Planned>)> {
    let length = file.read(0..LENGTH_BYTES).context("the length of the head")?;
    let length = u64::from_le_bytes(length.try_into().expect("`read` returns the requested number of bytes"));
    let end = LENGTH_BYTES.saturating_add(length);
    let head: Head = serde_json::from_slice(&file.read(LENGTH_BYTES..end)?).context("the head")?;
    let Head { task, plan, ranks } = head;
    let planned = match plan {
        None => None,
        Some(shared) => {
            let own = ranks.get(rank).with_context(|| format!("the file has no plan of rank {rank}"))?;
            let range = end.saturating_add(own.start)..end.saturating_add(own.end);
            let own: RankPlan = serde_json::from_slice(&file.read(range)?).context("the plan of the rank")?;
            Some(planned(&task, shared, RankPlan { rank, ..own })?)
        }
    };
    Ok((task, planned))
}

/// The planned run in the process of one rank.
fn planned(task: &Task, shared: PlanForAllRanks, own: RankPlan) -> Result<Planned> {
    let (config, model) = task.run().context("a plan for a task that runs no model")?;
    let PlanForAllRanks { stages, chunks, residence, threads, evaluated, totals } = shared;
    let spec =
        Spec::with_stages(config, from_config(model)?, evaluated, threads, (stages, chunks, residence))?;
    Ok(Planned::of_one_rank(config.clone(), RunPlan::of_one_rank(spec, totals, own)))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::IntoRawFd;

    use phalanx_collectives::{HostJob, take_sealed};
    use phalanx_models::{Gpt2, Model};
    use phalanx_train::{ResolvedConfig, RunConfig};

    use super::*;
    use crate::jobs::task::BenchStepTask;

    fn sealed(bytes: &[u8]) -> SealedFile {
        let mut job = HostJob::new(1).unwrap();
        let fd = job.hand_over(bytes).unwrap();
        take_sealed(File::open(format!("/proc/self/fd/{fd}")).unwrap().into_raw_fd()).unwrap()
    }

    /// Two pipeline stages on two replicas that share parameters.
    fn task() -> (Task, Planned) {
        let mut config = RunConfig::default();
        config.model.seq = 16;
        (config.batch.global, config.batch.micro) = (8, Some(2));
        (config.parallel.pipeline, config.parallel.data, config.parallel.zero) = (2, Some(2), 3);
        let config = ResolvedConfig::new(config).unwrap();
        let model = Gpt2 { layers: 2, hidden: 32, heads: 4, vocab: 50, positions: 16, ..Gpt2::default() };
        let task = BenchStepTask { config: config.clone(), model: model.to_config(), warmup: 1, steps: 2 };
        (Task::BenchStep(task), Planned::new(config, model.into(), 8).unwrap())
    }

    #[test]
    fn every_rank_reads_its_own_plan_and_the_totals() {
        let (task, planned) = task();
        let plan = &planned.plan;
        let file = sealed(&encode(&task, Some(plan)).unwrap());
        for rank in 0..4 {
            let own = read(&file, rank).unwrap().1.unwrap();
            assert_eq!(own.plan.of(rank), plan.of(rank));
            assert_eq!((own.plan.ranks.len(), own.plan.for_all_ranks()), (1, plan.for_all_ranks()));
            assert_eq!(own.plan.spec.mesh.ties, plan.spec.mesh.ties);
            assert_eq!((own.plan.textbook, own.config), (plan.textbook, planned.config.clone()));
        }
        let error = read(&file, 4).err().unwrap().to_string();
        assert!(error.contains("no plan of rank 4"), "{error}");
    }

    #[test]
    fn a_file_that_is_cut_or_says_impossible_lengths_is_refused() {
        let (task, planned) = task();
        let whole = encode(&task, Some(&planned.plan)).unwrap();
        for cut in [0, 7, 8, 100, whole.len() - 1] {
            assert!(read(&sealed(&whole[..cut]), 3).is_err(), "{cut}");
        }
        for length in [0, 1, u64::MAX, u64::MAX - 7] {
            let mut changed = whole.clone();
            changed[..8].copy_from_slice(&length.to_le_bytes());
            assert!(read(&sealed(&changed), 0).is_err(), "{length}");
        }
    }
}
