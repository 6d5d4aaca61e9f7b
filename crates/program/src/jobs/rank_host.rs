//! The host of a rank: this process for a single rank, or one of its threads or a process for a rank of a job.
//!
//! The engine sees a device and the groups of the mesh. Both come from here, with the memory of the plan, made resident
//! before the first step.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use phalanx_bench::baselines::asynchronous::Links;
use phalanx_collectives::{Endpoint, Isa, Options};
use phalanx_plan::MemoryPlan;
use phalanx_tensor::{Device, DeviceFactory, DeviceRequest, ProductMethod, Region};
use phalanx_train::spec::DevicePart;
use phalanx_train::{GroupSource, Groups, RankPlan, RunConfig, Spec, device_request};

use crate::host::output;

/// The host of one rank.
pub enum RankHost {
    /// The only rank, which runs in this process.
    Alone,
    /// The rank is one of several on this machine.
    Job(Endpoint),
}

/// The device of one rank, with its memory.
pub struct RankDevice {
    /// The device, over arenas that replay the plan.
    pub device: Device,
    /// Bytes that this process has mapped for its own arena, which it may share with others.
    pub shared_bytes: u64,
}

impl RankHost {
    /// A rank of a job, with the options of the configuration; its collectives sum with `isa`.
    pub fn in_job(endpoint: Endpoint, config: &RunConfig, isa: Isa) -> RankHost {
        let (overlap, deadline) = (config.parallel.overlap, timeout(config));
        let notice = Arc::new(|line: &str| output::note(line));
        let options = Options { overlap, isa, deadline, notice, ..Options::default() };
        RankHost::Job(endpoint.with_options(options))
    }

    /// A rank that is a thread of this process, as [`RankHost::in_job`]. No launcher sees whether it computes, so other ranks
    /// wait for it as long as the library's do.
    pub fn on_thread(endpoint: Endpoint, config: &RunConfig, isa: Isa) -> RankHost {
        let options = Options { overlap: config.parallel.overlap, isa, ..Options::default() };
        RankHost::Job(endpoint.with_options(options))
    }

    /// This rank's number.
    pub fn rank(&self) -> usize {
        match self {
            RankHost::Alone => 0,
            RankHost::Job(endpoint) => endpoint.rank(),
        }
    }

    /// Creates the device of this rank: starts its threads and maps the memory of its plan.
    ///
    /// # Errors
    /// When the system does not have that much memory, or starts fewer threads.
    pub fn make_device(
        &self,
        plan: &RankPlan,
        device: &DevicePart,
        factory: &dyn DeviceFactory,
    ) -> Result<RankDevice> {
        let map_shared = |bytes| self.map_shared(bytes);
        self.make_requested_device(&device_request(device, self.rank(), plan, &map_shared), factory)
    }

    /// As [`RankHost::make_device`], with so many threads and no disk memory, from the plans of the memories in the order of
    /// `Memory::ALL`. Products are by multiply-adds.
    ///
    /// # Errors
    /// As for [`RankHost::make_device`].
    pub fn make_planned_device(
        &self,
        threads: usize,
        [device_plan, host_plan, disk_plan]: [&MemoryPlan; 3],
        factory: &dyn DeviceFactory,
    ) -> Result<RankDevice> {
        let request = DeviceRequest {
            index: self.rank(),
            threads,
            products: Some(ProductMethod::Fma),
            device_plan,
            host_plan,
            disk_plan,
            disk: None,
            pin_host: None,
            map_shared: &|bytes| self.map_shared(bytes),
        };
        self.make_requested_device(&request, factory)
    }

    /// Maps memory that the other ranks of the job can read.
    fn map_shared(&self, bytes: usize) -> std::io::Result<Region> {
        match self {
            RankHost::Alone => Region::anonymous(bytes),
            RankHost::Job(endpoint) => endpoint.arena(bytes),
        }
    }

    fn make_requested_device(
        &self,
        request: &DeviceRequest,
        factory: &dyn DeviceFactory,
    ) -> Result<RankDevice> {
        let rank = request.index;
        let made = factory.make(request);
        let out_of_memory = made.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::OutOfMemory);
        let device = made.with_context(|| match out_of_memory {
            true => format!(
                "rank {rank} cannot have its {} bytes of memory; see `phalanx plan` for what needs less, and `ulimit -v` \
                 and `ulimit -d` for limits",
                request.device_plan.arena_bytes + request.host_plan.arena_bytes
            ),
            false => format!("rank {rank}"),
        })?;
        let mapped = |arena: &phalanx_tensor::Arena| arena.region().map_or(0, Region::bytes) as u64;
        let host_bytes = if device.is_host_addressable() { 0 } else { mapped(device.host_arena()) };
        let shared_bytes = mapped(device.arena()) + host_bytes;
        Ok(RankDevice { device, shared_bytes })
    }

    /// Joins the groups of this rank's coordinates in the mesh. A rank alone sums with the instruction set `isa`.
    pub fn groups(&self, spec: &Spec, isa: Isa) -> Groups {
        match self {
            RankHost::Alone => Groups::new(&GroupSource::Alone(isa), spec),
            RankHost::Job(endpoint) => Groups::new(&GroupSource::Host(endpoint), spec),
        }
    }

    /// Joins the channels between workers and servers of asynchronous updates. A rank alone sums with `isa`.
    pub fn links(&self, spec: &Spec, isa: Isa) -> Links<'_> {
        match self {
            RankHost::Alone => Links::new(&GroupSource::Alone(isa), spec),
            RankHost::Job(endpoint) => Links::new(&GroupSource::Host(endpoint), spec),
        }
    }

    /// Records the step that begins, for error messages of ranks that wait for this one.
    pub fn note_step(&self, step: u64) {
        if let RankHost::Job(endpoint) = self {
            endpoint.note(step);
        }
    }
}

/// Time that a rank waits for another before it gives up.
pub fn timeout(config: &RunConfig) -> Duration {
    Duration::from_secs(config.run.stall_timeout_s.max(1))
}

/// Bytes of other ranks' arenas that are resident here because they were read: shared memory beyond this
/// rank's own arena of `own_bytes`. Threads share none.
pub fn foreign_bytes(own_bytes: u64) -> u64 {
    phalanx_system::host::kib_field("/proc/self/status", "RssShmem:").unwrap_or(0).saturating_sub(own_bytes)
}
