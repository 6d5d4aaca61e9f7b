//! From a configuration to a plan that fits, and proposals where none does.

pub mod assumed;
pub mod budgets;
pub mod data_report;
pub mod deepspeed_estimate;
pub mod disk_check;
pub mod estimate;
pub mod formulas;
pub mod kept_budget;
pub mod micro_choice;
pub mod placement_budget;
pub mod planned;
pub mod proposals;
pub mod proposed_changes;
pub mod resolve;
pub mod search;
pub mod sized;
pub mod step_time;
pub mod tokenizing;
