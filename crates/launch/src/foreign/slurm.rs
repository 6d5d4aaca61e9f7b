//! Slurm's variables of a task that `srun` has started. A batch script carries SLURM_PROCID too, but not the variables of a
//! step, and is no rank.
//!
//! Ranks are numbered node by node. Where Slurm numbers tasks otherwise (`--distribution=cyclic`, `plane`, `arbitrary`), the rank of a
//! task follows from its node and its place there; SLURM_GTIDS, the tasks of this node in the order of their places, must agree.

use super::node_list::expand_nodes;
use super::variables::{EnvironmentError, Variables};
use super::{ForeignLauncher, ForeignRank};

const STEP: &str = "SLURM_STEP_NODELIST";
const RANK: &str = "SLURM_PROCID";
const LOCAL: &str = "SLURM_LOCALID";
const NODE: &str = "SLURM_NODEID";
const TASKS: &str = "SLURM_GTIDS";

pub(crate) fn read(variables: &Variables<'_>) -> Result<Option<ForeignRank>, EnvironmentError> {
    if !variables.is_set(STEP) || !variables.is_set(RANK) {
        return Ok(None);
    }
    let number = variables.number(RANK, STEP)?;
    let tasks = variables.number_if_set("SLURM_STEP_NUM_TASKS")?;
    let world_size = match tasks {
        Some(tasks) => tasks,
        None => variables.number("SLURM_NTASKS", RANK)?,
    };
    if number >= world_size {
        return Err(EnvironmentError(format!("{RANK}={number}, but the step has {world_size} tasks")));
    }
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
    let place = place(variables, number, &sizes)?;
    let first: usize = sizes[..place.node].iter().sum();
    let id = |name| variables.text(name).unwrap_or_else(|| "0".to_string());
    let (job, step) = (id("SLURM_JOB_ID"), id("SLURM_STEP_ID"));
    let rendezvous = match variables.master()? {
        Some(master) => master,
        None => (nodes[0].clone(), port(&job, &step)),
    };
    Ok(Some(ForeignRank {
        launcher: ForeignLauncher::Slurm,
        number,
        rank: first + place.local,
        world_size,
        local_rank: place.local,
        local_world_size: sizes[place.node],
        is_local_assumed: false,
        hosts: Some((place.node, nodes.len())),
        job: format!("slurm-{job}-{step}"),
        rendezvous: Some(rendezvous),
        said: String::new(),
    }))
}

/// Node of a task, and the task's number there.
struct TaskNode {
    node: usize,
    /// Its number among the tasks of the node.
    local: usize,
}

/// The place of task `number` of a step whose nodes run `sizes` tasks.
fn place(variables: &Variables<'_>, number: usize, sizes: &[usize]) -> Result<TaskNode, EnvironmentError> {
    let wrong = |text: String| Err(EnvironmentError(text));
    let together = variables.text(TASKS).map(|text| task_ids(&text)).transpose()?;
    let local = match (variables.number_if_set(LOCAL)?, &together) {
        (Some(local), _) => local,
        (None, Some(tasks)) => match tasks.iter().position(|task| *task == number) {
            Some(local) => local,
            None => return wrong(format!("{TASKS}={}: {RANK}={number} is not among them", list(tasks))),
        },
        (None, None) => variables.number(LOCAL, RANK)?,
    };
    let node = match variables.number_if_set(NODE)? {
        Some(node) => node,
        None => node_of(sizes, number),
    };
    let Some(size) = sizes.get(node).copied() else {
        return wrong(format!("{NODE}={node}, but the step has {} nodes", sizes.len()));
    };
    if local >= size {
        return wrong(format!("{LOCAL}={local}, but node {node} runs {size} tasks of the step"));
    }
    let first: usize = sizes[..node].iter().sum();
    match together {
        Some(tasks) if tasks.len() != size || tasks.get(local) != Some(&number) => wrong(format!(
            "{TASKS}={}, but {RANK}={number} is {LOCAL}={local} of the {size} tasks of node {node}",
            list(&tasks)
        )),
        // Where nothing says which tasks a node has, and tasks are not numbered node by node, a place would be a guess.
        None if first + local != number && !variables.is_set(NODE) => wrong(format!(
            "{RANK}={number} with {LOCAL}={local}: tasks are not numbered node by node, and neither {NODE} nor {TASKS} says where \
             this one is; start with srun --distribution=block"
        )),
        Some(_) if first + local != number && !variables.is_set(NODE) => wrong(format!(
            "{TASKS} is set and tasks are not numbered node by node, but {NODE} is {}",
            variables.absence(NODE)
        )),
        _ => Ok(TaskNode { node, local }),
    }
}

/// Reads `0,2,4`.
fn task_ids(text: &str) -> Result<Vec<usize>, EnvironmentError> {
    let ids = text.split(',').map(|id| id.trim().parse::<usize>().ok()).collect::<Option<Vec<_>>>();
    ids.ok_or_else(|| EnvironmentError(format!("{TASKS}={text}: expected numbers of tasks, such as 0,2,4")))
}

fn list(tasks: &[usize]) -> String {
    tasks.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
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
