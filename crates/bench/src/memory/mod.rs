//! `phalanx bench memory`: steps under several placements and budgets, with what each memory held over a step.

pub mod drawing;
mod lanes;
pub mod report;
mod svg;

use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use phalanx_plan::trace::{Memory, PhaseName};
use phalanx_plan::{Lanes, Peak, Stretch, lanes_of};
use phalanx_tensor::profile::{Profile, Span};
use phalanx_train::RunPlan;
use phalanx_train::metrics::resident_bytes_peak;
use serde::{Deserialize, Serialize};

use crate::steps::{RankSetup, StepCounts, Stepper, Timed};

/// Parts of a step that a plot can tell apart.
const STRETCHES: f64 = 2000.0;

/// The bytes that are live in a memory, each time they change: seconds since the step began, and bytes.
pub type Line = Vec<(f64, u64)>;

/// Measurements of one rank under one placement.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MemoryFigures {
    /// Seconds of each timed step.
    pub step_s: Vec<f64>,
    /// Loss of each timed step.
    pub losses: Vec<f32>,
    /// Mean seconds of a step in which this rank waited for collectives.
    pub waited_s: f64,
    /// Planned peaks of a step in device, host and disk memory.
    pub planned: [Peak; 3],
    /// Measured peaks of the last step in the same memories.
    pub measured: [Peak; 3],
    /// For the same memories: what the last step held.
    pub lines: [Line; 3],
    /// When each stream worked in the last step, in the order of `phalanx_plan::LANES`. Collectives are not recorded.
    pub lanes: Lanes,
    /// Seconds of the last step, whose lines were recorded.
    pub recorded_s: f64,
    /// Peak of the resident bytes of the process, without other ranks' memory.
    pub resident_bytes_peak: u64,
}

/// Warm-up, timed steps, and one more step whose allocations are recorded with their times.
///
/// # Errors
/// When the system refuses memory, or a rank dies.
pub fn measure(setup: &RankSetup<'_>, plan: &RunPlan, counts: StepCounts) -> Result<MemoryFigures> {
    let StepCounts { seed, warmup, steps } = counts;
    let own = plan.of(setup.rank);
    let profile = Arc::new(Profile::default());
    profile.pause(true);
    let mut stepper = Stepper::new(setup, plan, seed, setup.device.clone().profiled(Arc::clone(&profile)))?;
    let Timed { step_s, losses, exposed_s, .. } = stepper.timed(warmup, steps, &mut |_, _, _| Ok(()))?;
    let device = setup.device.clone();
    let arenas = || [device.arena(), device.host_arena(), device.disk_arena()];
    arenas().into_iter().for_each(|arena| arena.record_timeline());
    profile.record_spans();
    profile.pause(false);
    let begin = Instant::now();
    stepper.timed(0, 1, &mut |_, _, _| Ok(()))?;
    let recorded_s = begin.elapsed().as_secs_f64();
    profile.pause(true);
    let lanes = lanes_of(&stretches(profile.take_spans(), begin), recorded_s / STRETCHES);
    let lines = arenas().map(|arena| {
        let events = arena.take_timeline().into_iter();
        events.map(|(at, bytes)| (at.saturating_duration_since(begin).as_secs_f64(), bytes)).collect()
    });
    let measured = arenas().map(|arena| arena.phase_peak().unwrap_or_default());
    let planned = [&own.memory, &own.host, &own.disk]
        .map(|memory| memory.phase(PhaseName::Step).map(|phase| phase.peak).unwrap_or_default());
    stepper.engine().group().barrier().wait()?;
    let resident_bytes_peak = resident_bytes_peak((setup.foreign_bytes)());
    Ok(MemoryFigures {
        step_s,
        losses,
        waited_s: exposed_s,
        planned,
        measured,
        lines,
        lanes,
        recorded_s,
        resident_bytes_peak,
    })
}

/// Recorded calls, in seconds since `begin`.
pub(crate) fn stretches(spans: Vec<Span>, begin: Instant) -> Vec<Stretch> {
    let stretch = |Span { stream, name, bytes, start, time }| {
        let start = start.saturating_duration_since(begin).as_secs_f64();
        Stretch { stream, group: "", name, bytes, start, end: start + time.as_secs_f64() }
    };
    spans.into_iter().map(stretch).collect()
}

impl MemoryFigures {
    /// The median of the timed steps.
    pub fn median_s(&self) -> f64 {
        let mut sorted = self.step_s.clone();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
    }
}

/// One placement under one budget.
#[derive(Clone, Debug)]
pub struct MemoryRun {
    /// `device`, `host`, `nvme` or `auto`.
    pub placement: &'static str,
    /// The budget of `auto`: as a share of what `device` needs, and in bytes.
    pub budget: Option<(f64, u64)>,
    /// The figures, or the reason why there are none.
    pub ran: Result<MemoryRan, String>,
}

/// Planned and measured figures of one placement.
#[derive(Clone, Debug)]
pub struct MemoryRan {
    /// Figures by rank.
    pub ranks: Vec<MemoryFigures>,
    /// Device memory that the largest rank needs.
    pub device_bytes: u64,
    /// Bytes that a step of rank 0 copies from one memory to another, by pair of memories.
    pub copies: Vec<(Memory, Memory, u64)>,
    /// Planned bytes of rank 0 in a step, after each allocation and free, in each memory.
    pub planned_lines: [Vec<u64>; 3],
    /// When each stream of rank 0 works by plan, at the machine's rates; `None` where a rate is unknown.
    pub planned_lanes: Option<Lanes>,
    /// Seconds in which compute waits for copies, by the trace at the machine's rates; `None` where a rate is unknown.
    pub exposed_s: Option<f64>,
}

impl MemoryRan {
    /// Median seconds of a step, of the slowest rank.
    pub fn step_s(&self) -> f64 {
        self.ranks.iter().map(MemoryFigures::median_s).fold(0.0, f64::max)
    }

    /// Bytes that a step copies between memories.
    pub fn moved_bytes(&self) -> u64 {
        self.copies.iter().map(|(_, _, bytes)| bytes).sum()
    }

    /// The largest planned and measured peak of all ranks in one memory (0 device, 1 host, 2 disk).
    pub fn peaks(&self, memory: usize) -> [u64; 2] {
        let max = |of: &dyn Fn(&MemoryFigures) -> u64| self.ranks.iter().map(of).max().unwrap_or(0);
        [max(&|rank| rank.planned[memory].bytes), max(&|rank| rank.measured[memory].bytes)]
    }
}

impl MemoryRun {
    /// Adds the steps of another round; everything else is that of the latest round.
    pub fn add_round(&mut self, latest: Result<MemoryRan, String>) {
        let earlier = std::mem::replace(&mut self.ran, latest);
        let (Ok(earlier), Ok(latest)) = (earlier, &mut self.ran) else { return };
        for (rank, earlier) in latest.ranks.iter_mut().zip(earlier.ranks) {
            rank.step_s.splice(..0, earlier.step_s);
            rank.losses.splice(..0, earlier.losses);
        }
    }

    /// `auto, 50%`
    pub fn name(&self) -> String {
        match self.budget {
            Some((share, _)) => format!("{}, {:.0}%", self.placement, 100.0 * share),
            None => self.placement.to_string(),
        }
    }

    /// The same for the name of a file: `auto-50`.
    pub fn file_stem(&self) -> String {
        self.name().replace(", ", "-").replace('%', "")
    }
}
