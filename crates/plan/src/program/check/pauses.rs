//! Pauses, at which the rank goes on with other things than chunks: where each is, and what it may rely on there.

use crate::program::action::{Op, Work};
use crate::program::list::Role;
use crate::trace::PhaseName;

use super::Invariant;
use super::walk::{Broken, Walk, expect};

impl Walk<'_> {
    /// Behind each block run, behind the sums of gradients, and behind the norm.
    pub(super) fn pause(&mut self) -> Result<(), Broken> {
        if !std::mem::replace(&mut self.is_paused, true) {
            return Ok(());
        }
        self.pauses += 1;
        let is_behind = self.ran == self.demand.len() && (self.pauses < 2 || self.has_norm);
        expect(is_behind, Invariant::Demand, || "it is behind no run, sum or norm".into())
    }

    /// Checks that the rank has gone on behind the sums of gradients: it says there how gradients are clipped, and where they are looked at.
    pub(super) fn expect_sums(&self) -> Result<(), Broken> {
        expect(self.pauses == 1, Invariant::Demand, || "no pause is behind the sums".into())
    }

    /// Returns whether an operation makes a summed gradient.
    pub(super) fn changes_sums(&self, op: Op) -> bool {
        match op {
            Op::Convert { .. } | Op::Add { .. } | Op::Unpack { .. } => true,
            Op::Start { work: Work::AllGather { into, .. }, .. } => {
                self.program.spec(into).role == Role::Gradient
            }
            Op::Start { work, .. } => matches!(work, Work::ReduceScatter { .. }),
            _ => false,
        }
    }

    /// Returns how many pauses a phase has that are not behind a block run.
    pub(super) fn pauses_of(&self, phase: PhaseName) -> usize {
        match phase {
            PhaseName::Step => 2,
            PhaseName::Diagnose if !self.rank.policies.in_backward => 1,
            _ => 0,
        }
    }
}
