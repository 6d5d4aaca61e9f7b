//! torchtitan's TOML, as it was before its configurations became Python functions (2025).

use anyhow::Result;
use phalanx_train::config::declare::TORCHTITAN as PROGRAM;

use super::Type::{Any, Flag, List, Number, Text};
use super::Verdict::{Differs, Only, Refused, Unneeded};
use super::value::{Entry, Fault, MAX_DEPTH, Value, fault};
use super::{Draft, Format, LOGS, Other};

/// The format.
pub const TORCHTITAN: Format =
    Format { name: "torchtitan", programs: &[PROGRAM], read, others: OTHERS, rules };

const OFF: &[&str] = &["false"];
const FLOAT8: &str = "products are in precision.compute here: leave it out";
const DATA: &str = "name text files in data.text, or token files in data.tokens";

const OTHERS: &[Other] = &[
    ("job.dump_folder", Text, Unneeded("--run names the run folder")),
    ("job.*", Any, Unneeded("it only describes the run")),
    (
        "profiling.*",
        Any,
        Unneeded("phalanx bench step times each kernel, and memory.json has every category"),
    ),
    ("metrics.enable_wandb", Flag, Differs(LOGS)),
    ("metrics.*", Any, Unneeded(LOGS)),
    ("model.flavor", Text, Refused("set model.layers, model.hidden and model.heads, or model.init")),
    ("model.converters", List, Only(&["[]"], FLOAT8)),
    ("model.print_after_conversion", Flag, Unneeded("phalanx plan shows the model")),
    ("optimizer.implementation", Text, Unneeded("one kernel updates whole chunks")),
    (
        "optimizer.early_step_in_backward",
        Flag,
        Only(OFF, "set memory.update_in_backward = true, without clipping"),
    ),
    ("training.dataset", Text, Refused(DATA)),
    ("training.dataset_path", Text, Refused(DATA)),
    ("training.gc_freq", Number, Unneeded("there is no garbage to collect")),
    ("training.gc_debug", Flag, Unneeded("there is no garbage to collect")),
    (
        "training.enable_cpu_offload",
        Flag,
        Only(OFF, "set memory.parameters = \"host\" and memory.optimizer = \"host\""),
    ),
    ("training.deterministic", Flag, Unneeded("a run on the same kernels gives the same bits")),
    ("training.compile", Flag, Unneeded("kernels are compiled already")),
    ("debug.*", Any, Unneeded("a run on the same kernels gives the same bits")),
    (
        "parallelism.fsdp_reshard_after_forward",
        Text,
        Unneeded("parallel.zero = 3 shards again after a use, 2 keeps parameters whole"),
    ),
    ("parallelism.enable_async_tensor_parallel", Flag, Unneeded("parallel.overlap overlaps what can be")),
    ("parallelism.enable_compiled_autograd", Flag, Unneeded("there is no autograd")),
    (
        "parallelism.context_parallel_degree",
        Number,
        Only(
            &["1"],
            "a sequence lies on one rank here, or on parallel.tensor ranks with parallel.sequence_parallel",
        ),
    ),
    ("parallelism.expert_parallel_degree", Number, Only(&["1"], "there are no experts here")),
    ("parallelism.expert_tensor_parallel_degree", Number, Only(&["1"], "there are no experts here")),
    ("parallelism.disable_loss_parallel", Flag, Unneeded("logits are made in slices")),
    (
        "parallelism.pipeline_parallel_microbatch_size",
        Number,
        Unneeded("batch.micro is the size of a micro-batch"),
    ),
    (
        "parallelism.pipeline_parallel_layers_per_stage",
        Number,
        Unneeded("parallel.cut says how blocks are divided into stages"),
    ),
    ("checkpoint.enable", Flag, Unneeded("a run saves, at least after its last step")),
    ("checkpoint.enable_checkpoint", Flag, Unneeded("a run saves, at least after its last step")),
    ("checkpoint.folder", Text, Unneeded("checkpoints of the run folder")),
    ("checkpoint.last_save_model_only", Flag, Unneeded("phalanx export writes the model alone")),
    ("checkpoint.export_dtype", Text, Unneeded("phalanx export --dtype")),
    ("checkpoint.async_mode", Text, Unneeded("a checkpoint is whole before the next step")),
    ("checkpoint.load_step", Number, Only(&["-1"], "--resume continues from the newest checkpoint")),
    ("checkpoint.*", Any, Unneeded("checkpoints have one form here")),
    ("compile.*", Any, Unneeded("kernels are compiled already")),
    ("quantize.*", Any, Unneeded("it belongs to model.converters")),
    ("float8.*", Any, Unneeded("it belongs to model.converters")),
    ("mx.*", Any, Unneeded("it belongs to model.converters")),
    ("comm.*", Any, Unneeded("the watchdog needs no time limit of a collective: run.stall_timeout_s")),
    ("fault_tolerance.enable", Flag, Only(OFF, "see --max-restarts and --min-nproc")),
    ("fault_tolerance.*", Any, Unneeded("it belongs to fault_tolerance.enable")),
    ("memory_estimation.*", Any, Unneeded("phalanx plan has every byte")),
    ("experimental.*", Any, Refused("it is not known what it changes: leave it out")),
    ("validation.enable", Flag, Unneeded("a run evaluates what data.validation holds out")),
    ("validation.dataset", Text, Unneeded("data.validation or data.validation_tokens")),
    ("validation.*", Any, Unneeded("train.eval_samples says how much is evaluated")),
];

