//! The sweep of placements and budgets as a table: for a terminal, as Markdown and as JSON.

use phalanx_drawing::report::{Table, bytes};
use phalanx_plan::trace::Memory;
use serde_json::{Value, json};

use super::{MemoryRan, MemoryRun};

/// The first line of the table in Markdown.
pub const TITLE: &str = "# Placements and budgets";

/// Returns whether every rank's peaks in a step were as planned, in all memories.
fn is_as_planned(ran: &MemoryRan) -> bool {
    ran.ranks.iter().all(|rank| rank.planned == rank.measured)
}

/// The steps with which others are compared.
fn compared_s(runs: &[MemoryRun]) -> [Option<f64>; 2] {
    ["device", "host"].map(|placement| {
        let run = runs.iter().find(|run| run.placement == placement)?;
        run.ran.as_ref().ok().map(MemoryRan::step_s)
    })
}

/// For a terminal.
pub fn to_text(runs: &[MemoryRun]) -> String {
    table(runs).to_string()
}

/// The steps with everything on the device, and in host memory, are what others are compared with.
fn table(runs: &[MemoryRun]) -> Table {
    let [device_s, host_s] = compared_s(runs);
    let ms = |seconds: f64| format!("{:.1} ms", 1e3 * seconds);
    let of =
        |run: &MemoryRun, text: &dyn Fn(&MemoryRan) -> String| run.ran.as_ref().map_or(String::new(), text);
    let peak = |ran: &MemoryRan, memory: usize| match ran.peaks(memory)[1] {
        0 => "-".to_string(),
        peak => bytes(peak),
    };
    let above = |ran: &MemoryRan| device_s.map_or("-".to_string(), |device_s| ms(ran.step_s() - device_s));
    let share =
        |ran: &MemoryRan| host_s.map_or("-".to_string(), |host_s| format!("{:.2}", ran.step_s() / host_s));
    let verdict = |ran: &MemoryRan| if is_as_planned(ran) { "as planned" } else { "DIFFERS" }.to_string();
    Table::of(
        runs,
        &[
            ("placement", &|run| run.name()),
            ("budget", &|run| run.budget.map_or("-".to_string(), |(_, budget)| bytes(budget))),
            ("device", &|run| match &run.ran {
                Ok(ran) => peak(ran, 0),
                Err(reason) => format!("does not run: {reason}"),
            }),
            ("host", &|run| of(run, &|ran| peak(ran, 1))),
            ("disk", &|run| of(run, &|ran| peak(ran, 2))),
            ("moved", &|run| of(run, &|ran| bytes(ran.moved_bytes()))),
            ("step", &|run| of(run, &|ran| ms(ran.step_s()))),
            ("above device", &|run| of(run, &above)),
            ("of host", &|run| of(run, &share)),
            ("waits for copies", &|run| of(run, &|ran| ran.exposed_s.map_or("-".to_string(), ms))),
            ("plan", &|run| of(run, &verdict)),
        ],
    )
}

/// As Markdown.
pub fn to_markdown(runs: &[MemoryRun], heading: &str) -> String {
    format!(
        "{TITLE}\n\n{heading}\n\n{}\nPeaks are those of a step, of the largest rank, measured. *above device*: the median step less that with everything on \
         the device; *of host*: divided by that in host memory. *waits for copies*: by the trace, at the rates of this machine; `-` where the rate of a disk is needed.\n",
        table(runs).to_markdown()
    )
}

/// For scripts.
pub fn to_json(runs: &[MemoryRun]) -> Value {
    let copy = |(from, to, bytes): &(Memory, Memory, u64)| json!({ "from": from, "to": to, "bytes": bytes });
    let [_, host_s] = compared_s(runs);
    let run = |run: &MemoryRun| {
        let ran = run.ran.as_ref().ok();
        let peaks = ran.map(|ran| {
            Memory::ALL.into_iter().enumerate().map(|(index, memory)| {
                let [planned, measured] = ran.peaks(index);
                (memory.name().to_string(), json!({ "planned_bytes": planned, "measured_bytes": measured }))
            })
        });
        json!({
            "placement": run.placement,
            "budget_share": run.budget.map(|(share, _)| share),
            "budget_bytes": run.budget.map(|(_, bytes)| bytes),
            "reason": run.ran.as_ref().err(),
            "step_s_median": ran.map(MemoryRan::step_s),
            "step_of_host": ran.zip(host_s).map(|(ran, host_s)| ran.step_s() / host_s),
            "step_s": ran.map(|ran| ran.ranks.iter().map(|rank| rank.step_s.clone()).collect::<Vec<_>>()),
            "losses": ran.map(|ran| ran.ranks.first().map(|rank| rank.losses.clone())),
            "needed_device_bytes": ran.map(|ran| ran.device_bytes),
            "moved_bytes": ran.map(MemoryRan::moved_bytes),
            "copies": ran.map(|ran| ran.copies.iter().map(copy).collect::<Vec<_>>()),
            "waits_for_copies_s": ran.and_then(|ran| ran.exposed_s),
            "waits_for_collectives_s": ran.map(|ran| ran.ranks.iter().map(|rank| rank.waited_s).fold(0.0, f64::max)),
            "peaks": peaks.map(serde_json::Map::from_iter),
            "as_planned": ran.map(is_as_planned),
        })
    };
    json!({ "runs": runs.iter().map(run).collect::<Vec<_>>() })
}
