//! The strategies of parallelism that are compared, and the configuration of each.
//!
//! All keep the model, the global batch and the number of threads of one configuration; what they change is how many
//! ranks there are and what each of them holds.

use anyhow::{Result, bail};
use phalanx_train::RunConfig;
use phalanx_train::config::{BatchConfig, ParallelConfig, Reduce, Updates};
use strsim::levenshtein;

/// A strategy of parallelism.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    /// One rank with all threads.
    OneDevice,
    /// DataParallel: devices of one process; outputs are gathered on the first, which computes the loss.
    DataParallel,
    /// DataParallel in which each device computes its own loss.
    DataParallelLoss,
    /// Replicas whose gradients are summed.
    Ddp,
    /// Replicas that shard optimizer states.
    Zero1,
    /// Replicas that shard optimizer states and gradients.
    Zero2,
    /// Replicas that shard optimizer states, gradients and parameters.
    Zero3,
    /// Tensor parallelism: every layer is split over the ranks.
    Tensor,
    /// Tensor parallelism that also shards the residual stream (sequence parallelism).
    TensorSequence,
    /// Pipeline stages that run one after another, with the whole batch at once.
    ModelParallel,
    /// A pipeline with the 1F1B schedule.
    Pipeline,
    /// A pipeline with the zero-bubble schedule ZB-H1, which splits backward.
    ZeroBubble,
    /// Replicas whose gradients are applied as they arrive, without waiting for the others.
    Asynchronous,
}

impl Strategy {
    /// All strategies, in the order in which they run.
    pub const ALL: [Strategy; 13] = [
        Strategy::OneDevice,
        Strategy::DataParallel,
        Strategy::DataParallelLoss,
        Strategy::Ddp,
        Strategy::Zero1,
        Strategy::Zero2,
        Strategy::Zero3,
        Strategy::Tensor,
        Strategy::TensorSequence,
        Strategy::ModelParallel,
        Strategy::Pipeline,
        Strategy::ZeroBubble,
        Strategy::Asynchronous,
    ];

    /// The name in `--only` and in tables.
    pub fn name(self) -> &'static str {
        match self {
            Strategy::OneDevice => "one-device",
            Strategy::DataParallel => "data-parallel",
            Strategy::DataParallelLoss => "data-parallel-loss",
            Strategy::Ddp => "ddp",
            Strategy::Zero1 => "zero-1",
            Strategy::Zero2 => "zero-2",
            Strategy::Zero3 => "zero-3",
            Strategy::Tensor => "tensor",
            Strategy::TensorSequence => "tensor-sequence",
            Strategy::ModelParallel => "model-parallel",
            Strategy::Pipeline => "pipeline-1f1b",
            Strategy::ZeroBubble => "pipeline-zb-h1",
            Strategy::Asynchronous => "asynchronous",
        }
    }

    /// The strategies with these names; all of them when there are no names.
    ///
    /// # Errors
    /// An unknown name; the error suggests the closest known one.
    pub fn named(names: &[String]) -> Result<Vec<Strategy>> {
        let mut wanted = Vec::new();
        for name in names {
            let Some(strategy) = Strategy::ALL.into_iter().find(|strategy| strategy.name() == name.trim())
            else {
                let near = Strategy::ALL
                    .map(Strategy::name)
                    .into_iter()
                    .min_by_key(|known| levenshtein(name, known));
                bail!(
                    "--only {name}: unknown strategy, did you mean {}? The strategies are {}",
                    near.unwrap_or_default(),
                    Strategy::ALL.map(Strategy::name).join(", ")
                );
            };
            wanted.push(strategy);
        }
        Ok(Strategy::ALL
            .into_iter()
            .filter(|strategy| wanted.is_empty() || wanted.contains(strategy))
            .collect())
    }

    /// Returns whether the strategy runs devices of one process instead of ranks.
    pub fn is_data_parallel(self) -> bool {
        matches!(self, Strategy::DataParallel | Strategy::DataParallelLoss)
    }

    /// Returns whether every step computes the same update as one device would.
    pub fn is_synchronous(self) -> bool {
        self != Strategy::Asynchronous
    }

    /// Number of ranks, or devices of one process, that the strategy uses when `ranks` are available.
    pub fn devices(self, ranks: usize) -> usize {
        if self == Strategy::OneDevice { 1 } else { ranks }
    }

    /// The configuration `base`, changed to run this strategy on `ranks` ranks that share `threads` threads. It is not
    /// checked yet.
    pub fn configure(self, base: &RunConfig, ranks: usize, threads: usize) -> RunConfig {
        let mut config = base.clone();
        config.batch =
            BatchConfig { global: base.batch.global, micro: None, reduce: Reduce::Each, sum: base.batch.sum };
        config.train.threads = Some((threads / self.devices(ranks)).max(1));
        let ParallelConfig { cut, chunks, max_staleness, overlap, .. } = base.parallel;
        let one = ParallelConfig {
            data: Some(1),
            cut,
            chunks,
            max_staleness,
            overlap,
            ..ParallelConfig::default()
        };
        let shared = ParallelConfig { data: Some(ranks), ..one.clone() };
        let staged = |schedule: &str, micro_batches| ParallelConfig {
            pipeline: ranks,
            schedule: schedule.into(),
            micro_batches: Some(micro_batches),
            ..one.clone()
        };
        let micro_batches = micro_batches(base.batch.global, ranks);
        config.parallel = match self {
            Strategy::OneDevice | Strategy::DataParallel | Strategy::DataParallelLoss => one,
            Strategy::Ddp => shared,
            Strategy::Zero1 => ParallelConfig { zero: 1, ..shared },
            Strategy::Zero2 => ParallelConfig { zero: 2, ..shared },
            Strategy::Zero3 => ParallelConfig { zero: 3, ..shared },
            Strategy::Tensor => ParallelConfig { tensor: ranks, ..one },
            Strategy::TensorSequence => ParallelConfig { tensor: ranks, sequence_parallel: true, ..one },
            Strategy::ModelParallel => staged("model", 1),
            Strategy::Pipeline => staged("1f1b", micro_batches),
            Strategy::ZeroBubble => staged("zb-h1", micro_batches),
            Strategy::Asynchronous => ParallelConfig { updates: Updates::Asynchronous, ..shared },
        };
        config
    }
}

