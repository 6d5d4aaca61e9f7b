//! DeepSpeed's keys that are no keys here, with the reason: those that choose sizes or ways which the plan chooses here, those
//! that turn on what is always on, and those that are refused.

use super::super::Type::{Any, Flag, List, Number, Text};
use super::super::Verdict::{Differs, Only, Refused, Unneeded};
use super::super::{LOGS, Other};

const OFF: &[&str] = &["false"];
const BUCKET: &str =
    "chunks are the buckets here, and the plan searches their size: memory.chunk, in MiB, decides instead";
const LIVE: &str = "gathers follow the plan's schedule, and memory.prefetch says how many chunks ahead";
const PLANNED: &str = "phalanx plan shows it before the run, and metrics.jsonl has it after each step";
const ALWAYS: &str = "always so here";
const SIZES: &str = "the plan computes the buffers: none can be too few or too small";
const DISK: &str = "pieces of 1 MiB, many in flight by io_uring; phalanx bench disk measures them";
const QUANTIZED: &str = "parameters and gradients travel in precision.communicate here: leave it out";
const QUANTIZER: &str = "quantised training is not here: leave it out";
const MODEL: &str = "it changes the model: leave it out";

pub(super) const OTHERS: &[Other] = &[
    ("steps_per_print", Number, Unneeded(LOGS)),
    ("wall_clock_breakdown", Flag, Unneeded("phalanx bench step times each kernel")),
    ("memory_breakdown", Flag, Unneeded("memory.json of the run folder has every category, to the byte")),
    ("dump_state", Flag, Unneeded("config.toml of the run folder has every key")),
    ("log_level", Text, Unneeded(LOGS)),
    (
        "prescale_gradients",
        Flag,
        Differs("the mean is taken once, of the sum over all ranks: the same but for rounding"),
    ),
    (
        "gradient_predivide_factor",
        Number,
        Differs("the mean is taken once, of the sum over all ranks: the same but for rounding"),
    ),
    (
        "gradient_allreduce_op",
        Text,
        Only(&["mean"], "gradients are the mean over the global batch here: multiply optimizer.lr instead"),
    ),
    ("sparse_gradients", Flag, Differs("gradients of tables are dense here")),
    ("fp32_allreduce", Flag, Only(OFF, "set communication_data_type to \"fp32\"")),
    ("seq_parallel_communication_data_type", Text, Unneeded("activations travel in precision.compute")),
    ("disable_allgather", Flag, Unneeded("parameters are gathered as the stage needs")),
    ("managed_gradient_accumulation", Flag, Only(&["true"], "the engine sums the micro-batches here")),
    ("zero_allow_untested_optimizer", Flag, Unneeded("every optimizer here is tested under every stage")),
    ("zero_force_ds_cpu_optimizer", Flag, Unneeded("memory.update says which side computes updates")),
    ("max_grad_norm", Number, Refused("DeepSpeed does not read this key: set gradient_clipping")),
    ("dataloader_drop_last", Flag, Unneeded("the last windows are used in the next epoch")),
    (
        "use_data_before_expert_parallelism",
        Flag,
        Unneeded("the order of ranks is that of the mesh: pipeline, data, tensor"),
    ),
    ("graph_harvesting", Flag, Unneeded("kernels of a step are graphs on a GPU")),
    ("load_from_fp32_weights", Flag, Unneeded(ALWAYS)),
    ("cuda_visible_devices", Any, Unneeded("set CUDA_VISIBLE_DEVICES in the environment")),
    ("_comment", Text, Unneeded("a comment")),
    // 16 bits.
    ("fp16.auto_cast", Flag, Unneeded("inputs are token ids, which are not cast")),
    ("fp16.fp16_master_weights_and_grads", Flag, Only(OFF, "master weights are f32 here: leave it out")),
    ("bf16.immediate_grad_update", Flag, Unneeded("gradients are added where they are summed at once")),
    (
        "bf16.check_grad_overflow",
        Flag,
        Unneeded("a number that is not finite is never applied, and ends the run"),
    ),
    ("bf16.check_overflow", Flag, Unneeded("a number that is not finite is never applied, and ends the run")),
    ("bf16.bf16_master_weights_and_grads", Flag, Only(OFF, "master weights are f32 here: leave it out")),
    ("bf16.bf16_optimizer_states", Flag, Only(OFF, "optimizer states are f32 here: leave it out")),
    ("amp.enabled", Flag, Only(OFF, "set bf16.enabled or fp16.enabled, whose master weights are f32")),
    ("amp.*", Any, Unneeded("it belongs to amp.enabled")),
    (
        "torch_autocast.enabled",
        Flag,
        Only(OFF, "set bf16.enabled or fp16.enabled: all products are in that type, on f32 master weights"),
    ),
    ("torch_autocast.*", Any, Unneeded("it belongs to torch_autocast.enabled")),
    // Optimizers.
    ("optimizer.legacy_fusion", Flag, Unneeded("one kernel updates whole chunks")),
    ("optimizer.params.torch_adam", Flag, Unneeded("one kernel updates whole chunks")),
    ("optimizer.params.fused", Flag, Unneeded("one kernel updates whole chunks")),
    ("optimizer.params.foreach", Flag, Unneeded("one kernel updates whole chunks")),
    (
        "optimizer.params.bias_correction",
        Flag,
        Only(&["true"], "AdamW corrects its moments here: set it to true"),
    ),
    ("optimizer.params.amsgrad", Flag, Only(OFF, "AdamW has no largest second moment here: leave it out")),
    ("optimizer.params.max_grad_norm", Number, Refused("set gradient_clipping, as DeepSpeed asks, too")),
    // ZeRO.
    ("zero_optimization.reduce_bucket_size", Number, Unneeded(BUCKET)),
    ("zero_optimization.allgather_bucket_size", Number, Unneeded(BUCKET)),
    ("zero_optimization.contiguous_gradients", Flag, Unneeded("gradients lie in chunks under every stage")),
    ("zero_optimization.reduce_scatter", Flag, Unneeded("each shard is reduced to its rank alone")),
    (
        "zero_optimization.use_multi_rank_bucket_allreduce",
        Flag,
        Unneeded("each shard is reduced to its rank alone"),
    ),
    ("zero_optimization.allgather_partitions", Flag, Unneeded("chunks are gathered whole")),
    ("zero_optimization.round_robin_gradients", Flag, Unneeded("every rank copies its shard of each chunk")),
    (
        "zero_optimization.sub_group_size",
        Number,
        Unneeded("what lies elsewhere visits in buffers of memory.buffer_mb"),
    ),
    ("zero_optimization.load_from_fp32_weights", Flag, Unneeded("checkpoints hold f32")),
    (
        "zero_optimization.elastic_checkpoint",
        Flag,
        Unneeded("every checkpoint loads on every number of ranks"),
    ),
    (
        "zero_optimization.ignore_unused_parameters",
        Flag,
        Unneeded("a parameter without a gradient is not updated"),
    ),
    ("zero_optimization.legacy_stage1", Flag, Only(OFF, "leave it out: stage 1 has one form here")),
    (
        "zero_optimization.cpu_offload_use_pin_memory",
        Flag,
        Unneeded("memory.pin_memory: locked where a device copies by itself"),
    ),
    (
        "zero_optimization.stage3_prefetch_bucket_size",
        Number,
        Unneeded("memory.prefetch counts chunks: 1 ahead"),
    ),
    (
        "zero_optimization.stage3_param_persistence_threshold",
        Number,
        Unneeded("small parameters share chunks, so that none costs a gather of its own"),
    ),
    (
        "zero_optimization.stage3_model_persistence_threshold",
        Number,
        Unneeded("small parameters share chunks, so that none costs a gather of its own"),
    ),
    ("zero_optimization.stage3_max_live_parameters", Number, Unneeded(LIVE)),
    ("zero_optimization.stage3_max_reuse_distance", Number, Unneeded(LIVE)),
    ("zero_optimization.stage3_module_granularity_threshold", Number, Unneeded(LIVE)),
    ("zero_optimization.stage3_use_all_reduce_for_fetch_params", Flag, Unneeded(LIVE)),
    ("zero_optimization.stage3_allgather_sequential", Flag, Unneeded(LIVE)),
    (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        Flag,
        Unneeded("checkpoints hold whole f32 tensors; phalanx export --dtype bf16 writes 16 bits"),
    ),
    (
        "zero_optimization.stage3_gather_fp16_weights_on_model_save",
        Flag,
        Unneeded("checkpoints hold whole f32 tensors; phalanx export --dtype f16 writes 16 bits"),
    ),
    (
        "zero_optimization.zero_hpz_partition_size",
        Number,
        Only(&["1"], "parameters have one set of shards here: leave it out"),
    ),
    ("zero_optimization.zero_quantized_weights", Flag, Only(OFF, QUANTIZED)),
    ("zero_optimization.zero_quantized_nontrainable_weights", Flag, Only(OFF, QUANTIZED)),
    ("zero_optimization.zero_quantized_gradients", Flag, Only(OFF, QUANTIZED)),
    ("zero_optimization.zeropp_loco_param.*", Any, Refused(QUANTIZED)),
    (
        "zero_optimization.mics_shard_size",
        Number,
        Only(&["-1", "0"], "shards lie over the whole data axis here: leave it out"),
    ),
    (
        "zero_optimization.mics_hierarchical_params_gather",
        Flag,
        Only(OFF, "shards lie over the whole data axis here: leave it out"),
    ),
    ("zero_optimization.memory_efficient_linear", Flag, Unneeded(ALWAYS)),
    (
        "zero_optimization.pipeline_loading_checkpoint",
        Flag,
        Unneeded("checkpoints are read in bounded windows"),
    ),
    ("zero_optimization.override_module_apply", Flag, Unneeded("initial values are made shard by shard")),
    (
        "zero_optimization.log_trace_cache_warnings",
        Flag,
        Unneeded("the order of chunks is planned, and cannot change"),
    ),
    (
        "zero_optimization.enable_sanity_checks",
        Flag,
        Unneeded("the plan proves that all ranks issue the same collectives"),
    ),
    (
        "zero_optimization.save_muon_momentum_buffer_in_memory",
        Flag,
        Only(OFF, "there is no Muon here: leave it out"),
    ),
    (
        "zero_optimization.leaf_module.*",
        Any,
        Unneeded("chunks follow the order of execution, whatever the modules are"),
    ),
    (
        "zero_optimization.zenflow.*",
        Any,
        Refused("set memory.delayed_update = true, which computes each update during the next step"),
    ),
    ("zero_optimization.offload_param.buffer_count", Number, Unneeded(SIZES)),
    ("zero_optimization.offload_param.buffer_size", Number, Unneeded(SIZES)),
    ("zero_optimization.offload_param.max_in_cpu", Number, Unneeded(SIZES)),
    ("zero_optimization.offload_optimizer.buffer_count", Number, Unneeded(SIZES)),
    ("zero_optimization.offload_optimizer.buffer_size", Number, Unneeded(SIZES)),
    ("zero_optimization.offload_optimizer.pipeline", Flag, Unneeded("reads and writes overlap with updates")),
    ("zero_optimization.offload_optimizer.pipeline_read", Flag, Unneeded("reads overlap with updates")),
    ("zero_optimization.offload_optimizer.pipeline_write", Flag, Unneeded("writes overlap with updates")),
    ("zero_optimization.offload_optimizer.fast_init", Flag, Unneeded("states are made where they lie")),
    (
        "zero_optimization.offload_optimizer.super_offload",
        Flag,
        Only(OFF, "set memory.delayed_update = true, or leave it out"),
    ),
    (
        "zero_optimization.offload_optimizer.cpuadam_cores_perc",
        Number,
        Unneeded("updates on the host use train.threads"),
    ),
    // Activations, disks, pipelines, checkpoints.
    (
        "activation_checkpointing.contiguous_memory_optimization",
        Flag,
        Unneeded("every tensor has its planned place: nothing is fragmented"),
    ),
    (
        "activation_checkpointing.number_checkpoints",
        Number,
        Unneeded("memory.checkpointing says which blocks are recomputed"),
    ),
    ("activation_checkpointing.synchronize_checkpoint_boundary", Flag, Unneeded("events order the streams")),
    ("activation_checkpointing.profile", Flag, Unneeded("phalanx bench step times each kernel")),
    ("aio.*", Any, Unneeded(DISK)),
    ("pipeline.partition", Text, Unneeded("parallel.cut says how blocks are divided into stages")),
    ("pipeline.seed_layers", Flag, Unneeded("initial values depend on the layer and the seed alone")),
    (
        "pipeline.activation_checkpoint_interval",
        Number,
        Only(&["0"], "set memory.checkpointing = \"block\", or k for every k-th block"),
    ),
    ("pipeline.pipe_partitioned", Flag, Unneeded("memory.partition_activations divides them")),
    ("pipeline.grad_partitioned", Flag, Unneeded("the schedule's messages are planned")),
    ("pipeline.use_reentrant", Flag, Unneeded("there is no autograd")),
    (
        "checkpoint.tag_validation",
        Text,
        Unneeded("all ranks write one checkpoint, which is committed at once"),
    ),
    ("checkpoint.load_universal", Flag, Unneeded("every checkpoint loads on every mesh")),
    ("checkpoint.use_node_local_storage", Flag, Only(OFF, "the run folder must be the same on all hosts")),
    ("checkpoint.parallel_write.*", Any, Unneeded("all ranks write their part at the same time")),
    ("checkpoint.*", Any, Unneeded("checkpoints have one form here")),
    ("data_types.*", Any, Unneeded("precision.compute is the type of the parameters")),
    // Reports.
    ("flops_profiler.*", Any, Unneeded(PLANNED)),
    ("comms_logger.*", Any, Unneeded(PLANNED)),
    ("comms_config.*", Any, Unneeded(PLANNED)),
    ("monitor_config.*", Any, Unneeded(LOGS)),
    ("csv_monitor.*", Any, Unneeded(LOGS)),
    ("tensorboard.*", Any, Unneeded(LOGS)),
    ("wandb.enabled", Flag, Differs(LOGS)),
    ("wandb.*", Any, Unneeded(LOGS)),
    ("comet.enabled", Flag, Differs(LOGS)),
    ("comet.*", Any, Unneeded(LOGS)),
    ("timers.*", Any, Unneeded("phalanx bench step times each kernel")),
    // What is not here.
    (
        "elasticity.enabled",
        Flag,
        Only(OFF, "a run resumes on any number of ranks; see --max-restarts and --min-nproc"),
    ),
    ("elasticity.*", Any, Unneeded("it belongs to elasticity.enabled")),
    (
        "autotuning.enabled",
        Flag,
        Only(OFF, "phalanx plan proposes what fits, each proposal planned: leave it out"),
    ),
    ("autotuning.*", Any, Unneeded("it belongs to autotuning.enabled")),
    ("compile.*", Any, Unneeded("kernels are compiled already")),
    ("progressive_layer_drop.enabled", Flag, Only(OFF, MODEL)),
    ("progressive_layer_drop.*", Any, Unneeded("it belongs to progressive_layer_drop.enabled")),
    ("eigenvalue.enabled", Flag, Only(OFF, QUANTIZER)),
    ("eigenvalue.*", Any, Unneeded("it belongs to eigenvalue.enabled")),
    ("quantize_training.*", Any, Refused(QUANTIZER)),
    ("compression_training.*", Any, Refused("pruning and quantisation are not here: leave it out")),
    ("weight_quantization.*", Any, Refused(QUANTIZER)),
    (
        "sparse_attention.*",
        Any,
        Refused(
            "attention is dense here, or in windows with model.window of the architectures that have it: leave it out",
        ),
    ),
    (
        "curriculum_learning.enabled",
        Flag,
        Only(OFF, "sequences have one length here, model.seq: leave it out"),
    ),
    ("curriculum_learning.*", Any, Unneeded("it belongs to curriculum_learning.enabled")),
    ("data_efficiency.enabled", Flag, Only(OFF, "sequences have one length here, model.seq: leave it out")),
    ("data_efficiency.*", Any, Unneeded("it belongs to data_efficiency.enabled")),
    ("hybrid_engine.enabled", Flag, Only(OFF, "phalanx sample generates: leave it out")),
    ("hybrid_engine.*", Any, Unneeded("it belongs to hybrid_engine.enabled")),
    ("nebula.enabled", Flag, Only(OFF, "checkpoints go to the run folder: leave it out")),
    ("nebula.*", Any, Unneeded("it belongs to nebula.enabled")),
    (
        "sequence_parallel_size",
        Number,
        Only(&["1"], "set parallel.tensor with parallel.sequence_parallel instead"),
    ),
    ("expert_parallel.*", Any, Refused("there are no experts here: leave it out")),
    ("moe.*", Any, Refused("there are no experts here: leave it out")),
    ("tensor_parallel.*", Any, Unneeded("parallel.tensor divides every layer by its own rule")),
    ("data_parallel_size", Number, Unneeded("parallel.data, or what parallel.ranks leaves")),
    ("train_steps", Number, Unneeded("train.steps says how long the run is")),
    ("lower_precision_safe_modules", List, Unneeded("it belongs to torch_autocast")),
];
