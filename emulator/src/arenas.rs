//! Beginning and ending regions of device memory.

use crate::checks::Finding;
use crate::memory::DeviceMemory;
use crate::parts::Fault;
use crate::regions::Region;

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
            crate::bits::add(self.valid.all(), at, bytes);
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
