//! `[parallel]`: the mesh of ranks, ZeRO stage, pipeline schedule and communication.

use serde::{Deserialize, Serialize};

/// `[parallel]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ParallelConfig {
    /// Number of ranks; `pipeline` x `data` x `tensor` when left out (`--nproc` sets it).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ranks: Option<usize>,
    /// Pipeline ranks: each has one or more stages of the model's blocks.
    pub pipeline: usize,
    /// Replicas, which share the batch. When left out: `ranks` divided by the other axes, or 1 without `ranks`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<usize>,
    /// Tensor-parallel ranks: they share every layer.
    pub tensor: usize,
    /// Whether norms, dropout and the residual stream are sharded over the tensor axis, too.
    pub sequence_parallel: bool,
    /// ZeRO stage, 0 to 3, over the data axis.
    pub zero: u8,
    /// Pipeline schedule: `model`, `gpipe`, `1f1b`, `interleaved`, `zb-h1`, `zb-h2`, `zb-v`, the path of a file in PyTorch's
    /// text form, or that text.
    pub schedule: String,
    /// Stages of each rank under `interleaved`.
    pub chunks: usize,
    /// Where blocks are cut into stages: `balanced` by operations, by `parameters`, or `uniform` in number.
    pub cut: CutBy,
    /// Micro-batches of a step on each rank, instead of their size in `batch.micro`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub micro_batches: Option<usize>,
    /// `synchronous`: one update per step from the gradients of all ranks. `asynchronous`: each rank sends its
    /// gradients to the ranks that own the parameters, which apply them as they arrive.
    pub updates: Updates,
    /// Under asynchronous updates: steps that a rank may be ahead of the slowest.
    pub max_staleness: u64,
    /// Whether communication runs beside computation.
    pub overlap: bool,
    /// Read from runs of earlier versions, and not used: `run.stall_timeout_s` has taken its place.
    #[serde(skip_serializing, deserialize_with = "ignored")]
    pub timeout_s: (),
}

/// Reads a value of any type, and forgets it.
fn ignored<'de, D: serde::Deserializer<'de>>(value: D) -> Result<(), D::Error> {
    serde::de::IgnoredAny::deserialize(value).map(drop)
}

impl Default for ParallelConfig {
    fn default() -> Self {
        ParallelConfig {
            ranks: None,
            pipeline: 1,
            data: None,
            tensor: 1,
            sequence_parallel: false,
            zero: 0,
            schedule: "1f1b".into(),
            chunks: 2,
            cut: CutBy::Balanced,
            micro_batches: None,
            updates: Updates::Synchronous,
            max_staleness: 4,
            overlap: true,
            timeout_s: (),
        }
    }
}

/// Where blocks are cut into stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CutBy {
    /// The slowest stage has as few operations as possible.
    Balanced,
    /// The largest stage has as few parameters as possible.
    Parameters,
    /// Every stage has the same number of Transformer blocks.
    Uniform,
}

/// When gradients become updates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Updates {
    /// One update per step, from the gradients of all ranks.
    Synchronous,
    /// Each gradient is applied when it arrives.
    Asynchronous,
}
