//! Modules and libraries of kernels, from PTX text.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::io::Write;
use std::sync::Arc;

use super::{Driver, Status, call_in_context, entry_points, put};
use crate::kernel::Kernel;
use crate::module::LoadedModule;

/// A kernel with its settings.
#[derive(Clone)]
pub(super) struct Function {
    pub(super) kernel: Arc<Kernel>,
    /// The module it belongs to.
    module: usize,
    /// Dynamic shared memory that launches may use.
    pub(super) max_dynamic_shared: usize,
}

impl Driver {
    fn load(&mut self, out: *mut usize, image: *const c_void) -> Result<(), Status> {
        if image.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        // SAFETY: the caller gives a text with a zero at its end, or a binary, whose first bytes are no PTX.
        let text = unsafe { CStr::from_ptr(image.cast()) };
        let Ok(text) = text.to_str() else { return Err(Status::INVALID_IMAGE) };
        if !text.contains(".version") {
            return Err(Status::INVALID_IMAGE);
        }
        if ptx_version(text).is_some_and(|version| version > self.config.ptx) {
            return Err(Status::UNSUPPORTED_PTX_VERSION);
        }
        match LoadedModule::load(text, &mut self.queues.memory) {
            Ok(module) => {
                let handle = self.modules.add(module);
                put(out, handle)
            }
            Err(error) => {
                #[expect(
                    clippy::disallowed_methods,
                    reason = "the driver's interface has no room for the reason"
                )]
                let mut out = std::io::stderr();
                // Whoever closed standard error does not read the reason.
                let _ = writeln!(out, "cuda-emulator: {error}");
                Err(Status::INVALID_PTX)
            }
        }
    }

    fn unload(&mut self, handle: usize) -> Result<(), Status> {
        let module = self.modules.remove(handle)?;
        self.queues.synchronize_all();
        module.unload(&mut self.queues.memory);
        let functions: Vec<usize> = self
            .functions
            .iter()
            .filter(|(_, function)| function.module == handle)
            .map(|(id, _)| id)
            .collect();
        functions.into_iter().try_for_each(|function| self.functions.remove(function).map(|_| ()))
    }

    fn function(&mut self, out: *mut usize, module: usize, name: *const c_char) -> Result<(), Status> {
        let name = text(name)?;
        let kernel = self.modules.get(module)?.kernels.get(name).ok_or(Status::NOT_FOUND)?.clone();
        let known = self.functions.iter().find(|(_, function)| Arc::ptr_eq(&function.kernel, &kernel));
        let known = known.map(|(handle, _)| handle);
        let max_dynamic_shared = super::context::DEFAULT_SHARED.saturating_sub(kernel.static_shared);
        let handle =
            known.unwrap_or_else(|| self.functions.add(Function { kernel, module, max_dynamic_shared }));
        put(out, handle)
    }
}

/// The version of PTX that a text is written in.
fn ptx_version(text: &str) -> Option<(i32, i32)> {
    let (_, rest) = text.split_once(".version")?;
    let (major, minor) = rest.split_whitespace().next()?.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// A text of the caller.
fn text<'a>(start: *const c_char) -> Result<&'a str, Status> {
    if start.is_null() {
        return Err(Status::INVALID_VALUE);
    }
    // SAFETY: the caller gives a text with a zero at its end, which lives as long as the call.
    unsafe { CStr::from_ptr(start) }.to_str().map_err(|_| Status::INVALID_VALUE)
}

entry_points! {
    /// Loads a module from PTX.
    cuModuleLoadData(out: *mut usize, image: *const c_void) call_in_context |driver| { driver.load(out, image) }

    /// Loads a module from PTX. Options of the compiler make no difference.
    cuModuleLoadDataEx(out: *mut usize, image: *const c_void, _count: c_uint, _options: *mut c_int, _values: *mut *mut c_void)
        call_in_context |driver| { driver.load(out, image) }

    /// Unloads a module.
    cuModuleUnload(module: usize) call_in_context |driver| { driver.unload(module) }

    /// A kernel of a module.
    cuModuleGetFunction(out: *mut usize, module: usize, name: *const c_char) call_in_context |driver| {
        driver.function(out, module, name)
    }

    /// A variable of a module.
    cuModuleGetGlobal_v2(address: *mut u64, bytes: *mut usize, module: usize, name: *const c_char) call_in_context |driver| {
        let &(start, size) = driver.modules.get(module)?.variables.get(text(name)?).ok_or(Status::NOT_FOUND)?;
        if !address.is_null() {
            put(address, start)?;
        }
        if bytes.is_null() { Ok(()) } else { put(bytes, size) }
    }

    /// Loads a library from PTX. Options make no difference.
    cuLibraryLoadData(
        out: *mut usize, image: *const c_void,
        _options: *mut c_int, _values: *mut *mut c_void, _count: c_uint,
        _library_options: *mut c_int, _library_values: *mut *mut c_void, _library_count: c_uint,
    ) call_in_context |driver| { driver.load(out, image) }

    /// Unloads a library.
    cuLibraryUnload(library: usize) call_in_context |driver| { driver.unload(library) }

    /// A kernel of a library.
    cuLibraryGetKernel(out: *mut usize, library: usize, name: *const c_char) call_in_context |driver| {
        driver.function(out, library, name)
    }

    /// The function of a kernel: the same handle.
    cuKernelGetFunction(out: *mut usize, kernel: usize) call_in_context |driver| {
        driver.functions.get(kernel)?;
        put(out, kernel)
    }
}
