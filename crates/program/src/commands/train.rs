//! `phalanx train`: from a configuration to a run folder with a trained model.

use std::process::ExitCode;

use anyhow::{Result, bail};
use phalanx_collectives::threads;
use phalanx_launch::Failure;
use phalanx_train::job::Job;

use crate::args::TrainArgs;
use crate::environment::Environment;
use crate::file_size;
use crate::launch::RankProcesses;
use crate::output::{TrainOutput, note};
use crate::planned::Planned;
use crate::rank_host::RankHost;
use crate::rank_output::Output;
use crate::resume::Resumed;
use crate::run_folder::RunFolder;
use crate::run_folder_lock::RunFolderLock;
use crate::setup::Prepares;
use crate::signals::{STOPPED, Signals};
use crate::task::{Show, Task, TrainTask};
use crate::user_config::UserConfig;
use crate::{exit_status, final_report, learning_rate, plan_report, resume, setup, training};

/// Plans and trains.
///
/// # Errors
/// Errors of the user's input, and failures of the run. Committed checkpoints stay.
pub fn train(args: &TrainArgs, environment: Environment) -> Result<ExitCode> {
    let output = TrainOutput::default();
    let ended = train_into(args, environment, &output);
    output.finish();
    ended
}

fn train_into(args: &TrainArgs, environment: Environment, output: &TrainOutput) -> Result<ExitCode> {
    let signals = Signals::take_over()?;
    let file = args.config.as_deref().map(UserConfig::read).transpose()?;
    let folder = RunFolder::named(args.run.as_deref(), args.config.as_deref())?;
    if args.resume && file.is_none() && !folder.path().exists() {
        bail!("{} is not a run folder; give a configuration to start a run", folder.path().display());
    }
    // Locked before the folder is read, because another run may be using it.
    let lock = RunFolderLock::acquire(&folder)?;
    let (started, prepared) = match set_up(&folder, args, file.as_ref(), environment) {
        Ok(set_up) => set_up,
        Err(error) => {
            lock.remove_if_new();
            return Err(error);
        }
    };
    if args.show() == Show::Progress {
        started.notes.iter().for_each(|line| note(line));
        output.print(&plan_report::short(&prepared.planned, &folder.path().display().to_string()));
    }
    let steps = prepared.planned.config.train.steps;
    if started.checkpoint.as_ref().is_some_and(|(checkpoint, _)| checkpoint.step() >= steps) {
        let more = learning_rate::more_steps(&prepared.planned.config);
        note(&format!("all {steps} steps are done; to train further, give more: {more}"));
        return Ok(ExitCode::SUCCESS);
    }
    let (task, planned) = prepared.commit(&folder, &started, file.as_ref(), args.show(), environment)?;
    if planned.plan.spec.world_size() > 1 {
        lock.share_with_ranks()?;
    }
    // The run removes old checkpoints, and a file that is still open here would keep its disk space.
    drop(started);
    if let Err(error) = run_ranks(&task, &planned, environment, args.threads_as_ranks, &signals, output) {
        if error.downcast_ref().is_some_and(|failure| exit_status::is_interrupted(failure, &signals)) {
            note(&format!("stopped before the ranks had started; resume with: {}", resume::command(&folder)));
            return Ok(ExitCode::from(STOPPED));
        }
        return Err(explain(error, &folder));
    }
    finish(&folder, &planned, args.show(), environment, output)
}

/// Resolves what to train and prepares it; the run folder, which is locked, does not change.
fn set_up(
    folder: &RunFolder,
    args: &TrainArgs,
    file: Option<&UserConfig>,
    environment: Environment,
) -> Result<(Resumed, Prepares)> {
    let started = match args.resume {
        true => resume::resume(folder, args, file.cloned(), &mut |warning| note(warning))?,
        false => start(folder, args, file.cloned())?,
    };
    let prepared = setup::prepare(folder, &started, args.show(), environment)?;
    Ok((started, prepared))
}

