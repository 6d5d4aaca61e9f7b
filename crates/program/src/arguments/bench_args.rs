//! Command-line arguments of the benchmarks, and their help.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use phalanx_plan::trace::DType;

use crate::arguments::byte_size::parse_bytes;
use crate::arguments::counts::{self, whole};
use crate::arguments::memory_args::BenchMemoryArgs;
use crate::arguments::overrides::Overrides;
use crate::arguments::strategies_args::BenchStrategiesArgs;

/// Measures steps, placements in memory, kernels, collectives, disks or strategies of parallelism
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// The benchmark.
    #[command(subcommand)]
    pub what: BenchCommand,
}

/// The benchmarks.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    Step(BenchStepArgs),
    Memory(BenchMemoryArgs),
    Kernels(BenchKernelsArgs),
    Collectives(BenchCollectivesArgs),
    Disk(BenchDiskArgs),
    Strategies(BenchStrategiesArgs),
}

/// Times training steps on random tokens
///
/// The engine, the ranks and the plan are those of `train`; data, evaluations and checkpoints are left out, and nothing
/// is written. Then prints the time of each kernel in a step, beside the minimum that is possible on this machine.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    phalanx bench step examples/gpt2_mini.toml\n  \
    phalanx bench step examples/gpt2_mini.toml --nproc 2 --set parallel.zero=3 --steps 10 --json")]
pub struct BenchStepArgs {
    /// Configuration (TOML)
    pub config: PathBuf,
    #[command(flatten)]
    pub overrides: Overrides,
    /// Steps that are timed
    #[arg(long, default_value_t = 5, value_name = "K", value_parser = whole::<usize>(1..=counts::TIMES))]
    pub steps: usize,
    /// Steps before the first that is timed; at least 3 on a GPU, whose graphs are made in the first steps
    #[arg(long, default_value_t = 1, value_name = "W", value_parser = whole::<usize>(0..=counts::TIMES))]
    pub warmup: usize,
    /// Print figures as JSON
    #[arg(long)]
    pub json: bool,
}

/// Times every kernel of a GPT-2 step alone
///
/// Each kernel is called repeatedly with the shapes of the step, by one thread and by all. Its speed is compared with
/// peaks measured in the same run: operations on registers, and memory read and written.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    phalanx bench kernels\n  \
    phalanx bench kernels --setting small --dtype bf16 --only linear --only attention\n  \
    PHALANX_ISA=avx2 phalanx bench kernels --json | jq '.kernels[] | [.name, .size, .runs[0].floor_share]'")]
pub struct BenchKernelsArgs {
    /// Shapes: GPT-2 of 512 x 8, batch 8 of 256 tokens; 768 x 12, batch 4 of 256; nanoGPT's CPU setting
    #[arg(long, value_enum, default_value_t = BenchSetting::Mini, value_name = "NAME")]
    pub setting: BenchSetting,
    /// Threads beside one; all cores when left out
    #[arg(long, value_name = "N", value_parser = whole::<usize>(1..=counts::THREADS))]
    pub threads: Option<usize>,
    /// Type of activations and parameters
    #[arg(long, value_enum, default_value_t = BenchDType::F32, value_name = "TYPE")]
    pub dtype: BenchDType,
    /// Only kernels whose name and size contain this; may be repeated
    #[arg(long, value_name = "NAME")]
    pub only: Vec<String>,
    /// Milliseconds of each kernel
    #[arg(long, default_value_t = 300, value_name = "T", value_parser = whole::<u64>(1..=counts::MILLISECONDS))]
    pub ms: u64,
    /// Print figures as JSON
    #[arg(long)]
    pub json: bool,
}

/// Shapes of `bench kernels`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BenchSetting {
    Mini,
    Small,
    Nano,
    /// For tests only.
    #[value(hide = true)]
    Tiny,
}

impl BenchSetting {
    /// The text of the argument.
    pub fn name(self) -> &'static str {
        match self {
            BenchSetting::Mini => "mini",
            BenchSetting::Small => "small",
            BenchSetting::Nano => "nano",
            BenchSetting::Tiny => "tiny",
        }
    }
}

impl BenchDType {
    /// The type itself.
    pub fn dtype(self) -> DType {
        match self {
            BenchDType::F32 => DType::F32,
            BenchDType::Bf16 => DType::BF16,
            BenchDType::F16 => DType::F16,
        }
    }
}