/// Reads TOML.
fn read(text: &str) -> Result<Vec<Entry>, Fault> {
    let line = |at: usize| text[..at].matches('\n').count() + 1;
    let parsed = toml::de::DeTable::parse(text);
    let table = parsed.map_err(|error| Fault {
        line: error.span().map_or(1, |span| line(span.start)),
        what: error.message().to_string(),
    })?;
    entries(table.get_ref(), &line, 0)
}

fn entries(
    table: &toml::de::DeTable,
    line: &dyn Fn(usize) -> usize,
    depth: usize,
) -> Result<Vec<Entry>, Fault> {
    let mut all: Vec<Entry> = Vec::new();
    for (name, found) in table.iter() {
        let line_of = line(name.span().start);
        let value = value(found.get_ref(), line, line_of, depth)?;
        all.push(Entry { name: name.get_ref().to_string(), line: line_of, value });
    }
    all.sort_by_key(|entry| entry.line);
    Ok(all)
}

fn value(
    found: &toml::de::DeValue,
    line: &dyn Fn(usize) -> usize,
    at: usize,
    depth: usize,
) -> Result<Value, Fault> {
    use toml::de::DeValue;
    if depth > MAX_DEPTH {
        return fault(at, format!("more than {MAX_DEPTH} tables within each other"));
    }
    Ok(match found {
        DeValue::String(text) => Value::Text(text.to_string()),
        DeValue::Boolean(flag) => Value::Flag(*flag),
        DeValue::Integer(number) => match i64::from_str_radix(number.as_str(), number.radix()) {
            Ok(number) => Value::of_word(&number.to_string()),
            Err(_) => return fault(at, format!("{} is too large", number.as_str())),
        },
        DeValue::Float(number) => Value::of_word(number.as_str()),
        DeValue::Datetime(date) => Value::Text(date.to_string()),
        DeValue::Array(items) => Value::List(
            items.iter().map(|item| value(item.get_ref(), line, at, depth + 1)).collect::<Result<_, _>>()?,
        ),
        DeValue::Table(table) => Value::Table(entries(table, line, depth + 1)?),
    })
}

fn rules(draft: &mut Draft) -> Result<()> {
    draft.first(&["parallelism.tensor_parallel_degree", "parallelism.pipeline_parallel_degree"]);
    mesh(draft);
    batch(draft)?;
    schedule(draft)?;
    let option = draft.take("activation_checkpoint.selective_ac_option");
    if let Some((entry, at)) = draft.take_word("activation_checkpoint.mode", &["none", "selective", "full"]) {
        let every =
            option.as_ref().and_then(|entry| entry.value.word().parse::<i64>().ok()).filter(|_| at == 1);
        match every {
            Some(every) => draft.give(&entry, "memory.checkpointing", every, "every k-th block"),
            None => draft.give(
                &entry,
                "memory.checkpointing",
                ["none", "selective", "block"][at],
                if at == 1 {
                    "norms, attention and activations are recomputed; theirs keeps every second product"
                } else {
                    ""
                },
            ),
        }
    }
    if let Some(entry) = option {
        draft.unneeded(&entry, "memory.checkpointing has it");
    }
    if let Some((entry, _)) = draft.take_word("optimizer.name", &["AdamW"]) {
        draft.give(&entry, "optimizer.kind", "adamw", "");
    }
    if draft.peek("training.mixed_precision_param").is_none() {
        draft.default(
            "training.mixed_precision_param",
            "precision.compute",
            "bf16",
            "their default; gradients are summed in f32, as theirs",
        );
    }
    for (name, key, value) in
        [("optimizer.lr", "optimizer.lr", 8e-4), ("training.max_norm", "optimizer.clip", 1.0)]
    {
        if draft.peek(name).is_none() {
            draft.default(name, key, value, "their default");
        }
    }
    Ok(())
}

