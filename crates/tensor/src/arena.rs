//! One memory of one rank: of its device, or of its host.
//!
//! Four ways to hand out memory, one interface:
//! - *recording* (`Meta`): nothing is handed out, every allocation and free is written to the trace;
//! - *replaying*: the n-th allocation of a phase gets the n-th planned offset of one region (see
//!   `replay`); an allocation that the plan did not foresee, or whose place still holds a live tensor,
//!   is a bug and stops the run, naming both call sites;
//! - *heap*: each allocation is its own zeroed memory, for tests and for programs without a plan;
//! - *unplanned*: the first gap of one region that is large enough (see `gaps`), for tests on devices that have
//!   a memory of their own.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use phalanx_plan::{ALIGN, MemoryPlan, Peak, Slot};
use phalanx_trace::{Category, Memory, PhaseName, Site};

use crate::access::Access;
use crate::address::Address;
use crate::flights::{Flights, InFlight};
use crate::gaps::Gaps;
use crate::record::Recorder;
use crate::region::Region;
use crate::replay::Replay;

/// What a buffer remembers to give its memory back.
pub(crate) struct Allocation {
    pub(crate) address: Address,
    pub(crate) bytes: usize,
    slot: Slot,
    /// Its number: in the trace when recording, in its phase when replaying.
    id: u32,
}

/// One memory of one rank.
pub struct Arena {
    memory: Memory,
    backing: Backing,
    flights: Arc<Flights>,
}

/// How an arena hands out memory.
enum Backing {
    Recording(Arc<Recorder>),
    Heap,
    Replaying { region: Region, replay: Mutex<Box<Replay>> },
    Unplanned { region: Region, gaps: Mutex<Gaps> },
}

impl Arena {
    fn new(memory: Memory, backing: Backing) -> Arc<Arena> {
        Arc::new(Arena { memory, backing, flights: Arc::default() })
    }

    /// Hands out no memory and writes every allocation and free to `recorder`.
    pub fn recording(memory: Memory, recorder: Arc<Recorder>) -> Arc<Arena> {
        Arena::new(memory, Backing::Recording(recorder))
    }

    /// Device memory; each allocation on its own, zeroed.
    pub fn heap() -> Arc<Arena> {
        Arena::heap_of(Memory::Device)
    }

    /// The same for any memory that the host can address.
    pub fn heap_of(memory: Memory) -> Arc<Arena> {
        Arena::new(memory, Backing::Heap)
    }

    /// Device memory that replays `plan` over `region`, which must be at least `plan.arena_bytes` long.
    pub fn replaying(plan: MemoryPlan, region: Region) -> Arc<Arena> {
        Arena::replaying_in(Memory::Device, plan, region)
    }

    /// The same for any memory.
    pub fn replaying_in(memory: Memory, plan: MemoryPlan, region: Region) -> Arc<Arena> {
        assert!(
            region.bytes() as u64 >= plan.arena_bytes,
            "region {} < plan {}",
            region.bytes(),
            plan.arena_bytes
        );
        let replay = Mutex::new(Box::new(Replay::new(plan)));
        Arena::new(memory, Backing::Replaying { region, replay })
    }

    /// A memory without a plan over `region`. An allocation that finds no room stops the program.
    pub fn unplanned_in(memory: Memory, region: Region) -> Arc<Arena> {
        let gaps = Mutex::new(Gaps::new(region.bytes()));
        Arena::new(memory, Backing::Unplanned { region, gaps })
    }

    /// Which memory this is.
    pub fn memory(&self) -> Memory {
        self.memory
    }

    /// Starts a phase: the next allocation is its first. `init` comes first and once.
    pub fn begin(&self, name: PhaseName) {
        or_stop(self.flights.check());
        match &self.backing {
            Backing::Recording(recorder) => recorder.begin(name),
            Backing::Heap | Backing::Unplanned { .. } => {}
            Backing::Replaying { replay, .. } => follow(replay, |replay| replay.begin(name)),
        }
    }

    /// Ends the phase: everything that the plan foresaw must have been asked for, and every phase
    /// after `init` must have given back what it took.
    pub fn end(&self) {
        or_stop(self.flights.check());
        if let Backing::Replaying { replay, .. } = &self.backing {
            follow(replay, Replay::end);
        }
    }

    /// The rest of the phase will not run. Its planned allocations may be missing then; nothing else may differ.
    pub fn leave_out_rest(&self) {
        if let Backing::Replaying { replay, .. } = &self.backing {
            lock(replay).leave_out_rest();
        }
    }

