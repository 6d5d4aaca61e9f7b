//! Random projections of gradients, to compare gradients that are held by different processes.
//!
//! The gradient of each parameter is multiplied with [`PROJECTIONS`] vectors of random signs. The projections are linear:
//! those of a sharded gradient are the sums over its shards, and those of a difference are differences. The root of
//! their mean square estimates the Euclidean norm (Johnson and Lindenstrauss; Achlioptas, "Database-friendly Random
//! Projections", 2003): with 16 projections it is off by about 18%, and by more than a factor of 2 once in 10^4 times.

use std::collections::BTreeMap;

use anyhow::Result;
use phalanx_parallel::zero::Selection;
use phalanx_system::random::{GOLDEN, mix};
use phalanx_train::rank::Rank;
use serde::{Deserialize, Serialize};

/// Number of random vectors.
pub const PROJECTIONS: usize = 16;

/// The projections of one gradient.
pub type Projections = [f64; PROJECTIONS];

/// Projections of the gradients of one step, or of the part that a rank holds, without the loss scale.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GradientSketch {
    /// Number of the step, from 1.
    pub step: u64,
    /// For each parameter, by its number in the model.
    pub parameters: BTreeMap<usize, Projections>,
}

impl GradientSketch {
    /// The part that the rank holds of the summed gradients of its last step, each element on one rank only.
    ///
    /// # Errors
    /// When the device failed.
    pub fn of_rank(rank: &Rank, step: u64, loss_scale: Option<f32>) -> Result<GradientSketch> {
        let mut sketch = GradientSketch { step, ..GradientSketch::default() };
        for (at, stage) in rank.stages().iter().enumerate() {
            // Of several copies of a parameter, one is owned.
            let owned: Vec<usize> =
                rank.chunks().spans(at, 0, Selection::Owned).iter().map(|span| span.parameter).collect();
            rank.chunks().read_gradients(at, |parameter, elements, values| {
                if !owned.contains(&parameter) {
                    return;
                }
                let number = stage.network.numbers[parameter];
                let spec = &stage.network.parameters[parameter];
                for (member, here, whole) in spec.runs(elements) {
                    let earlier = spec.members().iter().take_while(|other| other.name != member.name);
                    let before: usize =
                        earlier.map(|other| other.whole_shape().iter().product::<usize>()).sum();
                    sketch.add(number, before as u64 + whole, &values[here], loss_scale);
                }
            })?;
        }
        Ok(sketch)
    }

    /// Adds elements of a gradient; `first` is the index of the first of them in the whole parameter.
    fn add(&mut self, parameter: usize, first: u64, values: &[f32], loss_scale: Option<f32>) {
        let sums = self.parameters.entry(parameter).or_default();
        let key = mix(parameter as u64 + 1);
        let factor = 1.0 / f64::from(loss_scale.unwrap_or(1.0));
        for (index, value) in (first..).zip(values) {
            let signs = mix(key.wrapping_add(index.wrapping_mul(GOLDEN)));
            let value = f64::from(*value) * factor;
            for (k, sum) in sums.iter_mut().enumerate() {
                *sum += if signs >> k & 1 == 0 { value } else { -value };
            }
        }
    }

    /// Adds the parts of another rank.
    pub fn merge(&mut self, other: &GradientSketch) {
        self.step = self.step.max(other.step);
        for (parameter, sums) in &other.parameters {
            let own = self.parameters.entry(*parameter).or_default();
            own.iter_mut().zip(sums).for_each(|(own, sum)| *own += sum);
        }
    }
}

/// Estimates the norm of a gradient.
pub fn norm(of: &Projections) -> f64 {
    (of.iter().map(|sum| sum * sum).sum::<f64>() / PROJECTIONS as f64).sqrt()
}

/// Estimates the norm of the difference of two gradients.
pub fn distance(a: &Projections, b: &Projections) -> f64 {
    norm(&std::array::from_fn(|k| a[k] - b[k]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sketch(values: &[f32]) -> GradientSketch {
        let mut sketch = GradientSketch::default();
        sketch.add(3, 0, values, None);
        sketch
    }

    #[test]
    fn shards_add_up_to_the_whole_and_the_loss_scale_is_removed() {
        let values: Vec<f32> = (0..1000).map(|i| ((i * 37) % 101) as f32 - 50.0).collect();
        let mut merged = GradientSketch::default();
        for (part, first) in values.chunks(300).zip((0..).step_by(300)) {
            let scaled: Vec<f32> = part.iter().map(|x| 4.0 * x).collect();
            let mut shard = GradientSketch::default();
            shard.add(3, first, &scaled, Some(4.0));
            merged.merge(&shard);
        }
        assert_eq!(merged, sketch(&values), "sums of integers are exact");
    }

    #[test]
    fn norms_are_estimated() {
        let values: Vec<f32> = (0..5000).map(|i| ((i * 37) % 101) as f32 - 50.0).collect();
        let exact = values.iter().map(|x| f64::from(x * x)).sum::<f64>().sqrt();
        let estimated = norm(&sketch(&values).parameters[&3]);
        assert!((0.5..2.0).contains(&(estimated / exact)), "{estimated} of {exact}");
        // Gradients in another order have the same norm, but another sketch.
        let reversed: Vec<f32> = values.iter().rev().copied().collect();
        let apart = distance(&sketch(&values).parameters[&3], &sketch(&reversed).parameters[&3]);
        assert!(apart > 0.5 * exact, "{apart} of {exact}");
    }
}
