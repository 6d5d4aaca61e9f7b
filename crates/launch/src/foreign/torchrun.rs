//! torchrun's variables: RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Kubernetes'
//! PyTorchJob sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT only, with one process per pod: then the local rank is 0 of 1.

use super::variables::{EnvironmentError, Variables};
use super::{ForeignLauncher, ForeignRank};

/// Set by torchrun when its own agent listens at MASTER_PORT; the launchers take the port above then.
const AGENT_STORE: &str = "TORCHELASTIC_USE_AGENT_STORE";

pub(crate) fn read(variables: &Variables<'_>) -> Result<Option<ForeignRank>, EnvironmentError> {
    // WORLD_SIZE alone is set by other programs, too.
    if !variables.is_set("RANK") {
        return Ok(None);
    }
    let rank = variables.number("RANK", "RANK")?;
    let world_size = variables.number("WORLD_SIZE", "RANK")?;
    let local_world_size = variables.number_if_set("LOCAL_WORLD_SIZE")?;
    let local_rank = variables.number_if_set("LOCAL_RANK")?;
    let is_local_assumed = local_world_size.is_none();
    let (local_rank, local_world_size) = match (local_rank, local_world_size) {
        (Some(local_rank), Some(local_world_size)) => (local_rank, local_world_size),
        (None, None) => (0, 1),
        (Some(local_rank), None) if local_rank == rank => (rank, world_size),
        (Some(_), None) => {
            (variables.number("LOCAL_RANK", "RANK")?, variables.number("LOCAL_WORLD_SIZE", "LOCAL_RANK")?)
        }
        (None, Some(_)) => (variables.number("LOCAL_RANK", "LOCAL_WORLD_SIZE")?, 1),
    };
    let mut rendezvous = variables.master()?;
    let agent = variables.text(AGENT_STORE).is_some_and(|value| value.eq_ignore_ascii_case("true"));
    if let Some((_, port)) = &mut rendezvous
        && agent
    {
        *port = port.checked_add(1).ok_or_else(|| {
            EnvironmentError("MASTER_PORT=65535: torchrun listens there, and no port above it is left".into())
        })?;
    }
    let id = variables.text("TORCHELASTIC_RUN_ID").unwrap_or_default();
    let master = rendezvous.as_ref().map_or("local".to_string(), |(host, port)| format!("{host}-{port}"));
    let job = format!("torchrun-{id}-{master}");
    let group = variables.number_if_set("GROUP_RANK")?;
    let hosts = group.zip(variables.number_if_set("GROUP_WORLD_SIZE")?);
    let launcher = ForeignLauncher::Torchrun;
    Ok(Some(ForeignRank {
        launcher,
        number: rank,
        rank,
        world_size,
        local_rank,
        local_world_size,
        is_local_assumed,
        hosts,
        job,
        rendezvous,
        said: String::new(),
    }))
}
