//! Transport between hosts: TCP, or the MPI whose mpirun has started the ranks.

use anyhow::{Context, Result, bail};
use phalanx_collectives::Wire;
use phalanx_launch::ForeignLauncher;
use phalanx_mpi::MpiError;

use crate::arguments::network_args::TransportChoice;
use crate::host::environment::RankDiscovery;

/// The choice, and what there is to say about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transport {
    /// The chosen transport.
    pub wire: Wire,
    /// The same in words.
    pub describe: String,
}

/// Refuses a choice that cannot be honoured where phalanx itself starts the ranks.
///
/// # Errors
/// MPI.
pub fn without_launcher(choice: TransportChoice) -> Result<()> {
    if choice == TransportChoice::Mpi {
        let library = phalanx_mpi::library().context("--transport mpi")?;
        bail!(
            "--transport mpi: mpirun (mpirun -n N phalanx train CONFIG) or srun starts the ranks of {library}; leave out \
             --transport"
        );
    }
    Ok(())
}

/// Chooses for the hosts of a job that `launcher` has started. `pmi` says whether it gives ranks what MPI needs to find each
/// other. `restarts` is whether ranks may be started again.
///
/// # Errors
/// MPI where it is not possible.
pub fn choose(
    choice: TransportChoice,
    launcher: ForeignLauncher,
    pmi: RankDiscovery,
    restarts: bool,
) -> Result<Transport> {
    choose_with(phalanx_mpi::library(), choice, launcher, pmi, restarts)
}

fn choose_with(
    library: Result<String, MpiError>,
    choice: TransportChoice,
    launcher: ForeignLauncher,
    pmi: RankDiscovery,
    restarts: bool,
) -> Result<Transport> {
    let is_built = library.is_ok();
    let over = |wire: Wire, describe: String| Ok(Transport { wire, describe });
    let possible = library.map_err(|error| error.to_string()).and_then(|library| {
        let name = launcher.name();
        if restarts {
            return Err("MPI cannot start ranks again (--max-restarts)".to_string());
        }
        let needed = if library.starts_with("Open MPI") { RankDiscovery::Pmix } else { RankDiscovery::Pmi };
        match pmi == needed {
            true => Ok(library),
            false => {
                let advice = match (launcher, needed) {
                    (ForeignLauncher::Slurm, RankDiscovery::Pmix) => "; srun --mpi=pmix makes it possible",
                    (ForeignLauncher::Slurm, _) => "; srun --mpi=pmi2 makes it possible",
                    _ => "",
                };
                Err(format!(
                    "this build has {library}, which cannot find the other ranks when {name} starts it{advice}"
                ))
            }
        }
    });
    match (choice, possible) {
        (TransportChoice::Tcp, _) => over(Wire::Tcp, "TCP".to_string()),
        (_, Ok(library)) => over(
            Wire::Mpi,
            format!("{library}, whose traffic phalanx does not encrypt (--transport tcp does)"),
        ),
        // A build without MPI, under a launcher that offers none: there is nothing to explain.
        (TransportChoice::Auto, Err(_)) if !is_built && pmi == RankDiscovery::None => {
            over(Wire::Tcp, "TCP".to_string())
        }
        (TransportChoice::Auto, Err(why)) => over(Wire::Tcp, format!("TCP, because {why}")),
        (TransportChoice::Mpi, Err(why)) => bail!("--transport mpi: {why}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(
        library: Option<&str>,
        choice: TransportChoice,
        pmi: RankDiscovery,
        restarts: bool,
    ) -> Result<Transport> {
        let library = library.map(str::to_string).ok_or(MpiError::NotBuilt);
        choose_with(library, choice, ForeignLauncher::OpenMpi, pmi, restarts)
    }

    #[test]
    fn mpi_is_taken_where_its_own_launcher_has_started_the_ranks() {
        let (open, mpich) = (Some("Open MPI v4.1.4"), Some("MPICH 4.0.2"));
        for (library, pmi, wire) in [
            (open, RankDiscovery::Pmix, Wire::Mpi),
            (mpich, RankDiscovery::Pmi, Wire::Mpi),
            (open, RankDiscovery::Pmi, Wire::Tcp),
            (mpich, RankDiscovery::Pmix, Wire::Tcp),
            (open, RankDiscovery::None, Wire::Tcp),
            (None, RankDiscovery::Pmix, Wire::Tcp),
        ] {
            let auto = chosen(library, TransportChoice::Auto, pmi, false).unwrap();
            assert_eq!(auto.wire, wire, "{library:?} {pmi:?}: {}", auto.describe);
            assert_eq!(chosen(library, TransportChoice::Tcp, pmi, false).unwrap().wire, Wire::Tcp);
            let mpi = chosen(library, TransportChoice::Mpi, pmi, false);
            assert_eq!(mpi.map(|mpi| mpi.wire).ok(), (wire == Wire::Mpi).then_some(Wire::Mpi));
        }
    }

    #[test]
    fn what_is_not_possible_is_said() {
        let missing = chosen(None, TransportChoice::Mpi, RankDiscovery::Pmix, false).unwrap_err().to_string();
        assert!(missing.contains("--transport mpi: ") && missing.contains("--features mpi"), "{missing}");
        let auto = chosen(None, TransportChoice::Auto, RankDiscovery::Pmix, false).unwrap().describe;
        assert!(auto.starts_with("TCP, because") && auto.contains("--features mpi"), "{auto}");
        assert_eq!(chosen(None, TransportChoice::Auto, RankDiscovery::None, false).unwrap().describe, "TCP");
        let open = Some("Open MPI v4.1.4");
        let restarts = chosen(open, TransportChoice::Mpi, RankDiscovery::Pmix, true).unwrap_err().to_string();
        assert!(restarts.contains("--max-restarts"), "{restarts}");
        assert_eq!(chosen(open, TransportChoice::Auto, RankDiscovery::Pmix, true).unwrap().wire, Wire::Tcp);
        let taken = chosen(open, TransportChoice::Auto, RankDiscovery::Pmix, false).unwrap().describe;
        assert!(taken.contains("Open MPI v4.1.4") && taken.contains("not encrypt"), "{taken}");
    }
}
