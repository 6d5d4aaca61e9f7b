//! Depth of a schedule: the number of messages that its channels must hold.
//!
//! A channel of depth d takes d receive buffers, and up to d messages that its sender keeps until they have arrived
//! ([`super::walk`]). With too few, senders wait for their receivers, and ranks may come to wait for each other. The depth
//! of a schedule is the smallest with which it takes no longer than with channels without limit, if every F, I and W takes
//! 1 and messages arrive at once: 1 for `gpipe`, `1f1b` and the zero-bubble schedules.

use super::action::Action;
use super::lower::{Step, lower};
use super::schedule::PipelineSchedule;
use super::walk::walk;

/// A depth that no channel reaches.
pub const UNLIMITED: usize = usize::MAX;

/// The depth of the channels of a schedule that [`super::check()`] accepts.
pub fn depth(schedule: &PipelineSchedule) -> usize {
    let steps = lower(schedule);
    let Some(shortest) = makespan(&steps, UNLIMITED) else { return 1 };
    let is_enough = |depth: usize| makespan(&steps, depth).is_some_and(|time| time <= shortest);
    let mut enough = 1;
    while !is_enough(enough) {
        enough *= 2;
    }
    let mut too_small = enough / 2;
    while enough - too_small > 1 {
        let between = too_small + (enough - too_small) / 2;
        *(if is_enough(between) { &mut enough } else { &mut too_small }) = between;
    }
    enough
}

/// When the last action ends; `None` if ranks wait for each other.
fn makespan(steps: &[Vec<Step>], depth: usize) -> Option<f64> {
    let unit = |action: Action| action.kind.parts().len() as f64;
    let ranks = walk(steps, unit, 0.0, depth).ok()?;
    let ends = ranks.iter().filter_map(|spans| spans.last()).map(|span| span.end);
    Some(ends.fold(0.0, f64::max))
}
