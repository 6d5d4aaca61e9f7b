//! One memory of one rank: of its device, of its host, or on disk.
//!
//! Four ways to hand out memory, one interface:
//! - *recording* (`Meta`): nothing is handed out, every allocation and free is written to the trace;
//! - *replaying*: the n-th allocation of a phase gets the n-th planned offset of one region (see
//!   `replay`); an allocation that the plan did not foresee, or whose place still holds a live tensor,
//!   is a bug and stops the run, naming both call sites;
//! - *heap*: each allocation is its own memory, for tests and for programs without a plan; zeroed, or with what lies in
//!   memory that was freed before;
//! - *unplanned*: the first gap of one region that is large enough (see `gaps`), for tests on devices that have
//!   a memory of their own.
//!
//! On disk, offsets of one file are handed out in the same ways; there is no heap.

use std::alloc::{Layout, alloc, alloc_zeroed, dealloc, handle_alloc_error};
use std::collections::HashMap;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use phalanx_plan::trace::{Category, Memory, PhaseName, Site};
use phalanx_plan::{ALIGN, MemoryPlan, Peak, Slot};

use crate::access::Access;
use crate::address::Address;
use crate::disk::DiskMemory;
use crate::flights::{Flights, InFlight};
use crate::gaps::Gaps;
use crate::record::Recorder;
use crate::region::{self, HUGE, Region};
use crate::replay::Replay;

/// Record with which a buffer gives its memory back.
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

/// Strategy by which an arena hands out memory.
enum Backing {
    Recording(Arc<Recorder>),
    /// Freed memory by size, if it is kept for later allocations.
    Heap(Option<Mutex<Freed>>),
    Replaying {
        space: Space,
        replay: Mutex<Box<Replay>>,
    },
    Unplanned {
        space: Space,
        gaps: Mutex<Gaps>,
    },
    /// There is no such memory.
    Missing,
}

/// Memory of a heap that was freed and not given back to the system.
#[derive(Default)]
struct Freed(HashMap<usize, Vec<Address>>);

impl Drop for Freed {
    fn drop(&mut self) {
        for (bytes, addresses) in self.0.drain() {
            addresses.into_iter().for_each(|address| heap_free(address, bytes));
        }
    }
}

/// Memory of which an arena hands out ranges.
enum Space {
    Mapped(Region),
    Disk(Arc<DiskMemory>),
}

impl Space {
    fn bytes(&self) -> u64 {
        match self {
            Space::Mapped(region) => region.bytes() as u64,
            Space::Disk(disk) => disk.bytes(),
        }
    }

