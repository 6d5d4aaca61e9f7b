//! The learning rate as a function of the step.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A learning rate schedule: one of the engine's ([`Schedule`]), or the caller's own. A function of the step is one.
pub trait LearningRate: Send + Sync {
    /// Learning rate of step `step`, counted from 0. Steps that were skipped do not count, but for those before a restart.
    fn lr(&self, step: u64) -> f64;

    /// The step of the run behind which the schedule begins again, if it does.
    fn restart_step(&self) -> Option<u64> {
        None
    }
}

impl<F: Fn(u64) -> f64 + Send + Sync> LearningRate for F {
    fn lr(&self, step: u64) -> f64 {
        self(step)
    }
}

impl LearningRate for Schedule {
    fn lr(&self, step: u64) -> f64 {
        Schedule::lr(self, step)
    }

    fn restart_step(&self) -> Option<u64> {
        self.restart_step
    }
}

/// A restart that has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restarted {
    /// The step of the run behind which it began.
    pub step: u64,
    /// Number of steps before it that were skipped.
    pub skipped: u64,
}

/// Progress of a run, as its learning rate counts: steps that were skipped (f16) do not count. A restart nevertheless begins
/// after its step of the run, however many were skipped before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CountedSteps {
    /// Number of steps that were applied.
    pub applied: u64,
    /// Number of steps that were skipped.
    pub skipped: u64,
    /// The last restart.
    pub restarted: Option<Restarted>,
}

impl CountedSteps {
    /// The number of the next step, from 0, for which `schedule` says the rate. Remembers a restart that has begun.
    pub fn next(&mut self, schedule: &dyn LearningRate) -> u64 {
        let done = self.applied + self.skipped;
        let begun = schedule.restart_step().filter(|step| *step <= done).map(|step| {
            let new = Restarted { step, skipped: self.skipped };
            self.restarted.filter(|restarted| restarted.step == step).unwrap_or(new)
        });
        self.restarted = begun;
        self.applied + begun.map_or(0, |restarted| restarted.skipped)
    }
}

impl fmt::Debug for dyn LearningRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LearningRate that begins with {}", self.lr(0))
    }
}

/// Shape of the decay after warm-up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Decay {
    /// Half a cosine.
    Cosine,
    /// A straight line.
    Linear,
    /// No decay.
    Constant,
    /// So many half cosines, each from the highest rate (transformers' `cosine_with_restarts`).
    Restarts(u64),
    /// The share that is left of the decay, to this power (transformers' `polynomial`).
    Polynomial(f64),
    /// `sqrt(t / (k + t - w))` at step k behind a warm-up of w steps, for this t (transformers' `inverse_sqrt`). It never ends.
    InverseSqrt(u64),
    /// No decay but over the last steps, of this number, in this shape (warm-up, stable, decay).
    Last(u64, Fall),
}

/// Shape of a decay over the last steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fall {
    /// Half a cosine.
    Cosine,
    /// A straight line.
    Linear,
    /// One less the root of the share that is done.
    Sqrt,
}

impl Fall {
    /// The share that is left where `done` of the decay is done.
    fn left(self, done: f64) -> f64 {
        match self {
            Fall::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * done).cos()),
            Fall::Linear => 1.0 - done,
            Fall::Sqrt => 1.0 - done.sqrt(),
        }
    }
}

/// Rate during a warm-up of w steps, as a share of the highest, at step k counted from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Warmup {
    /// `(k + 1) / (w + 1)`: no step has rate 0 (nanoGPT).
    #[default]
    Linear,
    /// `k / w` (transformers).
    FromZero,
    /// The same one step late, as is a linear decay (DeepSpeed's schedulers, which count the updates before the last one).
    DeepspeedLinear,
    /// `ln(k + 1) / ln(w)`, one step late (DeepSpeed).
    DeepspeedLog,
}

/// Warm-up, then a decay to `min_lr` at `decay_steps`, where it stays (nanoGPT's `get_lr`); with a warm
/// restart, the same once more from there (Loshchilov and Hutter, arXiv 1608.03983).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// Shape of the decay after warm-up.
    pub decay: Decay,
    /// Learning rate after warm-up, the largest.
    pub lr: f64,
    /// Learning rate at the end of a cosine or linear decay.
    pub min_lr: f64,
    /// Number of warm-up steps.
    pub warmup: u64,
    /// Shape of the warm-up.
    pub warmup_shape: Warmup,
    /// Step, counted from the start or the restart, at which `min_lr` is reached.
    pub decay_steps: u64,
    /// Step of the run behind which warm-up and decay start again.
    pub restart_step: Option<u64>,
}

impl Schedule {
    /// Learning rate of step `step`, counted from 0.
    pub fn lr(&self, step: u64) -> f64 {
        let step = self.restart_step.and_then(|restart| step.checked_sub(restart)).unwrap_or(step);
        let counted = step.saturating_sub(self.delay());
        if counted < self.warmup {
            let (k, w) = (counted as f64, self.warmup as f64);
            let (share, whole) = match self.warmup_shape {
                Warmup::Linear => (k + 1.0, w + 1.0),
                Warmup::FromZero | Warmup::DeepspeedLinear => (k, w),
                Warmup::DeepspeedLog => ((k + 1.0).ln(), w.max(2.0).ln()),
            };
            return self.lr * share / whole;
        }
        // DeepSpeed's cosine is not late.
        let at = if self.decay == Decay::Cosine { step } else { counted };
        let begins = match self.decay {
            Decay::Last(steps, _) => self.decay_steps.saturating_sub(steps).max(self.warmup),
            _ => self.warmup,
        };
        let span = self.decay_steps.saturating_sub(begins).max(1);
        let done = (at.saturating_sub(begins) as f64 / span as f64).min(1.0);
        let left = match self.decay {
            Decay::Constant => return self.lr,
            Decay::Linear => Fall::Linear.left(done),
            Decay::Cosine => Fall::Cosine.left(done),
            Decay::Restarts(_) if done == 1.0 => 0.0,
            Decay::Restarts(times) => Fall::Cosine.left((times as f64 * done).fract()),
            Decay::Polynomial(power) => (1.0 - done).powf(power),
            Decay::InverseSqrt(scale) => {
                return self.lr / ((at - self.warmup + scale) as f64 / scale as f64).sqrt();
            }
            Decay::Last(_, fall) => fall.left(done),
        };
        self.min_lr + left * (self.lr - self.min_lr)
    }

