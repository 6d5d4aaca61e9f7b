//! The options that change a configuration, shared by several commands.

use std::path::PathBuf;

use clap::Args;

use crate::arguments::counts::{self, whole};

/// The key that `--nproc` gives.
pub const RANKS: &str = "parallel.ranks";

/// Arguments that override keys of the configuration file.
#[derive(Clone, Debug, Default, Args)]
pub struct Overrides {
    /// Sets one key of the configuration, as `train.steps=200`; may be repeated
    #[arg(long = "set", value_name = "TABLE.KEY=VALUE")]
    pub set: Vec<String>,

    /// Leaves one key out that CONFIG or the resumed run has, as `memory.placement`: it has its default, or what
    /// follows from others; may be repeated
    #[arg(long, value_name = "TABLE.KEY")]
    pub unset: Vec<String>,

    /// Number of ranks (sets parallel.ranks; parallel.data follows)
    #[arg(long, value_name = "N", value_parser = whole::<usize>(1..=counts::RANKS))]
    pub nproc: Option<usize>,

    /// DeepSpeed's configuration (JSON), which adds to CONFIG; a value that differs in both is refused, unless --set decides
    #[arg(long, value_name = "FILE")]
    pub deepspeed: Option<PathBuf>,
}

impl Overrides {
    /// Returns whether they give a key, or leave it out.
    pub fn says(&self, key: &str) -> bool {
        self.sets(key) || self.unset.iter().any(|unset| unset.trim() == key)
    }

    /// Returns whether they give a key.
    pub fn sets(&self, key: &str) -> bool {
        key == RANKS && self.nproc.is_some()
            || self.set.iter().any(|set| set.split('=').next().is_some_and(|given| given.trim() == key))
    }

    /// The words that give them.
    pub fn words(&self) -> Vec<String> {
        let ranks = self.nproc.iter().flat_map(|ranks| ["--nproc".to_string(), ranks.to_string()]);
        let option = |name: &'static str, values: &[String]| {
            values.iter().flat_map(|value| [name.to_string(), value.clone()]).collect::<Vec<_>>()
        };
        let theirs: Vec<String> = self.deepspeed.iter().map(|path| path.display().to_string()).collect();
        ranks
            .chain(option("--deepspeed", &theirs))
            .chain(option("--set", &self.set))
            .chain(option("--unset", &self.unset))
            .collect()
    }
}
