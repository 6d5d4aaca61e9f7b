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
use std::sync::Arc;

use anyhow::{Context, Result};
use phalanx_collectives::SealedFile;
use phalanx_models::from_config;
use phalanx_train::planning::PlanForAllRanks;
use phalanx_train::{RankPlan, RunPlan, Spec};
use serde::{Deserialize, Serialize};

use crate::planned::Planned;
use crate::task::Task;

/// Bytes that hold the length of the head.
const LENGTH_BYTES: u64 = 8;

/// What stands before the plans of the ranks.
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
/// A rank that another stood for and that cannot be planned.
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
/// A file that no launcher has written.
pub fn read(file: &SealedFile, rank: usize) -> Result<(Task, Option<Planned>)> {
    let length = file.read(0..LENGTH_BYTES).context("the length of the head")?;
    let length = u64::from_le_bytes(length.try_into().expect("as many bytes as were asked for"));
    let end = LENGTH_BYTES.saturating_add(length);
    let head: Head = serde_json::from_slice(&file.read(LENGTH_BYTES..end)?).context("the head")?;
    let Head { task, plan, ranks } = head;
    let planned = match plan {
        None => None,
        Some(common) => {
            let own = ranks.get(rank).with_context(|| format!("the file has no plan of rank {rank}"))?;
            let range = end.saturating_add(own.start)..end.saturating_add(own.end);
            let own: RankPlan = serde_json::from_slice(&file.read(range)?).context("the plan of the rank")?;
            Some(planned(&task, common, RankPlan { rank, ..own })?)
        }
    };
    Ok((task, planned))
}

/// What the process of one rank has of a planned run.
fn planned(task: &Task, shared: PlanForAllRanks, own: RankPlan) -> Result<Planned> {
    let (config, model) = task.run().context("a plan for a task that runs no model")?;
    let PlanForAllRanks { stages, threads, evaluated, totals } = shared;
    let spec = Spec::with_stages(config, from_config(model)?, evaluated, threads, stages)?;
    Ok(Planned { config: config.clone(), plan: Arc::new(RunPlan::of_one_rank(spec, totals, own)) })
}
