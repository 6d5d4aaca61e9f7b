//! The environment variables: the one place that reads them. Ranks inherit them from their launcher.
//!
//! They decide how devices compute, so the factory that makes devices is here, too.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Result, bail};
use phalanx_cpu::peak::{self, Bandwidth};
use phalanx_cpu::{Cpu, CpuFactory, Options, ProductMethod};
use phalanx_cuda::{COMMUNICATOR_BYTES, CONTEXT_BYTES, CudaFactory, Made, SCRATCH_BYTES, scratch_planned};
use phalanx_launch::{ForeignRank, Variables};
use phalanx_simd::Isa;
use phalanx_simd::tiles::{self, NoAmx, TileUnit};
use phalanx_simulated::SimulatedFactory;
use phalanx_tensor::{Arena, DType, Device, DeviceFactory, DeviceRequest, Kernels};
use phalanx_train::Spec;
use phalanx_train::config::{DeviceChoice, DeviceConfig, PrecisionConfig, Products};

use crate::network_args::NetworkArgs;

/// Instruction set of the kernels: `portable`, `avx2`, `avx512` or `avx512bf16`, without tile registers; or tile registers for
/// matrix products, beside the fastest of these: `amx`, or `amx-model`, which computes what they would.
const ISA: &str = "PHALANX_ISA";

/// Set to anything, it switches colours off.
const NO_COLOR: &str = "NO_COLOR";

/// Kind of the terminal; `dumb` has no colours.
const TERM: &str = "TERM";

/// Where NVRTC is, which compiles the kernels of NVIDIA GPUs: a folder or a file.
const NVRTC: &str = "PHALANX_NVRTC";

/// Where cuBLASLt is, which multiplies matrices on NVIDIA GPUs: a folder or a file; or `off`.
const CUBLAS: &str = "PHALANX_CUBLAS";

/// Where NCCL is, which moves bytes between NVIDIA GPUs: a folder or a file.
const NCCL: &str = "PHALANX_NCCL";

/// Set to `off`, kernels of NVIDIA GPUs are launched one by one, not as graphs.
const GRAPHS: &str = "PHALANX_CUDA_GRAPHS";

/// The folder of what a program may compute again, and the home folder, which has one.
const CACHE_HOME: &str = "XDG_CACHE_HOME";
const HOME: &str = "HOME";

/// How cards are used, of which each rank may take `memory_bytes` at most. No rank communicates between cards, unless
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
        cache: cache.map(|folder| folder.join("phalanx/cuda")),
        memory_bytes,
        graphs: folder(GRAPHS).as_deref() != Some(Path::new("off")),
        ..phalanx_cuda::Options::default()
    }
}

/// Whether a terminal may get colours.
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

/// The rank that another launcher has given to this process, if one did.
///
/// # Errors
/// Variables that are missing or contradict each other.
pub fn foreign_rank() -> Result<Option<ForeignRank>> {
    let read = |name: &str| std::env::var(name).ok();
    Ok(phalanx_launch::foreign_rank(&Variables::new(&read))?)
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

/// What another launcher has given to this process for MPI.
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
    [ISA, NO_COLOR, NVRTC, CUBLAS, NCCL, GRAPHS]
        .into_iter()
        .filter_map(|name| Some((name, std::env::var(name).ok()?)))
        .collect()
}

/// What the ranks of a run need of their cards beside their plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CardNeeds {
    /// Communicators of NCCL.
    pub communicators: usize,
    /// Bytes of the scratch of kernels.
    pub scratch_bytes: u64,
}

impl CardNeeds {
    /// Those of a rank without a plan.
    pub const NONE: CardNeeds = CardNeeds { communicators: 0, scratch_bytes: SCRATCH_BYTES };

    /// Those of a run.
    pub fn of(spec: &Spec) -> CardNeeds {
        let (shape, tensor) = (spec.model.shape(), spec.mesh.tensor);
        let micro_batch = [spec.micro_batch_size, spec.seq, shape.hidden];
        let scratch_bytes = scratch_planned(micro_batch, shape.heads, tensor);
        CardNeeds { communicators: spec.communicators(), scratch_bytes }
    }

