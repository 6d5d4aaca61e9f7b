//! The plan, as JSON for scripts (`plan --json` and `plan.json`) and as tables for people.

use std::collections::BTreeSet;
use std::ops::Range;

use phalanx_cuda::CONTEXT_BYTES;
use phalanx_layers::lora::adapted_by;
use phalanx_optim::LossScaling;
use phalanx_parallel::zero::{ChunkResidence, Residence};
use phalanx_plan::trace::{Category, DType, Memory};
use phalanx_plan::{ChunkBytes, ChunkSize, CollectiveCost, MemoryPlan, Precision};
use phalanx_simd::Isa;
use phalanx_tensor::DiskOptions;
use phalanx_train::config::{DeviceKind, GroupOfParameters, ParameterGroup, Products};
use phalanx_train::metrics::{DeviceBytes, RankBytes};
use phalanx_train::planning::TriedChunks;
use phalanx_train::spec::{DevicePart, MeshPart};
use phalanx_train::{RankPlan, RunPlan, Spec};
use serde_json::{Value, json};

use crate::host::card_needs::CardNeeds;
use crate::plans::planned::Planned;
use crate::reports::mesh_report;
use phalanx_drawing::report::{Table, bytes, count, plural, whole};

/// The whole plan with exact bytes. `ranks` has the format of `memory.json` and what it will say: the peak of a run without
/// a diagnosis, which runs only after a step that is not finite. `arena_bytes` has room for it. In a large world `ranks` has
/// one rank of each pipeline stage, which stands for `ranks_alike` ranks.
pub fn to_json(planned: &Planned) -> Value {
    let plan = &planned.plan;
    let spec = &plan.spec;
    let rank = |r: &RankPlan| RankBytes {
        rank: r.rank,
        device: DeviceBytes::from(r.peak()),
        host: DeviceBytes::from(r.peak_of(Memory::Host)),
        disk: DeviceBytes::from(r.peak_of(Memory::Disk)),
        resident_bytes_peak: None,
    };
    let mut figures = json!({
        "ranks": plan.ranks.iter().map(rank).collect::<Vec<_>>(),
        "ranks_alike": planned.each_stands_for(),
        "arena_bytes": plan.ranks.iter().map(|r| r.memory.arena_bytes).collect::<Vec<_>>(),
        "parameters": plan.parameters(),
        "trained_parameters": plan.trained_parameters(),
        "flops_per_step": whole(plan.flops_per_step()),
        "collective_bytes_per_step": plan.collective_bytes_per_step(),
        "tokens_per_step": spec.tokens_per_step(),
        "outside_bytes_per_rank": planned.outside_bytes(),
        "between_hosts_bytes_per_rank": planned.between_hosts_bytes(),
        "needed_bytes": planned.needed_bytes(),
        "layout": {
            "ranks": spec.world_size(), "mesh": spec.mesh.axes, "zero": spec.zero.stage.number(), "micro": spec.batch.micro_batch_size,
            "micro_batches": spec.batch.micro_batches, "threads": spec.device.threads, "overlap": spec.zero.overlap,
            "prefetch": spec.zero.prefetch, "reduce": planned.config.batch.reduce,
            "sum": planned.config.batch.sum, "replicas_change_bits": spec.replicas_change_bits(),
            "checkpointing": planned.config.memory.checkpointing, "sequence_parallel": spec.mesh.sequence_parallel,
        },
        "pipeline": mesh_report::pipeline_json(planned),
        "zero_one": mesh_report::sharding_json(planned),
        "precision": spec.precision.types, "products": planned.config.precision.products,
        "processor_kernels": planned.config.device.kernels,
        "model": spec.model.definition.to_config(),
        "chunks": chunks_json(plan),
        "phases": phases_json(&plan.ranks[0].memory),
        "host_phases": phases_json(&plan.ranks[0].host),
        "disk_phases": phases_json(&plan.ranks[0].disk),
        "copies": plan.of(0).step.copies,
        "textbook": plan.textbook,
        "kernels": plan.of(0).step.kernels,
        "collectives": plan.of(0).step.collectives,
        "other_reduce": planned.other_reduce().map(|other| reduce_json(&other)),
    });
    if spec.device.beside_plan.is_some() {
        let needs = CardNeeds::of(spec);
        figures["beside_plan"] = json!({
            "scratch_bytes": needs.scratch_bytes, "driver_bytes_about": CONTEXT_BYTES,
            "nccl_bytes_about": needs.nccl_bytes(),
        });
    }
    figures
}

