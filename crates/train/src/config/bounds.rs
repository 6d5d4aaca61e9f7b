//! The largest value of every count of the configuration, in one table. Each bound exceeds what real runs need by a
//! large factor.
//!
//! The dry run allocates and computes in proportion to these numbers and multiplies them with each other. A
//! number that is mistyped or hostile is refused here, by name, before anything is made of it; after this check,
//! and that of the products ([`RunConfig::check_work`]), no sum of the plan leaves 64 bits.

use phalanx_layers::Network;
use phalanx_models::limits::{MAX_LAYERS, MAX_POSITIONS, MAX_VOCAB};
use phalanx_plan::Mesh;

use super::check::{ConfigError, refuse};
use super::{Checkpointing, Chunk, RunConfig};
use crate::planning::ALL_RANKS;

/// Sequences of a step or of an evaluation.
const MAX_SEQUENCES: usize = 1 << 22;

/// Micro-batches of a step on one replica; the dry run runs each of them.
const MAX_MICRO_BATCHES: usize = 1 << 16;

/// Ranks along an axis and in total.
const MAX_RANKS: usize = 1 << 20;

/// Threads of a rank: more than any machine has cores.
const MAX_THREADS: usize = 4096;

/// Steps, and numbers of steps.
const MAX_STEPS: u64 = 1_000_000_000_000;

/// Seconds of a wait: a year.
const MAX_SECONDS: u64 = 31_536_000;

/// MiB of a chunk: one TiB.
const MAX_CHUNK_MIB: f64 = (1u64 << 20) as f64;

/// Units of 2^20 elements, or MiB, of everything else.
const MAX_MIB: f64 = (1u64 << 40) as f64;

/// 10^9 bytes per second of a copy: a thousand times the memory of an accelerator.
const MAX_GB_PER_S: f64 = 1e7;

/// Tokens of one replica in a step or an evaluation: 16 times the largest batches of published runs over all their
/// replicas.
const MAX_TOKENS: u128 = 1 << 28;

/// Runs of one block over one micro-batch, in the steps and evaluations of all ranks that are run dry. Each takes about
/// 100 events and 15 KB of the trace, so all of them take less than 1 GiB.
const MAX_DRY_RUNS: u128 = 1 << 17;

/// Bytes of logits that cost the dry run as much as a block: the head computes them in slices.
const LOGITS_AS_A_BLOCK: u128 = 256 << 20;

/// Operations of a step on one rank, and bytes that all ranks send in a step; keeps both sums below 2^64.
const MAX_WORK: u128 = 1 << 63;

impl RunConfig {
    /// Refuses a count above its maximum.
    ///
    /// # Errors
    /// The first, with its key, its value and the maximum.
    pub(super) fn check_bounds(&self) -> Result<(), ConfigError> {
        let (m, p, t) = (&self.model, &self.parallel, &self.train);
        let every = match self.memory.checkpointing {
            Checkpointing::Every(every) => every,
            Checkpointing::Word(_) => 1,
        };
        let sizes = [
            ("model.seq", m.seq, MAX_POSITIONS),
            ("model.vocab", m.vocab.unwrap_or(1), MAX_VOCAB),
            ("data.mask_token", self.data.mask_token.unwrap_or(0) as usize, MAX_VOCAB - 1),
            ("batch.global", self.batch.global, MAX_SEQUENCES),
            ("batch.micro", self.batch.micro.unwrap_or(1), MAX_SEQUENCES),
            ("parallel.ranks", p.ranks.unwrap_or(1), MAX_RANKS),
            ("parallel.pipeline", p.pipeline, MAX_RANKS),
            ("parallel.data", p.data.unwrap_or(1), MAX_RANKS),
            ("parallel.tensor", p.tensor, MAX_RANKS),
            // Embedding, last norm and head are blocks, too.
            ("parallel.chunks", p.chunks, MAX_LAYERS + 3),
            ("parallel.micro_batches", p.micro_batches.unwrap_or(1), MAX_MICRO_BATCHES),
            ("memory.prefetch", self.memory.prefetch, 1 << 20),
            ("memory.checkpointing", every, MAX_LAYERS),
            ("train.eval_samples", t.eval_samples, MAX_SEQUENCES),
            ("train.threads", t.threads.unwrap_or(1), MAX_THREADS),
        ];
        let sizes = sizes.map(|(key, given, max)| (key, given as u64, max as u64));
        let counts = [
            ("parallel.max_staleness", p.max_staleness, 1 << 20),
            ("run.stall_timeout_s", self.run.stall_timeout_s, MAX_SECONDS),
            ("memory.hidden_dim", self.memory.hidden_dim.unwrap_or(1), 1 << 40),
            ("precision.loss_scale_window", self.precision.loss_scale_window, MAX_STEPS),
            ("schedule.warmup", self.schedule.warmup, MAX_STEPS),
            ("train.steps", t.steps, MAX_STEPS),
            ("train.eval_every", t.eval_every, MAX_STEPS),
            ("train.save_every", t.save_every, MAX_STEPS),
            ("train.keep", t.keep.newest().unwrap_or(0) as u64, MAX_STEPS),
        ];
        for (key, given, max) in sizes.into_iter().chain(counts) {
            if given > max {
                return Err(refuse(key, given, format!("must be at most {max}")));
            }
        }
        let chunk = match self.memory.chunk {
            Chunk::Mebibytes(size) => size,
            Chunk::Word(_) => 0.0,
        };
        for (key, given, max) in [
            ("memory.chunk", chunk, MAX_CHUNK_MIB),
            ("memory.search_range_mb", self.memory.search_range_mb, MAX_MIB),
            ("memory.min_chunk_size_mb", self.memory.min_chunk_size_mb, MAX_MIB),
            ("memory.limit_mb", self.memory.limit_mb.unwrap_or(0.0), MAX_MIB),
            ("device.memory_mb", self.device.memory_mb.unwrap_or(0.0), MAX_MIB),
            ("device.slice_mb", self.device.slice_mb.unwrap_or(0.0), MAX_MIB),
            ("device.copy_gb_per_s", self.device.copy_gb_per_s.unwrap_or(0.0), MAX_GB_PER_S),
        ] {
            if given.is_finite() && given > max {
                return Err(refuse(key, given, format!("must be at most {max}")));
            }
        }
        Ok(())
    }

