//! Do the ranks of a group say the same things in the same order?
//!
//! The n-th collective of a group must be the same on all its ranks, the n-th message of one rank to another
//! must be what the other receives, or the run hangs, dies, or worse, adds what does not belong together. The
//! traces know it beforehand: R ranks with C collectives each are compared in R * C steps, before anything starts.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::trace::{Collective, CollectiveOp, Fault, PhaseName, Trace, describe_tag};

/// A disagreement between ranks: they would issue different collectives, or messages that do not match.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Disagreement {
    /// The ranks do not go through the same phases.
    #[error(
        "rank {left} goes through the phases {left_phases:?}, rank {right} through {right_phases:?}: \
         trace every rank in the same way"
    )]
    Phases {
        /// The first rank.
        left: usize,
        /// Its phases.
        left_phases: Vec<PhaseName>,
        /// The first rank that differs.
        right: usize,
        /// Its phases.
        right_phases: Vec<PhaseName>,
    },
    /// A collective differs, or one rank has none left.
    #[error(transparent)]
    Collective(Box<CollectiveDisagreement>),
    /// Two ranks disagree on a message: one sends other data than the other receives.
    #[error(transparent)]
    Message(Box<MessageDisagreement>),
}

/// A group in the traces: `data`, or `tensor` of the ranks `[0, 1]`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct GroupKey {
    /// Its name.
    pub name: &'static str,
    /// World ranks of its members; empty for all ranks.
    pub members: Arc<[usize]>,
}

impl std::fmt::Display for GroupKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "group `{}`", self.name)?;
        if self.members.is_empty() { Ok(()) } else { write!(f, " of ranks {:?}", self.members) }
    }
}

/// The first collective on which the ranks of a group differ.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct CollectiveDisagreement {
    /// Phase.
    pub phase: PhaseName,
    /// Group.
    pub group: GroupKey,
    /// Number of the collective among those of the group in the phase, from 0.
    pub index: usize,
    /// Field that differs: `op`, `dtype`, `count`, `root`, `world_size`, or `length`.
    pub differs: &'static str,
    /// The first rank.
    pub left: Side,
    /// The first rank that differs from it there.
    pub right: Side,
}

/// A rank's collective, and the number of ranks that make the same one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Side {
    /// The rank.
    pub rank: usize,
    /// Its collective; `None` if it has no more.
    pub collective: Option<Collective>,
    /// Ranks that do the same there, itself included.
    pub ranks: usize,
}

/// The first message whose two ends differ.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct MessageDisagreement {
    /// Phase.
    pub phase: PhaseName,
    /// Group.
    pub group: GroupKey,
    /// Number of the message among those from this sender to this receiver in the phase, from 0.
    pub index: usize,
    /// Field that differs: `tag`, `dtype`, `count`, `placements`, or `length`.
    pub differs: &'static str,
    /// World rank of the sender, and its send; `None` if it sends nothing more.
    pub sender: (usize, Option<Collective>),
    /// World rank of the receiver, and its recv; `None` if it receives nothing more.
    pub receiver: (usize, Option<Collective>),
}

impl std::fmt::Display for CollectiveDisagreement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let CollectiveDisagreement { phase, group, index, differs, left, right } = self;
        write!(f, "phase `{phase}`, {group}: the ranks disagree on collective {index} ({differs}): ")?;
        write!(f, "{left}; {right}. ")?;
        let odd = if left.ranks < right.ranks { left } else { right };
        let rank = odd.rank;
        write!(f, "Every rank must issue the same collectives in the same order: look for what makes ")?;
        write!(f, "rank {rank} take another path before that call")
    }
}

impl std::fmt::Display for Side {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {}", self.rank)?;
        if self.ranks > 1 {
            write!(f, " (and {} more)", self.ranks - 1)?;
        }
        let Some(Collective { world_size, op, dtype, count, root, site, .. }) = &self.collective else {
            return write!(f, " issues no more collectives");
        };
        write!(f, " issues {} of {count} {}", op.name(), dtype.name())?;
        if let Some(root) = root {
            write!(f, " with root {root}")?;
        }
        write!(f, " among {world_size} ranks at {site}")
    }
}

impl std::fmt::Display for MessageDisagreement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let MessageDisagreement { phase, group, index, differs, sender, receiver } = self;
        let (from, to) = (sender.0, receiver.0);
        write!(f, "phase `{phase}`, {group}: message {index} from rank {from} to rank {to} does not match ")?;
        write!(f, "({differs}): ")?;
        write_end(f, "send", sender)?;
        write!(f, "; ")?;
        write_end(f, "receive", receiver)?;
        write!(f, ". What one rank sends the other must receive in the same order: look for the message ")?;
        write!(f, "that one of them has in excess, too early or from another stage")
    }
}

