//! The processes of a job: launchers, ranks, hosts, and the work of each.

pub mod bench;
pub mod hosts;
pub mod launch;
pub mod machine_profile;
pub mod rank_host;
pub mod rank_output;
pub mod rank_process;
pub mod restarts;
pub mod run_folder_lock;
pub mod setup;
pub mod task;
pub mod task_file;
pub mod training;
