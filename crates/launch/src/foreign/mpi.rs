//! The variables of `mpirun`: Open MPI's OMPI_COMM_WORLD_*, and MPICH's (Hydra) and Intel MPI's PMI_* and MPI_LOCAL*. They do
//! not say where rank 0 is; several hosts need MASTER_ADDR and MASTER_PORT, or PHALANX_RENDEZVOUS, besides.

use super::variables::{EnvironmentError, Variables};
use super::{ForeignLauncher, ForeignRank};

pub(crate) fn open_mpi(variables: &Variables<'_>) -> Result<Option<ForeignRank>, EnvironmentError> {
    const RANK: &str = "OMPI_COMM_WORLD_RANK";
    if !variables.is_set(RANK) {
        return Ok(None);
    }
    let id = variables.text("OMPI_MCA_ess_base_jobid").or_else(|| variables.text("PMIX_NAMESPACE"));
    Ok(Some(ForeignRank {
        launcher: ForeignLauncher::OpenMpi,
        number: variables.number(RANK, RANK)?,
        rank: variables.number(RANK, RANK)?,
        world_size: variables.number("OMPI_COMM_WORLD_SIZE", RANK)?,
        local_rank: variables.number("OMPI_COMM_WORLD_LOCAL_RANK", RANK)?,
        local_world_size: variables.number("OMPI_COMM_WORLD_LOCAL_SIZE", RANK)?,
        is_local_assumed: false,
        hosts: None,
        job: format!("openmpi-{}", id.unwrap_or_else(|| "local".to_string())),
        rendezvous: variables.master()?,
        said: String::new(),
    }))
}

pub(crate) fn hydra(variables: &Variables<'_>) -> Result<Option<ForeignRank>, EnvironmentError> {
    const RANK: &str = "PMI_RANK";
    if !variables.is_set(RANK) {
        return Ok(None);
    }
    Ok(Some(ForeignRank {
        launcher: ForeignLauncher::Hydra,
        number: variables.number(RANK, RANK)?,
        rank: variables.number(RANK, RANK)?,
        world_size: variables.number("PMI_SIZE", RANK)?,
        local_rank: variables.number("MPI_LOCALRANKID", RANK)?,
        local_world_size: variables.number("MPI_LOCALNRANKS", RANK)?,
        is_local_assumed: false,
        hosts: None,
        job: format!("hydra-{}", variables.text("PMI_JOBID").unwrap_or_else(|| "local".to_string())),
        rendezvous: variables.master()?,
        said: String::new(),
    }))
}
