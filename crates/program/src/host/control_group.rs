//! Memory limits of the control groups that this process is in, in both versions of the kernel's interface.
//!
//! A container, a batch system or a service manager bounds the memory of a group of processes; beyond the bound the
//! kernel kills one of them, however much memory the machine has. Every group on the way up to the root has its own
//! bound, and the one that leaves least holds. Of what a group uses, the cache of files is given back when memory is
//! wanted, so it does not count.
//!
//! Everything is read below a root folder, which is `/` but in tests.

use std::path::{Path, PathBuf};

use phalanx_drawing::report::bytes;
use phalanx_system::host::{row, text};

/// Limits of at least this mean no limit (version 1 writes the largest multiple of a page).
const UNLIMITED: u64 = 1 << 62;

/// The memory limit of a control group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupLimit {
    /// The file that holds it.
    pub file: PathBuf,
    /// Bytes that the group may use.
    pub limit_bytes: u64,
    /// Bytes that are left of the limit.
    pub available_bytes: u64,
}

impl std::fmt::Display for GroupLimit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({})", bytes(self.limit_bytes), self.file.display())
    }
}

/// A hierarchy of groups and this process's group in it.
struct Hierarchy {
    /// Folder of the groups.
    mount: PathBuf,
    /// This process's group, at or below `mount`.
    own: PathBuf,
    version: Version,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// The limit that leaves this process the least memory; `None` without any.
pub fn tightest(root: &Path) -> Option<GroupLimit> {
    let groups = hierarchies(root);
    let limits = groups.iter().flat_map(Hierarchy::limits);
    limits.min_by_key(|limit| limit.available_bytes)
}

/// Number of processes of this process's group that the kernel has killed because memory ran out, and the file that
/// says so.
pub fn out_of_memory_kills(root: &Path) -> Option<(PathBuf, u64)> {
    hierarchies(root).into_iter().find_map(|hierarchy| {
        let name = match hierarchy.version {
            Version::One => "memory.oom_control",
            Version::Two => "memory.events",
        };
        let file = hierarchy.own.join(name);
        let count = row(&text(&file)?, "oom_kill")?;
        Some((file, count))
    })
}

impl Hierarchy {
    /// The limits of this process's group and of those above it.
    fn limits(&self) -> Vec<GroupLimit> {
        let up_to_mount = |folder: &&Path| folder.starts_with(&self.mount);
        self.own.ancestors().take_while(up_to_mount).filter_map(|folder| self.limit(folder)).collect()
    }

