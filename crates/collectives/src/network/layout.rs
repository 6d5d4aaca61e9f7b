//! Layout of a group over its hosts: the members of each host, the members that exchange data with each other, and the sums that
//! a host can make alone.
//!
//! Data is cut into lanes, as many as the host with the fewest members has: member i of every host exchanges lane i with
//! members i of the others, so all of them move bytes and every link carries its part once. The sum of a group follows
//! one fixed tree over its ranks ([`phalanx_simd::sums`]). A host adds the largest subtrees that lie wholly on it, so that
//! what crosses the network is one value a subtree, and the bits stay those of the tree.

use std::ops::Range;

use phalanx_simd::sums::SumTree;

use crate::hosts::Hosts;

/// A group's members by host.
pub(crate) struct Layout {
    /// The group ranks of each host that has members, in the order of the hosts.
    hosts: Vec<Vec<usize>>,
    /// The index of this rank's host among them.
    pub(crate) own: usize,
    /// Number of lanes.
    pub(crate) lanes: usize,
    /// This rank's lane; None for a rank that leaves the network to others.
    pub(crate) lane: Option<usize>,
    /// The subtrees that lie on one host, in the order of their ranks.
    pub(crate) subtrees: Vec<Subtree>,
    /// Tree that adds the subtrees' sums to the sum of the group.
    pub(crate) tree: SumTree,
}

/// A subtree of the group's sum that lies wholly on one host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Subtree {
    pub(crate) host: usize,
    /// The group ranks that it adds.
    pub(crate) ranks: Range<usize>,
}

impl Subtree {
    /// Returns whether the sum is the value of one rank, which is sent as it is.
    pub(crate) fn is_single(&self) -> bool {
        self.ranks.len() == 1
    }
}

impl Layout {
    /// The layout of a group of the world ranks `members`, for the member `rank`.
    pub(crate) fn new(hosts: &Hosts, members: &[usize], rank: usize) -> Layout {
        let host_of: Vec<usize> = members.iter().map(|member| hosts.host_of(*member)).collect();
        let with_members: Vec<usize> = (0..hosts.len()).filter(|host| host_of.contains(host)).collect();
        let place = |q: usize| with_members.binary_search(&host_of[q]).expect("the host has a member");
        let by_host: Vec<Vec<usize>> = (0..with_members.len())
            .map(|host| (0..members.len()).filter(|q| place(*q) == host).collect())
            .collect();
        let own = place(rank);
        let lanes = by_host.iter().map(Vec::len).min().expect("a group has members");
        let lane = by_host[own].iter().position(|q| *q == rank).filter(|lane| *lane < lanes);
        let mut subtrees = Vec::new();
        let tree = cut(0..members.len(), &place, &mut subtrees);
        Layout { hosts: by_host, own, lanes, lane, subtrees, tree }
    }

    /// Number of hosts.
    pub(crate) fn hosts(&self) -> usize {
        self.hosts.len()
    }

    /// The other hosts, beginning with the next one, so that not all begin with the same.
    pub(crate) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (own, hosts) = (self.own, self.hosts.len());
        (1..hosts).map(move |i| (own + i) % hosts)
    }

    /// The group ranks on a host.
    pub(crate) fn members(&self, host: usize) -> &[usize] {
        &self.hosts[host]
    }

    /// The host of a group rank.
    pub(crate) fn host_of(&self, q: usize) -> usize {
        self.hosts.iter().position(|members| members.contains(&q)).expect("a member of the group")
    }

    /// The group rank that has this rank's lane on another host.
    pub(crate) fn peer(&self, host: usize) -> usize {
        self.hosts[host][self.lane.expect("a rank with a lane")]
    }

    /// Returns whether the number of hosts and that of their ranks are powers of two, all hosts have equally many ranks, and each
    /// host is one subtree.
    pub(crate) fn is_balanced(&self) -> bool {
        let ranks = self.hosts[0].len();
        let one_each =
            |(host, subtree): (usize, &Subtree)| subtree.host == host && subtree.ranks.len() == ranks;
        self.hosts.len().is_power_of_two()
            && ranks.is_power_of_two()
            && self.subtrees.len() == self.hosts.len()
            && self.subtrees.iter().enumerate().all(one_each)
    }

    /// The subtrees that a host adds, with their places among all.
    pub(crate) fn subtrees_of(&self, host: usize) -> impl Iterator<Item = (usize, &Subtree)> {
        self.subtrees.iter().enumerate().filter(move |(_, subtree)| subtree.host == host)
    }
}