    /// Number of steps, from the start or the restart, behind which a decay is at `min_lr`.
    pub fn steps_to_min(&self) -> u64 {
        let late = if self.decay == Decay::Cosine { 0 } else { self.delay() };
        self.decay_steps.max(self.warmup.saturating_add(1)).saturating_add(late)
    }

    /// Steps by which the warm-up and a linear decay are late.
    fn delay(&self) -> u64 {
        u64::from(matches!(self.warmup_shape, Warmup::DeepspeedLinear | Warmup::DeepspeedLog))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(decay: Decay, restart_step: Option<u64>) -> Schedule {
        Schedule {
            decay,
            lr: 1.0,
            min_lr: 0.1,
            warmup: 10,
            warmup_shape: Warmup::Linear,
            decay_steps: 110,
            restart_step,
        }
    }

    #[test]
    fn warms_up_then_decays_to_the_minimum() {
        let at = |decay, step| schedule(decay, None).lr(step);
        for decay in [Decay::Cosine, Decay::Linear, Decay::Constant] {
            assert!((at(decay, 0) - 1.0 / 11.0).abs() < 1e-12);
            assert!((at(decay, 9) - 10.0 / 11.0).abs() < 1e-12);
            assert!((at(decay, 10) - 1.0).abs() < 1e-12);
        }
        assert!((at(Decay::Cosine, 60) - 0.55).abs() < 1e-12);
        assert!((at(Decay::Linear, 35) - 0.775).abs() < 1e-12);
        assert!((at(Decay::Linear, 110) - 0.1).abs() < 1e-12);
        assert!((at(Decay::Cosine, 500) - 0.1).abs() < 1e-12);
        assert_eq!(at(Decay::Constant, 500), 1.0);
    }

    /// The formulas of the other programs, at the steps where they differ. DeepSpeed's begins with two updates of rate 0.
    #[test]
    fn warm_ups_have_the_shapes_of_other_programs() {
        for (shape, expected) in [
            (Warmup::FromZero, [0.0, 0.1, 0.9, 1.0, 0.991]),
            (Warmup::DeepspeedLinear, [0.0, 0.0, 0.8, 0.9, 1.0]),
            (Warmup::DeepspeedLog, [0.0, 0.0, 9f64.log10(), 1.0, 1.0]),
        ] {
            let schedule = Schedule { warmup_shape: shape, ..schedule(Decay::Linear, None) };
            let rates = [0, 1, 9, 10, 11].map(|step| schedule.lr(step));
            for (rate, expected) in rates.iter().zip(expected) {
                assert!((rate - expected).abs() < 1e-12, "{shape:?}: {rates:?}");
            }
        }
        let cosine = |shape| Schedule { warmup_shape: shape, ..schedule(Decay::Cosine, None) }.lr(60);
        assert_eq!(cosine(Warmup::DeepspeedLog), cosine(Warmup::Linear));
    }

    /// Steps that are skipped delay the decay, not the restart.
    #[test]
    fn a_restart_begins_behind_its_step_however_many_were_skipped() {
        let schedule = schedule(Decay::Linear, Some(150));
        let skips = |number: u64| number % 7 == 3;
        let rates = |from: CountedSteps, steps: std::ops::Range<u64>| {
            let mut counted = from;
            let rates: Vec<f64> = steps
                .map(|number| {
                    let lr = schedule.lr(counted.next(&schedule));
                    if skips(number) {
                        counted.skipped += 1
                    } else {
                        counted.applied += 1
                    }
                    lr
                })
                .collect();
            (rates, counted)
        };
        let (all, _) = rates(CountedSteps::default(), 0..300);
        let skipped_before = |number: u64| (0..number).filter(|n| skips(*n)).count() as u64;
        for (number, lr) in (0..).zip(&all) {
            let counts = if number < 150 {
                number - skipped_before(number)
            } else {
                number - 150 - (skipped_before(number) - skipped_before(150))
            };
            assert_eq!(*lr, schedule.lr(counts), "step {number}");
        }
        // What a checkpoint stores goes on the same.
        for resumed in [100, 150, 160] {
            let (first, stored) = rates(CountedSteps::default(), 0..resumed);
            assert_eq!([first, rates(stored, resumed..300).0].concat(), all, "resumed at {resumed}");
        }
    }

    #[test]
    fn a_restart_begins_again_and_changes_no_step_before_it() {
        for decay in [Decay::Cosine, Decay::Linear] {
            let (plain, restarted) = (schedule(decay, None), schedule(decay, Some(150)));
            for step in 0..150 {
                assert_eq!(restarted.lr(step), plain.lr(step), "{decay:?}, step {step}");
                assert_eq!(
                    restarted.lr(150 + step),
                    plain.lr(step),
                    "{decay:?}, step {step} after the restart"
                );
            }
            assert_eq!(plain.lr(149), 0.1);
        }
    }
}
