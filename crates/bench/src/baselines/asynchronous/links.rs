//! The groups of asynchronous updates: one channel for every pair of a worker and another rank's server.
//!
//! Calls of a group run in order, and a worker that waits for an answer must not hold up what its rank serves, so
//! each ordered pair (worker, server) needs a group that neither end uses for anything else. Pairs that have no rank
//! in common share one: the pairs of N ranks fall into N - 1 rounds (N odd: N) in which every rank meets one other,
//! as in a tournament, and each round has one group for each of the two roles. All ranks create all groups, in the same
//! order.

use std::sync::Arc;

use phalanx_collectives::{CollectiveError, Endpoint, Group, MetaGroup, Solo};

use phalanx_train::Groups;
use phalanx_train::groups::GroupSource;
use phalanx_train::spec::Spec;

/// A rank's connections to the other ranks of asynchronous training.
pub struct Links<'a> {
    endpoint: Option<&'a Endpoint>,
    /// The groups of a synchronous run: workers that have met evaluate and save with them.
    groups: Groups,
    /// All ranks, for parameters.
    gather: Arc<dyn Group>,
    /// The channel to each rank's server, in which this rank is the worker.
    to_server: Vec<Option<Arc<dyn Group>>>,
    /// The channel from each rank's worker, in which this rank is the server.
    of_worker: Vec<Option<Arc<dyn Group>>>,
}

/// The number of rounds in which each of `ranks` meets every other rank once.
fn rounds(ranks: usize) -> usize {
    match ranks {
        0 | 1 => 0,
        even if even.is_multiple_of(2) => even - 1,
        odd => odd,
    }
}

/// The round in which two of `ranks` meet: no rank has two meetings in one.
fn round(a: usize, b: usize, ranks: usize) -> usize {
    let (low, high) = (a.min(b), a.max(b));
    let rounds = rounds(ranks);
    // With an even number of ranks, the last one meets in each round the rank that would otherwise meet itself.
    if high == rounds { 2 * low % rounds } else { (low + high) % rounds }
}

impl<'a> Links<'a> {
    /// Creates the groups of the source's rank. They must be the first groups that `source` creates.
    pub fn new(source: &GroupSource<'a>, spec: &Spec) -> Links<'a> {
        let (groups, ranks) = (Groups::new(source, spec), spec.world_size());
        let members: Vec<usize> = (0..ranks).collect();
        let (endpoint, rank) = match source {
            GroupSource::Alone(_) => (None, 0),
            GroupSource::Host(endpoint) => (Some(*endpoint), endpoint.rank()),
            GroupSource::Meta(_, rank) => (None, *rank),
        };
        let group = |name: &'static str, beside: bool| -> Arc<dyn Group> {
            match source {
                GroupSource::Meta(recorder, rank) => {
                    Arc::new(MetaGroup::over(name, &[], &members, *rank, Arc::clone(recorder)))
                }
                GroupSource::Host(endpoint) if ranks > 1 && beside => {
                    endpoint.sub_group_beside(name, &members)
                }
                GroupSource::Host(endpoint) if ranks > 1 => endpoint.sub_group(name, &members),
                _ => Arc::new(Solo::new(name).with_isa(source.isa())),
            }
        };
        let gather = group("gather", false);
        let channels: Vec<_> = (0..2 * rounds(ranks)).map(|_| group("updates", true)).collect();
        let channel = |worker: usize, server: usize| {
            let index = 2 * round(worker, server, ranks) + usize::from(worker > server);
            Arc::clone(&channels[index])
        };
        let others = |pair: &dyn Fn(usize) -> Arc<dyn Group>| {
            (0..ranks).map(|other| (other != rank).then(|| pair(other))).collect()
        };
        let to_server = others(&|server| channel(rank, server));
        let of_worker = others(&|worker| channel(worker, rank));
        Links { endpoint, groups, gather, to_server, of_worker }
    }

    /// The groups of a synchronous run.
    pub fn groups(&self) -> &Groups {
        &self.groups
    }

    /// The group of all ranks that gathers parameters.
    pub(super) fn gather(&self) -> &dyn Group {
        &*self.gather
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.gather.world_size()
    }

    /// This rank's number.
    pub fn rank(&self) -> usize {
        self.gather.rank()
    }

    /// The channel to another rank's server.
    pub(super) fn to_server(&self, server: usize) -> &dyn Group {
        &**self.to_server[server].as_ref().expect("a rank has no channel to its own server")
    }

    /// The channel from another rank's worker.
    pub(super) fn of_worker(&self, worker: usize) -> &dyn Group {
        &**self.of_worker[worker].as_ref().expect("a rank has no channel to its own server")
    }

    /// Ends the job for all ranks with this rank as the cause, unless it has ended already.
    pub(super) fn abort(&self, reason: &str) -> CollectiveError {
        if let Err(error) = self.check() {
            return error;
        }
        if let Some(endpoint) = self.endpoint {
            endpoint.abort(reason);
        }
        CollectiveError::Aborted { rank: self.rank(), reason: reason.to_string() }
    }

    /// The reason why the job has ended, if it has.
    pub(super) fn check(&self) -> Result<(), CollectiveError> {
        self.endpoint.map_or(Ok(()), Endpoint::check)
    }

    /// Bytes sent and seconds waited since the last call, over all groups.
    pub(super) fn take_statistics(&self) -> phalanx_collectives::Statistics {
        let pairs = self.to_server.iter().chain(&self.of_worker).flatten();
        let all = pairs.chain([&self.gather]).map(|group| group.take_statistics());
        all.fold(self.groups.take_statistics(), |sum, part| sum + part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_meets_in_a_round_in_which_neither_meets_another() {
        for ranks in 2..=16 {
            let mut busy = vec![vec![false; ranks]; rounds(ranks)];
            for a in 0..ranks {
                for b in a + 1..ranks {
                    assert_eq!(round(a, b, ranks), round(b, a, ranks));
                    for rank in [a, b] {
                        let busy = &mut busy[round(a, b, ranks)][rank];
                        assert!(!std::mem::replace(busy, true), "{rank} of {ranks}, meeting {a} and {b}");
                    }
                }
            }
        }
    }
}
