//! axolotl's and LLaMA-Factory's YAML: arguments of Hugging Face's Trainer, with names of their own for data, model and batch.

use anyhow::Result;
use phalanx_train::config::declare::{
    AXOLOTL as OF_AXOLOTL, HUGGING_FACE, LLAMA_FACTORY as OF_LLAMA_FACTORY,
};

use super::Type::{Any, Flag, Number, Text};
use super::Verdict::{Differs, Only, Refused, Unneeded};
use super::value::Entry;
use super::{Draft, Format, LOGS, Other, adapters, chats, preferences, trainer_rate, yaml};

/// axolotl's format.
pub const AXOLOTL: Format = Format {
    name: "axolotl",
    programs: &[OF_AXOLOTL, HUGGING_FACE],
    read: yaml::read,
    others: OF_AXOLOTLS,
    rules: |draft| {
        adapters::axolotl(draft);
        let pairs = preferences::axolotl(draft);
        chats::axolotl(draft, pairs);
        rules(draft, &["micro_batch_size", "optimizer", "lr_scheduler", "num_epochs"], pairs)
    },
};

/// LLaMA-Factory's format.
pub const LLAMA_FACTORY: Format = Format {
    name: "LLaMA-Factory",
    programs: &[OF_LLAMA_FACTORY, HUGGING_FACE],
    read: yaml::read,
    others: OF_LLAMA_FACTORYS,
    rules: |draft| {
        adapters::llama_factory(draft);
        let pairs = preferences::llama_factory(draft);
        chats::llama_factory(draft, pairs);
        rules(
            draft,
            &["per_device_train_batch_size", "optim", "lr_scheduler_type", "num_train_epochs"],
            pairs,
        )
    },
};

const OFF: &[&str] = &["false"];
const NONE: &[&str] = &["null", ""];
const CHATS: &str = "data here is files: name those of chats in data.chat, and those of texts in data.text";
const ADAPTER: &str = "adapters here are on linear layers, and beside them only rows of model.add_tokens are trained: leave it out";
const QUANTIZED: &str = "quantised weights are not here: leave it out";
const NF4: &[&str] = &["nf4"];
const OTHER_CODES: &str = "4 bits are NF4 here, and 8 bits Q8_0: leave it out";
const SCALES: &str = "scales of 4-bit weights have 8 bits";
const ATTENTION: &str = "attention is one kernel, without a matrix of scores";
const FUSED: &str = "logits are made in slices, and norms, gates and rotations are kernels of their own";
const REWARDS: &str = "losses of answers that a model gives during the run are not here: leave it out";
const REFERENCE: &str = "log-probabilities by the reference are computed once, before step one";
const PADS: &str = "windows are full: nothing is padded";
const DEEPSPEED: &str =
    "translate it, too: phalanx import-config FILE, or phalanx train CONFIG --deepspeed FILE";
const FSDP: &str = "set parallel.zero = 3, and memory.parameters and memory.optimizer for offload";

