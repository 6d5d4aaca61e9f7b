//! The meshes on which kills, stops and full disks are tried: every small one, with every ZeRO stage.

/// Steps of every run on a mesh.
pub(crate) const STEPS: u64 = 40;

/// Steps between two saves, and between two evaluations.
pub(crate) const EVERY: u64 = 5;

/// One mesh.
pub(crate) struct Mesh {
    pub(crate) name: &'static str,
    pub(crate) ranks: usize,
    sets: &'static [&'static str],
}

const fn mesh(name: &'static str, ranks: usize, sets: &'static [&'static str]) -> Mesh {
    Mesh { name, ranks, sets }
}

/// One rank.
pub(crate) const ALONE: Mesh = mesh("1 rank", 1, &[]);

/// Two replicas.
pub(crate) const PAIR: Mesh = mesh("data 2, ZeRO 2", 2, &["data=2", "zero=2"]);

/// One, two and four ranks.
pub(crate) const MESHES: [Mesh; 21] = [
    ALONE,
    mesh("data 2, ZeRO 0", 2, &["data=2", "zero=0"]),
    mesh("data 2, ZeRO 1", 2, &["data=2", "zero=1"]),
    PAIR,
    mesh("data 2, ZeRO 3", 2, &["data=2", "zero=3"]),
    mesh("tensor 2", 2, &["tensor=2"]),
    mesh("tensor 2, sequence parallel", 2, &["tensor=2", "sequence_parallel=true"]),
    mesh("pipeline 2, 1f1b", 2, &["pipeline=2", "micro_batches=4"]),
    mesh("pipeline 2, zb-h1", 2, &["pipeline=2", "micro_batches=4", "schedule=zb-h1"]),
    mesh("data 4, ZeRO 0", 4, &["data=4", "zero=0"]),
    mesh("data 4, ZeRO 1", 4, &["data=4", "zero=1"]),
    mesh("data 4, ZeRO 2", 4, &["data=4", "zero=2"]),
    mesh("data 4, ZeRO 3", 4, &["data=4", "zero=3"]),
    mesh("tensor 4", 4, &["tensor=4"]),
    mesh("data 2, tensor 2, ZeRO 1", 4, &["data=2", "tensor=2", "zero=1"]),
    mesh("data 2, tensor 2, ZeRO 3", 4, &["data=2", "tensor=2", "zero=3"]),
    mesh("pipeline 2, data 2, ZeRO 0", 4, &["pipeline=2", "data=2", "micro_batches=2"]),
    mesh("pipeline 2, data 2, ZeRO 1", 4, &["pipeline=2", "data=2", "micro_batches=2", "zero=1"]),
    mesh("pipeline 2, data 2, ZeRO 2", 4, &["pipeline=2", "data=2", "micro_batches=2", "zero=2"]),
    mesh("pipeline 2, data 2, ZeRO 3", 4, &["pipeline=2", "data=2", "micro_batches=2", "zero=3"]),
    mesh("pipeline 2, tensor 2", 4, &["pipeline=2", "tensor=2", "micro_batches=2"]),
];

impl Mesh {
    /// `train small.toml --run r` on this mesh.
    pub(crate) fn train(&self, more: &[&str]) -> Vec<String> {
        self.words(&["train", "small.toml", "--run", "r"], more)
    }

    /// The same over so many hosts, which this machine plays.
    pub(crate) fn launch(&self, hosts: usize, more: &[&str]) -> Vec<String> {
        let (count, nproc) = (hosts.to_string(), (self.ranks / hosts).to_string());
        self.words(&["launch", "--hosts", &count, "--nproc", &nproc, "small.toml", "--run", "r"], more)
    }

    /// The launcher of one of so many hosts, which are namespaces of this machine.
    pub(crate) fn launch_host(&self, (host, hosts): (usize, usize), more: &[&str]) -> Vec<String> {
        let [host, count, nproc] = [host, hosts, self.ranks / hosts].map(|number| number.to_string());
        let place = ["launch", "--nnodes", &count, "--node-rank", &host, "--nproc", &nproc];
        self.words(&[&place[..], &["small.toml", "--run", "r"]].concat(), more)
    }

    fn words(&self, command: &[&str], more: &[&str]) -> Vec<String> {
        let mut words: Vec<String> = command.iter().map(|word| word.to_string()).collect();
        for set in self.sets {
            words.extend(["--set".to_string(), format!("parallel.{set}")]);
        }
        words.extend(more.iter().map(|word| word.to_string()));
        words
    }

    /// The command that goes on with what [`Mesh::train`] began.
    pub(crate) fn resume(&self) -> Vec<String> {
        self.train(&["--resume", "--quiet"])
    }
}
