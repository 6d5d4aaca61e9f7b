//! Checks that the synchronous strategies compute the same training, up to rounding.
//!
//! They compute the same function of the same tokens and only differ in the order of additions. The gradients of the
//! first step that is applied are compared, parameter by parameter: all strategies have the same parameters there, so
//! a high learning rate cannot amplify rounding. The bound comes from a second run of the reference in another
//! precision: its distance shows how much the rounding of one tensor element moves each gradient.
//!
//! Later steps depend on parameters that differ by rounding, which a run may amplify without limit. Their losses may
//! differ a few times as much as those of the two precisions.

use phalanx_plan::Precision;
use phalanx_plan::trace::DType;
use phalanx_train::Spec;

use super::run::{StrategyFigures, StrategyRun};
use super::sketch::{GradientSketch, distance, norm};
use super::strategy::Strategy;

/// A difference may be this many times what the two precisions suggest: a strategy and the reference have errors of
/// the same kind, but other ones; partial sums of tensor parallelism are rounded once more; norms are estimates.
const MARGIN: f64 = 8.0;

/// The result of the comparison.
#[derive(Clone, Debug, PartialEq)]
pub struct Agreement {
    /// The strategy with which the others are compared, and its last loss.
    pub reference: (Strategy, f64),
    /// Number of strategies that were compared with it.
    pub others: usize,
    /// The step whose gradients were compared.
    pub step: u64,
    /// The gradient that uses most of its bound.
    pub gradient: Difference,
    /// The largest difference of the losses of a step.
    pub loss: Difference,
    /// Differences above their bound.
    pub apart: Vec<Apart>,
    /// Strategies that cannot be compared, because other steps overflowed (f16).
    pub other_steps: Vec<Strategy>,
}

/// A difference and its bound. For gradients, both are relative to the norm of the gradient.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Difference {
    /// The difference.
    pub found: f64,
    /// The largest difference that rounding explains.
    pub allowed: f64,
}

/// A strategy that does not compute what the reference computes.
#[derive(Clone, Debug, PartialEq)]
pub struct Apart {
    /// The strategy.
    pub strategy: Strategy,
    /// The parameter whose gradient differs most, relative to its bound; None if only losses differ.
    pub parameter: Option<String>,
    /// The difference.
    pub difference: Difference,
}

/// Unit roundoffs of a specification.
#[derive(Clone, Copy, Debug)]
pub struct Rounding {
    /// Relative error of the longest sums in f32. A sum of n terms of random sign errs by about eps sqrt(n) of its size
    /// (Higham, "Accuracy and Stability of Numerical Algorithms", 2.8). The longest sums are those over the vocabulary,
    /// the inner dimension of a block and the tokens of a batch.
    sums: f64,
    /// Largest relative error of rounding to the compute type; 0 for f32.
    compute: f64,
    /// The same for the types in which gradients are accumulated and sent.
    gradients: f64,
}

/// Largest relative error of one rounding to a type of 16 bits; 0 for others, whose errors are those of sums.
fn half_unit(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => f64::powi(2.0, -9),
        DType::F16 => f64::powi(2.0, -12),
        _ => 0.0,
    }
}

impl Rounding {
    /// The roundoffs of a run.
    pub fn of(spec: &Spec) -> Rounding {
        let network = spec.model.whole();
        let sums = network.parameters.iter().flat_map(|parameter| parameter.shape.iter().copied());
        let tokens = spec.tokens_per_step() as usize;
        let longest = sums.max().unwrap_or(1).max(tokens) as f64;
        let Precision { compute, accumulate, communicate } = spec.precision.types;
        Rounding {
            sums: f64::from(f32::EPSILON) / 2.0 * longest.sqrt(),
            compute: half_unit(compute),
            gradients: half_unit(accumulate).max(half_unit(communicate)),
        }
    }

    /// Largest distance of a gradient from the reference, whose gradient has this `norm` and differs by `distance`
    /// from its gradient in the other precision: bf16 if the run computes in f32, else f32.
    fn allowed(self, distance: f64, norm: f64) -> f64 {
        let amplified = match self.compute > 0.0 {
            true => distance,
            // Errors are proportional to the roundoff.
            false => distance * self.sums / half_unit(DType::BF16),
        };
        MARGIN * (amplified + (self.sums + self.compute + self.gradients) * norm)
    }
}

