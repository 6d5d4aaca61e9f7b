//! Reports for people: tables, plans and summaries.

pub mod card_report;
pub mod chunk_program_report;
pub mod chunk_report;
pub mod explain_report;
pub mod final_report;
pub mod fit;
pub mod mesh_report;
pub mod placement_report;
pub mod plan_report;
pub mod progress;
pub mod run_page;
pub mod schedule_report;
pub mod search_report;
pub mod stream_report;
pub mod sweep_report;