/// axolotl's names that are no keys here.
const OF_AXOLOTLS: &[Other] = &[
    ("datasets.*", Any, Refused(CHATS)),
    ("test_datasets.*", Any, Refused(CHATS)),
    ("pretraining_dataset.*", Any, Refused(CHATS)),
    ("chat_template", Text, Refused(CHATS)),
    ("shuffle_merged_datasets", Flag, Unneeded("data.order says it")),
    ("dataset_prepared_path", Any, Unneeded("tokens are kept in the run folder")),
    ("dataset_processes", Number, Unneeded("all cores read")),
    ("relora_steps", Any, Only(NONE, ADAPTER)),
    ("bnb_config_kwargs.bnb_4bit_quant_type", Text, Only(NF4, OTHER_CODES)),
    ("bnb_config_kwargs.bnb_4bit_use_double_quant", Flag, Unneeded(SCALES)),
    ("bnb_config_kwargs.bnb_4bit_compute_dtype", Any, Unneeded("precision.compute says it")),
    (
        "sample_packing",
        Flag,
        Only(OFF, "set data.documents = \"apart\", which packs documents that do not see each other"),
    ),
    ("eval_sample_packing", Flag, Unneeded("evaluation uses the same windows")),
    ("pad_to_sequence_len", Flag, Unneeded(PADS)),
    ("train_on_inputs", Flag, Only(&["true"], "all tokens are trained on here: set it to true")),
    ("group_by_length", Flag, Unneeded(PADS)),
    ("model_type", Text, Unneeded("config.json of the model says it")),
    ("tokenizer_type", Text, Unneeded("the files of the tokenizer say it")),
    ("is_llama_derived_model", Flag, Unneeded("config.json of the model says it")),
    ("is_mistral_derived_model", Flag, Unneeded("config.json of the model says it")),
    ("trust_remote_code", Flag, Only(OFF, "no code of a model is run here: leave it out")),
    ("special_tokens.*", Any, Unneeded("the files of the tokenizer have them")),
    ("strict", Flag, Unneeded("unknown keys are errors")),
    ("flash_attention", Any, Unneeded(ATTENTION)),
    ("xformers_attention", Any, Unneeded(ATTENTION)),
    ("sdp_attention", Any, Unneeded(ATTENTION)),
    ("eager_attention", Any, Unneeded(ATTENTION)),
    ("attn_implementation", Any, Unneeded(ATTENTION)),
    ("tf32", Any, Unneeded("precision.products says how products of f32 are computed")),
    ("gradient_checkpointing_kwargs.*", Any, Unneeded("there is no autograd")),
    ("local_rank", Any, Unneeded("ranks know their number")),
    ("evals_per_epoch", Number, Unneeded("train.eval_every counts steps")),
    ("saves_per_epoch", Number, Unneeded("train.save_every counts steps")),
    ("save_safetensors", Flag, Unneeded("phalanx export writes safetensors")),
    ("eval_table_size", Any, Unneeded(LOGS)),
    ("eval_max_new_tokens", Number, Unneeded("phalanx sample continues texts")),
    ("debug", Any, Unneeded(LOGS)),
    ("hub_model_id", Any, Only(NONE, "phalanx export writes a folder, which you upload")),
    ("wandb_project", Any, Differs(LOGS)),
    ("wandb_entity", Any, Unneeded(LOGS)),
    ("wandb_watch", Any, Unneeded(LOGS)),
    ("wandb_name", Any, Unneeded(LOGS)),
    ("wandb_run_id", Any, Unneeded(LOGS)),
    ("wandb_log_model", Any, Unneeded(LOGS)),
    ("logging_steps", Number, Unneeded(LOGS)),
    ("deepspeed", Any, Only(NONE, DEEPSPEED)),
    ("fsdp", Any, Only(NONE, FSDP)),
    ("fsdp_config.*", Any, Refused(FSDP)),
    ("fsdp_version", Any, Refused(FSDP)),
    ("plugins", Any, Refused("there are no plugins here: leave it out")),
    ("rl_adapter_ref_model", Any, Unneeded(REFERENCE)),
    ("precompute_ref_log_probs", Any, Unneeded(REFERENCE)),
    ("dpo_use_weighting", Any, Only(OFF, "all pairs weigh alike here: leave it out")),
    ("dpo_use_logits_to_keep", Any, Unneeded("logits are made in slices")),
    ("dpo_padding_free", Any, Unneeded(PADS)),
    ("dpo_generate_during_eval", Any, Only(OFF, "phalanx sample continues texts: leave it out")),
    ("flash_optimum", Any, Only(NONE, ATTENTION)),
    ("xpos_rope", Any, Only(NONE, "set model.rope_scaling")),
    ("low_cpu_mem_usage", Any, Unneeded("weights are read in bounded windows")),
    ("eot_tokens", Any, Refused(CHATS)),
    ("max_packed_sequence_len", Any, Only(NONE, CHATS)),
    ("processor_type", Text, Refused("models here read text: leave it out")),
    ("remove_unused_columns", Flag, Unneeded("data here has no columns")),
    ("skip_prepare_dataset", Flag, Unneeded("tokens are kept in the run folder")),
    ("push_dataset_to_hub", Any, Only(NONE, "nothing is sent anywhere: leave it out")),
    ("tokenizer_use_mistral_common", Flag, Unneeded("the files of the tokenizer say it")),
    ("resize_token_embeddings_to_32x", Flag, Unneeded("model.vocab may be padded")),
    ("liger_rms_norm", Flag, Unneeded(FUSED)),
    ("liger_rms_norm_gated", Flag, Unneeded(FUSED)),
    ("liger_layer_norm", Flag, Unneeded(FUSED)),
    ("liger_glu_activation", Flag, Unneeded(FUSED)),
    ("liger_rope", Flag, Unneeded(FUSED)),
    ("liger_cross_entropy", Flag, Unneeded(FUSED)),
    ("liger_fused_linear_cross_entropy", Flag, Unneeded(FUSED)),
    ("use_kernels", Flag, Unneeded(FUSED)),
    ("torch_compile", Any, Unneeded("kernels are compiled already")),
    ("flex_attention", Any, Unneeded(ATTENTION)),
    ("flex_attn_compile_kwargs.*", Any, Unneeded(ATTENTION)),
    ("activation_offloading", Any, Only(OFF, "set memory.activations = \"host\"")),
    ("ddp_find_unused_parameters", Flag, Unneeded("a parameter without a gradient is not updated")),
    ("loss_watchdog_threshold", Any, Unneeded("a loss that is not finite ends the run")),
    ("loss_watchdog_patience", Any, Unneeded("a loss that is not finite ends the run")),
    ("torchdistx_path", Any, Only(NONE, "initial values are made shard by shard: leave it out")),
    ("dp_shard_size", Any, Refused("set parallel.zero = 3: shards lie over the data axis")),
    ("context_parallel_size", Number, Only(&["1"], "set parallel.tensor with parallel.sequence_parallel")),
    ("eval_batch_size", Number, Unneeded("evaluation uses the same micro-batch")),
    ("eval_strategy", Text, Unneeded("train.eval_every counts steps")),
    ("save_strategy", Text, Unneeded("train.save_every counts steps")),
    ("save_first_step", Flag, Unneeded("train.save_every counts steps")),
    ("save_only_model", Flag, Unneeded("phalanx export writes the model alone")),
    ("trackio_project_name", Any, Differs(LOGS)),
    ("trackio_run_name", Any, Unneeded(LOGS)),
    ("trackio_space_id", Any, Unneeded(LOGS)),
    ("gptq", Any, Only(OFF, QUANTIZED)),
    ("gptq_groupsize", Any, Only(NONE, QUANTIZED)),
    ("gptq_model_v1", Any, Only(OFF, QUANTIZED)),
    ("quantize_moe_experts", Flag, Only(OFF, QUANTIZED)),
    ("qat.*", Any, Refused(QUANTIZED)),
    ("trl.*", Any, Refused(REWARDS)),
    ("ebft.*", Any, Refused(REWARDS)),
    ("num_labels", Any, Refused("models here predict tokens: leave it out")),
    ("lora_mlp_kernel", Flag, Unneeded(FUSED)),
    ("lora_qkv_kernel", Flag, Unneeded(FUSED)),
    ("lora_o_kernel", Flag, Unneeded(FUSED)),
    ("lora_target_parameters", Any, Only(NONE, ADAPTER)),
    ("lora_fan_in_fan_out", Any, Unneeded("the model says it")),
    ("lora_modules_to_save", Any, Only(NONE, ADAPTER)),
    ("peft_layers_to_transform", Any, Only(NONE, "name the layers in lora.targets, as \"model.layers.1.*\"")),
];

