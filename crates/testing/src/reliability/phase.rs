//! The phases of a run at which a fault strikes, recognised by the files in its folder.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::hostile::Random;
use crate::reliability::command::Running;
use crate::reliability::folder;
use crate::reliability::mesh::{EVERY, STEPS};
use crate::reliability::world::Reference;

/// Longest wait for a moment; a whole run takes a tenth of this.
const PATIENCE: Duration = Duration::from_secs(8);

/// A part of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Before the first step is done.
    Start,
    Step,
    Evaluation,
    Save,
    /// After the last step.
    Exit,
}

impl Phase {
    pub(crate) const ALL: [Phase; 5] =
        [Phase::Start, Phase::Step, Phase::Evaluation, Phase::Save, Phase::Exit];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Phase::Start => "start",
            Phase::Step => "step",
            Phase::Evaluation => "evaluation",
            Phase::Save => "save",
            Phase::Exit => "exit",
        }
    }
}

/// Waits for a random moment of `phase`; returns early when the command ends.
pub(crate) fn await_moment(
    running: &mut Running,
    run: &Path,
    phase: Phase,
    reference: &Reference,
    random: &mut Random,
) {
    let saves = STEPS / EVERY;
    let step = EVERY * (1 + random.below(saves as usize - 1) as u64);
    match phase {
        Phase::Start => pause(reference.first_step.mul_f64(random.fraction())),
        Phase::Step => {
            let step = 1 + random.below(STEPS as usize - 5) as u64;
            running.wait_for(PATIENCE, || reached(run, step));
            pause(Duration::from_micros(random.below(2000) as u64));
        }
        Phase::Evaluation => {
            running.wait_for(PATIENCE, || reached(run, step));
            pause(Duration::from_micros(random.below(300) as u64));
        }
        Phase::Save => {
            let folder = run.join("checkpoints");
            let seen = || {
                folder.join(format!("step-{step}.tmp")).exists()
                    || folder.join(format!("step-{step}")).exists()
            };
            running.wait_for(PATIENCE, seen);
            pause(Duration::from_micros(random.below(1500) as u64));
        }
        Phase::Exit => {
            running.wait_for(PATIENCE, || reached(run, STEPS));
            pause(Duration::from_micros(random.below(8000) as u64));
        }
    }
}

/// Returns whether the run's metrics have `step` or a later one.
pub(crate) fn reached(run: &Path, step: u64) -> bool {
    let written = fs::metadata(run.join("metrics.jsonl")).is_ok_and(|file| file.len() > 0);
    written && folder::losses(run).iter().any(|(done, _)| *done >= step)
}

/// Sleeps, to the microsecond where it is short.
pub(crate) fn pause(time: Duration) {
    let start = Instant::now();
    if time > Duration::from_millis(2) {
        std::thread::sleep(time - Duration::from_millis(1));
    }
    while start.elapsed() < time {
        std::thread::yield_now();
    }
}
