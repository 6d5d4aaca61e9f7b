//! The peak of an arena, by category: computed here by the plan from what will happen, and by the
//! real arena from what does happen. One meter for both, so that they can be equal to the byte.
//!
//! A peak is a size, the highest end of anything placed, and an explanation: the bytes live by category
//! at the first moment of the highest live total. What the size has more than that (gaps,
//! alignment) is workspace. Each event costs a few additions and allocates nothing.

use crate::trace::{Bytes, Category};
use serde::{Deserialize, Serialize};

use crate::slot::Slot;

/// The peak of an arena: its size, and the categories that used it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peak {
    /// Highest end of any allocation, aligned.
    pub bytes: u64,
    /// The bytes that were live when the most bytes were; gaps and alignment are workspace. `categories.total() == bytes`.
    pub categories: Bytes,
    /// Largest number of activation bytes that were live at once.
    #[serde(default)]
    pub activations: u64,
    /// Bytes that were not live then: gaps and alignment.
    #[serde(default)]
    pub gaps: u64,
}

impl Peak {
    /// Returns whether it is larger than another: of two of one size, the one with more live bytes.
    pub fn is_above(&self, other: &Peak) -> bool {
        (self.bytes, self.bytes - self.gaps) > (other.bytes, other.bytes - other.gaps)
    }
}

/// Follows the allocations and frees of an arena.
///
/// Relies on a guarantee of `plan_memory`: allocations that are live at the start of a phase are packed at the bottom
/// without gaps, so their end is the sum of their aligned bytes.
#[derive(Clone, Debug)]
pub struct PeakMeter {
    align: u64,
    live: Bytes,
    live_bytes: u64,
    live_aligned: u64,
    phase: Extent,
    earlier: Peak,
}

/// The current phase so far.
#[derive(Clone, Copy, Debug, Default)]
struct Extent {
    end: u64,
    live_max: Bytes,
    live_bytes_max: u64,
    activations: u64,
}

impl PeakMeter {
    /// A meter of an empty arena, in its first phase. Allocations are aligned to `align` bytes.
    pub fn new(align: u64) -> PeakMeter {
        PeakMeter {
            align,
            live: Bytes::default(),
            live_bytes: 0,
            live_aligned: 0,
            phase: Extent::default(),
            earlier: Peak::default(),
        }
    }

    /// Counts an allocation.
    pub fn alloc(&mut self, slot: &Slot) {
        *self.live.slot(slot.category) += slot.bytes;
        self.live_bytes += slot.bytes;
        self.live_aligned += slot.bytes.next_multiple_of(self.align);
        self.phase.end = self.phase.end.max(slot.end(self.align));
        self.phase.activations = self.phase.activations.max(self.live.activations);
        if self.live_bytes > self.phase.live_bytes_max {
            self.phase.live_max = self.live;
            self.phase.live_bytes_max = self.live_bytes;
        }
    }

    /// Counts a free.
    ///
    /// # Panics
    /// If more is freed than is live in the slot's category.
    pub fn free(&mut self, slot: &Slot) {
        let live = self.live.slot(slot.category);
        assert!(*live >= slot.bytes, "`{}` is freed but not live", slot.name);
        *live -= slot.bytes;
        self.live_bytes -= slot.bytes;
        self.live_aligned -= slot.bytes.next_multiple_of(self.align);
    }

    /// Starts a new phase: live allocations stay, and the peak of the phase restarts.
    pub fn start_phase(&mut self) {
        self.earlier = self.peak();
        self.phase = Extent {
            end: self.live_aligned,
            live_max: self.live,
            live_bytes_max: self.live_bytes,
            activations: self.live.activations,
        };
    }

    /// Bytes live now, by category.
    pub fn live(&self) -> Bytes {
        self.live
    }

    /// The peak of the current phase.
    pub fn phase_peak(&self) -> Peak {
        let Extent { end, live_max, live_bytes_max, activations } = self.phase;
        assert!(end >= live_bytes_max, "slots that are live together overlap");
        let mut categories = live_max;
        let gaps = end - live_bytes_max;
        *categories.slot(Category::Workspace) += gaps;
        Peak { bytes: end, categories, activations, gaps }
    }

    /// The largest peak of all phases (the first of equals). A phase that was left early may have the size of a whole one,
    /// and less that is live.
    pub fn peak(&self) -> Peak {
        let phase = self.phase_peak();
        if phase.is_above(&self.earlier) { phase } else { self.earlier }
    }
}