/// Sets up a new run.
fn start(folder: &RunFolder, args: &TrainArgs, file: Option<UserConfig>) -> Result<Resumed> {
    let Some(file) = file else { bail!("give a configuration (TOML), as examples/quickstart.toml") };
    let given = file.with(&args.overrides, &args.data)?;
    folder.refuse_results()?;
    Ok(Resumed::start(given, Vec::new()))
}

/// Trains: a single rank in this process, several ranks as processes (or, for tests, as threads).
fn run_ranks(
    task: &TrainTask,
    planned: &Planned,
    environment: Environment,
    as_threads: bool,
    signals: &Signals,
    output: &TrainOutput,
) -> Result<()> {
    let world = planned.plan.spec.world_size();
    if world == 1 {
        let job = training::job(task, planned)?;
        signals.training_starts();
        return training::rank(&job, &RankHost::Alone, environment, signals.stop(), task.show, output);
    }
    signals.training_starts();
    if as_threads {
        return run_threads(&training::job(task, planned)?, environment, signals, task.show, output);
    }
    let processes = RankProcesses::start(
        world,
        &Task::Train(task.clone()),
        Some(&planned.plan),
        &Output::Shown(output.clone()),
    )?;
    processes.wait(signals)?;
    Ok(())
}

/// Runs ranks as threads. Reports the first error that is a rank's own.
fn run_threads(
    job: &Job,
    environment: Environment,
    signals: &Signals,
    show: Show,
    output: &TrainOutput,
) -> Result<()> {
    let errors = std::thread::scope(|scope| {
        let ranks: Vec<_> = threads(job.plan.spec.world_size())
            .into_iter()
            .map(|endpoint| {
                scope.spawn(move || {
                    let rank = endpoint.rank();
                    let host = RankHost::in_job(endpoint, &job.config, environment.isa());
                    let done = training::rank(job, &host, environment, signals.stop(), show, output);
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

/// Adds to an error of the training which checkpoint is on disk and how to resume.
fn explain(error: anyhow::Error, folder: &RunFolder) -> anyhow::Error {
    let newest = folder.newest().ok().and_then(|found| found.checkpoint);
    let failure = error.downcast_ref::<Failure>();
    let unusable = failure.map_or_else(|| training::is_of_checkpoint(&error), exit_status::is_of_checkpoint);
    let on_disk = match newest {
        Some(checkpoint) if unusable => format!(
            "the checkpoint itself cannot be used; to go on from the one before it, move {} away, then: {}",
            checkpoint.dir().display(),
            resume::command(folder)
        ),
        Some(checkpoint) => format!(
            "the newest checkpoint is step {} ({}); resume with: {}",
            checkpoint.step(),
            checkpoint.dir().display(),
            resume::command(folder)
        ),
        None => format!("no checkpoint was saved yet; start again with: {}", resume::command(folder)),
    };
    let reached = final_report::Reached::read(folder).unwrap_or_default().step;
    anyhow::anyhow!("{}\n{reached} step(s) were done; {on_disk}", file_size::explain(&error))
}

/// A run that saved before its last step was stopped, by a signal to the launcher or to any rank.
fn finish(
    folder: &RunFolder,
    planned: &Planned,
    show: Show,
    environment: Environment,
    output: &TrainOutput,
) -> Result<ExitCode> {
    let saved = folder.newest()?.checkpoint.map_or(0, |checkpoint| checkpoint.step());
    if saved < planned.config.train.steps {
        note(&format!(
            "stopped after step {saved}, which is saved; resume with: {}",
            resume::command(folder)
        ));
        return Ok(ExitCode::from(STOPPED));
    }
    match show {
        Show::Progress => final_report::complete(folder, planned, environment, output)?,
        Show::Json => {
            final_report::memory(folder, planned)?;
            output.print_line(&final_report::line(folder)?.to_string());
        }
        Show::Nothing => final_report::memory(folder, planned).map(drop)?,
    }
    Ok(ExitCode::SUCCESS)
}
