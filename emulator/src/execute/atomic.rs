//! Atomic operations, lane by lane. Blocks and warps run one after the other, so each is whole by itself.

use crate::checks::Finding;
use crate::kernel::{Atomic, AtomicOperation};
use crate::memory::Fault;

use super::access::{GLOBAL, SHARED, addresses, lane_bits, set_lane};
use super::block::{Block, Stop};
use super::spans::Span;
use super::warp::{Warp, lanes};

impl Block<'_> {
    /// Reads, changes and writes a place for each lane.
    pub(super) fn atomic(
        &mut self,
        warp: &mut Warp,
        atomic: &Atomic,
        active: u32,
        at: usize,
    ) -> Result<(), Stop> {
        let addresses = addresses(warp, &atomic.address);
        let by = self.accessor(warp.number, at, true);
        for lane in lanes(active) {
            let operand = lane_bits(warp, atomic.operand, lane);
            let new = atomic.new.map_or(0, |register| lane_bits(warp, register, lane));
            let apply = |before: u64| match atomic.operation {
                AtomicOperation::Apply(function) => function(before, operand),
                AtomicOperation::CompareAndSwap if before == operand => new,
                AtomicOperation::CompareAndSwap => before,
            };
            let one = Span::one(addresses[lane], lane);
            let (place, parts) = match Self::shared_address(atomic.space, one.address) {
                Some(address) => {
                    let place = self.place_of_write::<SHARED>(one.at(address), atomic.bytes, &by)?;
                    (place, self.parts::<SHARED>())
                }
                None if one.address < crate::memory::DEVICE_BASE => {
                    let detail = "atomic operations work on global and shared memory".to_string();
                    return Err(self.stop(Fault { finding: Finding::OutOfBounds, detail }, one, &by));
                }
                None => {
                    let place = self.place_of_write::<GLOBAL>(one, atomic.bytes, &by)?;
                    (place, self.parts::<GLOBAL>())
                }
            };
            let bytes = &mut parts.bytes[place..place + atomic.bytes];
            let mut all = [0u8; 8];
            all[..atomic.bytes].copy_from_slice(bytes);
            let before = u64::from_le_bytes(all);
            bytes.copy_from_slice(&apply(before).to_le_bytes()[..atomic.bytes]);
            if let Some(result) = atomic.result {
                set_lane(warp, result, lane, before);
            }
        }
        Ok(())
    }
}
