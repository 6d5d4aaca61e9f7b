//! The figures of all ranks of `phalanx bench step`, put together: for people and as JSON.

use phalanx_drawing::report::{Table, bytes, count, percent, plural, seconds, whole};
use phalanx_train::RunPlan;
use serde_json::{Value, json};

use crate::steps::{Launches, StepFigures};

/// The figures of all ranks of a timed run, with their summary.
pub struct StepReport<'a> {
    plan: &'a RunPlan,
    ranks: &'a [StepFigures],
    summary: Summary,
}

/// The summary over all ranks.
struct Summary {
    /// Seconds of each step; a step is over when its slowest rank is done.
    steps: Vec<f64>,
    median: f64,
    min: f64,
    tokens_per_s: f64,
    /// None where it is unknown.
    peak_flops_per_s: Option<f64>,
    /// Shares of the peak that the median step achieves: of the model's operations, and of all.
    mfu: Option<f64>,
    hfu: Option<f64>,
    resident: u64,
    arena: u64,
    exposed: f64,
    sent: u64,
    /// As in [`StepFigures`], of the rank that had most.
    page_faults: Option<[u64; 2]>,
    /// Steps that the second of them is of.
    later_steps: usize,
}

impl Summary {
    fn of(plan: &RunPlan, ranks: &[StepFigures], warmup: usize) -> Summary {
        let count = ranks[0].step_s.len();
        let slowest = |step: usize| ranks.iter().map(|rank| rank.step_s[step]).fold(0.0, f64::max);
        let steps: Vec<f64> = (0..count).map(slowest).collect();
        let mut sorted = steps.clone();
        sorted.sort_by(f64::total_cmp);
        let (median, min) = (sorted[sorted.len() / 2], sorted[0]);
        let compute = plan.spec.precision.types.compute;
        let peak: f64 = ranks.iter().map(|rank| rank.peaks.products_per_s(compute)).sum();
        let peak_flops_per_s = (peak > 0.0).then_some(peak);
        let share = |flops: u128| Some(flops as f64 / median / peak_flops_per_s?);
        let largest =
            |which: usize| ranks.iter().map(|rank| rank.page_faults.map(|faults| faults[which])).max();
        Summary {
            steps,
            median,
            min,
            tokens_per_s: plan.spec.tokens_per_step() as f64 / median,
            peak_flops_per_s,
            mfu: share(plan.model_flops_per_step()),
            hfu: share(plan.flops_per_step()),
            resident: ranks.iter().map(|rank| rank.resident_bytes_peak).max().unwrap_or(0),
            arena: ranks.iter().map(|rank| rank.arena_bytes).max().unwrap_or(0),
            exposed: ranks.iter().map(|rank| rank.exposed_s).fold(0.0, f64::max),
            sent: ranks.iter().map(|rank| rank.sent_bytes).sum(),
            page_faults: largest(0).flatten().zip(largest(1).flatten()).map(|(first, later)| [first, later]),
            later_steps: warmup + count - 1,
        }
    }
}

