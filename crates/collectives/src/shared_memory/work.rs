//! Patience of a rank with another one that works: it waits as long as that takes.
//!
//! The launcher of a rank sees whether its process computes, and counts this up in the rank's cell; launchers pass the
//! cells of their ranks on to other hosts. A rank that waits samples these numbers of all ranks a few times before its
//! deadline. If the rank at the end of the chain of waits has worked since the last sample, the wait begins anew. Ranks that
//! are threads have no launcher, and their numbers do not change.

use std::time::Duration;

use crate::shared_memory::control::Control;

/// Samples within the deadline.
const SAMPLES: u32 = 8;

/// The work of all ranks, as a waiting rank has last sampled it.
#[derive(Default)]
pub(crate) struct WorkSeen {
    /// By rank; empty before the first sample.
    work: Vec<u64>,
    /// Time of waiting at which the next sample is due.
    due: Duration,
}

impl WorkSeen {
    /// Returns whether a sample is due after so much waiting.
    pub(crate) fn is_due(&self, waited: Duration) -> bool {
        waited >= self.due
    }

    /// Samples. Returns the time that counts as waited: none if rank `cause` has worked since the last sample.
    pub(crate) fn waited(
        &mut self,
        control: &Control,
        waited: Duration,
        deadline: Duration,
        cause: usize,
    ) -> Duration {
        let work: Vec<u64> = (0..control.world_size()).map(|rank| control.rank(rank).work()).collect();
        let has_worked = self.work.get(cause).is_some_and(|before| *before != work[cause]);
        let waited = if has_worked { Duration::ZERO } else { waited };
        self.work = work;
        self.due = waited + deadline / SAMPLES;
        waited
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_tensor::Region;

    #[test]
    fn a_wait_begins_anew_when_its_cause_has_worked() {
        let control = Control::create(Region::anonymous(Control::bytes(3)).unwrap(), 3, 2);
        let deadline = Duration::from_secs(8);
        let seconds = Duration::from_secs;
        let mut seen = WorkSeen::default();
        assert!(seen.is_due(Duration::ZERO));
        assert_eq!(seen.waited(&control, Duration::ZERO, deadline, 1), Duration::ZERO);
        assert!(!seen.is_due(Duration::from_millis(999)) && seen.is_due(seconds(1)));
        // Nobody works, then a rank that is not the cause.
        assert_eq!(seen.waited(&control, seconds(1), deadline, 1), seconds(1));
        control.rank(2).note_work();
        assert_eq!(seen.waited(&control, seconds(2), deadline, 1), seconds(2));
        // Another rank becomes the cause: that it worked before the last sample does not count.
        assert_eq!(seen.waited(&control, seconds(3), deadline, 2), seconds(3));
        control.rank(1).note_work();
        assert_eq!(seen.waited(&control, seconds(4), deadline, 1), Duration::ZERO);
        assert!(!seen.is_due(Duration::ZERO) && seen.is_due(seconds(1)));
    }
}
