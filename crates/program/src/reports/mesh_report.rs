//! The plan of a mesh: the coordinates of each rank, the memory and operations of each pipeline stage, the pipeline's
//! bubble, and the cost of ZeRO 2 or 3 under a pipeline.

use std::cmp::Ordering;
use std::ops::Range;

use phalanx_layers::Network;
use phalanx_plan::{Costs, InFlight, Mesh, StageCost, ZeroStage, in_flight, simulate};
use phalanx_train::config::Reduce;
use phalanx_train::{RankPlan, Spec};
use serde::Serialize;
use serde_json::{Value, json};

use crate::plans::planned::Planned;
use crate::reports::schedule_report::{held_heading, held_text};
use phalanx_drawing::report::{Table, bytes, count, percent, plural};

/// Up to this many ranks have a row each in a table; with more ranks, those of one pipeline stage share a row.
const ROWS: usize = 16;

/// Returns whether the mesh has more than a data axis.
pub fn has_mesh(axes: Mesh) -> bool {
    axes.pipeline * axes.tensor > 1
}

/// The sizes of the axes that have several ranks, and the schedule of a pipeline; empty for data parallelism alone.
pub fn axes_in_brackets(spec: &Spec) -> String {
    let mesh = spec.mesh.axes;
    if !has_mesh(mesh) {
        return String::new();
    }
    let sizes = [("pipeline", mesh.pipeline), ("data", mesh.data), ("tensor", mesh.tensor)];
    let axis = |(name, size): &(&str, usize)| (*size > 1).then(|| format!("{name} {size}"));
    let axes: Vec<String> = sizes.iter().filter_map(axis).collect();
    let sequence = if spec.mesh.sequence_parallel { ", sequence parallel" } else { "" };
    let schedule =
        if mesh.pipeline > 1 { format!(", {}", spec.pipeline.schedule.name) } else { String::new() };
    format!(" ({}{sequence}{schedule})", axes.join(" x "))
}

/// The ranks of each row of a table: first and last, and the plan of one.
pub fn rows(planned: &Planned) -> Vec<(Range<usize>, &RankPlan)> {
    let (spec, plan) = (&planned.plan.spec, &planned.plan);
    let each = if spec.world_size() <= ROWS { 1 } else { spec.mesh.axes.data * spec.mesh.axes.tensor };
    (0..spec.world_size()).step_by(each).map(|first| (first..first + each, plan.of(first))).collect()
}

/// Neighbouring ranks of one pipeline stage that hold the same bytes.
pub fn alike(planned: &Planned) -> Vec<(Range<usize>, &RankPlan)> {
    let place = |range: &Range<usize>| planned.plan.spec.mesh.axes.coordinates(range.start).pipeline;
    let rows = rows(planned);
    let groups = rows.chunk_by(|(a, one), (b, other)| one.peak() == other.peak() && place(a) == place(b));
    groups.map(|rows| (rows[0].0.start..rows[rows.len() - 1].0.end, rows[0].1)).collect()
}

/// `rank 3`, `ranks 0 to 3`; for many ranks also their number.
pub fn rank_names(range: &Range<usize>) -> String {
    match range.len() {
        1 => format!("rank {}", range.start),
        count if count <= ROWS => format!("ranks {} to {}", range.start, range.end - 1),
        count => format!("ranks {} to {} (x {count} ranks)", range.start, range.end - 1),
    }
}

/// The mesh coordinates of every rank, and its blocks.
pub fn places(planned: &Planned) -> String {
    let spec = &planned.plan.spec;
    let whole = spec.model.whole();
    let names: Vec<&str> =
        (0..spec.mesh.stages.last().map_or(0, |s| s.end)).map(|i| whole.block_name(i)).collect();
    let mut table = Table::new(&["", "pipeline", "data", "tensor", "blocks"]);
    for (range, _) in rows(planned) {
        let (first, last) =
            (spec.mesh.axes.coordinates(range.start), spec.mesh.axes.coordinates(range.end - 1));
        let span = |first: usize, last: usize| {
            if first == last { first.to_string() } else { format!("{first} to {last}") }
        };
        let stages: Vec<usize> = spec.pipeline.schedule.stages_of(first.pipeline).collect();
        let blocks: Vec<String> = stages.iter().map(|s| blocks(&names, &spec.mesh.stages[*s])).collect();
        let (pipeline, data) = (first.pipeline.to_string(), span(first.data, last.data));
        let tensor = span(first.tensor, last.tensor);
        table.row([rank_names(&range), pipeline, data, tensor, blocks.join(", then ")]);
    }
    format!("Mesh: {}\n{table}", spec.mesh.axes)
}

/// `embedding to h.2`
fn blocks(names: &[&str], range: &Range<usize>) -> String {
    match range.len() {
        1 => names[range.start].to_string(),
        _ => format!("{} to {}", names[range.start], names[range.end - 1]),
    }
}