    /// Refuses too many micro-batches. The sizes of the batch have been checked against each other.
    pub(super) fn check_micro_batches(&self) -> Result<(), ConfigError> {
        let (count, micro_batch_size) = (self.micro_batches(), self.micro_batch_size());
        if count > MAX_MICRO_BATCHES {
            let expected = format!(
                "makes {count} micro-batches of {micro_batch_size} on each replica: at most {MAX_MICRO_BATCHES} are planned; lower \
                 it, or raise batch.micro or parallel.data"
            );
            return Err(refuse("batch.global", self.batch.global, expected));
        }
        Ok(())
    }

    /// Runs of one block over one micro-batch that the dry run of a step takes, over all ranks that are run dry, for a model of so many
    /// blocks and token ids.
    pub fn dry_runs(&self, mesh: Mesh, (blocks, vocab): (usize, usize)) -> u128 {
        self.dry_runs_of(mesh, (blocks, vocab), self.micro_batches())
    }

    fn dry_runs_of(&self, mesh: Mesh, (blocks, vocab): (usize, usize), micro_batches: usize) -> u128 {
        let replicas = if mesh.world_size() <= ALL_RANKS { mesh.data * mesh.tensor } else { 1 };
        let logits = (self.micro_batch_size() * self.model.seq) as u128 * 4 * vocab as u128;
        let blocks = blocks as u128 + logits / LOGITS_AS_A_BLOCK;
        replicas as u128 * micro_batches as u128 * blocks
    }

    fn check_dry_runs(&self, mesh: Mesh, model: (usize, usize), evaluated: usize) -> Result<(), ConfigError> {
        let evaluations = evaluated.div_ceil(self.micro_batch_size() * mesh.data);
        for (key, given, what, count) in [
            ("batch.global", self.batch.global, "a step", self.micro_batches()),
            ("train.eval_samples", self.train.eval_samples, "an evaluation", evaluations),
        ] {
            let runs = self.dry_runs_of(mesh, model, count);
            if runs > MAX_DRY_RUNS {
                let expected = format!(
                    "makes {what} of {count} micro-batches on each replica, {runs} runs of a block (or of as many bytes \
                     of logits) over a micro-batch in the plan, which takes at most {MAX_DRY_RUNS}: lower it, or \
                     change batch.micro"
                );
                return Err(refuse(key, given, expected));
            }
        }
        Ok(())
    }

    /// Refuses sizes whose products are too large although each size is valid: more tokens than a replica can hold, more work
    /// than 64 bits count. `network` is the whole network, with `vocab` token ids, `evaluated` the number of windows of an evaluation
    /// over all ranks.
    ///
    /// # Errors
    /// The key that contributes most.
    pub fn check_work(
        &self,
        mesh: Mesh,
        (network, vocab): (&Network, usize),
        evaluated: usize,
    ) -> Result<(), ConfigError> {
        let seq = self.model.seq as u128;
        for (key, given, sequences) in [
            ("batch.global", self.batch.global, self.batch.global / mesh.data),
            ("train.eval_samples", self.train.eval_samples, evaluated.div_ceil(mesh.data)),
        ] {
            let tokens = sequences as u128 * seq;
            if tokens > MAX_TOKENS {
                let expected = format!(
                    "makes {tokens} tokens on each replica ({sequences} sequences of model.seq = {seq}): at most \
                     {MAX_TOKENS} are planned; lower it, or use more of parallel.data"
                );
                return Err(refuse(key, given, expected));
            }
        }
        self.check_dry_runs(mesh, (network.uses.len(), vocab), evaluated)?;
        let elements = network.elements() as u64;
        let tokens = self.batch.global as u128 * seq;
        let each = 6 * u128::from(elements) + 12 * (network.layers() * network.width()) as u128 * seq;
        // Includes recomputation by checkpointing, and what is sent for each parameter in each micro-batch.
        let sent = 16 * u128::from(elements) * (mesh.world_size() * self.micro_batches()) as u128;
        // Stages may be uneven: one rank may have nearly all the work of its replica.
        let operations = 2 * tokens * each / (mesh.data * mesh.tensor) as u128;
        if operations > MAX_WORK {
            let expected = format!(
                "makes a step of {} sequences of {seq} tokens through {elements} parameters, up to {:.1e} operations on \
                 a rank: at most {:.1e} are planned; use more ranks, or make the model, model.seq or the batch smaller",
                self.batch.global, operations as f64, MAX_WORK as f64
            );
            return Err(refuse("batch.global", self.batch.global, expected));
        }
        if sent > MAX_WORK {
            let expected = format!(
                "ranks send up to {:.1e} bytes of {elements} parameters in a step: at most {:.1e} are planned; use \
                 fewer ranks or micro-batches",
                sent as f64, MAX_WORK as f64
            );
            return Err(refuse("parallel.ranks", mesh.world_size(), expected));
        }
        Ok(())
    }
}
