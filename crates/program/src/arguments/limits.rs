//! Largest sizes of the files that the binary reads whole. A path may name a file of any size; nothing beyond
//! these bounds is read.

/// A configuration file. The one of a run folder has the text of a schedule in it where one was given.
pub const CONFIG_BYTES: u64 = 3 * SCHEDULE_BYTES;

/// A schedule file: a quarter of a million cells.
pub const SCHEDULE_BYTES: u64 = 2 << 20;

/// `memory.json`: room for 30,000 ranks.
pub const MEMORY_BYTES: u64 = 16 << 20;