/// LLaMA-Factory's names that are no keys here.
const OF_LLAMA_FACTORYS: &[Other] = &[
    (
        "stage",
        Text,
        Only(
            &["pt"],
            "training here is that of the stages pt (text), sft (chats), dpo and kto (pairs of answers): set one of them",
        ),
    ),
    ("do_train", Flag, Only(&["true"], "phalanx train trains")),
    ("do_eval", Flag, Unneeded("a run evaluates what data.validation holds out")),
    ("additional_target", Any, Only(NONE, ADAPTER)),
    ("resize_vocab", Flag, Unneeded("the tables get the rows that the tokenizer needs")),
    ("pissa_iter", Number, Unneeded("the iteration ends where singular values no longer change")),
    ("pissa_convert", Flag, Unneeded("an export converts")),
    (
        "loraplus_lr_ratio",
        Any,
        Only(NONE, "set [[optimizer.group]] parameters = [\"*.lora_B.*\"] with its lr"),
    ),
    ("create_new_adapter", Flag, Only(OFF, ADAPTER)),
    ("freeze_vision_tower", Flag, Unneeded("models here read text")),
    ("freeze_multi_modal_projector", Flag, Unneeded("models here read text")),
    ("image_max_pixels", Any, Unneeded("models here read text")),
    ("video_max_pixels", Any, Unneeded("models here read text")),
    ("quantization_method", Text, Only(&["bnb", "bitsandbytes"], OTHER_CODES)),
    ("quantization_type", Text, Only(NF4, OTHER_CODES)),
    ("double_quantization", Flag, Unneeded(SCALES)),
    ("dataset", Any, Refused("name text files in data.text")),
    ("mask_history", Flag, Only(OFF, "it is for the stage sft")),
    ("train_on_prompt", Flag, Only(OFF, "it is for the stage sft")),
    ("eval_dataset", Any, Refused("data.validation says how much is held out")),
    ("dataset_dir", Any, Refused("name text files in data.text")),
    ("template", Any, Refused(CHATS)),
    ("max_samples", Any, Refused("name fewer files in data.text")),
    ("overwrite_cache", Flag, Unneeded("tokens are kept in the run folder")),
    ("preprocessing_num_workers", Number, Unneeded("all cores read")),
    ("dataloader_num_workers", Number, Unneeded("the next batch is read meanwhile")),
    ("packing", Flag, Unneeded("windows are full")),
    ("neat_packing", Flag, Only(OFF, "set data.documents = \"apart\"")),
    ("trust_remote_code", Flag, Unneeded("no code of a model is run here")),
    ("flash_attn", Any, Unneeded(ATTENTION)),
    ("enable_liger_kernel", Flag, Unneeded("logits are made in slices")),
    (
        "overwrite_output_dir",
        Flag,
        Unneeded("--run names the run folder, which must be new, or resumed with --resume"),
    ),
    ("plot_loss", Flag, Unneeded(LOGS)),
    ("save_only_model", Flag, Unneeded("phalanx export writes the model alone")),
    ("report_to", Any, Differs(LOGS)),
    ("run_name", Any, Unneeded(LOGS)),
    ("logging_steps", Number, Unneeded(LOGS)),
    ("ddp_timeout", Number, Unneeded("a rank that computes is never stalled: run.stall_timeout_s")),
    ("eval_strategy", Text, Unneeded("train.eval_every counts steps")),
    ("save_strategy", Text, Unneeded("train.save_every counts steps")),
    ("include_num_input_tokens_seen", Flag, Unneeded(LOGS)),
    ("deepspeed", Any, Only(NONE, DEEPSPEED)),
    ("fsdp", Any, Only(NONE, FSDP)),
    ("fsdp_config.*", Any, Refused(FSDP)),
    ("use_galore", Flag, Only(OFF, "the optimizers here are those of optimizer.kind")),
    ("use_badam", Flag, Only(OFF, "the optimizers here are those of optimizer.kind")),
    ("use_apollo", Flag, Only(OFF, "the optimizers here are those of optimizer.kind")),
    ("use_adam_mini", Flag, Only(OFF, "the optimizers here are those of optimizer.kind")),
];

