//! All ranks of a plan as threads of this process: for examples, tests and small experiments.

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
            disk_folder: None,
            map_shared: &Region::anonymous,
        })
    };
    let devices = (0..endpoints.len()).map(device).collect::<std::io::Result<Vec<_>>>()?;
    let one = |number: usize, endpoint: Option<Endpoint>, device: Device| {
        let source = endpoint.as_ref().map_or(GroupSource::Alone(Isa::detect()), GroupSource::Host);
        let groups = Groups::new(&source, &plan.spec);
        let mut rank = Rank::new(device, groups, &plan.spec, &plan.of(number).orders);
        body(&mut rank)
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
