//! NVRTC: finding it, and compiling programs with it.
//!
//! It is loaded from a given place, or from where it is found (`search`), in any version from 12 on, so that a wheel of the Python
//! package index serves as well as the toolkit. Its functions are looked up here, because a binding is for one version.

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

use libloading::{Library, Symbol};

use crate::driver;
use crate::error::Error;
use crate::programs::{HEADERS, OPTIONS, Program};
use crate::search::{Folders, load_builtins, loaded_file};

type NvrtcProgram = *mut c_void;
type NvrtcResult = c_int;

/// Names of the library, the newest first.
const NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];

/// Result of compiling a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Code {
    /// Instructions of one architecture.
    Cubin,
    /// PTX, which the driver compiles; for a driver that executes PTX itself.
    Ptx,
}

/// A program that was compiled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiled {
    /// For the driver. PTX ends with 0.
    pub image: Vec<u8>,
    /// Log of the compiler, with registers, spills and shared memory of each kernel.
    pub log: String,
}

/// NVRTC, loaded.
pub struct Compiler {
    library: Library,
    version: (i32, i32),
    path: PathBuf,
    /// Loaded as long as the library may need them.
    _builtins: Vec<Library>,
}

impl Compiler {
    /// Loads NVRTC: from `place`, a file or a folder that has one, or else from the first of `folders`.
    ///
    /// # Errors
    /// [`Error::NoCompiler`] and [`Error::UnusableCompiler`].
    pub fn load(place: Option<&Path>, folders: &Folders) -> Result<Compiler, Error> {
        Compiler::first(place, folders, Ok)
    }

    /// Returns the result of `make` for the first NVRTC with which it succeeds.
    ///
    /// # Errors
    /// As for [`Compiler::load`]; else those of the first that was found, with what was wrong with the others.
    pub(crate) fn first<T>(
        place: Option<&Path>,
        folders: &Folders,
        mut make: impl FnMut(Compiler) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let candidates = folders.candidates(&NAMES, place);
        let mut failed = Vec::new();
        for candidate in &candidates {
            let builtins = load_builtins(candidate);
            // SAFETY: NVRTC's initialisers have no requirements.
            let Ok(library) = (unsafe { Library::new(candidate) }) else { continue };
            match Compiler::of(library, builtins, loaded_file(candidate)).and_then(&mut make) {
                Ok(made) => return Ok(made),
                Err(error) => failed.push(error),
            }
        }
        if !failed.is_empty() {
            return Err(Error::first_of(failed));
        }
        let looked: Vec<String> = candidates.iter().map(|path| path.display().to_string()).collect();
        Err(Error::NoCompiler { looked: looked.join(", "), driver: driver::known_version() })
    }

    fn of(library: Library, builtins: Vec<Library>, path: PathBuf) -> Result<Compiler, Error> {
        let unusable = |reason: String| Error::UnusableCompiler { path: path.display().to_string(), reason };
        type Version = unsafe extern "C" fn(*mut c_int, *mut c_int) -> NvrtcResult;
        let (mut major, mut minor) = (0, 0);
        let result = {
            // SAFETY: the type is that of nvrtcVersion in every version.
            let version: Result<Symbol<Version>, _> = unsafe { library.get(b"nvrtcVersion") };
            let version = version.map_err(|_| unusable("it has no function nvrtcVersion".to_string()))?;
            // SAFETY: both numbers are there to be written.
            unsafe { version(&mut major, &mut minor) }
        };
        if result != 0 || major < 12 {
            return Err(unusable(format!("its version is {major}.{minor}; 12.0 or newer is needed")));
        }
        Ok(Compiler { library, version: (major, minor), path, _builtins: builtins })
    }

    /// The file from which it was loaded.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// NVRTC's version.
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Refuses a card that this version of NVRTC does not know yet.
    ///
    /// # Errors
    /// [`Error::CompilerTooOld`].
    pub(crate) fn check_compiles_for(&self, (major, minor): (i32, i32)) -> Result<(), Error> {
        if self.architectures()?.contains(&(10 * major + minor)) {
            return Ok(());
        }
        Err(Error::CompilerTooOld { version: self.version, architecture: format!("sm_{major}{minor}") })
    }

    /// The architectures for which it compiles: 90 for `sm_90`.
    fn architectures(&self) -> Result<Vec<c_int>, Error> {
        type Fill = unsafe extern "C" fn(*mut c_int) -> NvrtcResult;
        let (count, fill) = ("nvrtcGetNumSupportedArchs", "nvrtcGetSupportedArchs");
        let mut n = 0;
        // SAFETY: the types are those of both functions in every version; the second writes as many numbers as the first says.
        unsafe {
            self.check(self.function::<Fill>(count)?(&mut n), count)?;
            let mut architectures = vec![0; usize::try_from(n).unwrap_or(0)];
            self.check(self.function::<Fill>(fill)?(architectures.as_mut_ptr()), fill)?;
            Ok(architectures)
        }
    }

    /// The options with which `program` is compiled for an architecture such as `sm_90`.
    pub fn options(program: &Program, architecture: &str) -> Vec<String> {
        let mut options = vec![format!("--gpu-architecture={architecture}")];
        options.extend(OPTIONS.map(str::to_string));
        options.extend(program.definitions());
        options
    }

