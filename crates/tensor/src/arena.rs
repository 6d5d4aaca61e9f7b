//! Memory of one rank on one device.
//!
//! Three ways to hand out memory, one interface:
//! - *recording* (`Meta`): nothing is handed out, every allocation and free is written to the trace;
//! - *replaying*: the n-th allocation of a phase gets the n-th planned offset of one region; an
//!   allocation that the plan did not foresee is a bug and stops the run, naming both call sites;
//! - *heap*: each allocation is its own zeroed memory, for tests and for programs without a plan.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use phalanx_plan::{ALIGN, MemoryPlan, Peak, PeakMeter, Slot};
use phalanx_trace::{Category, DType, Site};

use crate::buffer::{Address, Buffer, Tensor};
use crate::record::Recorder;
use crate::region::Region;
use crate::shape::Shape;

/// What a buffer remembers to give its memory back.
pub(crate) struct Allocation {
    pub(crate) address: Address,
    pub(crate) bytes: usize,
    slot: Slot,
    id: u32,
}

/// See the module's head.
pub struct Arena {
    kind: Kind,
}

enum Kind {
    Recording(Arc<Recorder>),
    Heap,
    Replaying { region: Region, replay: Mutex<Box<Replay>> },
}

struct Replay {
    plan: MemoryPlan,
    phase: Option<usize>,
    next: usize,
    live: usize,
    persistent: usize,
    meter: PeakMeter,
}

impl Arena {
    /// Hands out no memory and writes every allocation and free to `recorder`.
    pub fn recording(recorder: Arc<Recorder>) -> Arc<Arena> {
        Arc::new(Arena { kind: Kind::Recording(recorder) })
    }

    /// Each allocation on its own, zeroed.
    pub fn heap() -> Arc<Arena> {
        Arc::new(Arena { kind: Kind::Heap })
    }

    /// Replays `plan` over `region`, which must be at least `plan.arena_bytes` long.
    pub fn replaying(plan: MemoryPlan, region: Region) -> Arc<Arena> {
        assert!(
            region.bytes() as u64 >= plan.arena_bytes,
            "region {} < plan {}",
            region.bytes(),
            plan.arena_bytes
        );
        let replay = Replay { plan, phase: None, next: 0, live: 0, persistent: 0, meter: PeakMeter::new() };
        Arc::new(Arena { kind: Kind::Replaying { region, replay: Mutex::new(Box::new(replay)) } })
    }

    /// Starts a phase: the next allocation is its first. `init` comes first and once.
    pub fn begin(&self, name: &'static str) {
        match &self.kind {
            Kind::Recording(recorder) => recorder.begin(name),
            Kind::Heap => {}
            Kind::Replaying { replay, .. } => replay.lock().expect("no panic under this lock").begin(name),
        }
    }

    /// Ends the phase: everything that the plan foresaw must have been asked for, and every phase
    /// after `init` must have given back what it took.
    pub fn end(&self) {
        if let Kind::Replaying { replay, .. } = &self.kind {
            replay.lock().expect("no panic under this lock").end();
        }
    }

    /// Highest use so far, as measured from what was really taken and given back.
    pub fn peak(&self) -> Option<Peak> {
        match &self.kind {
            Kind::Replaying { replay, .. } => {
                Some(replay.lock().expect("no panic under this lock").meter.peak())
            }
            _ => None,
        }
    }

    /// Highest use of the phase that ran last.
    pub fn phase_peak(&self) -> Option<Peak> {
        match &self.kind {
            Kind::Replaying { replay, .. } => {
                Some(replay.lock().expect("no panic under this lock").meter.phase_peak())
            }
            _ => None,
        }
    }

    /// The mapped memory behind a replaying arena.
    pub fn region(&self) -> Option<&Region> {
        match &self.kind {
            Kind::Replaying { region, .. } => Some(region),
            _ => None,
        }
    }

