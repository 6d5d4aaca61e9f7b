//! Which ranks run on which host.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// The hosts of a job. A host is what one launcher looks after; its ranks are consecutive world ranks, so their numbers
/// say everything.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<usize>", into = "Vec<usize>")]
pub struct Hosts {
    /// Number of ranks of each host, at least one.
    sizes: Vec<usize>,
}

impl Hosts {
    /// Hosts with these numbers of ranks.
    ///
    /// # Panics
    /// Without hosts, or when a host has no rank.
    pub fn new(sizes: Vec<usize>) -> Hosts {
        Hosts::try_from(sizes).unwrap_or_else(|text| panic!("{text}"))
    }

    /// One host that runs all ranks.
    pub fn one(world_size: usize) -> Hosts {
        Hosts::new(vec![world_size])
    }

    /// Number of hosts.
    #[allow(clippy::len_without_is_empty, reason = "there is at least one host")]
    pub fn len(&self) -> usize {
        self.sizes.len()
    }

    /// Number of ranks of all hosts.
    pub fn world_size(&self) -> usize {
        self.sizes.iter().sum()
    }

    /// The world ranks of a host.
    pub fn ranks(&self, host: usize) -> Range<usize> {
        let first = self.sizes[..host].iter().sum::<usize>();
        first..first + self.sizes[host]
    }

    /// The host of a world rank.
    pub fn host_of(&self, rank: usize) -> usize {
        let host = (0..self.len()).find(|host| self.ranks(*host).contains(&rank));
        host.unwrap_or_else(|| panic!("rank {rank} of {}", self.world_size()))
    }
}

impl TryFrom<Vec<usize>> for Hosts {
    type Error = String;

    fn try_from(sizes: Vec<usize>) -> Result<Hosts, String> {
        let total = sizes.iter().try_fold(0usize, |sum, size| sum.checked_add(*size));
        if sizes.is_empty() || sizes.contains(&0) || total.is_none() {
            return Err(format!("hosts with {sizes:?} ranks: every host needs at least one rank"));
        }
        Ok(Hosts { sizes })
    }
}

impl From<Hosts> for Vec<usize> {
    fn from(hosts: Hosts) -> Vec<usize> {
        hosts.sizes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_is_on_the_host_that_lists_it() {
        let hosts = Hosts::new(vec![3, 1, 2]);
        assert_eq!((hosts.len(), hosts.world_size()), (3, 6));
        assert_eq!((0..6).map(|rank| hosts.host_of(rank)).collect::<Vec<_>>(), [0, 0, 0, 1, 2, 2]);
        assert!((0..3).all(|host| hosts.ranks(host).all(|rank| hosts.host_of(rank) == host)));
    }

    #[test]
    fn hosts_without_ranks_are_refused() {
        for sizes in [vec![], vec![2, 0], vec![usize::MAX, 1]] {
            assert!(Hosts::try_from(sizes).is_err());
        }
    }
}
