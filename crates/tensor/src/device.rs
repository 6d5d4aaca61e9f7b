//! A device: its memories, its streams of work, and the record of what was asked of them.
//!
//! Callers (layers, optimizers) see only this type. What it computes is in [`operations`](crate::operations); how
//! bytes move between memories is in [`copies`](crate::copies); who executes the work is its [`Backend`].

use std::sync::Arc;

use phalanx_plan::trace::{Category, DType, Event, Memory, PhaseName, Rate, Site, Stream, Trace};

use crate::arena::Arena;
use crate::backend::{Backend, Call, Kernels, Timer};
use crate::buffer::Tensor;
use crate::disk::Mapping;
use crate::immediate::Immediate;
use crate::links::Links;
use crate::meta::Meta;
use crate::operation::{Describe, Price};
use crate::operations::Operation;
use crate::profile::{KernelKey, Profile};
use crate::record::Recorder;
use crate::shape::Shape;

/// Elements of one block of a norm; parameters start at multiples of it in every layout.
pub const NORM_BLOCK: usize = phalanx_plan::BLOCK as usize;

/// The mapped memory of an arena.
fn mapping(arena: &Arc<Arena>) -> Option<Mapping> {
    let region = arena.region()?;
    let (start, bytes) = (region.base().expose_provenance(), region.bytes());
    Some(Mapping { start, bytes, _owner: Arc::clone(arena) as _ })
}

/// Handle of a device; cheap to clone.
#[derive(Clone)]
pub struct Device {
    pub(crate) backend: Arc<dyn Backend>,
    arena: Arc<Arena>,
    host: Arc<Arena>,
    disk: Arc<Arena>,
    recorder: Option<Arc<Recorder>>,
    profile: Option<Arc<Profile>>,
    /// The stream of operations.
    stream: Stream,
}

impl Device {
    /// A device that computes each call with `kernels` when it is issued, in the memory of `arena`; its host memory
    /// is not planned.
    pub fn new(kernels: Arc<dyn Kernels>, arena: Arc<Arena>) -> Device {
        Device::with_memories(Arc::new(Immediate::new(kernels)), arena, Arena::heap_of(Memory::Host))
    }

    /// A device whose calls `backend` executes, with its own memory and the host's. It has no disk memory.
    pub fn with_memories(backend: Arc<dyn Backend>, arena: Arc<Arena>, host: Arc<Arena>) -> Device {
        assert_eq!([arena.memory(), host.memory()], [Memory::Device, Memory::Host]);
        let disk = Arena::missing(Memory::Disk);
        Device { backend, arena, host, disk, recorder: None, profile: None, stream: Stream::Compute }
    }

    /// The same device with disk memory; its backend has a disk stream.
    #[must_use]
    pub fn with_disk(self, disk: Arc<Arena>) -> Device {
        assert_eq!(disk.memory(), Memory::Disk);
        if let Some(memory) = disk.disk() {
            let addressable = self.is_host_addressable().then_some(&self.arena);
            let arenas = addressable.into_iter().chain([&self.host]);
            memory.use_memory(arenas.filter_map(mapping).collect());
        }
        Device { disk, ..self }
    }

    /// A device that only records, standing in for one of `threads` threads whose memory the host can address.
    pub fn meta(threads: usize) -> Device {
        Device::meta_of(threads, true)
    }

    /// A device that only records, standing in for one of `threads` threads; `host_addressable` says whether the host
    /// could read its memory.
    pub fn meta_of(threads: usize, host_addressable: bool) -> Device {
        let recorder = Arc::new(Recorder::default());
        let [arena, host, disk] = Memory::ALL.map(|memory| Arena::recording(memory, Arc::clone(&recorder)));
        let backend = Arc::new(Meta { threads, host_addressable, recorder: Arc::clone(&recorder) });
        let recorder = Some(recorder);
        Device { backend, arena, host, disk, recorder, profile: None, stream: Stream::Compute }
    }

    /// The same device, every kernel of which is timed from now on (unless `profile` is paused), on this handle
    /// and its clones.
    #[must_use]
    pub fn profiled(self, profile: Arc<Profile>) -> Device {
        Device { profile: Some(profile), ..self }
    }

    /// The same device, whose operations go to another stream.
    pub(crate) fn on_stream(&self, stream: Stream) -> Device {
        Device { stream, ..self.clone() }
    }

    /// The device's own memory.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// The host memory of the same rank.
    pub fn host_arena(&self) -> &Arc<Arena> {
        &self.host
    }

    /// The disk memory of the same rank.
    pub fn disk_arena(&self) -> &Arc<Arena> {
        &self.disk
    }

    fn arenas(&self) -> [&Arc<Arena>; 3] {
        [&self.arena, &self.host, &self.disk]
    }

    /// Recorder of a dry run; groups add their collectives to it.
    pub fn recorder(&self) -> Option<&Arc<Recorder>> {
        self.recorder.as_ref()
    }

    /// Returns whether nothing is computed here.
    pub fn is_meta(&self) -> bool {
        self.recorder.is_some()
    }

    /// Returns whether the host, and transports that read host memory, may read device memory in place.
    pub fn is_host_addressable(&self) -> bool {
        self.backend.is_host_addressable()
    }

    /// Links from the memory of the device to that of other ranks' devices; None if only the host connects them.
    pub fn links(&self) -> Option<&dyn Links> {
        self.backend.links()
    }

