//! All candidates within the limits: whole divisions of the devices and of the batch.

use phalanx_train::RunConfig;

use super::candidate::{Axes, Candidate, Placed};
use super::divisors;
use super::estimate::MAX_MICRO;
use super::limits::Limits;

/// Micro-batches of a step on a replica at most.
const MAX_MICRO_BATCHES: usize = 4096;

/// The candidates of a run.
#[derive(Clone, Copy)]
pub(super) struct Shapes<'a> {
    pub config: &'a RunConfig,
    pub limits: &'a Limits,
    pub axes: &'a Axes,
    pub ranks: usize,
    /// Blocks of the model, the head among them.
    pub blocks: usize,
}

impl Shapes<'_> {
    /// The numbers of pipeline ranks that are tried.
    pub fn pipelines(&self) -> Vec<usize> {
        self.numbers("parallel.pipeline", self.config.parallel.pipeline, divisors(self.ranks))
            .into_iter()
            .filter(|ranks| *ranks <= self.blocks)
            .collect()
    }

    fn numbers(&self, key: &str, own: usize, tried: Vec<usize>) -> Vec<usize> {
        let tried = tried.iter().map(ToString::to_string).collect();
        self.limits
            .values(key, own.to_string(), tried)
            .iter()
            .filter_map(|value| value.parse().ok())
            .collect()
    }

    /// Calls `take` with each candidate, as long as it returns true.
    pub fn each(&self, take: &mut dyn FnMut(Candidate) -> bool) {
        let data_kept = self.limits.keeps("parallel.data");
        let replicas = self.numbers("parallel.data", self.config.data(), Vec::new());
        for (global, pipeline, tensor) in self.axes.global.iter().flat_map(|global| {
            self.pipelines().into_iter().flat_map(move |pipeline| {
                self.axes.tensor.iter().map(move |tensor| (*global, pipeline, *tensor))
            })
        }) {
            let each = pipeline * tensor;
            let data = self.ranks / each.max(1);
            if each == 0
                || !self.ranks.is_multiple_of(each)
                || !global.is_multiple_of(data)
                || (data_kept && !replicas.contains(&data))
            {
                continue;
            }
            let mesh = Candidate { global, pipeline, data, tensor, ..Candidate::NONE };
            for micro in self.micros(global / data) {
                if !self.with_micro(Candidate { micro, ..mesh }, take) {
                    return;
                }
            }
        }
    }

    /// Sizes of a micro-batch for so many sequences of a replica.
    fn micros(&self, sequences: usize) -> Vec<usize> {
        let tried = divisors(sequences).into_iter().filter(|micro| *micro <= MAX_MICRO);
        let own = self.config.batch.micro.unwrap_or(sequences);
        let fits = |micro: &usize| {
            *micro > 0 && sequences.is_multiple_of(*micro) && sequences / micro <= MAX_MICRO_BATCHES
        };
        self.numbers("batch.micro", own, tried.collect()).into_iter().filter(fits).collect()
    }

    fn with_micro(&self, of: Candidate, take: &mut dyn FnMut(Candidate) -> bool) -> bool {
        let axes = self.axes;
        let schedules: Vec<usize> = match of.pipeline {
            1 => vec![axes.alone],
            _ => (1..axes.schedules.len()).filter(|schedule| self.is_possible(&of, *schedule)).collect(),
        };
        let several = of.data > 1;
        let is_kept = self.limits.keeps("parallel.zero");
        let zeros = |placed: Placed| -> Vec<u8> {
            let stages: Vec<u8> = match placed {
                Placed::Parameters => vec![3],
                _ if !several && !is_kept => vec![0],
                _ => axes.zero.clone(),
            };
            stages.into_iter().filter(|stage| !is_kept || axes.zero.contains(stage)).collect()
        };
        let one = |values: &[bool], has_choice: bool| -> Vec<bool> {
            if has_choice { values.to_vec() } else { vec![values.first().copied().unwrap_or(false)] }
        };
        let defers = one(&axes.defers, several && of.micro_batches() > 1);
        let sends_half = one(&axes.sends_half, several);
        for schedule in schedules {
            for checkpointing in 0..axes.checkpointing.len() {
                for placed in axes.placed.iter().copied() {
                    for zero in zeros(placed) {
                        for (defers, sends_half) in defers
                            .iter()
                            .flat_map(|defers| sends_half.iter().map(move |half| (*defers, *half)))
                        {
                            let candidate =
                                Candidate { schedule, checkpointing, placed, zero, defers, sends_half, ..of };
                            if !take(candidate) {
                                return false;
                            }
                        }
                    }
                }
            }
        }
        true
    }

    /// Returns whether there is such a schedule for the micro-batches and blocks.
    fn is_possible(&self, of: &Candidate, schedule: usize) -> bool {
        let scheduled = &self.axes.schedules[schedule];
        let is_whole = scheduled.name != "interleaved" || of.micro_batches().is_multiple_of(of.pipeline);
        of.micro_batches() >= of.pipeline && is_whole && of.pipeline * scheduled.chunks_of() <= self.blocks
    }

    /// The number of all candidates, up to a bound.
    pub fn count(&self) -> usize {
        let mut count = 0;
        self.each(&mut |_| {
            count += 1;
            count < 1 << 16
        });
        count
    }
}