fn chunks_json(plan: &RunPlan) -> Value {
    let MeshPart { chunk_size, layout, .. } = &plan.spec.mesh;
    let tried = |tried: &TriedChunks| json!({ "chunks": tried.chunks, "needed_bytes": tried.bytes, "chosen": tried.size == *chunk_size });
    let ChunkBytes { largest, all, waste } = layout.bytes(plan.spec.precision.types.compute);
    json!({
        "count": layout.chunks(),
        "largest_bytes": largest,
        "bytes": all,
        "waste_bytes": waste,
        "tried": plan.tried_chunks.iter().map(tried).collect::<Vec<_>>(),
    })
}

fn phases_json(memory: &MemoryPlan) -> Value {
    let phase = |p: &phalanx_plan::PhasePlan| json!({ "name": p.name, "peak_bytes": p.peak.bytes, "categories": p.peak.categories });
    memory.phases.iter().map(phase).collect()
}

fn reduce_json(other: &Planned) -> Value {
    let gradients = other.plan.ranks[0].peak().categories.gradients;
    json!({
        "reduce": other.config.batch.reduce,
        "collective_bytes_per_step": other.plan.collective_bytes_per_step(),
        "gradient_bytes": gradients,
        "peak_bytes": other.plan.ranks[0].memory.arena_bytes,
    })
}

/// The summary that is shown when a training run starts.
pub fn short(planned: &Planned, name: &str) -> String {
    format!("{}\n{}", headline(planned, name), memory_table(planned))
}

/// The whole plan.
pub fn long(planned: &Planned, name: &str) -> String {
    let sections = [
        headline(planned, name),
        if mesh_report::has_mesh(planned.plan.spec.mesh.axes) {
            mesh_report::places(planned)
        } else {
            String::new()
        },
        format!("Memory of each rank\n{}", memory_table(planned)),
        mesh_report::pipeline(planned),
        mesh_report::sharding(planned),
        format!("Phases of rank 0: what the arena needs\n{}", phases_table(&planned.plan.ranks[0].memory)),
        work(planned),
        chunks(&planned.plan),
        reduce(planned),
    ];
    sections.into_iter().filter(|section| !section.is_empty()).collect::<Vec<_>>().join("\n")
}

/// The sizes that people know a model by.
fn sizes(spec: &Spec) -> String {
    let network = spec.model.whole();
    let heads = spec
        .model
        .definition
        .attention()
        .map(|attention| format!(", {} heads", attention.heads))
        .unwrap_or_default();
    let vocab = match spec.model.definition.vocab() {
        0 => String::new(),
        vocab => format!(", vocabulary {vocab}"),
    };
    format!("{} layers x {} hidden{heads}{vocab}", network.layers(), network.width())
}

fn headline(planned: &Planned, name: &str) -> String {
    let spec = &planned.plan.spec;
    let mesh = mesh_report::has_mesh(spec.mesh.axes);
    let text = format!(
        "{name}: {} of {} parameters{} ({}, sequence {})\n\
         {} of {}{}, ZeRO-{}; a step is {}: {} of {} per {}\n\
         {}\n{}{}{}{}{}{}",
        spec.model.definition.architecture().map_or("a model", |arch| arch.title),
        count(planned.plan.parameters() as f64),
        match planned.plan.trained_parameters() {
            trained if trained < planned.plan.parameters() => {
                let rounded = match spec.precision.types.has_master() {
                    true => format!(" and the others rounded to {}", spec.precision.types.compute.name()),
                    false => String::new(),
                };
                format!(", {} of them trained{rounded}", count(trained as f64))
            }
            _ => String::new(),
        },
        sizes(spec),
        spec.batch.seq,
        plural(spec.world_size(), "rank"),
        plural(spec.device.threads, "thread"),
        mesh_report::axes_in_brackets(spec),
        spec.zero.stage.number(),
        plural(spec.batch.micro_batch_size * spec.batch.micro_batches * spec.mesh.axes.data, "sequence"),
        plural(spec.batch.micro_batches, "micro-batch"),
        spec.batch.micro_batch_size,
        if mesh { "replica" } else { "rank" },
        precision(planned),
        adapters(planned),
        parameter_groups(planned),
        spec.replica_note().map_or(String::new(), |note| note + "\n"),
        kernels(planned),
        staging(planned),
        residence(planned),
    );
    text
}

