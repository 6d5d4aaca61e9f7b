//! One process for each rank, started by another launcher: srun, mpirun or torchrun. The process with local rank 0 is the
//! launcher of its host: it plans or follows, and makes the memory of the job. Each process starts its own rank, so that cores,
//! devices and variables that the other launcher has given to it count, and watches it.

use std::os::fd::OwnedFd;
use std::os::unix::process::parent_id;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use phalanx_collectives::Wire;
use phalanx_launch::{
    ForeignLauncher, ForeignRank, LocalGroup, LocalHello, LocalLeader, LocalMember, Parting, Starter,
};
use phalanx_tensor::refused_thread;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::arguments::train_args::Show;
use crate::arguments::train_args::TrainArgs;
use crate::commands::train::train_with;
use crate::folders::run_folder::RunFolder;
use crate::host::environment::{self, Environment};
use crate::host::output::{TrainOutput, note, note_error};
use crate::host::pinning;
use crate::host::signals::{STOPPED, Signals};
use crate::jobs::hosts::{Between, HostPlace, How, SecretSource, Team, Transport, choose, follow, meet};
use crate::jobs::launch::{Order, RankProcesses};
use crate::jobs::rank_output::Output;

/// Trains as the rank that another launcher has given to this process.
///
/// # Errors
/// As for [`train_with`]; also processes that do not find each other.
pub fn train(args: &TrainArgs, environment: Environment, rank: &ForeignRank) -> Result<ExitCode> {
    if args.overrides.nproc.is_some_and(|ranks| ranks != rank.world_size) {
        bail!(
            "--nproc {}: {} has started {} ranks; leave out --nproc, or set PHALANX_LAUNCHER=none to start without it",
            args.overrides.nproc.unwrap_or(0),
            rank.launcher.name(),
            rank.world_size
        );
    }
    // What this build cannot do, and hosts that cannot be numbered, are said by every process, before they wait for each other.
    let (host, hosts) = rank.host()?;
    if rank.local_rank == 0 && rank.number != rank.rank {
        let (name, number, rank) = (rank.launcher.name(), rank.number, rank.rank);
        note(&format!(
            "{name} does not number its processes host by host, as ranks are: process {number} of {name} is rank {rank}, on host {host} of \
             {hosts}"
        ));
    }
    let transport = transport(args, rank)?;
    let first = rank.first_of_host();
    let starter = Starter::find(rank.launcher);
    let group = LocalGroup::new(
        &job_name(rank, starter.as_ref()),
        first..first + rank.local_world_size,
        rank.world_size,
    );
    let limit = Duration::from_secs(args.network.join_timeout);
    let signals = Signals::take_over()?;
    let starter = starter.map(end_with).transpose()?;
    let output = TrainOutput::default();
    let ended = match rank.local_rank {
        0 => lead(args, environment, rank, &transport, &group, &signals, &output),
        _ => {
            let hello = LocalHello { rank: rank.rank, cores: pinning::allowed() };
            let member =
                group.follow(&hello, limit, &says(rank)).context("joining the processes of this host")?;
            signals.others_are_told();
            run_own(member, starter, &signals, &output)
        }
    };
    output.finish();
    ended.map(ExitCode::from)
}

/// Chooses the transport between hosts.
fn transport(args: &TrainArgs, rank: &ForeignRank) -> Result<Transport> {
    let (choice, streams) = (args.network.transport, args.network.streams);
    let transport = choose(choice, rank.launcher, environment::pmi(), args.max_restarts > 0)?;
    match streams {
        Some(streams) if transport.wire == Wire::Mpi => bail!(
            "--streams {streams}: MPI has no TCP connections over which messages are divided; leave it out, or give \
             --transport tcp"
        ),
        _ => Ok(transport),
    }
}

/// Ends this process, and its rank with it, when the process has ended that has started those of this host: nobody else would. Returns what
/// tells whether it has.
fn end_with(starter: Starter) -> Result<Arc<OwnedFd>> {
    let Starter { name, pid, pidfd } = starter;
    let pidfd = Arc::new(pidfd);
    let watched = Arc::clone(&pidfd);
    let wait = move || {
        while !has_ended(&watched, None) {}
        note_error(&format!("error: {name} (process {pid}), which has started this process, has ended"));
        std::process::exit(1);
    };
    let thread = std::thread::Builder::new().name("starter".into()).spawn(wait);
    thread.map_err(|error| refused_thread("the thread that watches the other launcher", &error))?;
    Ok(pidfd)
}

const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// Returns whether a process has ended, or ends within a time.
fn has_ended(pidfd: &OwnedFd, within: Option<&Timespec>) -> bool {
    !matches!(poll(&mut [PollFd::new(pidfd, PollFlags::IN)], within), Ok(0) | Err(Errno::INTR))
}

/// The name of the job on this host. Launchers that name no job start the processes of a host from one process.
fn job_name(rank: &ForeignRank, starter: Option<&Starter>) -> String {
    let first = rank.first_of_host();
    match rank.job.ends_with("-local") {
        true => format!("{}-{}-{first}", rank.job, starter.map_or_else(parent_id, |starter| starter.pid)),
        false => format!("{}-{first}", rank.job),
    }
}

