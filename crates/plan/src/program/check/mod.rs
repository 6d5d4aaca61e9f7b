//! Executes the programs of a rank symbolically, before step one.
//!
//! A phase is executed behind each state of carried tokens that another phase can leave, and with both values of each decision.
//! Each buffer has symbolic contents (`contents`): parameters and states have the number of updates that made them, gradients the runs
//! that they are sums of. A program that breaks an [`Invariant`] is refused, with the action and the place that made it.

mod contents;
mod pauses;
mod sums;
mod tiles;
mod walk;

use std::collections::BTreeSet;
use std::fmt;

use crate::trace::{Memory, PhaseName, Site};

use super::action::Op;
use super::chunks::RankChunks;
use super::list::Program;
use walk::{State, Walk};

/// Invariants of programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Invariant {
    /// A buffer is used between its take and its free, or is resident.
    Presence,
    /// Nothing touches what work in flight reads or writes: it has its buffers, but for the factor of the host's updates.
    Flight,
    /// Work is started and waited for once; only a publication outlives its phase, and none a save.
    Wait,
    /// A phase frees all that it takes.
    Pairing,
    /// No memory holds more than planned.
    Memory,
    /// Kernels reach what they touch, and copies join neighbouring memories.
    Reach,
    /// As many gathers and reductions are in flight as the plan counts.
    InFlight,
    /// Readers see the parameters and states of all updates so far.
    Version,
    /// A reduction has each writer of its micro-batch once, and a sum each micro-batch of its step.
    Terms,
    /// The norm counts each chunk's sum once.
    Norm,
    /// Each chunk is updated once, behind the decision.
    Update,
    /// A decision is known where it guards.
    Guard,
    /// Block runs are those of the demand, in its order.
    Demand,
    /// Ranks start the same collectives under the same guards.
    Agreement,
}

/// A program that breaks an invariant.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{phase}, action {number} {word} (made by {site}) breaks {broken:?}: {fact}")]
pub struct CheckError {
    /// The phase of the program.
    pub phase: PhaseName,
    /// Number of the action, from 0; at the end of the phase, that of the last one.
    pub number: usize,
    /// Text of the action.
    pub word: String,
    /// The place in the source that made it.
    pub site: Site,
    /// The invariant.
    pub broken: Invariant,
    /// The finding.
    pub fact: String,
}

/// Largest numbers of bytes that the buffers of programs have at a time, in each memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryPeaks(pub [u64; Memory::ALL.len()]);

impl fmt::Display for MemoryPeaks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts: Vec<String> =
            Memory::ALL.iter().zip(self.0).map(|(m, b)| format!("{} {b}", m.name())).collect();
        f.write_str(&parts.join(", "))
    }
}

/// Executes the programs of a rank, one for each phase, and returns the peaks of its chunks. `budget`: bytes that no memory exceeds.
///
/// # Errors
/// The first action that breaks an invariant.
pub fn check(
    rank: &RankChunks,
    programs: &[Program],
    budget: Option<MemoryPeaks>,
) -> Result<MemoryPeaks, CheckError> {
    let first = State::new(rank, &programs[0]);
    let (mut known, mut next) = (BTreeSet::from([first.carried()]), vec![first]);
    let mut peaks = MemoryPeaks::default();
    while let Some(state) = next.pop() {
        for program in programs {
            for applies in decisions(program) {
                let mut walk = Walk::new(rank, program, state.clone(), budget);
                let after = walk.run(*applies)?;
                peaks.0.iter_mut().zip(walk.peaks.0).for_each(|(peak, own)| *peak = own.max(*peak));
                if known.insert(after.carried()) {
                    next.push(after);
                }
            }
        }
    }
    Ok(peaks)
}

/// The values that the decision of a program can have.
fn decisions(program: &Program) -> &'static [bool] {
    match program.actions.iter().any(|action| matches!(action.op, Op::Fetch)) {
        true => &[true, false],
        false => &[true],
    }
}

/// Compares the collectives of the same phase on two ranks of a group.
///
/// # Errors
/// The first one that differs.
pub fn agree(one: &Program, other: &Program) -> Result<(), CheckError> {
    let (mut own, mut theirs) = (one.collectives(), other.collectives());
    loop {
        let pair = (own.next(), theirs.next());
        match pair {
            (None, None) => return Ok(()),
            (Some(own), Some(theirs)) if own == theirs => {}
            (own, theirs) => {
                let none = || "nothing".to_string();
                let fact = format!("{}, not {}", theirs.unwrap_or_else(none), own.unwrap_or_else(none));
                return Err(error(one, one.actions.len(), Invariant::Agreement, fact));
            }
        }
    }
}

/// The error of action `number` of a program.
fn error(program: &Program, number: usize, broken: Invariant, fact: String) -> CheckError {
    let at = number.min(program.actions.len().saturating_sub(1));
    let action = program.actions.get(at);
    CheckError {
        phase: program.phase,
        number: at,
        word: action.map_or(String::new(), |action| program.word(action)),
        site: action.map_or(Site { file: file!(), line: line!() }, |action| program.made_by(action)),
        broken,
        fact,
    }
}
