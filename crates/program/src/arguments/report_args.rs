//! The arguments of `report`.

use std::path::PathBuf;

use clap::Args;

/// Writes a page about a run, or one that compares several
///
/// One HTML file without anything outside of it: loss, validation loss, learning rate, gradient norm, loss scale and throughput over steps, the memory of
/// each rank by category, planned and measured, and the configuration; of several runs, their lines over each other and the keys in which they
/// differ. A run that is going on may be read as well.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    phalanx report runs/quickstart\n  \
    phalanx report runs/a runs/b --out compared.html")]
pub struct ReportArgs {
    /// Run folders
    #[arg(required = true, value_name = "RUN")]
    pub runs: Vec<PathBuf>,
    /// The page; report.html in the first run folder when left out
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}