/// Shows the lines of a wait. The first also says what makes this process wait, and how it would not.
fn says(rank: &ForeignRank) -> impl Fn(&str) + Sync {
    let (number, world, first) = (rank.rank, rank.world_size, AtomicBool::new(true));
    let by = by(rank);
    move |line: &str| {
        let by = if first.swap(false, Ordering::Relaxed) { &*by } else { "" };
        note(&format!("rank {number} of {world}: {line}{by}"));
    }
}

/// The variables that make this process a rank, and how it would be none.
fn by(rank: &ForeignRank) -> String {
    let ForeignRank { launcher, said, .. } = rank;
    let names: Vec<&str> =
        said.split(' ').filter_map(|set| set.split_once('=')).map(|(name, _)| name).collect();
    let assumed = match rank.is_local_assumed {
        true => format!("; LOCAL_WORLD_SIZE is not set: taken as {}", rank.local_world_size),
        false => String::new(),
    };
    let terminal = match environment::in_slurm_terminal() {
        true => "; in a shell of `srun --pty` the other tasks do not run this command",
        false => "",
    };
    format!(
        "; {said} ({}) make this process a rank{assumed}{terminal}; to train without them, unset {} or set PHALANX_LAUNCHER=none",
        launcher.name(),
        names.join(" ")
    )
}

/// The launcher of this host.
fn lead(
    args: &TrainArgs,
    environment: Environment,
    rank: &ForeignRank,
    transport: &Transport,
    group: &LocalGroup,
    signals: &Signals,
    output: &TrainOutput,
) -> Result<u8> {
    let limit = Duration::from_secs(args.network.join_timeout);
    let helpers = group.lead(limit, &says(rank)).context("waiting for the processes of this host")?;
    let helpers = Arc::new(helpers);
    let (host, hosts) = rank.host()?;
    // That traffic is not encrypted is said in any case.
    let says = args.show() == Show::Progress || (hosts > 1 && transport.wire == Wire::Mpi);
    if rank.rank == 0 && says {
        let between = match hosts {
            1 => "they share memory",
            _ => &format!("between hosts: {}", transport.describe),
        };
        let (name, ranks) = (rank.launcher.name(), rank.world_size);
        note(&format!("{name} has started {ranks} ranks on {hosts} host(s); {between}"));
    }
    let mut train = args.clone();
    train.overrides.nproc = Some(rank.world_size);
    let ended = match hosts {
        1 => train_with(&train, environment, signals, output, None, Some(Arc::clone(&helpers))),
        _ => across(&train, environment, rank, transport.wire, (host, hosts), (signals, output), &helpers),
    };
    let stopped = |error: &anyhow::Error| matches!(error.downcast_ref(), Some(Parting::Stopped(_)));
    let code = ended.as_ref().map_or_else(|error| if stopped(error) { STOPPED } else { 1 }, |code| *code);
    let finish = serde_json::to_vec(&Order::Finish { code })?;
    let ranks: Vec<usize> = helpers.hellos().map(|hello| hello.rank).collect();
    for rank in ranks {
        // One that has ended is known already.
        let _ = helpers.send(rank, &finish, &[]);
    }
    ended
}

/// Error text: the variables that several hosts need and that are missing, and how this launcher passes them.
fn missing(launcher: ForeignLauncher, rendezvous: bool, secret: bool) -> String {
    let lacks = match (rendezvous, secret) {
        (true, true) => "know neither where host 0 is nor a secret",
        (true, false) => "do not know where host 0 is",
        _ => "have no secret",
    };
    let (option, sign) = match launcher {
        ForeignLauncher::OpenMpi => ("-x ", "="),
        ForeignLauncher::Hydra => ("-genv ", " "),
        ForeignLauncher::Torchrun | ForeignLauncher::Slurm => ("", "="),
    };
    let set = |name: &str, value: &str| format!("{option}{name}{sign}{value}");
    let needed =
        [(rendezvous, set("PHALANX_RENDEZVOUS", "NODE:PORT")), (secret, set("PHALANX_SECRET_FILE", "FILE"))];
    let needed: Vec<String> = needed.into_iter().filter(|(lacks, _)| *lacks).map(|(_, text)| text).collect();
    let whose = match launcher {
        ForeignLauncher::OpenMpi | ForeignLauncher::Hydra => "give mpirun",
        ForeignLauncher::Torchrun | ForeignLauncher::Slurm => "set for all processes",
    };
    let node = "; NODE:PORT is the host of rank 0 and a free port there (or set MASTER_ADDR and MASTER_PORT)";
    let file = "; FILE is a path on a file system that all hosts share, where host 0 makes the secret (or give --secret-file FILE)";
    format!(
        "the ranks that {} has started on several hosts {lacks}: {whose} {}{}{}",
        launcher.name(),
        needed.join(" "),
        if rendezvous { node } else { "" },
        if secret { file } else { "" }
    )
}

