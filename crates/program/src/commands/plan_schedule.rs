//! `phalanx plan --schedule`: a pipeline schedule as text, as a drawing, and in figures.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use phalanx_drawing::draw_svg;
use phalanx_plan::{Costs, PipelineSchedule, Plan, generate};
use phalanx_train::ResolvedConfig;

use crate::arguments::args::PlanArgs;
use crate::arguments::draw_args::{DrawArgs, scaled_to};
use crate::arguments::overrides::Overrides;
use crate::configuration::{schedule_file, translation};
use crate::folders::ownership::{check_output, is_drawing};
use crate::host::output;
use crate::plans::estimate::estimate_data;
use crate::plans::planned;
use crate::plans::resolve::{Purpose, Resolved, resolve};
use crate::reports::schedule_report::{Drawn, Unit, to_json, to_text};

/// Default number of pipeline ranks and of chunks.
const PIPELINE: usize = 4;
const CHUNKS: usize = 2;

/// Maximum number of cells of a schedule that is drawn: with `model`, a rank has one for each forward of every other
/// rank.
const MAX_CELLS: usize = 1 << 21;

/// Largest number of micro-batches on all stages of a schedule that is drawn: it is compared with all others, some of which take long to make.
const MAX_PARTS: usize = 1 << 15;

/// The default schedule.
const SCHEDULE: &str = "1f1b";

/// Draws a schedule by name or from a file, alone or with the costs of a configuration's stages.
///
/// # Errors
/// An unknown name, a file that cannot be run, sizes for which there is no such schedule; a configuration that
/// cannot work; a file that cannot be written.
pub fn draw(args: &PlanArgs) -> Result<()> {
    let wanted = args.draw.schedule.clone().flatten();
    // `--schedule CONFIG.toml`: the value that belongs to the option is left out.
    let (config, wanted) = match (&args.config, wanted) {
        (None, Some(value)) if value.ends_with(".toml") => (Some(value.into()), None),
        (config, wanted) => (config.clone(), wanted),
    };
    if let Some(path) = &args.draw.svg {
        check_output(path, "--svg", is_drawing)?;
    }
    if let Some(path) = &args.draw.text {
        check_output(path, "--text", schedule_file::is_canonical)?;
    }
    let drawn = match &config {
        Some(path) => of_config(path, args, wanted.as_deref())?,
        None if !args.data.is_empty() => {
            bail!("--data is for a configuration: give one, or leave it out");
        }
        None => alone(&args.draw, &args.overrides, wanted.as_deref().unwrap_or(SCHEDULE))?,
    };
    let svg = || draw_svg(&drawn.schedule, &drawn.timeline);
    let text = || drawn.schedule.to_string();
    for (path, content) in [(&args.draw.svg, &svg as &dyn Fn() -> String), (&args.draw.text, &text)] {
        let Some(path) = path else { continue };
        phalanx_system::files::write_output(path, content())
            .with_context(|| format!("cannot write {}; choose another file", path.display()))?;
    }
    match args.json {
        true => output::print_json(&to_json(&drawn)),
        false => Ok(output::print(&to_text(&drawn))?),
    }
}

/// A schedule without a configuration: every action takes 1.
fn alone(args: &DrawArgs, overrides: &Overrides, wanted: &str) -> Result<Drawn> {
    if !overrides.words().is_empty() {
        bail!(
            "--set, --nproc and --deepspeed change a configuration: give one, or --pipeline, --micro-batches and --chunks"
        );
    }
    let schedule = match wanted.parse::<Plan>() {
        Ok(plan) => {
            let ranks = args.pipeline.unwrap_or(PIPELINE);
            let micro_batches = args.micro_batches.unwrap_or(ranks.saturating_mul(2));
            let plan = plan.with_chunks(args.chunks.flatten().unwrap_or(CHUNKS));
            check_drawn(ranks, micro_batches, plan.chunks())?;
            generate(plan, ranks, micro_batches)?
        }
        Err(_) => {
            let schedule = schedule_file::read(wanted).with_context(|| format!("--schedule {wanted}"))?;
            check_sizes(args, &schedule, wanted)?;
            schedule
        }
    };
    let (ranks, micro_batches) = (schedule.ranks.len(), schedule.micro_batches);
    let chunks = args.chunks.flatten().unwrap_or(CHUNKS);
    let given = args.costs.of(&schedule)?;
    let costs = given.clone().unwrap_or_else(|| Costs::unit(schedule.stages()));
    // Every schedule gives a rank the same work, divided into its number of stages.
    let others = named(|plan| {
        let plan = plan.with_chunks(chunks);
        let drawn = can_be_drawn(ranks, micro_batches, plan.chunks());
        let other = drawn.then(|| generate(plan, ranks, micro_batches).ok())??;
        let costs = scaled_to(&costs, other.stages());
        Some((other, costs))
    });
    let unit = if given.is_some() { Unit::Given } else { Unit::Action };
    Ok(Drawn::new(schedule, costs.clone(), unit, others))
}

