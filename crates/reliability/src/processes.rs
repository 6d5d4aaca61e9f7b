//! Reads processes from `/proc`: the ranks of a launcher, members of a process group, memory.

use std::fs;

use rustix::process::{Pid, Signal, kill_process};

/// State, parent and process group in `/proc/PID/stat`, behind the name in brackets.
fn stat(pid: i32) -> Option<(String, i32, i32)> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut words = text.rsplit_once(')')?.1.split_whitespace();
    Some((words.next()?.to_string(), words.next()?.parse().ok()?, words.next()?.parse().ok()?))
}

/// Whether a process runs; one that has ended and that nobody has waited for does not.
pub(crate) fn lives(pid: i32) -> bool {
    stat(pid).is_some_and(|(state, ..)| state != "Z" && state != "X")
}

/// Processes of a group that run.
pub(crate) fn group_members(group: i32) -> Vec<i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten();
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    let runs =
        |pid: &i32| stat(*pid).is_some_and(|(state, _, of)| of == group && state != "Z" && state != "X");
    pids.filter(runs).collect()
}

/// Children of a process, of all its threads.
pub(crate) fn children(pid: i32) -> Vec<i32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let lists = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    lists
        .flat_map(|list| list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>())
        .collect()
}

/// The ranks that a launcher has started: number and process.
pub(crate) fn ranks(launcher: i32) -> Vec<(usize, i32)> {
    let mut ranks: Vec<_> =
        children(launcher).into_iter().filter_map(|pid| Some((rank_number(pid)?, pid))).collect();
    ranks.sort_unstable();
    ranks
}

/// The number of a rank, from its arguments or its name.
fn rank_number(pid: i32) -> Option<usize> {
    let words = fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()?;
    let words: Vec<&str> = words.split('\0').collect();
    if let Some(at) = words.iter().position(|word| *word == "--rank") {
        return words.get(at + 1)?.parse().ok();
    }
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    name.trim().strip_prefix("phalanx rank ")?.parse().ok()
}

/// Most bytes that were resident in a process so far; 0 when it has ended.
pub(crate) fn peak_bytes(pid: i32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) * 1024
}

/// Sends a signal; false when the process has ended.
pub(crate) fn send(pid: i32, signal: Signal) -> bool {
    lives(pid) && Pid::from_raw(pid).is_some_and(|pid| kill_process(pid, signal).is_ok())
}
