//! `phalanx bench memory`: one model under each placement, and under shrinking budgets of device memory.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use phalanx_bench::memory::{MemoryFigures, MemoryRan, MemoryRun, drawing, report};
use phalanx_models::Model;
use phalanx_plan::trace::Memory;
use phalanx_plan::{Machine, PhaseTime, lanes_of};
use phalanx_train::config::{PlacementPolicy, Updates};
use phalanx_train::{ResolvedConfig, RunConfig};
use serde_json::json;

use crate::arguments::memory_args::BenchMemoryArgs;
use crate::arguments::overrides::Overrides;
use crate::configuration::translation;
use crate::folders::ownership::{begins_with, check_output, is_drawing, refuse_in_run};
use crate::host::environment::Environment;
use crate::host::output::{note, print, print_json};
use crate::host::signals::Signals;
use crate::jobs::launch::RankProcesses;
use crate::jobs::rank_host::RankHost;
use crate::jobs::rank_output::Output;
use crate::jobs::task::{BenchStepTask, Task};
use crate::jobs::{bench, machine_profile};
use crate::plans::estimate::random_tokens;
use crate::plans::planned::Planned;
use crate::plans::resolve::{Purpose, Resolved, resolve};
use phalanx_drawing::report::{bytes, count, plural};

/// Bytes of a unit of the `_mb` keys.
const MIB: f64 = 1_048_576.0;

/// Host memory of `auto` on the processor without a disk, in MiB: as much as it wants.
const ANY_MB: f64 = 1e9;

/// The table, the figures and the drawing of all runs.
const OUTPUTS: [&str; 3] = ["table.md", "memory.json", "budgets.svg"];

/// A placement that is measured, with the share of device memory that `auto` may fill.
type Case = (&'static str, PlacementPolicy, Option<f64>);

/// Measures all placements, prints the table and writes the folder.
///
/// # Errors
/// An invalid configuration, a folder that cannot be written, a signal. A placement that cannot run is not an error.
pub fn bench_memory(args: &BenchMemoryArgs, environment: Environment) -> Result<()> {
    if args.budgets.contains(&0.0) {
        bail!("--budgets 0: expected percentages of the device memory that is needed, such as 100,75,50,25");
    }
    refuse_in_run(&args.out, "--out")?;
    OUTPUTS.into_iter().try_for_each(|name| check_file(&args.out.join(name)))?;
    let signals = Signals::take_over()?;
    let given = translation::read_both(&args.config, &args.overrides)?.0.with(&args.overrides, &[])?;
    let host_budget = given.config()?.memory.host_budget_mb;
    let given = given.with(&any_placement(host_budget), &[])?;
    let (resolved, ()) = resolve(&given, Purpose::Plan, None, random_tokens)?;
    let Resolved { config, model, device, .. } = resolved.with_known_micro()?;
    device.iter().for_each(|line| note(line));
    if config.parallel.updates == Updates::Asynchronous {
        bail!(
            "parallel.updates = \"asynchronous\": everything stays on the device; leave it out to compare placements"
        );
    }
    phalanx_system::files::create_folders(&args.out)
        .with_context(|| format!("cannot make {}; choose another folder with --out", args.out.display()))?;
    let environment = environment.decide(&config.device)?;
    let sweep = Sweep { args, config, host_budget, model, environment, signals };
    let runs = sweep.runs()?;
    sweep.write(&runs)?;
    if args.json {
        let mut figures = report::to_json(&runs);
        figures["config"] = json!(args.config.display().to_string());
        figures["device"] = json!(sweep.config.device.kind.name());
        return print_json(&figures);
    }
    print(&format!("{}\n{}", sweep.heading(), report::to_text(&runs)))?;
    Ok(print(&format!("\ntable and plots: {}\n", args.out.display()))?)
}

struct Sweep<'a> {
    args: &'a BenchMemoryArgs,
    config: ResolvedConfig,
    /// The budget that the user has given, in MiB.
    host_budget: Option<f64>,
    model: Arc<dyn Model>,
    environment: Environment,
    signals: Signals,
}

