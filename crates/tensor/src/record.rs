//! Writes the trace of a dry run.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use phalanx_plan::trace::{Category, Collective, Event, Memory, Phase, PhaseName, Placements, Site, Trace};

use crate::placement::table::Table;

/// Collects events in the order in which they happen.
#[derive(Default)]
pub struct Recorder {
    tape: Mutex<Tape>,
    /// True if any tensor was placed other than replicated: until then nothing is followed.
    placing: AtomicBool,
    /// True while operations run again ([`crate::Device::again`]).
    again: AtomicBool,
}

#[derive(Default)]
pub(crate) struct Tape {
    phases: Vec<Phase>,
    allocations: u32,
    collectives: u32,
    events: u32,
    /// Placements of memory.
    pub(crate) placed: Table,
}

impl Recorder {
    /// Starts a phase; later events belong to it.
    pub fn begin(&self, name: PhaseName) {
        self.locked(|tape| {
            // The longest phases are hundreds of megabytes: what they do not use is given back.
            if let Some(last) = tape.phases.last_mut() {
                last.events.shrink_to_fit();
            }
            tape.phases.push(Phase { name, events: Vec::new() });
        });
    }

    /// Appends one event.
    pub fn push(&self, event: Event) {
        self.locked(|tape| tape.push(event));
    }

    /// Appends an allocation and numbers it.
    pub fn alloc(
        &self,
        memory: Memory,
        bytes: u64,
        category: Category,
        name: &'static str,
        site: Site,
    ) -> u32 {
        self.locked(|tape| {
            let id = tape.allocations;
            tape.allocations += 1;
            tape.placed.alloc(name);
            tape.push(Event::Alloc { id, memory, bytes, category, name, site });
            id
        })
    }

    /// Appends the end of an allocation.
    pub(crate) fn free(&self, memory: Memory, id: u32) {
        self.locked(|tape| {
            tape.placed.free(id);
            tape.push(Event::Free { id, memory });
        });
    }

    /// Appends a collective and numbers it.
    pub fn collective(&self, collective: Collective) -> u32 {
        self.locked(|tape| {
            let number = tape.collectives;
            tape.collectives += 1;
            tape.push(Event::Collective(Box::new(collective)));
            number
        })
    }

    /// Numbers an event of a stream and appends it.
    pub(crate) fn event(&self, stream: phalanx_plan::trace::Stream) -> u32 {
        self.locked(|tape| {
            let number = tape.events;
            tape.events += 1;
            tape.push(Event::Record { number, stream });
            number
        })
    }

    /// Takes what was written so far as the trace of `rank`.
    pub fn take(&self, rank: usize) -> Trace {
        self.locked(|tape| Trace {
            rank,
            phases: std::mem::take(&mut tape.phases),
            faults: std::mem::take(&mut tape.placed.faults),
        })
    }

    /// Returns whether placements are followed: cheap.
    pub fn is_placing(&self) -> bool {
        self.placing.load(Ordering::Relaxed)
    }

    pub(crate) fn is_again(&self) -> bool {
        self.again.load(Ordering::Relaxed)
    }

    /// Calls `compute`, whose operations run again.
    pub(crate) fn again<T>(&self, compute: impl FnOnce() -> T) -> T {
        let before = self.again.swap(true, Ordering::Relaxed);
        let result = compute();
        self.again.store(before, Ordering::Relaxed);
        result
    }

    pub(crate) fn start_placing(&self, placements: Placements) {
        if placements != Placements::REPLICATED {
            self.placing.store(true, Ordering::Relaxed);
        }
    }

    pub(crate) fn locked<T>(&self, f: impl FnOnce(&mut Tape) -> T) -> T {
        // A recording that panicked is never used; its lock may be.
        f(&mut self.tape.lock().unwrap_or_else(|poisoned| poisoned.into_inner()))
    }
}

impl Tape {
    /// Name of the phase that runs; None before the first.
    pub(crate) fn phase(&self) -> Option<PhaseName> {
        self.phases.last().map(|phase| phase.name)
    }

    fn push(&mut self, event: Event) {
        // What happens before the first phase (building a test's tensors, drops after the end) is
        // nobody's memory.
        if let Some(phase) = self.phases.last_mut() {
            phase.events.push(event);
        }
    }
}