/// Bytes by category, with a row for the ranks of one pipeline stage that hold the same.
pub fn memory(planned: &Planned) -> String {
    use phalanx_plan::trace::Category;
    let mut headings = vec![""];
    headings.extend(Category::ALL.map(Category::name));
    let beside = planned.plan.spec.device.beside_plan;
    headings.extend(["arena", if beside.is_some() { "card, about" } else { "total, about" }]);
    let mut table = Table::new(&headings);
    let outside = beside.unwrap_or_else(|| planned.outside_bytes());
    for (range, plan) in alike(planned) {
        let peak = plan.peak();
        let categories = Category::ALL.map(|category| bytes(peak.categories.get(category)));
        let sums = [bytes(plan.memory.arena_bytes), bytes(plan.memory.arena_bytes + outside)];
        table.row([rank_names(&range)].into_iter().chain(categories).chain(sums));
    }
    let textbook = &planned.plan.textbook.state;
    let shown = |of: u64| if of == 0 { "-".to_string() } else { bytes(of) };
    let cells = Category::ALL.map(|category| shown(textbook.get(category)));
    table.row(["textbook, most".to_string()].into_iter().chain(cells));
    table.to_string()
}

/// Figures of a pipeline: operations, activations in flight, and bubble.
struct Pipeline {
    costs: Vec<StageCost>,
    held: InFlight,
    bubble: f64,
}

impl Pipeline {
    fn of(spec: &Spec) -> Pipeline {
        let costs = Costs { stages: spec.stage_costs(), message: 0.0 };
        let bubble = simulate(&spec.pipeline.schedule, &costs).bubble_fraction();
        Pipeline { costs: costs.stages, held: in_flight(&spec.pipeline.schedule), bubble }
    }

    /// Operations of a stage and micro-batch.
    fn operations(&self, stage: usize) -> f64 {
        let StageCost { forward, input, weight } = self.costs[stage];
        forward + input + weight
    }

    /// The fraction of all operations that a stage computes.
    fn share(&self, stage: usize) -> f64 {
        let all: f64 = (0..self.costs.len()).map(|stage| self.operations(stage)).sum();
        self.operations(stage) / all.max(1.0)
    }
}

/// Elements of the parameters of each stage of the whole network, over the tensor axis.
fn parameters(stages: &[Range<usize>], whole: &Network) -> Vec<u64> {
    let of_stage = |range: &Range<usize>| {
        let mut used = whole.uses[range.clone()].concat();
        used.sort_unstable();
        used.dedup();
        used.iter().map(|p| whole.parameters[*p].elements() as u64).sum()
    };
    stages.iter().map(of_stage).collect()
}

/// The stages, their schedule and its bubble; nothing without a pipeline.
pub fn pipeline(planned: &Planned) -> String {
    let spec = &planned.plan.spec;
    if spec.mesh.axes.pipeline == 1 {
        return String::new();
    }
    let (pipeline, whole) = (Pipeline::of(spec), spec.model.whole());
    let parameters = parameters(&spec.mesh.stages, &whole);
    let names: Vec<&str> = (0..whole.uses.len()).map(|i| whole.block_name(i)).collect();
    let schedule = &spec.pipeline.schedule;
    let mut table =
        Table::new(&["stage", "place", "blocks", "parameters", "operations", held_heading(schedule)]);
    for (stage, place) in schedule.placement.iter().enumerate() {
        let (blocks, parameters) =
            (blocks(&names, &spec.mesh.stages[stage]), count(parameters[stage] as f64));
        let (share, held) =
            (percent(pipeline.share(stage)), held_text(schedule, &pipeline.held.stages[stage]));
        table.row([stage.to_string(), place.to_string(), blocks, parameters, share, held]);
    }
    let tied: Vec<String> = spec.mesh.ties.iter().map(|tie| tie.name.clone()).collect();
    let tied = match tied.is_empty() {
        true => String::new(),
        false => format!("  {} is in several of them, with one gradient\n", tied.join(", ")),
    };
    format!(
        "Pipeline: {} with {} of {}; bubble fraction {}, simulated with the operations of each stage\n{table}{tied}\
         \x20 `phalanx plan CONFIG --schedule` draws it\n",
        schedule.name,
        plural(spec.batch.micro_batches, "micro-batch"),
        plural(spec.batch.micro_batch_size, "sequence"),
        percent(pipeline.bubble)
    )
}

