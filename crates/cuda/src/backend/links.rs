//! The links of a card: calls between cards begin behind what the stream of kernels was given before.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use phalanx_plan::trace::Site;
use phalanx_tensor::links::{Follow, Invitation, LinkId, LinkMark, LinkStep};
use phalanx_tensor::{DeviceError, Links};

use super::Cuda;
use crate::NAME;
use crate::error::Error;
use crate::links::CardLink;
use crate::nccl::{LATER_BYTES, NO_NCCL, Nccl, communicator_bytes};

/// The compute stream's number.
const COMPUTE: usize = 0;

/// Memory that links take of the card beside the plan.
#[derive(Default)]
pub(super) struct LinksMemory {
    /// Bytes that were free before the first link.
    free_before: Option<u64>,
    /// Bytes that were planned for the links so far.
    planned_bytes: u64,
    /// True after the notice that they take more than planned.
    is_said: bool,
}

impl LinksMemory {
    /// Bytes that links have taken when so many are free.
    fn taken_bytes(&self, free_bytes: u64) -> u64 {
        self.free_before.unwrap_or(free_bytes).saturating_sub(free_bytes)
    }

    /// Returns a notice if the links so far take more than planned; `free_bytes` are left behind them.
    ///
    /// # Errors
    /// Less than the driver still takes.
    fn check(&mut self, free_bytes: u64, index: usize) -> Result<Option<String>, Error> {
        let taken_bytes = self.taken_bytes(free_bytes);
        let planned_bytes = self.planned_bytes;
        if free_bytes < LATER_BYTES {
            let needed_bytes = LATER_BYTES;
            return Err(Error::TakenByLinks { index, taken_bytes, planned_bytes, free_bytes, needed_bytes });
        }
        let says = taken_bytes > planned_bytes && !std::mem::replace(&mut self.is_said, true);
        Ok(says.then(|| {
            format!(
                "NCCL has taken {taken_bytes} bytes of card {index}, where {planned_bytes} were planned; {free_bytes} are left, \
                 which is enough (please report both numbers)"
            )
        }))
    }
}

/// Returns a function that turns a link's error into a failure of this call.
fn failed(call: &'static str, site: Site) -> impl Fn(Error) -> DeviceError {
    move |error| DeviceError { device: NAME, call, site, reason: error.to_string() }
}

impl Cuda {
    fn link(&self, link: LinkId) -> Arc<Mutex<CardLink>> {
        Arc::clone(&self.links.lock().unwrap_or_else(PoisonError::into_inner)[link.0])
    }

    /// The first failure of a call that the compute stream follows.
    pub(super) fn link_failure(&self) -> Option<DeviceError> {
        self.failed_link.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn nccl(&self) -> Result<&Arc<Nccl>, Error> {
        self.nccl.as_ref().ok_or_else(|| Error::NotConnected(NO_NCCL.to_string()))
    }
}

impl Links for Cuda {
    fn invite(&self) -> Result<Invitation, DeviceError> {
        self.nccl().and_then(|nccl| nccl.invite()).map_err(failed("invite", Site::caller()))
    }

    fn join(&self, invitation: &Invitation, rank: usize, ranks: usize) -> Result<LinkId, DeviceError> {
        let mut memory = self.links_memory.lock().unwrap_or_else(PoisonError::into_inner);
        if memory.free_before.is_none() {
            memory.free_before = self.context.memory().ok().map(|(free, _)| free);
        }
        memory.planned_bytes += communicator_bytes(ranks);
        drop(memory);
        let join = || CardLink::join(&self.context, &self.modules, self.nccl()?, invitation, [rank, ranks]);
        let link = join().map_err(failed("join", Site::caller()))?;
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        links.push(Arc::new(Mutex::new(link)));
        Ok(LinkId(links.len() - 1))
    }

