//! Gives the program the name of its build: its version, and a number that follows from the sources of all crates that it is made
//! of. Hosts of a job compare it before they believe anything else of each other.

use std::fs;
use std::path::{Path, PathBuf};

/// Folders that the program is not made of.
const LEFT_OUT: [&str; 5] = ["tests", "benches", "examples", "xtask", "testing"];

fn main() {
    let version = env!("CARGO_PKG_VERSION");
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let crates = own.parent().expect("a crate lies in a folder");
    // A crate that was published lies beside others of any version, and its own version is never used again.
    let root = if crates.join("collectives").is_dir() { crates } else { own };
    let mut files = Vec::new();
    walk(root, &mut files);
    files.sort();
    // FNV-1a, of 64 bits.
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for file in &files {
        println!("cargo::rerun-if-changed={}", file.display());
        let name = file.strip_prefix(root).unwrap_or(file).to_string_lossy().into_owned();
        let content = fs::read(file).unwrap_or_default();
        for byte in name.bytes().chain([0]).chain(content).chain([0]) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    println!("cargo::rustc-env=PHALANX_BUILD={version} (build {hash:016x})");
}

/// All files below a folder.
fn walk(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        match path.is_dir() {
            true if LEFT_OUT.iter().any(|left_out| name == *left_out) => {}
            true => {
                println!("cargo::rerun-if-changed={}", path.display());
                walk(&path, files);
            }
            false if path.is_file() => files.push(path),
            false => {}
        }
    }
}
