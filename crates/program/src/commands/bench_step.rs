//! `phalanx bench step`: how long a step takes, on random tokens, with the ranks of a training run.

use anyhow::{Context, Result, bail};
use phalanx_bench::steps::StepFigures;
use phalanx_bench::steps_report::StepReport;
use phalanx_train::RunPlan;
use phalanx_train::config::{DeviceKind, Updates};
use serde_json::json;

use crate::arguments::bench_args::BenchStepArgs;
use crate::configuration::translation;
use crate::host::environment::Environment;
use crate::host::output::{note, print, print_json};
use crate::host::signals::Signals;
use crate::jobs::bench;
use crate::jobs::launch::RankProcesses;
use crate::jobs::rank_host::RankHost;
use crate::jobs::rank_output::Output;
use crate::jobs::task::{BenchStepTask, Task};
use crate::plans::estimate::random_tokens;
use crate::plans::kept_budget;
use crate::plans::planned::Planned;
use crate::plans::resolve::{Purpose, resolve};
use crate::reports::mesh_report;

/// Measures and prints.
///
/// # Errors
/// A configuration that cannot work or does not fit, a rank that died.
pub fn bench_step(args: &BenchStepArgs, environment: Environment) -> Result<()> {
    let signals = Signals::take_over()?;
    let given = translation::read_both(&args.config, &args.overrides)?.0.with(&args.overrides, &[])?;
    let (resolved, ()) = resolve(&given, Purpose::Plan, None, random_tokens)?;
    let mut resolved = resolved.with_known_micro()?;
    resolved.device.take().iter().for_each(|line| note(line));
    let planned = Planned::of(resolved, 0)?;
    let planned = kept_budget::keep(planned, crate::plans::budgets::budgets, RunPlan::new)?;
    if planned.config.parallel.updates == Updates::Asynchronous {
        bail!(
            "parallel.updates = \"asynchronous\": ranks have no common step to time; `phalanx train` reports each rank's steps, \
             and `phalanx bench strategies` compares"
        );
    }
    let environment = environment.decide(&planned.config.device)?;
    crate::reports::fit::check_memory(&planned)?;
    crate::plans::disk_check::check(&planned)?.iter().for_each(|line| note(line));
    let task = BenchStepTask {
        config: planned.config.clone(),
        model: planned.plan.spec.model.definition.to_config(),
        warmup: warmup(args, &planned),
        steps: args.steps,
    };
    let world = planned.plan.spec.world_size();
    let ranks = match world {
        1 => vec![bench::steps(&task, &planned, &RankHost::Alone, environment)?],
        _ => {
            let processes =
                RankProcesses::start(world, &Task::BenchStep(task), Some(&planned.plan), &Output::Gathered)?;
            let lines = processes.wait(&signals)?;
            let parse = |line: &String| serde_json::from_str(line).context("the figures of a rank");
            lines.iter().map(parse).collect::<Result<Vec<StepFigures>>>()?
        }
    };
    show(args, &planned, &ranks)
}

/// Steps of a card in which its graphs are made.
const WARMUP_OF_CARDS: usize = 3;

/// Steps before the first that is timed. In the first steps on a card, its graphs are made.
fn warmup(args: &BenchStepArgs, planned: &Planned) -> usize {
    let of_card = if planned.config.device.kind == DeviceKind::Cuda { WARMUP_OF_CARDS } else { 0 };
    args.warmup.max(of_card)
}

fn show(args: &BenchStepArgs, planned: &Planned, ranks: &[StepFigures]) -> Result<()> {
    let report = StepReport::new(&planned.plan, ranks, warmup(args, planned));
    match args.json {
        true => {
            let mut figures = report.to_json();
            figures["device"] = json!(planned.config.device.kind.name());
            print_json(&figures)
        }
        false => {
            let headline = args.config.display();
            let axes = mesh_report::axes_in_brackets(&planned.plan.spec);
            Ok(print(&format!("{headline}: {}", report.to_text(&axes)))?)
        }
    }
}
