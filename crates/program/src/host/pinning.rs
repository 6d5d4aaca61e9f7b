//! Binds ranks to cores: each of the ranks of a host to an equal share of the cores that its launcher may use, neighbouring
//! cores together.

use phalanx_system::host::cores::by_place;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The cores of each of `ranks` ranks; empty if there are fewer cores than ranks, or if the system does not say.
pub fn cores_of_ranks(ranks: usize) -> Vec<Vec<usize>> {
    shares(&by_place(allowed()), ranks)
}

/// The cores that this process may use; none if the system does not say.
pub fn allowed() -> Vec<usize> {
    let Ok(allowed) = sched_getaffinity(None) else { return Vec::new() };
    (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core)).collect()
}

/// Divides `cores` among `ranks` ranks; what does not divide evenly goes to the first ranks.
fn shares(cores: &[usize], ranks: usize) -> Vec<Vec<usize>> {
    if ranks < 2 || cores.len() < ranks {
        return Vec::new();
    }
    let (each, more) = (cores.len() / ranks, cores.len() % ranks);
    let mut left = cores;
    let share = |rank: usize| {
        let (own, rest) = left.split_at(each + usize::from(rank < more));
        left = rest;
        own.to_vec()
    };
    (0..ranks).map(share).collect()
}

/// Cores as an argument.
pub fn list(cores: &[usize]) -> String {
    cores.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
}

/// Binds this process to cores; none: to all. Called before it starts threads.
pub fn bind(cores: &[usize]) {
    let mut set = CpuSet::new();
    cores.iter().filter(|core| **core < CpuSet::MAX_CPU).for_each(|core| set.set(*core));
    if set.count() > 0 {
        // A core that was taken away meanwhile: the rank runs on all that are left.
        let _ = sched_setaffinity(None, &set);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_are_divided_and_none_is_given_twice() {
        assert_eq!(shares(&[0, 4, 1, 5, 2], 2), [vec![0, 4, 1], vec![5, 2]]);
        assert_eq!(shares(&[3, 7], 2), [vec![3], vec![7]]);
        for (cores, ranks) in [(&[0, 1][..], 1), (&[0, 1], 3), (&[], 2)] {
            assert!(shares(cores, ranks).is_empty());
        }
    }
}