impl Sweep<'_> {
    fn heading(&self) -> String {
        let planned = &self.config;
        format!(
            "{}: {}, ZeRO-{}, {} after {} of warm-up",
            self.args.config.display(),
            plural(planned.world_size(), "rank"),
            planned.parallel.zero,
            plural(self.args.steps, "timed step"),
            count(self.args.warmup as f64)
        )
    }

    fn runs(&self) -> Result<Vec<MemoryRun>> {
        let on_device = self.planned(PlacementPolicy::Device, None)?;
        let need = on_device.plan.arena_bytes_max();
        let mut rates = machine_profile::measured(&on_device, &[], self.environment)?;
        if let Some(disk) = self.config.disk() {
            machine_profile::measure_disk(&mut rates, &disk, self.config.world_size());
        }
        let mut cases: Vec<Case> =
            vec![("device", PlacementPolicy::Device, None), ("host", PlacementPolicy::Host, None)];
        if self.config.memory.nvme_path.is_some() {
            cases.push(("nvme", PlacementPolicy::Nvme, None));
        } else {
            note("memory.nvme_path is not set: nothing is measured on disk");
        }
        cases.extend(
            self.args.budgets.iter().map(|percent| ("auto", PlacementPolicy::Auto, Some(percent / 100.0))),
        );
        let budget = |share: f64| (share, (share * need as f64) as u64);
        let of_case = |(name, _, share): &Case| MemoryRun {
            placement: name,
            budget: share.map(budget),
            ran: Err(String::new()),
        };
        let mut runs: Vec<MemoryRun> = cases.iter().map(of_case).collect();
        // In turn, so that what else the machine does slows all of them.
        for round in 0..self.args.rounds {
            for (number, (run, (_, placement, _))) in (1..).zip(runs.iter_mut().zip(&cases)) {
                if round > 0 && run.ran.is_err() {
                    continue;
                }
                note(&format!("[{number} of {}, round {}] {}", cases.len(), round + 1, run.name()));
                let planned = self.planned(*placement, run.budget.map(|(_, bytes)| bytes));
                let ran = planned.and_then(|planned| self.run(&planned, &rates));
                if self.signals.came() {
                    bail!("stopped by a signal before everything was measured; nothing was written");
                }
                run.add_round(ran.map_err(|error| format!("{error:#}")));
            }
        }
        Ok(runs)
    }

    /// The plan with a placement; `budget` is that of `auto`.
    fn planned(&self, placement: PlacementPolicy, budget: Option<u64>) -> Result<Planned> {
        let config = self.config.with(|config| place(config, placement, budget, self.host_budget))?;
        Planned::new(config, Arc::clone(&self.model), 0)
    }

    fn run(&self, planned: &Planned, rates: &Machine) -> Result<MemoryRan> {
        crate::reports::fit::check_memory(planned)?;
        let plan = &planned.plan;
        let (config, model) = (planned.config.clone(), plan.spec.model.definition.to_config());
        let task = BenchStepTask { config, model, warmup: self.args.warmup, steps: self.args.steps };
        let ranks = match plan.spec.world_size() {
            1 => vec![bench::memory(&task, planned, &RankHost::Alone, self.environment)?],
            world => {
                let task = Task::BenchMemory(task);
                let processes = RankProcesses::start(world, &task, Some(plan), &Output::Gathered)?;
                let lines = processes.wait(&self.signals)?;
                let parse = |line: &String| serde_json::from_str(line).context("the figures of a rank");
                lines.iter().map(parse).collect::<Result<Vec<MemoryFigures>>>()?
            }
        };
        let times: Option<Vec<PhaseTime>> = plan.step_times(rates);
        let copies = plan.of(0).step.copies.iter().map(|copy| (copy.from, copy.to, copy.bytes)).collect();
        Ok(MemoryRan {
            ranks,
            device_bytes: plan.arena_bytes_max(),
            copies,
            planned_lanes: plan.step_stretches(rates).map(|all| lanes_of(&all[0].1, 0.0)),
            planned_lines: Memory::ALL.map(|memory| plan.live_bytes(0, memory)),
            exposed_s: times.map(|times| times.iter().map(|time| time.exposed_copy_s).fold(0.0, f64::max)),
        })
    }

    fn write(&self, runs: &[MemoryRun]) -> Result<()> {
        let write = |name: &str, content: String| -> Result<()> {
            let path = self.args.out.join(name);
            write_file(&path, content)
        };
        let [table, figures, budgets] = OUTPUTS;
        write(table, report::to_markdown(runs, &self.heading()))?;
        write(figures, format!("{:#}\n", report::to_json(runs)))?;
        write(budgets, drawing::budgets(runs, &self.heading()))?;
        for run in runs {
            if let Ok(ran) = &run.ran {
                let heading =
                    format!("{}: {}, {}", self.args.config.display(), run.name(), bytes(ran.device_bytes));
                write(&format!("timeline-{}.svg", run.file_stem()), drawing::timeline(run, ran, &heading))?;
            }
        }
        Ok(())
    }
}

/// Refuses to replace what this command has not written.
fn check_file(path: &Path) -> Result<()> {
    let beginning = match path.extension().and_then(|ending| ending.to_str()) {
        Some("md") => report::TITLE,
        Some("json") => "{\n  \"runs\": ",
        _ => return check_output(path, "--out", is_drawing),
    };
    check_output(path, "--out", |path| begins_with(path, beginning))
}

fn write_file(path: &Path, content: String) -> Result<()> {
    check_file(path)?;
    phalanx_system::files::write_output(path, content)
        .with_context(|| format!("cannot write {}; choose another folder with --out", path.display()))
}

/// A configuration whose chunks may lie anywhere: what it says of memories is replaced for each run.
fn any_placement(host_budget: Option<f64>) -> Overrides {
    let parts = ["parameters", "gradients", "optimizer"].map(|part| format!("memory.{part}=device"));
    let any = [
        "memory.placement=auto".to_string(),
        format!("memory.host_budget_mb={}", host_budget.unwrap_or(ANY_MB)),
    ];
    Overrides { set: parts.into_iter().chain(any).collect(), ..Overrides::default() }
}

/// Replaces what the configuration says of the placement of chunks.
fn place(config: &mut RunConfig, placement: PlacementPolicy, budget: Option<u64>, host_budget: Option<f64>) {
    let memory = &mut config.memory;
    (memory.shard_param_frac, memory.offload_optim_frac, memory.offload_param_frac) = (None, None, None);
    memory.placement = Some(placement);
    memory.device_budget_mb = budget.map(|bytes| bytes as f64 / MIB);
    config.recorded.decided.clear();
    let memory = &mut config.memory;
    let is_auto = placement == PlacementPolicy::Auto;
    let needs_disk = is_auto || placement == PlacementPolicy::Nvme;
    if !needs_disk {
        (memory.nvme_path, memory.nvme_checksums) = (None, false);
    }
    let nowhere = config.device.kind.is_processor() && memory.nvme_path.is_none();
    let host = host_budget.or(nowhere.then_some(ANY_MB));
    memory.host_budget_mb = host.filter(|_| is_auto);
    memory.headroom = if is_auto { 0.0 } else { memory.headroom };
}