    fn limit(&self, folder: &Path) -> Option<GroupLimit> {
        let (limit, used, cache) = match self.version {
            Version::One => (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                ["total_inactive_file", "total_active_file"],
            ),
            Version::Two => ("memory.max", "memory.current", ["inactive_file", "active_file"]),
        };
        let read = |name: &str| text(folder.join(name));
        let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
        // In version 1, a group may not limit the groups below it.
        if folder != self.own && number("memory.use_hierarchy") == Some(0) {
            return None;
        }
        // Version 2 writes `max` if there is no limit.
        let limit_bytes = number(limit).filter(|limit| *limit < UNLIMITED)?;
        let statistics = read("memory.stat").unwrap_or_default();
        let cached: u64 = cache.iter().filter_map(|name| row(&statistics, name)).sum();
        let used = number(used).unwrap_or(0).saturating_sub(cached);
        Some(GroupLimit {
            file: folder.join(limit),
            limit_bytes,
            available_bytes: limit_bytes.saturating_sub(used),
        })
    }
}

/// The hierarchies that may bound memory: that of version 1 for memory, and that of version 2.
fn hierarchies(root: &Path) -> Vec<Hierarchy> {
    let read = |name: &str| text(root.join(name)).unwrap_or_default();
    let (groups, mounts) = (read("proc/self/cgroup"), read("proc/self/mountinfo"));
    let of_group = |line: &str| {
        // `4:cpu,memory:/path`; in version 2 `0::/path`.
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        let version = match controllers {
            "" => Version::Two,
            _ if controllers.split(',').any(|name| name == "memory") => Version::One,
            _ => return None,
        };
        let (inside, mount) = mounts.lines().find_map(|line| mounted(line, version))?;
        let mount = root.join(mount.trim_start_matches('/'));
        // In a container the mount shows only a part of the hierarchy. A group outside of that part has `..` in its path.
        let below = Path::new(path).strip_prefix(&inside).unwrap_or(Path::new(""));
        let below = if path.contains("/..") { Path::new("") } else { below };
        let own = mount.join(below);
        // If the group is not visible here, use the nearest visible group above it.
        let own = own.ancestors().find(|folder| folder.is_dir())?.to_path_buf();
        own.starts_with(&mount).then_some(Hierarchy { mount, own, version })
    };
    groups.lines().filter_map(of_group).collect()
}

/// Parses a line of `mountinfo` that mounts the hierarchy: the mounted group and the mount point.
fn mounted(line: &str, version: Version) -> Option<(String, String)> {
    let (before, after) = line.split_once(" - ")?;
    let mut after = after.split(' ');
    let (kind, options) = (after.next()?, after.nth(1)?);
    let fits = match version {
        Version::One => kind == "cgroup" && options.split(',').any(|option| option == "memory"),
        Version::Two => kind == "cgroup2",
    };
    let mut before = before.split(' ').skip(3);
    let (inside, at) = (before.next()?, before.next()?);
    fits.then(|| (unescaped(inside), unescaped(at)))
}

/// Decodes a path in which a blank is written `\040`, and other bytes similarly.
fn unescaped(path: &str) -> String {
    let mut parts = path.split('\\');
    let mut text = parts.next().unwrap_or_default().to_string();
    for part in parts {
        match part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                text.push(char::from(byte));
                text.push_str(&part[3..]);
            }
            None => text.push_str(part),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A root folder with these files.
    fn root(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::TempDir::new().unwrap();
        for (name, text) in files {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        root
    }

    const MOUNT_1: &str = "30 25 0:26 / /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory\n";
    const MOUNT_2: &str = "31 25 0:27 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n";
    const NO_LIMIT: &str = "9223372036854771712\n";

    #[test]
    fn version_1_is_read_up_to_the_root_without_the_cache_of_files() {
        let job = "sys/fs/cgroup/memory/batch/job";
        let own = |name: &str| format!("{job}/{name}");
        let files = [
            ("proc/self/cgroup", "5:cpu:/other\n4:memory:/batch/job\n0::/\n"),
            ("proc/self/mountinfo", MOUNT_1),
            (&own("memory.limit_in_bytes"), NO_LIMIT),
            (&own("memory.usage_in_bytes"), "1000\n"),
            (&own("memory.oom_control"), "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n"),
            ("sys/fs/cgroup/memory/batch/memory.limit_in_bytes", "140000\n"),
            ("sys/fs/cgroup/memory/batch/memory.usage_in_bytes", "50000\n"),
            ("sys/fs/cgroup/memory/batch/memory.use_hierarchy", "1\n"),
            (
                "sys/fs/cgroup/memory/batch/memory.stat",
                "cache 1\ntotal_inactive_file 9000\ntotal_active_file 1000\n",
            ),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", NO_LIMIT),
        ];
        let root = root(&files);
        let limit = tightest(root.path()).unwrap();
        let file = root.path().join("sys/fs/cgroup/memory/batch/memory.limit_in_bytes");
        assert_eq!(limit, GroupLimit { file, limit_bytes: 140_000, available_bytes: 100_000 });
        assert_eq!(out_of_memory_kills(root.path()), Some((root.path().join(own("memory.oom_control")), 7)));
    }

    #[test]
    fn version_2_is_read_up_to_the_root_and_the_tightest_holds() {
        let root = root(&[
            ("proc/self/cgroup", "0::/user/my run\n"),
            ("proc/self/mountinfo", MOUNT_2),
            ("sys/fs/cgroup/user/my run/memory.max", "500\n"),
            ("sys/fs/cgroup/user/my run/memory.current", "100\n"),
            ("sys/fs/cgroup/user/my run/memory.events", "low 0\noom 2\noom_kill 1\n"),
            ("sys/fs/cgroup/user/memory.max", "450\n"),
            ("sys/fs/cgroup/user/memory.current", "300\n"),
            ("sys/fs/cgroup/user/memory.stat", "anon 200\ninactive_file 60\nactive_file 40\n"),
        ]);
        let limit = tightest(root.path()).unwrap();
        assert_eq!((limit.limit_bytes, limit.available_bytes), (450, 250));
        std::fs::write(root.path().join("sys/fs/cgroup/user/memory.max"), "max\n").unwrap();
        assert_eq!(tightest(root.path()).unwrap().available_bytes, 400);
        assert_eq!(out_of_memory_kills(root.path()).unwrap().1, 1);
    }

    /// In a container the folder of the group is the mount itself.
    #[test]
    fn a_mount_of_a_part_of_the_hierarchy_is_followed() {
        let mount = "30 25 0:26 /docker/a\\040b /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
        for group in ["/docker/a b", "/../..", "/elsewhere"] {
            let root = root(&[
                ("proc/self/cgroup", &format!("4:memory:{group}\n")),
                ("proc/self/mountinfo", mount),
                ("sys/fs/cgroup/memory/memory.limit_in_bytes", "4096\n"),
                ("sys/fs/cgroup/memory/memory.usage_in_bytes", "5000\n"),
            ]);
            assert_eq!(tightest(root.path()).unwrap().available_bytes, 0, "{group}");
        }
    }

    #[test]
    fn a_system_without_control_groups_has_no_limit() {
        assert_eq!(tightest(root(&[]).path()), None);
        let files = [("proc/self/cgroup", "0::/\n"), ("proc/self/mountinfo", "nonsense\n")];
        assert_eq!((tightest(root(&files).path()), out_of_memory_kills(root(&files).path())), (None, None));
    }
}
