//! Which files a run has written: only these may be replaced or removed.
//!
//! A folder is a run's if it has the `checksums.json` of one, and a file that sets a run up is the run's if its checksum is in
//! there. Whatever else stands under the name of such a file is somebody's own, and is refused by this name.

use std::ffi::OsStr;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use phalanx_system::files::is_named;
use phalanx_train::metric_sinks::EVENTS;
use phalanx_train::run_files::{CHECKPOINTS, CONFIG_FILE};

use crate::folders::checksums::{Checksums, digest_of_file};
use crate::folders::run_names::{CHECKSUMS_FILE, FLIGHT, LOGS, OUTPUTS, SETUP_FILES, is_of_run};

/// Advice to a user about a file of their own.
pub const ADVICE: &str = "move away what is yours, or choose another folder with --run; nothing was changed";

/// Returns whether `folder` is a run folder.
///
/// # Errors
/// A `checksums.json` that is damaged, or somebody's own.
pub fn is_run(folder: &Path) -> Result<bool> {
    Ok(Checksums::read(folder)?.is_some())
}

/// Returns whether the file at `path` is the file `name` of [`SETUP_FILES`] that the run has written.
///
/// # Errors
/// A file that cannot be read.
pub fn is_own(path: &Path, name: &str, checksums: &Checksums) -> Result<bool> {
    let is_file = path.symlink_metadata().is_ok_and(|found| found.is_file());
    Ok(is_file && checksums.confirms(name, || digest_of_file(path))?)
}

/// Refuses those of `names`, of [`SETUP_FILES`], under which `run` has something that no run has written.
///
/// # Errors
/// An error with their paths, and files that cannot be read.
pub fn check_own<'a>(run: &Path, names: impl IntoIterator<Item = &'a str>) -> Result<()> {
    let standing: Vec<&str> = names.into_iter().filter(|name| is_named(&run.join(name))).collect();
    if standing.is_empty() {
        return Ok(());
    }
    let checksums = Checksums::read(run)?;
    let mut foreign = Vec::new();
    for name in standing {
        let path = run.join(name);
        if path.is_dir() {
            bail!("{} is a folder, and a run writes a file there: move it away", path.display());
        }
        if !checksums.as_ref().map_or(Ok(false), |checksums| is_own(&path, name, checksums))? {
            foreign.push(path.display().to_string());
        }
    }
    if foreign.is_empty() {
        return Ok(());
    }
    let why = match checksums {
        None => format!("there is no {CHECKSUMS_FILE} that says so"),
        Some(_) => format!("what {CHECKSUMS_FILE} says of it differs"),
    };
    bail!("no run has written {} ({why}), and this run would replace it: {ADVICE}", foreign.join(", "))
}

/// Refuses a folder that is no run's and has something under a name that a run writes. Empty folders are fine.
///
/// # Errors
/// An error with the paths.
pub fn check_free(folder: &Path) -> Result<()> {
    let is_used = |path: &PathBuf| match fs::read_dir(path) {
        Ok(mut entries) => entries.next().is_some(),
        Err(_) => is_named(path),
    };
    let names = SETUP_FILES.iter().chain(&OUTPUTS).map(|name| folder.join(name));
    let found: Vec<String> = names.filter(is_used).map(|path| path.display().to_string()).collect();
    if found.is_empty() {
        return Ok(());
    }
    bail!(
        "no run has written {} (there is no {CHECKSUMS_FILE} that says so), and a run writes something of this name there: \
         {ADVICE}",
        found.join(", ")
    )
}

/// Refuses links and files in the place of the folders whose files a run replaces.
///
/// # Errors
/// An error with the path.
pub fn check_folders(run: &Path) -> Result<()> {
    for path in [LOGS, FLIGHT, EVENTS].map(|name| run.join(name)) {
        if is_named(&path) && !path.symlink_metadata().is_ok_and(|found| found.is_dir()) {
            bail!(
                "{} is a link or a file, and a run replaces files in a folder of this name: {ADVICE}",
                path.display()
            );
        }
    }
    Ok(())
}

/// Refuses to write to `target`, which `option` names, if it is or lies in a run or a checkpoint, under a name that a run writes.
///
/// # Errors
/// An error with the run or the checkpoint.
pub fn refuse_in_run(target: &Path, option: &str) -> Result<()> {
    let whole = resolved(target)?;
    let mut below: Option<&OsStr> = None;
    for folder in whole.ancestors() {
        let is_of_run = match below.map(OsStr::to_str) {
            None => folder.join(CONFIG_FILE).exists() || folder.join(CHECKPOINTS).exists(),
            Some(name) => name.is_some_and(is_of_run),
        };
        let what = if phalanx_checkpoint::is_checkpoint(folder) {
            "a checkpoint"
        } else if is_of_run && (below.is_none() || is_run(folder).unwrap_or(true)) {
            "a run"
        } else {
            below = folder.file_name();
            continue;
        };
        let relation = if below.is_none() { "is the folder of" } else { "lies in" };
        bail!(
            "{option} {} {relation} {what} ({}), whose files would be replaced: choose another; nothing was changed",
            target.display(),
            folder.display()
        );
    }
    Ok(())
}

/// Refuses to replace the file `target`, which `option` names, unless `is_earlier` says that the same command has written it
/// before. An empty file is fine, and devices and FIFOs take what comes.
///
/// # Errors
/// An error with the path.
pub fn check_output(target: &Path, option: &str, is_earlier: impl Fn(&Path) -> bool) -> Result<()> {
    refuse_in_run(target, option)?;
    if target.is_symlink() && fs::metadata(target).is_err() {
        bail!(
            "{option} {}: it is a link to nothing: choose another, or remove it; nothing was changed",
            target.display()
        );
    }
    let is_used = fs::metadata(target).is_ok_and(|found| found.is_file() && found.len() > 0);
    if is_used && !is_earlier(target) {
        bail!(
            "{option} {}: this command has not written what is there, and would replace it: choose another, or move it away; \
             nothing was changed",
            target.display()
        );
    }
    Ok(())
}

/// Returns whether a file begins with all of `beginning`.
pub fn begins_with(path: &Path, beginning: &str) -> bool {
    head(path).starts_with(beginning)
}

/// Returns whether a file is a drawing of this program.
pub fn is_drawing(path: &Path) -> bool {
    let head = head(path);
    head.starts_with("<svg xmlns=")
        && head.contains("font-family=\"Helvetica, Arial, sans-serif\" font-size=\"11\"")
}

/// The beginning of a file as text.
fn head(path: &Path) -> String {
    let mut bytes = Vec::new();
    // What cannot be read is not recognised.
    let _ =
        phalanx_system::files::open_regular(path).and_then(|file| file.take(1024).read_to_end(&mut bytes));
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The path without links, as far as it exists.
fn resolved(path: &Path) -> Result<PathBuf> {
    let whole = std::path::absolute(path).with_context(|| path.display().to_string())?;
    for there in whole.ancestors() {
        if let Ok(found) = fs::canonicalize(there) {
            let rest = whole.strip_prefix(there).expect("an ancestor");
            return Ok(if rest.as_os_str().is_empty() { found } else { found.join(rest) });
        }
    }
    Ok(whole)
}