fn write_end(
    f: &mut std::fmt::Formatter<'_>,
    verb: &str,
    (rank, message): &(usize, Option<Collective>),
) -> std::fmt::Result {
    let Some(Collective { dtype, count, tag, placements, site, .. }) = message else {
        return write!(f, "rank {rank} {verb}s nothing more");
    };
    write!(f, "rank {rank} {verb}s {count} {}", dtype.name())?;
    if let Some(tag) = tag {
        write!(f, "{}", describe_tag(*tag))?;
    }
    write!(f, " ({placements}) at {site}")
}

/// Compares, phase by phase and group by group, the collectives of all ranks, then the messages of each pair.
///
/// A group is its name and its members; a rank is compared in those of which it is one. Members without a
/// trace are left out, and so are the messages that they send or receive.
///
/// # Errors
/// The earliest disagreement of the first phase and group that has one.
pub fn compare(traces: &[Trace]) -> Result<(), Disagreement> {
    let Some((first, others)) = traces.split_first() else {
        return Ok(());
    };
    let names = |t: &Trace| t.phases.iter().map(|p| p.name).collect::<Vec<_>>();
    for other in others {
        if names(first) != names(other) {
            return Err(Disagreement::Phases {
                left: first.rank,
                left_phases: names(first),
                right: other.rank,
                right_phases: names(other),
            });
        }
    }
    for number in 0..first.phases.len() {
        for (key, calls) in groups(traces, number) {
            let group = Group { phase: first.phases[number].name, key, calls };
            group.compare_collectives()?;
            group.compare_messages()?;
        }
    }
    Ok(())
}

/// The calls of one rank in a group.
struct Calls<'a> {
    /// World rank.
    rank: usize,
    /// The collectives, which all members must issue.
    collectives: Vec<&'a Collective>,
    /// For each peer (by its rank in the group): the messages sent to it and received from it.
    messages: BTreeMap<usize, [Vec<&'a Collective>; 2]>,
}

/// The calls of all ranks in one group during one phase.
struct Group<'a> {
    phase: PhaseName,
    key: GroupKey,
    calls: Vec<Calls<'a>>,
}

fn key_of(c: &Collective) -> GroupKey {
    GroupKey { name: c.group, members: Arc::clone(&c.members) }
}

/// The groups of the `number`-th phase in order of appearance, each with the calls of its members.
fn groups(traces: &[Trace], number: usize) -> Vec<(GroupKey, Vec<Calls<'_>>)> {
    let mut keys: BTreeMap<GroupKey, usize> = BTreeMap::new();
    let mut groups: Vec<(GroupKey, Vec<Calls>)> = Vec::new();
    for c in traces.iter().flat_map(|t| t.phases[number].collectives()) {
        let key = key_of(c);
        keys.entry(key.clone()).or_insert_with(|| {
            let is_member = |t: &&Trace| key.members.is_empty() || key.members.contains(&t.rank);
            let calls =
                |t: &Trace| Calls { rank: t.rank, collectives: Vec::new(), messages: BTreeMap::new() };
            let members = traces.iter().filter(is_member).map(calls).collect();
            groups.push((key, members));
            groups.len() - 1
        });
    }
    for trace in traces {
        for c in trace.phases[number].collectives() {
            let index = keys[&key_of(c)];
            let of_group = &mut groups[index].1;
            let own = of_group.iter_mut().find(|calls| calls.rank == trace.rank);
            let calls = own.unwrap_or_else(|| panic!("rank {} is not a member of {}", trace.rank, key_of(c)));
            match (c.op, c.root) {
                (CollectiveOp::Send, Some(peer)) => calls.messages.entry(peer).or_default()[0].push(c),
                (CollectiveOp::Recv, Some(peer)) => calls.messages.entry(peer).or_default()[1].push(c),
                _ => calls.collectives.push(c),
            }
        }
    }
    groups
}

