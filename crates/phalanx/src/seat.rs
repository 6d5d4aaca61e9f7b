//! Where a rank sits: alone in this process, as one of its threads, or as a process of a job.
//!
//! The engine sees a device and the groups of the mesh. This is where they come from, with the memory that
//! the plan asks for, made resident before the first step.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use phalanx_baselines::asynchronous::Links;
use phalanx_collectives::{Endpoint, Options};
use phalanx_cpu::Cpu;
use phalanx_cpu::Options as Computing;
use phalanx_plan::MemoryPlan;
use phalanx_simd::Isa;
use phalanx_tensor::{Arena, Device, Region};
use phalanx_train::{GroupSource, Groups, RunConfig, Spec};

use crate::{machine, output};

/// One rank's seat.
pub enum Seat {
    /// The one rank of a world of one.
    Alone,
    /// A rank that shares this machine with others.
    Among(Endpoint),
}

/// What the engine of a rank runs on.
pub struct Place {
    /// The processor, to measure it.
    pub cpu: Arc<Cpu>,
    /// Its device, over an arena that replays the plan.
    pub device: Device,
    /// Bytes of the arena as it is mapped.
    pub arena_bytes: u64,
}

impl Seat {
    /// A seat among others, with the patience of the configuration, whose collectives use the instruction set `isa`.
    pub fn among(endpoint: Endpoint, config: &RunConfig, isa: Isa) -> Seat {
        let (overlap, deadline) = (config.parallel.overlap, patience(config));
        let notice = Arc::new(|line: &str| output::note(line));
        let options = Options { overlap, isa, deadline, notice, ..Options::default() };
        Seat::Among(endpoint.with_options(options))
    }

    /// This rank's number.
    pub fn rank(&self) -> usize {
        match self {
            Seat::Alone => 0,
            Seat::Among(endpoint) => endpoint.rank(),
        }
    }

    /// Starts the threads that compute, maps the memory that the plan asks for and makes every page of it
    /// resident.
    ///
    /// # Errors
    /// When the system has not that much memory, or starts fewer threads.
    pub fn take(&self, memory: &MemoryPlan, computing: Computing) -> Result<Place> {
        let cpu = Cpu::with_options(computing).with_context(|| format!("rank {}", self.rank()))?;
        let bytes = memory.arena_bytes as usize;
        let region = match self {
            Seat::Alone => Region::anonymous(bytes),
            Seat::Among(endpoint) => endpoint.arena(bytes),
        };
        let resident = |region: Region| cpu.populate(&region).map(|()| region);
        let region = region.and_then(resident).with_context(|| {
            format!(
                "rank {} cannot have its {bytes} bytes of memory; see `phalanx plan` for what needs less, and `ulimit -v` \
                 and `ulimit -d` for limits",
                self.rank()
            )
        })?;
        let arena_bytes = region.bytes() as u64;
        let device = Device::new(Arc::clone(&cpu) as _, Arena::replaying(memory.clone(), region));
        Ok(Place { cpu, device, arena_bytes })
    }

    /// Joins the groups of this rank's place in the mesh. A rank alone sums with the instruction set `isa`.
    pub fn groups(&self, spec: &Spec, isa: Isa) -> Groups {
        match self {
            Seat::Alone => Groups::new(&GroupSource::Alone(isa), spec),
            Seat::Among(endpoint) => Groups::new(&GroupSource::Host(endpoint), spec),
        }
    }

    /// Joins the channels between workers and servers of asynchronous updates. A rank alone sums with `isa`.
    pub fn links(&self, spec: &Spec, isa: Isa) -> Links<'_> {
        match self {
            Seat::Alone => Links::new(&GroupSource::Alone(isa), spec.world_size()),
            Seat::Among(endpoint) => Links::new(&GroupSource::Host(endpoint), spec.world_size()),
        }
    }

    /// Notes the step that begins, for whoever asks when this rank is missing.
    pub fn note_step(&self, step: u64) {
        if let Seat::Among(endpoint) = self {
            endpoint.note(step);
        }
    }
}

/// How long a rank waits for another before it gives up.
pub fn patience(config: &RunConfig) -> Duration {
    Duration::from_secs(config.parallel.timeout_s.max(1))
}

/// Bytes of other ranks' arenas that are resident here because they were read: shared memory beyond this
/// rank's own arena of `own_bytes`. Threads share none.
pub fn foreign_bytes(own_bytes: u64) -> u64 {
    machine::field("/proc/self/status", "RssShmem:").unwrap_or(0).saturating_sub(own_bytes)
}
