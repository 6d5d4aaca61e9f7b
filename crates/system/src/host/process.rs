//! Processes, by the files of `/proc/PID`.

use std::fs::{read_dir, read_link};

use super::cores::{boot_id, host_name};
use super::{after, kib_field, text};

/// The fields of a `stat` file behind the name in brackets, which may hold anything: the first is the state.
fn stat_fields(stat: &str) -> impl Iterator<Item = &str> {
    stat.rsplit_once(')').map_or("", |(_, fields)| fields).split_whitespace()
}

fn stat(pid: u32) -> Option<String> {
    text(format!("/proc/{pid}/stat"))
}

/// Activity of a process, as the system reports it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Activity {
    /// Processor time so far, in units of the system.
    pub cpu_ticks: u64,
    /// True if a signal or a debugger has stopped it.
    pub stopped: bool,
    /// True if one of its threads runs or is ready to run.
    pub runnable: bool,
    /// True if one of its threads waits for a disk or for the memory manager, which no signal interrupts.
    pub in_disk: bool,
}

impl Activity {
    /// Reads `/proc/PID`; of a process that is gone, nothing.
    pub fn read(pid: u32) -> Activity {
        let whole = stat(pid).unwrap_or_default();
        let states: String = tasks(pid).filter_map(|task| state(&text(task.join("stat"))?)).collect();
        Activity {
            cpu_ticks: cpu_ticks(&whole).unwrap_or(0),
            stopped: !states.is_empty() && states.chars().all(|state| matches!(state, 'T' | 't')),
            runnable: states.contains('R'),
            in_disk: states.contains('D'),
        }
    }
}

/// The folders of a process's threads.
fn tasks(pid: u32) -> impl Iterator<Item = std::path::PathBuf> {
    read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten().map(|task| task.path())
}

/// The state in the text of a `stat` file.
fn state(stat: &str) -> Option<char> {
    stat_fields(stat).next()?.chars().next()
}

/// Time in user and system mode, the 14th and 15th field.
fn cpu_ticks(stat: &str) -> Option<u64> {
    let mut fields = stat_fields(stat).skip(11);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
}

/// Page faults of this process so far that needed no disk.
pub fn page_faults() -> Option<u64> {
    // State, five numbers of processes and terminals, flags, faults.
    stat_fields(&text("/proc/self/stat")?).nth(7)?.parse().ok()
}

/// Returns whether a process runs. A zombie, which has ended and which nobody has waited for, does not.
pub fn is_running(pid: u32) -> bool {
    stat(pid).as_deref().and_then(state).is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

/// A process as others may know it: a number alone means another process on another machine, in another namespace, and later.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// Its number, in its own namespace.
    pub pid: u32,
    /// The machine's name.
    pub host: String,
    /// The start of the machine on which it runs ([`boot_id`]).
    boot: String,
    /// Its namespace of process numbers.
    namespace: String,
    /// When it was started, in the system's unit since the machine was.
    started: u64,
}

/// Location of a process that this process knows by its [`Identity`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whereabouts {
    /// It runs here, under its number.
    Here,
    /// It ran here and has ended.
    Ended,
    /// It runs, or ran, on this machine in another namespace of process numbers: in or outside of a container.
    OtherNamespace,
    /// It runs, or ran, on another machine, or on this one before it was started again.
    OtherMachine,
}

impl Identity {
    /// This process.
    pub fn own() -> Identity {
        let pid = std::process::id();
        Identity {
            pid,
            host: host_name(),
            boot: boot_id(),
            namespace: namespace(),
            started: started(pid).unwrap_or(0),
        }
    }

    /// Lines from which [`Identity::parse`] makes the same.
    pub fn to_text(&self) -> String {
        let Identity { pid, host, boot, namespace, started } = self;
        format!("process {pid}\nhost {host}\nboot {boot}\nnamespace {namespace}\nstarted {started}\n")
    }

    /// The process that these lines name.
    pub fn parse(text: &str) -> Option<Identity> {
        let field = |name| after(text, name).map(str::to_string);
        Some(Identity {
            pid: field("process ")?.parse().ok()?,
            host: field("host ").filter(|name| name.bytes().all(|byte| byte.is_ascii_graphic()))?,
            boot: field("boot ")?,
            namespace: field("namespace ")?,
            started: field("started ")?.parse().ok()?,
        })
    }

