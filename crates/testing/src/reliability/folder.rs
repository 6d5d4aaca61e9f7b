//! Copies run folders, lists them with a hash of every file, and reads losses from them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use serde_json::Value;

/// Path below a folder, with what lies there.
pub(crate) type Listing = BTreeMap<String, String>;

/// Copies a folder of files, folders and links.
///
/// # Errors
/// The system's.
pub(crate) fn copy(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (path, target) = (entry.path(), to.join(entry.file_name()));
        if entry.file_type()?.is_dir() {
            copy(&path, &target)?;
        } else {
            fs::copy(&path, &target)?;
        }
    }
    Ok(())
}

/// Everything below `root`, each with its kind and the hash of its bytes. Lock files are left out: a command that is
/// refused may make one.
pub(crate) fn listing(root: &Path) -> Listing {
    let mut listing = Listing::new();
    add(root, "", &mut listing);
    listing
}

fn add(folder: &Path, prefix: &str, listing: &mut Listing) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = entry.path();
        let key = format!("{prefix}{name}");
        let Ok(kind) = entry.file_type() else { continue };
        if kind.is_dir() {
            listing.insert(key.clone(), "folder".to_string());
            add(&path, &format!("{key}/"), listing);
        } else if kind.is_symlink() {
            listing.insert(key, format!("link to {:?}", fs::read_link(&path).ok()));
        } else if kind.is_fifo() {
            listing.insert(key, "fifo".to_string());
        } else if kind.is_file() && !name.contains("lock") {
            let bytes = fs::read(&path).unwrap_or_default();
            listing.insert(key, format!("file {}", blake3::hash(&bytes)));
        }
    }
}

/// The first difference between two listings.
pub(crate) fn difference(before: &Listing, after: &Listing) -> Option<String> {
    let gone = before.keys().find(|name| !after.contains_key(*name)).map(|name| format!("{name} is gone"));
    let new = || after.keys().find(|name| !before.contains_key(*name)).map(|name| format!("{name} is new"));
    let changed = || {
        let mut pairs = before.iter().filter_map(|(name, was)| Some((name, was, after.get(name)?)));
        pairs.find(|(_, was, is)| was != is).map(|(name, ..)| format!("{name} was changed"))
    };
    gone.or_else(new).or_else(changed)
}

/// Returns whether this is what a failed run leaves for its user: flight records, and the logs of ranks.
pub(crate) fn is_of_failure(name: &str) -> bool {
    name.starts_with("flight") || name.starts_with("logs")
}

/// The first difference between the names of two listings. Checkpoints of other steps have the same names: a run that
/// was asked to stop has saved where it stopped.
pub(crate) fn names_differ(expected: &Listing, found: &Listing) -> Option<String> {
    let is_compared = |name: &&String| !is_of_failure(name);
    let [expected, found] = [expected, found].map(|listing| {
        listing.keys().filter(is_compared).map(|name| without_step(name)).collect::<BTreeSet<_>>()
    });
    let missing = expected.difference(&found).next().map(|name| format!("{name} is missing"));
    missing.or(found.difference(&expected).next().map(|name| format!("{name} is left over")))
}

/// `checkpoints/step-35/x` as `checkpoints/step-N/x`.
fn without_step(name: &str) -> String {
    match name.split_once("/step-") {
        Some((before, after)) => {
            format!("{before}/step-N{}", after.trim_start_matches(|c: char| c.is_ascii_digit()))
        }
        None => name.to_string(),
    }
}

/// The lines of `metrics.jsonl` that are whole: step, and what the run computed as it is written.
pub(crate) fn losses(run: &Path) -> Vec<(u64, String)> {
    let bytes = fs::read(run.join("metrics.jsonl")).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let values = whole.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let figures = |line: Value| {
        let keys = ["loss", "grad_norm", "val_loss", "lr"];
        let found = keys.iter().filter_map(|key| Some(format!("{key} {}", line.get(key)?)));
        Some((line["step"].as_u64()?, found.collect::<Vec<_>>().join(" ")))
    };
    values.filter_map(figures).filter(|(_, figures)| !figures.is_empty()).collect()
}

/// Hashes of the rank files of checkpoint `step`.
pub(crate) fn parameters(run: &Path, step: u64) -> Listing {
    let files = listing(&run.join(format!("checkpoints/step-{step}")));
    files.into_iter().filter(|(name, _)| name.ends_with(".safetensors")).collect()
}