    /// `cpu`, `simulated` or `meta`.
    pub fn name(&self) -> &'static str {
        self.backend.name()
    }

    /// Threads that one kernel uses.
    pub fn threads(&self) -> usize {
        self.backend.threads()
    }

    /// The trace so far, as that of `rank`; empty on a device that computes.
    pub fn take_trace(&self, rank: usize) -> Trace {
        self.recorder
            .as_ref()
            .map_or(Trace { rank, phases: Vec::new(), faults: Vec::new() }, |r| r.take(rank))
    }

    /// Runs `f` as one phase of the plan.
    pub fn phase<T>(&self, name: PhaseName, f: impl FnOnce() -> T) -> T {
        self.begin(name);
        let out = f();
        self.end();
        out
    }

    /// As [`Device::phase`], for work that can fail. A phase that failed is not held against its plan; none
    /// may follow it.
    ///
    /// # Errors
    /// Those of `f`.
    pub fn try_phase<T, E>(&self, name: PhaseName, f: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        self.begin(name);
        let out = f()?;
        self.end();
        Ok(out)
    }

    /// Says that the rest of the phase will not run (a step that is skipped has no update): its planned allocations may
    /// be missing then.
    pub fn leave_out_rest(&self) {
        self.arenas().into_iter().for_each(|arena| arena.leave_out_rest());
    }

    fn begin(&self, name: PhaseName) {
        match &self.recorder {
            Some(recorder) => recorder.begin(name),
            None => self.arenas().into_iter().for_each(|arena| arena.begin(name)),
        }
    }

    fn end(&self) {
        self.arenas().into_iter().for_each(|arena| arena.end());
    }

    /// Device memory for a tensor. Its contents are whatever was there before.
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

    /// Host memory for a tensor. Its contents are whatever was there before.
    #[track_caller]
    pub fn alloc_host(
        &self,
        dtype: DType,
        shape: impl Into<Shape>,
        category: Category,
        name: &'static str,
    ) -> Tensor {
        self.host.alloc(dtype, shape.into(), category, name, Site::caller())
    }

    /// Disk memory for a tensor. Its contents are whatever was there before. Nothing but copies use it.
    #[track_caller]
    pub fn alloc_disk(
        &self,
        dtype: DType,
        shape: impl Into<Shape>,
        category: Category,
        name: &'static str,
    ) -> Tensor {
        self.disk.alloc(dtype, shape.into(), category, name, Site::caller())
    }

    /// Device memory for a collective, on behalf of a caller at `site`.
    pub fn alloc_for_collective(
        &self,
        dtype: DType,
        elements: usize,
        name: &'static str,
        site: Site,
    ) -> Tensor {
        self.arena.alloc(dtype, [elements].into(), Category::Communication, name, site)
    }

    /// Host memory for a tensor of the element type and shape of `like`, on behalf of a caller at `site`.
    pub fn alloc_host_like(&self, like: &Tensor, name: &'static str, site: Site) -> Tensor {
        self.host.alloc(like.dtype(), like.shape(), Category::Communication, name, site)
    }

    /// Calls `compute`, whose operations have run before in the step: in a dry run they are no work of the model.
    pub fn again<T>(&self, compute: impl FnOnce() -> T) -> T {
        match &self.recorder {
            Some(recorder) => recorder.again(compute),
            None => compute(),
        }
    }

    /// Checks, prices and issues one operation to the compute stream, or to that of [`Device::run_on_host`]. In a dry run its price and its placements go
    /// to the trace.
    #[track_caller]
    pub fn run<'a, O: Describe + Into<Operation<'a>>>(&self, operation: O) {
        operation.check();
        let (site, price, name) = (Site::caller(), operation.price(), operation.name());
        let price = if self.stream == Stream::Host { Price { rate: Rate::Host, ..price } } else { price };
        if let Some(recorder) = &self.recorder {
            if recorder.is_placing() || operation.marks_zero() {
                operation.follow(recorder, site);
            }
            let Price { flops, bytes, rate } = price;
            recorder.push(Event::Kernel { name, flops, bytes, rate, again: recorder.is_again() });
        }
        let timer = self.timer(name, price, self.stream);
        self.backend.launch(self.stream, Call { operation: operation.into(), name, site, timer });
    }

    /// Timer for a call on `stream`, when kernels are timed.
    pub(crate) fn timer(&self, name: &'static str, price: Price, stream: Stream) -> Option<Timer> {
        let profile = self.profile.as_ref().filter(|profile| !profile.is_paused())?;
        let key = KernelKey { name, flops: price.flops, bytes: price.bytes, rate: price.rate };
        Some(Timer { profile: Arc::clone(profile), key, stream })
    }

    /// Notes that so many elements of parameter `number`'s gradient are counted in the norm.
    pub fn record_counted(&self, number: usize, elements: u64) {
        if let Some(recorder) = &self.recorder {
            recorder.push(Event::Counted { parameter: number as u32, elements });
        }
    }

    /// Notes that step `number` of the pipeline's program begins; with the number after the last, that it has ended.
    pub fn record_step(&self, number: usize) {
        if let Some(recorder) = &self.recorder {
            recorder.push(Event::Step { number: number as u32 });
        }
    }

    /// Notes that `chunk` is needed from here on.
    pub fn record_use(&self, chunk: usize) {
        if let Some(recorder) = &self.recorder {
            recorder.push(Event::Use { chunk: chunk as u32 });
        }
    }
}
