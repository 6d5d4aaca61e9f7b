//! Reports of findings, each once for its kind and place in the code.

use std::collections::HashSet;
use std::fmt;

/// How many reports are kept.
const MAX_REPORTS: usize = 100;

/// What was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Finding {
    /// Two threads of a block use a place, one of them writes, and no barrier is between.
    Race,
    /// Two blocks of a launch use a place, and one of them writes.
    RaceBetweenBlocks,
    /// Two operations use a place, one of them writes, and no event or stream orders them.
    StreamOrder,
    /// Memory is read that was never written.
    Unwritten,
    /// An address lies in no allocation.
    OutOfBounds,
    /// An address lies in an allocation that was freed.
    UseAfterFree,
    /// An address is no multiple of the size of the access.
    Misaligned,
    /// Shared memory is used to which an asynchronous copy may still write.
    UnfinishedCopy,
    /// Threads of a warp wait at different barriers, or for lanes that do not come.
    Divergence,
    /// All warps wait at barriers that too few reach.
    Deadlock,
    /// A lane reads from a lane that takes no part.
    InactiveLane,
    /// The kernel ran a `trap`.
    Trap,
    /// Two devices do not call the same function with the same count and type.
    Mismatch,
    /// The launch exceeds the limit of instructions.
    Endless,
}

impl Finding {
    /// Whether the kernel cannot continue.
    pub fn is_fatal(self) -> bool {
        !matches!(
            self,
            Self::Race | Self::RaceBetweenBlocks | Self::StreamOrder | Self::Unwritten | Self::UnfinishedCopy
        )
    }

    fn title(self) -> &'static str {
        match self {
            Self::Race => "race within a block",
            Self::RaceBetweenBlocks => "race between blocks",
            Self::StreamOrder => "operations without an order",
            Self::Unwritten => "read of memory that was never written",
            Self::OutOfBounds => "access out of bounds",
            Self::UseAfterFree => "use after free",
            Self::Misaligned => "misaligned access",
            Self::UnfinishedCopy => "asynchronous copy not finished",
            Self::Divergence => "threads of a warp diverge",
            Self::Deadlock => "barrier that is never complete",
            Self::InactiveLane => "exchange with an inactive lane",
            Self::Trap => "trap",
            Self::Mismatch => "communication that does not match",
            Self::Endless => "too many instructions",
        }
    }
}

/// A finding with its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// What was found.
    pub finding: Finding,
    /// The kernel, or the copy, memset and so on.
    pub operation: String,
    /// File and line of the source, if the PTX says.
    pub source: Option<(String, u32)>,
    /// Line of the PTX text; 0 outside of kernels.
    pub ptx_line: u32,
    /// Block of the thread.
    pub block: [u32; 3],
    /// The thread in its block; `None` outside of kernels.
    pub thread: Option<[u32; 3]>,
    /// The address in its memory, if there is one.
    pub address: Option<u64>,
    /// Memory of the address, the other access, and so on.
    pub detail: String,
}

impl fmt::Display for Report {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} in {}", self.finding.title(), self.operation)?;
        if let Some((file, line)) = &self.source {
            write!(out, " at {file}:{line}")?;
        }
        if self.ptx_line > 0 {
            write!(out, " (PTX line {})", self.ptx_line)?;
        }
        if let Some(thread) = self.thread {
            write!(out, ", block {:?}, thread {thread:?}", self.block)?;
        }
        if let Some(address) = self.address {
            write!(out, ", address {address:#x}")?;
        }
        if !self.detail.is_empty() {
            write!(out, ": {}", self.detail)?;
        }
        Ok(())
    }
}

/// The reports of an emulator, in order.
#[derive(Debug, Default)]
pub struct Reports {
    reports: Vec<Report>,
    seen: HashSet<(Finding, String, u32)>,
}

impl Reports {
    /// Adds a report, unless one of its kind and place is there.
    pub fn add(&mut self, report: Report) {
        let key = (report.finding, report.operation.clone(), report.ptx_line);
        if self.reports.len() < MAX_REPORTS && self.seen.insert(key) {
            self.reports.push(report);
        }
    }

    /// All reports.
    pub fn all(&self) -> &[Report] {
        &self.reports
    }

    /// Takes all reports out.
    pub fn take(&mut self) -> Vec<Report> {
        self.seen.clear();
        std::mem::take(&mut self.reports)
    }
}
