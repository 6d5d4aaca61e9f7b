//! The memory plan: lifetimes of a trace to offsets of the arena of one memory, and its peak by category.
//!
//! Memory that the first phase (`init`) allocates and keeps lies at the bottom of the arena, packed in order without gaps. Above
//! it each phase packs the memory that it allocates and frees (see `packing`). The real run's n-th allocation of a phase gets the
//! n-th slot; `peak` is the size that the arena then needs, to the byte.

use crate::trace::{Event, Memory, Phase, PhaseName, Site, Trace};
use serde::{Deserialize, Serialize};

use crate::packing::{ALIGN, DISK_ALIGN, Lifetime, pack};
use crate::peak::{Peak, PeakMeter};
use crate::slot::Slot;

/// Name of the phase whose allocations stay.
const INIT: PhaseName = PhaseName::Init;

/// The plan of one phase.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PhasePlan {
    /// Name of the phase.
    pub name: PhaseName,
    /// The n-th allocation of the phase gets the n-th slot.
    pub slots: Vec<Slot>,
    /// Peak of the arena during the phase, including what `init` left.
    pub peak: Peak,
}

/// The plan of an arena.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryPlan {
    /// Bytes to which every allocation is aligned: `ALIGN`, or `DISK_ALIGN` if the rank has disk memory.
    pub align: u64,
    /// Bytes of the arena: the maximum over the phases.
    pub arena_bytes: u64,
    /// Bytes that `init` leaves at the bottom of the arena.
    pub persistent_bytes: u64,
    /// The peak of the phase that needs the most bytes (the first of equals); `peak.bytes == arena_bytes`.
    pub peak: Peak,
    /// Phase by phase, as traced.
    pub phases: Vec<PhasePlan>,
}

impl MemoryPlan {
    /// The plan of the phase with this name.
    pub fn phase(&self, name: PhaseName) -> Option<&PhasePlan> {
        self.phases.iter().find(|p| p.name == name)
    }
}

/// An error of a trace. All of them are bugs of the engine that recorded the trace.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// The trace does not begin with `init`.
    #[error("the first phase of a trace is `{INIT}`, whose allocations stay; this one begins with {found}")]
    NoInit {
        /// Name of its first phase.
        found: String,
    },
    /// An allocation outlives its phase.
    #[error(
        "phase `{phase}` keeps `{name}` ({bytes} bytes, allocated at {site}): only `{INIT}` may keep \
         what it allocates; free it before the phase ends"
    )]
    Kept {
        /// Phase.
        phase: PhaseName,
        /// Name of the allocation.
        name: &'static str,
        /// Its bytes.
        bytes: u64,
        /// Call site of the allocation.
        site: Site,
    },
    /// An allocation is freed twice.
    #[error("phase `{phase}` frees allocation {id} (`{name}`, allocated at {site}) twice")]
    FreedTwice {
        /// Phase.
        phase: PhaseName,
        /// Number of the allocation.
        id: u32,
        /// Its name.
        name: &'static str,
        /// Call site of the allocation.
        site: Site,
    },
    /// An allocation is freed by a phase that did not allocate it.
    #[error(
        "phase `{phase}` frees allocation {id}, which it did not allocate: what `{INIT}` keeps stays \
         for the whole run"
    )]
    FreedForeign {
        /// Phase.
        phase: PhaseName,
        /// Number of the allocation.
        id: u32,
    },
    /// Allocations are not numbered in order.
    #[error("phase `{phase}` numbers the allocation `{name}` at {site} {id}; the next number is {expected}")]
    Misnumbered {
        /// Phase.
        phase: PhaseName,
        /// Name of the allocation.
        name: &'static str,
        /// Call site of the allocation.
        site: Site,
        /// Its number.
        id: u32,
        /// The expected number.
        expected: u32,
    },
    /// The sum of the allocations is too large.
    #[error("the allocations of phase `{phase}` exceed 2^60 bytes at `{name}` ({site}): check its shape")]
    TooLarge {
        /// Phase.
        phase: PhaseName,
        /// Name of the allocation at which the limit is exceeded.
        name: &'static str,
        /// Call site of the allocation.
        site: Site,
    },
}

/// Maximum bytes that a phase may allocate, counted without frees; keeps every sum far from overflow.
const MAX_BYTES: u64 = 1 << 60;

/// An allocation of a phase, before it has an offset.
struct Allocation {
    slot: Slot,
    start: usize,
    /// `None` while it is live.
    end: Option<usize>,
}

/// The allocations of one phase in one memory.
struct PhaseAllocations {
    /// In order of allocation.
    allocations: Vec<Allocation>,
    /// For every allocation of the phase, in any memory: its index in `allocations`, if it is in this memory.
    indices: Vec<Option<usize>>,
    /// Number of the phase's first allocation in the trace.
    first_id: u32,
}

/// Turns a trace into the offsets of the device memory's arena.
///
/// # Errors
/// A trace that does not begin with `init`; a later phase that keeps what it allocates; a free of
/// something not live or of an earlier phase; allocations that are misnumbered or absurdly large.
pub fn plan_memory(trace: &Trace) -> Result<MemoryPlan, MemoryError> {
    plan_memory_of(trace, Memory::Device)
}

