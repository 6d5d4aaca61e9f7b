//! `phalanx train`: from a configuration to a run folder with a trained model.

use std::process::ExitCode;

use anyhow::{Result, bail};
use phalanx_collectives::threads;
use phalanx_data::{TokenFile, Tokenizer};
use phalanx_tensor::cpu::peak;
use phalanx_train::dataset::{self, Prepared, TOKENS_FILE};
use phalanx_train::run::Job;
use phalanx_train::{Dataset, RunConfig};

use crate::args::TrainArgs;
use crate::config::Given;
use crate::environment::Environment;
use crate::launch::{Crew, Failure, Output};
use crate::planned::Planned;
use crate::resume::Resumed;
use crate::run_folder::RunFolder;
use crate::seat::Seat;
use crate::shape::{Imported, Vocabulary};
use crate::signals::{STOPPED, Signals};
use crate::task::{Show, Task, TrainTask};
use crate::{ending, machine, plan_report, report, resume, shape, tokenizing, training};

/// Plans and trains.
///
/// # Errors
/// Everything that a user can get wrong, and what can fail on the way; checkpoints that were committed
/// stay.
pub fn train(args: &TrainArgs, environment: Environment) -> Result<ExitCode> {
    let signals = Signals::take_over()?;
    let file = args.config.as_deref().map(Given::read).transpose()?;
    let folder = RunFolder::named(args.run.as_deref(), args.config.as_deref())?;
    let started = match args.resume {
        true => resume::resume(&folder, args, file.clone())?,
        false => start(&folder, args, file.clone())?,
    };
    let (task, planned) = prepare(&folder, &started, file.as_ref(), args.show(), environment)?;
    if args.show() == Show::Progress {
        started.notes.iter().for_each(|note| eprintln!("{note}"));
        report::print(&plan_report::short(&planned, &folder.path().display().to_string()));
    }
    if started
        .checkpoint
        .as_ref()
        .is_some_and(|(checkpoint, _)| checkpoint.step() >= planned.config.train.steps)
    {
        let steps = planned.config.train.steps;
        eprintln!("all {steps} steps are done; to go on, give more: --set train.steps={}", 2 * steps);
        return Ok(ExitCode::SUCCESS);
    }
    if let Err(error) = run_ranks(&task, &planned, environment, args.threads_as_ranks, &signals) {
        if error.downcast_ref::<Failure>().is_some_and(|failure| failure.interrupted) {
            eprintln!("stopped before the ranks had started; go on with: {}", resume::command(&folder));
            return Ok(ExitCode::from(STOPPED));
        }
        return Err(explain(error, &folder));
    }
    finish(&folder, &planned, args.show(), environment)
}

/// A run from its beginning.
fn start(folder: &RunFolder, args: &TrainArgs, file: Option<Given>) -> Result<Resumed> {
    let Some(file) = file else { bail!("give a configuration (TOML), as examples/quickstart.toml") };
    let given = file.with(&args.overrides, &args.data)?;
    folder.refuse_results()?;
    Ok(Resumed { given, checkpoint: None, same_data: false, notes: Vec::new() })
}

/// Checks the configuration, makes the run folder with its tokens, and plans. A start that fails leaves
/// no folder that was not there before.
fn prepare(
    folder: &RunFolder,
    started: &Resumed,
    file: Option<&Given>,
    show: Show,
    environment: Environment,
) -> Result<(TrainTask, Planned)> {
    let mut config = started.given.config()?;
    let imported = shape::fill_from_init(&mut config, &started.given)?;
    config.check()?;
    config.data.tokens = config.data.tokens.as_deref().map(resume::absolute);
    config.model.init = config.model.init.as_deref().map(resume::absolute);
    let ranks = config.world();
    config.train.threads.get_or_insert_with(|| machine::threads_per_rank(ranks));
    let is_new = folder.create()?;
    let planned = plan_in(folder, started, &mut config, imported.as_ref(), show).and_then(|planned| {
        folder.write_config(&planned.config, file)?;
        folder.write_plan(&plan_report::to_json(&planned))?;
        Ok(planned)
    });
    if planned.is_err() && is_new {
        // The error is what matters; a folder that stays is in nobody's way.
        let _ = std::fs::remove_dir_all(folder.path());
    }
    let planned = planned?;
    let task = TrainTask {
        config: planned.config.clone(),
        model: planned.plan.spec.model.to_config(),
        run: folder.path().to_path_buf(),
        import: imported.map(|imported| imported.dir),
        resume: started.checkpoint.as_ref().map(|(checkpoint, _)| checkpoint.dir().to_path_buf()),
        show,
        peak_flops_per_s: peak_flops_per_s(&planned, environment)?,
    };
    Ok((task, planned))
}

