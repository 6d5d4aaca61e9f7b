//! `phalanx bench strategies`: one model under each strategy of parallelism, compared.

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use phalanx_bench::baselines::data_parallel::DataParallelPlan;
use phalanx_bench::steps::StepCounts;
use phalanx_bench::strategies::agreement::{Agreement, Rounding, agreement};
use phalanx_bench::strategies::classic::{self, Classic};
use phalanx_bench::strategies::drawing::draw_svg;
use phalanx_bench::strategies::run::{Bench, Launcher, StrategyRun};
use phalanx_bench::strategies::strategy::Strategy;
use phalanx_bench::strategies::{RankFigures, report};
use phalanx_collectives::Isa;
use phalanx_models::Model;
use phalanx_train::config::DeviceKind;
use phalanx_train::{ResolvedConfig, RunConfig, Spec};
use serde_json::{Value, json};

use crate::arguments::overrides::Overrides;
use crate::arguments::strategies_args::BenchStrategiesArgs;
use crate::configuration::user_config::UserConfig;
use crate::folders::ownership::{check_output, is_drawing};
use crate::host::environment::Environment;
use crate::host::machine;
use crate::host::output::{note, print, print_json, terminal_width};
use crate::host::signals::Signals;
use crate::jobs::bench;
use crate::jobs::launch::RankProcesses;
use crate::jobs::rank_host::RankHost;
use crate::jobs::rank_output::Output;
use crate::jobs::task::{BenchStepTask, Task};
use crate::plans::estimate::random_tokens;
use crate::plans::planned::{self, Planned};
use crate::plans::resolve::{Initial, Purpose, Resolved, Vocabulary, resolve};
use phalanx_drawing::report::{bytes, count, plural};

/// Default number of steps of the classic comparison.
const BERT_STEPS: usize = 250;

/// Width of a line if there is no terminal.
const LINE: usize = 110;

/// Runs every strategy, then the classic comparison, and shows both.
///
/// # Errors
/// An invalid configuration, an unknown strategy, a file that cannot be written, a signal. A strategy that cannot run
/// is not an error.
pub fn bench_strategies(args: &BenchStrategiesArgs, environment: Environment) -> Result<()> {
    check(args)?;
    let strategies = Strategy::named(&args.only)?;
    let signals = Signals::take_over()?;
    let given = given(args)?;
    let environment = environment.decide(&given.config()?.device)?;
    let processes = Processes { environment, signals: &signals };
    let bench = bench_of(args, &given, &processes)?;
    let bert_steps = args.bert_steps.unwrap_or(if args.only.is_empty() { BERT_STEPS } else { 0 });
    let mut rows = Vec::new();
    for (number, strategy) in (1..).zip(&strategies) {
        note(&format!("[{number} of {}] {}", strategies.len(), strategy.name()));
        rows.push(bench.row(*strategy)?);
    }
    let found = compare(&bench, &rows)?;
    let mut progress = |name: &str| note(&format!("[BERT] {name}: {}", plural(bert_steps, "step")));
    let classic = match bert_steps {
        0 => None,
        steps => Some(classic::compare(classic_model()?, steps, bench.threads, &processes, &mut progress)?),
    };
    show(args, &bench, &rows, &found, classic.as_ref())
}

/// Compares the gradients and losses of the synchronous strategies, with one more run in another precision. The inner
/// error is the reason why there is nothing to compare.
fn compare(bench: &Bench, rows: &[StrategyRun]) -> Result<Result<Agreement, String>> {
    let mut ran = rows.iter().filter(|row| row.strategy.is_synchronous() && row.ran.is_ok());
    let (Some(reference), Some(_)) = (ran.next(), ran.next()) else {
        return Ok(Err("fewer than two synchronous strategies ran".to_string()));
    };
    note(&format!("[rounding] {} in another precision", reference.strategy.name()));
    let other_precision = bench.in_other_precision(reference.strategy)?;
    let config = Strategy::OneDevice.configure(&bench.config, bench.ranks, bench.threads);
    let spec = planned::spec(&config, Arc::clone(&bench.model), 0)?;
    let names: Vec<String> =
        spec.model.whole().parameters.into_iter().map(|parameter| parameter.name).collect();
    Ok(agreement(rows, &other_precision, Rounding::of(&spec), &names))
}

/// Refuses arguments that leave nothing to compare.
fn check(args: &BenchStrategiesArgs) -> Result<()> {
    if args.nproc < 2 {
        bail!("--nproc {}: strategies of parallelism differ on 2 ranks or more", args.nproc);
    }
    args.svg.as_ref().map_or(Ok(()), |path| check_output(path, "--svg", is_drawing))
}

/// Computes on the processor where the device is not said: the strategies that are compared with do.
fn on_processor(given: UserConfig) -> Result<UserConfig> {
    if given.config()?.device.kind != DeviceKind::Auto {
        return Ok(given);
    }
    given.with(&Overrides { set: vec!["device.kind=cpu".to_string()], ..Overrides::default() }, &[])
}

/// The configuration that the user gave.
fn given(args: &BenchStrategiesArgs) -> Result<UserConfig> {
    let overrides = Overrides { set: args.set.clone(), ..Overrides::default() };
    on_processor(UserConfig::read(&args.config)?.with(&overrides, &[])?)
}

