//! Search for NVIDIA's libraries, in the order of NVIDIA's own `cuda-pathfinder`: a given path; the packages of Python
//! environments; conda; toolkits; the dynamic loader.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};

use libloading::Library;

use crate::driver;

/// Folders that may have NVIDIA's libraries, in the order in which they are asked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Folders(Vec<PathBuf>);

impl Folders {
    /// Those of a machine whose file system begins at `root`. `variable` gives a variable of the environment.
    ///
    /// 1. Python packages (`nvidia/*/lib`) of `$VIRTUAL_ENV`, `$CONDA_PREFIX`, `~/.local` and the system;
    /// 2. `$CONDA_PREFIX`; 3. `$CUDA_HOME`, `$CUDA_PATH`, `/usr/local/cuda`, `/usr/local/cuda-*` (the newest first), `/opt/cuda`.
    pub fn find(variable: &dyn Fn(&str) -> Option<OsString>, root: &Path) -> Folders {
        let named = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let conda = named("CONDA_PREFIX");
        let home = named("HOME").map(|home| home.join(".local"));
        let system = ["usr/local", "usr"].map(|folder| root.join(folder));
        let pythons = named("VIRTUAL_ENV").into_iter().chain(conda.clone()).chain(home).chain(system);
        let packages = pythons.flat_map(|python| packages(&python));
        let usual = children(&root.join("usr/local"), "cuda").into_iter().chain([root.join("opt/cuda")]);
        let toolkits = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(named).chain(usual);
        let mut folders = Vec::new();
        for folder in
            packages.chain(conda.into_iter().chain(toolkits).flat_map(|toolkit| of_toolkit(&toolkit)))
        {
            if folder.is_dir() && !folders.contains(&folder) {
                folders.push(folder);
            }
        }
        Folders(folders)
    }

    /// Paths at which a library with one of these names may be. If `place`, a file or a folder, is given, only that;
    /// else these folders, then the dynamic loader's. Names whose major version is too new for the driver come last.
    pub(crate) fn candidates(&self, names: &[&str], place: Option<&Path>) -> Vec<PathBuf> {
        let within = |folder: &PathBuf| names.iter().map(|name| folder.join(name)).collect::<Vec<_>>();
        if let Some(place) = place {
            let is_file = place.is_file();
            return if is_file { vec![place.to_path_buf()] } else { within(&place.to_path_buf()) };
        }
        let files = self.0.iter().flat_map(within).filter(|file| file.exists());
        let mut all: Vec<PathBuf> = files.chain(names.iter().map(PathBuf::from)).collect();
        if let Some(version) = driver::known_version() {
            all.sort_by_key(|path| major(path).is_some_and(|major| major > version / 1000));
        }
        all
    }
}

/// The folders of libraries within the packages of a Python environment.
fn packages(python: &Path) -> Vec<PathBuf> {
    let versions = children(&python.join("lib"), "python3");
    let sites = versions.iter().flat_map(|lib| ["site-packages", "dist-packages"].map(|name| lib.join(name)));
    // `cu13` has all libraries of CUDA 13, of which `cublas` and others are those of CUDA 12.
    sites.flat_map(|site| children(&site.join("nvidia"), "")).map(|package| package.join("lib")).collect()
}

/// The folders of libraries within a toolkit, or a conda environment.
fn of_toolkit(toolkit: &Path) -> Vec<PathBuf> {
    let targets = children(&toolkit.join("targets"), "").into_iter().map(|target| target.join("lib"));
    [toolkit.join("lib64"), toolkit.join("lib")].into_iter().chain(targets).collect()
}

/// Entries of a folder that begin with `start`: the shortest name first (`cuda` before `cuda-12.4`), then by numbers,
/// the highest first.
fn children(folder: &Path, start: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut names: Vec<String> = names.filter(|name| name.starts_with(start)).collect();
    let numbers = |name: &str| -> Vec<u32> {
        name.split(|letter: char| !letter.is_ascii_digit()).filter_map(|digits| digits.parse().ok()).collect()
    };
    names.sort_by(|a, b| {
        (b == start).cmp(&(a == start)).then_with(|| numbers(b).cmp(&numbers(a))).then_with(|| a.cmp(b))
    });
    names.into_iter().map(|name| folder.join(name)).collect()
}

/// The version in the name of a library of CUDA: 12 for `libnvrtc.so.12`. That of NCCL is not CUDA's.
fn major(path: &Path) -> Option<i32> {
    let name = path.file_name().and_then(OsStr::to_str)?;
    let (stem, version) = name.split_once(".so.")?;
    version.split('.').next()?.parse().ok().filter(|_| stem != "libnccl")
}

