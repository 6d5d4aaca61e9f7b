//! A launcher that follows the one of host 0: starts the ranks of its host when that one says so, and ends with it.

use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use phalanx_collectives::secure::Secret;
use phalanx_collectives::{HostJob, Hosts, Network, Wire};
use phalanx_launch::{ControlPlane, Failure, LocalLeader, Message, Parting, receive_program};

use crate::folders::flight;
use crate::host::output::{TrainOutput, note, note_error};
use crate::host::signals::{STOPPED, Signals};
use crate::jobs::hosts::protocol::{FromLeader, FromMember, Preparation, decode, encode};
use crate::jobs::hosts::team::{SILENCE, listen};
use crate::jobs::launch::{RankProcesses, Start};
use crate::jobs::rank_output::Output;

/// The start of ranks that host 0 has announced.
struct Prepared {
    preparation: Preparation,
    job: HostJob,
}

/// A launcher that follows another one.
struct Member<'a> {
    plane: &'a mut ControlPlane,
    address: IpAddr,
    secret: Secret,
    plaintext: bool,
    pin: bool,
    helpers: Option<Arc<LocalLeader>>,
    signals: &'a Signals,
    output: TrainOutput,
    prepared: Option<Prepared>,
    /// Time after which host 0's launcher counts as lost if it says nothing.
    silence: Duration,
}

/// Settings with which a launcher that follows starts its ranks.
pub struct How {
    /// The job's secret.
    pub secret: Secret,
    /// True if traffic between hosts is not encrypted.
    pub plaintext: bool,
    /// True if each rank is bound to cores of its own.
    pub pin: bool,
    /// The processes that start the other ranks of this host, if another launcher has started one for each.
    pub helpers: Option<Arc<LocalLeader>>,
}

/// Follows the launcher of host 0 until the job is over; returns its exit code. `address` is this host's.
///
/// # Errors
/// When that launcher is gone before it has said how the job ended, unless this one was asked to stop.
pub fn follow(
    plane: &mut ControlPlane,
    address: IpAddr,
    how: How,
    signals: &Signals,
    output: &TrainOutput,
) -> Result<u8> {
    let output = output.clone();
    let How { secret, plaintext, pin, helpers } = how;
    let (prepared, silence) = (None, SILENCE);
    let mut member =
        Member { plane, address, secret, plaintext, pin, helpers, signals, output, prepared, silence };
    signals.others_are_told();
    let mut failed = false;
    loop {
        let said = match receive_program(member.plane, member.silence, &|| signals.came(), &note) {
            Ok(said) => said,
            // How the job ended was reported already.
            Err(_) if failed => return Ok(1),
            Err(parting @ Parting::Stopped(_)) => {
                note(&format!("stopped: {parting}"));
                return Ok(STOPPED);
            }
            Err(why) => bail!("{why}"),
        };
        for (_, bytes) in said {
            let (message, blob) = decode(&bytes)?;
            match message {
                FromLeader::Prepare(preparation) => member.prepare(preparation)?,
                FromLeader::Progress { line } => note(&format!("host 0 {line}")),
                FromLeader::Finish { code } => return Ok(code),
                FromLeader::Start { addresses } => {
                    let ended = member.start(addresses, blob);
                    failed = ended.is_err();
                    if !failed {
                        // Only the end of the job is still to be said, and a busy host 0 takes its time.
                        member.silence = member.silence.max(SILENCE);
                    }
                    if let Err(error) = ended {
                        note_error(&format!("error: {error:#}"));
                    }
                }
            }
        }
    }
}

impl Member<'_> {
    fn prepare(&mut self, preparation: Preparation) -> Result<()> {
        self.silence = Duration::from_secs(preparation.stall_timeout_s);
        let epoch = preparation.epoch;
        let prepared = self.try_prepare(&preparation);
        let answer = match prepared {
            Ok((job, addresses)) => {
                self.prepared = Some(Prepared { preparation, job });
                FromMember::Ready { epoch, addresses }
            }
            Err(error) => FromMember::Cannot { epoch, reason: format!("{error:#}") },
        };
        self.plane.send(0, &Message::Program(encode(&answer, &[])?));
        Ok(())
    }

    fn try_prepare(&mut self, preparation: &Preparation) -> Result<(HostJob, Vec<std::net::SocketAddr>)> {
        let sizes: Vec<usize> = preparation.hosts.iter().map(|host| host.ranks).collect();
        let hosts = Hosts::try_from(sizes).map_err(|why| anyhow!("{why}"))?;
        let own = self.plane.own_id();
        if !preparation.hosts.iter().any(|host| host.id == own) {
            bail!("host 0 starts {} hosts without this one", hosts.len());
        }
        check_folder(&preparation.run, &preparation.token)?;
        if preparation.wire == Wire::Mpi {
            phalanx_mpi::library().context("host 0 has chosen MPI")?;
        }
        self.plane.set_hosts(preparation.hosts.clone());
        let mut job =
            HostJob::on_host(&hosts, self.plane.own_host()).context("the memory that ranks share")?;
        let addresses = listen(&mut job, self.address)?;
        Ok((job, addresses))
    }

    fn start(&mut self, addresses: Vec<std::net::SocketAddr>, task: &[u8]) -> Result<()> {
        let Some(Prepared { preparation, job }) = self.prepared.take() else {
            bail!("host 0 starts ranks that it has not announced")
        };
        if addresses.len() != self.plane.ranks().world_size() {
            bail!("host 0 has {} addresses for {} ranks", addresses.len(), self.plane.ranks().world_size());
        }
        let network = Network {
            hosts: self.plane.ranks(),
            host: self.plane.own_host(),
            job: preparation.job,
            epoch: preparation.epoch,
            secret: self.secret.clone(),
            addresses,
            plaintext: self.plaintext,
            streams: preparation.streams,
            wire: preparation.wire,
        };
        let name = self.plane.hosts().get(self.plane.own_host()).map(|host| host.name.clone());
        let output = Output::shown(self.output.clone()).on_host(name).with_logs(&preparation.run);
        let timeout = Duration::from_secs(preparation.stall_timeout_s);
        let helpers = self.helpers.clone();
        self.signals.training_starts();
        let start = Start { task, network: Some(&network), timeout, pin: self.pin, output: &output, helpers };
        let ended = RankProcesses::start_in(job, &start)?.wait_with(self.signals, self.plane);
        ended.map(drop).map_err(|failure| explain(failure, &preparation.run))
    }
}

fn explain(failure: Failure, run: &Path) -> anyhow::Error {
    if let Err(error) = flight::write(run, &failure.flights) {
        note(&format!("the flight records could not be written: {error:#}"));
    }
    failure.into()
}

/// Checks that this host sees the run folder of host 0.
fn check_folder(run: &Path, (name, content): &(String, String)) -> Result<()> {
    const BYTES: u64 = 1024;
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '.' || c == '-';
    let path = run.join(name);
    let found =
        if name.chars().all(plain) { phalanx_system::files::read_text(&path, BYTES).ok() } else { None };
    if found.as_ref() != Some(content) {
        bail!(
            "it does not see the run folder {} of host 0: all ranks read the tokens there and write their part of each \
             checkpoint, so it must lie on a file system that all hosts share, under the same path; choose one with --run",
            run.display()
        );
    }
    Ok(())
}
