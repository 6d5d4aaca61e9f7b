//! Do the ranks of a group say the same things in the same order?
//!
//! The n-th collective of a group must be the same on all its ranks, or the run hangs, dies, or worse,
//! adds what does not belong together. The traces know it beforehand: R ranks with C collectives
//! each are compared in R * C steps, before anything starts.

use phalanx_trace::{Collective, CollectiveOp, Phase, Trace};

/// Two ranks of a group that will not do the same.
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
        left_phases: Vec<&'static str>,
        /// The first rank that differs.
        right: usize,
        /// Its phases.
        right_phases: Vec<&'static str>,
    },
    /// A collective differs, or one rank has none left.
    #[error(transparent)]
    Collective(Box<CollectiveDisagreement>),
}

/// The first collective on which the ranks of a group differ.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct CollectiveDisagreement {
    /// Phase.
    pub phase: &'static str,
    /// Group.
    pub group: &'static str,
    /// Number of the collective among those of the group in the phase, from 0.
    pub index: usize,
    /// What differs: `op`, `dtype`, `count`, `root`, `world_size`, or `length`.
    pub differs: &'static str,
    /// The first rank.
    pub left: Side,
    /// The first rank that differs from it there.
    pub right: Side,
}

/// What one rank does, and how many ranks do the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Side {
    /// The rank.
    pub rank: usize,
    /// Its collective; `None` if it has no more.
    pub collective: Option<Collective>,
    /// Ranks that do the same there, itself included.
    pub ranks: usize,
}

impl std::fmt::Display for CollectiveDisagreement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let CollectiveDisagreement { phase, group, index, differs, left, right } = self;
        write!(
            f,
            "phase `{phase}`, group `{group}`: the ranks disagree on collective {index} ({differs}): "
        )?;
        write!(f, "{left}; {right}. ")?;
        let odd = if left.ranks < right.ranks { left } else { right };
        let rank = odd.rank;
        write!(f, "Every rank must ask for the same collectives in the same order: look for what makes ")?;
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
            return write!(f, " asks for nothing more");
        };
        write!(f, " asks for {} of {count} {}", op.name(), dtype.name())?;
        if let Some(root) = root {
            write!(f, " with root {root}")?;
        }
        write!(f, " among {world_size} ranks at {site}")
    }
}

/// Compares, phase by phase and group by group, the collectives of all ranks.
///
/// All traces are taken as members of every group that one of them names: for now `data` holds all
/// ranks. Sends and receives are left out, see `belongs_to_all`.
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
        for group in groups(traces, number) {
            compare_group(traces, number, group)?;
        }
    }
    Ok(())
}

/// Whether all ranks of the group must issue it. Sends and receives concern two ranks: they are to be
/// matched in pairs, each send with the peer's receive, once the pipeline has them.
fn belongs_to_all(op: CollectiveOp) -> bool {
    !matches!(op, CollectiveOp::Send | CollectiveOp::Recv)
}

/// Names of the groups in the `number`-th phase, in order of appearance.
fn groups(traces: &[Trace], number: usize) -> Vec<&'static str> {
    let mut groups = Vec::new();
    for collective in traces.iter().flat_map(|t| t.phases[number].collectives()) {
        if !groups.contains(&collective.group) {
            groups.push(collective.group);
        }
    }
    groups
}

/// The collectives of a group in a phase that all its ranks must issue.
fn sequence<'a>(phase: &'a Phase, group: &str) -> Vec<&'a Collective> {
    phase.collectives().filter(|c| c.group == group && belongs_to_all(c.op)).collect()
}

fn compare_group(traces: &[Trace], number: usize, group: &'static str) -> Result<(), Disagreement> {
    let sequences: Vec<Vec<&Collective>> =
        traces.iter().map(|t| sequence(&t.phases[number], group)).collect();
    let longest = sequences.iter().map(Vec::len).max().unwrap_or(0);
    for index in 0..longest {
        let nth = |rank: usize| sequences[rank].get(index).copied();
        let differing = |left: usize| move |right: &usize| difference(nth(left), nth(*right)).is_some();
        let Some(other) = (1..traces.len()).find(differing(0)) else {
            continue;
        };
        let side = |at: usize| Side {
            rank: traces[at].rank,
            collective: nth(at).cloned(),
            ranks: traces.len() - (0..traces.len()).filter(differing(at)).count(),
        };
        return Err(Disagreement::Collective(Box::new(CollectiveDisagreement {
            phase: traces[0].phases[number].name,
            group,
            index,
            differs: difference(nth(0), nth(other)).unwrap_or("nothing"),
            left: side(0),
            right: side(other),
        })));
    }
    Ok(())
}

/// In what two collectives differ, if they do. Call sites may differ: ranks may take two paths to the
/// same collective.
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