    /// The address of a slot.
    fn address(&self, offset: u64, bytes: usize) -> Address {
        assert!(offset + bytes as u64 <= self.bytes(), "{bytes} bytes at {offset} of {}", self.bytes());
        match self {
            Space::Mapped(region) => {
                // SAFETY: the offset lies inside the region, or just behind its end for an allocation of no bytes (asserted).
                Address::memory(unsafe { NonNull::new_unchecked(region.base().add(offset as usize)) })
            }
            Space::Disk(_) => Address::on_disk(offset),
        }
    }
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
        assert_ne!(memory, Memory::Disk, "there is no heap on disk");
        Arena::new(memory, Backing::Heap(None))
    }

    /// Device memory; an allocation may take memory of the same size that was freed, with what lies in it. For work
    /// that repeats: the system's pages are touched for the first time only once.
    pub fn heap_that_keeps() -> Arc<Arena> {
        Arena::new(Memory::Device, Backing::Heap(Some(Mutex::default())))
    }

    /// Device memory that replays `plan` over `region`, which must be at least `plan.arena_bytes` long.
    pub fn replaying(plan: MemoryPlan, region: Region) -> Arc<Arena> {
        Arena::replaying_in(Memory::Device, plan, region)
    }

    /// The same for any memory that is mapped.
    pub fn replaying_in(memory: Memory, plan: MemoryPlan, region: Region) -> Arc<Arena> {
        assert_ne!(memory, Memory::Disk, "the disk is not mapped");
        Arena::replaying_over(memory, plan, Space::Mapped(region))
    }

    /// Disk memory that replays `plan`; it must be at least `plan.arena_bytes` long.
    pub fn replaying_on_disk(plan: MemoryPlan, disk: Arc<DiskMemory>) -> Arc<Arena> {
        Arena::replaying_over(Memory::Disk, plan, Space::Disk(disk))
    }

    fn replaying_over(memory: Memory, plan: MemoryPlan, space: Space) -> Arc<Arena> {
        assert!(space.bytes() >= plan.arena_bytes, "region {} < plan {}", space.bytes(), plan.arena_bytes);
        let replay = Mutex::new(Box::new(Replay::new(plan)));
        Arena::new(memory, Backing::Replaying { space, replay })
    }

    /// A memory without a plan over `region`. An allocation that finds no room stops the program.
    pub fn unplanned_in(memory: Memory, region: Region) -> Arc<Arena> {
        assert_ne!(memory, Memory::Disk, "the disk is not mapped");
        Arena::unplanned_over(memory, Space::Mapped(region))
    }

    /// The same on disk.
    pub fn unplanned_on_disk(disk: Arc<DiskMemory>) -> Arc<Arena> {
        Arena::unplanned_over(Memory::Disk, Space::Disk(disk))
    }

    fn unplanned_over(memory: Memory, space: Space) -> Arc<Arena> {
        let gaps = Mutex::new(Gaps::new(space.bytes() as usize));
        Arena::new(memory, Backing::Unplanned { space, gaps })
    }

    /// A memory that the device does not have: every allocation stops the program.
    pub(crate) fn missing(memory: Memory) -> Arc<Arena> {
        Arena::new(memory, Backing::Missing)
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
            Backing::Heap(_) | Backing::Unplanned { .. } | Backing::Missing => {}
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

    /// Records the live bytes after each allocation and free from here on, if the arena replays a plan.
    pub fn record_timeline(&self) {
        if let Backing::Replaying { replay, .. } = &self.backing {
            lock(replay).record_timeline();
        }
    }

    /// Ends the recording of [`Arena::record_timeline`] and returns it: times and live bytes.
    pub fn take_timeline(&self) -> Vec<(Instant, u64)> {
        match &self.backing {
            Backing::Replaying { replay, .. } => lock(replay).take_timeline(),
            _ => Vec::new(),
        }
    }

    /// The mapped memory behind a replaying or unplanned arena.
    pub fn region(&self) -> Option<&Region> {
        match &self.backing {
            Backing::Replaying { space: Space::Mapped(region), .. }
            | Backing::Unplanned { space: Space::Mapped(region), .. } => Some(region),
            _ => None,
        }
    }

    /// The storage behind a disk memory that replays a plan, or is unplanned.
    pub(crate) fn disk(&self) -> Option<&Arc<DiskMemory>> {
        match &self.backing {
            Backing::Replaying { space: Space::Disk(disk), .. }
            | Backing::Unplanned { space: Space::Disk(disk), .. } => Some(disk),
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
            Backing::Heap(freed) => {
                let kept = freed.as_ref().and_then(|freed| lock(freed).0.get_mut(&bytes)?.pop());
                let address = kept.unwrap_or_else(|| Address::memory(heap_alloc(bytes)));
                Allocation { address, bytes, slot, id: 0 }
            }
            Backing::Replaying { space, replay } => {
                let (slot, id) = follow(replay, |replay| replay.take(&slot));
                Allocation { address: space.address(slot.offset, bytes), bytes, slot, id }
            }
            Backing::Unplanned { space, gaps } => {
                let offset = or_stop(lock(gaps).take(bytes).ok_or_else(|| {
                    format!(
                        "{} memory of {} bytes has no room for `{name}` ({bytes} bytes, allocated at {site})",
                        self.memory.name(),
                        space.bytes()
                    )
                }));
                let slot = Slot { offset: offset as u64, ..slot };
                Allocation { address: space.address(slot.offset, bytes), bytes, slot, id: 0 }
            }
            Backing::Missing => or_stop(Err(format!(
                "the device has no {} memory for `{name}` ({bytes} bytes, allocated at {site}): its factory makes one for \
                 the plan in `DeviceRequest`",
                self.memory.name()
            ))),
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
            Backing::Heap(None) => heap_free(allocation.address, allocation.bytes),
            Backing::Heap(Some(freed)) => {
                lock(freed).0.entry(allocation.bytes).or_default().push(allocation.address);
            }
            Backing::Missing => {}
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

/// The range of an allocation, in the address space of its arena.
fn range_of(address: Address, bytes: usize) -> Range<u128> {
    let start = address.number();
    start..start + bytes as u128
}

fn heap_layout(bytes: usize) -> Layout {
    let align = if bytes < HUGE { ALIGN as usize } else { HUGE };
    Layout::from_size_align(bytes.max(1), align).expect("a size that fits in memory")
}

/// Zeroed memory, in huge pages where it is long enough and the system has them.
fn heap_alloc(bytes: usize) -> NonNull<u8> {
    let layout = heap_layout(bytes);
    // SAFETY: the layout is not empty.
    let memory = unsafe { if bytes < HUGE { alloc_zeroed(layout) } else { alloc(layout) } };
    let memory = NonNull::new(memory).unwrap_or_else(|| handle_alloc_error(layout));
    if bytes >= HUGE {
        region::ask_for_huge_pages(memory, bytes / HUGE * HUGE);
        // SAFETY: allocated just now, and as long.
        unsafe { memory.write_bytes(0, bytes) };
    }
    memory
}

fn heap_free(address: Address, bytes: usize) {
    if let Some(address) = address.real() {
        // SAFETY: made by heap_alloc with the same layout; freed once: by the Buffer that owned it, or by `Freed`, which
        // has it from there.
        unsafe { dealloc(address.as_ptr(), heap_layout(bytes)) };
    }
}
