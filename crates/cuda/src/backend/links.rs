//! The links of a card: calls between cards begin behind what the stream of kernels was given before.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use phalanx_tensor::links::{Follow, Invitation, LinkId, LinkMark, LinkStep};
use phalanx_tensor::{DeviceError, Links};
use phalanx_trace::Site;

use super::Cuda;
use crate::NAME;
use crate::error::Error;
use crate::links::CardLink;
use crate::nccl::{NO_NCCL, Nccl};

/// The compute stream's number.
const COMPUTE: usize = 0;

/// What a link's failure is reported as.
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
        let join = || CardLink::join(&self.context, &self.modules, self.nccl()?, invitation, [rank, ranks]);
        let link = join().map_err(failed("join", Site::caller()))?;
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        links.push(Arc::new(Mutex::new(link)));
        Ok(LinkId(links.len() - 1))
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
