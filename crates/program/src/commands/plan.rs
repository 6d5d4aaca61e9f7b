//! `phalanx plan`: what every rank will hold, compute and send. Writes nothing.

use anyhow::{Result, bail};
use phalanx_plan::Machine;
use phalanx_train::config::{DeviceKind, Updates};
use serde_json::json;

use crate::arguments::args::PlanArgs;
use crate::commands::asked::Asked;
use crate::commands::{plan_min_devices, plan_programs, plan_search, plan_sweep};
use crate::host::environment::Environment;
use crate::host::{cards, machine, output};
use crate::jobs::machine_profile;
use crate::plans::budgets::Budget;
use crate::plans::data_report::DataReport;
use crate::plans::deepspeed_estimate::Estimate;
use crate::plans::planned::Planned;
use crate::plans::proposals::Replan;
use crate::plans::step_time::StepTime;
use crate::reports::chunk_report::{self, ChunkReport};
use crate::reports::fit::Verdict;
use crate::reports::placement_report::PlacementReport;
use crate::reports::stream_report::Streams;
use crate::reports::{explain_report, plan_report, stream_report};

/// Plans a configuration and prints the plan, whether it fits, and what would make it fit.
///
/// # Errors
/// A configuration that cannot work, missing data.
pub fn plan(args: &PlanArgs, environment: Environment) -> Result<()> {
    check_written(args)?;
    let asked = Asked::new(args, environment)?;
    say_origin(args, &asked)?;
    if args.search.search {
        return plan_search::run(args, &asked);
    }
    if args.search.min_devices {
        return plan_min_devices::run(args, &asked);
    }
    if let Some(sweep) = &args.search.sweep {
        return plan_sweep::run(args, &asked, sweep);
    }
    let (planned, data, device) = asked.planned()?;
    let was_open = asked.given()?.config()?.device.kind == DeviceKind::Auto;
    if planned.config.device.kind == DeviceKind::Cuda && !args.json {
        device.iter().for_each(|line| output::note(line));
    } else if was_open && asked.elsewhere.is_some() && args.machine.is_none() && !args.json {
        output::note("planned for the processor; for GPUs add --set device.kind=cuda, or --machine h100");
    }
    check_updates(args, &planned)?;
    if !args.chunk_program.is_empty() {
        return plan_programs::show(args, &planned);
    }
    let assumed = asked.assumed(&planned)?;
    match args.draw.chunks {
        Some(Some(stages)) => bail!("--chunks {stages}: the number of stages is for --schedule interleaved"),
        Some(None) => return chunks(args, &asked, &planned, assumed, environment),
        None => {}
    }
    let machine = asked.machine(&planned)?;
    let step_time = machine.map(|machine| StepTime::of(&planned, machine));
    let streams = timeline(args, &planned, machine)?;
    let budgets = asked.budgets(&planned);
    let verdict = Verdict::of(&planned, &budgets, &asked);
    let placement = || PlacementReport::new(&planned);
    if args.json {
        let mut figures = plan_report::to_json(&planned);
        figures["data"] = json!(data.as_ref().map(DataReport::to_json));
        figures["placement"] = if args.placement { placement().to_json() } else { json!(null) };
        figures["available_bytes"] = json!(machine::available().map(|available| available.bytes));
        figures["verdict"] = json!(verdict.as_ref().map(Verdict::to_json));
        figures["step_time"] = json!(step_time.as_ref().map(StepTime::to_json));
        figures["assumed"] = json!(assumed);
        if let Some(theirs) = &asked.theirs {
            let estimate = Estimate::of(&planned).map(|estimate| estimate.to_json());
            figures["deepspeed"] = json!({ "translation": theirs.to_json(), "estimate": estimate });
        }
        output::print_json(&figures)?;
    } else {
        let time = step_time.map_or(String::new(), |time| format!("\n{}", time.to_text()));
        let verdict = verdict.map_or(String::new(), |verdict| format!("\n{}", verdict.to_text()));
        let path = args.config.as_deref().map(|path| path.display().to_string());
        let name = path.or_else(|| args.sized.size.clone()).unwrap_or_default();
        let long = match args.placement {
            true => placement().to_text(),
            false => plan_report::long(&planned, &name),
        };
        let assumed = assumed.map_or(String::new(), |line| format!("{line}\n\n"));
        let data = data.map_or(String::new(), |data| format!("{}\n", data.line()));
        let theirs = asked.theirs.as_ref().map_or(String::new(), |_| match Estimate::of(&planned) {
            Some(estimate) => format!("\n{}", estimate.to_text()),
            None => "\nDeepSpeed estimates stages 2 and 3 only.\n".to_string(),
        });
        let explained = if args.search.explain { explain_report::to_text(&planned) } else { String::new() };
        output::print(&format!("{assumed}{data}{long}{explained}{time}{streams}{verdict}{theirs}"))?;
    }
    say_unknown(&budgets, &planned);
    Ok(())
}

