//! `phalanx train`: from a configuration to a run folder with a trained model.

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use phalanx_collectives::{HostJob, threads};
use phalanx_launch::{Failure, LocalLeader, Parting};
use phalanx_system::files::is_named;
use phalanx_train::job::Job;
use phalanx_train::position::{Position, position};

use crate::arguments::overrides::Overrides;
use crate::arguments::train_args::Show;
use crate::arguments::train_args::TrainArgs;
use crate::configuration::learning_rate::Ahead;
use crate::configuration::user_config::UserConfig;
use crate::configuration::{learning_rate, translation};
use crate::folders::resume::Resumed;
use crate::folders::run_folder::RunFolder;
use crate::folders::{flight, kept_checkpoints, resume};
use crate::host::environment::Environment;
use crate::host::output::{TrainOutput, note, note_error};
use crate::host::signals::{STOPPED, Signals};
use crate::host::{exit_status, machine, system_limits};
use crate::jobs::hosts::shares::threads_per_rank;
use crate::jobs::hosts::{Team, without_launcher};
use crate::jobs::launch::{RankProcesses, Start};
use crate::jobs::rank_host::RankHost;
use crate::jobs::rank_output::Output;
use crate::jobs::restarts::Restarts;
use crate::jobs::run_folder_lock::RunFolderLock;
use crate::jobs::setup::Prepares;
use crate::jobs::task::{Task, TrainTask};
use crate::jobs::{setup, task_file, training};
use crate::plans::data_report::DataReport;
use crate::plans::planned::{Across, Planned};
use crate::reports::{final_report, plan_report};
use phalanx_drawing::report::plural;

/// Plans and trains.
///
/// # Errors
/// Errors of the user's input, and failures of the run. Committed checkpoints stay.
pub fn train(args: &TrainArgs, environment: Environment) -> Result<ExitCode> {
    without_launcher(args.network.transport)?;
    let output = TrainOutput::default();
    let signals = Signals::take_over()?;
    let ended = train_with(args, environment, &signals, &output, None, None);
    output.finish();
    ended.map(ExitCode::from)
}

/// Plans and trains, on the hosts of `team` if there are several; `helpers` start the other ranks of this host, if another
/// launcher has started a process for each. Returns the exit code.
///
/// # Errors
/// As for [`train`].
pub fn train_with(
    args: &TrainArgs,
    environment: Environment,
    signals: &Signals,
    output: &TrainOutput,
    team: Option<&mut Team>,
    helpers: Option<Arc<LocalLeader>>,
) -> Result<u8> {
    if args.config.is_none() && args.overrides.deepspeed.is_some() {
        bail!("--deepspeed adds to a configuration: give CONFIG, too");
    }
    let read =
        args.config.as_deref().map(|config| translation::read_both(config, &args.overrides)).transpose()?;
    let (file, theirs) = read.unzip();
    if args.show() == Show::Progress {
        theirs.flatten().iter().for_each(|theirs| note(&theirs.to_text()));
    }
    let folder = RunFolder::named(args.run.as_deref(), args.config.as_deref())?;
    if args.resume && file.is_none() && !is_named(folder.path()) {
        bail!("{} is not a run folder; give a configuration to start a run", folder.path().display());
    }
    // Locked before the folder is read, because another run may be using it.
    let lock = RunFolderLock::acquire(&folder)?;
    let run =
        Run { folder, file, new_lock: Some(lock), lock: None, environment, signals, output, team, helpers };
    run.run_to_end(args)
}

/// A run of `train`, which may start its ranks several times.
struct Run<'a> {
    folder: RunFolder,
    /// The configuration file.
    file: Option<UserConfig>,
    /// The lock of the run folder, before its first start was prepared.
    new_lock: Option<RunFolderLock>,
    /// The lock afterwards.
    lock: Option<RunFolderLock>,
    environment: Environment,
    signals: &'a Signals,
    output: &'a TrainOutput,
    /// The hosts, if there are several.
    team: Option<&'a mut Team>,
    /// The processes that start the other ranks of this host.
    helpers: Option<Arc<LocalLeader>>,
}

/// Why a start has ended.
enum Stop {
    /// Nothing was started.
    Refused(anyhow::Error),
    /// Ranks were started and have failed.
    Failed(anyhow::Error),
}