/// The file from which a library was loaded that the dynamic loader was asked for.
pub(crate) fn loaded_file(asked: &Path) -> PathBuf {
    let name = asked.to_string_lossy();
    let maps = phalanx_system::files::read_text(Path::new("/proc/self/maps"), 16 << 20).unwrap_or_default();
    let mut paths = maps.lines().filter_map(|line| line.find('/').map(|at| Path::new(&line[at..])));
    let found =
        paths.find(|path| path.file_name().is_some_and(|file| file.to_string_lossy().starts_with(&*name)));
    found.unwrap_or(asked).to_path_buf()
}

/// Loads what NVRTC opens by its name when it compiles, from the folder of NVRTC: some packages do not say where it is, and the dynamic
/// loader takes one that is there already.
pub(crate) fn load_builtins(nvrtc: &Path) -> Vec<Library> {
    let Some(folder) = nvrtc.parent().filter(|folder| folder.is_absolute()) else { return Vec::new() };
    let files = children(folder, "libnvrtc-builtins.so");
    // SAFETY: the library has data and functions for NVRTC alone; its initialisers have no requirements.
    files.iter().filter_map(|file| unsafe { Library::new(file) }.ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn make(root: &Path, files: &[&str]) {
        for file in files {
            let path = root.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
    }

    /// Candidates for NVRTC in the trees of a machine, without its root.
    fn found(root: &Path, variables: &[(&str, &str)]) -> Vec<String> {
        let variable = |name: &str| {
            let (_, value) = variables.iter().find(|(known, _)| *known == name)?;
            Some(root.join(value).into_os_string())
        };
        let names = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
        let all = Folders::find(&variable, root).candidates(&names, None);
        let shown = |path: &PathBuf| path.strip_prefix(root).unwrap_or(path).display().to_string();
        all.iter().map(shown).collect()
    }

    const OF_LOADER: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];

    #[test]
    fn folders_are_asked_in_the_order_of_cuda_pathfinder() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let trees = [
            "venv/lib/python3.12/site-packages/nvidia/cu13/lib/libnvrtc.so.13",
            "venv/lib/python3.12/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
            "conda/lib/python3.11/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
            "home/.local/lib/python3.9/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
            "usr/local/lib/python3.11/dist-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
            "usr/lib/python3/dist-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
            "conda/lib/libnvrtc.so.12",
            "conda/targets/x86_64-linux/lib/libnvrtc.so.12",
            "toolkit/lib64/libnvrtc.so.12",
            "usr/local/cuda/lib64/libnvrtc.so.12",
            "usr/local/cuda-13.0/targets/sbsa-linux/lib/libnvrtc.so.13",
            "usr/local/cuda-12.10/lib64/libnvrtc.so.12",
            "usr/local/cuda-12.4/lib64/libnvrtc.so.12",
            "opt/cuda/lib64/libnvrtc.so.12",
        ];
        make(root, &trees);
        let variables =
            [("VIRTUAL_ENV", "venv"), ("CONDA_PREFIX", "conda"), ("HOME", "home"), ("CUDA_HOME", "toolkit")];
        let expected: Vec<&str> = trees.into_iter().chain(OF_LOADER).collect();
        assert_eq!(found(root, &variables), expected);
    }

    #[test]
    fn what_is_not_there_or_not_named_is_not_asked() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        assert_eq!(found(root, &[("VIRTUAL_ENV", "venv"), ("CUDA_PATH", "nothing")]), OF_LOADER);
        make(root, &["conda/lib/libnvrtc.so.12", "elsewhere/lib64/libnvrtc.so.13"]);
        assert_eq!(found(root, &[]), OF_LOADER);
        assert_eq!(found(root, &[("CUDA_PATH", "elsewhere")])[0], "elsewhere/lib64/libnvrtc.so.13");
        // A folder that is named twice is asked once.
        assert_eq!(found(root, &[("CUDA_PATH", "elsewhere"), ("CUDA_HOME", "elsewhere")]).len(), 4);
    }

    #[test]
    fn a_place_that_was_named_is_asked_alone() {
        let root = tempfile::tempdir().unwrap();
        make(root.path(), &["a/libnccl.so.2"]);
        let folders = Folders(vec![root.path().join("a")]);
        let names = ["libnccl.so.2", "libnccl.so"];
        let within = |folder: &str| names.map(|name| root.path().join(folder).join(name)).to_vec();
        assert_eq!(folders.candidates(&names, Some(&root.path().join("b"))), within("b"));
        let file = root.path().join("a/libnccl.so.2");
        assert_eq!(folders.candidates(&names, Some(&file)), vec![file.clone()]);
        assert_eq!(folders.candidates(&names, None)[0], file);
    }

    #[test]
    fn the_version_of_cuda_is_in_the_name() {
        let majors = ["libnvrtc.so.13", "/a/libcublasLt.so.12.4.5", "libnvrtc.so", "libnccl.so.2"]
            .map(|name| major(Path::new(name)));
        assert_eq!(majors, [Some(13), Some(12), None, None]);
    }
}
