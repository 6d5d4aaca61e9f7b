//! `phalanx bench step`: how long a step takes, on random tokens, with the ranks of a training run.

use anyhow::{Context, Result, bail};
use serde_json::json;

use crate::args::BenchStepArgs;
use crate::bench::{self, StepFigures};
use crate::config::Given;
use crate::launch::{Crew, Output};
use crate::planned::{Planned, estimate_data};
use crate::report::{Table, bytes, count, plural, print, print_json, seconds};
use crate::seat::Seat;
use crate::shape;
use crate::signals::Signals;
use crate::task::{BenchStepTask, Task};

/// Measures and prints.
///
/// # Errors
/// A configuration that cannot work or does not fit, a rank that died.
pub fn bench_step(args: &BenchStepArgs) -> Result<()> {
    if args.steps == 0 {
        bail!("--steps 0: there is nothing to measure; give at least 1");
    }
    let signals = Signals::take_over()?;
    let given = Given::read(&args.config)?.with(&args.overrides, &[])?;
    let mut config = given.config()?;
    let imported = shape::fill_from_init(&mut config, &given)?;
    config.check()?;
    let vocabulary = match config.model.vocab {
        Some(_) => shape::Vocabulary { ids: 0, origin: "random tokens".into() },
        None => estimate_data(&config)?.0,
    };
    let model = shape::complete(&mut config, imported.as_ref().map(|i| &i.model), &vocabulary)?;
    let planned = Planned::new(config, model, 0)?;
    planned.check_memory()?;
    let task = BenchStepTask {
        config: planned.config.clone(),
        model: planned.plan.spec.model.to_config(),
        warmup: args.warmup,
        steps: args.steps,
    };
    let world = planned.plan.spec.world;
    let ranks = match world {
        1 => vec![bench::steps(&task, &Seat::Alone)?],
        _ => {
            let crew = Crew::start(world, &Task::BenchStep(task), Output::Gathered)?;
            let lines = crew.wait(&signals)?;
            let parse = |line: &String| serde_json::from_str(line).context("the figures of a rank");
            lines.iter().map(parse).collect::<Result<Vec<StepFigures>>>()?
        }
    };
    show(args, &planned, &ranks)
}

fn show(args: &BenchStepArgs, planned: &Planned, ranks: &[StepFigures]) -> Result<()> {
    // A step is over when its last rank is done.
    let slowest = |step: usize| ranks.iter().map(|rank| rank.step_s[step]).fold(0.0, f64::max);
    let steps: Vec<f64> = (0..args.steps).map(slowest).collect();
    let mut sorted = steps.clone();
    sorted.sort_by(f64::total_cmp);
    let (median, min) = (sorted[sorted.len() / 2], sorted[0]);
    let flops = planned.plan.flops_per_step() as f64;
    let peak: f64 = ranks.iter().map(|rank| rank.peak_flops_per_s).sum();
    let resident = ranks.iter().map(|rank| rank.resident_bytes_peak).max().unwrap_or(0);
    let exposed = ranks.iter().map(|rank| rank.exposed_s).fold(0.0, f64::max);
    let arena = ranks.iter().map(|rank| rank.arena_bytes).max().unwrap_or(0);
    let sent: u64 = ranks.iter().map(|rank| rank.sent_bytes).sum();
    let tokens_per_s = planned.plan.spec.tokens_per_step() as f64 / median;
    if args.json {
        return print_json(&json!({
            "step_s_median": median, "step_s_min": min, "step_s": steps, "tokens_per_s": tokens_per_s,
            "flops_per_step": planned.plan.flops_per_step(), "flops_per_s": flops / median,
            "peak_flops_per_s": peak, "resident_bytes_peak": resident,
            "resident_bytes_peak_by_rank": ranks.iter().map(|r| r.resident_bytes_peak).collect::<Vec<_>>(),
            "arena_bytes": arena, "losses": ranks[0].losses, "collective_bytes_per_step": sent,
            "exposed_s": exposed, "ranks": ranks.len(), "threads": planned.plan.spec.threads,
            "zero": planned.plan.spec.stage.number(), "parameters": planned.plan.parameters,
        }));
    }
    let mut table = Table::default();
    let mut row = |label: &str, value: String| table.row([label.to_string(), value]);
    row("step, median", seconds(median));
    row("step, shortest", seconds(min));
    row("tokens/s", count(tokens_per_s));
    row("operations/s", count(flops / median));
    row("share of peak", format!("{:.0}% of {}", 100.0 * flops / median / peak, count(peak)));
    row("sent by all ranks", bytes(sent));
    row("waiting for communication", seconds(exposed));
    row("resident peak of a rank", bytes(resident));
    row("of it planned", bytes(arena));
    let spec = &planned.plan.spec;
    print(&format!(
        "{}: {} parameters, {} of {}, ZeRO-{}, {} tokens a step\n{table}",
        args.config.display(),
        count(planned.plan.parameters as f64),
        plural(spec.world, "rank"),
        plural(spec.threads, "thread"),
        spec.stage.number(),
        spec.tokens_per_step()
    ));
    Ok(())
}
