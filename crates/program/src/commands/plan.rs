//! `phalanx plan`: what every rank will hold, compute and send. Writes nothing.

use anyhow::{Context, Result, bail};
use phalanx_train::RunPlan;
use phalanx_train::config::{DeviceKind, Placement, Updates};
use serde_json::json;

use crate::args::PlanArgs;
use crate::chunk_report::{self, ChunkReport};
use crate::data_report::DataReport;
use crate::environment::Environment;
use crate::fit::{self, Verdict};
use crate::placement_report::PlacementReport;
use crate::planned::{Planned, with_kernels};
use crate::resolve::{Estimate, Purpose, estimate_data, resolve};
use crate::step_time::StepTime;
use crate::user_config::UserConfig;
use crate::{cards, kept_budget, machine, machine_profile, output, placement_budget, plan_report};

/// Plans a configuration and prints the plan, whether it fits, and what would make it fit.
///
/// # Errors
/// A configuration that cannot work, missing data.
pub fn plan(args: &PlanArgs, environment: Environment) -> Result<()> {
    let path = args.config.as_deref().context("give a configuration (TOML), as examples/quickstart.toml")?;
    let given = UserConfig::read(path)?.with(&args.overrides, &args.data)?;
    let (mut resolved, Estimate { evaluated, data, notes }) =
        resolve(&given, Purpose::Plan, None, estimate_data)?;
    if !args.json {
        notes.iter().for_each(|line| output::note(line));
    }
    if let (Some(Placement::Auto), Some(bytes)) = (resolved.config.memory.placement, args.device_memory) {
        resolved.config = resolved.config.with(|config| placement_budget::set_device(config, bytes))?;
    }
    resolved.config = with_kernels(resolved.config, environment)?;
    let device = resolved.device.take();
    let planned = Planned::to_show(resolved, evaluated)?;
    let budgets = |planned: &Planned| {
        fit::budget_for_plan(planned, args.device_memory).ok().flatten().into_iter().collect()
    };
    let planned = kept_budget::keep(planned, budgets, RunPlan::without_offsets)?;
    let for_device =
        args.device_memory.is_some() || args.machine.as_deref().is_some_and(|name| name != "here");
    let was_open = given.config()?.device.kind == DeviceKind::Auto;
    if planned.config.device.kind == DeviceKind::Cuda && !args.json {
        device.iter().for_each(|line| output::note(line));
    } else if was_open && for_device && !args.json {
        output::note("planned for the processor; for GPUs add --set device.kind=cuda");
    }
    if planned.config.parallel.updates == Updates::Asynchronous
        && (args.machine.is_some() || args.draw.chunks.is_some() || args.placement)
    {
        bail!("--chunks, --placement and --machine need synchronous updates: leave out parallel.updates");
    }
    match args.draw.chunks {
        Some(Some(stages)) => bail!("--chunks {stages}: the number of stages is for --schedule interleaved"),
        Some(None) => return chunks(args, &planned, environment),
        None => {}
    }
    let step_time = match &args.machine {
        Some(name) => Some(StepTime::of(&planned, &machine_profile::load(name, &planned, &[], environment)?)),
        None => None,
    };
    let budget = fit::budget_for_plan(&planned, args.device_memory)?;
    let verdict = budget.as_ref().map(|budget| Verdict::of(&planned, budget));
    let placement = || PlacementReport::new(&planned);
    if args.json {
        let mut figures = plan_report::to_json(&planned);
        figures["data"] = json!(data.as_ref().map(DataReport::to_json));
        figures["notes"] = json!(notes);
        figures["placement"] = if args.placement { placement().to_json() } else { json!(null) };
        figures["available_bytes"] = json!(machine::available().map(|available| available.bytes));
        figures["verdict"] = json!(verdict.as_ref().map(Verdict::to_json));
        figures["step_time"] = json!(step_time.as_ref().map(StepTime::to_json));
        output::print_json(&figures)?;
    } else {
        let time = step_time.map_or(String::new(), |time| format!("\n{}", time.to_text()));
        let verdict = verdict.map_or(String::new(), |verdict| format!("\n{}", verdict.to_text()));
        let long = match args.placement {
            true => placement().to_text(),
            false => plan_report::long(&planned, &path.display().to_string()),
        };
        let data = data.map_or(String::new(), |data| format!("{}\n", data.line()));
        output::print(&format!("{data}{long}{time}{verdict}"))?;
    }
    if budget.is_none() && planned.config.device.kind == DeviceKind::Cuda {
        let why = cards::look().err().map_or(String::new(), |error| format!(" ({error})"));
        output::note(&format!(
            "no card was found here{why}: give --device-memory, for example 80GiB, to see whether the ranks fit"
        ));
    } else if budget.is_none() {
        output::note(&format!(
            "{} ranks are more than one machine runs: give --device-memory, for example 80GiB, to see whether they fit",
            planned.plan.spec.world_size()
        ));
    }
    Ok(())
}

/// Compares the chunk sizes that the run could have.
fn chunks(args: &PlanArgs, planned: &Planned, environment: Environment) -> Result<()> {
    let all = planned.plan.spec.chunk_alternatives(chunk_report::search(planned))?;
    let name = args.machine.as_deref().unwrap_or("here");
    let machine = machine_profile::load(name, planned, &chunk_report::message_sizes(&all), environment)?;
    let report = ChunkReport::new(planned, &all, &machine);
    match args.json {
        true => {
            let mut figures = plan_report::to_json(planned);
            figures["chunks"]["compared"] = report.to_json();
            output::print_json(&figures)
        }
        false => Ok(output::print(&report.to_text())?),
    }
}
