//! Kernels that are ready to be launched: programs are compiled when one of their kernels is first needed.

use std::collections::HashMap;
use std::ffi::CString;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;
use phalanx_plan::trace::DType;

use crate::cache::Cache;
use crate::compiler::{Code, Compiler};
use crate::driver::{self, Context, driver};
use crate::error::Error;
use crate::gate::Gate;
use crate::programs::{Program, Source};

/// Bytes of shared memory, static and dynamic, that a kernel has without asking.
const SHARED_UNASKED: u32 = 48 << 10;

/// Errors of a driver that does not take some instructions.
const NOT_TAKEN: [&str; 2] = ["CUDA_ERROR_INVALID_IMAGE", "CUDA_ERROR_NO_BINARY_FOR_GPU"];

/// One launch of a kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Launch {
    pub(crate) program: Program,
    pub(crate) kernel: &'static str,
    /// Blocks in x and y.
    pub(crate) grid: [u64; 2],
    pub(crate) threads: u32,
    /// Bytes of dynamic shared memory.
    pub(crate) shared_bytes: u32,
}

/// The programs of one card.
pub(crate) struct Modules {
    context: Arc<Context>,
    compiler: Compiler,
    cache: Option<Cache>,
    loaded: Mutex<Loaded>,
    /// Kernels are loaded while no call between cards runs.
    gate: Arc<Gate>,
}

#[derive(Default)]
struct Loaded {
    /// The driver takes no instructions of its card, so it is given PTX: an older driver than NVRTC is, or the emulator.
    takes_ptx: bool,
    modules: HashMap<Program, sys::CUmodule>,
    kernels: HashMap<(Program, &'static str), Kernel>,
}

/// A kernel that is loaded.
#[derive(Clone, Copy)]
struct Kernel {
    function: sys::CUfunction,
    /// Bytes of shared memory that it has in every launch.
    static_bytes: u32,
    /// Bytes of shared memory, static and dynamic, that it may have.
    allowed_bytes: u32,
}

// SAFETY: modules and functions are handles of the driver, which may be used by any thread in which their context is current.
unsafe impl Send for Loaded {}

impl Modules {
    pub(crate) fn new(context: &Arc<Context>, compiler: Compiler, cache: Option<&PathBuf>) -> Modules {
        let cache = cache.map(|folder| Cache::new(folder));
        let (loaded, gate) = (Mutex::default(), Arc::default());
        Modules { context: Arc::clone(context), compiler, cache, loaded, gate }
    }

    /// The gate that keeps loads of kernels and calls between cards apart.
    pub(crate) fn gate(&self) -> &Arc<Gate> {
        &self.gate
    }

    /// Compiles the largest program and gives it to the card: not every NVRTC compiles all, and a driver may not take what a newer one makes.
    ///
    /// # Errors
    /// [`Error::CompilerTooOld`], [`Error::CompilerTooNew`], [`Error::Compile`], and those of the driver and NVRTC.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.compiler.check_compiles_for(self.context.card.capability)?;
        let program = Program::of(Source::AttentionBackward, DType::BF16).with_head(64);
        let program = program.expect("a size of heads");
        let launch = Launch { program, kernel: "attention_delta", grid: [1, 1], threads: 1, shared_bytes: 0 };
        self.function(&launch).map(drop)
    }

    /// Loads a kernel, if it is not loaded yet.
    pub(crate) fn prepare(&self, launch: &Launch) -> Result<sys::CUfunction, Error> {
        self.function(launch)
    }

    /// Streaming multiprocessors of the card.
    pub(crate) fn multiprocessors(&self) -> u64 {
        u64::from(self.context.card.multiprocessors)
    }

