//! Slurm's variables of a task that `srun` has started. A batch script carries SLURM_PROCID too, but not the variables of a
//! step, and is no rank.

use super::node_list::expand_nodes;
use super::variables::{EnvironmentError, Variables};
use super::{ForeignLauncher, ForeignRank};

pub(crate) fn read(variables: &Variables<'_>) -> Result<Option<ForeignRank>, EnvironmentError> {
    const STEP: &str = "SLURM_STEP_NODELIST";
    const RANK: &str = "SLURM_PROCID";
    if !variables.is_set(STEP) || !variables.is_set(RANK) {
        return Ok(None);
    }
    let rank = variables.number(RANK, STEP)?;
    let local_rank = variables.number("SLURM_LOCALID", RANK)?;
    let tasks = variables.number_if_set("SLURM_STEP_NUM_TASKS")?;
    let world_size = match tasks {
        Some(tasks) => tasks,
        None => variables.number("SLURM_NTASKS", RANK)?,
    };
    let list = variables.required(STEP, RANK)?;
    let nodes = expand_nodes(&list).map_err(|why| EnvironmentError(format!("{STEP}={list}: {why}")))?;
    let per_node = variables.required("SLURM_STEP_TASKS_PER_NODE", RANK)?;
    let sizes = tasks_per_node(&per_node)?;
    if sizes.len() != nodes.len() || sizes.iter().sum::<usize>() != world_size {
        return Err(EnvironmentError(format!(
            "{STEP} has {} nodes and the world {world_size} tasks, but SLURM_STEP_TASKS_PER_NODE={per_node} has {} nodes \
             with {} tasks",
            nodes.len(),
            sizes.len(),
            sizes.iter().sum::<usize>()
        )));
    }
    let node = match variables.number_if_set("SLURM_NODEID")? {
        Some(node) => node,
        None => node_of(&sizes, rank),
    };
    let Some(local_world_size) = sizes.get(node).copied() else {
        return Err(EnvironmentError(format!("SLURM_NODEID={node}, but the step has {} nodes", nodes.len())));
    };
    let first: usize = sizes[..node].iter().sum();
    if first + local_rank != rank {
        return Err(EnvironmentError(format!(
            "{RANK}={rank} with SLURM_LOCALID={local_rank} on node {node} of tasks {per_node}: the ranks of a host must be \
             numbered consecutively; start with srun --distribution=block"
        )));
    }
    let id = |name| variables.text(name).unwrap_or_else(|| "0".to_string());
    let (job, step) = (id("SLURM_JOB_ID"), id("SLURM_STEP_ID"));
    let rendezvous = match variables.master()? {
        Some(master) => master,
        None => (nodes[0].clone(), port(&job, &step)),
    };
    Ok(Some(ForeignRank {
        launcher: ForeignLauncher::Slurm,
        rank,
        world_size,
        local_rank,
        local_world_size,
        hosts: Some((node, nodes.len())),
        job: format!("slurm-{job}-{step}"),
        rendezvous: Some(rendezvous),
    }))
}

/// The node that holds `rank`, if nodes hold `sizes` tasks each.
fn node_of(sizes: &[usize], rank: usize) -> usize {
    let mut end = 0;
    sizes
        .iter()
        .position(|size| {
            end += size;
            rank < end
        })
        .unwrap_or(sizes.len())
}

/// A port that all tasks of a step compute alike, and other steps mostly not: 20000 to 29999.
fn port(job: &str, step: &str) -> u16 {
    let number = |text: &str| text.parse::<u64>().unwrap_or(0);
    20_000 + ((number(job).wrapping_mul(31).wrapping_add(number(step))) % 10_000) as u16
}

/// Expands `2(x3),1` to 2, 2, 2, 1.
fn tasks_per_node(text: &str) -> Result<Vec<usize>, EnvironmentError> {
    const MAX_NODES: usize = 1 << 16;
    let wrong = || {
        EnvironmentError(format!(
            "SLURM_STEP_TASKS_PER_NODE={text}: expected numbers of tasks by node, such as 2(x3),1"
        ))
    };
    let mut sizes = Vec::new();
    for part in text.split(',') {
        let (size, times) = match part.split_once("(x") {
            None => (part, 1),
            Some((size, times)) => (
                size,
                times.strip_suffix(')').and_then(|times| times.parse::<usize>().ok()).ok_or_else(wrong)?,
            ),
        };
        let size =
            size.parse::<usize>().ok().filter(|size| (1..=1 << 20).contains(size)).ok_or_else(wrong)?;
        if times > MAX_NODES || sizes.len() + times > MAX_NODES {
            return Err(wrong());
        }
        sizes.extend(std::iter::repeat_n(size, times));
    }
    Ok(sizes)
}