    /// Compiles a program.
    ///
    /// # Errors
    /// [`Error::Compile`] with NVRTC's log.
    pub fn compile(&self, program: &Program, architecture: &str, code: Code) -> Result<Compiled, Error> {
        let (name, text) = program.source.file();
        let terminated = |text: &str| CString::new(text).expect("the sources have no byte 0");
        let headers = HEADERS.map(|(_, text)| terminated(text));
        let header_names = HEADERS.map(|(name, _)| terminated(name));
        let options: Vec<CString> =
            Compiler::options(program, architecture).iter().map(|option| terminated(option)).collect();
        let job = Job {
            compiler: self,
            handle: self.create(&terminated(text), &terminated(name), &headers, &header_names)?,
        };
        let result = job.compile(&options)?;
        let log = job.text("nvrtcGetProgramLogSize", "nvrtcGetProgramLog")?;
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_string();
        if result != 0 {
            let (program, architecture) = (program.describe(), architecture.to_string());
            return Err(Error::Compile { program, architecture, version: self.version, log });
        }
        let image = match code {
            Code::Cubin => job.text("nvrtcGetCUBINSize", "nvrtcGetCUBIN")?,
            Code::Ptx => job.text("nvrtcGetPTXSize", "nvrtcGetPTX")?,
        };
        Ok(Compiled { image, log })
    }

    fn create(
        &self,
        text: &CString,
        name: &CString,
        headers: &[CString],
        header_names: &[CString],
    ) -> Result<NvrtcProgram, Error> {
        type Create = unsafe extern "C" fn(
            *mut NvrtcProgram,
            *const c_char,
            *const c_char,
            c_int,
            *const *const c_char,
            *const *const c_char,
        ) -> NvrtcResult;
        let pointers = |texts: &[CString]| texts.iter().map(|text| text.as_ptr()).collect::<Vec<_>>();
        let (headers, names) = (pointers(headers), pointers(header_names));
        let mut handle = std::ptr::null_mut();
        // SAFETY: the type is nvrtcCreateProgram's; all strings end with 0 and live until it returns, which copies them.
        let result = unsafe {
            let create = self.function::<Create>("nvrtcCreateProgram")?;
            let count = headers.len() as c_int;
            create(&mut handle, text.as_ptr(), name.as_ptr(), count, headers.as_ptr(), names.as_ptr())
        };
        self.check(result, "nvrtcCreateProgram")?;
        Ok(handle)
    }

    /// A function of NVRTC.
    ///
    /// # Safety
    /// `F` is its type.
    unsafe fn function<F: Copy>(&self, name: &'static str) -> Result<F, Error> {
        // SAFETY: the caller's promise; the library stays loaded as long as `self`.
        let found = unsafe { self.library.get::<F>(name.as_bytes()) };
        found.map(|symbol| *symbol).map_err(|error| self.failed(format!("{name}: {error}")))
    }

    fn check(&self, result: NvrtcResult, call: &'static str) -> Result<(), Error> {
        if result == 0 { Ok(()) } else { Err(self.failed(format!("{call} gives error {result}"))) }
    }

    fn failed(&self, reason: String) -> Error {
        Error::UnusableCompiler { path: self.path.display().to_string(), reason }
    }
}

/// A program that NVRTC holds.
struct Job<'a> {
    compiler: &'a Compiler,
    handle: NvrtcProgram,
}

impl Job<'_> {
    /// Compiles it; NVRTC's result.
    fn compile(&self, options: &[CString]) -> Result<NvrtcResult, Error> {
        type Compile = unsafe extern "C" fn(NvrtcProgram, c_int, *const *const c_char) -> NvrtcResult;
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the type is nvrtcCompileProgram's; the options end with 0 and live until it returns.
        unsafe {
            let compile = self.compiler.function::<Compile>("nvrtcCompileProgram")?;
            Ok(compile(self.handle, options.len() as c_int, options.as_ptr()))
        }
    }

    /// Returns the text that a pair of functions gives: a length, and that many bytes.
    fn text(&self, size: &'static str, get: &'static str) -> Result<Vec<u8>, Error> {
        type Size = unsafe extern "C" fn(NvrtcProgram, *mut usize) -> NvrtcResult;
        type Get = unsafe extern "C" fn(NvrtcProgram, *mut c_char) -> NvrtcResult;
        let mut bytes = 0;
        // SAFETY: the types are those of all such functions; the buffer is as long as NVRTC says.
        unsafe {
            self.compiler.check(self.compiler.function::<Size>(size)?(self.handle, &mut bytes), size)?;
            let mut text = vec![0u8; bytes];
            self.compiler
                .check(self.compiler.function::<Get>(get)?(self.handle, text.as_mut_ptr().cast()), get)?;
            Ok(text)
        }
    }
}

impl Drop for Job<'_> {
    fn drop(&mut self) {
        type Destroy = unsafe extern "C" fn(*mut NvrtcProgram) -> NvrtcResult;
        // SAFETY: the type is nvrtcDestroyProgram's; the program is destroyed once. A failure leaks it.
        unsafe {
            if let Ok(destroy) = self.compiler.function::<Destroy>("nvrtcDestroyProgram") {
                destroy(&mut self.handle);
            }
        }
    }
}
