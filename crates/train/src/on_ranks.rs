//! The engines of a plan's ranks: all of them as threads of this process, or one in a process of its own.

use std::panic::resume_unwind;

use phalanx_collectives::{Endpoint, Isa, threads};
use phalanx_tensor::{Device, DeviceFactory, DeviceRequest, Region};

use crate::groups::{GroupSource, Groups};
use crate::planning::RunPlan;
use crate::rank::Rank;

/// Makes the engine of every rank, over memory that replays its plan, on the devices of `factory`; runs `body` on each,
/// and returns their results in the order of the ranks. A rank that panics ends the others' collectives and this call.
///
/// # Errors
/// When the system does not have the memory that the plan needs, or cannot start a thread.
///
/// # Panics
/// When a rank panics, with the message of the first rank that did.
pub fn on_threads<T: Send>(
    factory: &dyn DeviceFactory,
    plan: &RunPlan,
    body: impl Fn(&mut Rank) -> T + Sync,
) -> std::io::Result<Vec<T>> {
    let endpoints: Vec<Option<Endpoint>> = match plan.spec.world_size() {
        1 => vec![None],
        world => threads(world).into_iter().map(Some).collect(),
    };
    let device = |rank: usize| {
        let own = plan.of(rank);
        factory.make(&DeviceRequest {
            index: rank,
            threads: plan.spec.threads,
            device_plan: &own.memory,
            host_plan: &own.host,
            disk_plan: &own.disk,
            disk_folder: plan.spec.disk_folder.as_deref(),
            map_shared: &Region::anonymous,
        })
    };
    let devices = (0..endpoints.len()).map(device).collect::<std::io::Result<Vec<_>>>()?;
    let one = |number: usize, endpoint: Option<Endpoint>, device: Device| {
        let source = endpoint.as_ref().map_or(GroupSource::Alone(Isa::detect()), GroupSource::Host);
        body(&mut engine(plan, number, &source, device))
    };
    Ok(std::thread::scope(|scope| {
        let one = &one;
        let ranks = endpoints.into_iter().zip(devices).enumerate();
        let spawned: Vec<_> = ranks
            .map(|(number, (endpoint, device))| scope.spawn(move || one(number, endpoint, device)))
            .collect();
        spawned.into_iter().map(|rank| rank.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
    }))
}

/// Makes the engine of the rank that `endpoint` belongs to, over memory that the other ranks can read, on a device of
/// `factory`, and runs `body` on it: for a rank that is a process of its own.
///
/// # Errors
/// The system's, when it does not have the memory that the plan asks for, or starts no more threads.
///
/// # Panics
/// When the job has another number of ranks than the plan.
pub fn on_endpoint<T>(
    factory: &dyn DeviceFactory,
    plan: &RunPlan,
    endpoint: &Endpoint,
    body: impl FnOnce(&mut Rank) -> T,
) -> std::io::Result<T> {
    let (ranks, planned) = (endpoint.world_size(), plan.spec.world_size());
    assert_eq!(ranks, planned, "a job of {ranks} ranks, and a plan of {planned}");
    let (number, own) = (endpoint.rank(), plan.of(endpoint.rank()));
    let device = factory.make(&DeviceRequest {
        index: number,
        threads: plan.spec.threads,
        device_plan: &own.memory,
        host_plan: &own.host,
        disk_plan: &own.disk,
        disk_folder: plan.spec.disk_folder.as_deref(),
        map_shared: &|bytes| endpoint.arena(bytes),
    })?;
    let source = if ranks > 1 { GroupSource::Host(endpoint) } else { GroupSource::Alone(Isa::detect()) };
    Ok(body(&mut engine(plan, number, &source, device)))
}

fn engine(plan: &RunPlan, number: usize, source: &GroupSource, device: Device) -> Rank {
    let groups = Groups::new(source, &plan.spec);
    Rank::new(device, groups, &plan.spec, &plan.of(number).orders)
}
