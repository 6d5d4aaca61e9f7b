//! Regions of memory that a program hands out itself, such as the tensors of an arena.
//!
//! When the first region of an allocation is announced, the whole allocation loses its memory, and only its live regions
//! have some. So an access that runs from one region into the next is out of bounds, one to a region that was released is a
//! use after its end, and what a new region holds counts as not written.

use std::collections::BTreeMap;

use crate::checks::Finding;
use crate::memory::DeviceMemory;
use crate::parts::Fault;

/// A region.
struct Region {
    bytes: usize,
    name: String,
    is_live: bool,
}

/// All regions by where they begin.
#[derive(Default)]
pub(crate) struct Regions(BTreeMap<usize, Region>);

impl Regions {
    /// Forgets the regions within a range, which was freed.
    pub fn forget(&mut self, at: usize, bytes: usize) {
        self.0.retain(|&start, _| !(at..at + bytes).contains(&start));
    }

    /// Whether there is any region within a range.
    fn is_any_within(&self, at: usize, bytes: usize) -> bool {
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

impl DeviceMemory {
    /// Begins a region within an allocation. Released regions in its place end.
    ///
    /// # Errors
    /// If it is not within one allocation, or overlaps a live region.
    pub fn begin_region(&mut self, address: u64, bytes: usize, name: String) -> Result<(), Fault> {
        let Some((start, size)) = self.around(address, bytes) else {
            return Err(self.explain(address, bytes));
        };
        let at = self.offset(address);
        if !self.regions.is_any_within(start, size) {
            self.take_valid(start, size);
        }
        let overlaps =
            |&(&first, region): &(&usize, &Region)| first < at + bytes && at < first + region.bytes;
        let overlapping: Vec<usize> =
            self.regions.0.range(start..at + bytes).filter(overlaps).map(|(&first, _)| first).collect();
        for first in overlapping {
            let region = &self.regions.0[&first];
            if region.is_live {
                let detail =
                    format!("region `{name}` of {bytes} bytes overlaps the live region `{}`", region.name);
                return Err(Fault { finding: Finding::OutOfBounds, detail });
            }
            self.regions.0.remove(&first);
        }
        self.give_new(at, bytes);
        self.regions.0.insert(at, Region { bytes, name, is_live: true });
        Ok(())
    }

    /// Ends all regions of an allocation, which has memory everywhere again.
    pub fn forget_regions(&mut self, address: u64, bytes: usize) {
        let at = self.offset(address);
        if self.regions.is_any_within(at, bytes) {
            self.regions.forget(at, bytes);
            self.validate(address, bytes);
        }
    }

    /// The size of the live region that begins at an address.
    ///
    /// # Errors
    /// If there is none.
    pub fn region(&self, address: u64) -> Result<usize, Fault> {
        match self.regions.0.get(&self.offset(address)) {
            Some(region) if region.is_live => Ok(region.bytes),
            _ => Err(Fault {
                finding: Finding::UseAfterFree,
                detail: "no live region begins at the address".to_string(),
            }),
        }
    }

    /// Ends the live region that begins at an address.
    pub fn end_region(&mut self, address: u64) {
        let at = self.offset(address);
        if let Some(region) = self.regions.0.get_mut(&at) {
            region.is_live = false;
            let bytes = region.bytes;
            self.take_valid(at, bytes);
        }
    }
}
