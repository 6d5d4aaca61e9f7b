//! Ranks that another launcher has started: torchrun, Slurm's `srun`, Open MPI's or MPICH's `mpirun`. Each process finds its
//! rank, and the others, in variables of its environment.
//!
//! The variables are read by a function that the caller passes, so everything here is a function of data. A process may
//! carry the variables of several launchers (`mpirun` inside of an `srun`, Slurm with PMI). Those that are complete must
//! agree on rank and world size; the one that says most is taken. A world of one rank is no job of another launcher: shells
//! inside of an allocation carry such variables too.

mod mpi;
mod node_list;
mod slurm;
mod torchrun;
mod variables;

pub use node_list::expand_nodes;
pub use variables::{EnvironmentError, Variables, host_and_port};

/// A launcher whose variables are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForeignLauncher {
    /// PyTorch's `torchrun`, and everything that sets the same variables (Kubernetes' PyTorchJob).
    Torchrun,
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// MPICH's `mpirun` (Hydra), and Intel MPI's.
    Hydra,
    /// Slurm's `srun`.
    Slurm,
}

impl ForeignLauncher {
    /// All, the one that is taken first in front.
    pub const ALL: [ForeignLauncher; 4] =
        [ForeignLauncher::Torchrun, ForeignLauncher::OpenMpi, ForeignLauncher::Hydra, ForeignLauncher::Slurm];

    /// Its name, as the variable [`CHOICE`] has it.
    pub fn name(self) -> &'static str {
        match self {
            ForeignLauncher::Torchrun => "torchrun",
            ForeignLauncher::OpenMpi => "openmpi",
            ForeignLauncher::Hydra => "hydra",
            ForeignLauncher::Slurm => "slurm",
        }
    }

    fn read(self, variables: &Variables<'_>) -> Result<Option<ForeignRank>, EnvironmentError> {
        match self {
            ForeignLauncher::Torchrun => torchrun::read(variables),
            ForeignLauncher::OpenMpi => mpi::open_mpi(variables),
            ForeignLauncher::Hydra => mpi::hydra(variables),
            ForeignLauncher::Slurm => slurm::read(variables),
        }
    }
}

/// The variable that chooses a launcher by name, or none of them: `none`.
pub const CHOICE: &str = "PHALANX_LAUNCHER";

/// The variable with the address at which the launchers of several hosts meet, as `HOST:PORT`.
pub const RENDEZVOUS: &str = "PHALANX_RENDEZVOUS";

/// What another launcher says about one of its processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignRank {
    /// The launcher that said it.
    pub launcher: ForeignLauncher,
    /// Number of the rank.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// Number of the rank among those of its host.
    pub local_rank: usize,
    /// Number of ranks of its host.
    pub local_world_size: usize,
    /// Number of this host and of all hosts, if the variables say so.
    pub hosts: Option<(usize, usize)>,
    /// A name of the job that all its ranks know and no other job of this user has at the same time.
    pub job: String,
    /// Where the launchers of several hosts meet, if the variables say so: the host of rank 0, and a port.
    pub rendezvous: Option<(String, u16)>,
}

impl ForeignRank {
    /// Whether all ranks are on one host.
    pub fn is_on_one_host(&self) -> bool {
        self.local_world_size == self.world_size
    }

    /// The first rank of its host; ranks of a host are numbered consecutively.
    pub fn first_of_host(&self) -> usize {
        self.rank - self.local_rank
    }

    /// The number of this host and of all hosts: as the variables say, or as follows from hosts that all run as many ranks.
    ///
    /// # Errors
    /// Hosts that run different numbers of ranks, if the variables do not number them.
    pub fn host(&self) -> Result<(usize, usize), EnvironmentError> {
        let (first, local, world) = (self.first_of_host(), self.local_world_size, self.world_size);
        match self.hosts {
            Some(hosts) => Ok(hosts),
            None if world.is_multiple_of(local) && first.is_multiple_of(local) => {
                Ok((first / local, world / local))
            }
            None => Err(EnvironmentError(format!(
                "the variables of {} do not number the hosts, and {world} ranks are not {local} on each: start as many ranks on \
                 every host",
                self.launcher.name()
            ))),
        }
    }

