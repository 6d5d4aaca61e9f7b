//! Survey of the folders for disk memory before a run starts: whether they can hold it, and what will be slow.

use std::io::{Error, ErrorKind, Result};
use std::path::Path;
use std::sync::Arc;

use super::bounce::BOUNCE_BYTES;
use super::ring::Ring;
use super::stripes::Stripes;
use super::{BLOCK, DiskOptions, reads_directly};

/// Report to the user about the folders of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiskSurvey {
    /// Notes about what is slower or takes more memory than it could.
    pub notes: Vec<String>,
}

impl DiskOptions {
    /// Memory that a disk memory of so many bytes takes beside the arenas: checksums, and buffers for bytes that are not
    /// aligned.
    pub fn bytes_in_memory(&self, bytes: u64) -> u64 {
        let checksums = if self.checksums { bytes.div_ceil(BLOCK as u64) * 4 } else { 0 };
        checksums + BOUNCE_BYTES as u64
    }
}

/// Looks at the folders of a run, whose ranks on this machine have disk memories of `bytes`. Nothing stays there.
///
/// # Errors
/// A folder that is missing or cannot be written, or a file system with too few bytes left for all ranks together: the
/// error says which folder, how many bytes are needed and free, and what to do.
pub fn survey(options: &DiskOptions, bytes: &[u64]) -> Result<DiskSurvey> {
    let needed = |number: usize| {
        let folders = options.folders.len();
        let stripes = bytes.iter().map(|bytes| Stripes::new(bytes.next_multiple_of(BLOCK as u64), folders));
        stripes.map(|stripes| stripes.bytes_in(number)).sum::<u64>()
    };
    check_room(options, &needed)?;
    survey_speed(options, &needed)
}

/// Looks at what is slower than it could be in the folders of a run, whose ranks may have their disk memories already.
///
/// # Errors
/// A folder that is missing or cannot be written.
pub fn survey_folders(options: &DiskOptions) -> Result<DiskSurvey> {
    survey_speed(options, &|_| BLOCK as u64)
}

fn survey_speed(options: &DiskOptions, needed: &dyn Fn(usize) -> u64) -> Result<DiskSurvey> {
    let mut notes = Vec::new();
    for (number, folder) in options.folders.iter().enumerate() {
        let refused = |error| refused(folder, needed(number), &error);
        let file = phalanx_system::files::scratch_file(folder, BLOCK as u64).map_err(refused)?;
        let place = folder.display();
        if phalanx_system::files::is_in_memory(folder).map_err(refused)? {
            notes.push(format!(
                "{place} is memory, not a disk (tmpfs): what lies there takes memory of this machine; give a folder on a disk"
            ));
        } else if options.direct && !reads_directly(&file, BLOCK as u64).map_err(refused)? {
            notes.push(format!(
                "the file system of {place} has no direct transfers: they go through the page cache, which takes memory and time"
            ));
        }
        if number == 0
            && options.io_uring
            && let Err(error) = Ring::start(&[Arc::new(file)], 1)
        {
            notes.push(format!(
                "the system refuses io_uring ({error}): threads move what lies on disk, which takes more processor time; \
                 `sysctl kernel.io_uring_disabled` and the seccomp profile of a container allow it"
            ));
        }
    }
    Ok(DiskSurvey { notes })
}

/// Refuses file systems with less than what the folders on them need; `needed` says what each does.
fn check_room(options: &DiskOptions, needed: &dyn Fn(usize) -> u64) -> Result<()> {
    let mut file_systems: Vec<(u64, &Path, u64)> = Vec::new();
    for (number, folder) in options.folders.iter().enumerate() {
        let needed = needed(number);
        let system =
            phalanx_system::files::file_system_of(folder).map_err(|error| refused(folder, needed, &error))?;
        match file_systems.iter_mut().find(|(known, ..)| *known == system) {
            Some((_, _, sum)) => *sum += needed,
            None => file_systems.push((system, folder, needed)),
        }
    }
    for (_, folder, needed) in file_systems {
        let free = phalanx_system::files::free_bytes(folder)?;
        if needed > free {
            let text = format!("{needed} bytes are needed, {free} are free");
            return Err(refused(folder, needed, &Error::new(ErrorKind::StorageFull, text)));
        }
    }
    Ok(())
}

/// Why a folder cannot have `bytes` bytes of disk memory, and what to do.
pub(super) fn refused(folder: &Path, bytes: u64, error: &Error) -> Error {
    let advice = match error.kind() {
        ErrorKind::StorageFull => "free space there, give a folder on a larger disk, or keep less on disk",
        ErrorKind::NotADirectory => {
            "this is a file; give a folder, on a local disk, that this user may write"
        }
        _ => "give a folder that exists, on a local disk, that this user may write",
    };
    Error::new(
        error.kind(),
        format!("disk memory of {bytes} bytes in {}: {error}; {advice}", folder.display()),
    )
}