/// Compares the synchronous strategies with the first of them. `other_precision` is the run of that strategy in another
/// precision; `names` are those of the parameters.
///
/// # Errors
/// Why there is nothing to compare.
pub fn agreement(
    rows: &[StrategyRun],
    other_precision: &StrategyRun,
    rounding: Rounding,
    names: &[String],
) -> Result<Agreement, String> {
    let mut ran = rows
        .iter()
        .filter(|row| row.strategy.is_synchronous())
        .filter_map(|row| Some((row.strategy, row.ran.as_ref().ok()?)));
    let (first, reference) = ran.next().ok_or("no synchronous strategy ran")?;
    let second =
        other_precision.ran.as_ref().map_err(|reason| format!("no run in another precision: {reason}"))?;
    let gradients = reference.gradients().ok_or("every step of the reference overflowed")?;
    let in_other = second.gradients().filter(|other| other.step == gradients.step);
    let in_other = in_other.ok_or_else(|| {
        format!(
            "the first step that is applied is step {}, but another one in another precision: lower \
             precision.initial_scale_power, so that no step overflows",
            gradients.step
        )
    })?;
    let loss_allowed = MARGIN * (loss_difference(reference, second) + rounding.sums * reference.loss().abs());
    let mut found = Agreement {
        reference: (first, reference.loss()),
        others: 0,
        step: gradients.step,
        gradient: Difference::default(),
        loss: Difference { found: 0.0, allowed: loss_allowed },
        apart: Vec::new(),
        other_steps: Vec::new(),
    };
    for (strategy, ran) in ran {
        let Some(own) = ran.gradients().filter(|own| own.step == gradients.step) else {
            found.other_steps.push(strategy);
            continue;
        };
        found.others += 1;
        let of_losses = Difference { found: loss_difference(reference, ran), allowed: loss_allowed };
        found.loss.found = max(found.loss.found, of_losses.found);
        let (parameter, worst) = worst(&gradients, &in_other, &own, rounding);
        if worst.used() > found.gradient.used() {
            found.gradient = worst;
        }
        if !worst.holds() {
            let parameter = Some(names[parameter].clone());
            found.apart.push(Apart { strategy, parameter, difference: worst });
        } else if !of_losses.holds() {
            found.apart.push(Apart { strategy, parameter: None, difference: of_losses });
        }
    }
    if found.others == 0 {
        Err("only one synchronous strategy can be compared".to_string())
    } else {
        Ok(found)
    }
}

impl Difference {
    /// The share of the bound that is used; infinite for NaN.
    fn used(self) -> f64 {
        let share = self.found / self.allowed.max(f64::MIN_POSITIVE);
        if share.is_nan() { f64::INFINITY } else { share }
    }

    fn holds(self) -> bool {
        self.used() <= 1.0
    }
}

/// The parameter whose gradient uses most of its bound.
fn worst(
    reference: &GradientSketch,
    in_other: &GradientSketch,
    own: &GradientSketch,
    rounding: Rounding,
) -> (usize, Difference) {
    let difference = |(parameter, gradient): (&usize, _)| {
        let norm = norm(gradient).max(f64::MIN_POSITIVE);
        let of =
            |sketch: &GradientSketch| sketch.parameters.get(parameter).map(|own| distance(own, gradient));
        let found = of(own).unwrap_or(f64::INFINITY) / norm;
        let allowed = rounding.allowed(of(in_other).unwrap_or(0.0), norm) / norm;
        (*parameter, Difference { found, allowed })
    };
    let all = reference.parameters.iter().map(difference);
    all.max_by(|(_, a), (_, b)| a.used().total_cmp(&b.used())).unwrap_or_default()
}

/// The largest difference of the losses of a step; NaN if one is not a number.
fn loss_difference(a: &StrategyFigures, b: &StrategyFigures) -> f64 {
    let pairs = a.ranks[0].losses.iter().zip(&b.ranks[0].losses);
    pairs.map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs()).fold(0.0, max)
}