    /// Refuses numbers that contradict each other.
    fn checked(self) -> Result<ForeignRank, EnvironmentError> {
        let ForeignRank { rank, world_size, local_rank, local_world_size, .. } = self;
        let name = self.launcher.name();
        let contradiction = |text: String| Err(EnvironmentError(format!("the variables of {name}: {text}")));
        if world_size == 0 || local_world_size == 0 {
            return contradiction("a world of no ranks".to_string());
        }
        if rank >= world_size {
            return contradiction(format!("rank {rank} of {world_size} ranks"));
        }
        if local_world_size > world_size || local_rank >= local_world_size {
            return contradiction(format!(
                "local rank {local_rank} of {local_world_size} ranks of this host, of {world_size} ranks in all"
            ));
        }
        if local_rank > rank || rank - local_rank + local_world_size > world_size {
            return contradiction(format!(
                "rank {rank} with local rank {local_rank} of {local_world_size}: the ranks of a host must be numbered \
                 consecutively (Slurm: --distribution=block; Open MPI: --map-by slot; MPICH: -ppn)"
            ));
        }
        Ok(self)
    }
}

/// The rank that another launcher has given to this process; `None` if none did, or if the world has one rank.
///
/// # Errors
/// Variables that are missing, that are no numbers, or that contradict each other.
pub fn foreign_rank(variables: &Variables<'_>) -> Result<Option<ForeignRank>, EnvironmentError> {
    let chosen = match variables.text(CHOICE).as_deref() {
        None => None,
        Some("none") => return Ok(None),
        Some(name) => {
            let Some(launcher) = ForeignLauncher::ALL.into_iter().find(|known| known.name() == name) else {
                let known = ForeignLauncher::ALL.map(ForeignLauncher::name).join(", ");
                return Err(EnvironmentError(format!(
                    "{CHOICE}={name}: no launcher of this name is known; known are {known}, and none"
                )));
            };
            let missing =
                || EnvironmentError(format!("{CHOICE}={name}, but the variables of {name} are not set"));
            Some(launcher.read(variables)?.ok_or_else(missing)?)
        }
    };
    let found = match chosen {
        Some(chosen) => Some(chosen),
        None => the_one_that_says_most(variables)?,
    };
    let Some(mut found) = found.filter(|found| found.world_size > 1) else { return Ok(None) };
    if let Some(address) = variables.text(RENDEZVOUS) {
        found.rendezvous = Some(variables::host_and_port(RENDEZVOUS, &address, false)?);
    }
    found.checked().map(Some)
}

/// Of the launchers whose variables are set, the first whose variables are complete; they must agree.
fn the_one_that_says_most(variables: &Variables<'_>) -> Result<Option<ForeignRank>, EnvironmentError> {
    let read = ForeignLauncher::ALL.map(|launcher| launcher.read(variables));
    let (mut found, mut incomplete): (Vec<ForeignRank>, Vec<EnvironmentError>) = Default::default();
    for result in read {
        match result {
            Ok(rank) => found.extend(rank),
            Err(error) => incomplete.push(error),
        }
    }
    let Some(first) = found.first() else {
        return match incomplete.into_iter().next() {
            Some(error) => Err(error),
            None => Ok(None),
        };
    };
    // A world of one rank is that of a shell inside of an allocation, and says nothing about this job.
    let others = found.iter().filter(|other| other.world_size > 1);
    let first = others.clone().next().unwrap_or(first);
    for other in others {
        if (other.rank, other.world_size) != (first.rank, first.world_size) {
            return Err(EnvironmentError(format!(
                "the variables of {} say rank {} of {}, and those of {} say rank {} of {}: choose one with \
                 {CHOICE}={} or {CHOICE}={} (or {CHOICE}=none)",
                first.launcher.name(),
                first.rank,
                first.world_size,
                other.launcher.name(),
                other.rank,
                other.world_size,
                first.launcher.name(),
                other.launcher.name(),
            )));
        }
    }
    let mut first = first.clone();
    if first.rendezvous.is_none() {
        first.rendezvous = found.iter().find_map(|other| other.rendezvous.clone());
    }
    Ok(Some(first))
}

#[cfg(test)]
mod tests;
