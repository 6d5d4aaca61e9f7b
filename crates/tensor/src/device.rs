//! A device: memory, kernels, and the record of what was asked of them.
//!
//! Callers (layers, optimizers) see only this type; what it computes is in [`operations`](crate::operations).

use std::sync::Arc;

use std::time::Instant;

use phalanx_trace::{Category, DType, Event, Site, Stream, Trace};

use crate::arena::Arena;
use crate::buffer::Tensor;
use crate::kernels::Kernels;
use crate::meta::Meta;
use crate::profile::{KernelKey, Profile};
use crate::record::Recorder;
use crate::shape::Shape;

/// Elements of one block of a norm; parameters start at multiples of it in every layout.
pub const NORM_BLOCK: usize = phalanx_plan::BLOCK as usize;

/// Handle of a device; cheap to clone.
#[derive(Clone)]
pub struct Device {
    pub(crate) kernels: Arc<dyn Kernels>,
    arena: Arc<Arena>,
    recorder: Option<Arc<Recorder>>,
    profile: Option<Arc<Profile>>,
}

impl Device {
    /// A device that computes with `kernels` in the memory of `arena`.
    pub fn new(kernels: Arc<dyn Kernels>, arena: Arc<Arena>) -> Device {
        Device { kernels, arena, recorder: None, profile: None }
    }

    /// A device that only records, standing in for one of `threads` threads.
    pub fn meta(threads: usize) -> Device {
        let recorder = Arc::new(Recorder::default());
        let arena = Arena::recording(Arc::clone(&recorder));
        Device { kernels: Arc::new(Meta { threads }), arena, recorder: Some(recorder), profile: None }
    }

    /// The same device, every kernel of which is timed from now on (unless `profile` is paused), on this handle
    /// and its clones.
    #[must_use]
    pub fn profiled(self, profile: Arc<Profile>) -> Device {
        Device { profile: Some(profile), ..self }
    }

    /// The device's memory.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// Where a dry run writes; groups add their collectives to it.
    pub fn recorder(&self) -> Option<&Arc<Recorder>> {
        self.recorder.as_ref()
    }

    /// Whether nothing is computed here.
    pub fn is_meta(&self) -> bool {
        self.recorder.is_some()
    }

    /// `cpu` or `meta`.
    pub fn name(&self) -> &'static str {
        self.kernels.name()
    }

    /// Threads that one kernel uses.
    pub fn threads(&self) -> usize {
        self.kernels.threads()
    }

    /// The trace so far, as that of `rank`; empty on a device that computes.
    pub fn take_trace(&self, rank: usize) -> Trace {
        self.recorder
            .as_ref()
            .map_or(Trace { rank, phases: Vec::new(), faults: Vec::new() }, |r| r.take(rank))
    }

    /// Runs `f` as one phase of the plan.
    pub fn phase<T>(&self, name: &'static str, f: impl FnOnce() -> T) -> T {
        self.arena.begin(name);
        let out = f();
        self.arena.end();
        out
    }

    /// As [`Device::phase`], for work that can fail. A phase that failed is not held against its plan; none
    /// may follow it.
    ///
    /// # Errors
    /// Those of `f`.
    pub fn try_phase<T, E>(&self, name: &'static str, f: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        self.arena.begin(name);
        let out = f()?;
        self.arena.end();
        Ok(out)
    }

    /// Memory for a tensor. Its contents are whatever was there before.
    #[track_caller]
    pub fn alloc(
        &self,
        dtype: DType,
        shape: impl Into<Shape>,
        category: Category,
        name: &'static str,
    ) -> Tensor {
        self.arena.alloc(dtype, shape.into(), category, name, Site::caller())
    }

    /// Runs one kernel on the compute stream: its price goes to the trace, its time to the profile.
    pub(crate) fn run(
        &self,
        name: &'static str,
        flops: usize,
        bytes: usize,
        kernel: impl FnOnce(&dyn Kernels),
    ) {
        self.run_on(Stream::Compute, name, flops, bytes, kernel);
    }

    pub(crate) fn run_on(
        &self,
        stream: Stream,
        name: &'static str,
        flops: usize,
        bytes: usize,
        kernel: impl FnOnce(&dyn Kernels),
    ) {
        let key = KernelKey { name, flops: flops as u64, bytes: bytes as u64 };
        if let Some(recorder) = &self.recorder {
            recorder.push(Event::Kernel { name, flops: key.flops, bytes: key.bytes, stream });
        }
        let Some(profile) = self.profile.as_ref().filter(|profile| !profile.is_paused()) else {
            return kernel(&*self.kernels);
        };
        let start = Instant::now();
        kernel(&*self.kernels);
        profile.add(key, start.elapsed());
    }

    /// Notes that so many elements of parameter `number`'s gradient are counted in the norm.
    pub fn record_counted(&self, number: usize, elements: u64) {
        if let Some(recorder) = &self.recorder {
            recorder.push(Event::Counted { parameter: number as u32, elements });
        }
    }

    /// Notes that `chunk` is needed from here on.
    pub fn record_use(&self, chunk: usize) {
        if let Some(recorder) = &self.recorder {
            recorder.push(Event::Use { chunk: chunk as u32 });
        }
    }
}
