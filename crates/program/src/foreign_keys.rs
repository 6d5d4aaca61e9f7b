//! Names by which other programs call what the configuration has, and where it is here.

/// Programs whose names are known.
const NANOGPT: &str = "nanoGPT's";
const DEEPSPEED: &str = "DeepSpeed's";
const HUGGING_FACE: &str = "Hugging Face's";
const MEGATRON: &str = "Megatron's";
const GEMINI: &str = "Colossal-AI's";

/// An earlier version of this program.
const EARLIER: &str = "an earlier version's";

/// A name elsewhere: the program, the name, the key here, and what differs ("" for nothing).
type Foreign = (&'static str, &'static str, &'static str, &'static str);

/// All names that are known. Names of one table are written `table.key`. Names that a key here has, too, are not listed.
const NAMES: &[Foreign] = &[
    (
        EARLIER,
        "timeout_s",
        "run.stall_timeout_s",
        "10 by default: it need not exceed any computation, because a rank that computes is never stalled",
    ),
    (NANOGPT, "block_size", "model.seq", ""),
    (NANOGPT, "n_layer", "model.layers", ""),
    (NANOGPT, "n_head", "model.heads", ""),
    (NANOGPT, "n_embd", "model.hidden", ""),
    (NANOGPT, "batch_size", "batch.micro", "batch.global counts the sequences of a step over all ranks"),
    (
        NANOGPT,
        "gradient_accumulation_steps",
        "parallel.micro_batches",
        "micro-batches of a step on each replica; or give batch.global and batch.micro",
    ),
    (NANOGPT, "max_iters", "train.steps", ""),
    (NANOGPT, "eval_interval", "train.eval_every", ""),
    (NANOGPT, "eval_iters", "train.eval_samples", "counted in sequences, not in batches"),
    (NANOGPT, "learning_rate", "optimizer.lr", ""),
    (NANOGPT, "lr_decay_iters", "schedule.decay_steps", ""),
    (NANOGPT, "warmup_iters", "schedule.warmup", ""),
    (NANOGPT, "decay_lr", "schedule.kind", "\"constant\" does not decay"),
    (NANOGPT, "grad_clip", "optimizer.clip", ""),
    (NANOGPT, "dataset", "data.text", "or data.tokens for a token file"),
    (NANOGPT, "init_from", "model.init", "a Hugging Face folder; --resume continues a run"),
    (NANOGPT, "out_dir", "--run", "an option of the command line"),
    (NANOGPT, "dtype", "precision.compute", "\"f32\", \"bf16\" or \"f16\""),
    (DEEPSPEED, "train_batch_size", "batch.global", ""),
    (DEEPSPEED, "train_micro_batch_size_per_gpu", "batch.micro", ""),
    (DEEPSPEED, "gradient_clipping", "optimizer.clip", ""),
    (DEEPSPEED, "zero_optimization.stage", "parallel.zero", ""),
    (DEEPSPEED, "zero_optimization.offload_optimizer.device", "memory.optimizer", "\"host\" for \"cpu\""),
    (DEEPSPEED, "zero_optimization.offload_param.device", "memory.parameters", "\"host\" for \"cpu\""),
    (DEEPSPEED, "activation_checkpointing.cpu_checkpointing", "memory.activations", "\"host\" for true"),
    (GEMINI, "placement_policy", "memory.placement", "\"device\" for \"cuda\", \"host\" for \"cpu\""),
    (GEMINI, "search_range_m", "memory.search_range_mb", ""),
    (GEMINI, "min_chunk_size_m", "memory.min_chunk_size_mb", ""),
    (GEMINI, "steady_cuda_cap_ratio", "memory.headroom", "the share that stays free"),
    (DEEPSPEED, "zero_optimization.sub_group_size", "memory.buffer_mb", "in MiB of f32"),
    (DEEPSPEED, "zero_optimization.overlap_comm", "parallel.overlap", ""),
    (DEEPSPEED, "zero_optimization.reduce_bucket_size", "memory.chunk", "in MiB"),
    (DEEPSPEED, "zero_optimization.allgather_bucket_size", "memory.chunk", "in MiB"),
    (DEEPSPEED, "zero_optimization.stage3_prefetch_bucket_size", "memory.prefetch", "counted in chunks"),
    (DEEPSPEED, "fp16.enabled", "precision.compute", "set it to \"f16\""),
    (DEEPSPEED, "bf16.enabled", "precision.compute", "set it to \"bf16\""),
    (DEEPSPEED, "scheduler.warmup_num_steps", "schedule.warmup", ""),
    (DEEPSPEED, "communication_data_type", "precision.communicate", ""),
    (DEEPSPEED, "data_types.grad_accum_dtype", "precision.accumulate", ""),
    (HUGGING_FACE, "num_hidden_layers", "model.layers", ""),
    (HUGGING_FACE, "hidden_size", "model.hidden", ""),
    (HUGGING_FACE, "num_attention_heads", "model.heads", ""),
    (HUGGING_FACE, "n_inner", "model.intermediate", ""),
    (HUGGING_FACE, "intermediate_size", "model.intermediate", ""),
    (HUGGING_FACE, "num_key_value_heads", "model.kv_heads", ""),
    (HUGGING_FACE, "sliding_window", "model.window", ""),
    (HUGGING_FACE, "tie_word_embeddings", "model.tied", ""),
    (HUGGING_FACE, "rope_parameters", "model.rope_scaling", "with rope_theta in model.rope_theta"),
    (HUGGING_FACE, "rms_norm_eps", "model.norm_eps", ""),
    (HUGGING_FACE, "layer_norm_epsilon", "model.norm_eps", ""),
    (HUGGING_FACE, "layer_norm_eps", "model.norm_eps", ""),
    (
        HUGGING_FACE,
        "max_position_embeddings",
        "model.positions",
        "model.seq is the length of training sequences",
    ),
    (HUGGING_FACE, "n_positions", "model.positions", "model.seq is the length of training sequences"),
    (HUGGING_FACE, "n_ctx", "model.seq", ""),
    (HUGGING_FACE, "vocab_size", "model.vocab", ""),
    (HUGGING_FACE, "model_type", "model.arch", ""),
    (HUGGING_FACE, "model_name_or_path", "model.init", "a folder with config.json and safetensors files"),
    (HUGGING_FACE, "embd_pdrop", "model.embedding_dropout", ""),
    (HUGGING_FACE, "attn_pdrop", "model.attention_dropout", ""),
    (HUGGING_FACE, "resid_pdrop", "model.residual_dropout", ""),
    (HUGGING_FACE, "hidden_dropout_prob", "model.dropout", ""),
    (HUGGING_FACE, "attention_probs_dropout_prob", "model.attention_dropout", ""),
    (HUGGING_FACE, "per_device_train_batch_size", "batch.micro", ""),
    (HUGGING_FACE, "per_device_eval_batch_size", "batch.micro", "evaluation uses the same micro-batch"),
    (HUGGING_FACE, "max_steps", "train.steps", ""),
    (HUGGING_FACE, "num_train_epochs", "train.steps", "counted in steps, not in epochs"),
    (HUGGING_FACE, "warmup_steps", "schedule.warmup", ""),
    (HUGGING_FACE, "warmup_ratio", "schedule.warmup", "counted in steps, not as a share of them"),
    (HUGGING_FACE, "lr_scheduler_type", "schedule.kind", ""),
    (HUGGING_FACE, "adam_beta1", "optimizer.beta1", ""),
    (HUGGING_FACE, "adam_beta2", "optimizer.beta2", ""),
    (HUGGING_FACE, "adam_epsilon", "optimizer.eps", ""),
    (HUGGING_FACE, "optim", "optimizer.kind", ""),
    (HUGGING_FACE, "max_grad_norm", "optimizer.clip", ""),
    (HUGGING_FACE, "label_smoothing_factor", "loss.label_smoothing", ""),
    (HUGGING_FACE, "gradient_checkpointing", "memory.checkpointing", "\"block\" recomputes every block"),
    (HUGGING_FACE, "save_steps", "train.save_every", ""),
    (HUGGING_FACE, "eval_steps", "train.eval_every", ""),
    (HUGGING_FACE, "output_dir", "--run", "an option of the command line"),
    (HUGGING_FACE, "resume_from_checkpoint", "--resume", "an option of the command line"),
    (HUGGING_FACE, "tokenizer_name", "data.tokenizer", ""),
    (HUGGING_FACE, "train_file", "data.text", ""),
    (HUGGING_FACE, "fp16", "precision.compute", "set it to \"f16\""),
    (HUGGING_FACE, "bf16", "precision.compute", "set it to \"bf16\""),
    (MEGATRON, "tensor_model_parallel_size", "parallel.tensor", ""),
    (MEGATRON, "pipeline_model_parallel_size", "parallel.pipeline", ""),
    (MEGATRON, "data_parallel_size", "parallel.data", ""),
    (MEGATRON, "num_layers_per_virtual_pipeline_stage", "parallel.chunks", "stages of each rank"),
    (MEGATRON, "num_layers", "model.layers", ""),
    (MEGATRON, "seq_length", "model.seq", ""),
    (MEGATRON, "micro_batch_size", "batch.micro", ""),
    (MEGATRON, "global_batch_size", "batch.global", ""),
    (MEGATRON, "train_iters", "train.steps", ""),
    (MEGATRON, "lr_warmup_iters", "schedule.warmup", ""),
    (MEGATRON, "lr_decay_style", "schedule.kind", ""),
    (MEGATRON, "clip_grad", "optimizer.clip", ""),
    (MEGATRON, "hidden_dropout", "model.residual_dropout", ""),
    (MEGATRON, "recompute_granularity", "memory.checkpointing", "\"selective\" or \"block\""),
    (MEGATRON, "use_distributed_optimizer", "parallel.zero", "set it to 1"),
    (MEGATRON, "data_path", "data.tokens", "or data.text for text"),
    (MEGATRON, "split", "data.validation", "the share that is held out"),
    (MEGATRON, "save_interval", "train.save_every", ""),
    (MEGATRON, "world_size", "parallel.ranks", ""),
];

/// What to say of a name that another program uses: `block_size is nanoGPT's name; here it is model.seq`.
pub fn explain(given: &str) -> Option<String> {
    let normal = given.trim_start_matches('-').replace('-', "_").to_lowercase();
    let leaf = normal.rsplit('.').next()?;
    // The whole name first: `fp16.enabled` is more than `enabled`.
    let known = |name: &str| NAMES.iter().find(|(_, foreign, _, _)| *foreign == name);
    let (program, name, own, note) = known(&normal).or_else(|| known(leaf))?;
    let note = if note.is_empty() { String::new() } else { format!(" ({note})") };
    Some(format!("{name} is {program} name; here it is {own}{note}"))
}

#[cfg(test)]
pub(crate) fn names() -> impl Iterator<Item = (&'static str, &'static str)> {
    NAMES.iter().map(|(_, name, own, _)| (*name, *own))
}
