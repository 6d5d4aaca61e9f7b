//! Models of the Hugging Face hub in the local cache of its programs: `Qwen/Qwen3-0.6B` means the folder of its main revision there.
//! Nothing is downloaded.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use crate::host::environment;

/// Bytes of the name of a commit, in its file.
const COMMIT_BYTES: u64 = 256;

/// The folder that `given` means: itself where it is there or names no model of the hub, or else the model's in the hub's cache.
///
/// # Errors
/// A name of the form `ORGANISATION/MODEL` that is neither; the message has the command that downloads it.
pub fn folder(given: &Path) -> Result<PathBuf> {
    find(given, environment::hub_cache().as_deref())
}

fn find(given: &Path, cache: Option<&Path>) -> Result<PathBuf> {
    let parts = given.to_str().filter(|_| given.symlink_metadata().is_err()).and_then(parts_of_name);
    let Some(parts) = parts else { return Ok(given.to_path_buf()) };
    let name = parts.join("/");
    let model = cache.map(|cache| cache.join(format!("models--{}", parts.join("--"))));
    let Some(model) = model.filter(|model| model.is_dir()) else {
        if parts.len() == 1 {
            // What is wrong with a folder of this name is said where it is read.
            return Ok(given.to_path_buf());
        }
        let there = cache.map_or_else(String::new, |cache| format!(" ({})", cache.display()));
        bail!(
            "there is no folder {name}, and no model of this name in the cache of the Hugging Face hub{there}: download it with `hf download {name}`"
        )
    };
    let main = model.join("refs/main");
    let commit = phalanx_system::files::read_text(&main, COMMIT_BYTES).unwrap_or_default();
    let snapshot = model.join("snapshots").join(commit.trim());
    if commit.trim().is_empty() || !is_plain(commit.trim()) || !snapshot.join("config.json").exists() {
        bail!(
            "{} holds no whole main revision of {name}: download it with `hf download {name}`",
            model.display()
        )
    }
    Ok(fs::canonicalize(&snapshot).unwrap_or(snapshot))
}

/// The parts of the name of a model on the hub: `gpt2`, `Qwen/Qwen3-0.6B`.
fn parts_of_name(given: &str) -> Option<Vec<&str>> {
    let parts: Vec<&str> = given.split('/').collect();
    (parts.len() <= 2 && parts.iter().all(|part| is_plain(part))).then_some(parts)
}

/// Returns whether a part of a name, or a commit, has only characters that the hub allows, and begins with a letter or a digit.
fn is_plain(part: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    part.starts_with(|c: char| c.is_ascii_alphanumeric()) && part.chars().all(allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_hub_are_folders_of_its_cache() {
        let home = tempfile::tempdir().unwrap();
        let cache = home.path().canonicalize().unwrap();
        let found = |name: &str| find(Path::new(name), Some(&cache)).map_err(|error| error.to_string());
        let write = |name: &str, text: &str| {
            fs::create_dir_all(cache.join(name).parent().unwrap()).unwrap();
            fs::write(cache.join(name), text).unwrap();
        };
        for path in ["nowhere", "./a/b", "/a/b", "../a", "a/b/c", "a b/c"] {
            assert_eq!(found(path), Ok(PathBuf::from(path)));
        }
        let error = found("Qwen/Qwen3-0.6B").unwrap_err();
        assert!(
            error.contains("hf download Qwen/Qwen3-0.6B") && error.contains(home.path().to_str().unwrap()),
            "{error}"
        );
        write("models--Qwen--Qwen3-0.6B/refs/main", "c1899de289a0\n");
        assert!(found("Qwen/Qwen3-0.6B").unwrap_err().contains("no whole main revision"));
        write("models--Qwen--Qwen3-0.6B/snapshots/c1899de289a0/config.json", "{}");
        let snapshot = cache.join("models--Qwen--Qwen3-0.6B/snapshots/c1899de289a0");
        assert_eq!(found("Qwen/Qwen3-0.6B"), Ok(snapshot));
        write("models--Qwen--Qwen3-0.6B/refs/main", "../../x");
        assert!(found("Qwen/Qwen3-0.6B").is_err());
        assert!(find(Path::new("a/b"), None).unwrap_err().to_string().contains("hf download a/b"));
    }
}