impl<'a> StepReport<'a> {
    /// A report on the figures of all ranks, which ran `warmup` steps before the first timed one.
    pub fn new(plan: &'a RunPlan, ranks: &'a [StepFigures], warmup: usize) -> StepReport<'a> {
        StepReport { plan, ranks, summary: Summary::of(plan, ranks, warmup) }
    }

    /// The figures for scripts.
    pub fn to_json(&self) -> Value {
        let StepReport { plan, ranks, summary } = self;
        let Summary { median, page_faults, .. } = summary;
        let flops = plan.flops_per_step();
        json!({
            "step_s_median": median, "step_s_min": summary.min, "step_s": summary.steps,
            "tokens_per_s": summary.tokens_per_s, "flops_per_step": whole(flops),
            "model_flops_per_step": whole(plan.model_flops_per_step()), "flops_per_s": flops as f64 / median,
            "compute": plan.spec.precision.types.compute.name(), "peak_flops_per_s": summary.peak_flops_per_s,
            "mfu": summary.mfu, "hfu": summary.hfu, "resident_bytes_peak": summary.resident,
            "resident_bytes_peak_by_rank": ranks.iter().map(|r| r.resident_bytes_peak).collect::<Vec<_>>(),
            "page_faults_first_step": page_faults.map(|faults| faults[0]),
            "page_faults_per_step": page_faults.map(|faults| faults[1] as f64 / summary.later_steps.max(1) as f64),
            "arena_bytes": summary.arena, "losses": ranks[0].losses, "collective_bytes_per_step": summary.sent,
            "exposed_s": summary.exposed, "launches_per_step_of_rank_0": ranks[0].launches,
            "exposed_s_by_rank": ranks.iter().map(|r| r.exposed_s).collect::<Vec<_>>(),
            "sent_bytes_by_rank": ranks.iter().map(|r| r.sent_bytes).collect::<Vec<_>>(),
            "mesh": plan.spec.mesh.axes, "schedule": plan.spec.pipeline.schedule.name, "ranks": ranks.len(), "threads": plan.spec.device.threads,
            "zero": plan.spec.zero.stage.number(), "parameters": plan.parameters(), "peaks_of_rank_0": ranks[0].peaks,
            "profile_of_rank_0": ranks[0].profile.to_json(&ranks[0].peaks), "profiled_steps": ranks[0].profiled,
        })
    }

    /// The figures for people; `axes` names the axes of the mesh that have several ranks.
    pub fn to_text(&self, axes: &str) -> String {
        let StepReport { plan, ranks, summary } = self;
        let (peak, compute) = (summary.peak_flops_per_s, plan.spec.precision.types.compute.name());
        let mut table = Table::default();
        let mut row = |label: &str, value: String| table.row([label.to_string(), value]);
        row("step, median", seconds(summary.median));
        row("step, shortest", seconds(summary.min));
        row("tokens/s", count(summary.tokens_per_s));
        row("operations/s", count(plan.flops_per_step() as f64 / summary.median));
        if let (Some(peak), Some(mfu), Some(hfu)) = (peak, summary.mfu, summary.hfu) {
            row("model FLOPs utilisation", format!("{:.0}% of {} in {compute}", 100.0 * mfu, count(peak)));
            if hfu != mfu {
                row("with what is computed again", format!("{:.0}%", 100.0 * hfu));
            }
        }
        row("sent by all ranks", bytes(summary.sent));
        row("waiting for communication, at most", seconds(summary.exposed));
        row("resident peak of a rank", bytes(summary.resident));
        row("of it planned", bytes(summary.arena));
        if let Some([first, later]) = summary.page_faults {
            row("page faults, first step", first.to_string());
            row("page faults, later steps", format!("{later} in {}", plural(summary.later_steps, "step")));
        }
        if let Some(launches) = &ranks[0].launches {
            let Launches { single, graphs, in_graphs } = launches;
            let value = format!("{graphs:.0} graphs of {in_graphs:.0} calls, {single:.0} single calls");
            row("launches of rank 0 in a step", value);
        }
        let spec = &plan.spec;
        format!(
            "{} parameters, {} of {}{}, ZeRO-{}, {} tokens a step\n{table}\n{}",
            count(plan.parameters() as f64),
            plural(spec.world_size(), "rank"),
            plural(spec.device.threads, "thread"),
            axes,
            spec.zero.stage.number(),
            spec.tokens_per_step(),
            profile_text(plan, &ranks[0])
        )
    }
}

/// Table of the time that each kernel of rank 0 takes.
fn profile_text(plan: &RunPlan, rank: &StepFigures) -> String {
    let (profile, peaks, compute) = (&rank.profile, &rank.peaks, plan.spec.precision.types.compute);
    let peak = peaks.products_per_s(compute);
    let share = |flops: u64| percent(flops as f64 / profile.step_s / peak);
    let step = &plan.of(0).step;
    let (model, executed) = (step.model_flops(), step.flops);
    let total = match executed == model {
        _ if peak == 0.0 => "step".to_string(),
        true => format!("step: mfu {}", share(model)),
        false => format!("step: mfu {}, hfu {}", share(model), share(executed)),
    };
    let limits = match peak > 0.0 {
        true => format!(
            "{:.1} GFLOP/s in {}, {:.1} GB/s of memory",
            peak / 1e9,
            compute.name(),
            peaks.bytes_per_s / 1e9
        ),
        false => "the device's are unknown".to_string(),
    };
    format!(
        "kernels of rank 0 in one step; flops and bytes are those of a call. Of {} whose calls were timed one by one,\n\
         not among the steps above, the median. Peaks of its threads: {limits},\n\
         {:.1} GB/s copied{}\n{}",
        plural(rank.profiled, "step"),
        peaks.copied_bytes_per_s / 1e9,
        peaks.disk_bytes_per_s.map_or(String::new(), |rate| format!(", {:.1} GB/s of disk", rate / 1e9)),
        profile.to_table(peaks, &total)
    )
}
