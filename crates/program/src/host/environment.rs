//! The environment variables: the one place that reads them. Ranks inherit them from their launcher.
//!
//! They decide how devices compute, so the factory that makes devices is here, too.

mod kernels;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Result, anyhow};
use phalanx_cpu::peak::{self, Bandwidth};
use phalanx_cpu::{Cpu, CpuFactory, Options, ProductMethod};
use phalanx_cuda::{CudaFactory, Made};
use phalanx_launch::{Foreign, Variables};
use phalanx_simd::Isa;
use phalanx_simd::tiles::{self, TileUnit};
use phalanx_simulated::SimulatedFactory;
use phalanx_tensor::{Arena, DType, Device, DeviceFactory, DeviceRequest, Kernels};
use phalanx_train::config::{DeviceChoice, DeviceConfig, KernelSet};

use crate::arguments::network_args::NetworkArgs;
use crate::host::card_needs::CardNeeds;

/// Instruction set of the kernels: `portable`, `avx2`, `avx512` or `avx512bf16`, without tile registers; or tile registers for
/// matrix products, beside the fastest of these: `amx`, or `amx-model`, which computes what they would.
const ISA: &str = "PHALANX_ISA";

/// Set to anything, it switches colours off.
const NO_COLOR: &str = "NO_COLOR";

/// Kind of the terminal; `dumb` has no colours.
const TERM: &str = "TERM";

/// Path of NVRTC, which compiles the kernels of NVIDIA GPUs: a folder or a file.
const NVRTC: &str = "PHALANX_NVRTC";

/// Path of cuBLASLt, which multiplies matrices on NVIDIA GPUs: a folder or a file; or `off`.
const CUBLAS: &str = "PHALANX_CUBLAS";

/// Set to `off`, cuBLASLt computes products with odd extents (50,257 classes) as a whole.
const SPLITS_ODD: &str = "PHALANX_CUDA_SPLITS_ODD";

/// Which of the algorithms that cuBLASLt names each product has: 1 for the first, the default.
const ALGORITHM: &str = "PHALANX_CUBLAS_ALGORITHM";

/// Path of NCCL, which moves bytes between NVIDIA GPUs: a folder or a file.
const NCCL: &str = "PHALANX_NCCL";

/// Set to `off`, kernels of NVIDIA GPUs are launched one by one, not as graphs.
const GRAPHS: &str = "PHALANX_CUDA_GRAPHS";

/// The folder of what a program may compute again, and the home folder, which has one.
const CACHE_HOME: &str = "XDG_CACHE_HOME";
const HOME: &str = "HOME";

/// The cache of the Hugging Face hub's programs: its folder, and the folder that has it unless the first is set.
const HUB_CACHE: [&str; 2] = ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"];
const HUB_HOME: &str = "HF_HOME";

/// The folder of models that the Hugging Face hub's programs have downloaded.
pub fn hub_cache() -> Option<PathBuf> {
    let folder = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = folder(HOME);
    let cache = || folder(CACHE_HOME).or_else(|| Some(home.as_ref()?.join(".cache")));
    let hub_home = || folder(HUB_HOME).or_else(|| Some(cache()?.join("huggingface")));
    let hub = HUB_CACHE.into_iter().find_map(folder).or_else(|| Some(hub_home()?.join("hub")))?;
    // As the hub's programs do.
    match (hub.strip_prefix("~"), &home) {
        (Ok(rest), Some(home)) => Some(home.join(rest)),
        _ => Some(hub),
    }
}

/// Options for the use of cards, of which each rank may take `memory_bytes` at most. No rank communicates between cards, unless
/// `communicators` is set.
pub fn cuda_options(memory_bytes: Option<u64>) -> phalanx_cuda::Options {
    let folder = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = folder(CACHE_HOME).or_else(|| Some(folder(HOME)?.join(".cache")));
    let cublas = folder(CUBLAS);
    let library_products = cublas.as_deref() != Some(Path::new("off"));
    phalanx_cuda::Options {
        nvrtc: folder(NVRTC),
        nccl: folder(NCCL),
        cublas: cublas.filter(|_| library_products),
        library_products,
        // `Environment::read` refuses others.
        algorithm: cublas_algorithm().unwrap_or_default(),
        splits_odd: folder(SPLITS_ODD).as_deref() != Some(Path::new("off")),
        folders: phalanx_cuda::Folders::find(&|name| std::env::var_os(name), Path::new("/")),
        cache: cache.map(|folder| folder.join("phalanx/cuda")),
        memory_bytes,
        graphs: folder(GRAPHS).as_deref() != Some(Path::new("off")),
        ..phalanx_cuda::Options::default()
    }
}

