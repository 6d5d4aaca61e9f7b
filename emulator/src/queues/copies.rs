//! Copies and fills: bounds, order, whether what they read was written; then the bytes.

use crate::checks::{Access, Accessor, Finding, HOST_BLOCK};

use super::{Clock, Copy, Fill, Location, Queues};

impl Location {
    /// The location some bytes further.
    fn host_at(&self, offset: usize) -> Option<*mut u8> {
        match self {
            Self::Host(address) => Some((address + offset) as *mut u8),
            _ => None,
        }
    }
}

impl Copy {
    /// Whether it uses host memory within a range.
    pub(super) fn uses_host(&self, start: usize, bytes: usize) -> bool {
        let uses = |location: &Location, pitch: usize| match location {
            Location::Host(address) => {
                let end = address + pitch * self.height.saturating_sub(1) + self.width;
                *address < start + bytes && end > start
            }
            _ => false,
        };
        uses(&self.to, self.to_pitch) || uses(&self.from, self.from_pitch)
    }

    fn name(&self) -> &'static str {
        match (&self.to, &self.from) {
            (Location::Device(_), Location::Device(_)) => "a copy within the device",
            (Location::Device(_), _) => "a copy to the device",
            _ => "a copy to the host",
        }
    }
}

impl Queues {
    /// Copies rows. The host's ends are valid memory, as the caller of the driver promised.
    pub(super) fn copy(&mut self, copy: &Copy, operation: u32, clock: &Clock) {
        for row in 0..copy.height {
            let (to_offset, from_offset) = (row * copy.to_pitch, row * copy.from_pitch);
            let from = match &copy.from {
                Location::Device(address) => {
                    let address = address + from_offset as u64;
                    match self.range(copy.name(), address, copy.width, false, (operation, clock)) {
                        Some(place) => Some((place, address)),
                        None => return,
                    }
                }
                _ => None,
            };
            let to = match &copy.to {
                Location::Device(address) => {
                    let address = address + to_offset as u64;
                    match self.range(copy.name(), address, copy.width, true, (operation, clock)) {
                        Some(place) => Some(place),
                        None => return,
                    }
                }
                _ => None,
            };
            match (to, from) {
                (Some(to), Some((from, _))) => self.memory.copy_within(to, from, copy.width),
                (Some(to), None) => self.copy_in(copy, to, from_offset),
                (None, Some((from, address))) => self.copy_out(copy, (from, address), to_offset),
                (None, None) => {}
            }
        }
    }

    fn copy_in(&mut self, copy: &Copy, to: usize, from_offset: usize) {
        let target = self.memory.bytes(to, copy.width);
        if let Location::Bytes(bytes) = &copy.from {
            target.copy_from_slice(&bytes[from_offset..from_offset + copy.width]);
        } else if let Some(source) = copy.from.host_at(from_offset) {
            // SAFETY: the caller of the driver keeps the host memory until the copy has ended; device memory is elsewhere.
            unsafe { std::ptr::copy_nonoverlapping(source, target.as_mut_ptr(), copy.width) };
        }
        self.memory.mark_range_written(to, copy.width);
    }

    fn copy_out(&mut self, copy: &Copy, (from, address): (usize, u64), to_offset: usize) {
        if self.checks.unwritten && !self.memory.is_range_written(from, copy.width) {
            let detail = format!("among {} bytes of global memory", copy.width);
            self.report(Finding::Unwritten, copy.name(), Some(address), detail);
        }
        let source = self.memory.bytes(from, copy.width).as_ptr();
        if let Some(target) = copy.to.host_at(to_offset) {
            // SAFETY: as in `copy_in`.
            unsafe { std::ptr::copy_nonoverlapping(source, target, copy.width) };
        }
    }

    /// Fills device memory.
    pub(super) fn fill(&mut self, fill: &Fill, operation: u32, clock: &Clock) {
        let bytes = fill.pattern.len() * fill.count;
        let Some(place) = self.range("a memset", fill.to, bytes, true, (operation, clock)) else { return };
        for chunk in self.memory.bytes(place, bytes).chunks_exact_mut(fill.pattern.len()) {
            chunk.copy_from_slice(&fill.pattern);
        }
        self.memory.mark_range_written(place, bytes);
    }

    /// The place of a range that an operation uses, after its checks; `None` if it is out of bounds.
    pub(super) fn range(
        &mut self,
        name: &str,
        address: u64,
        bytes: usize,
        write: bool,
        (operation, clock): (u32, &Clock),
    ) -> Option<usize> {
        let place = match self.memory.range_place(address, bytes) {
            Ok(place) => place,
            Err(fault) => {
                self.report(fault.finding, name, Some(address), fault.detail);
                return None;
            }
        };
        if self.checks.races {
            let operations = &self.operations;
            let order = |earlier: u32| operations.is_before(earlier, clock);
            let accessor = Accessor {
                operation,
                block: HOST_BLOCK,
                warp: 0,
                phase: 0,
                known: [0; 32],
                instruction: 0,
                atomic: false,
                order: &order,
                last_ordered: Default::default(),
            };
            if let Some(conflict) = self.memory.record(place, bytes, write, &accessor) {
                let detail = unordered(write, conflict.earlier);
                self.report(Finding::StreamOrder, name, Some(address + (conflict.at - place) as u64), detail);
            }
        }
        Some(place)
    }
}

fn unordered(write: bool, other: Access) -> String {
    let verb = if write { "writes" } else { "reads" };
    let what = if other.block == HOST_BLOCK { "another copy" } else { "a kernel" };
    format!(
        "{verb} global memory that {what} (operation {}) uses; no event or stream orders them",
        other.operation
    )
}