/// The model and the settings that all strategies share.
fn bench_of<'a>(
    args: &BenchStrategiesArgs,
    given: &UserConfig,
    launcher: &'a Processes<'a>,
) -> Result<Bench<'a>> {
    let (resolved, ()) = resolve(given, Purpose::Plan, None, random_tokens)?;
    let Resolved { config, model, device, .. } = resolved.with_known_micro()?;
    device.iter().for_each(|line| note(line));
    if config.memory.gradients_in_place {
        bail!(
            "memory.gradients_in_place = true: the gradients by which strategies are compared are gone after a step; leave it out"
        );
    }
    if !(config.model.trainable.is_empty() && config.model.frozen.is_empty()) {
        bail!(
            "model.trainable and model.frozen: some of the strategies train all parameters; leave both out"
        );
    }
    if config.lora.rank.is_some() {
        bail!("lora.rank: some of the strategies train all parameters; leave it out");
    }
    if config.memory.update_in_backward {
        bail!(
            "memory.update_in_backward = true: the gradients by which strategies are compared are gone after a step; leave it out"
        );
    }
    if config.memory.delayed_update {
        bail!("memory.delayed_update changes the result by which strategies are compared: leave it out");
    }
    let ranks = args.nproc;
    let threads = config.train.threads.map_or(machine::cores().max(ranks), |each| each * ranks);
    let (warmup, steps) = (args.warmup, args.steps);
    Ok(Bench { config, model, ranks, threads, warmup, steps, launcher })
}

/// The model of the classic comparison.
fn classic_model() -> Result<(ResolvedConfig, Arc<dyn Model>)> {
    let given = on_processor(UserConfig::parse(classic::CONFIG.to_string(), "examples/bert_classic.toml")?)?;
    let ids = classic::VOCABULARY;
    let vocabulary = |_: &RunConfig, _: Initial| Ok((Vocabulary { ids, ..Vocabulary::unknown("bytes") }, ()));
    let (Resolved { config, model, .. }, ()) = resolve(&given, Purpose::Plan, None, vocabulary)?;
    Ok((config, model))
}

/// Ranks as processes of this machine.
struct Processes<'a> {
    environment: Environment,
    signals: &'a Signals,
}

impl Launcher for Processes<'_> {
    fn isa(&self) -> Isa {
        self.environment.isa()
    }

    fn measure(
        &self,
        config: RunConfig,
        model: Arc<dyn Model>,
        counts: StepCounts,
    ) -> Result<(Spec, Vec<RankFigures>)> {
        let mut config = config;
        config.device.kernels = self.environment.kernels().into();
        let planned = Planned::new(ResolvedConfig::new(config)?, model, 0)?;
        crate::reports::fit::check_memory(&planned)?;
        let spec = planned.plan.spec.clone();
        let StepCounts { warmup, steps, .. } = counts;
        let (config, model) = (planned.config.clone(), spec.model.definition.to_config());
        let task = BenchStepTask { config, model, warmup, steps };
        let ranks = match spec.world_size() {
            1 => vec![bench::strategy(&task, &planned, &RankHost::Alone, self.environment)?],
            world => {
                let task = Task::BenchStrategy(task);
                let processes = RankProcesses::start(world, &task, Some(&planned.plan), &Output::Gathered)?;
                let lines = processes.wait(self.signals)?;
                let parse = |line: &String| serde_json::from_str(line).context("the figures of a rank");
                lines.iter().map(parse).collect::<Result<Vec<RankFigures>>>()?
            }
        };
        Ok((spec, ranks))
    }

    fn check_memory(&self, plan: &DataParallelPlan) -> Result<()> {
        let outside = planned::outside_bytes(&plan.spec.batch, &plan.spec.device, 0);
        let needed: u64 = plan.memory.iter().map(|memory| memory.arena_bytes + outside).sum();
        if let Some(available) = machine::available().filter(|available| needed > available.bytes) {
            bail!(
                "{} devices need {needed} bytes ({}), and {available}; make the model, model.seq or the batch smaller",
                plan.devices(),
                bytes(needed)
            );
        }
        Ok(())
    }

    fn check_signals(&self) -> Result<()> {
        if self.signals.came() {
            bail!("stopped by a signal before everything was measured; nothing was written");
        }
        Ok(())
    }
}

fn show(
    args: &BenchStrategiesArgs,
    bench: &Bench,
    rows: &[StrategyRun],
    found: &Result<Agreement, String>,
    classic: Option<&Classic>,
) -> Result<()> {
    let config = Strategy::OneDevice.configure(&bench.config, bench.ranks, bench.threads);
    let spec = planned::spec(&config, Arc::clone(&bench.model), 0)?;
    let heading = format!(
        "{}: {} parameters, {} tokens a step, {} in all",
        args.config.display(),
        count(spec.model.whole().elements() as f64),
        spec.tokens_per_step(),
        plural(bench.threads, "thread")
    );
    if let Some(path) = &args.svg {
        phalanx_system::files::write_output(path, draw_svg(rows, &heading))
            .with_context(|| format!("cannot write {}; choose another file", path.display()))?;
    }
    if args.json {
        return print_json(&to_json(args, bench, rows, found, classic));
    }
    let width = terminal_width().unwrap_or(LINE);
    let timed = plural(bench.steps, "step");
    print(&format!("{heading}; {timed} after {} of warm-up\n", bench.warmup))?;
    print(&report::to_text(rows, found, width))?;
    if let Some(classic) = classic {
        print(&format!("\n{}", classic::to_text(classic)))?;
    }
    Ok(())
}

fn to_json(
    args: &BenchStrategiesArgs,
    bench: &Bench,
    rows: &[StrategyRun],
    found: &Result<Agreement, String>,
    classic: Option<&Classic>,
) -> Value {
    let mut figures = report::to_json(rows, found);
    figures["config"] = json!(args.config.display().to_string());
    figures["device"] = json!(bench.config.device.kind.name());
    figures["nproc"] = json!(bench.ranks);
    figures["threads"] = json!(bench.threads);
    figures["steps"] = json!(bench.steps);
    figures["warmup"] = json!(bench.warmup);
    figures["classic"] = json!(classic.map(classic::to_json));
    figures
}