/// Which algorithm products have, the first with 0.
fn cublas_algorithm() -> Result<usize> {
    let Some(value) = std::env::var_os(ALGORITHM).filter(|value| !value.is_empty()) else { return Ok(0) };
    let number = value.to_str().and_then(|value| value.parse().ok());
    match number.filter(|number| (1..=phalanx_cuda::ALGORITHMS).contains(number)) {
        Some(number) => Ok(number - 1),
        None => Err(anyhow!(
            "{ALGORITHM} is {value:?}: expected 1 (the first that cuBLASLt names for a product) to {}",
            phalanx_cuda::ALGORITHMS
        )),
    }
}

/// Work queues of a card. With fewer than streams, one that waits may stand in front of the one that it waits for.
const QUEUES: (&str, &str) = ("CUDA_DEVICE_MAX_CONNECTIONS", "32");

/// Lets a rank's driver have a queue for each stream, unless the user has said how many: it reads the variable when it starts.
pub fn give_queues(rank: &mut Command) {
    if std::env::var_os(QUEUES.0).is_none() {
        rank.env(QUEUES.0, QUEUES.1);
    }
}

/// Returns whether a terminal may get colours.
pub fn colours() -> bool {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    set(NO_COLOR).is_none() && set(TERM).is_none_or(|term| term != "dumb")
}

/// Path of the file with the secret of a job of several hosts.
const SECRET_FILE: &str = "PHALANX_SECRET_FILE";

/// The file with the job's secret, by its option or its variable.
pub fn secret_file(network: &NetworkArgs) -> Option<PathBuf> {
    let variable = || std::env::var_os(SECRET_FILE).filter(|path| !path.is_empty()).map(PathBuf::from);
    network.secret_file.clone().or_else(variable)
}

/// Reads the variables of other launchers about this process.
///
/// # Errors
/// Variables that are missing or contradict each other.
pub fn foreign() -> Result<Foreign> {
    // What is no text is no number either, and named so.
    let read = |name: &str| std::env::var_os(name).map(|text| text.to_string_lossy().into_owned());
    Ok(phalanx_launch::foreign(&Variables::new(&read))?)
}

/// Note that ranks are started without regard to the variables of another launcher; `None` if these do not make this process a rank.
pub fn unfollowed() -> Option<String> {
    let what = match foreign() {
        Ok(Foreign { rank: None, .. }) => return None,
        Ok(Foreign { rank: Some(rank), .. }) => format!("{} ({})", rank.said, rank.launcher.name()),
        Err(error) => error.to_string(),
    };
    Some(format!(
        "`phalanx launch` starts its ranks itself; the variables of another launcher are not followed: {what}"
    ))
}

/// Returns whether this process runs in a terminal that `srun --pty` has made.
pub fn in_slurm_terminal() -> bool {
    ["SLURM_PTY_PORT", "SLURM_PTY_WIN_COL"].iter().any(|name| std::env::var_os(name).is_some())
}

/// By which protocol a launcher lets processes of MPI find each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankDiscovery {
    /// PMIx, as Open MPI needs it.
    Pmix,
    /// PMI 1 or 2, as MPICH needs it.
    Pmi,
    /// Nothing.
    None,
}

/// Process management interface that another launcher has given to this process for MPI.
pub fn pmi() -> RankDiscovery {
    let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    match (set("PMIX_RANK"), set("PMI_RANK") || set("PMI_FD")) {
        (true, _) => RankDiscovery::Pmix,
        (false, true) => RankDiscovery::Pmi,
        (false, false) => RankDiscovery::None,
    }
}

/// The variables that launchers on other hosts need, too.
pub fn for_other_hosts() -> Vec<(&'static str, String)> {
    [ISA, NO_COLOR, NVRTC, CUBLAS, ALGORITHM, SPLITS_ODD, NCCL, GRAPHS]
        .into_iter()
        .filter_map(|name| Some((name, std::env::var(name).ok()?)))
        .collect()
}

/// The values that were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Environment {
    /// The kernels of the processor.
    uses: KernelSet,
    /// The best ones that the processors of all ranks have.
    has: KernelSet,
    /// True if the user chose them by the environment.
    is_chosen: bool,
}

impl Environment {
    /// Reads the environment. Called once per program, before it starts threads: this is where the system is asked for the
    /// processor's tile registers.
    ///
    /// # Errors
    /// An unknown value, or one that this processor does not support.
    pub fn read() -> Result<Environment> {
        cublas_algorithm()?;
        let name = std::env::var_os(ISA).unwrap_or_default();
        let (fastest, best) = (Isa::fastest(), Isa::detect());
        let uses = kernels::instruction_set(&name.to_string_lossy(), [fastest, best], tiles::amx())?;
        let has = KernelSet { isa: best, tiles: TileUnit::fastest() };
        Ok(Environment { uses, has, is_chosen: !name.is_empty() })
    }

