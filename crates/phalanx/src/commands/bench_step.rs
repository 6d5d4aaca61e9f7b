//! `phalanx bench step`: how long a step takes, on random tokens, with the ranks of a training run.

use anyhow::{Context, Result, bail};
use phalanx_bench::steps::StepFigures;
use phalanx_bench::steps_report::StepReport;
use phalanx_train::config::Updates;

use crate::args::BenchStepArgs;
use crate::bench;
use crate::config::Given;
use crate::environment::Environment;
use crate::launch::{Crew, Output};
use crate::mesh_report;
use crate::output::{print, print_json};
use crate::planned::{Planned, estimate_data};
use crate::seat::Seat;
use crate::shape;
use crate::signals::Signals;
use crate::task::{BenchStepTask, Task};

/// Measures and prints.
///
/// # Errors
/// A configuration that cannot work or does not fit, a rank that died.
pub fn bench_step(args: &BenchStepArgs, environment: Environment) -> Result<()> {
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
        None => estimate_data(&mut config)?.0,
    };
    let model = shape::complete(&mut config, imported.as_ref().map(|i| &i.model), &vocabulary)?;
    let planned = Planned::new(config, model, 0)?;
    if planned.config.parallel.updates == Updates::Asynchronous {
        bail!(
            "parallel.updates = \"asynchronous\": ranks have no step in common to time; `phalanx train` tells each one's, \
             and `phalanx bench strategies` compares"
        );
    }
    planned.check_memory()?;
    let task = BenchStepTask {
        config: planned.config.clone(),
        model: planned.plan.spec.model.to_config(),
        warmup: args.warmup,
        steps: args.steps,
    };
    let world = planned.plan.spec.world_size();
    let ranks = match world {
        1 => vec![bench::steps(&task, &planned, &Seat::Alone, environment)?],
        _ => {
            let crew = Crew::start(world, &Task::BenchStep(task), Some(&planned.plan), &Output::Gathered)?;
            let lines = crew.wait(&signals)?;
            let parse = |line: &String| serde_json::from_str(line).context("the figures of a rank");
            lines.iter().map(parse).collect::<Result<Vec<StepFigures>>>()?
        }
    };
    show(args, &planned, &ranks)
}

fn show(args: &BenchStepArgs, planned: &Planned, ranks: &[StepFigures]) -> Result<()> {
    let report = StepReport::new(&planned.plan, ranks, args.warmup);
    match args.json {
        true => print_json(&report.to_json()),
        false => {
            let headline = args.config.display();
            let axes = mesh_report::axes_in_brackets(&planned.plan.spec);
            Ok(print(&format!("{headline}: {}", report.to_text(&axes)))?)
        }
    }
}
