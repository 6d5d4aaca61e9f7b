//! `[parallel]`: the mesh of ranks, ZeRO stage, pipeline schedule and communication.

use phalanx_models::limits::MAX_LAYERS;

use super::bounds::{MAX_MICRO_BATCHES, MAX_RANKS};
use super::declare::Conversion::{Rule, Same};
use super::declare::{AXOLOTL, DEEPSPEED, HUGGING_FACE, KEY, MEGATRON, NANOGPT, Resume, TORCHTITAN};
use super::needs::{LEFT_OUT, Need};

table! {
    /// `[parallel]`
    "parallel" ParallelConfig {
        /// Number of ranks; `pipeline` x `data` x `tensor` when left out (`--nproc` sets it).
        ranks: Option<usize> = None, KEY.either("parallel.data").from(0.0, MAX_RANKS).foreign(&[(MEGATRON, "world_size", Rule, "")]);
        /// Pipeline ranks: each has one or more stages of the model's blocks.
        pipeline: usize = 1, KEY.from(0.0, MAX_RANKS)
            .foreign(&[
                (MEGATRON, "pipeline_model_parallel_size", Rule, ""),
                (TORCHTITAN, "parallelism.pipeline_parallel_degree", Same, ""),
                (DEEPSPEED, "pipeline.stages", Same, ""),
            ]);
        /// Replicas, which share the batch. When left out: `ranks` divided by the other axes, or 1 without `ranks`.
        data: Option<usize> = None, KEY.from(0.0, MAX_RANKS)
            .foreign(&[
                (MEGATRON, "data_parallel_size", Rule, ""),
                (TORCHTITAN, "parallelism.data_parallel_replicate_degree", Rule, ""),
            ]);
        /// Tensor-parallel ranks: they share every layer.
        tensor: usize = 1, KEY.from(0.0, MAX_RANKS)
            .foreign(&[
                (MEGATRON, "tensor_model_parallel_size", Rule, ""),
                (TORCHTITAN, "parallelism.tensor_parallel_degree", Same, ""),
                (AXOLOTL, "tensor_parallel_size", Same, ""),
                (DEEPSPEED, "tensor_parallel.autotp_size", Rule, ""),
            ]);
        /// Shards norms, dropout and the residual stream over the tensor axis, too.
        sequence_parallel: bool = false, KEY
            .needs(&[Need::any(&[("parallel.tensor", &["2.."])], "it shards the residual stream over these ranks")]);
        /// ZeRO stage, 0 to 3, over the data axis.
        zero: u8 = 0, KEY.from(0.0, 3.0).hint("a ZeRO stage: 0, 1, 2 or 3")
            .foreign(&[
                (DEEPSPEED, "zero_optimization.stage", Same, ""),
                (TORCHTITAN, "parallelism.data_parallel_shard_degree", Rule, "3 shards over the data axis"),
                (MEGATRON, "use_distributed_optimizer", Rule, "set it to 1"),
            ]);
        /// Pipeline schedule: `model`, `gpipe`, `1f1b`, `interleaved`, `zb-h1`, `zb-h2`, `zb-v`, the path of a file in PyTorch's
        /// text form, or that text.
        schedule: String = "1f1b".into(), KEY
            .foreign(&[(TORCHTITAN, "parallelism.pipeline_parallel_schedule", Rule, "")]);
        /// Stages of each rank under `interleaved`.
        chunks: usize = 2, KEY.from(1.0, (MAX_LAYERS + 3) as f64).hint("stages of each rank; embedding, last norm and head are blocks, too")
            .foreign(&[(MEGATRON, "num_layers_per_virtual_pipeline_stage", Rule, "stages of each rank")]);
        /// Rule by which blocks are divided into stages: `balanced` by operations, by `parameters`, or `uniform` in number.
        cut: CutBy = CutBy::Balanced, KEY;
        /// Micro-batches of a step on each rank, instead of their size in `batch.micro`.
        micro_batches: Option<usize> = None, KEY.either("batch.micro").from(1.0, MAX_MICRO_BATCHES as f64)
            .foreign(&[
                (DEEPSPEED, "gradient_accumulation_steps", Rule, "or give batch.global and batch.micro"),
                (HUGGING_FACE, "gradient_accumulation_steps", Rule, "or give batch.global and batch.micro"),
                (NANOGPT, "gradient_accumulation_steps", Rule, "micro-batches of a step on each replica; or give batch.global and batch.micro"),
            ]);
        /// `synchronous`: one update per step from the gradients of all ranks. `asynchronous`: each rank sends its
        /// gradients to the ranks that own the parameters, which apply them as they arrive.
        updates: Updates = Updates::Synchronous, KEY.resume(Resume::Said("losses and rates of steps count otherwise"))
            .needs(&[
                Need::any(&[("parallel.zero", &["0"])], "gradients are applied as they arrive, not when those of all ranks are there"),
                Need::any(&[("parallel.pipeline", &["1"])], "every rank has the whole model"),
                Need::any(&[("parallel.tensor", &["1"])], "every rank has the whole model"),
                Need::any(&[("model.trainable", LEFT_OUT)], "all parameters are trained"),
                Need::any(&[("lora.rank", LEFT_OUT)], "all parameters are trained"),
                Need::any(&[("model.frozen", LEFT_OUT)], "all parameters are trained"),
                Need::any(&[("batch.reduce", &["each"])], "gradients are sent after each step"),
            ]);
        /// Under asynchronous updates: steps that a rank may be ahead of the slowest.
        max_staleness: u64 = 4, KEY.from(0.0, (1 << 20) as f64);
        /// Overlaps communication with computation.
        overlap: bool = true, KEY.foreign(&[(DEEPSPEED, "zero_optimization.overlap_comm", Same, "")]);
    }
}

words! {
    /// Rule by which blocks are divided into stages.
    CutBy {
        /// The slowest stage has as few operations as possible.
        Balanced = "balanced",
        /// The largest stage has as few parameters as possible.
        Parameters = "parameters",
        /// Every stage has the same number of Transformer blocks.
        Uniform = "uniform",
    }
}

words! {
    /// When gradients become updates.
    Updates {
        /// One update per step, from the gradients of all ranks.
        Synchronous = "synchronous",
        /// Each gradient is applied when it arrives.
        Asynchronous = "asynchronous",
    }
}