/// Refuses files that the command would replace.
fn check_written(args: &PlanArgs) -> Result<()> {
    if let Some(path) = args.search.write.as_deref().filter(|path| path.exists()) {
        bail!("--write {}: the file exists; name another, or remove it", path.display());
    }
    args.search.timeline.iter().flatten().try_for_each(|path| stream_report::check(path))
}

/// The streams of a step, as `--timeline` asks for them: their text, or nothing where a file is written.
fn timeline(args: &PlanArgs, planned: &Planned, machine: Option<&Machine>) -> Result<String> {
    let Some((asked, machine)) = args.search.timeline.as_ref().zip(machine) else { return Ok(String::new()) };
    let streams = Streams::planned(planned, machine)?;
    match asked {
        None => Ok(format!("\n{}", streams.to_text())),
        Some(path) => {
            let name = args.config.as_ref().map(|path| path.display().to_string());
            let name = name.or_else(|| args.sized.size.clone()).unwrap_or_default();
            streams.write(path, &format!("{name} on {}, planned", machine.name))?;
            Ok(String::new())
        }
    }
}

/// Notes that nothing says what memory there is.
fn say_unknown(budgets: &[Budget], planned: &Planned) {
    if budgets.is_empty() && planned.config.device.kind == DeviceKind::Cuda {
        let why = cards::look().err().map_or(String::new(), |error| format!(" ({error})"));
        output::note(&format!(
            "no card was found here{why}: give --device-memory, for example 80GiB, to see whether the ranks fit"
        ));
    } else if budgets.is_empty() && planned.is_for_elsewhere() {
        output::note(&format!(
            "{} ranks are more than one machine runs: give --device-memory, for example 80GiB, to see whether they fit",
            planned.plan.spec.world_size()
        ));
    } else if budgets.is_empty() {
        output::note(
            "the system does not report its memory; give --device-memory to see whether the ranks fit",
        );
    }
}

/// Prints the configuration of `--size`, and what is translated.
fn say_origin(args: &PlanArgs, asked: &Asked) -> Result<()> {
    if let Some(config) = args.sized.config()? {
        output::note(&format!(
            "the configuration of --size, of which --set changes every key:\n{}",
            config.text().trim_end()
        ));
    }
    asked.theirs.iter().for_each(|theirs| output::note(&theirs.to_text()));
    Ok(())
}

/// Refuses what only synchronous updates have.
fn check_updates(args: &PlanArgs, planned: &Planned) -> Result<()> {
    let is_asked = args.machine.is_some()
        || args.draw.chunks.is_some()
        || args.placement
        || !args.chunk_program.is_empty();
    if planned.config.parallel.updates == Updates::Asynchronous && is_asked {
        bail!(
            "--chunks, --placement, --chunk-program and --machine need synchronous updates: leave out parallel.updates"
        );
    }
    Ok(())
}

/// Compares the chunk sizes that the run could have.
fn chunks(
    args: &PlanArgs,
    asked: &Asked,
    planned: &Planned,
    assumed: Option<String>,
    environment: Environment,
) -> Result<()> {
    let all = planned.plan.spec.chunk_alternatives(chunk_report::search(planned))?;
    let machine = match asked.profile() {
        Some(profile) => profile.clone(),
        None => machine_profile::measured(planned, &chunk_report::message_sizes(&all), environment)?,
    };
    let report = ChunkReport::new(planned, &all, &machine);
    if args.json {
        let mut figures = plan_report::to_json(planned);
        figures["chunks"]["compared"] = report.to_json();
        figures["assumed"] = json!(assumed);
        return output::print_json(&figures);
    }
    let assumed = assumed.map_or(String::new(), |line| format!("{line}\n\n"));
    Ok(output::print(&format!("{assumed}{}", report.to_text()))?)
}