/// Keys of Trainer that both have. `names`: of the micro-batch, the optimizer, the schedule and the epochs. `pairs` of answers are two
/// sequences each.
fn rules(draft: &mut Draft, names: &[&str; 4], pairs: bool) -> Result<()> {
    let [micro, optimizer, scheduler, epochs] = *names;
    draft.first(&["tensor_parallel_size"]);
    batch(draft, micro, pairs)?;
    steps(draft, epochs);
    trainer_rate::optimizer(draft, optimizer);
    trainer_rate::schedule(draft, scheduler);
    precision(draft);
    let evaluated: Vec<(Entry, f64)> =
        ["val_set_size", "val_size"].iter().filter_map(|name| draft.take_number(name)).collect();
    if evaluated.is_empty() {
        let name = if draft.format.name == AXOLOTL.name { "val_set_size" } else { "val_size" };
        draft.default(name, "data.validation", 0.0, "their default");
    }
    for (entry, size) in evaluated {
        match size < 1.0 {
            true => draft.give(&entry, "data.validation", size, ""),
            false => draft.refuse(&entry, "data.validation is a fraction of the tokens"),
        }
    }
    Ok(())
}

fn batch(draft: &mut Draft, name: &str, pairs: bool) -> Result<()> {
    let micro = draft.take_count(name);
    let count = draft.take_count("gradient_accumulation_steps");
    let [samples, c] = [micro.as_ref().map_or(8, |of| of.1), count.as_ref().map_or(1, |of| of.1)];
    let (each, of_pairs) = if pairs { (2, "two sequences a pair") } else { (1, "") };
    let m = samples.saturating_mul(each);
    let ranks = draft.mesh()?.data as u64;
    let product = format!("{m} x {c} x {ranks} data-parallel ranks");
    let whole = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
    let (global, m) = (whole(m.saturating_mul(c).saturating_mul(ranks)), whole(m));
    match &micro {
        Some((entry, _)) => draft.give(entry, "batch.micro", m, of_pairs),
        None => draft.default(name, "batch.micro", m, "Trainer's default"),
    }
    match &count {
        Some((entry, _)) => draft.give(entry, "batch.global", global, &product),
        None => draft.default("gradient_accumulation_steps", "batch.global", global, &product),
    }
    Ok(())
}