    /// Bytes of a card, with what the driver takes.
    pub fn bytes(self) -> u64 {
        self.scratch_bytes + CONTEXT_BYTES + self.communicators as u64 * COMMUNICATOR_BYTES
    }
}

/// The values that were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Environment {
    isa: Isa,
    tiles: Option<TileUnit>,
    /// Whether the user chose the instruction set.
    is_chosen: bool,
}

impl Environment {
    /// Reads the environment. Called once per program, before it starts threads: this is where the system is asked for the
    /// processor's tile registers.
    ///
    /// # Errors
    /// An unknown value, or one that this processor does not support.
    pub fn read() -> Result<Environment> {
        let name = std::env::var_os(ISA).unwrap_or_default();
        let (isa, tiles) =
            instruction_set(&name.to_string_lossy(), [Isa::fastest(), Isa::detect()], tiles::amx())?;
        Ok(Environment { isa, tiles, is_chosen: !name.is_empty() })
    }

    /// Instruction set of the kernels.
    pub fn isa(self) -> Isa {
        self.isa
    }

    /// Tile registers of the kernels.
    pub fn tiles(self) -> Option<TileUnit> {
        self.tiles
    }

    /// What there is to say of tile registers that the processor has and matrix products do not use.
    pub fn unused_tiles(self) -> Option<String> {
        match (self.tiles, tiles::amx()) {
            (None, Ok(())) => Some(format!(
                "by the kernels' instruction set, because {ISA} asks for it; without it, those of bf16 use the tile \
                 registers (AMX), which are faster"
            )),
            (None, Err(why)) if why != NoAmx::Processor => {
                Some(format!("{why}; matrix products use {} instead", self.isa.name()))
            }
            _ => None,
        }
    }

    /// How products are computed that `precision` asks for: never [`Products::Auto`].
    ///
    /// # Errors
    /// When this processor cannot compute them that way.
    pub fn choose(self, precision: &PrecisionConfig) -> Result<Products> {
        match (precision.products, self.tiles) {
            (asked @ (Products::Split | Products::Split2), None) => bail!(
                "precision.products = \"{}\": there are no tile registers for it ({}); give \"fma\" or leave it out",
                asked.name(),
                match tiles::amx() {
                    Err(why) => why.to_string(),
                    Ok(()) => format!("{ISA} has chosen {}", self.isa.name()),
                }
            ),
            _ => Ok(match self.options(1).with_products(precision.product_method())?.products {
                ProductMethod::Split => Products::Split,
                ProductMethod::Split2 => Products::Split2,
                ProductMethod::Fma => Products::Fma,
                ProductMethod::Tf32 => Products::Tf32,
            }),
        }
    }

    /// Options of a processor device with `threads` threads.
    pub fn options(self, threads: usize) -> Options {
        Options { isa: self.isa, tiles: self.tiles, ..Options::new(threads) }
    }

    /// The factory for the devices of a run, with what it needs of cards: the one place where `device.kind` becomes a device.
    pub fn device_factory(self, device: &DeviceConfig, needs: CardNeeds) -> Box<dyn DeviceFactory> {
        self.counted_factory(device, needs).0
    }

