//! This machine's cores, memory and limits, as the system reports them.

use std::path::{Path, PathBuf};

use crate::host::control_group::{self, GroupLimit};
use phalanx_drawing::report;

/// Cores that this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get())
}

/// Threads of each of `ranks` ranks on this machine.
pub fn threads_per_rank(ranks: usize) -> usize {
    (cores() / ranks.max(1)).max(1)
}

/// Memory that new programs could take without swapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Available {
    /// The system's estimate (`MemAvailable`), or less if a control group leaves less.
    pub bytes: u64,
    /// The control group, if it leaves less than the system has.
    pub group: Option<GroupLimit>,
}

impl std::fmt::Display for Available {
    /// Completes a sentence that begins with the bytes that are needed.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Available { bytes, group } = self;
        match group {
            None => write!(f, "this machine has {bytes} bytes available ({})", report::bytes(*bytes)),
            Some(limit) => write!(
                f,
                "the control group of this process has {bytes} bytes available ({}) of its limit of {limit}",
                report::bytes(*bytes)
            ),
        }
    }
}

/// The memory that the system and the control groups of this process leave; `None` where neither is known.
pub fn available() -> Option<Available> {
    let system = phalanx_system::host::available_bytes().map(|bytes| Available { bytes, group: None });
    let group = memory_limit().map(|limit| Available { bytes: limit.available_bytes, group: Some(limit) });
    // If both are equal, takes the system, whose message is shorter.
    [system, group].into_iter().flatten().min_by_key(|available| available.bytes)
}

/// The tightest memory limit of the control groups of this process, if there is one.
pub fn memory_limit() -> Option<GroupLimit> {
    control_group::tightest(Path::new("/"))
}

/// Number of processes that the kernel has killed because memory ran out, and the file that says so: for the control
/// group of this process, or else for the machine.
pub fn out_of_memory_kills() -> Option<(PathBuf, u64)> {
    control_group::out_of_memory_kills(Path::new("/")).or_else(|| {
        let file = PathBuf::from("/proc/vmstat");
        let count = phalanx_system::host::row(&phalanx_system::host::text(&file)?, "oom_kill")?;
        Some((file, count))
    })
}

/// Version of the kernel.
pub fn kernel() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

/// The model name of the processor.
pub fn processor() -> String {
    phalanx_system::host::processor_field("model name").unwrap_or("unknown".to_string())
}

/// The processor's instruction sets that the kernels use or may use.
pub fn instruction_sets() -> Vec<String> {
    const KNOWN: [&str; 10] = [
        "sse4_2",
        "avx",
        "f16c",
        "fma",
        "avx2",
        "avx512f",
        "avx512bw",
        "avx512_vnni",
        "avx512_bf16",
        "amx_bf16",
    ];
    let flags = phalanx_system::host::processor_field("flags").unwrap_or_default();
    let has: Vec<&str> = flags.split_whitespace().collect();
    KNOWN.into_iter().filter(|flag| has.contains(flag)).map(String::from).collect()
}

/// The system's huge page settings: for private memory (`always`, `madvise` or `never`) and for memory that
/// processes share (`always`, `within_size`, `advise` or `never`).
pub fn huge_pages() -> [String; 2] {
    ["enabled", "shmem_enabled"].map(|file| {
        let path = format!("/sys/kernel/mm/transparent_hugepage/{file}");
        phalanx_system::host::chosen_word(path).unwrap_or("unknown".to_string())
    })
}

/// Limits of this process: the soft value, `None` for no limit.
pub fn limits() -> [(&'static str, Option<u64>); 3] {
    use rustix::process::{Resource, getrlimit};
    [("memlock", Resource::Memlock), ("nofile", Resource::Nofile), ("nproc", Resource::Nproc)]
        .map(|(name, resource)| (name, getrlimit(resource).current))
}