/// Steps, epochs and the warm-up, which may be a share of the steps.
fn steps(draft: &mut Draft, epochs: &str) {
    let is_above_0 = |entry: &Entry| entry.value.number().is_some_and(|steps| steps > 0.0);
    let mut warms_up = draft.peek("warmup_steps").is_some_and(is_above_0);
    let steps = draft.take_number("max_steps");
    match &steps {
        Some((entry, steps)) if *steps > 0.0 => draft.give(entry, "train.steps", *steps as i64, ""),
        Some((entry, _)) => draft.unneeded(entry, "it gives no steps"),
        None => {}
    }
    let steps = steps.filter(|(_, steps)| *steps > 0.0);
    match draft.take_number(epochs) {
        Some((entry, _)) if steps.is_some() => draft.unneeded(&entry, "max_steps says how long the run is"),
        Some((entry, count)) => draft.give(&entry, "train.epochs", count, ""),
        None if steps.is_some() => {}
        // Trainer's default, and axolotl's.
        None => draft.default(
            epochs,
            "train.epochs",
            if epochs == "num_epochs" { 1.0 } else { 3.0 },
            "their default",
        ),
    }
    if let Some((entry, ratio)) = draft.take_number("warmup_ratio") {
        match warms_up {
            true => draft.unneeded(&entry, "warmup_steps says it"),
            false => draft.give(&entry, "schedule.warmup_share", ratio, ""),
        }
        warms_up |= ratio > 0.0;
    }
    if let Some((entry, patience)) = draft.take_count("early_stopping_patience") {
        draft.give(&entry, "train.patience", patience as i64, "");
        draft.default(
            "(early stopping)",
            "train.keep_best",
            true,
            "it keeps the checkpoint with the smallest validation loss",
        );
    }
    if warms_up {
        draft.default("(warm-up)", "schedule.warmup_shape", "from-zero", "theirs begins at 0");
    }
}

/// `bf16`, `fp16` and LLaMA-Factory's `pure_bf16`.
fn precision(draft: &mut Draft) {
    let is_on = |entry: &Entry| matches!(entry.value.word().as_str(), "true" | "auto" | "full");
    let entries: Vec<(Entry, &str)> =
        [("bf16", "bf16"), ("pure_bf16", "bf16"), ("fp16", "f16"), ("float16", "f16"), ("bfloat16", "bf16")]
            .iter()
            .filter_map(|(name, compute)| Some((draft.take(name)?, *compute)))
            .collect();
    for (entry, compute) in entries {
        match is_on(&entry) {
            true => draft.give(
                &entry,
                "precision.compute",
                compute,
                "parameters have this type, with f32 master weights; theirs are cast for each product",
            ),
            false => draft.unneeded(&entry, "off here, too"),
        }
    }
}
