//! Distribution of ranks and threads over hosts and their cores.

use anyhow::{Result, bail};
use phalanx_collectives::MAX_WORLD;
use phalanx_launch::{LocalHello, LocalLeader};

use crate::arguments::train_args::TrainArgs;
use crate::configuration::translation;
use crate::host::{machine, pinning};

/// Number of ranks of each of `hosts` hosts: `--nproc`, or an equal share of the ranks of the configuration.
///
/// # Errors
/// Ranks that cannot be divided evenly.
pub fn ranks_of_a_host(args: &TrainArgs, hosts: usize) -> Result<usize> {
    match (args.overrides.nproc, &args.config) {
        (Some(ranks), _) if ranks > MAX_WORLD => {
            bail!("--nproc {ranks}: a job has at most {MAX_WORLD} ranks")
        }
        (Some(ranks), _) => Ok(ranks),
        (None, None) => bail!("give --nproc, the number of ranks of each host"),
        (None, Some(file)) => {
            let given = translation::read_both(file, &args.overrides)?.0.with(&args.overrides, &[])?;
            let ranks = given.config()?.world_size();
            if !ranks.is_multiple_of(hosts) {
                bail!(
                    "the configuration has {ranks} ranks, which cannot be divided evenly over {hosts} hosts: give --nproc, the \
                     number of ranks of this host"
                );
            }
            Ok(ranks / hosts)
        }
    }
}

/// Compute threads of each rank of this host: those of its own cores, or a share of cores that all have.
pub fn threads_per_rank(helpers: &LocalLeader) -> usize {
    let own = pinning::allowed();
    let all: Vec<&LocalHello> = helpers.hellos().collect();
    let shared = all.iter().all(|hello| hello.cores == own);
    let cores = machine::cores();
    if shared { (cores / (all.len() + 1)).max(1) } else { cores.max(1) }
}