    fn warmed(&self) -> Result<(), DeviceError> {
        let check = || {
            let (free_bytes, _) = self.context.memory()?;
            let mut memory = self.links_memory.lock().unwrap_or_else(PoisonError::into_inner);
            self.context.made.note_linked(memory.taken_bytes(free_bytes));
            memory.check(free_bytes, self.context.card.index)
        };
        let said = check().map_err(failed("connect", Site::caller()))?;
        said.iter().for_each(|line| (self.notice)(line));
        Ok(())
    }

    fn mark(&self, link: LinkId) -> Result<LinkMark, DeviceError> {
        let mark = || {
            self.context.enter()?;
            let mut state = self.lock();
            self.end_compute(&mut state)?;
            // What comes after a failure would move bytes that nobody computed.
            if let Some(failure) = state.failure.clone().or_else(|| self.link_failure()) {
                return Ok(Err(failure));
            }
            let compute = state.streams.compute();
            // Never the other way round: who starts a call has the link's lock and needs no other.
            self.link(link).lock().unwrap_or_else(PoisonError::into_inner).mark(compute).map(Ok)
        };
        mark().map_err(failed("mark", Site::caller()))?
    }

    unsafe fn start(&self, link: LinkId, steps: Vec<LinkStep>, after: LinkMark) -> Result<(), DeviceError> {
        let link = self.link(link);
        let mut link = link.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the caller's promise.
        let started = unsafe { link.start(steps, after, &self.tensors) };
        started.map_err(failed("start", Site::caller()))
    }

    fn has_begun(&self, link: LinkId) -> Result<bool, DeviceError> {
        let link = self.link(link);
        let link = link.lock().unwrap_or_else(PoisonError::into_inner);
        link.has_begun().map_err(failed("communicate", Site::caller()))
    }

    fn is_over(&self, link: LinkId) -> Result<bool, DeviceError> {
        let link = self.link(link);
        let mut link = link.lock().unwrap_or_else(PoisonError::into_inner);
        link.advance(&self.tensors).map_err(failed("communicate", Site::caller()))
    }

    fn follow(&self, link: LinkId, call: LinkMark) -> Result<Follow, DeviceError> {
        if self.has_failed.load(Ordering::Acquire) {
            return Ok(Follow::No);
        }
        let follow = || {
            self.context.enter()?;
            let mut state = self.lock();
            // What was kept so far does not wait.
            self.flush(&mut state);
            let compute = state.streams.issue(COMPUTE);
            let followed =
                self.link(link).lock().unwrap_or_else(PoisonError::into_inner).follow(call, compute)?;
            if followed == Follow::Ordered {
                self.context.made.count_follow();
            }
            Ok(followed)
        };
        follow().map_err(failed("follow", Site::caller()))
    }

    fn fail(&self, link: LinkId, why: DeviceError) {
        let link = self.link(link);
        let mut link = link.lock().unwrap_or_else(PoisonError::into_inner);
        if link.fail() {
            // Before the link is abandoned, which lets the compute stream go on.
            self.failed_link.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(why);
            self.has_failed.store(true, Ordering::Release);
        }
    }

    fn abandon(&self, link: LinkId) {
        self.link(link).lock().unwrap_or_else(PoisonError::into_inner).abandon();
    }

    fn leave(&self, link: LinkId) {
        self.link(link).lock().unwrap_or_else(PoisonError::into_inner).leave();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_links_take_is_compared_with_what_was_planned() {
        let planned_bytes = communicator_bytes(2);
        let free_before = Some(8 << 30);
        let mut memory = LinksMemory { free_before, planned_bytes, is_said: false };
        assert_eq!(memory.check((8 << 30) - planned_bytes, 3).unwrap(), None);
        let said = memory.check((8 << 30) - planned_bytes - 1, 3).unwrap().unwrap();
        assert!(said.contains(&planned_bytes.to_string()) && said.contains("card 3"), "{said}");
        assert_eq!(memory.check(1 << 30, 3).unwrap(), None, "said once");
        let refused = memory.check(LATER_BYTES - 1, 3).unwrap_err().to_string();
        assert!(refused.contains("card 3") && refused.contains("device.memory_mb"), "{refused}");
        assert!(communicator_bytes(8) > 3 << 30, "NVIDIA/nccl#1685");
    }
}
