//! Largest sizes of the files that the binary reads whole. A path may name a file of any size; nothing beyond
//! these bounds is read.

/// A configuration file, with the text of a schedule in it where one was given.
pub const CONFIG_BYTES: u64 = 8 << 20;

/// A schedule file: half a million cells.
pub const SCHEDULE_BYTES: u64 = 4 << 20;

/// `memory.json`: room for 30,000 ranks.
pub const MEMORY_BYTES: u64 = 16 << 20;

/// One line of `metrics.jsonl`, which has about 300 bytes.
pub const METRICS_LINE_BYTES: u64 = 64 << 10;
