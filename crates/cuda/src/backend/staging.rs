//! Uploads: host bytes on their way to the card.

use std::sync::Arc;

use phalanx_plan::trace::Stream;
use phalanx_tensor::backend::Timer;

use super::{Cuda, State};
use crate::driver::{Context, driver};
use crate::error::Error;
use crate::memory::HostBuffer;
use crate::streams::index;

/// Bytes of a slot of the buffer through which host bytes are uploaded, and the number of slots.
const SLOT_BYTES: usize = 1 << 20;
const SLOTS: usize = 8;

/// Memory through which uploads pass, because their bytes may be gone when the card reads them.
pub(super) struct Staging {
    buffer: HostBuffer,
    /// The entry of the stream of uploads that used each slot last.
    used: [u64; SLOTS],
    next: usize,
}

impl Staging {
    pub(super) fn new(context: &Arc<Context>) -> Result<Staging, Error> {
        let buffer = HostBuffer::new(context, SLOTS * SLOT_BYTES)?;
        Ok(Staging { buffer, used: [0; SLOTS], next: 0 })
    }
}

impl Cuda {
    /// Copies host bytes through the staging buffer.
    pub(super) fn stage(
        &self,
        state: &mut State,
        from: &[u8],
        to: u64,
        timer: Option<Timer>,
    ) -> Result<(), Error> {
        let Some(queue) = index(Stream::ToDevice) else { return Ok(()) };
        self.context.enter()?;
        let State { streams, staging, .. } = state;
        let start = timer.is_some().then(|| streams.start_timing(queue)).transpose()?;
        for (number, piece) in from.chunks(SLOT_BYTES).enumerate() {
            let slot = staging.next;
            staging.next = (slot + 1) % SLOTS;
            streams.synchronize(queue, staging.used[slot])?;
            let to = to + (number * SLOT_BYTES) as u64;
            // SAFETY: the slot lies inside the buffer, and the copy that used it last is over.
            unsafe {
                let at = staging.buffer.base().add(slot * SLOT_BYTES);
                std::ptr::copy_nonoverlapping(piece.as_ptr(), at, piece.len());
                driver!(cuMemcpyHtoDAsync_v2(to, at.cast(), piece.len(), streams.issue(queue)))?;
            }
            staging.used[slot] = streams.record(queue)?;
        }
        match start.zip(timer) {
            Some((start, timer)) => streams.end_timing(queue, start, timer),
            None => Ok(()),
        }
    }
}
