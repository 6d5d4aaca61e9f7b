//! Makes cards as the devices of ranks.

use std::io::{Error as IoError, ErrorKind};
use std::path::PathBuf;
use std::sync::Arc;

use phalanx_tensor::{
    Arena, Device, DeviceFactory, DeviceRequest, Immediate, Kernels, Memory, ProductMethod,
};

use crate::backend::{Cuda, Parts};
use crate::blas::{self, Blas};
use crate::compiler::Compiler;
use crate::driver::{Card, Context, Made, usable_cards};
use crate::error::{Error, Notice};
use crate::graphs::GRAPH_BYTES;
use crate::memory::{Registered, TensorMemory};
use crate::modules::Modules;
use crate::nccl::{self, NO_NCCL, Nccl, communicator_bytes};
use crate::search::Folders;

/// Makes the kernels of the host's processor for the device that a request describes.
type MakeKernels = dyn Fn(&DeviceRequest) -> std::io::Result<Arc<dyn Kernels>> + Send + Sync;

/// Bytes of the scratch of kernels, unless the options say otherwise; what a large micro-batch needs is [`scratch_planned`](crate::scratch_planned).
pub const SCRATCH_BYTES: u64 = 64 << 20;

/// Bytes that the driver takes of a card for the context of a process, for kernels, graphs and cuBLASLt, about. An H100 with a driver of
/// CUDA 13.0 had 540 MiB less after all kernels had run, without graphs (`phalanx doctor --kernels`).
pub const CONTEXT_BYTES: u64 = (640 << 20) + GRAPH_BYTES;

/// Bytes that the driver and its libraries take of the host's memory in a process, about: 216 MiB there.
pub const DRIVER_HOST_BYTES: u64 = 240 << 20;

/// Options for the use of cards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Path of NVRTC: a file, or the folder of `libnvrtc.so`. None: it is searched in `folders`, then by the dynamic
    /// loader.
    pub nvrtc: Option<PathBuf>,
    /// Path of cuBLASLt: a file, or the folder of `libcublasLt.so`. None: it is searched in `folders`, then by the
    /// dynamic loader.
    pub cublas: Option<PathBuf>,
    /// Folders in which libraries are searched before the dynamic loader is asked.
    pub folders: Folders,
    /// True if cuBLASLt, where it is found, computes products; else kernels of this crate always do.
    pub library_products: bool,
    /// True if cuBLASLt computes only the part of a product up to a multiple of 16 bytes where an extent has more
    /// (50,257 classes), and a kernel of this crate the rest: the library's fast kernels may need such extents.
    pub splits_odd: bool,
    /// Which of cuBLASLt's algorithms each product has, as the library orders them by its estimates: 0 for the first, below
    /// [`ALGORITHMS`](crate::ALGORITHMS). Others have other bits.
    pub algorithm: usize,
    /// Path of NCCL: a file, or the folder of `libnccl.so.2`. None: it is searched in `folders`, then by the dynamic
    /// loader.
    pub nccl: Option<PathBuf>,
    /// The ranks of each communicator of NCCL for which there must be room on a card; with none, ranks communicate through host memory.
    pub communicators: Vec<usize>,
    /// The folder in which compiled programs are kept. None: they are compiled by each process.
    pub cache: Option<PathBuf>,
    /// Bytes of the card's memory for partial sums of kernels, beside the plan's: [`scratch_planned`](crate::scratch_planned) of a run.
    pub scratch_bytes: u64,
    /// Bytes that a device may take of its card at most, in all. None: what is free.
    pub memory_bytes: Option<u64>,
    /// True if ranks share cards when there are more ranks than cards.
    pub share_cards: bool,
    /// True if launches that are repeated in the same order are launched as graphs; else one by one.
    pub graphs: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            nvrtc: None,
            cublas: None,
            folders: Folders::default(),
            library_products: true,
            splits_odd: true,
            algorithm: 0,
            nccl: None,
            communicators: Vec::new(),
            cache: None,
            scratch_bytes: SCRATCH_BYTES,
            memory_bytes: None,
            share_cards: true,
            graphs: true,
        }
    }
}

impl Options {
    /// cuBLASLt, if it is wanted and found. A context is current.
    pub(crate) fn load_blas(&self) -> Result<Option<Blas>, Error> {
        match self.library_products {
            true => {
                let mut blas = Blas::load(self.cublas.as_deref(), &self.folders)?;
                if let Some(blas) = &mut blas {
                    (blas.splits_odd, blas.algorithm) = (self.splits_odd, self.algorithm);
                }
                Ok(blas)
            }
            false => Ok(None),
        }
    }

