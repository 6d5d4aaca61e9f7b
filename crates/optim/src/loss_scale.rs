//! The loss scale of f16: the factor that keeps small gradients from becoming zero.
//!
//! The dynamic scale is DeepSpeed's (`DynamicLossScaler`, after Micikevicius et al., arXiv 1710.03740). An overflow
//! first uses up the hysteresis, then halves the scale; a window of steps without overflow doubles the scale and
//! refills the hysteresis. One thing differs: an overflow at the minimum scale is not an error here. The caller
//! learns of it, since it can find out which tensor overflowed.
//!
//! ```text
//! overflow      hysteresis > 1: hysteresis -= 1; else scale = max(scale / 2, min_scale), or stuck at min_scale
//! clean step i  n = i - last_overflow - 1 (last_overflow is -1 at first); n > 0, window divides n: scale *= 2
//! ```

use serde::{Deserialize, Serialize};

/// Number of overflows in a row after which a static scale is stuck.
pub const STATIC_PATIENCE: u32 = 100;

/// Largest number of steps of a stored scale: it is far below the overflow of i64.
const MAX_ITERATION: i64 = 1 << 40;

/// Policy of the loss scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LossScaling {
    /// No scale. f32 and bf16 represent every gradient, so a gradient that is not finite is an error.
    Off,
    /// A constant scale.
    Static(f32),
    /// A scale that falls at overflows and rises after steps without.
    Dynamic(Dynamic),
}

/// The constants of a dynamic scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dynamic {
    /// The first scale.
    pub initial: f32,
    /// Number of steps without overflow after which the scale is doubled.
    pub window: u64,
    /// Number of overflows after which the scale is halved, the halving one included.
    pub hysteresis: u32,
    /// True if every step without overflow refills the hysteresis, not only a doubling.
    pub consecutive_hysteresis: bool,
    /// The minimum scale.
    pub min_scale: f32,
}

/// Decision about a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is applied.
    Apply,
    /// It overflowed: parameters and states do not change.
    Skip,
    /// It overflowed and no smaller scale is left to try.
    Stuck,
}

/// The state of a loss scale, which checkpoints store.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum LossScaleState {
    /// State of [`LossScaling::Off`].
    Off,
    /// State of [`LossScaling::Static`].
    Static {
        /// Number of steps in a row that overflowed.
        overflows: u32,
    },
    /// State of [`LossScaling::Dynamic`].
    Dynamic {
        /// The scale of the next step.
        scale: f32,
        /// Steps so far.
        iteration: i64,
        /// Number of the last step that overflowed, counted from 0; -1 before the first.
        last_overflow: i64,
        /// Number of overflows until the scale is halved, the halving one included.
        hysteresis: u32,
    },
}

impl LossScaleState {
    /// Checks that the state is possible: numbers from a file may be anything.
    ///
    /// # Errors
    /// A description of what is impossible.
    pub fn check(&self) -> Result<(), String> {
        let (scale, iteration, last_overflow, hysteresis) = match *self {
            LossScaleState::Off => return Ok(()),
            LossScaleState::Static { overflows } if overflows <= STATIC_PATIENCE => return Ok(()),
            LossScaleState::Static { overflows } => {
                return Err(format!(
                    "{overflows} overflows in a row; at most {STATIC_PATIENCE} are possible"
                ));
            }
            LossScaleState::Dynamic { scale, iteration, last_overflow, hysteresis } => {
                (scale, iteration, last_overflow, hysteresis)
            }
        };
        if !scale.is_finite() || scale <= 0.0 {
            return Err(format!("the scale is {scale}; expected a number above 0"));
        }
        if !(0..=MAX_ITERATION).contains(&iteration) || !(-1..iteration.max(1)).contains(&last_overflow) {
            return Err(format!(
                "the last overflow is at step {last_overflow}, but only {iteration} steps were done"
            ));
        }
        if hysteresis == 0 {
            return Err("the hysteresis is 0; expected at least 1".to_string());
        }
        Ok(())
    }
}

/// The loss scale of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScale {
    scaling: LossScaling,
    state: LossScaleState,
}