impl From<anyhow::Error> for Stop {
    fn from(error: anyhow::Error) -> Stop {
        Stop::Refused(error)
    }
}

impl Run<'_> {
    /// Trains until the run has ended or must not be started again.
    fn run_to_end(mut self, args: &TrainArgs) -> Result<u8> {
        let mut args = args.clone();
        let mut restarts = Restarts::new(&args);
        loop {
            let error = match self.once(&args, restarts.allowed() > 0) {
                Ok(code) => return Ok(code),
                Err(Stop::Refused(error)) => return Err(error),
                Err(Stop::Failed(error)) => error,
            };
            let text = explained(&error, &self.folder);
            let left = self.team.as_mut().map(|team| team.leave_out_lost());
            let ranks_fit = |ranks: usize| fits(&args, self.file.as_ref(), ranks);
            let Some(ranks) = restarts.next(&error, &self.folder, self.signals, left, ranks_fit) else {
                return Err(anyhow!("{text}"));
            };
            note_error(&format!("error: {text}"));
            note(&restarts.describe(&self.folder, ranks));
            args.resume = true;
            args.overrides.nproc = Some(ranks);
        }
    }

    /// Prepares the run and trains. `is_watched`: one rank alone has a process of its own, too.
    fn once(&mut self, args: &TrainArgs, is_watched: bool) -> Result<u8, Stop> {
        let args = &self.with_threads(args);
        let set_up = match self.team.take() {
            None => self.set_up(args, None, &|_| {}),
            Some(team) => {
                let across = team.across();
                let set_up = team.while_preparing(self.signals, |tell| self.set_up(args, Some(across), tell));
                self.team = Some(team);
                set_up
            }
        };
        let (started, prepared) = match set_up {
            Ok(set_up) => set_up,
            Err(error) => {
                return Err(self.refused(error));
            }
        };
        let Run { folder, output, .. } = &*self;
        if started.checkpoint.is_none() {
            // On a resume, this was said or refused before.
            Ahead::of_start(&prepared.planned.config).refuse_zeros()?.iter().for_each(|line| note(line));
        }
        if args.show() == Show::Progress {
            started.notes.iter().for_each(|line| note(line));
            output.print_line(&prepared.data.line());
            kept_checkpoints::rule(&prepared.planned.config).iter().for_each(|line| note(line));
            output.print(&plan_report::short(&prepared.planned, &folder.path().display().to_string()));
        }
        let steps = prepared.planned.config.train.steps;
        let at = started.checkpoint.as_ref().map(|(checkpoint, _)| checkpoint.step());
        let is_done = at.is_some_and(|step| step >= steps);
        let lacks_evaluation =
            at.is_some_and(|step| final_report::lacks_evaluation(&self.folder, &prepared.planned, step));
        if is_done && !lacks_evaluation {
            let more = learning_rate::more_steps(&prepared.planned.config);
            note(&format!("all {steps} steps are done; to train further, give more: {more}"));
            return Ok(0);
        }
        let environment = self.environment.of_run(&prepared.planned.config.device)?;
        let data = prepared.data.clone();
        let committed = prepared.commit(folder, &started, self.file.as_ref(), args.show(), environment);
        let (mut task, planned) = match committed {
            Ok(committed) => committed,
            Err(error) => return Err(self.refused(error)),
        };
        if self.lock.is_none() {
            self.lock = self.new_lock.take();
        }
        task.pin = !args.no_pin;
        let processes = planned.plan.spec.world_size() > 1 || is_watched;
        if processes && let Some(lock) = &self.lock {
            lock.share_with_ranks()?;
        }
        // The run removes old checkpoints, and a file that is still open here would keep its disk space.
        drop(started);
        if let Err(error) = self.run_ranks(&mut task, &planned, args.threads_as_ranks, processes) {
            return self.ended_by(error);
        }
        Ok(finish(&self.folder, (&planned, &data), args.show(), environment, self.output)?)
    }

    /// A start that changes nothing: the first one leaves nothing, either.
    fn refused(&mut self, error: anyhow::Error) -> Stop {
        if let Some(lock) = self.new_lock.take() {
            lock.leave();
        }
        Stop::Refused(error)
    }

    /// The exit code of a run that a signal has stopped before it began, or the error.
    fn ended_by(&self, error: anyhow::Error) -> Result<u8, Stop> {
        let folder = &self.folder;
        let interrupted =
            error.downcast_ref().is_some_and(|failure| exit_status::is_interrupted(failure, self.signals));
        if interrupted || matches!(error.downcast_ref(), Some(Parting::Stopped(_))) {
            note(&format!("stopped before the ranks had started; resume with: {}", resume::command(folder)));
            return Ok(STOPPED);
        }
        let flights = error.downcast_ref::<Failure>().map_or(&[][..], |failure| &failure.flights);
        if let Err(error) = flight::write(folder.path(), flights) {
            note(&format!("the flight records could not be written: {error:#}"));
        }
        Err(Stop::Failed(error))
    }

    /// The same arguments, with the threads of each rank on the machine that runs most ranks, unless the user chose them.
    fn with_threads(&self, args: &TrainArgs) -> TrainArgs {
        let mut args = args.clone();
        let said = args.overrides.sets("train.threads");
        let in_file = self.file.as_ref().is_some_and(|file| file.has("train.threads"));
        let threads = match (&self.helpers, &self.team) {
            (Some(helpers), _) => Some(threads_per_rank(helpers)),
            (None, Some(team)) => Some(machine::threads_per_rank(team.ranks_of_a_machine())),
            (None, None) => None,
        };
        if let Some(threads) = threads.filter(|_| !said && !in_file) {
            args.overrides.set.push(format!("train.threads={threads}"));
        }
        args
    }

    /// Resolves what to train and prepares it, for ranks that lie on several hosts as `across` says, if they do; the run folder, which
    /// is locked, does not change. `tell` hears how far it is.
    fn set_up(
        &self,
        args: &TrainArgs,
        across: Option<Across>,
        tell: &dyn Fn(&str),
    ) -> Result<(Resumed, Prepares)> {
        let file = self.file.clone();
        let started = match args.resume {
            true => resume::resume(&self.folder, args, file, self.environment, &mut |warning| note(warning))?,
            false => start(&self.folder, args, file)?,
        };
        let prepared = setup::prepare(&self.folder, &started, args.show(), self.environment, across, tell)?;
        let ranks = prepared.planned.plan.spec.world_size();
        if let Some(min) = args.min_nproc.filter(|min| *min > ranks) {
            bail!(
                "--min-nproc {min}: this run has {ranks} rank(s), so give {ranks} at most, or start more ranks"
            );
        }
        Ok((started, prepared))
    }

    /// Trains: a single rank in this process, several ranks as processes (or, for tests, as threads).
    fn run_ranks(
        &mut self,
        task: &mut TrainTask,
        planned: &Planned,
        as_threads: bool,
        processes: bool,
    ) -> Result<()> {
        let Run { folder, signals, output, .. } = self;
        let environment = self.environment.of_run(&task.config.device)?;
        let world = planned.plan.spec.world_size();
        let shown = Output::shown(output.clone()).with_logs(folder.path());
        if let Some(team) = self.team.as_mut() {
            // Ranks of other hosts have another working folder.
            task.run = std::path::absolute(&task.run).context("the run folder")?;
            task.resume =
                task.resume.take().map(std::path::absolute).transpose().context("the checkpoint")?;
            signals.training_starts();
            return team.run(folder.path(), &Task::Train(task.clone()), &planned.plan, &shown, signals);
        }
        if !processes {
            let job = training::job(task, planned)?;
            signals.training_starts();
            return training::rank(&job, &RankHost::Alone, environment, signals.stop(), task.show, output);
        }
        signals.training_starts();
        if as_threads {
            return run_threads(&training::job(task, planned)?, environment, signals, task.show, output);
        }
        let task = Task::Train(task.clone());
        let Some(helpers) = &self.helpers else {
            RankProcesses::start(world, &task, Some(&planned.plan), &shown)?.wait(signals)?;
            return Ok(());
        };
        let job = HostJob::new(world).context("the memory that ranks share")?;
        let file = task_file::encode(&task, Some(&planned.plan))?;
        let helpers = Some(Arc::clone(helpers));
        let timeout = task.timeout();
        let start = Start { task: &file, network: None, timeout, pin: false, output: &shown, helpers };
        RankProcesses::start_in(job, &start)?.wait(signals)?;
        Ok(())
    }
}

