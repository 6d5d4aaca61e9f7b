//! Names of the files of a run folder.

/// Name of the resolved configuration in a run folder.
pub const CONFIG_FILE: &str = "config.toml";

/// Name of the metrics in a run folder.
pub const METRICS_FILE: &str = "metrics.jsonl";

/// Name of the measured memory in a run folder.
pub const MEMORY_FILE: &str = "memory.json";

/// Name of the folder of checkpoints in a run folder.
pub const CHECKPOINTS: &str = "checkpoints";
