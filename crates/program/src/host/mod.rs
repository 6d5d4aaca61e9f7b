//! This host and this process: environment, memory, cards, terminal, signals.

pub mod busy;
pub mod card_needs;
pub mod cards;
pub mod colour;
pub mod control_group;
pub mod elsewhere;
pub mod environment;
pub mod exit_status;
pub mod host_kernels;
pub mod hub;
pub mod machine;
pub mod output;
pub mod pinning;
pub mod progress_line;
pub mod signals;
pub mod system_limits;
