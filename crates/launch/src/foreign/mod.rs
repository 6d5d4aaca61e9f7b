//! Ranks that another launcher has started: torchrun, Slurm's `srun`, Open MPI's or MPICH's `mpirun`. Each process finds its
//! rank, and the others, in variables of its environment.
//!
//! The variables are read by a function that the caller passes, so everything here is a function of data. A process may
//! carry the variables of several launchers (`mpirun` inside of an `srun`, Slurm with PMI). They must agree on rank and world
//! size; the one that says the most is taken. A world of one rank is no job of another launcher: shells inside of an allocation carry
//! such variables too. Variables that do not make this process a rank, although they look so, are said ([`leftover`]).

mod leftover;
mod mpi;
mod node_list;
mod slurm;
mod starter;
mod torchrun;
mod variables;

use std::cell::RefCell;

use leftover::leftovers;
pub use node_list::expand_nodes;
pub use starter::Starter;
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
        let seen = RefCell::new(Vec::new());
        let see = |name: &str| {
            let value = variables.raw(name);
            let line = value
                .as_ref()
                .filter(|value| !value.trim().is_empty())
                .map(|value| format!("{name}={value}"));
            let mut seen = seen.borrow_mut();
            line.filter(|line| !seen.contains(line)).into_iter().for_each(|line| seen.push(line));
            value
        };
        let variables = Variables::new(&see);
        let read = match self {
            ForeignLauncher::Torchrun => torchrun::read(&variables),
            ForeignLauncher::OpenMpi => mpi::open_mpi(&variables),
            ForeignLauncher::Hydra => mpi::hydra(&variables),
            ForeignLauncher::Slurm => slurm::read(&variables),
        }?;
        Ok(read.map(|rank| ForeignRank { said: seen.borrow().join(" "), ..rank }))
    }

    /// The variables that number its ranks and say how many there are.
    fn rank_and_size(self) -> [&'static str; 2] {
        match self {
            ForeignLauncher::Torchrun => ["RANK", "WORLD_SIZE"],
            ForeignLauncher::OpenMpi => ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"],
            ForeignLauncher::Hydra => ["PMI_RANK", "PMI_SIZE"],
            ForeignLauncher::Slurm => ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS"],
        }
    }
}

/// The variable that chooses a launcher by name, or none of them: `none`.
pub const CHOICE: &str = "PHALANX_LAUNCHER";

/// The variable with the address at which the launchers of several hosts meet, as `HOST:PORT`.
pub const RENDEZVOUS: &str = "PHALANX_RENDEZVOUS";

/// One process of another launcher, as that launcher's variables describe it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignRank {
    /// The launcher that said it.
    pub launcher: ForeignLauncher,
    /// The launcher's number of the process.
    pub number: usize,
    /// Number of the rank: ranks are numbered host by host, also where the launcher numbers its processes otherwise.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// Number of the rank among those of its host.
    pub local_rank: usize,
    /// Number of ranks of its host.
    pub local_world_size: usize,
    /// True if the variables do not say which ranks share a host, and it was assumed.
    pub is_local_assumed: bool,
    /// Number of this host and of all hosts, if the variables say so.
    pub hosts: Option<(usize, usize)>,
    /// A name of the job that all its ranks know and no other job of this user has at the same time.
    pub job: String,
    /// Meeting point of the launchers of several hosts, if the variables give one: the host of rank 0, and a port.
    pub rendezvous: Option<(String, u16)>,
    /// The variables that say all this: `RANK=1 WORLD_SIZE=4`.
    pub said: String,
}

/// Result of reading the variables of other launchers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Foreign {
    /// The rank of this process; None if no launcher has given it one, or if the world has one rank.
    pub rank: Option<ForeignRank>,
    /// Lines for the user about variables that were not followed.
    pub notes: Vec<String>,
}

impl ForeignRank {
    /// Its number and the number of all, in words.
    fn describe(&self) -> String {
        let ForeignRank { number, world_size, local_rank, local_world_size, .. } = self;
        let local = match self.is_local_assumed {
            true => String::new(),
            false => format!(", {local_rank} of {local_world_size} on this host"),
        };
        format!("rank {number} of {world_size}{local}")
    }

    /// Returns whether both mean the same rank.
    fn agrees_with(&self, other: &ForeignRank) -> bool {
        let local = |rank: &ForeignRank| (rank.local_rank, rank.local_world_size);
        let assumed = self.is_local_assumed || other.is_local_assumed;
        (self.number, self.world_size) == (other.number, other.world_size)
            && (assumed || local(self) == local(other))
    }