/// The pipeline as JSON; null without a pipeline.
pub fn pipeline_json(planned: &Planned) -> Value {
    let spec = &planned.plan.spec;
    if spec.mesh.axes.pipeline == 1 {
        return Value::Null;
    }
    let (pipeline, whole) = (Pipeline::of(spec), spec.model.whole());
    let parameters = parameters(&spec.mesh.stages, &whole);
    let stage = |(stage, place): (usize, &usize)| {
        let held = pipeline.held.stages[stage];
        json!({
            "stage": stage, "place": place, "parameters": parameters[stage], "share": pipeline.share(stage),
            "blocks": spec.mesh.stages[stage].clone().map(|i| whole.block_name(i)).collect::<Vec<_>>(),
            "flops_per_micro_batch": pipeline.operations(stage),
            "in_flight": { "to_input": held.to_input, "to_weight": held.to_weight },
        })
    };
    json!({
        "schedule": spec.pipeline.schedule.name, "micro_batches": spec.batch.micro_batches, "bubble_fraction": pipeline.bubble,
        "stages": spec.pipeline.schedule.placement.iter().enumerate().map(stage).collect::<Vec<_>>(),
        "tied": spec.mesh.ties.iter().map(|tie| &tie.name).collect::<Vec<_>>(),
    })
}

/// Bytes sent and held under one ZeRO stage.
#[derive(Serialize)]
struct Sharding {
    zero: u8,
    reduce: Reduce,
    #[serde(rename = "collective_bytes_per_step")]
    sent_bytes: u64,
    #[serde(rename = "parameter_bytes")]
    parameters: u64,
    #[serde(rename = "gradient_bytes")]
    gradients: u64,
    #[serde(rename = "peak_bytes")]
    arena: u64,
}

impl Sharding {
    fn of(planned: &Planned) -> Sharding {
        let max = |of: &dyn Fn(&RankPlan) -> u64| planned.plan.ranks.iter().map(of).max().unwrap_or(0);
        Sharding {
            zero: planned.config.parallel.zero,
            reduce: planned.config.batch.reduce,
            sent_bytes: planned.plan.collective_bytes_per_step(),
            parameters: max(&|rank| rank.peak().categories.parameters),
            gradients: max(&|rank| rank.peak().categories.gradients),
            arena: max(&|rank| rank.memory.arena_bytes),
        }
    }
}

/// Bytes of the run itself and of stage 1 in its place, for a pipeline with ZeRO 2 or 3: there every micro-batch
/// reduces (and under 3 gathers), which stage 1 can do once per step.
fn shardings(planned: &Planned) -> Vec<Sharding> {
    let spec = &planned.plan.spec;
    if spec.mesh.axes.pipeline == 1 || spec.mesh.axes.data == 1 || spec.zero.stage < ZeroStage::Two {
        return Vec::new();
    }
    let mut all = vec![Sharding::of(planned)];
    let reduces: &[Reduce] =
        if spec.batch.micro_batches > 1 { &[Reduce::Each, Reduce::Defer] } else { &[Reduce::Each] };
    for reduce in reduces {
        let other = planned.with(|config| (config.parallel.zero, config.batch.reduce) = (1, *reduce));
        all.extend(other.ok().as_ref().map(Sharding::of));
    }
    all
}

/// The value of `batch.reduce` as the configuration spells it.
pub fn reduce_word(reduce: Reduce) -> &'static str {
    match reduce {
        Reduce::Each => "each",
        Reduce::Defer => "defer",
    }
}

/// The table of [`shardings`]; empty where there is nothing to compare.
pub fn sharding(planned: &Planned) -> String {
    let all = shardings(planned);
    let Some((own, others)) = all.split_first() else { return String::new() };
    let rule = "parallel.zero, batch.reduce";
    let mut table = Table::new(&[rule, "sent by all ranks", "parameters", "gradients", "arena, most"]);
    for (number, one) in all.iter().enumerate() {
        let note = if number == 0 { " (as configured)" } else { "" };
        let name = format!("{}, {}{note}", one.zero, reduce_word(one.reduce));
        let sizes = [one.sent_bytes, one.parameters, one.gradients, one.arena].map(bytes);
        table.row([name].into_iter().chain(sizes));
    }
    let min = others.iter().min_by_key(|other| other.sent_bytes);
    let words = min.map_or(String::new(), |min| {
        let compared = |own: u64, other: u64| match own.cmp(&other) {
            Ordering::Equal => "as much as".to_string(),
            Ordering::Less => format!("{} less than", bytes(other - own)),
            Ordering::Greater => format!("{} more than", bytes(own - other)),
        };
        format!(
            "  A step sends {} ZeRO-1 with reduce = \"{}\", and a rank holds {} it\n",
            compared(own.sent_bytes, min.sent_bytes),
            reduce_word(min.reduce),
            compared(own.arena, min.arena)
        )
    });
    format!("ZeRO-{} under a pipeline: what a rank holds most\n{table}{words}", own.zero)
}

/// [`shardings`] as JSON.
pub fn sharding_json(planned: &Planned) -> Value {
    json!(shardings(planned).get(1..).unwrap_or_default())
}
