//! `phalanx bench strategies`: one model under each way of parallelism, compared.

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::args::Overrides;
use crate::environment::Environment;
use crate::machine;
use crate::output::{note, print, print_json, terminal_width};
use crate::planned;
use crate::report::{count, plural};
use crate::resolve::{Purpose, Resolved, random_tokens, resolve};
use crate::signals::Signals;
use crate::strategies::args::BenchStrategiesArgs;
use crate::strategies::classic::{self, Classic};
use crate::strategies::compared::{Agreement, agreement, tolerance};
use crate::strategies::drawing::draw_svg;
use crate::strategies::report;
use crate::strategies::run::{Bench, Row};
use crate::strategies::way::Way;
use crate::user_config::UserConfig;

/// Steps of the classic comparison where nobody says how many.
const BERT_STEPS: usize = 250;

/// Letters of a line where there is no terminal.
const LINE: usize = 110;

/// Runs every way, then the classic comparison, and shows both.
///
/// # Errors
/// A configuration of no model, an unknown way, a file that cannot be written, a signal. A way that cannot run is
/// none.
pub fn bench_strategies(args: &BenchStrategiesArgs, environment: Environment) -> Result<()> {
    check(args)?;
    let ways = Way::named(&args.only)?;
    let signals = Signals::take_over()?;
    let bench = bench(args, environment, &signals)?;
    let bert_steps = args.bert_steps.unwrap_or(if args.only.is_empty() { BERT_STEPS } else { 0 });
    let mut rows = Vec::new();
    for (number, way) in (1..).zip(&ways) {
        note(&format!("[{number} of {}] {}", ways.len(), way.name()));
        rows.push(bench.row(*way)?);
    }
    let mut progress = |name: &str| note(&format!("[BERT] {name}: {}", plural(bert_steps, "step")));
    let classic = match bert_steps {
        0 => None,
        steps => Some(classic::compare(steps, bench.threads, environment, &signals, &mut progress)?),
    };
    show(args, &bench, &rows, classic.as_ref())
}

/// Refuses what leaves nothing to compare.
fn check(args: &BenchStrategiesArgs) -> Result<()> {
    if args.steps == 0 {
        bail!("--steps 0: there is nothing to measure; give at least 1");
    }
    if args.nproc < 2 {
        bail!("--nproc {}: ways of parallelism differ on 2 ranks or more", args.nproc);
    }
    Ok(())
}

/// The model, and what every way has in common.
fn bench<'a>(
    args: &BenchStrategiesArgs,
    environment: Environment,
    signals: &'a Signals,
) -> Result<Bench<'a>> {
    let overrides = Overrides { set: args.set.clone(), nproc: None };
    let given = UserConfig::read(&args.config)?.with(&overrides, &[])?;
    let (Resolved { config, model, .. }, ()) = resolve(&given, Purpose::Plan, None, random_tokens)?;
    let ranks = args.nproc;
    let threads = config.train.threads.map_or(machine::cores().max(ranks), |each| each * ranks);
    let (warmup, steps) = (args.warmup, args.steps);
    Ok(Bench { config, model, ranks, threads, warmup, steps, environment, signals })
}

fn show(args: &BenchStrategiesArgs, bench: &Bench, rows: &[Row], classic: Option<&Classic>) -> Result<()> {
    let config = Way::OneDevice.configure(&bench.config, bench.ranks, bench.threads);
    let spec = planned::spec(&config, Arc::clone(&bench.model), 0)?;
    let found = agreement(rows, tolerance(&spec, bench.warmup + bench.steps));
    let heading = format!(
        "{}: {} parameters, {} tokens a step, {} in all",
        args.config.display(),
        count(spec.whole().elements() as f64),
        spec.tokens_per_step(),
        plural(bench.threads, "thread")
    );
    if let Some(path) = &args.svg {
        phalanx_files::write_output(path, draw_svg(rows, &heading))
            .with_context(|| format!("cannot write {}; choose another file", path.display()))?;
    }
    if args.json {
        return print_json(&to_json(args, bench, rows, found.as_ref(), classic));
    }
    let width = terminal_width().unwrap_or(LINE);
    let timed = plural(bench.steps, "step");
    print(&format!("{heading}; {timed} after {} of warm-up\n", bench.warmup))?;
    print(&report::to_text(rows, found.as_ref(), width))?;
    if let Some(classic) = classic {
        print(&format!("\n{}", classic::to_text(classic)))?;
    }
    Ok(())
}

fn to_json(
    args: &BenchStrategiesArgs,
    bench: &Bench,
    rows: &[Row],
    found: Option<&Agreement>,
    classic: Option<&Classic>,
) -> Value {
    let mut figures = report::to_json(rows, found);
    figures["config"] = json!(args.config.display().to_string());
    figures["nproc"] = json!(bench.ranks);
    figures["threads"] = json!(bench.threads);
    figures["steps"] = json!(bench.steps);
    figures["warmup"] = json!(bench.warmup);
    figures["classic"] = json!(classic.map(classic::to_json));
    figures
}
