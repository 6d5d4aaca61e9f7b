//! The processes of a run: the ranks of a launcher, members of a process group, memory.

use phalanx_system::host::process::{arguments, children, is_running, resident_bytes_peak};
use rustix::process::{Pid, Signal, kill_process};

/// Returns whether a process runs. Zombies do not count.
pub(crate) fn lives(pid: i32) -> bool {
    is_running(pid.unsigned_abs())
}

/// Processes of a group that run.
pub(crate) fn group_members(group: i32) -> Vec<i32> {
    phalanx_system::host::process::group_members(group.unsigned_abs())
        .into_iter()
        .map(|pid| pid as i32)
        .collect()
}

/// All processes below `pid`, itself first.
pub(crate) fn tree(pid: u32) -> Vec<u32> {
    let mut all = vec![pid];
    let mut next = 0;
    while next < all.len() {
        all.extend(children(all[next]));
        next += 1;
    }
    all
}

/// The process of a rank, which the launcher or a launcher below it has started.
pub(crate) fn rank_below(launcher: i32, rank: usize) -> Option<i32> {
    let pid = tree(launcher.unsigned_abs()).into_iter().find(|pid| rank_number(*pid) == Some(rank))?;
    Some(pid as i32)
}

/// The rank that the process `launcher` has started, if it is one.
pub(crate) fn own_rank(launcher: i32) -> Option<usize> {
    children(launcher.unsigned_abs()).into_iter().find_map(rank_number)
}

/// The launcher of a host, which the process `starter` has started.
pub(crate) fn launcher_of(starter: i32, host: usize) -> Option<i32> {
    let number = host.to_string();
    let is_host = |pid: &u32| {
        let words = arguments(*pid).unwrap_or_default();
        words.iter().zip(words.iter().skip(1)).any(|(name, value)| name == "--node-rank" && *value == number)
    };
    tree(starter.unsigned_abs()).into_iter().find(is_host).map(|pid| pid as i32)
}

/// The number of a rank, from the arguments of its process: `phalanx rank NUMBER ...`.
fn rank_number(pid: u32) -> Option<usize> {
    match &arguments(pid)?[..] {
        [_, command, number, ..] if command == "rank" => number.parse().ok(),
        _ => None,
    }
}

/// Most bytes that were resident so far in a process and in its children, each for itself.
pub(crate) fn tree_peak_bytes(pid: i32) -> u64 {
    let pid = pid.unsigned_abs();
    children(pid).into_iter().chain([pid]).filter_map(resident_bytes_peak).sum()
}

/// Sends a signal; false when the process has ended.
pub(crate) fn send(pid: i32, signal: Signal) -> bool {
    lives(pid) && Pid::from_raw(pid).is_some_and(|pid| kill_process(pid, signal).is_ok())
}
