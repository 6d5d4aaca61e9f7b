//! The books of an arena that replays its plan: which allocation comes next, and what is live.
//!
//! The plan gives memory that is free again to later allocations. That holds only as long as the run frees
//! each tensor where the dry run did. So every allocation is held against the live ranges: one that overlaps
//! is refused, and the error names both call sites. A free that cannot be right is noted, and the next
//! event on this arena, on whatever thread, returns the error: a drop must not panic. After the first
//! error every event returns it.
//!
//! Cost: live ranges are a vector ordered by offset. An allocation and its free are two binary searches and two
//! moves of what lies above, a few hundred entries of 24 bytes (`cargo run --release -p phalanx-train --example
//! arena`).

use std::time::Instant;

use phalanx_plan::trace::PhaseName;
use phalanx_plan::{MemoryPlan, PeakMeter, Slot};

/// Number of the phase `init`, whose allocations stay.
const INIT: usize = 0;

/// Progress of a rank's arena in its plan.
pub(crate) struct Replay {
    plan: MemoryPlan,
    phase: Option<usize>,
    /// Number of the phase's next allocation.
    next: usize,
    /// Ranges of memory in use, by offset; none overlaps another. Allocations of no bytes have none.
    live: Vec<Live>,
    /// Allocations in use.
    count: usize,
    /// Those that `init` left.
    persistent: usize,
    meter: PeakMeter,
    /// The program said that it leaves out the rest of the phase.
    leaves_out_rest: bool,
    fault: Option<String>,
    /// When it is recorded: the live bytes after each allocation and free.
    timeline: Option<Vec<(Instant, u64)>>,
}

/// A range of memory in use, and whose it is: allocation `number` of `phase`.
#[derive(Clone, Copy)]
struct Live {
    offset: u64,
    end: u64,
    phase: u32,
    number: u32,
}

impl Replay {
    pub(crate) fn new(plan: MemoryPlan) -> Replay {
        // Never more are live than are allocated in `init` and one phase: nothing grows during a step.
        let max = plan.phases.iter().map(|phase| phase.slots.len()).max().unwrap_or(0);
        let live = Vec::with_capacity(plan.phases.first().map_or(0, |init| init.slots.len()) + max);
        let meter = PeakMeter::new(plan.align);
        Replay {
            plan,
            phase: None,
            next: 0,
            live,
            count: 0,
            persistent: 0,
            meter,
            leaves_out_rest: false,
            fault: None,
            timeline: None,
        }
    }

    /// Records the live bytes from here on.
    pub(crate) fn record_timeline(&mut self) {
        self.timeline = Some(Vec::new());
    }

    /// Takes the recorded timeline; nothing is recorded from here on.
    pub(crate) fn take_timeline(&mut self) -> Vec<(Instant, u64)> {
        self.timeline.take().unwrap_or_default()
    }

    fn note_live(&mut self) {
        if let Some(timeline) = &mut self.timeline {
            timeline.push((Instant::now(), self.meter.live().total()));
        }
    }

    pub(crate) fn meter(&self) -> &PeakMeter {
        &self.meter
    }

    /// Starts a phase: the next allocation is its first.
    pub(crate) fn begin(&mut self, name: PhaseName) -> Result<(), String> {
        self.check_fault()?;
        if self.phase.is_some() {
            return self.refuse(format!("phase {name} starts inside another"));
        }
        let Some(index) = self.plan.phases.iter().position(|phase| phase.name == name) else {
            return self.refuse(format!("phase {name} was not planned"));
        };
        self.phase = Some(index);
        self.next = 0;
        self.leaves_out_rest = false;
        if index != INIT {
            self.meter.start_phase();
        }
        Ok(())
    }

    /// Ends the phase: everything planned was asked for, and every phase after `init` gave back what it took.
    pub(crate) fn end(&mut self) -> Result<(), String> {
        self.check_fault()?;
        let Some(index) = self.phase.take() else {
            return self.refuse("a phase ends, but none runs".into());
        };
        let phase = &self.plan.phases[index];
        let missed = phase.slots.get(self.next);
        if let Some(missed) = missed.filter(|_| !self.leaves_out_rest) {
            let text = format!(
                "phase {} ended before allocation {} ({}, planned at {})",
                phase.name, self.next, missed.name, missed.site
            );
            return self.refuse(text);
        }
        if let Some(kept) = self.live.iter().find(|live| live.end > self.plan.persistent_bytes) {
            let text = format!(
                "{} is still live at the end of phase {}, whose plan frees it: it is kept longer than in the dry run",
                self.describe(kept),
                phase.name
            );
            return self.refuse(text);
        }
        if index == INIT {
            self.persistent = self.count;
            let (kept, planned) = (self.live_bytes(), self.plan.persistent_bytes);
            if kept != planned {
                let text = format!("phase init ended with {kept} live bytes: its plan keeps {planned}");
                return self.refuse(text);
            }
        }
        let (count, persistent) = (self.count, self.persistent);
        if count != persistent {
            let text = format!(
                "phase {} ended with {count} live allocations: its plan has {persistent}, those that `init` made",
                phase.name
            );
            return self.refuse(text);
        }
        let (measured, planned) = (self.meter.phase_peak(), phase.peak);
        // A phase that was left early may have needed less.
        let as_planned = if missed.is_some() { measured.bytes <= planned.bytes } else { measured == planned };
        if !as_planned {
            let text = format!("measured peak of phase {}: {measured:?}; planned: {planned:?}", phase.name);
            return self.refuse(text);
        }
        Ok(())
    }

