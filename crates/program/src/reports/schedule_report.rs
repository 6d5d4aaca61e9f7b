//! A pipeline schedule for people and scripts: text form, drawing, bubble, activations in flight, and what the
//! schedules that have a name would do in its place.

use phalanx_drawing::draw_terminal;
use phalanx_plan::pipeline::depth;
use phalanx_plan::{
    Costs, HeldMicroBatches, InFlight, PipelineSchedule, Timeline, check_order, in_flight, messages, simulate,
};
use serde::Serialize;
use serde_json::{Value, json};

use crate::host::output;
use phalanx_drawing::report::{Table, count, percent, plural};

/// Width of a line if there is no terminal.
const WIDTH: usize = 110;

/// The unit of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Every F, I and W takes 1.
    Action,
    /// Times are those that the user gave.
    Given,
    /// Times are operations of the stages; 1 is the forward of a stage on average.
    Operations,
}

/// A schedule with its times.
pub struct Drawn {
    /// The actions.
    pub schedule: PipelineSchedule,
    /// The times of the actions.
    pub timeline: Timeline,
    held: InFlight,
    costs: Costs,
    unit: Unit,
    /// Operations of one unit of time, if known.
    operations: f64,
    others: Vec<Other>,
}

/// Another schedule for the same ranks and micro-batches.
#[derive(Serialize)]
struct Other {
    name: String,
    #[serde(rename = "bubble_fraction")]
    bubble: f64,
    makespan: f64,
    held: f64,
    messages: usize,
}

impl Drawn {
    /// Simulates a schedule that was checked, and `others` to compare it with; `costs` are operations under
    /// [`Unit::Operations`].
    pub fn new(
        schedule: PipelineSchedule,
        costs: Costs,
        unit: Unit,
        others: Vec<(PipelineSchedule, Costs)>,
    ) -> Drawn {
        let operations = match unit {
            Unit::Action | Unit::Given => 1.0,
            Unit::Operations => {
                let forward: f64 = costs.stages.iter().map(|stage| stage.forward).sum();
                (forward / costs.stages.len() as f64).max(1.0)
            }
        };
        let costs = scaled(costs, operations);
        let timeline = simulate(&schedule, &costs);
        let others = others.into_iter().map(|(other, costs)| Other::of(&other, &scaled(costs, operations)));
        let (held, others) = (in_flight(&schedule), others.collect());
        Drawn { schedule, timeline, held, costs, unit, operations, others }
    }
}

/// Costs in another unit.
fn scaled(mut costs: Costs, unit: f64) -> Costs {
    for stage in &mut costs.stages {
        (stage.forward, stage.input, stage.weight) =
            (stage.forward / unit, stage.input / unit, stage.weight / unit);
    }
    costs
}

impl Other {
    fn of(schedule: &PipelineSchedule, costs: &Costs) -> Other {
        let timeline = simulate(schedule, costs);
        Other {
            name: schedule.name.clone(),
            bubble: timeline.bubble_fraction(),
            makespan: timeline.makespan,
            held: max_held(schedule, &in_flight(schedule)),
            messages: messages(schedule).iter().map(|channel| channel.messages.len()).sum(),
        }
    }
}

/// Maximum number of micro-batches whose activations a rank holds until W. If a rank has several stages, each counts as
/// its share.
fn max_held(schedule: &PipelineSchedule, held: &InFlight) -> f64 {
    let max = held.ranks.iter().map(|held| held.to_weight).max().unwrap_or(0);
    max as f64 * schedule.ranks.len() as f64 / schedule.stages() as f64
}