impl Group<'_> {
    fn compare_collectives(&self) -> Result<(), Disagreement> {
        let Group { phase, key, calls } = self;
        let longest = calls.iter().map(|c| c.collectives.len()).max().unwrap_or(0);
        for index in 0..longest {
            let nth = |at: usize| calls[at].collectives.get(index).copied();
            let differing = |left: usize| move |right: &usize| difference(nth(left), nth(*right)).is_some();
            let Some(other) = (1..calls.len()).find(differing(0)) else {
                continue;
            };
            let side = |at: usize| Side {
                rank: calls[at].rank,
                collective: nth(at).cloned(),
                ranks: calls.len() - (0..calls.len()).filter(differing(at)).count(),
            };
            return Err(Disagreement::Collective(Box::new(CollectiveDisagreement {
                phase: *phase,
                group: key.clone(),
                index,
                differs: difference(nth(0), nth(other)).unwrap_or("nothing"),
                left: side(0),
                right: side(other),
            })));
        }
        Ok(())
    }

    /// Compares each message with its other end. A pair of ranks is visited from the sender, or from the receiver if
    /// the sender sends it nothing.
    fn compare_messages(&self) -> Result<(), Disagreement> {
        const NONE: &[Vec<&Collective>; 2] = &[Vec::new(), Vec::new()];
        for own in &self.calls {
            for (peer, [sent, received]) in &own.messages {
                let Some(other) = self.calls.iter().find(|c| Some(c.rank) == self.world_rank(*peer)) else {
                    continue;
                };
                let own_place = self.place(own.rank);
                let [theirs_sent, theirs_received] = other.messages.get(&own_place).unwrap_or(NONE);
                self.compare_pair((own.rank, sent), (other.rank, theirs_received))?;
                self.compare_pair((other.rank, theirs_sent), (own.rank, received))?;
            }
        }
        Ok(())
    }

    fn compare_pair(
        &self,
        (from, sent): (usize, &[&Collective]),
        (to, received): (usize, &[&Collective]),
    ) -> Result<(), Disagreement> {
        for index in 0..sent.len().max(received.len()) {
            let (send, recv) = (sent.get(index).copied(), received.get(index).copied());
            let Some(differs) = message_difference(send, recv) else { continue };
            return Err(Disagreement::Message(Box::new(MessageDisagreement {
                phase: self.phase,
                group: self.key.clone(),
                index,
                differs,
                sender: (from, send.cloned()),
                receiver: (to, recv.cloned()),
            })));
        }
        Ok(())
    }

    /// World rank of a rank of the group.
    fn world_rank(&self, place: usize) -> Option<usize> {
        let members = &self.key.members;
        if members.is_empty() { Some(place) } else { members.get(place).copied() }
    }

    /// Rank in the group of a world rank that is in it.
    fn place(&self, rank: usize) -> usize {
        self.key.members.iter().position(|member| *member == rank).unwrap_or(rank)
    }
}

/// The first property in which two collectives differ. Call sites may differ: ranks may take two paths to the same
/// collective.
fn difference(left: Option<&Collective>, right: Option<&Collective>) -> Option<&'static str> {
    let (left, right) = match (left, right) {
        (Some(left), Some(right)) => (left, right),
        (None, None) => return None,
        _ => return Some("length"),
    };
    let fields = [
        ("op", left.op != right.op),
        ("dtype", left.dtype != right.dtype),
        ("count", left.count != right.count),
        ("root", left.root != right.root),
        ("world_size", left.world_size != right.world_size),
    ];
    fields.into_iter().find(|(_, differs)| *differs).map(|(name, _)| name)
}

/// The first property in which the two ends of a message differ.
fn message_difference(sent: Option<&Collective>, received: Option<&Collective>) -> Option<&'static str> {
    let (sent, received) = match (sent, received) {
        (Some(sent), Some(received)) => (sent, received),
        (None, None) => return None,
        _ => return Some("length"),
    };
    let fields = [
        ("tag", sent.tag != received.tag),
        ("dtype", sent.dtype != received.dtype),
        ("count", sent.count != received.count),
        ("placements", sent.placements != received.placements),
    ];
    fields.into_iter().find(|(_, differs)| *differs).map(|(name, _)| name)
}

/// Tensors whose placement does not fit their use: collectives are missing, doubled or misplaced.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct PlacementError {
    /// The rank in whose trace it was found.
    pub rank: usize,
    /// The first fault of the first phase that has one.
    pub fault: Fault,
    /// Number of further faults, on all ranks. A trace keeps only its first ones.
    pub more: usize,
}

impl std::fmt::Display for PlacementError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let PlacementError { rank, fault, more } = self;
        write!(
            f,
            "rank {rank}: {fault}. The dry run follows how each tensor is placed on the mesh; trained "
        )?;
        write!(f, "like this, the ranks would silently compute something else than one rank does")?;
        match more {
            0 => Ok(()),
            1 => write!(f, ". 1 more fault was found, perhaps because of this one"),
            _ => write!(f, ". {more} more faults were found, perhaps because of this one"),
        }
    }
}

/// The first placement fault of the traces: of the lowest phase, then of the first trace.
///
/// # Errors
/// If there is one.
pub fn faults(traces: &[Trace]) -> Result<(), PlacementError> {
    let all = || traces.iter().flat_map(|t| t.faults.iter().map(move |fault| (t, fault)));
    let phase = |(t, fault): &(&Trace, &Fault)| t.phases.iter().position(|p| Some(p.name) == fault.phase);
    match all().min_by_key(phase) {
        None => Ok(()),
        Some((trace, fault)) => {
            Err(PlacementError { rank: trace.rank, fault: fault.clone(), more: all().count() - 1 })
        }
    }
}