/// Times collectives between ranks
///
/// With --transport shared, ranks are processes that share memory. With tcp, each rank is on a host of its own, and with
/// hierarchical they are on two hosts: these hosts are pretended by threads of one process, which speak TCP over the loopback
/// device. With mpi, the ranks are the processes that mpirun has started, each as if alone on its host; this needs a build with
/// MPI.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    phalanx bench collectives --nproc 2\n  \
    phalanx bench collectives --nproc 4 --op all_reduce --bytes 4096,1048576,134217728 --json\n  \
    phalanx bench collectives --dtype bf16\n  \
    phalanx bench collectives --nproc 4 --transport hierarchical --plaintext\n  \
    mpirun -n 2 phalanx bench collectives --transport mpi\n\n\
    GB/s (algbw_gbs) is the size of the whole buffer over the time, in 10^9 bytes a second; bus GB/s is what each rank sends by \
    the best algorithm known; the limit is the rate of copies in memory, or of one connection over the loopback device.")]
pub struct BenchCollectivesArgs {
    /// Number of ranks, 2 when left out; with --transport mpi those of mpirun
    #[arg(long, value_name = "N", value_parser = whole::<usize>(1..=counts::JOB_RANKS))]
    pub nproc: Option<usize>,
    /// Operation; the first three when left out; may be repeated
    #[arg(long, value_enum, value_name = "OP")]
    pub op: Vec<BenchOp>,
    /// Type of the elements
    #[arg(long, value_enum, default_value_t = BenchDType::F32, value_name = "TYPE")]
    pub dtype: BenchDType,
    /// What carries the bytes between ranks
    #[arg(long, value_enum, default_value_t = BenchTransport::Shared, value_name = "TRANSPORT")]
    pub transport: BenchTransport,
    /// Send what goes between hosts as it is: neither encrypted nor protected against changes on the way
    #[arg(long)]
    pub plaintext: bool,
    /// Connections between two ranks of different hosts, over which large messages are divided [default: 2]
    #[arg(long, value_name = "N", value_parser = whole::<usize>(1..=counts::STREAMS))]
    pub streams: Option<usize>,
    /// Sizes of the whole buffer
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "4096,65536,1048576,16777216,134217728",
        value_name = "B,...",
        value_parser = whole::<usize>(1..=counts::BYTES)
    )]
    pub bytes: Vec<usize>,
    /// Print a JSON line for each measurement
    #[arg(long)]
    pub json: bool,
}

/// Measures how fast disk memory is read and written
///
/// Chunks of 64 MiB go through the engine's own disk memory in the given folders, as in training with
/// memory.optimizer = "nvme": in pieces of 1 MiB, several in flight, past the page cache. Each round writes all chunks, reads
/// all, and reads and writes each as an update does; the best round counts. With several folders, each is measured alone, and
/// then all together, striped. Where fio is installed, it moves the same bytes in the same folders by the same requests.
/// Nothing stays in the folders.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    phalanx bench disk /mnt/nvme\n  \
    phalanx bench disk /mnt/nvme0 /mnt/nvme1 --size 8GiB --rounds 5\n  \
    phalanx bench disk /mnt/nvme --checksums --no-fio --json | jq '.[0].read_bytes_per_s'")]
pub struct BenchDiskArgs {
    /// Folders, on local disks
    #[arg(required = true, value_name = "FOLDER")]
    pub folders: Vec<PathBuf>,
    /// Bytes of each pass; 2 GiB when left out, or half of what is free
    #[arg(long, value_parser = parse_bytes, value_name = "BYTES")]
    pub size: Option<u64>,
    /// Rounds; the best counts
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = whole::<usize>(1..=counts::TIMES))]
    pub rounds: usize,
    /// Keep and compare checksums, as memory.nvme_checksums does
    #[arg(long)]
    pub checksums: bool,
    /// Do not run fio
    #[arg(long)]
    pub no_fio: bool,
    /// Print figures as JSON
    #[arg(long)]
    pub json: bool,
}

/// Operations of `bench collectives`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum BenchOp {
    AllReduce,
    ReduceScatter,
    AllGather,
    Broadcast,
}

/// Transports of `bench collectives`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum BenchTransport {
    Shared,
    Tcp,
    Hierarchical,
    Mpi,
}

/// Element types of `bench`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum BenchDType {
    F32,
    Bf16,
    F16,
}