    /// Instruction set of the kernels.
    pub fn isa(self) -> Isa {
        self.uses.isa
    }

    /// Tile registers of the kernels.
    pub fn tiles(self) -> Option<TileUnit> {
        self.uses.tiles
    }

    /// Instruction set and tile registers of the kernels.
    pub fn kernels(self) -> KernelSet {
        self.uses
    }

    /// Returns whether the user chose the kernels by the environment.
    pub fn is_chosen(self) -> bool {
        self.is_chosen
    }

    /// Options of a processor device with `threads` threads.
    pub fn options(self, threads: usize) -> Options {
        Options { isa: self.uses.isa, tiles: self.uses.tiles, ..Options::new(threads) }
    }

    /// The factory for the devices of a run, with what it needs of cards: the one place where `device.kind` becomes a device.
    /// `notice` is told what a device does without.
    pub fn device_factory(
        self,
        device: &DeviceConfig,
        needs: CardNeeds,
        notice: fn(&str),
    ) -> Box<dyn DeviceFactory> {
        self.counted_factory(device, needs, notice).0
    }

    /// The same, with what cards are given to launch.
    pub fn counted_factory(
        self,
        device: &DeviceConfig,
        needs: CardNeeds,
        notice: fn(&str),
    ) -> (Box<dyn DeviceFactory>, Option<Arc<Made>>) {
        let processor = CpuFactory { options: self.options(1), populate: true };
        match device.choice() {
            DeviceChoice::Cpu => (Box::new(processor), None),
            DeviceChoice::Cuda { memory_bytes } => {
                let kernels = move |request: &DeviceRequest| -> std::io::Result<Arc<dyn Kernels>> {
                    Ok(processor.kernels(request)?)
                };
                let CardNeeds { communicators, scratch_bytes } = needs;
                let options =
                    phalanx_cuda::Options { communicators, scratch_bytes, ..cuda_options(memory_bytes) };
                let factory = CudaFactory::new(options, kernels).with_notice(notice);
                let made = Arc::clone(factory.made());
                (Box::new(factory), Some(made))
            }
            DeviceChoice::Simulated(simulated) => {
                let options = phalanx_simulated::Options {
                    copy_bytes_per_s: simulated.copy_bytes_per_s,
                    seed: simulated.seed,
                    ..phalanx_simulated::Options::new(0)
                };
                let kernels = move |request: &DeviceRequest| -> std::io::Result<Arc<dyn Kernels>> {
                    Ok(processor.kernels(request)?)
                };
                (Box::new(SimulatedFactory::new(options, simulated.memory_bytes, kernels)), None)
            }
        }
    }

    /// The processor's kernels on `threads` threads, with the products that a run asks for (those that only a card computes are by
    /// multiply-adds).
    ///
    /// # Errors
    /// When the system starts fewer threads, or this processor cannot compute products that way.
    pub fn cpu(self, threads: usize, products: Option<ProductMethod>) -> Result<Arc<Cpu>> {
        let products = products.map(|products| match products {
            ProductMethod::Tf32 => ProductMethod::Fma,
            other => other,
        });
        Ok(Cpu::with_options(self.options(threads).with_products(products)?)?)
    }

    /// The processor with `threads` threads, for measurements; else as [`Environment::cpu`].
    ///
    /// # Errors
    /// As for [`Environment::cpu`].
    pub fn processor(self, threads: usize, products: Option<ProductMethod>) -> Result<Processor> {
        Ok(Processor(self.cpu(threads, products)?))
    }

    /// A device of `threads` threads whose memory is not planned.
    ///
    /// # Errors
    /// When the system starts fewer threads.
    pub fn unplanned_device(self, threads: usize) -> Result<Device> {
        Ok(Device::new(self.cpu(threads, Some(ProductMethod::Fma))?, Arena::heap_that_keeps()))
    }
}

/// Compute threads, for measurements.
pub struct Processor(Arc<Cpu>);

impl Processor {
    /// Measures the floating-point operations per second of the threads in a type.
    pub fn flops_per_s(&self, dtype: DType) -> f64 {
        peak::flops_per_s(&self.0, dtype)
    }

    /// Measures the memory bandwidth in bytes per second, on `bytes` bytes.
    ///
    /// # Errors
    /// When the system does not have that much memory.
    pub fn bandwidth(&self, bytes: usize) -> std::io::Result<Bandwidth> {
        peak::bandwidth(&self.0, bytes)
    }
}