/// The report as JSON.
pub fn to_json(drawn: &Drawn) -> Value {
    let Drawn { schedule, timeline, held, costs, .. } = drawn;
    let held_json =
        |held: &HeldMicroBatches| json!({ "to_input": held.to_input, "to_weight": held.to_weight });
    let list = |held: &[HeldMicroBatches]| held.iter().map(held_json).collect::<Vec<_>>();
    json!({
        "schedule": schedule.name, "ranks": schedule.ranks.len(), "stages": schedule.stages(),
        "micro_batches": schedule.micro_batches, "placement": schedule.placement, "text": schedule.to_string(),
        "bubble_fraction": timeline.bubble_fraction(), "makespan": timeline.makespan, "busy": timeline.busy,
        "operations_per_unit": (drawn.unit == Unit::Operations).then_some(drawn.operations),
        "message": costs.message, "depth": depth(schedule),
        "costs": costs.stages.iter().map(|c| [c.forward, c.input, c.weight]).collect::<Vec<_>>(),
        "in_flight": { "stages": list(&held.stages), "ranks": list(&held.ranks) },
        "ascending": check_order(schedule).is_ok(),
        "named": drawn.others,
    })
}

/// The report as text.
pub fn to_text(drawn: &Drawn) -> String {
    let width = output::terminal_width().unwrap_or(WIDTH);
    let unit = match drawn.unit {
        Unit::Action => "F, I and W take 1 each, B = I + W takes 2; messages take no time".to_string(),
        Unit::Given => format!("times as given, B = I + W; a message takes {}", number(drawn.costs.message)),
        Unit::Operations => format!(
            "time is counted in operations: 1 is {}, the forward of a stage on average; messages take no time",
            count(drawn.operations)
        ),
    };
    let note = match check_order(&drawn.schedule) {
        Ok(()) => String::new(),
        Err(error) => {
            format!("note: {error}; it can train, but rounds differently from the named schedules\n")
        }
    };
    format!(
        "{}\n{}{unit}\n\n{}{note}\n{}",
        drawn.schedule,
        draw_terminal(&drawn.schedule, &drawn.timeline, width),
        stages(drawn),
        others(drawn)
    )
}

/// A table with a row per stage.
fn stages(drawn: &Drawn) -> String {
    let Drawn { schedule, timeline, held, costs, .. } = drawn;
    let mut table = Table::new(&["stage", "rank", "F", "I", "W", "rank idles", held_heading(schedule)]);
    for (stage, (rank, cost)) in schedule.placement.iter().zip(&costs.stages).enumerate() {
        let [forward, input, weight] = [cost.forward, cost.input, cost.weight].map(number);
        let (idle, held) =
            (timeline.idle(*rank) / timeline.makespan, held_text(schedule, &held.stages[stage]));
        table.row([stage.to_string(), rank.to_string(), forward, input, weight, percent(idle), held]);
    }
    let bubble = percent(timeline.bubble_fraction());
    let held = plural(depth(schedule), "message");
    format!(
        "bubble fraction {bubble}; a channel holds {held} on each side; activations in flight, in micro-batches\n{table}"
    )
}

/// Heading of the column of [`held_text`].
pub fn held_heading(schedule: &PipelineSchedule) -> &'static str {
    if schedule.splits_backward() { "in flight to I / W" } else { "in flight to B" }
}

/// Micro-batches in flight.
pub fn held_text(schedule: &PipelineSchedule, held: &HeldMicroBatches) -> String {
    match schedule.splits_backward() {
        true => format!("{} / {}", held.to_input, held.to_weight),
        false => held.to_weight.to_string(),
    }
}

/// A table of the named schedules, for comparison.
fn others(drawn: &Drawn) -> String {
    let Drawn { schedule, .. } = drawn;
    let mut table = Table::new(&["schedule", "bubble", "time", "a rank holds at most", "messages"]);
    for other in &drawn.others {
        let Other { name, bubble, makespan, held, messages } = other;
        let [makespan, held] = [*makespan, *held].map(number);
        table.row([name.clone(), percent(*bubble), makespan, held, messages.to_string()]);
    }
    format!(
        "Named schedules, with {} on {} (a stage of a rank with several counts as its share of it)\n{table}",
        plural(schedule.micro_batches, "micro-batch"),
        plural(schedule.ranks.len(), "rank")
    )
}

/// At most two decimals.
fn number(value: f64) -> String {
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}
