//! The ways of parallelism that are compared, and the configuration that each of them is.
//!
//! All keep the model, the global batch and the number of threads of one configuration; what they change is how many
//! ranks there are and what each of them holds.

use anyhow::{Result, bail};
use phalanx_train::RunConfig;
use phalanx_train::config::{BatchConfig, ParallelConfig, Reduce, Updates};
use strsim::levenshtein;

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// One rank with all threads.
    OneDevice,
    /// Devices of one process; outputs are gathered on the first, which takes the loss.
    DataParallel,
    /// The same, and each device takes its own loss.
    DataParallelLoss,
    /// Replicas whose gradients are summed.
    Ddp,
    /// Optimizer states are sharded.
    Zero1,
    /// Gradients, too.
    Zero2,
    /// Parameters, too.
    Zero3,
    /// Ranks share every layer.
    Tensor,
    /// And the residual stream between layers.
    TensorSequence,
    /// Stages one after another, the whole batch at once.
    ModelParallel,
    /// Stages at the same time, one forward and one backward in turn.
    Pipeline,
    /// The same with backward in two parts.
    ZeroBubble,
    /// Replicas whose gradients are applied as they come.
    Asynchronous,
}

impl Way {
    /// All, in the order in which they run.
    pub const ALL: [Way; 13] = [
        Way::OneDevice,
        Way::DataParallel,
        Way::DataParallelLoss,
        Way::Ddp,
        Way::Zero1,
        Way::Zero2,
        Way::Zero3,
        Way::Tensor,
        Way::TensorSequence,
        Way::ModelParallel,
        Way::Pipeline,
        Way::ZeroBubble,
        Way::Asynchronous,
    ];

    /// As `--only` and tables have it.
    pub fn name(self) -> &'static str {
        match self {
            Way::OneDevice => "one-device",
            Way::DataParallel => "data-parallel",
            Way::DataParallelLoss => "data-parallel-loss",
            Way::Ddp => "ddp",
            Way::Zero1 => "zero-1",
            Way::Zero2 => "zero-2",
            Way::Zero3 => "zero-3",
            Way::Tensor => "tensor",
            Way::TensorSequence => "tensor-sequence",
            Way::ModelParallel => "model-parallel",
            Way::Pipeline => "pipeline-1f1b",
            Way::ZeroBubble => "pipeline-zb-h1",
            Way::Asynchronous => "asynchronous",
        }
    }

    /// Those that are named; all where none is.
    ///
    /// # Errors
    /// A name that is none of them, with the nearest.
    pub fn named(names: &[String]) -> Result<Vec<Way>> {
        let mut wanted = Vec::new();
        for name in names {
            let Some(way) = Way::ALL.into_iter().find(|way| way.name() == name.trim()) else {
                let near = Way::ALL.map(Way::name).into_iter().min_by_key(|known| levenshtein(name, known));
                bail!(
                    "--only {name}: there is no such way; the nearest is {}, and all are {}",
                    near.unwrap_or_default(),
                    Way::ALL.map(Way::name).join(", ")
                );
            };
            wanted.push(way);
        }
        Ok(Way::ALL.into_iter().filter(|way| wanted.is_empty() || wanted.contains(way)).collect())
    }

    /// Whether devices are threads of one process.
    pub fn is_data_parallel(self) -> bool {
        matches!(self, Way::DataParallel | Way::DataParallelLoss)
    }

    /// Whether every step is the same function of the parameters before it as that of one device.
    pub fn is_synchronous(self) -> bool {
        self != Way::Asynchronous
    }

    /// Ranks, or devices of the one process, of `ranks` that are to be used.
    pub fn devices(self, ranks: usize) -> usize {
        if self == Way::OneDevice { 1 } else { ranks }
    }

    /// `base` in this way on `ranks` ranks, which share `threads` threads; to be checked.
    pub fn configure(self, base: &RunConfig, ranks: usize, threads: usize) -> RunConfig {
        let mut config = base.clone();
        config.batch = BatchConfig { global: base.batch.global, micro: None, reduce: Reduce::Each };
        config.train.threads = Some((threads / self.devices(ranks)).max(1));
        let ParallelConfig { cut, chunks, max_staleness, overlap, timeout_s, .. } = base.parallel;
        let one = ParallelConfig {
            data: Some(1),
            cut,
            chunks,
            max_staleness,
            overlap,
            timeout_s,
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
            Way::OneDevice | Way::DataParallel | Way::DataParallelLoss => one,
            Way::Ddp => shared,
            Way::Zero1 => ParallelConfig { zero: 1, ..shared },
            Way::Zero2 => ParallelConfig { zero: 2, ..shared },
            Way::Zero3 => ParallelConfig { zero: 3, ..shared },
            Way::Tensor => ParallelConfig { tensor: ranks, ..one },
            Way::TensorSequence => ParallelConfig { tensor: ranks, sequence_parallel: true, ..one },
            Way::ModelParallel => staged("model", 1),
            Way::Pipeline => staged("1f1b", micro_batches),
            Way::ZeroBubble => staged("zb-h1", micro_batches),
            Way::Asynchronous => ParallelConfig { updates: Updates::Asynchronous, ..shared },
        };
        config
    }
}

/// Micro-batches of a pipeline: twice the ranks, or the most below that which divide the batch.
fn micro_batches(global: usize, ranks: usize) -> usize {
    (1..=2 * ranks).rev().find(|count| global.is_multiple_of(*count)).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_told_apart_and_wrong_ones_are_refused_with_the_nearest() {
        let names = |given: &[&str]| Way::named(&given.iter().map(|n| n.to_string()).collect::<Vec<_>>());
        assert_eq!(names(&[]).unwrap(), Way::ALL);
        assert_eq!(names(&["zero-3", "ddp"]).unwrap(), [Way::Ddp, Way::Zero3]);
        let refusal = names(&["ddp", "zero3"]).unwrap_err().to_string();
        assert!(refusal.contains("--only zero3") && refusal.contains("nearest is zero-3"), "{refusal}");
    }

    #[test]
    fn every_way_computes_the_same_batch_with_the_same_threads() {
        let mut base = RunConfig::default();
        (base.batch.global, base.batch.micro) = (12, Some(3));
        (base.parallel.data, base.parallel.zero) = (Some(2), 2);
        for way in Way::ALL {
            let config = way.configure(&base, 4, 8);
            config.check().unwrap();
            let ranks = if way.is_data_parallel() { 1 } else { way.devices(4) };
            assert_eq!(config.world(), ranks, "{way:?}");
            assert_eq!(config.train.threads, Some(8 / way.devices(4)), "{way:?}");
            assert_eq!(config.micro() * config.micro_batches() * config.data(), 12, "{way:?}");
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
