//! The learning rate as a function of the step.

use std::fmt;

/// A learning rate schedule: one of the engine's ([`Schedule`]), or the caller's own. A function of the step is one.
pub trait LearningRate: Send + Sync {
    /// Learning rate of step `step`, counted from 0.
    fn lr(&self, step: u64) -> f64;
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
}

impl fmt::Debug for dyn LearningRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LearningRate that begins with {}", self.lr(0))
    }
}

/// Shape of the decay after warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decay {
    /// Half a cosine.
    Cosine,
    /// A straight line.
    Linear,
    /// No decay.
    Constant,
}

/// Linear warm-up, then a decay to `min_lr` at `decay_steps`, where it stays (nanoGPT's `get_lr`); with a warm
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
    /// Step, counted from the start or the restart, at which `min_lr` is reached.
    pub decay_steps: u64,
    /// Step at which warm-up and decay start again.
    pub restart_step: Option<u64>,
}

impl Schedule {
    /// Learning rate of step `step`, counted from 0. Warm-up starts at `lr / (warmup + 1)`, never at 0.
    pub fn lr(&self, step: u64) -> f64 {
        let step = self.restart_step.and_then(|restart| step.checked_sub(restart)).unwrap_or(step);
        if step < self.warmup {
            return self.lr * (step + 1) as f64 / (self.warmup + 1) as f64;
        }
        let span = self.decay_steps.saturating_sub(self.warmup).max(1);
        let done = ((step - self.warmup) as f64 / span as f64).min(1.0);
        let left = match self.decay {
            Decay::Constant => return self.lr,
            Decay::Linear => 1.0 - done,
            Decay::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * done).cos()),
        };
        self.min_lr + left * (self.lr - self.min_lr)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(decay: Decay, restart_step: Option<u64>) -> Schedule {
        Schedule { decay, lr: 1.0, min_lr: 0.1, warmup: 10, decay_steps: 110, restart_step }
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