    /// The rest of the phase will not run: what it would allocate is not held against it.
    pub(crate) fn leave_out_rest(&mut self) {
        self.leaves_out_rest = true;
    }

    /// The planned slot for this request, and its number, if nothing that is live lies there.
    pub(crate) fn take(&mut self, wanted: &Slot) -> Result<(Slot, u32), String> {
        self.check_fault()?;
        let Some(index) = self.phase else {
            let Slot { bytes, name, site, .. } = wanted;
            return self
                .refuse(format!("allocation of {bytes} bytes ({name}) at {site} outside any planned phase"));
        };
        let slot = match planned(&self.plan, index, self.next, wanted) {
            Ok(slot) => slot,
            Err(text) => return self.refuse(text),
        };
        let number = self.next as u32;
        if slot.bytes > 0 {
            let live =
                Live { offset: slot.offset, end: slot.end(self.plan.align), phase: index as u32, number };
            // Ranges do not overlap: of those that begin below this one's end, the last also ends last.
            let above = self.live.partition_point(|other| other.offset < live.end);
            if let Some(other) = self.live[..above].last().filter(|other| other.end > live.offset) {
                let text = self.overlap(&live, other);
                return self.refuse(text);
            }
            self.live.insert(above, live);
        }
        self.next += 1;
        self.count += 1;
        self.meter.alloc(&slot);
        self.note_live();
        Ok((slot, number))
    }

    /// Allocation `number` of its phase is given back. An error is for the next event to return.
    pub(crate) fn free(&mut self, slot: &Slot, number: u32) {
        if self.fault.is_some() {
            return;
        }
        if slot.bytes > 0 {
            let found = self.live.binary_search_by_key(&slot.offset, |live| live.offset).ok();
            let Some(at) = found.filter(|at| self.live[*at].number == number) else {
                self.fault = Some(self.freed_elsewhere(slot, found.map(|at| &self.live[at])));
                return;
            };
            let (stays, phase) = (self.live[at].phase as usize == INIT, self.phase.unwrap_or(INIT));
            if stays && phase != INIT {
                self.fault = Some(format!(
                    "phase {} freed {}: what `init` keeps stays for the whole run",
                    self.plan.phases[phase].name,
                    self.describe(&self.live[at])
                ));
                return;
            }
            self.live.remove(at);
        }
        self.count -= 1;
        self.meter.free(slot);
        self.note_live();
    }

    /// Bytes of all live ranges, with their alignment.
    fn live_bytes(&self) -> u64 {
        self.live.iter().map(|live| live.end - live.offset).sum()
    }

    fn check_fault(&self) -> Result<(), String> {
        self.fault.clone().map_or(Ok(()), Err)
    }

    /// The first error stays: whatever thread comes next gets it, too.
    fn refuse<T>(&mut self, text: String) -> Result<T, String> {
        self.fault = Some(text.clone());
        Err(text)
    }

    fn slot(&self, live: &Live) -> &Slot {
        &self.plan.phases[live.phase as usize].slots[live.number as usize]
    }

    /// Name, size, place and call site of an allocation.
    fn describe(&self, live: &Live) -> String {
        let Slot { offset, bytes, name, site, .. } = self.slot(live);
        let (number, phase) = (live.number, self.plan.phases[live.phase as usize].name);
        format!(
            "`{name}` (allocation {number} of phase {phase}, {bytes} bytes at offset {offset}, allocated at {site})"
        )
    }

    fn overlap(&self, wanted: &Live, live: &Live) -> String {
        format!(
            "{} would overwrite {}, which is still live: it is kept longer than in the dry run, in which it was freed \
             by then. Free each tensor at the same place of the program in the dry run and in every step",
            self.describe(wanted),
            self.describe(live)
        )
    }

    fn freed_elsewhere(&self, slot: &Slot, found: Option<&Live>) -> String {
        let Slot { offset, bytes, name, site, .. } = slot;
        let there = found.map_or("nothing is live".into(), |live| format!("{} is live", self.describe(live)));
        format!("`{name}` ({bytes} bytes, allocated at {site}) is freed at offset {offset}, where {there}")
    }
}

/// Slot `number` of a phase, if `wanted` is what the plan foresees there.
fn planned(plan: &MemoryPlan, phase: usize, number: usize, wanted: &Slot) -> Result<Slot, String> {
    let phase = &plan.phases[phase];
    let Some(planned) = phase.slots.get(number) else {
        return Err(format!(
            "allocation {number} of phase {} was not planned: {} bytes ({}) at {}",
            phase.name, wanted.bytes, wanted.name, wanted.site
        ));
    };
    let same = planned.bytes == wanted.bytes
        && planned.category == wanted.category
        && planned.name == wanted.name
        && planned.site == wanted.site;
    if same {
        return Ok(*planned);
    }
    let request = |slot: &Slot| {
        format!("{} bytes of {} ({}) at {}", slot.bytes, slot.category.name(), slot.name, slot.site)
    };
    Err(format!(
        "allocation {number} of phase {} differs from its plan: {}; planned: {}",
        phase.name,
        request(wanted),
        request(planned)
    ))
}
