//! When a run that has failed is started again, and with how many ranks.

use phalanx_launch::Failure;

use crate::arguments::train_args::TrainArgs;
use crate::folders::run_folder::RunFolder;
use crate::host::exit_status;
use crate::host::signals::Signals;
use crate::reports::final_report::Reached;

/// The restarts of a run.
pub struct Restarts {
    max: usize,
    min_ranks: Option<usize>,
    done: usize,
    /// Ranks of the last start, as far as known.
    ranks: Option<usize>,
    /// The last step of the start before the last.
    reached: Option<u64>,
}

impl Restarts {
    /// As the user wants them.
    pub fn new(args: &TrainArgs) -> Restarts {
        let TrainArgs { max_restarts, min_nproc, overrides, .. } = args;
        Restarts { max: *max_restarts, min_ranks: *min_nproc, done: 0, ranks: overrides.nproc, reached: None }
    }

    /// Largest number of restarts.
    pub fn allowed(&self) -> usize {
        self.max
    }

    /// The number of ranks with which the run starts again after `error`; `None` if it does not. `left`: the ranks that the
    /// hosts which are left can run, if there are several hosts. `fits`: whether the layout allows a number of ranks.
    ///
    /// Fewer ranks are taken when hosts are lost, or when a start has failed before it made any step.
    pub fn next(
        &mut self,
        error: &anyhow::Error,
        folder: &RunFolder,
        signals: &Signals,
        left: Option<usize>,
        fits: impl Fn(usize) -> bool,
    ) -> Option<usize> {
        let failure = error.downcast_ref::<Failure>()?;
        if self.done == self.max || signals.came() || exit_status::is_of_checkpoint(failure) {
            return None;
        }
        let before = self.ranks.unwrap_or(failure.world_size);
        let reached = Reached::read(folder).unwrap_or_default().step;
        let stuck = self.done > 0 && self.reached == Some(reached);
        let ranks = choose(before, left.unwrap_or(before), stuck, self.min_ranks, fits)?;
        self.done += 1;
        (self.ranks, self.reached) = (Some(ranks), Some(reached));
        Some(ranks)
    }

    /// Describes the restart.
    pub fn describe(&self, folder: &RunFolder, ranks: usize) -> String {
        let checkpoint = folder.newest().ok().and_then(|found| found.checkpoint);
        let from = checkpoint
            .map_or("from the beginning, as no checkpoint was saved".to_string(), |checkpoint| {
                format!("from the checkpoint of step {}", checkpoint.step())
            });
        format!("restart {} of {}: {ranks} rank(s) start again {from}", self.done, self.max)
    }
}

/// The largest allowed number of ranks: at most `before` and `left`, less than `before` if the run is `stuck`, and not below
/// `min`; without `min` only `before` itself.
fn choose(
    before: usize,
    left: usize,
    stuck: bool,
    min: Option<usize>,
    fits: impl Fn(usize) -> bool,
) -> Option<usize> {
    let Some(min) = min else { return (left >= before).then_some(before) };
    let max = left.min(if stuck { before.saturating_sub(1).max(min) } else { before });
    (min.max(1)..=max).rev().find(|ranks| *ranks == before || fits(*ranks))
}

#[cfg(test)]
mod tests {
    use super::choose;

    #[test]
    fn as_many_ranks_as_are_left_and_as_the_layout_allows() {
        let even = |ranks: usize| ranks.is_multiple_of(2);
        for (before, left, stuck, min, chosen) in [
            (4, 4, false, None, Some(4)),
            (4, 3, false, None, None),
            (4, 3, false, Some(1), Some(2)),
            (4, 3, false, Some(3), None),
            (4, 4, true, Some(1), Some(2)),
            (4, 4, true, None, Some(4)),
            (2, 2, true, Some(2), Some(2)),
            (3, 3, false, Some(1), Some(3)),
            (4, 0, false, Some(1), None),
        ] {
            assert_eq!(choose(before, left, stuck, min, even), chosen, "{before} {left} {stuck} {min:?}");
        }
    }
}
