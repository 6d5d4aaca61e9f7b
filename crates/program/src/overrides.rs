//! The options that change a configuration, shared by several commands.

use clap::Args;

/// Arguments that override keys of the configuration file.
#[derive(Clone, Debug, Default, Args)]
pub struct Overrides {
    /// Sets one key of the configuration, as `train.steps=200`; may be repeated
    #[arg(long = "set", value_name = "TABLE.KEY=VALUE")]
    pub set: Vec<String>,

    /// Number of ranks (sets parallel.ranks; parallel.data follows)
    #[arg(long, value_name = "N")]
    pub nproc: Option<usize>,
}
