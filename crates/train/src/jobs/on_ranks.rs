//! The engines of a plan's ranks: all of them as threads of this process, or one in a process of its own.

use std::borrow::Cow;
use std::io::{Error, ErrorKind};
use std::panic::resume_unwind;
use std::sync::Arc;

use phalanx_collectives::{Endpoint, Isa, Options, threads};
use phalanx_tensor::{Device, DeviceFactory, DeviceRequest, Region, refused_thread};

use crate::engine::groups::{GroupSource, Groups};
use crate::engine::rank::Rank;
use crate::engine::spec::DevicePart;
use crate::planner::planning::{RankPlan, RunPlan};

/// Makes the engine of every rank, over memory that replays its plan, on the devices of `factory`; runs `body` on each,
/// and returns their results in the order of the ranks. A rank that panics ends the others' collectives and this call.
///
/// # Errors
/// Devices for which the run was not planned ([`Spec::for_devices`](crate::Spec::for_devices)); when the system does not have
/// the memory that the plan needs, or cannot start a thread; devices that cannot be connected.
///
/// # Panics
/// When a rank panics, with the message of the first rank that did.
pub fn on_threads<T: Send>(
    factory: &dyn DeviceFactory,
    plan: &RunPlan,
    body: impl Fn(&mut Rank) -> T + Sync,
) -> std::io::Result<Vec<T>> {
    on_noticing_threads(factory, plan, &Options::default().notice, body)
}

/// As [`on_threads`]; `notice` is called with a line when a rank is missing for long.
///
/// # Errors
/// As for [`on_threads`].
pub(crate) fn on_noticing_threads<T: Send>(
    factory: &dyn DeviceFactory,
    plan: &RunPlan,
    notice: &Arc<dyn Fn(&str) + Send + Sync>,
    body: impl Fn(&mut Rank) -> T + Sync,
) -> std::io::Result<Vec<T>> {
    let options = || Options { notice: Arc::clone(notice), ..Options::default() };
    let endpoints: Vec<Option<Endpoint>> = match plan.spec.world_size() {
        1 => vec![None],
        world => threads(world).into_iter().map(|rank| Some(rank.with_options(options()))).collect(),
    };
    let prepare = |rank: usize| {
        let own = exact_plan(plan, rank)?;
        factory.make(&device_request(&plan.spec.device, rank, &own, &Region::anonymous))
    };
    check_addressing(factory, plan)?;
    let prepared = (0..endpoints.len()).map(prepare).collect::<std::io::Result<Vec<_>>>()?;
    let one = |endpoint: Option<Endpoint>, device: Device| {
        let source = endpoint.as_ref().map_or(GroupSource::Alone(Isa::detect()), GroupSource::Host);
        Ok(body(&mut engine(plan, &source, device)?))
    };
    std::thread::scope(|scope| {
        let one = &one;
        let start = |(endpoint, prepared)| {
            let rank = std::thread::Builder::new().spawn_scoped(scope, move || one(endpoint, prepared));
            rank.map_err(|error| refused_thread("the thread of a rank", &error))
        };
        let ranks = endpoints.into_iter().zip(prepared);
        let started = ranks.map(start).collect::<std::io::Result<Vec<_>>>()?;
        started.into_iter().map(|rank| rank.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
    })
}

/// Makes the engine of the rank that `endpoint` belongs to, over memory that the other ranks can read, on a device of
/// `factory`, and runs `body` on it: for a rank that is a process of its own.
///
/// # Errors
/// Devices for which the run was not planned; the system's, when it does not have the memory that the plan asks for, or starts
/// no more threads; devices that cannot be connected.
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
    check_addressing(factory, plan)?;
    let own = exact_plan(plan, endpoint.rank())?;
    let map_shared = |bytes| endpoint.arena(bytes);
    let device = factory.make(&device_request(&plan.spec.device, endpoint.rank(), &own, &map_shared))?;
    let source = if ranks > 1 { GroupSource::Host(endpoint) } else { GroupSource::Alone(Isa::detect()) };
    Ok(body(&mut engine(plan, &source, device)?))
}

/// The plan of a rank itself, also where another rank was planned in its place.
fn exact_plan(plan: &RunPlan, rank: usize) -> std::io::Result<Cow<'_, RankPlan>> {
    plan.exact(rank).map_err(Error::other)
}

/// The device that rank `index` needs. `map_shared` maps memory that the transport of its
/// collectives can read.
pub fn device_request<'a>(
    device: &'a DevicePart,
    index: usize,
    own: &'a RankPlan,
    map_shared: &'a dyn Fn(usize) -> std::io::Result<Region>,
) -> DeviceRequest<'a> {
    DeviceRequest {
        index,
        threads: device.threads,
        products: device.products,
        device_plan: &own.memory,
        host_plan: &own.host,
        disk_plan: &own.disk,
        disk: device.disk.as_ref(),
        pin_host: device.pin_host,
        map_shared,
    }
}

/// Refuses devices for which the run was not planned.
fn check_addressing(factory: &dyn DeviceFactory, plan: &RunPlan) -> std::io::Result<()> {
    if factory.is_host_addressable() == plan.spec.device.host_addressable {
        return Ok(());
    }
    let word = |addressable| if addressable { "can" } else { "cannot" };
    let text = format!(
        "the host {} read the memory of these devices, but the run was planned for devices whose memory it {} read: call \
         `Spec::for_devices` with the factory before planning",
        word(factory.is_host_addressable()),
        word(plan.spec.device.host_addressable)
    );
    Err(Error::new(ErrorKind::InvalidInput, text))
}

fn engine(plan: &RunPlan, source: &GroupSource, device: Device) -> std::io::Result<Rank> {
    let groups = Groups::new(source, &plan.spec);
    Rank::new(device, groups, &plan.spec).map_err(Error::other)
}