/// The tree over the group ranks `ranks`, cut where it lies wholly on one host.
fn cut(ranks: Range<usize>, place: &dyn Fn(usize) -> usize, subtrees: &mut Vec<Subtree>) -> SumTree {
    let host = place(ranks.start);
    if ranks.clone().all(|q| place(q) == host) {
        subtrees.push(Subtree { host, ranks });
        return SumTree::Leaf(subtrees.len() - 1);
    }
    let middle = ranks.start + ranks.len().next_power_of_two() / 2;
    let left = cut(ranks.start..middle, place, subtrees);
    SumTree::Sum(Box::new(left), Box::new(cut(middle..ranks.end, place, subtrees)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(sizes: &[usize], members: &[usize], rank: usize) -> Layout {
        Layout::new(&Hosts::new(sizes.to_vec()), members, rank)
    }

    fn subtrees(layout: &Layout, host: usize) -> Vec<Range<usize>> {
        layout.subtrees_of(host).map(|(_, subtree)| subtree.ranks.clone()).collect()
    }

    #[test]
    fn a_host_adds_the_largest_subtrees_that_lie_on_it() {
        let all = |world: usize| Vec::from_iter(0..world);
        let even = layout(&[2, 2], &all(4), 3);
        assert_eq!([subtrees(&even, 0), subtrees(&even, 1)].concat(), [0..2, 2..4]);
        assert_eq!(subtrees(&even, 0).len(), 1);
        assert_eq!((even.lanes, even.lane, even.own, even.peer(0)), (2, Some(1), 1, 1));
        // The tree of five: ((0 1) (2 3)) 4.
        let odd = layout(&[3, 2], &all(5), 2);
        assert_eq!((subtrees(&odd, 0), subtrees(&odd, 1)), (vec![0..2, 2..3], vec![3..4, 4..5]));
        assert_eq!((odd.lanes, odd.lane), (2, None));
        let flat = layout(&[1, 1, 1], &all(3), 1);
        assert!((0..3).all(|host| subtrees(&flat, host).iter().eq([&(host..host + 1)])));
    }

    #[test]
    fn balanced_hosts_are_neighbouring_subtrees_of_one_size() {
        let is_balanced =
            |sizes: &[usize]| layout(sizes, &Vec::from_iter(0..sizes.iter().sum()), 0).is_balanced();
        assert!([&[1, 1][..], &[1; 8], &[2, 2], &[4; 4]].into_iter().all(is_balanced));
        assert!(![&[1, 1, 1][..], &[2, 1], &[3, 3], &[3, 1], &[1, 4, 3]].into_iter().any(is_balanced));
        // Members in another order are other leaves of the tree.
        assert!(!layout(&[1, 1], &[1, 0], 0).is_balanced());
    }

    #[test]
    fn a_group_of_some_ranks_knows_only_their_hosts() {
        let some = layout(&[2, 1, 3], &[0, 3, 5], 2);
        assert_eq!((some.hosts(), some.own, some.lanes, some.lane), (2, 1, 1, None));
        assert_eq!((some.members(0), some.members(1)), (&[0][..], &[1, 2][..]));
        assert_eq!(subtrees(&some, 1), [1..2, 2..3]);
        let lane = layout(&[2, 1, 3], &[0, 3, 5], 1);
        assert_eq!((lane.lane, lane.peer(0), lane.host_of(2)), (Some(0), 0, 1));
    }
}
