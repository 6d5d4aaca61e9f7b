//! The names that a run writes in its folder.

use phalanx_data::TOKENIZER_FILE;
use phalanx_system::files::LOCK_FILE;
use phalanx_train::metric_sinks::{CSV_FILE, EVENTS};
use phalanx_train::references::REFERENCES_FILE;
use phalanx_train::run_files::{CHECKPOINTS, CONFIG_FILE, MEMORY_FILE, METRICS_FILE};
use phalanx_train::token_data::TOKENS_FILE;

/// The configuration file as the user first gave it; a resume compares a changed file with it.
pub const GIVEN_FILE: &str = "given.toml";

/// Name of the plan, in the format of `phalanx plan --json`.
pub const PLAN_FILE: &str = "plan.json";

/// Checksums of the files that set the run up.
pub const CHECKSUMS_FILE: &str = "checksums.json";

/// Folder of the logs.
pub const LOGS: &str = "logs";

/// Folder of flight records.
pub const FLIGHT: &str = "flight";

/// Folder in which files are prepared.
pub const NEXT: &str = ".next";

/// The same folder once the change is committed.
pub const READY: &str = ".ready";

/// The files that set a run up and change together. The one that says which of the others are the run's is the last to change.
pub const SETUP_FILES: [&str; 6] =
    [CONFIG_FILE, GIVEN_FILE, PLAN_FILE, TOKENS_FILE, TOKENIZER_FILE, CHECKSUMS_FILE];

/// Names of what a run writes beside them.
pub const OUTPUTS: [&str; 8] =
    [METRICS_FILE, MEMORY_FILE, CHECKPOINTS, LOGS, FLIGHT, REFERENCES_FILE, CSV_FILE, EVENTS];

/// Returns whether a run folder has something of its own under this name.
pub fn is_of_run(name: &str) -> bool {
    SETUP_FILES.iter().chain(&OUTPUTS).chain(&[NEXT, READY, LOCK_FILE]).any(|own| *own == name)
}

#[cfg(test)]
mod tests {
    use super::{NEXT, OUTPUTS, READY, SETUP_FILES};
    use phalanx_system::files::LOCK_FILE;

    #[test]
    fn the_fault_campaign_and_the_tests_know_all_names_of_a_run() {
        assert_eq!(phalanx_testing::reliability::SETUP_FILES, SETUP_FILES);
        let known =
            phalanx_testing::reliability::RUN_NAMES.map(|name| name.split('/').next().unwrap_or(name));
        assert_eq!(known[..], [&SETUP_FILES[..], &OUTPUTS, &[NEXT, READY, LOCK_FILE]].concat());
    }
}
