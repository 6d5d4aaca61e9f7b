//! What joins the devices of a machine. The time of collectives over it is in [`crate::collective_times`].
//!
//! Links lie in levels: the first joins neighbouring devices (NVLink), the next the groups of these (a network), and so on. The ranks of a
//! group that lie in one group of a level send to others through the links of all of them together, as in NCCL's rings over several hosts;
//! a message, through the link of its sender. The level that takes longest is the time of the collective: all levels work at once, each on
//! a part of the buffer. Steps have a time of their own: a ring of u units passes through u - 1 of them; a sum on every rank takes a tree
//! of 2 log2 u where that is shorter.
//!
//! All ranks do the same at the same time, so devices that share a link (`shared_by`) each have their part of its rate. Collectives of
//! several groups of a rank that run at once share its links: what is issued later takes the time that earlier ones leave ([`Busy`]).

use crate::trace::CollectiveOp;
use crate::transfer::TransferRate;
use serde::{Deserialize, Serialize};

/// Links of one level.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Name for people.
    pub name: String,
    /// Neighbouring devices that it joins; left out, all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub devices: Option<usize>,
    /// Devices that share one link.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub shared_by: usize,
    /// Rate at which a link sends, in one direction.
    pub time: TransferRate,
    /// Microseconds of each step of a collective.
    #[serde(default)]
    pub step_us: f64,
}

fn one() -> usize {
    1
}

fn is_one(count: &usize) -> bool {
    *count == 1
}

impl Link {
    /// Seconds in which a device sends so many bytes, while the devices that share the link do the same.
    pub(crate) fn seconds(&self, bytes: u64) -> f64 {
        self.time.seconds(bytes.saturating_mul(self.shared_by as u64))
    }

    /// Seconds that the steps of an operation among so many units add.
    pub(crate) fn steps_s(&self, op: CollectiveOp, units: usize) -> f64 {
        let ring = units.saturating_sub(1) as f64;
        let steps = match op {
            CollectiveOp::AllReduce => (2.0 * ring).min(2.0 * (units.max(1) as f64).log2().ceil()),
            CollectiveOp::Send | CollectiveOp::Recv => 1.0,
            _ => ring,
        };
        steps * self.step_us * 1e-6
    }
}

/// When a rank's link of a level works: stretches in order, of which those that are over are dropped.
#[derive(Debug, Default)]
pub(crate) struct Busy(Vec<(f64, f64)>);

impl Busy {
    /// Takes so many seconds from `start` on, in the time that earlier takers leave, and returns the end. No later taker starts before `now`.
    pub(crate) fn take(&mut self, start: f64, seconds: f64, now: f64) -> f64 {
        self.0.retain(|(_, end)| *end > now);
        let (mut end, mut left) = (start, seconds);
        for (busy, free) in self.0.iter().filter(|(_, free)| *free > start) {
            let before = busy - end;
            if left <= before {
                break;
            }
            left -= before.max(0.0);
            end = *free;
        }
        end += left;
        if seconds > 0.0 {
            let from = self.0.partition_point(|(_, free)| *free < start);
            let to = self.0.partition_point(|(busy, _)| *busy <= end).max(from);
            let whole =
                self.0[from..to].iter().fold((start, end), |all, one| (all.0.min(one.0), all.1.max(one.1)));
            self.0.splice(from..to, [whole]);
        }
        end
    }
}

/// Checks the levels; the error is what is expected of them.
pub(crate) fn check_levels(links: &[Link]) -> Result<(), String> {
    let sizes: Vec<usize> = links.iter().map(|link| link.devices.unwrap_or(usize::MAX)).collect();
    let nests =
        |pair: &[usize]| pair[0] < pair[1] && (pair[1] == usize::MAX || pair[1].is_multiple_of(pair[0]));
    match links.iter().find(|link| link.shared_by == 0 || !(0.0..1e9).contains(&link.step_us)) {
        Some(_) => Err("shared_by of at least 1 and step_us of 0 or more".to_string()),
        None if sizes.contains(&0) => Err("devices of at least 1".to_string()),
        None if !sizes.windows(2).all(nests) => {
            Err("levels from the nearest to the farthest, whose devices are multiples of those before"
                .to_string())
        }
        None => Ok(()),
    }
}

/// The number of units of so many neighbouring devices in which ranks lie, and the ranks of the one with fewest.
pub(crate) fn units_of(members: &[usize], devices: usize) -> (usize, usize) {
    let mut units: Vec<usize> = members.iter().map(|rank| rank / devices).collect();
    units.sort_unstable();
    let runs = units.chunk_by(|a, b| a == b);
    (runs.clone().count(), runs.map(<[usize]>::len).min().unwrap_or(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What comes later fills the gaps, and what is over is forgotten.
    #[test]
    fn later_takers_have_the_time_that_is_left() {
        let mut link = Busy::default();
        assert_eq!(link.take(1.0, 2.0, 0.0), 3.0);
        assert_eq!(link.take(5.0, 1.0, 0.0), 6.0);
        // From 0: 1 s before the first, 2 s between both, and 1 s behind.
        assert_eq!(link.take(0.0, 4.0, 0.0), 7.0);
        assert_eq!(link.0, [(0.0, 7.0)]);
        assert_eq!(link.take(6.0, 1.0, 6.0), 8.0);
        assert_eq!((link.take(9.0, 0.0, 9.0), link.0.len()), (9.0, 0));
        // It fits before what was issued earlier.
        assert_eq!(link.take(12.0, 1.0, 9.0), 13.0);
        assert_eq!(link.take(10.0, 1.0, 9.0), 11.0);
        assert_eq!(link.0, [(10.0, 11.0), (12.0, 13.0)]);
    }
}
