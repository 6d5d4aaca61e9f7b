//! All ranks of a plan as threads of this process: for examples, tests and small experiments.

use std::panic::resume_unwind;
use std::sync::Arc;

use phalanx_collectives::{Endpoint, threads};
use phalanx_cpu::Cpu;
use phalanx_cpu::Options;
use phalanx_tensor::{Arena, Device, Region};

use crate::groups::{GroupSource, Groups};
use crate::planning::RunPlan;
use crate::rank::Rank;

/// Makes the engine of every rank, over memory that replays its plan, runs `body` on each, and gives back what they
/// return, by rank. A rank that panics ends the others' collectives and this call.
///
/// # Errors
/// The system's, when it has not the memory that the plan asks for, or starts no more threads.
///
/// # Panics
/// When a rank does, with the text of the first rank that did.
pub fn on_threads<T: Send>(plan: &RunPlan, body: impl Fn(&mut Rank) -> T + Sync) -> std::io::Result<Vec<T>> {
    let endpoints: Vec<Option<Endpoint>> = match plan.spec.world_size() {
        1 => vec![None],
        world => threads(world).into_iter().map(Some).collect(),
    };
    let region = |rank: usize| Region::anonymous(plan.of(rank).memory.arena_bytes as usize);
    let regions = (0..endpoints.len()).map(region).collect::<std::io::Result<Vec<_>>>()?;
    let options = Options::new(plan.spec.threads);
    let cpus =
        (0..endpoints.len()).map(|_| Cpu::with_options(options)).collect::<std::io::Result<Vec<_>>>()?;
    let one = |number: usize, endpoint: Option<Endpoint>, region: Region, cpu: Arc<Cpu>| {
        let own = plan.of(number);
        let device = Device::new(cpu, Arena::replaying(own.memory.clone(), region));
        let source = endpoint.as_ref().map_or(GroupSource::Alone(options.isa), GroupSource::Host);
        let mut rank = Rank::new(device, Groups::new(&source, &plan.spec), &plan.spec, &own.orders);
        body(&mut rank)
    };
    Ok(std::thread::scope(|scope| {
        let one = &one;
        let ranks = endpoints.into_iter().zip(regions).zip(cpus).enumerate();
        let spawned: Vec<_> = ranks
            .map(|(number, ((endpoint, region), cpu))| {
                scope.spawn(move || one(number, endpoint, region, cpu))
            })
            .collect();
        spawned.into_iter().map(|rank| rank.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
    }))
}
