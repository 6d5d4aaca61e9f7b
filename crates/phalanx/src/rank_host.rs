//! The host of a rank: this process for a single rank, or one of its threads or a process for a rank of a job.
//!
//! The engine sees a device and the groups of the mesh. Both come from here, with the memory that the plan asks for, made
//! resident before the first step.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use phalanx_collectives::{Endpoint, Options};
use phalanx_plan::MemoryPlan;
use phalanx_tensor::{Arena, Device, Region};
use phalanx_train::older::asynchronous::Links;
use phalanx_train::{Groups, RunConfig, Source, Spec};

use crate::environment::{DeviceFactory, Processor};
use crate::{output, system_files};

/// The host of one rank.
pub enum RankHost {
    /// The rank is the only one, and runs in this process.
    Alone,
    /// The rank is one of several on this machine.
    Job(Endpoint),
}

/// The device of one rank, with its memory.
pub struct RankDevice {
    /// The processor under the device, to measure its speed.
    pub processor: Processor,
    /// The device, over an arena that replays the plan.
    pub device: Device,
    /// Bytes of the arena as it is mapped.
    pub arena_bytes: u64,
}

impl RankHost {
    /// A rank of a job, with the options of the configuration.
    pub fn in_job(endpoint: Endpoint, config: &RunConfig) -> RankHost {
        let (overlap, deadline) = (config.parallel.overlap, timeout(config));
        let notice = Arc::new(|line: &str| output::note(line));
        let options = Options { overlap, deadline, notice, ..Options::default() };
        RankHost::Job(endpoint.with_options(options))
    }

    /// This rank's number.
    pub fn rank(&self) -> usize {
        match self {
            RankHost::Alone => 0,
            RankHost::Job(endpoint) => endpoint.rank(),
        }
    }

    /// Starts the threads that compute, maps the memory that the plan asks for and makes every page of it resident.
    ///
    /// # Errors
    /// When the system does not have that much memory, or starts fewer threads.
    pub fn make_device(&self, memory: &MemoryPlan, factory: &DeviceFactory) -> Result<RankDevice> {
        let processor = factory.start().with_context(|| format!("rank {}", self.rank()))?;
        let bytes = memory.arena_bytes as usize;
        let region = match self {
            RankHost::Alone => Region::anonymous(bytes),
            RankHost::Job(endpoint) => endpoint.arena(bytes),
        };
        let resident = |region: Region| processor.populate(&region).map(|()| region);
        let region = region.and_then(resident).with_context(|| {
            format!(
                "rank {} cannot have its {bytes} bytes of memory; see `phalanx plan` for what needs less, and `ulimit -v` \
                 and `ulimit -d` for limits",
                self.rank()
            )
        })?;
        let arena_bytes = region.bytes() as u64;
        let device = processor.device(Arena::replaying(memory.clone(), region));
        Ok(RankDevice { processor, device, arena_bytes })
    }

    /// Joins the groups of this rank's coordinates in the mesh.
    pub fn groups(&self, spec: &Spec) -> Groups {
        match self {
            RankHost::Alone => Groups::alone(spec),
            RankHost::Job(endpoint) => Groups::new(&Source::Host(endpoint), spec),
        }
    }

    /// Joins the channels between workers and servers of asynchronous updates.
    pub fn links(&self, spec: &Spec) -> Links<'_> {
        match self {
            RankHost::Alone => Links::new(&Source::Alone, spec.world()),
            RankHost::Job(endpoint) => Links::new(&Source::Host(endpoint), spec.world()),
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
    Duration::from_secs(config.parallel.timeout_s.max(1))
}

/// Bytes of other ranks' arenas that are resident here because they were read: shared memory beyond this
/// rank's own arena of `own_bytes`. Threads share none.
pub fn foreign_bytes(own_bytes: u64) -> u64 {
    system_files::kib_field("/proc/self/status", "RssShmem:").unwrap_or(0).saturating_sub(own_bytes)
}
