//! The links of a card: calls between cards begin behind what the stream of kernels was given before.

use std::sync::{Arc, Mutex, PoisonError};

use phalanx_tensor::links::{Invitation, LinkId, LinkMark, LinkStep};
use phalanx_tensor::{DeviceError, Links};
use phalanx_trace::Site;

use super::Cuda;
use crate::NAME;
use crate::error::Error;
use crate::links::CardLink;
use crate::nccl::{NO_NCCL, Nccl};

/// What a link's failure is reported as.
fn failed(call: &'static str, site: Site) -> impl Fn(Error) -> DeviceError {
    move |error| DeviceError { device: NAME, call, site, reason: error.to_string() }
}

impl Cuda {
    fn link(&self, link: LinkId) -> Arc<Mutex<CardLink>> {
        Arc::clone(&self.links.lock().unwrap_or_else(PoisonError::into_inner)[link.0])
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
            if let Some(failure) = &state.failure {
                return Ok(Err(failure.clone()));
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

    fn is_over(&self, link: LinkId) -> Result<bool, DeviceError> {
        let link = self.link(link);
        let mut link = link.lock().unwrap_or_else(PoisonError::into_inner);
        link.advance(&self.tensors).map_err(failed("communicate", Site::caller()))
    }

    fn abandon(&self, link: LinkId) {
        self.link(link).lock().unwrap_or_else(PoisonError::into_inner).abandon();
    }

    fn leave(&self, link: LinkId) {
        self.link(link).lock().unwrap_or_else(PoisonError::into_inner).leave();
    }
}
