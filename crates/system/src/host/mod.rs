//! Files of `/proc` and `/sys`: the one place that reads them and takes them apart.
//!
//! They are read whole and in bounds. What is missing, cannot be read or says something else than expected is `None`:
//! every caller can do without it.

pub mod cores;
pub mod process;

use std::path::Path;

/// Largest file that is read: the list of mounts of a host with thousands of containers.
const MAX_BYTES: u64 = 16 << 20;

/// The text of a file; `None` if it is missing or not text.
pub fn text(path: impl AsRef<Path>) -> Option<String> {
    crate::files::read_text(path.as_ref(), MAX_BYTES).ok()
}

/// The names of the abstract Unix sockets at which somebody listens that begin with `prefix`; whose they are, is not said.
pub fn abstract_listeners(prefix: &str) -> Option<Vec<String>> {
    let table = crate::files::read_bounded(Path::new("/proc/net/unix"), MAX_BYTES).ok()?;
    Some(listeners_in(&String::from_utf8_lossy(&table), prefix))
}

fn listeners_in(table: &str, prefix: &str) -> Vec<String> {
    /// The flag of sockets at which somebody listens: others have the name of the one that has accepted them.
    const LISTENS: &str = "00010000";
    let names = table.lines().filter_map(|line| {
        // Address, references, protocol, flags, type, state, inode, name.
        let mut fields = line.split_whitespace().skip(3);
        let (flags, name) = (fields.next()?, fields.nth(3)?.strip_prefix('@')?);
        (flags == LISTENS && name.starts_with(prefix)).then(|| name.to_string())
    });
    names.collect()
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

    #[test]
    fn abstract_sockets_of_a_name_are_found_where_somebody_listens() {
        let table = "Num       RefCount Protocol Flags    Type St Inode Path\n\
                     0: 00000002 00000000 00010000 0001 01 17 @phalanx-0-a\n\
                     0: 00000003 00000000 00000000 0001 03 18 @phalanx-0-b\n\
                     0: 00000002 00000000 00010000 0001 01 19 /run/phalanx-0-c\n\
                     0: 00000002 00000000 00010000 0001 01 20\n\
                     0: 00000002 00000000 00010000 0001 01 21 @phalanx-1-d\n";
        assert_eq!(listeners_in(table, "phalanx-0-"), ["phalanx-0-a"]);
    }
}