/// A line about the adapters, if there are any.
fn adapters(planned: &Planned) -> String {
    let model = &planned.plan.spec.model;
    let Some(adapters) = &model.adapters else { return String::new() };
    let whole = model.whole();
    let layers: BTreeSet<&str> = whole.members().filter_map(|spec| adapted_by(&spec.name)).collect();
    let base = model.quantised.as_ref().map(|base| {
        let compute = planned.plan.spec.precision.types.compute.name();
        let others = match base.others {
            0 => String::new(),
            others => format!(" ({others} others, which are no whole blocks, in {compute})"),
        };
        format!(", beside {} in {}{others}", plural(base.count(), "linear weight"), base.dtype.name())
    });
    format!(
        "adapters of rank {} at {}, times {}{}\n",
        adapters.width,
        plural(layers.len(), "linear layer"),
        adapters.scale,
        base.unwrap_or_default()
    )
}

/// A line for each group of parameters with another learning rate or weight decay, and one for those in none.
fn parameter_groups(planned: &Planned) -> String {
    let optimizer = &planned.config.optimizer;
    let line = |GroupOfParameters { group, parameters, elements }| {
        let (name, lr, decay) = match group {
            Some(ParameterGroup { parameters, lr, weight_decay }) => {
                let decay = weight_decay.map(|decay| format!("{decay} of all of them"));
                (format!("group {parameters:?}"), lr.unwrap_or(optimizer.lr), decay)
            }
            None => ("in no group".to_string(), optimizer.lr, None),
        };
        let decay = decay.unwrap_or_else(|| format!("{} of matrices", optimizer.weight_decay));
        let (tensors, elements) = (plural(parameters, "parameter"), count(elements as f64));
        format!("{name}: {tensors} with {elements} elements, lr {lr}, weight decay {decay}\n")
    };
    optimizer.groups(&planned.plan.spec.model.whole()).into_iter().map(line).collect()
}

/// The processor's kernels that compute the run, where that is decided.
fn kernels(planned: &Planned) -> String {
    let config = &planned.config;
    match config.device.kernels.set() {
        Some(set) if config.device.kind != DeviceKind::Cuda => {
            let products = match (config.precision.products, set.tiles) {
                (Products::Split, _) => "on tile registers, in parts",
                (_, Some(_)) if planned.compute() == DType::BF16 => "on tile registers",
                _ if planned.compute() == DType::BF16 && set.isa == Isa::Avx512Bf16 => "of bf16 pairs",
                _ => "by multiply-adds",
            };
            format!("kernels {}; products {products}\n", set.name())
        }
        _ => String::new(),
    }
}

/// A note for simulated devices, with the host memory that stages what they send.
fn staging(planned: &Planned) -> String {
    if planned.plan.spec.device.host_addressable {
        return String::new();
    }
    let rank = &planned.plan.ranks[0];
    let copied = |to: Memory| {
        let copies = rank.step.copies.iter().filter(|copy| copy.to == to);
        bytes(copies.map(|copy| copy.bytes).sum())
    };
    let device = match planned.config.device.kind {
        DeviceKind::Cuda => "an NVIDIA GPU",
        _ => "a simulated accelerator, played by the processor",
    };
    format!(
        "each rank computes on {device}; {} of host memory stage what it sends; \
         a step copies {} to the host and {} to the device\n",
        bytes(rank.host.arena_bytes),
        copied(Memory::Host),
        copied(Memory::Device)
    )
}

/// Describes the states and inputs that lie outside of device memory, and the bytes that a step moves for them.
fn residence(planned: &Planned) -> String {
    let (spec, rank) = (&planned.plan.spec, &planned.plan.ranks[0]);
    let mut text = String::new();
    type Lies = fn(ChunkResidence) -> Memory;
    let parts: [(&str, Lies, Category); 3] = [
        ("parameters", |chunk| chunk.parameters, Category::Parameters),
        ("gradients", |chunk| chunk.gradients, Category::Gradients),
        ("optimizer states", |chunk| chunk.optimizer, Category::Optimizer),
    ];
    for (what, of, category) in parts {
        let lies = |memory| {
            spec.zero.residence.iter().flat_map(Residence::described).any(|chunk| of(chunk) == memory)
        };
        for memory in [Memory::Host, Memory::Disk].into_iter().filter(|memory| lies(*memory)) {
            let stored = bytes(rank.peak_of(memory).categories.get(category));
            let place = place_of(&spec.device, memory);
            text.push_str(&format!("{what} lie {place}, {stored} on each rank; "));
        }
    }
    let inputs = spec.inputs.memory;
    if inputs != Memory::Device {
        let peak = rank.peak_of(inputs).categories.get(Category::Activations);
        text.push_str(&format!(
            "inputs of blocks wait {}, up to {}; ",
            place_of(&spec.device, inputs),
            bytes(peak)
        ));
    }
    if text.is_empty() {
        return text;
    }
    let copies = rank.step.copies.iter();
    let moved: Vec<String> = copies
        .map(|copy| format!("{} from {} to {}", bytes(copy.bytes), copy.from.name(), copy.to.name()))
        .collect();
    format!("{text}a step copies {}\n", moved.join(", "))
}