    /// NCCL, if communicators are wanted.
    pub(crate) fn load_nccl(&self) -> Result<Option<Arc<Nccl>>, Error> {
        if self.communicators.is_empty() {
            return Ok(None);
        }
        let missing = || Error::NotConnected(NO_NCCL.to_string());
        Nccl::load(self.nccl.as_deref(), &self.folders)?.ok_or_else(missing).map(Some)
    }

    /// The version of cuBLASLt and its file, if it is wanted and found.
    pub(crate) fn find_blas(&self) -> Result<Option<(usize, PathBuf)>, Error> {
        match self.library_products {
            true => blas::version(self.cublas.as_deref(), &self.folders),
            false => Ok(None),
        }
    }

    /// The version of NCCL and its file, if it is found.
    pub(crate) fn find_nccl(&self) -> Result<Option<(i32, PathBuf)>, Error> {
        nccl::version(self.nccl.as_deref(), &self.folders)
    }

    /// Bytes that a device takes of its card beside its plan.
    fn beside_plan(&self) -> u64 {
        let communicators = self.communicators.iter().map(|ranks| communicator_bytes(*ranks));
        self.scratch_bytes + CONTEXT_BYTES + communicators.sum::<u64>()
    }

    /// The kernels of a card, by the first compiler that makes what the card takes.
    pub(crate) fn load_modules(&self, context: &Arc<Context>) -> Result<Modules, Error> {
        Compiler::first(self.nvrtc.as_deref(), &self.folders, |compiler| {
            let modules = Modules::new(context, compiler, self.cache.as_ref());
            modules.check().map(|()| modules)
        })
    }
}

/// Every rank computes on a card.
pub struct CudaFactory {
    options: Options,
    made: Arc<Made>,
    make_kernels: Box<MakeKernels>,
    notice: Arc<Notice>,
}

impl CudaFactory {
    /// Cards with `options`. `make_kernels` makes the kernels for operations on host memory, such as `CpuFactory::kernels`.
    pub fn new(
        options: Options,
        make_kernels: impl Fn(&DeviceRequest) -> std::io::Result<Arc<dyn Kernels>> + Send + Sync + 'static,
    ) -> CudaFactory {
        let (made, notice) = (Arc::default(), Arc::new(|_: &str| {}));
        CudaFactory { options, made, make_kernels: Box::new(make_kernels), notice }
    }

    /// The same; `notice` is told what a device does without, a line each.
    #[must_use]
    pub fn with_notice(self, notice: impl Fn(&str) + Send + Sync + 'static) -> CudaFactory {
        CudaFactory { notice: Arc::new(notice), ..self }
    }

    /// Counts of what its devices have asked the driver to make and to launch.
    pub fn made(&self) -> &Arc<Made> {
        &self.made
    }

    /// The card of device number `index` of the run.
    fn card(&self, index: usize) -> Result<Card, Error> {
        let mut cards = usable_cards()?;
        let count = cards.len();
        if index >= count && !self.options.share_cards {
            return Err(Error::NoCard { index, count: count as i32 });
        }
        Ok(cards.swap_remove(index % count))
    }

    /// Refuses a plan for which the device may not take enough of its card.
    fn check_limit(&self, request: &DeviceRequest) -> Result<(), Error> {
        let needed_bytes = request.device_plan.arena_bytes + self.options.beside_plan();
        match self.options.memory_bytes {
            Some(limit_bytes) if needed_bytes > limit_bytes => {
                Err(Error::Limit { needed_bytes, limit_bytes })
            }
            _ => Ok(()),
        }
    }

    fn context(&self, index: usize) -> Result<Context, Error> {
        Context::new(self.card(index)?, &self.made)
    }
}

/// A device without a plan, for tests: it hands out `memory_bytes` of the memory of a usable card, by its number among them, as they are
/// asked for, and the host's memory is the heap. `host` computes operations on host memory.
///
/// # Errors
/// Those of the driver, the card and the compiler; fewer cards.
pub fn unplanned_device(
    options: &Options,
    card: usize,
    memory_bytes: u64,
    host: Arc<dyn Kernels>,
) -> Result<Device, Error> {
    unplanned_counting(options, card, memory_bytes, host, &Arc::default())
}