    /// Finds its location.
    pub fn whereabouts(&self) -> Whereabouts {
        if self.boot != boot_id() {
            return Whereabouts::OtherMachine;
        }
        if self.namespace != namespace() {
            return Whereabouts::OtherNamespace;
        }
        match is_running(self.pid) && started(self.pid) == Some(self.started) {
            true => Whereabouts::Here,
            false => Whereabouts::Ended,
        }
    }
}

/// The namespace of process numbers of this process.
fn namespace() -> String {
    read_link("/proc/self/ns/pid").map_or_else(|_| String::new(), |link| link.display().to_string())
}

/// The 22nd field: when a process was started.
fn started(pid: u32) -> Option<u64> {
    stat_fields(&stat(pid)?).nth(19)?.parse().ok()
}

/// The running processes of a process group.
pub fn group_members(group: u32) -> Vec<u32> {
    let entries = read_dir("/proc").into_iter().flatten();
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    // State, parent, group.
    let of = |pid: u32| stat_fields(&stat(pid)?).nth(2)?.parse::<u32>().ok();
    pids.filter(|pid| of(*pid) == Some(group) && is_running(*pid)).collect()
}

/// The parent of a process; None when it has ended, or if its parent is not in sight.
pub fn parent(pid: u32) -> Option<u32> {
    stat_fields(&stat(pid)?).nth(1)?.parse().ok().filter(|parent| *parent != 0)
}

/// Children of a process, of all its threads.
pub fn children(pid: u32) -> Vec<u32> {
    let lists = tasks(pid).filter_map(|task| text(task.join("children")));
    lists
        .flat_map(|list| list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>())
        .collect()
}

/// The arguments of a process, its program first.
pub fn arguments(pid: u32) -> Option<Vec<String>> {
    Some(text(format!("/proc/{pid}/cmdline"))?.split('\0').map(String::from).collect())
}

/// The name of a process, as `ps` shows it.
pub fn name(pid: u32) -> Option<String> {
    Some(text(format!("/proc/{pid}/comm"))?.trim().to_string())
}

/// Largest number of bytes of a process that were resident so far (`VmHWM`); None when it has ended.
pub fn resident_bytes_peak(pid: u32) -> Option<u64> {
    kib_field(format!("/proc/{pid}/status"), "VmHWM:")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_in_a_stat_file_may_hold_anything() {
        let fields: Vec<&str> = stat_fields("12 (a) b (c)) S 1 2").collect();
        assert_eq!(fields, ["S", "1", "2"]);
        assert_eq!(cpu_ticks("1 (x) R 1 2 3 4 5 6 7 8 9 10 40 2 0"), Some(42));
        assert_eq!(cpu_ticks("1 (x) R 1"), None);
    }

    #[test]
    fn this_process_runs_and_one_that_was_never_started_does_not() {
        let own = std::process::id();
        assert!(is_running(own) && Activity::read(own).runnable);
        assert!(resident_bytes_peak(own).is_some_and(|bytes| bytes > 1 << 20));
        assert!(parent(own).is_some_and(is_running));
        assert!(arguments(own).is_some_and(|words| !words[0].is_empty()));
        // Above the largest process number of Linux.
        let none = 1 << 23;
        assert!(!is_running(none) && children(none).is_empty());
        assert_eq!((Activity::read(none), resident_bytes_peak(none)), (Activity::default(), None));
    }

    #[test]
    fn a_process_is_known_by_more_than_its_number() {
        let own = Identity::own();
        assert_eq!(Identity::parse(&own.to_text()), Some(own.clone()));
        assert_eq!(own.whereabouts(), Whereabouts::Here);
        let later = Identity { started: own.started + 1, ..own.clone() };
        assert_eq!(later.whereabouts(), Whereabouts::Ended, "its number was given to another process");
        let boxed = Identity { namespace: "pid:[1]".to_string(), ..own.clone() };
        assert_eq!(boxed.whereabouts(), Whereabouts::OtherNamespace);
        let away = Identity { boot: "another".to_string(), ..own.clone() };
        assert_eq!(away.whereabouts(), Whereabouts::OtherMachine);
        for text in [
            "",
            "process 1",
            "process x\nhost h\nboot b\nnamespace n\nstarted 1",
            &own.to_text().replace("host ", "host \u{1b}["),
        ] {
            assert_eq!(Identity::parse(text), None);
        }
    }
}