/// Number of micro-batches of a pipeline: the largest divisor of the batch that is at most twice the ranks.
fn micro_batches(global: usize, ranks: usize) -> usize {
    (1..=2 * ranks).rev().find(|count| global.is_multiple_of(*count)).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_told_apart_and_wrong_ones_are_refused_with_the_nearest() {
        let names =
            |given: &[&str]| Strategy::named(&given.iter().map(|n| n.to_string()).collect::<Vec<_>>());
        assert_eq!(names(&[]).unwrap(), Strategy::ALL);
        assert_eq!(names(&["zero-3", "ddp"]).unwrap(), [Strategy::Ddp, Strategy::Zero3]);
        let refusal = names(&["ddp", "zero3"]).unwrap_err().to_string();
        assert!(refusal.contains("--only zero3") && refusal.contains("did you mean zero-3?"), "{refusal}");
    }

    #[test]
    fn every_strategy_computes_the_same_batch_with_the_same_threads() {
        let mut base = RunConfig::default();
        (base.batch.global, base.batch.micro) = (12, Some(3));
        (base.parallel.data, base.parallel.zero) = (Some(2), 2);
        for strategy in Strategy::ALL {
            let config = strategy.configure(&base, 4, 8);
            config.check().unwrap();
            let ranks = if strategy.is_data_parallel() { 1 } else { strategy.devices(4) };
            assert_eq!(config.world_size(), ranks, "{strategy:?}");
            assert_eq!(config.train.threads, Some(8 / strategy.devices(4)), "{strategy:?}");
            assert_eq!(
                config.micro_batch_size() * config.micro_batches() * config.data(),
                12,
                "{strategy:?}"
            );
        }
    }

    #[test]
    fn micro_batches_divide_the_batch() {
        let table = [(8, 2, 4), (16, 4, 8), (12, 4, 6), (6, 2, 3), (7, 2, 1), (1, 2, 1)];
        for (global, ranks, expected) in table {
            assert_eq!(micro_batches(global, ranks), expected, "{global} on {ranks}");
        }
    }
}