/// The same; what it asks of the driver is counted.
pub(crate) fn unplanned_counting(
    options: &Options,
    card: usize,
    memory_bytes: u64,
    host: Arc<dyn Kernels>,
    made: &Arc<Made>,
) -> Result<Device, Error> {
    let mut cards = usable_cards()?;
    if card >= cards.len() {
        return Err(Error::NoCard { index: card, count: cards.len() as i32 });
    }
    let context = Arc::new(Context::new(cards.swap_remove(card), made)?);
    let modules = options.load_modules(&context)?;
    let blas = options.load_blas()?;
    let nccl = options.load_nccl()?;
    let (tensors, addresses) = TensorMemory::new(&context, memory_bytes)?;
    let (scratch_bytes, registered) = (options.scratch_bytes, Vec::new());
    let cuda = Cuda::new(Parts {
        context,
        modules,
        blas,
        nccl,
        tensors,
        scratch_bytes,
        registered,
        host,
        disk: None,
        tf32: false,
        graphs: options.graphs,
        notice: Box::new(|_| {}),
    })?;
    let arena = Arena::unplanned_in(Memory::Device, addresses);
    Ok(Device::with_memories(Arc::new(cuda), arena, Arena::heap_of(Memory::Host)))
}

impl DeviceFactory for CudaFactory {
    fn is_host_addressable(&self) -> bool {
        false
    }

    fn beside_plan(&self) -> Option<u64> {
        Some(self.options.beside_plan())
    }

    fn make(&self, request: &DeviceRequest) -> std::io::Result<Device> {
        if let Some(ProductMethod::Split) = request.products {
            let text = "precision.products = \"split\" is for processors with tile registers; on a card give \"fma\" or leave it out";
            return Err(IoError::new(ErrorKind::InvalidInput, text));
        }
        self.check_limit(request).map_err(refused)?;
        let (all, rank) = (Arc::clone(&self.notice), request.index);
        let notice = move |line: &str| all(&format!("rank {rank}: {line}"));
        // How products are computed is asked of the card: the processor computes updates.
        let of_host = DeviceRequest { products: Some(ProductMethod::Fma), ..*request };
        let host_kernels = (self.make_kernels)(&of_host)?;
        let context = Arc::new(self.context(request.index).map_err(refused)?);
        let modules = self.options.load_modules(&context).map_err(refused)?;
        let blas = self.options.load_blas().map_err(refused)?;
        let nccl = self.options.load_nccl().map_err(refused)?;
        let (tensors, addresses) =
            TensorMemory::new(&context, request.device_plan.arena_bytes).map_err(refused)?;
        tensors.clear().map_err(refused)?;
        // Transports read host memory: that is what is shared.
        let host = (request.map_shared)(request.host_plan.arena_bytes as usize)?;
        let registered = match request.pin_host {
            Some(false) => Vec::new(),
            pin => {
                // SAFETY: the region becomes the host arena of the device, which holds its backend no longer than its arenas:
                // `Device` drops its backend first.
                match unsafe { Registered::new(&context, &host) } {
                    Ok(registered) => vec![registered],
                    Err(error) if pin == Some(true) => return Err(refused(error)),
                    // Copies from memory that is not registered pass through the driver's own.
                    Err(error) => {
                        notice(&format!(
                            "host memory is not registered with the driver, so copies between it and the card are slower: {error}"
                        ));
                        Vec::new()
                    }
                }
            }
        };
        let disk = request.make_disk()?;
        let disk_stream =
            disk.as_ref().map(|_| Immediate::with_disk_stream(Arc::clone(&host_kernels))).transpose()?;
        let cuda = Cuda::new(Parts {
            context,
            modules,
            blas,
            nccl,
            tensors,
            scratch_bytes: self.options.scratch_bytes,
            registered,
            host: host_kernels,
            disk: disk_stream,
            tf32: request.products == Some(ProductMethod::Tf32),
            graphs: self.options.graphs,
            notice: Box::new(notice),
        })
        .map_err(refused)?;
        let arena = Arena::replaying(request.device_plan.clone(), addresses);
        let host = Arena::replaying_in(Memory::Host, request.host_plan.clone(), host);
        let device = Device::with_memories(Arc::new(cuda), arena, host);
        Ok(match disk {
            None => device,
            Some(disk) => device.with_disk(disk),
        })
    }
}

fn refused(error: Error) -> IoError {
    let kind = match &error {
        Error::OutOfMemory { .. } | Error::Limit { .. } | Error::Addresses { .. } => ErrorKind::OutOfMemory,
        Error::NoDriver
        | Error::NoCard { .. }
        | Error::NoCompiler { .. }
        | Error::NoBlas { .. }
        | Error::NoNccl { .. }
        | Error::NotConnected(_) => ErrorKind::NotFound,
        Error::DriverTooOld { .. }
        | Error::CardTooOld { .. }
        | Error::CompilerTooOld { .. }
        | Error::CompilerTooNew { .. }
        | Error::Unsupported(_) => ErrorKind::Unsupported,
        _ => ErrorKind::Other,
    };
    IoError::new(kind, error)
}
