//! One process for each rank, started by another launcher: srun, mpirun or torchrun. The process with local rank 0 is the
//! launcher of its host: it plans or follows, and makes the memory of the job. Each process starts its own rank, so that cores,
//! devices and variables that the other launcher has given to it count, and watches it.

use std::os::fd::OwnedFd;
use std::os::unix::process::parent_id;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use phalanx_collectives::Wire;
use phalanx_launch::{ForeignRank, LocalGroup, LocalHello, LocalLeader, LocalMember};
use phalanx_tensor::refused_thread;

use crate::commands::train::train_with;
use crate::environment::{self, Environment};
use crate::hosts::{Between, How, Place, SecretSource, Team, Transport, choose, follow, meet};
use crate::launch::{Order, RankProcesses};
use crate::output::{TrainOutput, note, note_error};
use crate::pinning;
use crate::rank_output::Output;
use crate::signals::Signals;
use crate::task::Show;
use crate::train_args::TrainArgs;

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
    // What this build cannot do is said by every process, before they wait for each other.
    let transport = transport(args, rank)?;
    let group = LocalGroup::new(&job_name(rank), rank.local_world_size);
    let limit = Duration::from_secs(args.network.join_timeout);
    let signals = Signals::take_over()?;
    let output = TrainOutput::default();
    let ended = match rank.local_rank {
        0 => lead(args, environment, rank, &transport, &group, &signals, &output),
        _ => {
            let hello = LocalHello { rank: rank.rank, cores: pinning::allowed() };
            let member = group.follow(&hello, limit).context("joining the processes of this host")?;
            signals.training_starts();
            run_own(member, &signals, &output)
        }
    };
    output.finish();
    ended.map(ExitCode::from)
}

/// What carries bytes between hosts.
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

/// The name of the job on this host. Launchers that name no job start the processes of a host from one process.
fn job_name(rank: &ForeignRank) -> String {
    let first = rank.first_of_host();
    match rank.job.ends_with("-local") {
        true => format!("{}-{}-{first}", rank.job, parent_id()),
        false => format!("{}-{first}", rank.job),
    }
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
    let helpers = Arc::new(group.lead(limit).context("waiting for the processes of this host")?);
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
    let code = *ended.as_ref().unwrap_or(&1);
    let finish = serde_json::to_vec(&Order::Finish { code })?;
    let ranks: Vec<usize> = helpers.hellos().map(|hello| hello.rank).collect();
    for rank in ranks {
        // One that has ended is known already.
        let _ = helpers.send(rank, &finish, &[]);
    }
    ended
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
    let Some(rendezvous) = rank.rendezvous.clone() else {
        bail!(
            "{} does not say where host 0 is: set MASTER_ADDR and MASTER_PORT, or PHALANX_RENDEZVOUS=HOST:PORT, for all \
             processes",
            rank.launcher.name()
        )
    };
    let Some(secret_file) = environment::secret_file(&args.network) else {
        bail!(
            "ranks of several hosts need a secret: give --secret-file FILE, or set PHALANX_SECRET_FILE, to a path on a file \
             system that all hosts share; host 0 makes the file"
        )
    };
    let place = Place {
        hosts,
        host,
        rendezvous,
        ranks: rank.local_world_size,
        kernels: environment.to_host_kernels(),
        plaintext: args.network.plaintext,
        limit: Duration::from_secs(args.network.join_timeout),
        announces: false,
    };
    let (mut met, secret) = meet(&place, &SecretSource::File(secret_file))?;
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
fn run_own(member: LocalMember, signals: &Signals, output: &TrainOutput) -> Result<u8> {
    let orders = orders(member)?;
    let shown = Output::shown(output.clone());
    loop {
        // The thread that sends orders ends this process when the leading one has ended.
        let (order, fds) = orders.recv().context("the process with local rank 0 has ended")?;
        let begin = match order {
            Order::Finish { code } => return Ok(code),
            Order::Begin(begin) => begin,
        };
        let ended = RankProcesses::start_own(&begin, fds, &shown)?.wait(signals);
        if let Err(failure) = ended
            && failure.rank == begin.rank
        {
            note_error(&format!("error: {failure}"));
        }
    }
}

/// What the leading process says. When it has ended without a last word, so does this process, and its rank with it.
fn orders(mut member: LocalMember) -> Result<Receiver<(Order, Vec<OwnedFd>)>> {
    let (sender, orders) = mpsc::channel();
    let read = move || {
        loop {
            let order = member.receive().map_err(anyhow::Error::from).and_then(|(bytes, fds)| {
                Ok((serde_json::from_slice::<Order>(&bytes).context("an order that makes no sense")?, fds))
            });
            match order {
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