fn place_of(device: &DevicePart, memory: Memory) -> String {
    match (memory, &device.disk) {
        (Memory::Disk, Some(disk)) => in_files(disk),
        _ => format!("in {} memory", memory.name()),
    }
}

/// Names the folders of disk memory.
fn in_files(disk: &DiskOptions) -> String {
    let folders: Vec<String> = disk.folders.iter().map(|folder| folder.display().to_string()).collect();
    let files = if folders.len() == 1 { "a file" } else { "files" };
    let checks = if disk.checksums { ", with checksums" } else { "" };
    format!("in {files} under {}{checks}", folders.join(" and "))
}

/// Describes the precision policy.
fn precision(planned: &Planned) -> String {
    let spec = &planned.plan.spec;
    let Precision { compute, accumulate, communicate } = spec.precision.types;
    let master = if spec.precision.types.has_master() { " with f32 master weights" } else { "" };
    let crossing = if communicate == accumulate {
        String::new()
    } else {
        format!(", across ranks in {}", communicate.name())
    };
    let scale = match spec.precision.loss_scaling {
        LossScaling::Off => String::new(),
        LossScaling::Static(scale) => format!("; loss scale {scale}"),
        LossScaling::Dynamic(dynamic) => format!("; dynamic loss scale from {}", dynamic.initial),
    };
    let products = match planned.config.precision.products {
        Products::Split => " (products split into parts of bf16)",
        Products::Tf32 => " (products of 11 bits, TF32)",
        Products::Fma | Products::Auto => "",
    };
    let (compute, accumulate) = (compute.name(), accumulate.name());
    format!("computed in {compute}{products}{master}; gradients summed in {accumulate}{crossing}{scale}")
}

/// A column for each group of equal ranks, beside the textbook's values for the model states. For a mesh: a row for
/// each rank.
fn memory_table(planned: &Planned) -> String {
    if mesh_report::has_mesh(planned.plan.spec.mesh.axes) {
        return mesh_report::memory(planned);
    }
    let groups = alike(planned);
    let outside = planned.outside_bytes();
    let textbook = &planned.plan.textbook.state;
    let mut headings: Vec<&str> = vec!["memory"];
    headings.extend(groups.iter().map(|(ranks, _)| ranks.as_str()));
    headings.push("textbook");
    let mut table = Table::new(&headings);
    let mut row = |label: &str, of: &dyn Fn(&RankPlan) -> u64, textbook: Option<u64>| {
        let cells = groups.iter().map(|(_, rank)| bytes(of(rank)));
        let last = textbook.map_or(String::new(), |b| if b == 0 { "-".to_string() } else { bytes(b) });
        table.row([label.to_string()].into_iter().chain(cells).chain([last]));
    };
    for category in Category::ALL {
        row(category.name(), &|rank| rank.peak().categories.get(category), Some(textbook.get(category)));
    }
    if planned.plan.ranks.iter().any(|rank| diagnosis(rank) > 0) {
        row("for a diagnosis", &diagnosis, None);
    }
    row("arena", &|rank| rank.memory.arena_bytes, None);
    match planned.plan.spec.device.beside_plan {
        None => {
            row("outside, about", &|_| outside, None);
            if let Some(between) = planned.between_hosts_bytes() {
                row("of it between hosts", &|_| between, None);
            }
            row("total, about", &|rank| rank.memory.arena_bytes + outside, None);
        }
        Some(beside) => {
            let needs = CardNeeds::of(&planned.plan.spec);
            row("scratch of kernels", &|_| needs.scratch_bytes, None);
            row("driver, about", &|_| CONTEXT_BYTES, None);
            if planned.plan.spec.device.linked {
                row("NCCL, about", &|_| needs.nccl_bytes(), None);
            }
            row("card, about", &|rank| rank.memory.arena_bytes + beside, None);
            row("host memory", &|rank| rank.host.arena_bytes, None);
            row("process, about", &|_| outside, None);
        }
    }
    table.to_string()
}

/// Bytes of the arena that only the diagnosis of a step that is not finite uses.
fn diagnosis(rank: &RankPlan) -> u64 {
    rank.memory.arena_bytes - rank.peak().bytes
}