/// Returns whether the layout of the configuration allows this number of ranks.
fn fits(args: &TrainArgs, file: Option<&UserConfig>, ranks: usize) -> bool {
    let Some(file) = file else { return true };
    let overrides = Overrides { nproc: Some(ranks), ..args.overrides.clone() };
    let config = file.clone().with(&overrides, &args.data).and_then(|given| given.config());
    config.is_ok_and(|config| config.world_size() == ranks && config.check().is_ok())
}

/// Sets up a new run.
fn start(folder: &RunFolder, args: &TrainArgs, file: Option<UserConfig>) -> Result<Resumed> {
    let Some(file) = file else { bail!("give a configuration (TOML), as examples/quickstart.toml") };
    let given = file.with(&args.overrides, &args.data)?;
    folder.check_start()?.iter().for_each(|line| note(line));
    Ok(Resumed::start(given, Vec::new()))
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
                    let host = RankHost::on_thread(endpoint, &job.config, environment.isa());
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

/// An error of the training, with which checkpoint is on disk and how to resume.
fn explained(error: &anyhow::Error, folder: &RunFolder) -> String {
    let found = folder.newest().ok();
    let skipped: String = found
        .iter()
        .flat_map(|found| &found.skipped)
        .map(|skipped| format!("{}; ", skipped.describe()))
        .collect();
    let newest = found.and_then(|found| found.checkpoint);
    let failure = error.downcast_ref::<Failure>();
    let unusable = failure.map_or_else(|| training::is_of_checkpoint(error), exit_status::is_of_checkpoint);
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
    format!("{}\n{reached} step(s) were done; {skipped}{on_disk}", system_limits::explain(error))
}

/// A run that saved before its last step was stopped, by a signal to the launcher or to any rank.
fn finish(
    folder: &RunFolder,
    (planned, data): (&Planned, &DataReport),
    show: Show,
    environment: Environment,
    output: &TrainOutput,
) -> Result<u8> {
    let found = folder.newest()?;
    let saved = found.checkpoint.as_ref().map_or(0, |checkpoint| checkpoint.step());
    let at = found.checkpoint.as_ref().map(position).transpose()?.unwrap_or_default();
    let reached = final_report::Reached::read(folder)?.step;
    if reached > saved {
        let why = found.skipped.first().map_or("it is gone".to_string(), |skipped| skipped.describe());
        bail!(
            "step {reached} was done and saved, but its checkpoint cannot be read: {why}; the newest that can is of step {saved}, from which \
             this resumes: {}",
            resume::command(folder)
        );
    }
    if let Some(early) = early_end(planned, &at) {
        note(&early);
    } else if saved < planned.config.train.steps {
        note(&format!(
            "stopped after step {saved}, which is saved; resume with: {}",
            resume::command(folder)
        ));
        return Ok(STOPPED);
    }
    if final_report::lacks_evaluation(folder, planned, saved) {
        note(&format!(
            "stopped in the evaluation after step {saved}, the last one, which is saved; this evaluates: {}",
            resume::command(folder)
        ));
        return Ok(STOPPED);
    }
    match show {
        Show::Progress => final_report::complete(folder, planned, environment, output)?,
        Show::Json => {
            final_report::memory(folder, planned)?;
            output.print_line(&final_report::line(folder, data)?.to_string());
        }
        Show::Nothing => final_report::memory(folder, planned).map(drop)?,
    }
    Ok(0)
}

/// Message about a run that ended before its last step, because its validation loss no longer fell.
fn early_end(planned: &Planned, at: &Position) -> Option<String> {
    let (train, best) = (&planned.config.train, at.best.as_ref()?);
    at.ended_early.then(|| {
        format!(
            "ended after step {} of {}: the validation loss of {} in a row was not below {:.4}, that of step {}, whose checkpoint stays \
             (train.patience)",
            at.step,
            train.steps,
            plural(train.patience.unwrap_or(0) as usize, "evaluation"),
            best.val_loss,
            best.step
        )
    })
}