/// Turns a trace into the offsets of the arena of one memory.
///
/// # Errors
/// As [`plan_memory`].
pub fn plan_memory_of(trace: &Trace, memory: Memory) -> Result<MemoryPlan, MemoryError> {
    let begins = trace.phases.first().map(|p| p.name);
    if begins != Some(INIT) {
        let found = begins.map_or("nothing".to_owned(), |name| format!("`{name}`"));
        return Err(MemoryError::NoInit { found });
    }
    let align = alignment(trace);
    let mut meter = PeakMeter::new(align);
    let mut phases = Vec::with_capacity(trace.phases.len());
    let mut persistent_bytes = 0;
    let mut first_id = 0;
    for (number, phase) in trace.phases.iter().enumerate() {
        let mut taking = PhaseAllocations::new(phase, first_id, memory)?;
        if number == 0 {
            persistent_bytes = place_kept(&mut taking.allocations, align);
        } else {
            refuse_kept(phase, &taking.allocations)?;
            meter.start_phase();
        }
        place_transients(&mut taking.allocations, persistent_bytes, align);
        taking.feed(&mut meter, phase);
        first_id += taking.indices.len() as u32;
        let slots = taking.allocations.iter().map(|t| t.slot).collect();
        phases.push(PhasePlan { name: phase.name, slots, peak: meter.phase_peak() });
    }
    let peak = meter.peak();
    Ok(MemoryPlan { align, arena_bytes: peak.bytes, persistent_bytes, peak, phases })
}

/// The alignment of a rank's allocations.
fn alignment(trace: &Trace) -> u64 {
    let is_on_disk = |event: &Event| matches!(event, Event::Alloc { memory: Memory::Disk, .. });
    let has_disk = trace.phases.iter().flat_map(|phase| &phase.events).any(is_on_disk);
    if has_disk { DISK_ALIGN } else { ALIGN }
}

impl PhaseAllocations {
    /// Collects the allocations of a phase with their lifetimes. Times count allocations and frees in this memory.
    fn new(phase: &Phase, first_id: u32, own: Memory) -> Result<PhaseAllocations, MemoryError> {
        let mut taking = PhaseAllocations { allocations: Vec::new(), indices: Vec::new(), first_id };
        let (mut sum, mut now) = (0, 0);
        for event in &phase.events {
            match *event {
                Event::Alloc { id, memory, bytes, category, name, site } => {
                    let expected = first_id + taking.indices.len() as u32;
                    if id != expected {
                        return Err(MemoryError::Misnumbered { phase: phase.name, name, site, id, expected });
                    }
                    let index = (memory == own).then_some(taking.allocations.len());
                    taking.indices.push(index);
                    if index.is_none() {
                        continue;
                    }
                    if bytes > MAX_BYTES - sum {
                        return Err(MemoryError::TooLarge { phase: phase.name, name, site });
                    }
                    sum += bytes;
                    let slot = Slot { offset: 0, bytes, category, name, site };
                    taking.allocations.push(Allocation { slot, start: now, end: None });
                    now += 1;
                }
                Event::Free { id, memory } if memory == own => {
                    let Some(index) = taking.index(id) else {
                        return Err(MemoryError::FreedForeign { phase: phase.name, id });
                    };
                    let freed = &mut taking.allocations[index];
                    let Slot { name, site, .. } = freed.slot;
                    if freed.end.replace(now).is_some() {
                        return Err(MemoryError::FreedTwice { phase: phase.name, id, name, site });
                    }
                    now += 1;
                }
                _ => {}
            }
        }
        Ok(taking)
    }

    /// The index of an allocation of this phase and this memory.
    fn index(&self, id: u32) -> Option<usize> {
        let number = id.checked_sub(self.first_id)?;
        self.indices.get(number as usize).copied().flatten()
    }

    /// Replays the allocations and frees of the phase on the meter.
    fn feed(&self, meter: &mut PeakMeter, phase: &Phase) {
        for event in &phase.events {
            match *event {
                Event::Alloc { id, .. } => {
                    self.index(id).into_iter().for_each(|i| meter.alloc(&self.allocations[i].slot))
                }
                Event::Free { id, .. } => {
                    self.index(id).into_iter().for_each(|i| meter.free(&self.allocations[i].slot))
                }
                _ => {}
            }
        }
    }
}

/// Places allocations that are never freed at the bottom, in order; returns their end.
fn place_kept(allocations: &mut [Allocation], align: u64) -> u64 {
    let mut end = 0;
    for kept in allocations.iter_mut().filter(|t| t.end.is_none()) {
        kept.slot.offset = end;
        end = kept.slot.end(align);
    }
    end
}

/// Returns an error if a phase after `init` keeps an allocation.
fn refuse_kept(phase: &Phase, allocations: &[Allocation]) -> Result<(), MemoryError> {
    let Some(kept) = allocations.iter().find(|t| t.end.is_none()) else {
        return Ok(());
    };
    let Slot { name, bytes, site, .. } = kept.slot;
    Err(MemoryError::Kept { phase: phase.name, name, bytes, site })
}

/// Places allocations that are freed within the phase above `base`.
fn place_transients(allocations: &mut [Allocation], base: u64, align: u64) {
    let mut items = Vec::with_capacity(allocations.len());
    let mut transients: Vec<&mut Slot> = Vec::with_capacity(allocations.len());
    for one in allocations.iter_mut() {
        if let Some(end) = one.end {
            let bytes = one.slot.bytes.next_multiple_of(align);
            items.push(Lifetime { start: one.start, end, bytes });
            transients.push(&mut one.slot);
        }
    }
    let packing = pack(&items);
    for (slot, offset) in transients.into_iter().zip(packing.offsets) {
        slot.offset = base + offset;
    }
}
