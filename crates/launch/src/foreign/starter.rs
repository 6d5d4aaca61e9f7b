//! The process that has started those of a job on this host: mpirun or its daemon, srun's, or torchrun. It is found among the ancestors
//! of this process, by its name: scripts may stand between.

use std::os::fd::OwnedFd;

use phalanx_system::host::process;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::ForeignLauncher;

/// Ancestors that are looked at.
const GENERATIONS: usize = 16;

/// The process of a launcher that has started this one.
pub struct Starter {
    /// Its name, as `ps` shows it.
    pub name: String,
    /// Its number.
    pub pid: u32,
    /// Readable when it has ended.
    pub pidfd: OwnedFd,
}

impl Starter {
    /// The nearest ancestor of this process that is one of `launcher`; None if there is none in sight.
    pub fn find(launcher: ForeignLauncher) -> Option<Starter> {
        let ancestors = std::iter::successors(Some(std::process::id()), |pid| process::parent(*pid));
        let named = |pid: u32| Some((pid, process::name(pid).filter(|name| is_of(launcher, name, pid))?));
        let (pid, name) = ancestors.skip(1).take(GENERATIONS).find_map(named)?;
        let pidfd = pidfd_open(Pid::from_raw(i32::try_from(pid).ok()?)?, PidfdFlags::empty()).ok()?;
        // Its number may have been given away between the two looks.
        (process::name(pid)? == name).then_some(Starter { name, pid, pidfd })
    }
}

fn is_of(launcher: ForeignLauncher, name: &str, pid: u32) -> bool {
    let names: &[&str] = match launcher {
        ForeignLauncher::OpenMpi => &["mpirun", "mpiexec", "orterun", "orted", "prterun", "prted"],
        ForeignLauncher::Hydra => &["mpirun", "mpiexec", "hydra_", "pmi_proxy"],
        ForeignLauncher::Slurm => &["slurmstepd", "srun"],
        ForeignLauncher::Torchrun => {
            // A script of Python; newer ones rename themselves.
            let words = process::arguments(pid).unwrap_or_default();
            return words
                .iter()
                .any(|word| word.starts_with("torch.distributed.") || word.ends_with("torchrun"));
        }
    };
    names.iter().any(|start| name.starts_with(start))
}
