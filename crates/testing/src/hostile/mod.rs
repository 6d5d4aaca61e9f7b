//! Hostile input for tests of readers: variants of a sound file, from a seed, and the memory that reading one
//! of them takes.
//!
//! - [`Random`]: the seeded numbers that every variant comes from.
//! - [`mutate`] changes bytes: flipped bits, extreme numbers, spans removed, doubled or moved, files cut short.
//! - [`mutate_json`] changes the content and keeps the form, so that a checksum can be made for it.
//! - [`Counting`], [`peak_bytes`]: an allocator for a test binary that knows what a thread has allocated.
//! - [`survive`] puts them together: a reader gets thousands of variants and must neither panic nor allocate
//!   more than it may.

mod allocation;
mod mutation;
mod random;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

pub use allocation::{Counting, peak_bytes};
pub use mutation::{mutate, mutate_json};
pub use random::Random;

/// Gives `read` the variants 0 to `count` that `make` makes; returns how many it accepted.
///
/// # Panics
/// When `read` panics or allocates more than `max_bytes` at a time for one of them. The message has its number
/// and its beginning.
pub fn survive(
    seed: &str,
    count: usize,
    max_bytes: usize,
    mut make: impl FnMut(&mut Random) -> Vec<u8>,
    mut read: impl FnMut(&[u8]) -> bool,
) -> usize {
    let mut accepted = 0;
    for number in 0..count {
        let variant = make(&mut Random::of_case(seed, number));
        let (ended, peak) = peak_bytes(|| catch_unwind(AssertUnwindSafe(|| read(&variant))));
        let shown = || {
            let beginning = &variant[..variant.len().min(2000)];
            format!("variant {number} of {seed} ({} bytes): {}", variant.len(), beginning.escape_ascii())
        };
        match ended {
            Ok(was_accepted) => accepted += usize::from(was_accepted),
            Err(_) => panic!("a panic while reading {}", shown()),
        }
        assert!(peak <= max_bytes, "{peak} bytes were allocated, {max_bytes} are allowed: {}", shown());
    }
    accepted
}

/// Makes `bytes` the content of `path`, in place: a file that is emptied first is written to the disk at once by
/// some file systems, which thousands of variants would wait for.
///
/// # Panics
/// When the system refuses.
pub fn overwrite(path: &Path, bytes: &[u8]) {
    let file =
        File::options().write(true).create(true).truncate(false).open(path).expect("a file to overwrite");
    file.write_all_at(bytes, 0).expect("room for a variant");
    file.set_len(bytes.len() as u64).expect("room for a variant");
}

/// Makes a FIFO: opening it without care waits for a writer that never comes.
///
/// # Panics
/// When the system refuses.
pub fn make_fifo(path: &Path) {
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    mknodat(CWD, path, FileType::Fifo, Mode::from_raw_mode(0o600), 0).expect("a FIFO in a temporary folder");
}