/// Tokens, then the model, then the plan, which must fit.
fn plan_in(
    folder: &RunFolder,
    started: &Resumed,
    config: &mut RunConfig,
    imported: Option<&Imported>,
    show: Show,
) -> Result<Planned> {
    let prepared = match started.same_data && folder.has_tokens() {
        true => stored_tokens(folder)?,
        false => tokenizing::with_progress(show != Show::Progress, |progress| {
            dataset::prepare(&config.data, folder.path(), machine::cores(), progress)
        })?,
    };
    let origin = match (&prepared.tokenizer, &config.data.tokens) {
        (Some(tokenizer), _) => format!("the tokenizer {}", tokenizer.describe()),
        (None, Some(file)) => file.clone(),
        (None, None) => "the data".to_string(),
    };
    let fixed =
        started.checkpoint.as_ref().map(|(_, model)| model).or(imported.map(|imported| &imported.model));
    let vocabulary = Vocabulary::of(config, prepared.tokenizer.as_ref(), prepared.vocab, origin);
    let model = shape::complete(config, fixed, &vocabulary)?;
    let data = Dataset::open_checked(config, folder.path(), model.shape().vocab)?;
    let planned = Planned::new(config.clone(), model, data.evaluated())?;
    planned.check_memory()?;
    Ok(planned)
}

/// The tokens that the run was started with.
fn stored_tokens(folder: &RunFolder) -> Result<Prepared> {
    let file = TokenFile::open(&folder.file(TOKENS_FILE))?;
    let tokenizer = Tokenizer::load(folder.path())?;
    Ok(Prepared { tokens: file.len() as u64, vocab: tokenizer.vocab_size(), tokenizer: Some(tokenizer) })
}

/// What the threads of all ranks are capable of together; the cores, where they have to share them.
fn peak_flops_per_s(planned: &Planned, environment: Environment) -> Result<f64> {
    let spec = &planned.plan.spec;
    let threads = (spec.world() * spec.threads).min(machine::cores());
    Ok(peak::flops_per_s(&*environment.cpu(threads)?, planned.compute()))
}

/// Trains: one rank here, several as processes (or, for tests, as threads).
fn run_ranks(
    task: &TrainTask,
    planned: &Planned,
    environment: Environment,
    as_threads: bool,
    signals: &Signals,
) -> Result<()> {
    let world = planned.plan.spec.world();
    if world == 1 {
        let job = training::job(task, 0)?;
        signals.training_starts();
        return training::rank(&job, &Seat::Alone, environment, signals.stop(), task.show);
    }
    signals.training_starts();
    if as_threads {
        return run_threads(&training::job(task, 0)?, environment, signals, task.show);
    }
    let crew = Crew::start(world, &Task::Train(task.clone()), Output::Shown)?;
    crew.wait(signals)?;
    Ok(())
}

/// Ranks as threads. The first error that is not another rank's is the one to tell.
fn run_threads(job: &Job, environment: Environment, signals: &Signals, show: Show) -> Result<()> {
    let errors = std::thread::scope(|scope| {
        let ranks: Vec<_> = threads(job.plan.spec.world())
            .into_iter()
            .map(|endpoint| {
                scope.spawn(move || {
                    let rank = endpoint.rank();
                    let seat = Seat::among(endpoint, &job.config);
                    let done = training::rank(job, &seat, environment, signals.stop(), show);
                    done.map_err(|error| (training::is_of_another(&error, rank), error))
                })
            })
            .collect();
        let ended = ranks.into_iter().map(|rank| rank.join().expect("a rank that panics ends the program"));
        ended.filter_map(Result::err).collect::<Vec<_>>()
    });
    match errors.into_iter().min_by_key(|(of_another, _)| *of_another) {
        None => Ok(()),
        Some((_, error)) => Err(error),
    }
}

/// What is on disk and how to go on, below an error of the training itself.
fn explain(error: anyhow::Error, folder: &RunFolder) -> anyhow::Error {
    let newest = folder.newest().ok().and_then(|found| found.checkpoint);
    let text = format!("{error:#}");
    let on_disk = match newest {
        Some(checkpoint) if text.contains(&format!("{}/", checkpoint.dir().display())) => format!(
            "the checkpoint itself cannot be used; to go on from the one before it, move {} away, then: {}",
            checkpoint.dir().display(),
            resume::command(folder)
        ),
        Some(checkpoint) => format!(
            "the newest checkpoint is step {} ({}); go on with: {}",
            checkpoint.step(),
            checkpoint.dir().display(),
            resume::command(folder)
        ),
        None => format!("no checkpoint was saved yet; start again with: {}", resume::command(folder)),
    };
    let reached = ending::Reached::read(folder).step;
    anyhow::anyhow!("{text}\n{reached} step(s) were done; {on_disk}")
}

/// A run that saved before its last step was stopped, by a signal to the launcher or to any rank.
fn finish(folder: &RunFolder, planned: &Planned, show: Show, environment: Environment) -> Result<ExitCode> {
    let saved = folder.newest()?.checkpoint.map_or(0, |checkpoint| checkpoint.step());
    if saved < planned.config.train.steps {
        eprintln!("stopped after step {saved}, which is saved; go on with: {}", resume::command(folder));
        return Ok(ExitCode::from(STOPPED));
    }
    match show {
        Show::Progress => ending::complete(folder, planned, environment)?,
        Show::Json => {
            ending::memory(folder, planned)?;
            report::print_line(&ending::line(folder).to_string());
        }
        Show::Nothing => ending::memory(folder, planned).map(drop)?,
    }
    Ok(ExitCode::SUCCESS)
}