impl LossScale {
    /// The scale of the first step.
    pub fn new(scaling: LossScaling) -> LossScale {
        let state = match scaling {
            LossScaling::Off => LossScaleState::Off,
            LossScaling::Static(_) => LossScaleState::Static { overflows: 0 },
            LossScaling::Dynamic(Dynamic { initial, hysteresis, .. }) => {
                LossScaleState::Dynamic { scale: initial, iteration: 0, last_overflow: -1, hysteresis }
            }
        };
        LossScale { scaling, state }
    }

    /// Continues from a stored state, or from the first scale when the kind of scaling has changed.
    pub fn resumed(scaling: LossScaling, stored: LossScaleState) -> LossScale {
        let state = match (scaling, stored) {
            (LossScaling::Static(_), LossScaleState::Static { .. }) => stored,
            (
                LossScaling::Dynamic(dynamic),
                LossScaleState::Dynamic { scale, iteration, last_overflow, hysteresis },
            ) => {
                // The constants may have changed since.
                let hysteresis = hysteresis.min(dynamic.hysteresis);
                LossScaleState::Dynamic {
                    scale: scale.max(dynamic.min_scale),
                    iteration,
                    last_overflow,
                    hysteresis,
                }
            }
            _ => return LossScale::new(scaling),
        };
        LossScale { scaling, state }
    }

    /// The state to store.
    pub fn state(&self) -> LossScaleState {
        self.state
    }

    /// Policy of the scale.
    pub fn scaling(&self) -> LossScaling {
        self.scaling
    }

    /// The factor by which the loss of the next step is multiplied.
    pub fn scale(&self) -> f32 {
        match (self.scaling, self.state) {
            (_, LossScaleState::Dynamic { scale, .. }) => scale,
            (LossScaling::Static(scale), _) => scale,
            _ => 1.0,
        }
    }

    /// Updates the scale after a step, whose gradients were finite or not, and decides what happens to the step.
    pub fn judge(&mut self, finite: bool) -> Verdict {
        match (self.scaling, &mut self.state) {
            (LossScaling::Dynamic(dynamic), LossScaleState::Dynamic { .. }) => {
                self.judge_dynamic(dynamic, finite)
            }
            (LossScaling::Static(_), LossScaleState::Static { overflows }) => {
                *overflows = if finite { 0 } else { *overflows + 1 };
                match *overflows {
                    0 => Verdict::Apply,
                    n if n < STATIC_PATIENCE => Verdict::Skip,
                    _ => Verdict::Stuck,
                }
            }
            _ if finite => Verdict::Apply,
            _ => Verdict::Stuck,
        }
    }

    fn judge_dynamic(&mut self, dynamic: Dynamic, finite: bool) -> Verdict {
        let LossScaleState::Dynamic { scale, iteration, last_overflow, hysteresis } = &mut self.state else {
            unreachable!("the state of a dynamic scale")
        };
        let step = *iteration;
        *iteration += 1;
        if !finite {
            *last_overflow = step;
            if *hysteresis > 1 {
                *hysteresis -= 1;
            } else if *scale <= dynamic.min_scale {
                return Verdict::Stuck;
            } else {
                *scale = (*scale / 2.0).max(dynamic.min_scale);
            }
            return Verdict::Skip;
        }
        if dynamic.consecutive_hysteresis {
            *hysteresis = dynamic.hysteresis;
        }
        let clean = step - *last_overflow - 1;
        if clean > 0 && clean % dynamic.window as i64 == 0 {
            *hysteresis = dynamic.hysteresis;
            // The scale grows up to the largest finite number.
            *scale = if (*scale * 2.0).is_finite() { *scale * 2.0 } else { *scale };
        }
        Verdict::Apply
    }
}

#[cfg(test)]
mod tests {
    use super::Verdict::{Apply, Skip, Stuck};
    use super::*;

    fn dynamic(initial: f32, window: u64, hysteresis: u32, consecutive_hysteresis: bool) -> LossScale {
        let dynamic = Dynamic { initial, window, hysteresis, consecutive_hysteresis, min_scale: 1.0 };
        LossScale::new(LossScaling::Dynamic(dynamic))
    }

    /// Runs steps (`.` clean, `x` overflow) and checks the scale after each, and the last verdict.
    fn check(mut scale: LossScale, steps: &str, after: &[f32], last: Verdict) {
        let mut verdict = Apply;
        for (i, (step, expected)) in steps.chars().zip(after).enumerate() {
            verdict = scale.judge(step == '.');
            assert_eq!(scale.scale(), *expected, "after step {i} of {steps}");
            assert_eq!(verdict == Apply, step == '.', "step {i} of {steps}");
        }
        assert_eq!((steps.len(), verdict), (after.len(), last), "{steps}");
    }

