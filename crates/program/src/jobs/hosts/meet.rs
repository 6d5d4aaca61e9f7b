//! The launchers of a job's hosts meet: who they are, where, and where the secret comes from.

use std::cell::RefCell;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use phalanx_collectives::secure::{Protection, Secret};
use phalanx_launch::{Introduction, Meeting, Met, Parting, connect, create_secret, read_secret};
use phalanx_system::host::cores::{boot_id, host_name};

use crate::arguments::args::BUILD;
use crate::host::host_kernels::HostKernels;
use crate::host::output::{note, print_line};
use crate::host::signals::{Farewell, Signals};

/// Source of the job's secret.
pub enum SecretSource {
    /// A file that only this user can read; host 0 makes it if it is not there.
    File(PathBuf),
    /// It was handed over already.
    Known(Secret),
}

/// The place of this host among those of a job.
pub struct HostPlace {
    /// Number of hosts.
    pub hosts: usize,
    /// Number of this one.
    pub host: usize,
    /// Address at which the launcher of host 0 listens.
    pub rendezvous: (String, u16),
    /// Number of ranks of this host.
    pub ranks: usize,
    /// The kernels of its processor.
    pub kernels: HostKernels,
    /// True if traffic between hosts is not encrypted.
    pub plaintext: bool,
    /// The run folder, which is the same on all hosts of a job.
    pub run: PathBuf,
    /// Time in which all hosts have to come.
    pub limit: Duration,
    /// True if host 0 prints the port at which it listens, for the process that started it.
    pub announces: bool,
    /// Reason why this process is a launcher of several hosts, if the user did not start it as one; it ends the first line of a wait.
    pub by: String,
}

/// Warning of host 0 about a job without protection.
const PLAINTEXT: &str = "--plaintext: what ranks of different hosts exchange is neither encrypted nor protected against changes on the way; only for \
                         networks you trust";

/// Meets the launchers of the other hosts; host 0 waits for all of them, the others for host 0. `lost` names a host that will not
/// come, if whoever has started this launcher knows one.
///
/// # Errors
/// A [`Parting`] for who was asked to stop; hosts that do not come in time, do not know the secret or contradict each other, and a
/// secret that others can read.
pub fn meet(
    place: &HostPlace,
    source: &SecretSource,
    signals: &Signals,
    lost: &dyn Fn() -> Option<String>,
) -> Result<(Met, Secret)> {
    let protection = if place.plaintext { Protection::Plaintext } else { Protection::Encrypted };
    // A secret that was handed over is that of one job alone, and its hosts may see the folder under different paths here.
    let job = match source {
        SecretSource::Known(_) => String::new(),
        SecretSource::File(_) => name_of_job(&place.run)?,
    };
    let own = Introduction {
        name: host_name(),
        machine: boot_id(),
        host: place.host,
        hosts: place.hosts,
        ranks: place.ranks,
        build: BUILD,
        job,
        about: place.kernels.to_text(),
    };
    let (host, port) = (place.rendezvous.0.as_str(), place.rendezvous.1);
    if place.host == 0 {
        if port == 0 && !place.announces {
            bail!(
                "--rendezvous {host}:0: the other hosts could not know the port; give one that is free on host 0"
            );
        }
        let (secret, _made) = own_secret(source, signals)?;
        let meeting = Meeting::listen(host, port).map_err(|why| anyhow!("{why}"))?;
        announce(place, &meeting)?;
        signals.others_are_told();
        let ends = || {
            let asked = signals.came().then(|| Parting::Stopped("this host was asked to stop".to_string()));
            asked.or_else(|| lost().map(Parting::Failed))
        };
        let met = meeting.gather(own, &secret, protection, place.limit, &note, &ends)?;
        return Ok((met, secret));
    }
    if port == 0 {
        bail!("--rendezvous {host}:0: give the port at which host 0 listens");
    }
    let used = RefCell::new(None);
    let secret = || {
        let found = match source {
            SecretSource::Known(secret) => Some(secret.clone()),
            SecretSource::File(path) => match read_secret(path) {
                Ok(secret) => Some(secret),
                Err(error) if error.kind() == ErrorKind::NotFound => None,
                Err(error) => return Err(format!("the secret: {error}")),
            },
        };
        used.replace(found.clone());
        Ok(found)
    };
    let said = AtomicBool::new(false);
    let first = |line: &str| {
        let by = if said.swap(true, Ordering::Relaxed) { "" } else { &place.by };
        note(&format!("{line}{by}"));
    };
    let met = connect((host, port), &secret, &own, protection, place.limit, &first)
        .map_err(|why| anyhow!("{why}"))?;
    let secret = used.take().context("a connection without a secret")?;
    Ok((met, secret))
}

/// Says where host 0 listens, and what protects nothing.
fn announce(place: &HostPlace, meeting: &Meeting) -> Result<()> {
    if place.announces {
        print_line(&format!("{{\"rendezvous_port\":{}}}", meeting.port()))?;
    } else if place.hosts > 1 {
        note(&format!("host 0 of {} listens at {}{}", place.hosts, meeting.describe(), place.by));
    }
    if place.plaintext {
        note(PLAINTEXT);
    }
    Ok(())
}

/// By what hosts see that they come for the same job: the path of its run folder, whose end is enough to tell it.
fn name_of_job(run: &Path) -> Result<String> {
    const SHOWN: usize = 200;
    let path = std::path::absolute(run).context("the run folder")?.to_string_lossy().into_owned();
    let start = path.char_indices().rev().nth(SHOWN).map_or(0, |(at, _)| at);
    Ok(path[start..].to_string())
}

/// A secret file that this launcher has made. It is there while the hosts meet; one that remained would be that of the next job.
struct Made<'a> {
    path: &'a Path,
    /// Removes it when a signal ends this program at once.
    _farewell: Arc<Farewell>,
}

impl Drop for Made<'_> {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.path);
    }
}

/// The secret of the host that leads, which makes it if it is not there.
fn own_secret<'a>(source: &'a SecretSource, signals: &Signals) -> Result<(Secret, Option<Made<'a>>)> {
    let path = match source {
        SecretSource::Known(secret) => return Ok((secret.clone(), None)),
        SecretSource::File(path) => path,
    };
    match read_secret(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        found => {
            let secret = found.context("the secret")?;
            note(&format!("the secret {} was there: it is used, and stays", path.display()));
            return Ok((secret, None));
        }
    }
    let made = path.clone();
    let (secret, _farewell) = signals.before_leaving(|| {
        let secret = create_secret(path);
        let secret = secret.with_context(|| format!("cannot make the secret {}", path.display()))?;
        Ok((secret, move || _ = std::fs::remove_file(&made)))
    })?;
    note(&format!(
        "made the secret {} for the time in which the hosts meet: the others read it there, so it must lie on a file system \
         that all share",
        path.display()
    ));
    Ok((secret, Some(Made { path, _farewell })))
}
