//! The largest values of counts. Each bound exceeds what real runs need by a large factor.
//!
//! The dry run allocates and computes in proportion to these numbers and multiplies them with each other. A
//! number that is mistyped or hostile is refused here, by name, before anything is made of it; after this check,
//! and that of the products ([`RunConfig::check_work`]), no sum of the plan leaves 64 bits.

use phalanx_layers::Network;
use phalanx_plan::Mesh;

use super::RunConfig;
use super::check::{ConfigError, refuse};
use super::declare::Table;

/// Largest world of which every rank runs dry; in a larger one, one rank of each pipeline stage does.
pub(crate) const ALL_RANKS: usize = 16;

/// Sequences of a step or of an evaluation.
pub(super) const MAX_SEQUENCES: f64 = (1 << 22) as f64;

/// Micro-batches of a step on one replica; the dry run runs each of them.
pub(super) const MAX_MICRO_BATCHES: usize = 1 << 16;

/// Ranks along an axis and in total.
pub(super) const MAX_RANKS: f64 = (1 << 20) as f64;

/// Threads of a rank: more than any machine has cores.
pub(super) const MAX_THREADS: f64 = 4096.0;

/// The largest probability, and decay, below 1.
pub(super) const BELOW_1: f64 = 0.999_999_9;

/// Steps, and numbers of steps.
pub(super) const MAX_STEPS: f64 = 1_000_000_000_000.0;

/// Seconds of a wait: a year.
pub(super) const MAX_SECONDS: f64 = 31_536_000.0;

/// MiB of a chunk: one TiB.
pub(super) const MAX_CHUNK_MIB: f64 = (1u64 << 20) as f64;

/// Units of 2^20 elements, or MiB, of everything else.
pub(super) const MAX_MIB: f64 = (1u64 << 40) as f64;

/// 10^9 bytes per second of a copy: a thousand times the memory of an accelerator.
pub(super) const MAX_GB_PER_S: f64 = 1e7;

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
    /// Refuses numbers that their keys do not take.
    ///
    /// # Errors
    /// The first, with its key, its value and the bound.
    pub fn check_bounds(&self) -> Result<(), ConfigError> {
        self.tables().into_iter().try_for_each(|table| table.check_bounds())?;
        self.optimizer.group.iter().try_for_each(Table::check_bounds)?;
        self.model.keys.check_bounds().map_err(ConfigError::of_model)
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