    /// Highest use so far, as measured from what was really taken and given back.
    pub fn peak(&self) -> Option<Peak> {
        match &self.backing {
            Backing::Replaying { replay, .. } => Some(lock(replay).meter().peak()),
            _ => None,
        }
    }

    /// Highest use of the phase that ran last.
    pub fn phase_peak(&self) -> Option<Peak> {
        match &self.backing {
            Backing::Replaying { replay, .. } => Some(lock(replay).meter().phase_peak()),
            _ => None,
        }
    }

    /// The mapped memory behind a replaying or unplanned arena.
    pub fn region(&self) -> Option<&Region> {
        match &self.backing {
            Backing::Replaying { region, .. } | Backing::Unplanned { region, .. } => Some(region),
            _ => None,
        }
    }

    /// Takes memory for a tensor; the caller gives it back with [`Arena::free`].
    pub(crate) fn take(
        &self,
        bytes: usize,
        category: Category,
        name: &'static str,
        site: Site,
    ) -> Allocation {
        or_stop(self.flights.check());
        let slot = Slot { offset: 0, bytes: bytes as u64, category, name, site };
        let allocation = match &self.backing {
            Backing::Recording(recorder) => {
                let id = recorder.alloc(self.memory, bytes as u64, category, name, site);
                Allocation { address: Address::nowhere(id), bytes, slot, id }
            }
            Backing::Heap => Allocation { address: Address::memory(heap_alloc(bytes)), bytes, slot, id: 0 },
            Backing::Replaying { region, replay } => {
                let (slot, id) = follow(replay, |replay| replay.take(&slot));
                assert!(slot.offset + slot.bytes <= region.bytes() as u64);
                Allocation { address: address_in(region, slot.offset as usize), bytes, slot, id }
            }
            Backing::Unplanned { region, gaps } => {
                let offset = or_stop(lock(gaps).take(bytes).ok_or_else(|| {
                    format!(
                        "{} memory of {} bytes has no room for `{name}` ({bytes} bytes, allocated at {site})",
                        self.memory.name(),
                        region.bytes()
                    )
                }));
                let slot = Slot { offset: offset as u64, ..slot };
                Allocation { address: address_in(region, offset), bytes, slot, id: 0 }
            }
        };
        or_stop(self.flights.check_alloc(&range_of(allocation.address, bytes), name, site));
        allocation
    }

    /// A transfer reads or writes `bytes` at `address` until what is returned is dropped.
    pub(crate) fn in_flight(
        &self,
        address: Address,
        bytes: usize,
        access: Access,
        by: &'static str,
        site: Site,
    ) -> InFlight {
        or_stop(self.flights.start(self.memory, range_of(address, bytes), access, (by, site)))
    }

    pub(crate) fn free(&self, allocation: &Allocation) {
        let Slot { name, site, .. } = allocation.slot;
        self.flights.note_free(&range_of(allocation.address, allocation.bytes), name, site);
        match &self.backing {
            Backing::Recording(recorder) => recorder.free(self.memory, allocation.id),
            Backing::Heap => heap_free(allocation),
            Backing::Replaying { replay, .. } => lock(replay).free(&allocation.slot, allocation.id),
            Backing::Unplanned { gaps, .. } => {
                lock(gaps).give_back(allocation.slot.offset as usize, allocation.bytes);
            }
        }
    }
}

/// Nothing panics under this lock; if something did, a tensor that is dropped meanwhile must not panic again.
fn lock<T>(books: &Mutex<T>) -> MutexGuard<'_, T> {
    books.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The next event of a replay. One that the plan does not have stops the run, after the lock is given back.
fn follow<T>(replay: &Mutex<Box<Replay>>, event: impl FnOnce(&mut Replay) -> Result<T, String>) -> T {
    let done = event(&mut lock(replay));
    or_stop(done)
}

/// Stops the run when the arena was used as it may not be.
fn or_stop<T>(result: Result<T, String>) -> T {
    result.unwrap_or_else(|fault| panic!("{fault}"))
}

/// The address of a region's byte `offset`.
fn address_in(region: &Region, offset: usize) -> Address {
    assert!(offset <= region.bytes());
    // SAFETY: the offset lies inside the region, or just behind its end for an allocation of no bytes (asserted).
    Address::memory(unsafe { NonNull::new_unchecked(region.base().add(offset)) })
}

/// The range of an allocation, in the address space of its arena.
fn range_of(address: Address, bytes: usize) -> Range<u128> {
    let start = address.number();
    start..start + bytes as u128
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