/// The larger number; NaN if one is NaN.
fn max(a: f64, b: f64) -> f64 {
    if b > a || b.is_nan() { b } else { a }
}

#[cfg(test)]
mod tests {
    use super::super::compared::made_up::{row, rows};
    use super::*;

    const F32: Rounding = Rounding { sums: 1e-6, compute: 0.0, gradients: 0.0 };

    fn names() -> Vec<String> {
        vec!["wte.weight".to_string()]
    }

    #[test]
    fn rounding_is_accepted_and_a_wrong_scale_is_reported_with_the_parameter() {
        let mut rows = rows();
        let mut other = row(Strategy::OneDevice, &[7], 5.251);
        scale(&mut other, 1.01);
        let same = agreement(&rows, &other, F32, &names()).unwrap();
        // Of 13 strategies one is the reference, one asynchronous, one did not run.
        assert_eq!((same.others, same.loss.found, same.apart), (10, 0.0, Vec::new()));
        // Amplified roundoff of 0.01 * 1e-6 / 2^-9, and of sums 1e-6; eight times.
        scale(&mut rows[6], 1.0 + 4e-5);
        assert_eq!(agreement(&rows, &other, F32, &names()).unwrap().apart, []);
        scale(&mut rows[6], 1.0 + 1e-4);
        let found = agreement(&rows, &other, F32, &names()).unwrap();
        let [apart] = &found.apart[..] else { panic!("{:?}", found.apart) };
        assert_eq!((apart.strategy, apart.parameter.as_deref()), (Strategy::Zero3, Some("wte.weight")));
        assert!((apart.difference.found - 1.4e-4).abs() < 1e-6, "{apart:?}");
        assert_eq!(found.gradient, apart.difference);
    }

    #[test]
    fn losses_may_differ_as_much_as_those_of_two_precisions() {
        let mut rows = rows();
        rows[6] = row(Strategy::Zero3, &[1, 1], 5.75);
        rows[12] = row(Strategy::Asynchronous, &[1, 1], 9.0);
        let found = |other_loss: f32, rows: &[StrategyRun]| {
            agreement(rows, &row(Strategy::OneDevice, &[7], other_loss), F32, &names()).unwrap()
        };
        // A chaotic run: the two precisions differ by 0.25.
        let chaotic = found(5.5, &rows);
        assert_eq!((chaotic.apart, chaotic.loss.found), (Vec::new(), 0.5));
        let calm = found(5.2501, &rows);
        assert_eq!(calm.apart.len(), 1);
        assert_eq!((calm.apart[0].strategy, &calm.apart[0].parameter), (Strategy::Zero3, &None));
        rows[6] = row(Strategy::Zero3, &[1, 1], f32::NAN);
        assert_eq!(found(5.5, &rows).apart.len(), 1, "NaN is no loss that agrees");
    }

    #[test]
    fn what_cannot_be_compared_says_why() {
        let (rows, other) = (rows(), row(Strategy::OneDevice, &[7], 5.25));
        let reason =
            |rows: &[StrategyRun], other: &StrategyRun| agreement(rows, other, F32, &names()).unwrap_err();
        assert!(reason(&rows[..1], &other).contains("only one"));
        let mut later = rows.clone();
        later[6].ran.as_mut().unwrap().ranks[0].gradients.as_mut().unwrap().step = 2;
        let found = agreement(&later, &other, F32, &names()).unwrap();
        assert_eq!((found.others, found.other_steps, found.apart), (9, vec![Strategy::Zero3], Vec::new()));
        let failed = StrategyRun { ran: Err("out of memory".into()), ..other.clone() };
        assert!(reason(&rows, &failed).contains("out of memory"));
    }

    /// Multiplies the gradients of a strategy.
    fn scale(row: &mut StrategyRun, factor: f64) {
        let sketch = row.ran.as_mut().unwrap().ranks[0].gradients.as_mut().unwrap();
        sketch.parameters.values_mut().flatten().for_each(|sum| *sum *= factor);
    }
}