/// The launcher of one of several hosts.
fn across(
    args: &TrainArgs,
    environment: Environment,
    rank: &ForeignRank,
    wire: Wire,
    (host, hosts): (usize, usize),
    (signals, output): (&Signals, &TrainOutput),
    helpers: &Arc<LocalLeader>,
) -> Result<u8> {
    let (rendezvous, secret_file) = match (rank.rendezvous.clone(), environment::secret_file(&args.network)) {
        (Some(rendezvous), Some(secret_file)) => (rendezvous, secret_file),
        (rendezvous, secret_file) => {
            bail!("{}", missing(rank.launcher, rendezvous.is_none(), secret_file.is_none()))
        }
    };
    let place = HostPlace {
        hosts,
        host,
        rendezvous,
        ranks: rank.local_world_size,
        kernels: environment.to_host_kernels(),
        plaintext: args.network.plaintext,
        run: RunFolder::named(args.run.as_deref(), args.config.as_deref())?.path().to_path_buf(),
        limit: Duration::from_secs(args.network.join_timeout),
        announces: false,
        by: by(rank),
    };
    let (mut met, secret) = meet(&place, &SecretSource::File(secret_file), signals, &|| None)?;
    let (plaintext, helpers) = (args.network.plaintext, Some(Arc::clone(helpers)));
    if host > 0 {
        let how = How { secret, plaintext, pin: false, helpers };
        return follow(&mut met.plane, met.address, how, signals, output);
    }
    let between = Between { wire, plaintext, streams: args.network.streams() };
    let team = Team::new(met.plane, met.address, secret, between)?;
    let mut team = team.with_starters(helpers.clone());
    let environment = team.kernels_of_all(environment);
    let ended = train_with(args, environment, signals, output, Some(&mut team), helpers);
    team.finish(&ended);
    ended
}

/// Starts the rank of this process each time that the leading process says so, until the run is over.
fn run_own(
    member: LocalMember,
    starter: Option<Arc<OwnedFd>>,
    signals: &Signals,
    output: &TrainOutput,
) -> Result<u8> {
    let orders = orders(member, starter, signals.watched())?;
    let shown = Output::shown(output.clone());
    loop {
        // The thread that sends orders ends this process when the leading one has ended.
        let (order, fds) = orders.recv().context("the process with local rank 0 has ended")?;
        let begin = match order {
            Order::Finish { code } => return Ok(code),
            Order::Begin(begin) => begin,
        };
        signals.training_starts();
        let ended = RankProcesses::start_own(&begin, fds, &shown)?.wait(signals);
        if let Err(failure) = ended
            && failure.rank == begin.rank
        {
            note_error(&format!("error: {failure}"));
        }
    }
}

/// Receives the orders of the leading process. If that process ends without a last order, so does this process, and its rank with it; as
/// `stopped` if both were asked to stop before the run began. If the process that started both has ended, that is the cause, and
/// [`end_with`] reports it.
fn orders(
    mut member: LocalMember,
    starter: Option<Arc<OwnedFd>>,
    stopped: impl Fn() -> bool + Send + 'static,
) -> Result<Receiver<(Order, Vec<OwnedFd>)>> {
    let (sender, orders) = mpsc::channel();
    let read = move || {
        loop {
            let order = member.receive().map_err(anyhow::Error::from).and_then(|(bytes, fds)| {
                Ok((serde_json::from_slice::<Order>(&bytes).context("an order that makes no sense")?, fds))
            });
            match order {
                Err(_) if stopped() => std::process::exit(STOPPED.into()),
                Err(_) if starter.as_ref().is_some_and(|starter| has_ended(starter, Some(&AT_ONCE))) => {
                    loop {
                        std::thread::park();
                    }
                }
                Err(error) => {
                    note_error(&format!("error: {error:#}"));
                    std::process::exit(1);
                }
                Ok(order) => {
                    let is_last = matches!(order.0, Order::Finish { .. });
                    if sender.send(order).is_err() || is_last {
                        return;
                    }
                }
            }
        }
    };
    let thread = std::thread::Builder::new().name("orders".into()).spawn(read);
    thread.map_err(|error| refused_thread("the thread that hears the leading process", &error))?;
    Ok(orders)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_said_in_the_words_of_each_launcher() {
        for (launcher, lacks, words) in [
            (
                ForeignLauncher::Hydra,
                (true, true),
                "give mpirun -genv PHALANX_RENDEZVOUS NODE:PORT -genv PHALANX_SECRET_FILE FILE",
            ),
            (
                ForeignLauncher::OpenMpi,
                (true, false),
                "give mpirun -x PHALANX_RENDEZVOUS=NODE:PORT; NODE:PORT is",
            ),
            (
                ForeignLauncher::Slurm,
                (false, true),
                "set for all processes PHALANX_SECRET_FILE=FILE; FILE is",
            ),
        ] {
            let text = missing(launcher, lacks.0, lacks.1);
            assert!(text.contains(words), "{text}");
            assert_eq!(text.contains("NODE:PORT is"), lacks.0, "{text}");
        }
    }
}
