//! Kernels that are ready to be launched: programs are compiled when one of their kernels is first needed.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;

use crate::cache::Cache;
use crate::compiler::{Code, Compiler};
use crate::driver::{Context, driver};
use crate::error::Error;
use crate::gate::Gate;
use crate::programs::Program;

/// Bytes of dynamic shared memory that a kernel has without asking.
const SHARED_UNASKED: u32 = 48 << 10;

/// What a driver says of instructions that it does not take.
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
    /// With the dynamic shared memory that they may have.
    kernels: HashMap<(Program, &'static str), (sys::CUfunction, u32)>,
}

// SAFETY: modules and functions are handles of the driver, which may be used by any thread in which their context is current.
unsafe impl Send for Loaded {}

impl Modules {
    pub(crate) fn new(context: &Arc<Context>, compiler: Compiler, cache: Option<&PathBuf>) -> Modules {
        let cache = cache.map(|folder| Cache::new(folder));
        let (loaded, gate) = (Mutex::default(), Arc::default());
        Modules { context: Arc::clone(context), compiler, cache, loaded, gate }
    }

    /// What keeps loads of kernels and calls between cards apart.
    pub(crate) fn gate(&self) -> &Arc<Gate> {
        &self.gate
    }

    /// Issues a launch to a stream. `arguments` are the kernel's, each in the lower bytes of a number.
    ///
    /// # Safety
    /// The context is current, the stream is of it; the arguments are those of the kernel, and what they point to stays valid
    /// until the stream has run the launch.
    pub(crate) unsafe fn launch(
        &self,
        stream: sys::CUstream,
        launch: &Launch,
        arguments: &mut [u64],
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_table(stream, launch, &mut [], arguments) }
    }

    /// The same for a kernel whose first argument is a table; an empty one is none.
    ///
    /// # Safety
    /// As for [`Modules::launch`]; the table has the length of the kernel's argument.
    pub(crate) unsafe fn launch_table(
        &self,
        stream: sys::CUstream,
        launch: &Launch,
        table: &mut [u64],
        arguments: &mut [u64],
    ) -> Result<(), Error> {
        if launch.grid.contains(&0) {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { launch_function(self.function(launch)?, stream, launch, table, arguments) }
    }

    /// Loads a kernel before its first launch, which [`launch_function`] does.
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
        let (function, allowed) = match loaded.kernels.get(&key) {
            Some(known) => *known,
            None => (self.gate.load(|| self.find(&mut loaded, launch))?, SHARED_UNASKED),
        };
        let mut allowed = allowed;
        if launch.shared_bytes > allowed {
            self.allow_shared(function, launch)?;
            allowed = launch.shared_bytes;
        }
        loaded.kernels.insert(key, (function, allowed));
        Ok(function)
    }

    fn allow_shared(&self, function: sys::CUfunction, launch: &Launch) -> Result<(), Error> {
        let Launch { program, kernel, shared_bytes, .. } = launch;
        let max = self.context.card.shared_bytes;
        if *shared_bytes > max {
            return Err(Error::Unsupported(format!(
                "`{kernel}` of {} needs {shared_bytes} bytes of shared memory; a block of {} may have {max}",
                program.describe(),
                self.context.card.name
            )));
        }
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is of this context.
        unsafe { driver!(cuFuncSetAttribute(function, attribute, *shared_bytes as i32)) }
    }

    fn find(&self, loaded: &mut Loaded, launch: &Launch) -> Result<sys::CUfunction, Error> {
        let module = match loaded.modules.get(&launch.program) {
            Some(module) => *module,
            None => {
                let module = self.load(&mut loaded.takes_ptx, &launch.program)?;
                loaded.modules.insert(launch.program, module);
                module
            }
        };
        let name = CString::new(launch.kernel).expect("names of kernels have no byte 0");
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is loaded, the name ends with 0.
        unsafe { driver!(cuModuleGetFunction(&mut function, module, name.as_ptr()))? };
        Ok(function)
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
                Error::CompilerTooNew { version: self.compiler.version() }
            }
            error => error,
        })
    }

    fn load_as(&self, program: &Program, code: Code) -> Result<sys::CUmodule, Error> {
        let architecture = self.context.card.architecture();
        let image = match &self.cache {
            Some(cache) => cache.image(&self.compiler, program, &architecture, code)?,
            None => self.compiler.compile(program, &architecture, code)?.image,
        };
        let mut module = std::ptr::null_mut();
        self.context.made.count_object();
        // SAFETY: the context is current; the image is a whole one, and PTX ends with 0.
        unsafe { driver!(cuModuleLoadData(&mut module, image.as_ptr().cast()))? };
        Ok(module)
    }
}

/// Issues a launch of a kernel that is loaded, with a table as its first argument, if it is not empty.
///
/// # Safety
/// As for [`Modules::launch_table`].
pub(crate) unsafe fn launch_function(
    function: sys::CUfunction,
    stream: sys::CUstream,
    launch: &Launch,
    table: &mut [u64],
    arguments: &mut [u64],
) -> Result<(), Error> {
    let [blocks_x, blocks_y] = launch.grid;
    if blocks_x == 0 || blocks_y == 0 {
        return Ok(());
    }
    let too_many = || Error::Unsupported(format!("{launch:?} has too many blocks for a card"));
    let blocks_x = u32::try_from(blocks_x).ok().filter(|x| *x <= i32::MAX as u32).ok_or_else(too_many)?;
    let blocks_y = u32::try_from(blocks_y).ok().filter(|y| *y <= 65535).ok_or_else(too_many)?;
    let first = (!table.is_empty()).then(|| table.as_mut_ptr().cast());
    let others = arguments.iter_mut().map(|argument| std::ptr::from_mut(argument).cast());
    let mut places: Vec<*mut c_void> = first.into_iter().chain(others).collect();
    // SAFETY: the caller's promise. The driver reads the arguments before it returns.
    unsafe {
        driver!(cuLaunchKernel(
            function,
            blocks_x,
            blocks_y,
            1,
            launch.threads,
            1,
            1,
            launch.shared_bytes,
            stream,
            places.as_mut_ptr(),
            std::ptr::null_mut(),
        ))
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