/// The degrees of the mesh, as keys of `[parallel]`.
fn mesh(draft: &mut Draft) {
    let degree = |draft: &mut Draft, name: &str| draft.take_number(&format!("parallelism.{name}"));
    let (shard, replicate) =
        (degree(draft, "data_parallel_shard_degree"), degree(draft, "data_parallel_replicate_degree"));
    let is_sharded = shard.as_ref().is_none_or(|(_, degree)| *degree != 1.0);
    let copies = replicate.as_ref().map_or(1.0, |(_, copies)| *copies);
    let zero = if is_sharded { 3 } else { 0 };
    let why =
        if is_sharded { "FSDP is ZeRO 3; the data axis has all ranks that the others leave" } else { "" };
    match &shard {
        Some((entry, _)) => draft.give(entry, "parallel.zero", zero, why),
        None => draft.default(
            "parallelism.data_parallel_shard_degree",
            "parallel.zero",
            3,
            "their default shards over all ranks",
        ),
    }
    if let Some((entry, _)) = &replicate {
        match copies {
            1.0 => draft.unneeded(entry, "one copy"),
            _ if is_sharded => draft.refuse(entry, "shards lie over the whole data axis here: set it to 1"),
            _ => draft.give(entry, "parallel.data", copies as i64, ""),
        }
    }
    if let Some(entry) = draft.take("parallelism.pipeline_parallel_schedule") {
        let names = [
            ("1F1B", "1f1b"),
            ("GPipe", "gpipe"),
            ("Interleaved1F1B", "interleaved"),
            ("InterleavedZeroBubble", "zb-h1"),
            ("ZBVZeroBubble", "zb-v"),
        ];
        match names.iter().find(|(theirs, _)| entry.value.text() == Some(*theirs)) {
            Some((_, ours)) => draft.give(&entry, "parallel.schedule", *ours, ""),
            None => draft.refuse(&entry, "set parallel.schedule"),
        }
    }
}

/// `local_batch_size` is the micro-batch of a rank.
fn batch(draft: &mut Draft) -> Result<()> {
    let local =
        draft.take_count("training.local_batch_size").or_else(|| draft.take_count("training.batch_size"));
    let micro = local.as_ref().map_or(8, |(_, count)| *count);
    match &local {
        Some((entry, _)) => draft.give(entry, "batch.micro", micro as i64, ""),
        None => draft.default("training.local_batch_size", "batch.micro", micro as i64, "their default"),
    }
    let ranks = draft.mesh()?.data as u64;
    let global = draft.take_number("training.global_batch_size");
    match global {
        Some((entry, number)) if number > 0.0 => draft.give(&entry, "batch.global", number as i64, ""),
        other => {
            if let Some((entry, _)) = other {
                draft.unneeded(&entry, "one micro-batch of each rank");
            }
            draft.default(
                "training.global_batch_size",
                "batch.global",
                i64::try_from(micro.saturating_mul(ranks)).unwrap_or(i64::MAX),
                &format!("{micro} x {ranks} data-parallel ranks"),
            );
        }
    }
    Ok(())
}

/// `[lr_scheduler]`: a warm-up, a stable part, and a decay over the last `decay_ratio` of the steps.
fn schedule(draft: &mut Draft) -> Result<()> {
    let lr = draft.peek("optimizer.lr").and_then(|entry| entry.value.number()).unwrap_or(8e-4);
    let shapes = ["linear", "cosine", "sqrt"];
    let shape = draft.take_word("lr_scheduler.decay_type", &shapes);
    if let Some((entry, factor)) = draft.take_number("lr_scheduler.min_lr_factor") {
        draft.give(&entry, "schedule.min_lr", factor * lr, &format!("{factor} x the rate {lr}"));
    }
    let steps = draft.peek("training.steps").and_then(|entry| entry.value.number()).unwrap_or(10_000.0);
    let warmup =
        draft.peek("lr_scheduler.warmup_steps").and_then(|entry| entry.value.number()).unwrap_or(200.0);
    let ratio = draft.take_number("lr_scheduler.decay_ratio");
    let last = ratio.as_ref().map_or(steps, |(_, ratio)| (ratio * steps).round());
    let name = shapes[shape.as_ref().map_or(0, |(_, at)| *at)];
    // Without a stable part, a line or a cosine behind the warm-up.
    let is_whole = last + warmup >= steps && name != "sqrt";
    let key = if is_whole { "schedule.kind" } else { "schedule.last_shape" };
    match &shape {
        Some((entry, _)) => draft.give(entry, key, name, ""),
        None => draft.default("lr_scheduler.decay_type", key, name, "their default"),
    }
    if !is_whole {
        draft.default("lr_scheduler", "schedule.kind", "wsd", "a stable part, then a decay");
        match &ratio {
            Some((entry, _)) => draft.give(entry, "schedule.last_steps", last.min(steps - warmup) as i64, ""),
            None => draft.default(
                "lr_scheduler.decay_ratio",
                "schedule.last_steps",
                (steps - warmup) as i64,
                "all behind the warm-up",
            ),
        }
    } else if let Some((entry, _)) = ratio {
        draft.unneeded(&entry, "the decay begins behind the warm-up");
    }
    if draft.peek("lr_scheduler.warmup_steps").is_none() {
        draft.default("lr_scheduler.warmup_steps", "schedule.warmup", 200, "their default");
    }
    Ok(())
}