/// Refuses a schedule that is too large to be drawn.
fn check_drawn(ranks: usize, micro_batches: usize, chunks: usize) -> Result<()> {
    if can_be_drawn(ranks, micro_batches, chunks) {
        return Ok(());
    }
    bail!(
        "{ranks} ranks x {micro_batches} micro-batches x {chunks} stages per rank are more than can be drawn; give a smaller \
         --pipeline, --micro-batches or --chunks"
    )
}

/// Returns whether a schedule of this size, of any name, has few enough cells to be drawn.
fn can_be_drawn(ranks: usize, micro_batches: usize, chunks: usize) -> bool {
    let is_within = |sizes: &[usize], max: usize| {
        sizes
            .iter()
            .try_fold(1usize, |product, size| product.checked_mul(*size))
            .is_some_and(|product| product <= max)
    };
    is_within(&[ranks, ranks, micro_batches, chunks], MAX_CELLS)
        && is_within(&[ranks, micro_batches, chunks], MAX_PARTS)
}

/// Refuses sizes that differ from those of the file.
fn check_sizes(args: &DrawArgs, schedule: &PipelineSchedule, file: &str) -> Result<()> {
    for (option, given, has, what) in [
        ("--pipeline", args.pipeline, schedule.ranks.len(), "ranks"),
        ("--micro-batches", args.micro_batches, schedule.micro_batches, "micro-batches"),
    ] {
        if let Some(given) = given.filter(|given| *given != has) {
            bail!("{option} {given}: the schedule file {file} has {has} {what}; leave {option} out");
        }
    }
    Ok(())
}

/// The schedule of a configuration, or `wanted` on its mesh. Stages cost their number of operations.
fn of_config(path: &Path, args: &PlanArgs, wanted: Option<&str>) -> Result<Drawn> {
    let mut overrides = args.overrides.clone();
    let number = |option: Option<usize>| option.map(|number| number.to_string());
    for (key, value) in [
        ("parallel.schedule", wanted.map(String::from)),
        ("parallel.pipeline", number(args.draw.pipeline)),
        ("parallel.micro_batches", number(args.draw.micro_batches)),
        ("parallel.chunks", number(args.draw.chunks.flatten())),
    ] {
        overrides.set.extend(value.map(|value| format!("{key}={value}")));
    }
    let given = translation::read_both(path, &args.overrides)?.0.with(&overrides, &args.data)?;
    let (resolved, _) = resolve(&given, Purpose::Plan, None, estimate_data)?;
    let Resolved { config, model, .. } = resolved.with_known_micro()?;
    let (ranks, micro_batches) = (config.parallel.pipeline, config.micro_batches());
    let chunks = |plan: Plan| plan.with_chunks(config.parallel.chunks).chunks();
    // A schedule of a file has as many cells as its text.
    config
        .parallel
        .schedule
        .parse()
        .map_or(Ok(()), |plan| check_drawn(ranks, micro_batches, chunks(plan)))?;
    let named = |make: &dyn Fn(Plan) -> Option<(PipelineSchedule, Costs)>| {
        named(|plan| can_be_drawn(ranks, micro_batches, chunks(plan)).then(|| make(plan))?)
    };
    let costed = |config: &ResolvedConfig| -> Result<(PipelineSchedule, Costs)> {
        let spec = planned::spec(config, Arc::clone(&model), 0)?;
        let costs = Costs { stages: spec.stage_costs(), message: 0.0 };
        Ok(((*spec.pipeline.schedule).clone(), costs))
    };
    let (schedule, costs) = costed(&config)?;
    if let Some(given) = args.draw.costs.of(&schedule)? {
        let others = named(&|plan| {
            let config = config.with(|config| config.parallel.schedule = plan.name().to_string()).ok()?;
            let other = config.schedule().ok()?;
            let costs = scaled_to(&given, other.stages());
            Some((other, costs))
        });
        return Ok(Drawn::new(schedule, given, Unit::Given, others));
    }
    let others = named(&|plan| {
        costed(&config.with(|config| config.parallel.schedule = plan.name().to_string()).ok()?).ok()
    });
    Ok(Drawn::new(schedule, costs, Unit::Operations, others))
}

/// The named schedules that exist for these sizes.
fn named(make: impl Fn(Plan) -> Option<(PipelineSchedule, Costs)>) -> Vec<(PipelineSchedule, Costs)> {
    Plan::NAMES.into_iter().filter_map(|name| make(name.parse().ok()?)).collect()
}
