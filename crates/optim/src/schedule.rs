//! The learning rate as a function of the step.

/// Shape of the decay after warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decay {
    /// Half a cosine.
    Cosine,
    /// A line.
    Linear,
    /// None.
    Constant,
}

/// Linear warm-up, then a decay to `min_lr` at `steps` (nanoGPT's `get_lr`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// Shape after warm-up.
    pub decay: Decay,
    /// Peak.
    pub lr: f64,
    /// End of cosine and linear.
    pub min_lr: f64,
    /// Steps of warm-up.
    pub warmup: u64,
    /// Step at which `min_lr` is reached.
    pub steps: u64,
}

impl Schedule {
    /// Learning rate of step `step`, counted from 0. Warm-up starts at `lr / (warmup + 1)`, never at 0.
    pub fn lr(&self, step: u64) -> f64 {
        if step < self.warmup {
            return self.lr * (step + 1) as f64 / (self.warmup + 1) as f64;
        }
        let span = self.steps.saturating_sub(self.warmup).max(1);
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

    #[test]
    fn warms_up_then_decays_to_the_minimum() {
        let at = |decay, step| Schedule { decay, lr: 1.0, min_lr: 0.1, warmup: 10, steps: 110 }.lr(step);
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
}
