//! The variables that launchers set for their processes, written from their manuals: what each means is known here without the
//! program.

use std::net::TcpListener;

use crate::hostile::Random;

/// A variable with its value.
pub(super) type Set = (&'static str, String);

/// All variables that a case may set. What the campaign itself was started with is removed.
pub(super) const NAMES: [&str; 38] = [
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "OMPI_MCA_ess_base_jobid",
    "PMIX_NAMESPACE",
    "PMIX_RANK",
    "PMI_RANK",
    "PMI_SIZE",
    "PMI_JOBID",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_GTIDS",
    "SLURM_NTASKS",
    "SLURM_NPROCS",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_PTY_PORT",
    "SLURM_PTY_WIN_COL",
    "PHALANX_LAUNCHER",
    "PHALANX_RENDEZVOUS",
    "PHALANX_SECRET_FILE",
];

/// A launcher of processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Launcher {
    Torchrun,
    Slurm,
    OpenMpi,
    Hydra,
}

impl Launcher {
    pub(super) const ALL: [Launcher; 4] =
        [Launcher::Torchrun, Launcher::Slurm, Launcher::OpenMpi, Launcher::Hydra];

    /// As `PHALANX_LAUNCHER` has it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Launcher::Torchrun => "torchrun",
            Launcher::Slurm => "slurm",
            Launcher::OpenMpi => "openmpi",
            Launcher::Hydra => "hydra",
        }
    }

    /// The variable without which a process is none of its ranks.
    pub(super) fn rank(self) -> &'static str {
        match self {
            Launcher::Torchrun => "RANK",
            Launcher::Slurm => "SLURM_PROCID",
            Launcher::OpenMpi => "OMPI_COMM_WORLD_RANK",
            Launcher::Hydra => "PMI_RANK",
        }
    }

    /// Variables that a rank must have, beside its number.
    pub(super) fn needed(self) -> &'static [&'static str] {
        match self {
            Launcher::Torchrun => &["WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"],
            Launcher::Slurm => &["SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"],
            Launcher::OpenMpi => {
                &["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"]
            }
            Launcher::Hydra => &["PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
        }
    }

    /// The variable with the number of ranks.
    pub(super) fn size(self) -> &'static str {
        match self {
            Launcher::Slurm => "SLURM_STEP_NUM_TASKS",
            other => other.needed()[0],
        }
    }
}

/// A process of a job.
#[derive(Clone, Debug)]
pub(super) struct Process {
    pub(super) variables: Vec<Set>,
    /// The launcher's number.
    pub(super) number: usize,
    /// The rank that it is: ranks are numbered host by host.
    pub(super) rank: usize,
    pub(super) local: usize,
    pub(super) host: usize,
}

/// A job: how many processes each host has, and whether their numbers are dealt out host by host in turn.
#[derive(Clone, Debug)]
pub(super) struct Job {
    pub(super) launcher: Launcher,
    pub(super) sizes: Vec<usize>,
    pub(super) cyclic: bool,
    pub(super) processes: Vec<Process>,
}

impl Job {
    pub(super) fn world(&self) -> usize {
        self.sizes.iter().sum()
    }

    /// In words.
    pub(super) fn describe(&self) -> String {
        let dealt = if self.cyclic { ", cyclic" } else { "" };
        format!("{}, processes by host {:?}{dealt}", self.launcher.name(), self.sizes)
    }

    /// A job of `launcher` with such hosts.
    pub(super) fn new(launcher: Launcher, sizes: &[usize], cyclic: bool, random: &mut Random) -> Job {
        let block = (0..sizes.len()).flat_map(|host| (0..sizes[host]).map(move |local| (host, local)));
        let mut places: Vec<(usize, usize)> = block.collect();
        if cyclic {
            places.sort_by_key(|(host, local)| (*local, *host));
        }
        let given = Given {
            id: random.below(1_000_000_000).to_string(),
            sizes,
            places: &places,
            has_group: random.chance(0.5),
            has_tasks: random.chance(0.5),
        };
        // Slurm names the first node, and a port follows from the job.
        let port = free_port();
        let has_master = sizes.len() > 1 && (launcher != Launcher::Slurm || random.chance(0.5));
        let processes = places.iter().enumerate().map(|(number, (host, local))| {
            let mut variables = given.variables(launcher, number);
            if sizes.len() > 1 {
                variables.push(("PHALANX_SECRET_FILE", "secret".to_string()));
            }
            if has_master {
                variables.push(("MASTER_ADDR", "127.0.0.1".to_string()));
                variables.push(("MASTER_PORT", port.to_string()));
            }
            let rank = sizes[..*host].iter().sum::<usize>() + local;
            Process { variables, number, rank, local: *local, host: *host }
        });
        let processes = processes.collect();
        Job { launcher, sizes: sizes.to_vec(), cyclic, processes }
    }