/// Neighbouring ranks with the same bytes: their numbers, and the plan of one.
fn alike(planned: &Planned) -> Vec<(String, &RankPlan)> {
    let name = |range: Range<usize>| match range.len() {
        1 => format!("rank {}", range.start),
        _ => format!("ranks {} to {}", range.start, range.end - 1),
    };
    mesh_report::alike(planned).into_iter().map(|(range, plan)| (name(range), plan)).collect()
}

fn phases_table(memory: &MemoryPlan) -> Table {
    let mut table = Table::default();
    for phase in &memory.phases {
        table.row([phase.name.to_string(), bytes(phase.peak.bytes), format!("{} bytes", phase.peak.bytes)]);
    }
    table
}

fn work(planned: &Planned) -> String {
    let plan = &planned.plan;
    let mut table = Table::default();
    let counted = |label: &str, exact: u128| [label.to_string(), count(exact as f64), exact.to_string()];
    let sized = |label: &str, exact: u64| [label.to_string(), bytes(exact), exact.to_string()];
    let (all, trained) = (u128::from(plan.parameters()), u128::from(plan.trained_parameters()));
    table.row(counted("parameters", all));
    if trained < all {
        table.row(counted("of which trained", trained));
        table.row(counted("of which frozen", all - trained));
    }
    table.row(counted("tokens", plan.spec.tokens_per_step().into()));
    table.row(counted("operations (matrix products)", plan.flops_per_step()));
    table.row(sized("bytes sent by all ranks", plan.collective_bytes_per_step()));
    if !mesh_report::has_mesh(plan.spec.mesh.axes) {
        let textbook = plan.textbook.sent_bytes * plan.spec.world_size() as u64;
        table.row(sized("the textbook's, for one batch", textbook));
    }
    let none = &[][..];
    let collectives = if plan.spec.world_size() > 1 { &plan.of(0).step.collectives[..] } else { none };
    for CollectiveCost { op, calls, sent_bytes, .. } in collectives {
        let who = if mesh_report::has_mesh(plan.spec.mesh.axes) { "rank 0" } else { "each rank" };
        let operation = format!("  {} on {who}", op.name());
        table.row([operation, format!("{calls} calls"), format!("{sent_bytes} bytes sent")]);
    }
    format!("One step\n{table}")
}

fn chunks(plan: &RunPlan) -> String {
    let (spec, layout) = (&plan.spec, &plan.spec.mesh.layout);
    let ChunkBytes { largest, all, waste } = layout.bytes(spec.precision.types.compute);
    let mut text = format!(
        "Chunks\n  {} chunks, the largest of {}; {} of {} is padding ({:.2}%)\n",
        layout.chunks(),
        bytes(largest),
        bytes(waste),
        bytes(all),
        100.0 * waste as f64 / all as f64
    );
    if let Some(note) = spec.chunk_note() {
        text.push_str(&format!("  {note}\n"));
    }
    if !plan.tried_chunks.is_empty() {
        text.push_str(&tried_chunks(&plan.tried_chunks, &spec.mesh.chunk_size));
    }
    text
}

/// The chunk sizes among which `memory.chunk = "auto"` has chosen.
fn tried_chunks(all: &[TriedChunks], chosen: &ChunkSize) -> String {
    let mut table = Table::default();
    for tried in all {
        let chosen = if tried.size == *chosen { "chosen" } else { "" };
        let need = format!("need {}", bytes(tried.bytes));
        table.row([format!("  {} chunks", tried.chunks), need, chosen.into()]);
    }
    format!(
        "  of {} sizes, the one with the fewest chunks whose peak is within 1% of the smallest:\n{table}",
        all.len()
    )
}

/// Bytes sent and held for both values of `batch.reduce`, when micro-batches are accumulated over ranks.
fn reduce(planned: &Planned) -> String {
    let Some(other) = planned.other_reduce() else { return String::new() };
    let mut table = Table::new(&["batch.reduce", "sent by all ranks", "gradients", "arena"]);
    for (run, note) in [(planned, " (as configured)"), (&other, "")] {
        let word = mesh_report::reduce_word(run.config.batch.reduce);
        let rank = &run.plan.ranks[0];
        let (sent, gradients) = (run.plan.collective_bytes_per_step(), rank.peak().categories.gradients);
        let sizes = [sent, gradients, rank.memory.arena_bytes].map(bytes);
        table.row([format!("{word}{note}")].into_iter().chain(sizes));
    }
    format!("Reducing gradients of {} micro-batches\n{table}", planned.plan.spec.batch.micro_batches)
}
