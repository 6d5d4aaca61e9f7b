//! Leaves out the repetitions of a rank's program, so that a dry run takes them once.
//!
//! In the steady state of a schedule a rank repeats the same steps with later micro-batches: under 1F1B one forward and
//! one backward, under `interleaved` a round of them. [`abridge`] finds the longest such part and leaves out its middle
//! periods; the micro-batches after them get lower numbers. What is left is a program of fewer micro-batches. Where
//! leaving out periods would leave a micro-batch incomplete (as under GPipe, which runs all forwards first), nothing is
//! left out. [`crate::expand()`] puts the periods back into the trace of such a run.

use std::collections::HashSet;

use super::lower::Step;

/// Periods that stay before those that are left out: the last is repeated, the others lead into the steady state.
const BEFORE: usize = 3;

/// Periods that stay behind: the first is compared with the repeated one, the other leads out of the steady state.
const BEHIND: usize = 2;

/// Lengths of a period that are tried.
const TRIED: usize = 512;

/// The periods that an abridged program leaves out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Omitted {
    /// The step of the abridged program before which they are missing.
    pub at: usize,
    /// Steps of a period.
    pub steps: usize,
    /// Micro-batches of a period.
    pub micro_batches: usize,
    /// Number of periods that are left out.
    pub periods: usize,
}

impl Omitted {
    /// Micro-batches that are left out.
    pub fn all_micro_batches(&self) -> usize {
        self.micro_batches * self.periods
    }
}

/// A program without the repetitions of its steady state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Abridged {
    /// Steps that are left, with consecutive micro-batches.
    pub steps: Vec<Step>,
    /// Steps that are left out.
    pub omitted: Omitted,
}

impl Step {
    /// The micro-batch that is computed, sent or received.
    pub fn micro_batch(&self) -> usize {
        match self {
            Step::Compute(action) => action.micro_batch,
            Step::Recv { message, .. } | Step::Send { message, .. } => message.micro_batch,
        }
    }

    /// The same step of another micro-batch.
    #[must_use]
    pub fn of(mut self, number: usize) -> Step {
        match &mut self {
            Step::Compute(action) => action.micro_batch = number,
            Step::Recv { message, .. } | Step::Send { message, .. } => message.micro_batch = number,
        }
        self
    }

    /// The same step of a later micro-batch.
    #[must_use]
    pub fn later(self, by: usize) -> Step {
        self.of(self.micro_batch() + by)
    }
}

/// The program of a rank without repetitions; `None` where it has none, or where they cannot be left out.
pub fn abridge(steps: &[Step]) -> Option<Abridged> {
    let middle = steps.len() / 2;
    let pivot = steps.get(middle)?;
    let again =
        |at: &usize| steps[*at].of(0) == pivot.of(0) && steps[*at].micro_batch() > pivot.micro_batch();
    let lengths = (middle + 1..steps.len()).filter(again).map(|at| at - middle).take(TRIED);
    let found = lengths.filter_map(|length| omit(steps, middle, length));
    found.max_by_key(|omitted| (omitted.all_micro_batches(), std::cmp::Reverse(omitted.steps))).and_then(
        |omitted| {
            let steps = without(steps, omitted);
            is_complete(&steps).then_some(Abridged { steps, omitted })
        },
    )
}

/// The periods of `length` steps around `middle` that can be left out, if there are any.
fn omit(steps: &[Step], middle: usize, length: usize) -> Option<Omitted> {
    let micro_batches = steps[middle + length].micro_batch() - steps[middle].micro_batch();
    let repeats = |at: usize| steps.get(at + length) == Some(&steps[at].later(micro_batches));
    let first = (0..middle).rev().take_while(|at| repeats(*at)).last().unwrap_or(middle);
    let end = (middle..steps.len()).find(|at| !repeats(*at)).unwrap_or(steps.len());
    let periods = ((end - first) / length + 1).checked_sub(BEFORE + BEHIND).filter(|periods| *periods > 0)?;
    Some(Omitted { at: first + BEFORE * length, steps: length, micro_batches, periods })
}

fn without(steps: &[Step], omitted: Omitted) -> Vec<Step> {
    let behind = omitted.at + omitted.steps * omitted.periods;
    let earlier = |step: &Step| step.of(step.micro_batch().wrapping_sub(omitted.all_micro_batches()));
    steps[..omitted.at].iter().copied().chain(steps[behind..].iter().map(earlier)).collect()
}

/// Returns whether each kind of step is there once for each of the same micro-batches.
fn is_complete(steps: &[Step]) -> bool {
    let Some(last) = steps.iter().map(Step::micro_batch).max() else { return false };
    let kinds: HashSet<Step> = steps.iter().map(|step| step.of(0)).collect();
    let distinct: HashSet<&Step> = steps.iter().collect();
    distinct.len() == steps.len()
        && last.checked_add(1).is_some_and(|each| kinds.len().checked_mul(each) == Some(steps.len()))
}