    /// One of the jobs that this launcher can start.
    pub(super) fn random(launcher: Launcher, random: &mut Random) -> Job {
        // Hosts of different sizes are numbered by some launchers only.
        let even: [&[usize]; 5] = [&[2], &[4], &[1, 1], &[2, 2], &[1, 1, 1, 1]];
        let uneven: [&[usize]; 3] = [&[1, 3], &[3, 1], &[1, 1, 2]];
        let sizes = match launcher == Launcher::Slurm && random.chance(0.4) {
            true => *random.pick(&uneven),
            false => *random.pick(&even),
        };
        Job::new(launcher, sizes, launcher == Launcher::Slurm && random.chance(0.5), random)
    }
}

/// Facts of a job from which a launcher sets its variables.
struct Given<'a> {
    id: String,
    sizes: &'a [usize],
    /// Host and local number of each process.
    places: &'a [(usize, usize)],
    /// True if torchrun numbers the hosts, as Kubernetes' operators do not.
    has_group: bool,
    /// True if Slurm lists the tasks of each node.
    has_tasks: bool,
}

impl Given<'_> {
    /// The variables of a process.
    fn variables(&self, launcher: Launcher, number: usize) -> Vec<Set> {
        let (host, local) = self.places[number];
        let [world, here] = [self.sizes.iter().sum(), self.sizes[host]].map(|count: usize| count.to_string());
        let (rank, place, node) = (number.to_string(), local.to_string(), host.to_string());
        let list = |words: Vec<String>| words.join(",");
        match launcher {
            Launcher::Torchrun => {
                let mut variables = vec![
                    ("RANK", rank),
                    ("WORLD_SIZE", world),
                    ("LOCAL_RANK", place),
                    ("LOCAL_WORLD_SIZE", here),
                    ("TORCHELASTIC_RUN_ID", self.id.clone()),
                ];
                if self.has_group {
                    variables.push(("GROUP_RANK", node));
                    variables.push(("GROUP_WORLD_SIZE", self.sizes.len().to_string()));
                }
                variables
            }
            Launcher::OpenMpi => vec![
                ("OMPI_COMM_WORLD_RANK", rank),
                ("OMPI_COMM_WORLD_SIZE", world),
                ("OMPI_COMM_WORLD_LOCAL_RANK", place),
                ("OMPI_COMM_WORLD_LOCAL_SIZE", here),
                ("PMIX_NAMESPACE", self.id.clone()),
            ],
            Launcher::Hydra => vec![
                ("PMI_RANK", rank),
                ("PMI_SIZE", world),
                ("MPI_LOCALRANKID", place),
                ("MPI_LOCALNRANKS", here),
                ("PMI_JOBID", self.id.clone()),
            ],
            Launcher::Slurm => {
                let nodes = (0..self.sizes.len())
                    .map(|host| if host == 0 { "localhost".to_string() } else { format!("node{host}") });
                let mut variables = vec![
                    ("SLURM_PROCID", rank),
                    ("SLURM_LOCALID", place),
                    ("SLURM_NODEID", node),
                    ("SLURM_NTASKS", world.clone()),
                    ("SLURM_STEP_NUM_TASKS", world),
                    ("SLURM_STEP_NODELIST", list(nodes.collect())),
                    ("SLURM_STEP_TASKS_PER_NODE", list(self.sizes.iter().map(usize::to_string).collect())),
                    ("SLURM_JOB_ID", self.id.clone()),
                    ("SLURM_STEP_ID", "0".to_string()),
                ];
                if self.has_tasks {
                    let together = (0..self.places.len()).filter(|other| self.places[*other].0 == host);
                    variables
                        .push(("SLURM_GTIDS", list(together.map(|number| number.to_string()).collect())));
                }
                variables
            }
        }
    }
}

/// A port that is free, and stays free for long enough: the system gives others first.
pub(crate) fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    listener.map_or(29_500, |address| address.port())
}
