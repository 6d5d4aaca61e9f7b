//! Files of `/proc` and `/sys`: the one place that reads them and takes them apart.
//!
//! They are read whole and in bounds. What is missing, cannot be read or says something else than expected is `None`:
//! every caller can do without it.
#![forbid(unsafe_code)]

pub mod cores;
pub mod process;

use std::path::Path;

/// Largest file that is read: the list of mounts of a host with thousands of containers.
const MAX_BYTES: u64 = 16 << 20;

/// The text of a file; `None` if it is missing or not text.
pub fn text(path: impl AsRef<Path>) -> Option<String> {
    phalanx_files::read_text(path.as_ref(), MAX_BYTES).ok()
}

/// The rest of the first line that begins with `name`.
pub fn after<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

/// The number in kB after `name` at the start of a line of a file, in bytes.
pub fn kib_field(path: impl AsRef<Path>, name: &str) -> Option<u64> {
    let text = text(path)?;
    let kib = after(&text, name)?.trim_end_matches("kB").trim_end();
    kib.parse::<u64>().ok().map(|kib| kib * 1024)
}

/// The number after `name` in a table of names and numbers.
pub fn row(table: &str, name: &str) -> Option<u64> {
    let mut rows = table.lines().filter_map(|line| line.split_once(' '));
    rows.find(|(known, _)| *known == name)?.1.trim().parse().ok()
}

/// Bytes that the system could still give, by its own estimate.
pub fn available_bytes() -> Option<u64> {
    kib_field("/proc/meminfo", "MemAvailable:")
}

/// Bytes of memory of the machine.
pub fn total_bytes() -> Option<u64> {
    kib_field("/proc/meminfo", "MemTotal:")
}

/// The value of a `name : value` line of `/proc/cpuinfo`, for the first processor.
pub fn processor_field(name: &str) -> Option<String> {
    let text = text("/proc/cpuinfo")?;
    let (_, value) = after(&text, name)?.split_once(':')?;
    Some(value.trim().to_string())
}

/// The word in brackets of a file that lists choices: `always [madvise] never`.
pub fn chosen_word(path: impl AsRef<Path>) -> Option<String> {
    let text = text(path)?;
    let (_, rest) = text.split_once('[')?;
    Some(rest.split_once(']')?.0.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_and_what_is_not_there_is_none() {
        let status = "Name:\tx\nSigIgn:\t0000000000001000\nVmHWM:\t  12 kB\n";
        assert_eq!((after(status, "SigIgn:"), after(status, "SigCgt:")), (Some("0000000000001000"), None));
        assert_eq!((row("low 1\noom_kill 7\n", "oom_kill"), row("oom_kill x", "oom_kill")), (Some(7), None));
        assert!(kib_field("/proc/self/status", "VmHWM:").is_some_and(|bytes| bytes.is_multiple_of(1024)));
        assert_eq!(kib_field("/proc/self/no-such-file", "VmHWM:"), None);
    }
}