    /// Expected values of `DynamicLossScaler.update_scale`, derived by hand.
    #[test]
    fn the_dynamic_scale_moves_as_in_deepspeed() {
        // Window 3: steps 0, 1, 2 are clean, step 3 is the first with n = 3; then every third.
        let after = [8., 8., 8., 16., 16., 16., 32., 32., 32., 64.];
        check(dynamic(8., 3, 1, false), "..........", &after, Apply);
        // After an overflow at step 1, n = 3 at step 5.
        check(dynamic(8., 3, 1, false), ".x.....", &[8., 4., 4., 4., 4., 8., 8.], Apply);
        // Hysteresis 2: the first overflow is free, the second halves, and so does every later one...
        check(dynamic(8., 3, 2, false), "xxx.x", &[8., 4., 2., 2., 1.], Skip);
        // ... until a doubling refills it: n = 3 at step 6.
        check(dynamic(8., 3, 2, false), "x.x....xx", &[8., 8., 4., 4., 4., 4., 8., 8., 4.], Skip);
        // Refilled by every clean step: only overflows in a row halve.
        check(dynamic(8., 100, 2, true), "x.x.xx.", &[8., 8., 8., 8., 8., 4., 4.], Apply);
        check(dynamic(8., 100, 3, true), "xx.xxx", &[8., 8., 8., 8., 8., 4.], Skip);
        // Never below the minimum, and stuck there once the hysteresis is used up.
        check(dynamic(2., 9, 1, false), "xx", &[1., 1.], Stuck);
        check(dynamic(3., 9, 1, false), "xxx", &[1.5, 1., 1.], Stuck);
        check(dynamic(1., 9, 2, false), "xx", &[1., 1.], Stuck);
        check(dynamic(1., 9, 2, true), "x.x", &[1., 1., 1.], Skip);
    }

    #[test]
    fn a_window_of_one_doubles_from_the_second_clean_step_on() {
        check(dynamic(1., 1, 1, false), "....x...", &[1., 2., 4., 8., 4., 4., 8., 16.], Apply);
        let mut largest = dynamic(2f32.powi(126), 1, 1, false);
        (0..4).for_each(|_| assert_eq!(largest.judge(true), Apply));
        assert_eq!(largest.scale(), 2f32.powi(127));
    }

    #[test]
    fn a_static_scale_skips_until_a_hundred_overflows_in_a_row() {
        let mut scale = LossScale::new(LossScaling::Static(128.0));
        for _ in 0..2 {
            (0..99).for_each(|_| assert_eq!(scale.judge(false), Skip));
            assert_eq!(scale.judge(true), Apply);
        }
        (0..99).for_each(|_| assert_eq!(scale.judge(false), Skip));
        assert_eq!((scale.judge(false), scale.scale()), (Stuck, 128.0));
    }

    #[test]
    fn without_a_scale_the_first_overflow_is_a_fault() {
        let mut scale = LossScale::new(LossScaling::Off);
        assert_eq!((scale.judge(true), scale.judge(false), scale.scale()), (Apply, Stuck, 1.0));
    }

    #[test]
    fn a_stored_scale_goes_on_where_it_was() {
        let steps = ".x..xx.x........x...x.";
        for at in 0..steps.len() {
            let mut whole = dynamic(1024., 3, 2, false);
            for step in steps.chars().take(at) {
                whole.judge(step == '.');
            }
            let text = serde_json::to_string(&whole.state()).unwrap();
            let stored: LossScaleState = serde_json::from_str(&text).unwrap();
            let mut resumed = LossScale::resumed(whole.scaling(), stored);
            assert_eq!(resumed, whole);
            for step in steps.chars().skip(at) {
                assert_eq!(resumed.judge(step == '.'), whole.judge(step == '.'));
            }
            assert_eq!(resumed, whole);
        }
        let other = LossScale::resumed(LossScaling::Static(2.0), dynamic(8., 1, 1, false).state());
        assert_eq!(other, LossScale::new(LossScaling::Static(2.0)));
    }
}
