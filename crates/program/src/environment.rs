//! The environment variables: the one place that reads them. Ranks inherit them from their launcher.
//!
//! They decide how devices compute, so the factory that makes devices is here, too.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Result, bail};
use phalanx_cpu::peak::{self, Bandwidth};
use phalanx_cpu::{Cpu, CpuFactory, Options, ProductMethod};
use phalanx_cuda::{CudaFactory, Made};
use phalanx_launch::{ForeignRank, Variables};
use phalanx_simd::Isa;
use phalanx_simd::tiles::{self, NoAmx, TileUnit};
use phalanx_simulated::SimulatedFactory;
use phalanx_tensor::{Arena, DType, Device, DeviceFactory, DeviceRequest, Kernels};
use phalanx_train::config::{DeviceChoice, DeviceConfig, KernelChoice, KernelSet, PrecisionConfig, Products};

use crate::card_needs::CardNeeds;
use crate::host_kernels::HostKernels;
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

/// The values that were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Environment {
    /// The kernels of the processor.
    uses: KernelSet,
    /// The best ones that the processors of all ranks have.
    has: KernelSet,
    /// Whether the user chose them by the environment.
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
        let (fastest, best) = (Isa::fastest(), Isa::detect());
        let uses = instruction_set(&name.to_string_lossy(), [fastest, best], tiles::amx())?;
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

    /// Whether the user chose the kernels by the environment.
    pub fn is_chosen(self) -> bool {
        self.is_chosen
    }

    /// Why the kernels `set` cannot be used, or not by the ranks of all hosts.
    pub fn why_not(self, set: KernelSet) -> Option<String> {
        if set.isa > self.has.isa {
            let here = if self.has.isa < Isa::detect() { "a host of this job" } else { "this processor" };
            return Some(format!("{here} has at most {}", self.has.isa.name()));
        }
        if set.tiles.is_some() && Isa::detect() < Isa::Avx512Bf16 {
            let isa = Isa::Avx512Bf16.name();
            return Some(format!(
                "attention on tile registers needs {isa}, which this processor does not have"
            ));
        }
        let lacks_tiles = set.tiles == Some(TileUnit::Amx) && self.has.tiles != set.tiles;
        lacks_tiles.then(|| match tiles::amx() {
            Err(why) => why.to_string(),
            Ok(()) => "a host of this job has no tile registers (AMX)".to_string(),
        })
    }

    /// The same with the kernels of a configuration that the user gave; or as it is, where that leaves them open.
    ///
    /// # Errors
    /// Kernels that the processor has not, or others than the environment chooses.
    pub fn decide(self, device: &DeviceConfig) -> Result<Environment> {
        let decided = self.of_run(device)?;
        if self.is_chosen && decided.uses != self.uses {
            bail!(
                "{ISA} chooses the kernels {}, and device.kernels = \"{}\": leave one of them out",
                self.uses.name(),
                device.kernels.name()
            );
        }
        Ok(decided)
    }

    /// The same with the kernels that a run has decided on, whatever this process's environment says.
    ///
    /// # Errors
    /// Kernels that the processor has not.
    pub fn of_run(self, device: &DeviceConfig) -> Result<Environment> {
        let KernelChoice::Set(uses) = device.kernels else { return Ok(self) };
        match self.why_not(uses) {
            None => Ok(Environment { uses, ..self }),
            Some(why) => bail!(
                "device.kernels = \"{}\": {why}; leave it out, or set it to \"auto\" or \"{}\"",
                uses.name(),
                self.uses.name()
            ),
        }
    }

    /// What the launcher of this host says of its kernels to that of host 0.
    pub fn to_host_kernels(self) -> HostKernels {
        HostKernels { uses: self.uses.into(), has: self.has.into(), is_chosen: self.is_chosen }
    }

    /// The same for a job of several hosts: with the fastest kernels that all of them have and nobody's environment excludes.
    pub fn on_hosts(self, hosts: impl Iterator<Item = HostKernels>) -> Environment {
        hosts.fold(self, |own, host| Environment {
            uses: host.uses.set().map_or(own.uses, |uses| own.uses.that_both_have(uses)),
            has: host.has.set().map_or(own.has, |has| own.has.that_both_have(has)),
            is_chosen: own.is_chosen || host.is_chosen,
        })
    }

    /// What there is to say of tile registers that the processor has and matrix products do not use.
    pub fn unused_tiles(self) -> Option<String> {
        match (self.uses.tiles, tiles::amx()) {
            (None, Ok(())) if self.is_chosen => Some(format!(
                "by the kernels' instruction set, because {ISA} asks for it; without it, those of bf16 use the tile \
                 registers (AMX), which are faster"
            )),
            (None, Ok(())) => Some(format!(
                "by the kernels {}, because the run keeps them or another host has no tile registers; those of bf16 would be faster on \
                 the tile registers (AMX)",
                self.uses.name()
            )),
            (None, Err(why)) if why != NoAmx::Processor => {
                Some(format!("{why}; matrix products use {} instead", self.uses.name()))
            }
            _ => None,
        }
    }

    /// How products are computed that `precision` asks for: never [`Products::Auto`].
    ///
    /// # Errors
    /// When this processor cannot compute them that way.
    pub fn choose(self, precision: &PrecisionConfig) -> Result<Products> {
        match (precision.products, self.uses.tiles) {
            (asked @ (Products::Split | Products::Split2), None) => bail!(
                "precision.products = \"{}\": there are no tile registers for it ({}); give \"fma\" or leave it out",
                asked.name(),
                match tiles::amx() {
                    Err(why) => why.to_string(),
                    Ok(()) => format!("the kernels are {}", self.uses.name()),
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
        Options { isa: self.uses.isa, tiles: self.uses.tiles, ..Options::new(threads) }
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
fn instruction_set(name: &str, [fastest, best]: [Isa; 2], amx: Result<(), NoAmx>) -> Result<KernelSet> {
    let set = |isa, tiles| Ok(KernelSet { isa, tiles });
    if name.is_empty() {
        return set(fastest, amx.is_ok().then_some(TileUnit::Amx));
    }
    if let Some(unit) = TileUnit::ALL.into_iter().find(|unit| unit.name() == name) {
        return match (unit, amx) {
            (TileUnit::Amx, Err(why)) => {
                bail!("{ISA}={name}: {why}; give {} or a weaker one, or amx-model for tests", best.name())
            }
            _ => set(fastest, Some(unit)),
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
    set(isa, None)
}

#[cfg(test)]
mod tests {
    use phalanx_train::config::Float;

    use super::*;

    fn pair(set: KernelSet) -> (Isa, Option<TileUnit>) {
        (set.isa, set.tiles)
    }

    #[test]
    fn names_are_taken_up_to_what_the_processor_has() {
        let none = Err(NoAmx::Processor);
        let taken = |name, sets| pair(instruction_set(name, sets, none).unwrap());
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
        assert_eq!(pair(instruction_set("", sets, Ok(())).unwrap()), (Isa::Avx512, amx));
        assert_eq!(pair(instruction_set("avx512", sets, Ok(())).unwrap()), (Isa::Avx512, None));
        assert_eq!(pair(instruction_set("amx", sets, Ok(())).unwrap()), (Isa::Avx512, amx));
        assert_eq!(pair(instruction_set("avx512bf16", sets, Ok(())).unwrap()), (Isa::Avx512Bf16, None));
        for why in [NoAmx::Processor, NoAmx::System, NoAmx::Refused(22)] {
            assert_eq!(pair(instruction_set("", sets, Err(why)).unwrap()), (Isa::Avx512, None));
            let model = pair(instruction_set("amx-model", sets, Err(why)).unwrap());
            assert_eq!(model, (Isa::Avx512, Some(TileUnit::Model)));
            let refused = instruction_set("amx", sets, Err(why)).unwrap_err().to_string();
            assert!(refused.contains("PHALANX_ISA=amx: ") && refused.contains(&why.to_string()), "{refused}");
        }
    }

    #[test]
    fn products_are_chosen_by_what_the_processor_has() {
        let precision = |compute, products| PrecisionConfig { compute, products, ..Default::default() };
        let with = |tiles| {
            let uses = KernelSet { isa: Isa::Portable, tiles };
            Environment { uses, has: uses, is_chosen: true }
        };
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

    fn set(isa: Isa, tiles: Option<TileUnit>) -> KernelSet {
        KernelSet { isa, tiles }
    }

    #[test]
    fn the_ranks_of_all_hosts_compute_with_kernels_that_all_have() {
        let amx = Some(TileUnit::Amx);
        let of = |uses, has| Environment { uses, has, is_chosen: false };
        let zen = of(set(Isa::Avx512Bf16, None), set(Isa::Avx512Bf16, None));
        let xeon = of(set(Isa::Avx512, amx), set(Isa::Avx512Bf16, amx));
        let desktop = of(set(Isa::Avx2, None), set(Isa::Avx2, None));
        let on = |own: Environment, hosts: &[Environment]| {
            own.on_hosts(hosts.iter().map(|host| host.to_host_kernels()))
        };
        assert_eq!(on(zen, &[]), zen);
        assert_eq!(on(xeon, &[xeon, xeon]), xeon);
        assert_eq!(on(xeon, &[zen]).kernels(), set(Isa::Avx512, None));
        let all = on(xeon, &[zen, desktop]);
        assert_eq!(all, on(desktop, &[xeon, zen]));
        assert_eq!((all.kernels(), all.has), (desktop.uses, desktop.has));
        assert_eq!(all.why_not(set(Isa::Portable, None)), None);
        assert_eq!(all.why_not(set(Isa::Avx2, Some(TileUnit::Model))), None);
        assert!(all.why_not(set(Isa::Avx512, None)).is_some() && all.why_not(set(Isa::Avx2, amx)).is_some());
        assert_eq!(xeon.why_not(set(Isa::Avx512Bf16, amx)), None);
    }

    #[test]
    fn kernels_of_a_configuration_are_used_or_refused() {
        let device =
            |word| DeviceConfig { kernels: KernelChoice::named(word).unwrap(), ..DeviceConfig::default() };
        let own = set(Isa::Avx512, None);
        let free = Environment { uses: own, has: set(Isa::Avx512Bf16, None), is_chosen: false };
        let chosen = Environment { is_chosen: true, ..free };
        assert_eq!(free.decide(&device("auto")).unwrap(), free);
        assert_eq!(free.decide(&device("avx2")).unwrap().kernels(), set(Isa::Avx2, None));
        assert_eq!(free.decide(&device("avx512bf16")).unwrap().isa(), Isa::Avx512Bf16);
        assert_eq!(chosen.decide(&device("avx512")).unwrap(), chosen);
        assert_eq!(chosen.of_run(&device("avx2")).unwrap().kernels(), set(Isa::Avx2, None));
        let refused = chosen.decide(&device("avx2")).unwrap_err().to_string();
        let words = ["PHALANX_ISA chooses the kernels avx512", "device.kernels = \"avx2\""];
        assert!(words.iter().all(|word| refused.contains(word)), "{refused}");
        let refused = free.decide(&device("avx512+amx")).unwrap_err().to_string();
        assert!(refused.contains("device.kernels = \"avx512+amx\"") && refused.contains("auto"), "{refused}");
    }
}
