//! Regions of memory that a program hands out itself, such as the tensors of an arena.
//!
//! When the first region of an allocation is announced, the whole allocation loses its memory, and only its live regions
//! have some. So an access that runs from one region into the next is out of bounds, one to a region that was released is a
//! use after its end, and what a new region holds counts as not written.

use std::collections::BTreeMap;

use crate::checks::Finding;
use crate::parts::Fault;

/// A region.
pub(crate) struct Region {
    /// Its size.
    pub bytes: usize,
    /// Its name, for reports.
    pub name: String,
    /// Whether it was not released.
    pub is_live: bool,
}

/// All regions by where they begin.
#[derive(Default)]
pub(crate) struct Regions(pub BTreeMap<usize, Region>);

impl Regions {
    /// Forgets the regions within a range, which was freed.
    pub fn forget(&mut self, at: usize, bytes: usize) {
        self.0.retain(|&start, _| !(at..at + bytes).contains(&start));
    }

    /// Whether there is any region within a range.
    pub fn is_any_within(&self, at: usize, bytes: usize) -> bool {
        self.0.range(at..at + bytes).next().is_some()
    }

    /// Why an access within an allocation with regions is refused; `None` if the allocation has no regions.
    pub fn explain(&self, (start, size): (usize, usize), at: usize, bytes: usize) -> Option<Fault> {
        if !self.is_any_within(start, size) {
            return None;
        }
        let Some((&first, region)) = self.0.range(start..=at).next_back() else {
            let detail = format!("{bytes} bytes before the first region of the allocation");
            return Some(Fault { finding: Finding::OutOfBounds, detail });
        };
        let Region { bytes: size, name, is_live } = region;
        let (finding, detail) = if at - first >= *size {
            let past = at - first - size;
            (Finding::OutOfBounds, format!("{bytes} bytes, {past} past the end of `{name}` of {size} bytes"))
        } else if *is_live {
            (
                Finding::OutOfBounds,
                format!("{bytes} bytes at byte {} of `{name}` of {size} bytes", at - first),
            )
        } else {
            let place = format!("{bytes} bytes at byte {} of `{name}` of {size} bytes", at - first);
            (Finding::UseAfterFree, format!("{place}, which was released"))
        };
        Some(Fault { finding, detail })
    }
}
