//! Statistics over the figures of all strategies: step times, sums over ranks, and whether the losses agree.
//!
//! The synchronous strategies compute the same function of the same tokens and only differ in the order of additions,
//! so their losses may differ by rounding errors alone. [`tolerance`] is the budget for that.

use phalanx_plan::Precision;
use phalanx_trace::DType;
use phalanx_train::Spec;

use super::run::{StrategyFigures, StrategyRun};
use super::strategy::Strategy;

impl StrategyFigures {
    /// Seconds of each step; a step is over when its slowest rank is done.
    pub fn step_s(&self) -> Vec<f64> {
        let slowest = |step: usize| self.ranks.iter().map(|rank| rank.step_s[step]).fold(0.0, f64::max);
        (0..self.ranks[0].step_s.len()).map(slowest).collect()
    }

    /// The median and the shortest step, in seconds.
    pub fn median_and_min(&self) -> (f64, f64) {
        let mut sorted = self.step_s();
        sorted.sort_by(f64::total_cmp);
        (sorted[sorted.len() / 2], sorted[0])
    }

    /// Mean and standard deviation (of a sample) of the seconds of a step.
    pub fn mean_and_deviation(&self) -> (f64, f64) {
        let all = self.step_s();
        let count = all.len() as f64;
        let mean = all.iter().sum::<f64>() / count;
        let squares: f64 = all.iter().map(|s| (s - mean) * (s - mean)).sum();
        (mean, (squares / (count - 1.0).max(1.0)).sqrt())
    }

    /// Bytes that all ranks send in a step.
    pub fn sent_bytes(&self) -> u64 {
        self.ranks.iter().map(|rank| rank.sent_bytes).sum()
    }

    /// Seconds of a step in which the rank waited that waited longest.
    pub fn exposed_s(&self) -> f64 {
        self.ranks.iter().map(|rank| rank.exposed_s).fold(0.0, f64::max)
    }

    /// The part of the time of all ranks in which they waited: 1 - busy / span.
    pub fn waited_fraction(&self) -> f64 {
        let span: f64 =
            self.ranks.iter().map(|rank| rank.step_s.iter().sum::<f64>() / rank.step_s.len() as f64).sum();
        let waited: f64 = self.ranks.iter().map(|rank| rank.exposed_s).sum();
        if span > 0.0 { (waited / span).min(1.0) } else { 0.0 }
    }

    /// Whether every rank held what was planned, by category, to the byte.
    pub fn as_planned(&self) -> bool {
        self.ranks.iter().all(|rank| rank.planned == rank.measured)
    }

    /// Numbers of the ranks that hold most and least.
    pub fn largest_and_smallest(&self) -> (usize, usize) {
        let bytes = |rank: &usize| self.ranks[*rank].planned.bytes;
        let numbers = 0..self.ranks.len();
        // The first of equals.
        let largest = numbers.clone().rev().max_by_key(bytes).unwrap_or(0);
        (largest, numbers.min_by_key(bytes).unwrap_or(0))
    }

    /// Loss of the last step, the mean over ranks where each has its own.
    pub fn loss(&self) -> f64 {
        let last = |losses: &[f32]| f64::from(losses[losses.len() - 1]);
        self.ranks.iter().map(|rank| last(&rank.losses)).sum::<f64>() / self.ranks.len() as f64
    }
}

/// How far the losses of `steps` steps may lie apart, as a part of the loss.
///
/// A sum of n terms of random sign errs by about eps sqrt(n) of its size in f32 (Higham, "Accuracy and Stability of
/// Numerical Algorithms", 2.8); the longest sums are those over the vocabulary, the inner dimension of a block and
/// the tokens of a batch. With 16 bits each tensor is rounded once more. A token passes about 2 such sums a layer and
/// 2 at the ends, in each step after those that shaped its parameters; errors of different sums are independent, and
/// add up as the root of their number. Twice that, since two strategies are compared. An update that a rounding turns
/// around (Adam divides by the size of the gradient) is of a parameter whose gradient is as small as a rounding, and
/// changes the loss less than that.
pub fn tolerance(spec: &Spec, steps: usize) -> f64 {
    let shape = spec.model.shape();
    let tokens = spec.tokens_per_step() as usize;
    let longest = shape.vocab.max(4 * shape.hidden).max(tokens) as f64;
    let Precision { compute, .. } = spec.precision;
    let rounded = match compute {
        DType::BF16 => f64::powi(2.0, -8),
        DType::F16 => f64::powi(2.0, -11),
        _ => 0.0,
    };
    let one = f64::from(f32::EPSILON) / 2.0 * longest.sqrt() + rounded;
    2.0 * one * ((2 * shape.layers + 2) as f64 * steps as f64).sqrt()
}

