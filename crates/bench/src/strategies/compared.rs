//! Statistics over the figures of all ranks of a strategy: step times, sums over ranks, memory, and gradients.

use super::run::StrategyFigures;
use super::sketch::GradientSketch;

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

    /// Returns whether every rank's memory was as planned, by category, to the byte.
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

    /// Projections of the gradients of the first applied step; `None` if every step overflowed.
    pub fn gradients(&self) -> Option<GradientSketch> {
        let mut parts = self.ranks.iter().filter_map(|rank| rank.gradients.as_ref());
        let mut merged = parts.next()?.clone();
        parts.for_each(|part| merged.merge(part));
        Some(merged)
    }

    /// Loss of the last step, the mean over ranks where each has its own.
    pub fn loss(&self) -> f64 {
        let last = |losses: &[f32]| f64::from(losses[losses.len() - 1]);
        self.ranks.iter().map(|rank| last(&rank.losses)).sum::<f64>() / self.ranks.len() as f64
    }
}

/// Invented figures for the tests of reports and drawings.
#[cfg(test)]
pub mod made_up {
    use super::*;
    use crate::strategies::ranks::RankFigures;
    use crate::strategies::run::StrategyRun;
    use crate::strategies::sketch::PROJECTIONS;
    use crate::strategies::strategy::Strategy;
    use phalanx_plan::Peak;
    use phalanx_plan::trace::Bytes;

    /// A strategy whose ranks hold so many bytes each and have this loss.
    pub fn row(strategy: Strategy, held: &[u64], loss: f32) -> StrategyRun {
        let rank = |bytes: &u64| {
            let categories =
                Bytes { parameters: bytes / 2, activations: bytes - bytes / 2, ..Bytes::default() };
            let peak = Peak { bytes: *bytes, categories, activations: bytes - bytes / 2, gaps: 0 };
            RankFigures {
                step_s: vec![0.25, 0.5, 0.125],
                losses: vec![5.5, 5.4, loss],
                sent_bytes: 1 << 20,
                exposed_s: 0.07,
                planned: peak,
                measured: peak,
                gradients: None,
            }
        };
        let mut ranks: Vec<RankFigures> = held.iter().map(rank).collect();
        let parameters = [(0, [1.0; PROJECTIONS])].into();
        ranks[0].gradients = Some(GradientSketch { step: 1, parameters });
        let ran = StrategyFigures { ranks, micro_batches: 1, bubble: None };
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
    use super::made_up::row;
    use crate::strategies::strategy::Strategy;

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