    /// The same, with what cards are given to launch.
    pub fn counted_factory(
        self,
        device: &DeviceConfig,
        needs: CardNeeds,
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
                let factory = CudaFactory::new(options, kernels);
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

/// The instruction set called `name`, with tile registers if it names some; for an empty name the `fastest` of the
/// processor, whose best is `best`, with its tile registers.
fn instruction_set(
    name: &str,
    [fastest, best]: [Isa; 2],
    amx: Result<(), NoAmx>,
) -> Result<(Isa, Option<TileUnit>)> {
    if name.is_empty() {
        return Ok((fastest, amx.is_ok().then_some(TileUnit::Amx)));
    }
    if let Some(unit) = TileUnit::ALL.into_iter().find(|unit| unit.name() == name) {
        return match (unit, amx) {
            (TileUnit::Amx, Err(why)) => {
                bail!("{ISA}={name}: {why}; give {} or a weaker one, or amx-model for tests", best.name())
            }
            _ => Ok((fastest, Some(unit))),
        };
    }
    let Some(isa) = Isa::ALL.into_iter().find(|isa| isa.name() == name) else {
        let known = Isa::ALL.map(Isa::name).join(", ");
        let units = TileUnit::ALL.map(TileUnit::name).join(", ");
        bail!("{ISA}={name}: there is no such instruction set; known are {known}, {units}");
    };
    if isa > best {
        bail!("{ISA}={name}: this processor has at most {}; give that or a weaker one", best.name());
    }
    Ok((isa, None))
}

#[cfg(test)]
mod tests {
    use phalanx_train::config::Float;

    use super::*;

    #[test]
    fn names_are_taken_up_to_what_the_processor_has() {
        let none = Err(NoAmx::Processor);
        let taken = |name, sets| instruction_set(name, sets, none).unwrap();
        assert_eq!(taken("", [Isa::Avx2; 2]), (Isa::Avx2, None));
        assert_eq!(taken("portable", [Isa::Avx2; 2]), (Isa::Portable, None));
        let slow_pairs = [Isa::Avx512, Isa::Avx512Bf16];
        assert_eq!(taken("", slow_pairs), (Isa::Avx512, None));
        assert_eq!(taken("avx512bf16", slow_pairs), (Isa::Avx512Bf16, None));
        let refused = |name, best| instruction_set(name, [best; 2], none).unwrap_err().to_string();
        let unknown = refused("sse9", Isa::Avx512);
        assert!(
            unknown.contains("sse9")
                && unknown.contains("portable, avx2, avx512, avx512bf16, amx, amx-model"),
            "{unknown}"
        );
        let above = refused("avx512", Isa::Avx2);
        assert!(above.contains("PHALANX_ISA=avx512") && above.contains("at most avx2"), "{above}");
    }

    #[test]
    fn tile_registers_are_used_where_there_are_some_and_refused_elsewhere() {
        let sets = [Isa::Avx512, Isa::Avx512Bf16];
        let amx = Some(TileUnit::Amx);
        assert_eq!(instruction_set("", sets, Ok(())).unwrap(), (Isa::Avx512, amx));
        assert_eq!(instruction_set("avx512", sets, Ok(())).unwrap(), (Isa::Avx512, None));
        assert_eq!(instruction_set("amx", sets, Ok(())).unwrap(), (Isa::Avx512, amx));
        assert_eq!(instruction_set("avx512bf16", sets, Ok(())).unwrap(), (Isa::Avx512Bf16, None));
        for why in [NoAmx::Processor, NoAmx::System, NoAmx::Refused(22)] {
            assert_eq!(instruction_set("", sets, Err(why)).unwrap(), (Isa::Avx512, None));
            let model = instruction_set("amx-model", sets, Err(why)).unwrap();
            assert_eq!(model, (Isa::Avx512, Some(TileUnit::Model)));
            let refused = instruction_set("amx", sets, Err(why)).unwrap_err().to_string();
            assert!(refused.contains("PHALANX_ISA=amx: ") && refused.contains(&why.to_string()), "{refused}");
        }
    }

    #[test]
    fn products_are_chosen_by_what_the_processor_has() {
        let precision = |compute, products| PrecisionConfig { compute, products, ..Default::default() };
        let with = |tiles| Environment { isa: Isa::Portable, tiles, is_chosen: true };
        let [without, tiled] = [None, Some(TileUnit::Model)].map(with);
        for compute in [Float::F32, Float::F16] {
            let chosen = |of: Environment, products| of.choose(&precision(compute, products));
            assert_eq!(chosen(without, Products::Auto).unwrap(), Products::Fma);
            assert_eq!(chosen(tiled, Products::Auto).unwrap(), Products::Split);
            assert_eq!(chosen(tiled, Products::Fma).unwrap(), Products::Fma);
            assert_eq!(chosen(tiled, Products::Split).unwrap(), Products::Split);
            let refused = chosen(without, Products::Split).unwrap_err().to_string();
            assert!(
                refused.contains("precision.products = \"split\"") && refused.contains("fma"),
                "{refused}"
            );
        }
        assert_eq!(tiled.choose(&precision(Float::Bf16, Products::Auto)).unwrap(), Products::Fma);
    }
}