    /// Returns whether all ranks are on one host.
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
            None if world.is_multiple_of(local) => Err(self.is_not_in_order()),
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
        let is_elsewhere = |(host, hosts): (usize, usize)| host >= hosts || hosts > world_size;
        if let Some((host, hosts)) = self.hosts.filter(|hosts| is_elsewhere(*hosts)) {
            return contradiction(format!("host {host} of {hosts} hosts, of {world_size} ranks in all"));
        }
        if local_world_size > world_size || local_rank >= local_world_size {
            return contradiction(format!(
                "local rank {local_rank} of {local_world_size} ranks of this host, of {world_size} ranks in all"
            ));
        }
        // Where all hosts run as many ranks, each begins at a multiple of that. Slurm says how many each runs.
        let begins_elsewhere = |(host, hosts): (usize, usize)| {
            let are_even = hosts * local_world_size == world_size && self.launcher != ForeignLauncher::Slurm;
            are_even && host * local_world_size + local_rank != rank
        };
        let too_late = local_rank > rank || rank - local_rank + local_world_size > world_size;
        if too_late || self.hosts.is_some_and(begins_elsewhere) {
            return Err(self.is_not_in_order());
        }
        Ok(self)
    }

    fn is_not_in_order(&self) -> EnvironmentError {
        let ForeignRank { launcher, rank, local_rank, local_world_size, .. } = self;
        EnvironmentError(format!(
            "the variables of {}: rank {rank} with local rank {local_rank} of {local_world_size}: the ranks of a host must be numbered \
             consecutively (Open MPI: --map-by slot; MPICH: -ppn)",
            launcher.name()
        ))
    }
}

/// The rank that another launcher has given to this process, if one did.
///
/// # Errors
/// Variables that are missing, that are no numbers, or that contradict each other.
pub fn foreign(variables: &Variables<'_>) -> Result<Foreign, EnvironmentError> {
    let chosen = match variables.text(CHOICE).as_deref() {
        None => None,
        Some("none") => return Ok(Foreign::default()),
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
    let is_chosen = chosen.is_some();
    let (found, mut notes) = match chosen {
        Some(chosen) => (Some(chosen), Vec::new()),
        None => agreed(variables)?,
    };
    let Some(mut found) = found.map(ForeignRank::checked).transpose()? else {
        notes.extend(leftovers(variables, None));
        return Ok(Foreign { rank: None, notes });
    };
    if !is_chosen {
        notes.extend(leftovers(variables, Some(found.world_size)));
    }
    if found.world_size == 1 {
        return Ok(Foreign { rank: None, notes });
    }
    if let Some(address) = variables.text(RENDEZVOUS) {
        found.rendezvous = Some(variables::host_and_port(RENDEZVOUS, &address, false)?);
    }
    Ok(Foreign { rank: Some(found), notes })
}

/// Returns the rank on which all launchers with complete variables agree, and lines for the user about launchers whose variables
/// are incomplete.
fn agreed(variables: &Variables<'_>) -> Result<(Option<ForeignRank>, Vec<String>), EnvironmentError> {
    let (mut complete, mut incomplete): (Vec<ForeignRank>, Vec<_>) = Default::default();
    for launcher in ForeignLauncher::ALL {
        match launcher.read(variables) {
            Ok(rank) => complete.extend(rank),
            Err(error) => incomplete.push((launcher, error)),
        }
    }
    // A world of one rank is that of a shell inside of an allocation, and says nothing about this job.
    let several: Vec<&ForeignRank> = complete.iter().filter(|rank| rank.world_size > 1).collect();
    let first = several.iter().find(|rank| !rank.is_local_assumed).or(several.first()).copied();
    let Some(first) = first.or(complete.first()) else {
        return match incomplete.into_iter().next() {
            Some((_, error)) => Err(error),
            None => Ok((None, Vec::new())),
        };
    };
    if let Some(other) = several.iter().find(|other| !other.agrees_with(first)) {
        return Err(disagreement(first, (other.launcher, &other.describe())));
    }
    let mut notes = Vec::new();
    for (launcher, error) in incomplete {
        let [rank, size] = launcher.rank_and_size().map(|name| variables.text(name).map(|text| (name, text)));
        let differs = |given: &Option<(&str, String)>, number: usize| {
            given.as_ref().is_some_and(|(_, text)| *text != number.to_string())
        };
        if differs(&rank, first.number) || differs(&size, first.world_size) {
            let given: Vec<String> =
                [rank, size].into_iter().flatten().map(|(name, text)| format!("{name}={text}")).collect();
            return Err(disagreement(first, (launcher, &given.join(" "))));
        }
        if rank.is_none() || size.is_none() {
            notes
                .push(format!("the variables of {} are followed, not these: {error}", first.launcher.name()));
        }
    }
    let rendezvous = complete.iter().find_map(|other| other.rendezvous.clone());
    let rendezvous = first.rendezvous.clone().or(rendezvous);
    Ok((Some(ForeignRank { rendezvous, ..first.clone() }), notes))
}

fn disagreement(first: &ForeignRank, (launcher, says): (ForeignLauncher, &str)) -> EnvironmentError {
    let (one, other) = (first.launcher.name(), launcher.name());
    EnvironmentError(format!(
        "the variables of {one} say {}, and those of {other} say {says}: choose one with {CHOICE}={one} or {CHOICE}={other} (or \
         {CHOICE}=none)",
        first.describe()
    ))
}

#[cfg(test)]
mod tests;