    /// The function of a kernel, allowed to have the shared memory of the launch.
    fn function(&self, launch: &Launch) -> Result<sys::CUfunction, Error> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (launch.program, launch.kernel);
        let mut kernel = match loaded.kernels.get(&key) {
            Some(known) => *known,
            None => self.gate.load(|| self.find(&mut loaded, launch))?,
        };
        let needed_bytes = kernel.static_bytes + launch.shared_bytes;
        if needed_bytes > kernel.allowed_bytes {
            self.allow_shared(kernel.function, launch, needed_bytes)?;
            kernel.allowed_bytes = needed_bytes;
        }
        loaded.kernels.insert(key, kernel);
        Ok(kernel.function)
    }

    fn allow_shared(
        &self,
        function: sys::CUfunction,
        launch: &Launch,
        needed_bytes: u32,
    ) -> Result<(), Error> {
        let Launch { program, kernel, shared_bytes, .. } = launch;
        let max = self.context.card.shared_bytes;
        if needed_bytes > max {
            return Err(Error::Unsupported(format!(
                "`{kernel}` of {} needs {needed_bytes} bytes of shared memory; a block of {} may have {max}",
                program.describe(),
                self.context.card.name
            )));
        }
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is of this context.
        unsafe { driver!(cuFuncSetAttribute(function, attribute, *shared_bytes as i32)) }
    }

    fn find(&self, loaded: &mut Loaded, launch: &Launch) -> Result<Kernel, Error> {
        let module = match loaded.modules.get(&launch.program) {
            Some(module) => *module,
            None => {
                let module = self.load(&mut loaded.takes_ptx, &launch.program)?;
                loaded.modules.insert(launch.program, module);
                module
            }
        };
        let name = CString::new(launch.kernel).expect("names of kernels have no byte 0");
        let (mut function, mut static_bytes) = (std::ptr::null_mut(), 0);
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
        // SAFETY: the module is loaded, the name ends with 0, and both results are there to be written.
        unsafe {
            driver!(cuModuleGetFunction(&mut function, module, name.as_ptr()))?;
            driver!(cuFuncGetAttribute(&mut static_bytes, attribute, function))?;
        }
        Ok(Kernel { function, static_bytes: static_bytes as u32, allowed_bytes: SHARED_UNASKED })
    }

    /// Compiles a program, or takes it from the cache, and gives it to the driver.
    fn load(&self, takes_ptx: &mut bool, program: &Program) -> Result<sys::CUmodule, Error> {
        if !*takes_ptx {
            match self.load_as(program, Code::Cubin) {
                Err(Error::Driver { name, .. }) if NOT_TAKEN.contains(&name.as_str()) => *takes_ptx = true,
                result => return result,
            }
        }
        self.load_as(program, Code::Ptx).map_err(|error| match error {
            Error::Driver { name, .. } if name == "CUDA_ERROR_UNSUPPORTED_PTX_VERSION" => {
                let driver = driver::version().unwrap_or_default();
                Error::CompilerTooNew { version: self.compiler.version(), driver }
            }
            error => error,
        })
    }

    /// Compiles a program for what the card takes, if it is not kept yet.
    ///
    /// # Errors
    /// Those of NVRTC.
    pub(crate) fn compile(&self, program: &Program) -> Result<(), Error> {
        let takes_ptx = self.loaded.lock().unwrap_or_else(PoisonError::into_inner).takes_ptx;
        self.image(program, if takes_ptx { Code::Ptx } else { Code::Cubin }).map(drop)
    }

    fn image(&self, program: &Program, code: Code) -> Result<Vec<u8>, Error> {
        let architecture = self.context.card.architecture();
        match &self.cache {
            Some(cache) => cache.image(&self.compiler, program, &architecture, code),
            None => Ok(self.compiler.compile(program, &architecture, code)?.image),
        }
    }

    fn load_as(&self, program: &Program, code: Code) -> Result<sys::CUmodule, Error> {
        let image = self.image(program, code)?;
        let mut module = std::ptr::null_mut();
        self.context.made.count_object();
        // SAFETY: the context is current; the image is a whole one, and PTX ends with 0.
        unsafe { driver!(cuModuleLoadData(&mut module, image.as_ptr().cast()))? };
        Ok(module)
    }
}

impl Launch {
    /// Blocks in x and y.
    ///
    /// # Errors
    /// More than a card has.
    pub(crate) fn blocks(&self) -> Result<[u32; 2], Error> {
        let [x, y] = self.grid;
        let blocks = u32::try_from(x).ok().filter(|x| *x <= i32::MAX as u32);
        let blocks = blocks.zip(u32::try_from(y).ok().filter(|y| *y <= 65535));
        blocks.map_or_else(
            || Err(Error::Unsupported(format!("{self:?} has too many blocks for a card"))),
            |(x, y)| Ok([x, y]),
        )
    }
}

impl Drop for Modules {
    fn drop(&mut self) {
        if self.context.enter().is_err() {
            return;
        }
        let loaded = self.loaded.get_mut().unwrap_or_else(PoisonError::into_inner);
        for module in loaded.modules.values() {
            // SAFETY: loaded once; whoever drops the device has waited for its work. A failure leaves it loaded.
            let _ = unsafe { driver!(cuModuleUnload(*module)) };
        }
    }
}
