//! The learning rate that a configuration asks for.
//!
//! `schedule.decay_steps` is `train.steps` at the start of a run, and is written down there: a run that is given
//! more steps later stays at `schedule.min_lr` instead of decaying over the new number.

use phalanx_optim::Schedule;
use phalanx_optim::schedule::{Decay, Fall, Warmup};

use super::check::refuse;
use super::{ConfigError, LastShape, RunConfig, ScheduleConfig, ScheduleKind, WarmupShape};

impl RunConfig {
    /// The learning rate as a function of the step.
    pub fn learning_rate(&self) -> Schedule {
        let ScheduleConfig { cycles, power, timescale, last_steps, last_shape, .. } = self.schedule;
        let (warmup, decay_steps) =
            (self.warmup_steps(), self.schedule.decay_steps.unwrap_or(self.train.steps));
        let fall = match last_shape {
            LastShape::Cosine => Fall::Cosine,
            LastShape::Linear => Fall::Linear,
            LastShape::Sqrt => Fall::Sqrt,
        };
        let decay = match self.schedule.kind {
            ScheduleKind::Cosine => Decay::Cosine,
            ScheduleKind::Linear => Decay::Linear,
            ScheduleKind::Constant => Decay::Constant,
            ScheduleKind::CosineWithRestarts => Decay::Restarts(cycles),
            ScheduleKind::Polynomial => Decay::Polynomial(power),
            ScheduleKind::InverseSqrt => {
                Decay::InverseSqrt(timescale.unwrap_or(if warmup > 0 { warmup } else { 10_000 }))
            }
            ScheduleKind::Wsd => Decay::Last(last_steps.unwrap_or(decay_steps.div_ceil(10)), fall),
        };
        let warmup_shape = match self.schedule.warmup_shape {
            WarmupShape::Linear => Warmup::Linear,
            WarmupShape::FromZero => Warmup::FromZero,
            WarmupShape::DeepspeedLinear => Warmup::DeepspeedLinear,
            WarmupShape::DeepspeedLog => Warmup::DeepspeedLog,
        };
        Schedule {
            decay,
            lr: self.optimizer.lr,
            min_lr: self.schedule.min_lr,
            warmup,
            warmup_shape,
            decay_steps,
            restart_step: self.schedule.restart_step,
        }
    }

    /// Steps of a run: `train.steps`, or those of `train.epochs` passes over `sequences` sequences, rounded up.
    pub fn steps(&self, sequences: u64) -> u64 {
        let steps =
            |epochs: f64| (epochs * sequences as f64 / self.batch.global as f64).ceil().max(1.0) as u64;
        self.train.epochs.map_or(self.train.steps, steps)
    }

    /// Steps of warm-up: `schedule.warmup`, or `schedule.warmup_share` of the steps of the decay, rounded up as by transformers.
    pub fn warmup_steps(&self) -> u64 {
        let schedule = &self.schedule;
        let steps = schedule.decay_steps.unwrap_or(self.train.steps);
        schedule.warmup_share.map_or(schedule.warmup, |share| (share * steps as f64).ceil() as u64)
    }

    /// The step at which the decay ends: `schedule.decay_steps`, or `train.steps` if it is left out; `None` if the
    /// run does not reach the decay.
    pub fn decay_end(&self) -> Option<u64> {
        let decays = self.schedule.kind.ends() && self.train.steps > self.warmup_steps();
        self.schedule.decay_steps.or(decays.then_some(self.train.steps))
    }

    pub(super) fn check_learning_rate(&self) -> Result<(), ConfigError> {
        let schedule = &self.schedule;
        if let Some(steps) = schedule.decay_steps.filter(|steps| *steps < self.warmup_steps()) {
            let expected = format!(
                "must be at least schedule.warmup = {}: it counts the steps of warm-up, too",
                self.warmup_steps()
            );
            return Err(refuse("schedule.decay_steps", steps, expected));
        }
        if let Some(steps) = schedule
            .last_steps
            .filter(|steps| *steps + self.warmup_steps() > schedule.decay_steps.unwrap_or(self.train.steps))
        {
            let expected =
                "must be at most the steps behind the warm-up, up to schedule.decay_steps or train.steps";
            return Err(refuse("schedule.last_steps", steps, expected));
        }
        if let Some(step) = schedule.restart_step.filter(|step| *step >= self.train.steps) {
            let expected = format!("must be less than train.steps = {}, or left out", self.train.steps);
            return Err(refuse("schedule.restart_step", step, expected));
        }
        Ok(())
    }
}

impl ScheduleKind {
    /// Returns whether the rate reaches `schedule.min_lr` at `schedule.decay_steps`.
    pub fn ends(self) -> bool {
        !matches!(self, ScheduleKind::Constant | ScheduleKind::InverseSqrt)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(steps: u64, schedule: ScheduleConfig) -> RunConfig {
        let mut config = RunConfig { schedule, ..RunConfig::default() };
        config.train.steps = steps;
        config
    }

    #[test]
    fn keys_that_cannot_work_are_refused_by_name() {
        let cosine = ScheduleConfig { warmup: 10, ..ScheduleConfig::default() };
        let constant = ScheduleConfig { kind: ScheduleKind::Constant, ..ScheduleConfig::default() };
        for (schedule, words) in [
            (
                ScheduleConfig { decay_steps: Some(0), ..cosine.clone() },
                "schedule.decay_steps = 0: must be at least 1",
            ),
            (ScheduleConfig { decay_steps: Some(9), ..cosine.clone() }, "at least schedule.warmup = 10"),
            (ScheduleConfig { restart_step: Some(0), ..cosine.clone() }, "schedule.restart_step = 0"),
            (ScheduleConfig { restart_step: Some(100), ..cosine.clone() }, "less than train.steps = 100"),
            (
                ScheduleConfig { decay_steps: Some(50), ..constant.clone() },
                "schedule.decay_steps = 50: is for schedule.kind",
            ),
            (
                ScheduleConfig { restart_step: Some(50), ..constant.clone() },
                "schedule.restart_step = 50: is for schedule.kind",
            ),
        ] {
            let refusal = config(100, schedule).check().unwrap_err().to_string();
            assert!(refusal.contains(words), "no {words:?} in: {refusal}");
        }
        for schedule in [
            cosine.clone(),
            constant,
            ScheduleConfig { decay_steps: Some(10), ..cosine.clone() },
            ScheduleConfig { decay_steps: Some(500), restart_step: Some(99), ..cosine },
        ] {
            config(100, schedule).check().unwrap();
        }
    }

    #[test]
    fn the_end_of_the_decay_is_written_down_once_the_run_reaches_the_decay() {
        let resolved = |steps, schedule| {
            let mut config = config(steps, schedule);
            let before = config.learning_rate();
            config.schedule.decay_steps = config.decay_end();
            assert_eq!(config.learning_rate(), before);
            config.check().unwrap();
            config.schedule.decay_steps
        };
        let cosine = ScheduleConfig { warmup: 10, ..ScheduleConfig::default() };
        assert_eq!(resolved(100, cosine.clone()), Some(100));
        assert_eq!(resolved(100, ScheduleConfig { decay_steps: Some(40), ..cosine.clone() }), Some(40));
        assert_eq!(resolved(10, cosine), None);
        assert_eq!(
            resolved(100, ScheduleConfig { kind: ScheduleKind::Constant, ..ScheduleConfig::default() }),
            None
        );
    }
}