/// Whether the synchronous strategies compute the same losses.
#[derive(Clone, Debug, PartialEq)]
pub struct Agreement {
    /// The first of them, with which the others are compared; its loss.
    pub reference: (Strategy, f64),
    /// How many strategies were compared with it.
    pub others: usize,
    /// The largest difference of the losses of a step.
    pub max_difference: f64,
    /// The largest difference that rounding explains.
    pub allowed: f64,
    /// Strategies whose losses differ by more.
    pub apart: Vec<Strategy>,
}

/// Compares the losses of every step; `None` when fewer than two synchronous strategies ran.
pub fn agreement(rows: &[StrategyRun], tolerance: f64) -> Option<Agreement> {
    let mut ran = rows
        .iter()
        .filter(|row| row.strategy.is_synchronous())
        .filter_map(|row| Some((row.strategy, row.ran.as_ref().ok()?)));
    let (first, reference) = ran.next()?;
    let loss = reference.loss();
    let mut found = Agreement {
        reference: (first, loss),
        others: 0,
        max_difference: 0.0,
        allowed: tolerance * loss.abs(),
        apart: Vec::new(),
    };
    for (strategy, ran) in ran {
        let pairs = ran.ranks[0].losses.iter().zip(&reference.ranks[0].losses);
        let difference = pairs.map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs()).fold(0.0, f64::max);
        found.others += 1;
        found.max_difference = found.max_difference.max(difference);
        if difference > found.allowed {
            found.apart.push(strategy);
        }
    }
    (found.others > 0).then_some(found)
}

/// Invented figures for the tests of reports and drawings.
#[cfg(test)]
pub mod made_up {
    use super::*;
    use crate::strategies::ranks::RankFigures;
    use phalanx_plan::Peak;
    use phalanx_trace::Bytes;

    /// A strategy whose ranks hold so many bytes each and have this loss.
    pub fn row(strategy: Strategy, held: &[u64], loss: f32) -> StrategyRun {
        let rank = |bytes: &u64| {
            let categories =
                Bytes { parameters: bytes / 2, activations: bytes - bytes / 2, ..Bytes::default() };
            let peak = Peak { bytes: *bytes, categories, activations: bytes - bytes / 2 };
            RankFigures {
                step_s: vec![0.25, 0.5, 0.125],
                losses: vec![5.5, 5.4, loss],
                sent_bytes: 1 << 20,
                exposed_s: 0.07,
                planned: peak,
                measured: peak,
            }
        };
        let ran = StrategyFigures { ranks: held.iter().map(rank).collect(), micro_batches: 1, bubble: None };
        StrategyRun { strategy, ranks: held.len(), threads: 1, ran: Ok(ran) }
    }

    /// Every strategy: ranks of 4 and 3 MiB, the last but one refused.
    pub fn rows() -> Vec<StrategyRun> {
        let held = |strategy: &Strategy| {
            if *strategy == Strategy::OneDevice { vec![7 << 20] } else { vec![4 << 20, 3 << 20] }
        };
        let mut rows: Vec<StrategyRun> =
            Strategy::ALL.iter().map(|strategy| row(*strategy, &held(strategy), 5.25)).collect();
        rows[11].ran =
            Err("parallel.pipeline = 2: a reason that is long enough not to fit <in one line> of it".into());
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::made_up::{row, rows};
    use super::*;

    #[test]
    fn a_strategy_whose_loss_is_another_is_named() {
        let mut rows = rows();
        let same = agreement(&rows, 1e-6).unwrap();
        // Of 13 strategies one is the reference, one asynchronous, one did not run.
        assert_eq!((same.others, same.max_difference, same.apart), (10, 0.0, Vec::new()));
        rows[6] = row(Strategy::Zero3, &[1, 1], 5.26);
        rows[12] = row(Strategy::Asynchronous, &[1, 1], 9.0);
        let other = agreement(&rows, 1e-6).unwrap();
        assert_eq!(other.apart, [Strategy::Zero3]);
        assert!((other.max_difference - 0.01).abs() < 1e-6, "{}", other.max_difference);
        assert_eq!(agreement(&rows[..1], 1e-6), None);
    }

    #[test]
    fn times_are_those_of_the_slowest_rank() {
        let Ok(mut ran) = row(Strategy::Ddp, &[8, 9], 5.0).ran else { unreachable!("it ran") };
        ran.ranks[1].step_s = vec![0.5, 0.25, 0.25];
        assert_eq!(ran.step_s(), [0.5, 0.5, 0.25]);
        assert_eq!(ran.median_and_min(), (0.5, 0.25));
        let (mean, deviation) = ran.mean_and_deviation();
        // Mean 5/12, squares 2 (1/12)^2 + (1/6)^2 = 1/24, over 2.
        assert!((mean - 5.0 / 12.0).abs() < 1e-12 && (deviation - (1.0f64 / 48.0).sqrt()).abs() < 1e-12);
        assert_eq!(ran.largest_and_smallest(), (1, 0));
        // Spans 7/24 and 1/3, 0.07 waited of each.
        assert!((ran.waited_fraction() - 0.14 / 0.625).abs() < 1e-12);
    }
}
