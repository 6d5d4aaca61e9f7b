//! `phalanx launch`: trains on several hosts, of which this process launches the ranks of one, or starts the launchers of all.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use phalanx_collectives::{MAX_WORLD, Wire};
use phalanx_launch::host_and_port;

use crate::arguments::launch_args::LaunchArgs;
use crate::arguments::train_args::Show;
use crate::commands::train::train_with;
use crate::folders::run_folder::RunFolder;
use crate::host::environment::{self, Environment};
use crate::host::output::{TrainOutput, note};
use crate::host::signals::Signals;
use crate::jobs::hosts::shares::ranks_of_a_host;
use crate::jobs::hosts::{
    Between, HostPlace, How, LostHost, SecretSource, Team, follow, lead_from_stdin, meet, supervise,
    without_launcher,
};

/// Launches.
///
/// # Errors
/// Errors of the user's input, hosts that do not meet, and failures of the run.
pub fn launch(args: &LaunchArgs, environment: Environment) -> Result<ExitCode> {
    without_launcher(args.train.network.transport)?;
    if args.hostfile.is_some() || args.hosts.is_some() {
        return supervise(args);
    }
    let (Some(hosts), Some(host)) = (args.nnodes, args.node_rank) else {
        bail!(
            "give --nnodes, --node-rank and --rendezvous (one launcher per host), or --hostfile (all hosts over ssh), or \
             --hosts (several hosts on this machine); `phalanx train` trains on one host"
        )
    };
    if host >= hosts {
        bail!("--node-rank {host}: hosts are numbered from 0, and --nnodes is {hosts}");
    }
    let signals = Signals::take_over()?;
    let lost = LostHost::default();
    let source = match (args.from_stdin, environment::secret_file(&args.train.network)) {
        (true, _) => SecretSource::Known(lead_from_stdin(&signals, &lost)?),
        (false, Some(path)) => SecretSource::File(path),
        (false, None) => bail!(
            "give --secret-file FILE: a file that only you can read, the same on all hosts; host 0 makes it if it is not there"
        ),
    };
    if hosts > MAX_WORLD {
        bail!("--nnodes {hosts}: every host runs a rank, and a job has at most {MAX_WORLD}");
    }
    let rendezvous = args.rendezvous.as_deref().context("--rendezvous HOST:PORT is missing")?;
    let place = HostPlace {
        hosts,
        host,
        rendezvous: host_and_port("--rendezvous", rendezvous, args.from_stdin)?,
        ranks: ranks_of_a_host(&args.train, hosts)?,
        kernels: environment.to_host_kernels(),
        plaintext: args.train.network.plaintext,
        run: RunFolder::named(args.train.run.as_deref(), args.train.config.as_deref())?.path().to_path_buf(),
        limit: Duration::from_secs(args.train.network.join_timeout),
        announces: args.from_stdin && host == 0,
        by: String::new(),
    };
    let output = TrainOutput::default();
    let ended = meet_and_train(args, &place, (&source, &lost), environment, &signals, &output);
    output.finish();
    ended
}

fn meet_and_train(
    args: &LaunchArgs,
    place: &HostPlace,
    (source, lost): (&SecretSource, &LostHost),
    environment: Environment,
    signals: &Signals,
    output: &TrainOutput,
) -> Result<ExitCode> {
    let (mut met, secret) = meet(place, source, signals, &|| lost.reason())?;
    if place.host > 0 {
        let how =
            How { secret, plaintext: args.train.network.plaintext, pin: !args.train.no_pin, helpers: None };
        return follow(&mut met.plane, met.address, how, signals, output).map(ExitCode::from);
    }
    let network = &args.train.network;
    let between = Between { wire: Wire::Tcp, plaintext: network.plaintext, streams: network.streams() };
    let mut team = Team::new(met.plane, met.address, secret, between)?;
    let mut train = args.train.clone();
    train.overrides.nproc = Some(team.world_size());
    if args.train.show() == Show::Progress {
        note(&team.describe());
    }
    let environment = team.kernels_of_all(environment);
    let ended = train_with(&train, environment, signals, output, Some(&mut team), None);
    // The run has ended on this host; the others report the same end with the same code.
    team.finish(&ended);
    ended.map(ExitCode::from)
}