    /// Takes memory for a tensor.
    pub(crate) fn alloc(
        self: &Arc<Self>,
        dtype: DType,
        shape: Shape,
        category: Category,
        name: &'static str,
        site: Site,
    ) -> Tensor {
        let bytes = shape.elements() * dtype.bytes();
        let slot = Slot { offset: 0, bytes: bytes as u64, category, name, site };
        let allocation = match &self.kind {
            Kind::Recording(recorder) => {
                let id = recorder.alloc(bytes as u64, category, name, site);
                Allocation { address: Address::nowhere(id), bytes, slot, id }
            }
            Kind::Heap => Allocation { address: Address::memory(heap_alloc(bytes)), bytes, slot, id: 0 },
            Kind::Replaying { region, replay } => {
                let slot = replay.lock().expect("no panic under this lock").take(slot);
                assert!(slot.offset + slot.bytes <= region.bytes() as u64);
                // SAFETY: the offset lies inside the region (asserted).
                let address = unsafe { NonNull::new_unchecked(region.base().add(slot.offset as usize)) };
                Allocation { address: Address::memory(address), bytes, slot, id: 0 }
            }
        };
        Tensor::new(Buffer::new(Arc::clone(self), allocation), dtype, shape)
    }

    pub(crate) fn free(&self, allocation: &Allocation) {
        match &self.kind {
            Kind::Recording(recorder) => recorder.free(allocation.id),
            Kind::Heap => heap_free(allocation),
            Kind::Replaying { replay, .. } => {
                // A rank that unwinds after a panic still drops its buffers; the books no longer matter.
                if let Ok(mut replay) = replay.lock() {
                    replay.live -= 1;
                    replay.meter.free(&allocation.slot);
                }
            }
        }
    }
}

impl Replay {
    fn begin(&mut self, name: &'static str) {
        assert!(self.phase.is_none(), "phase {name} starts inside another");
        let index = self.plan.phases.iter().position(|p| p.name == name);
        let index = index.unwrap_or_else(|| panic!("phase {name} was not planned"));
        self.phase = Some(index);
        self.next = 0;
        if index != 0 {
            self.meter.start_phase();
        }
    }

    fn end(&mut self) {
        let index = self.phase.take().expect("a phase runs");
        let phase = &self.plan.phases[index];
        if let Some(missed) = phase.slots.get(self.next) {
            panic!(
                "phase {} ended before allocation {} ({}, planned at {})",
                phase.name, self.next, missed.name, missed.site
            );
        }
        if index == 0 {
            self.persistent = self.live;
        }
        assert_eq!(self.live, self.persistent, "phase {} kept memory that its plan gives back", phase.name);
        assert_eq!(self.meter.phase_peak(), phase.peak, "measured and planned peak of phase {}", phase.name);
    }

    /// The planned slot for this request, or a stop that names both.
    fn take(&mut self, wanted: Slot) -> Slot {
        let index = self.phase.unwrap_or_else(|| {
            panic!(
                "allocation of {} bytes ({}) at {} outside any planned phase",
                wanted.bytes, wanted.name, wanted.site
            )
        });
        let phase = &self.plan.phases[index];
        let Some(planned) = phase.slots.get(self.next) else {
            panic!(
                "allocation {} of phase {} was not planned: {} bytes ({}) at {}",
                self.next, phase.name, wanted.bytes, wanted.name, wanted.site
            );
        };
        let same = planned.bytes == wanted.bytes
            && planned.category == wanted.category
            && planned.name == wanted.name
            && planned.site == wanted.site;
        assert!(
            same,
            "allocation {} of phase {} differs from its plan: {} bytes of {} ({}) at {}; planned: {} bytes of {} ({}) at {}",
            self.next,
            phase.name,
            wanted.bytes,
            wanted.category.name(),
            wanted.name,
            wanted.site,
            planned.bytes,
            planned.category.name(),
            planned.name,
            planned.site
        );
        let slot = *planned;
        self.next += 1;
        self.live += 1;
        self.meter.alloc(&slot);
        slot
    }
}

fn heap_layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes.max(1), ALIGN as usize).expect("a size that fits in memory")
}

fn heap_alloc(bytes: usize) -> NonNull<u8> {
    let layout = heap_layout(bytes);
    // SAFETY: the layout is not empty.
    NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap_or_else(|| handle_alloc_error(layout))
}

fn heap_free(allocation: &Allocation) {
    if let Some(address) = allocation.address.real() {
        // SAFETY: made by heap_alloc with the same layout, freed once by the Buffer that owned it.
        unsafe { dealloc(address.as_ptr(), heap_layout(allocation.bytes)) };
    }
}
