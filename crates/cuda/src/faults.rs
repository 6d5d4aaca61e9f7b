//! Faults that only the data shows, such as a token outside of the vocabulary: a kernel writes the number of its call and what
//! it found to a word of the card's memory. A copy brings it to the host before an event is recorded, and the host reads it when it waits.

use std::collections::VecDeque;
use std::sync::Arc;

use cudarc::driver::sys::CUstream;
use phalanx_plan::trace::Site;
use phalanx_tensor::DeviceError;

use crate::NAME;
use crate::driver::{Context, driver};
use crate::error::Error;
use crate::memory::HostBuffer;

/// Calls that are remembered. A call's fault is read at the next wait of the host, of which every step has some.
const CALLS_MAX: usize = 1 << 16;

/// Length of the word.
const BYTES: usize = size_of::<u64>();

/// Condition that a kernel checks.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Checked {
    /// A token is one of so many.
    Token { vocab: usize },
    /// A token type is a row of the table.
    TokenType { rows: usize },
    /// A target is one of so many classes.
    Target { classes: usize },
}

impl Checked {
    fn text(self, found: u32) -> String {
        match self {
            Checked::Token { vocab } => format!("token {found} is outside the vocabulary of {vocab}"),
            Checked::TokenType { rows } => format!("token type {found} is outside the table of {rows} rows"),
            Checked::Target { classes } => format!("target {found} is outside the vocabulary of {classes}"),
        }
    }
}

struct CheckedCall {
    number: u32,
    checked: Checked,
    call: &'static str,
    site: Site,
}

/// The word that kernels write, and the calls that may.
pub(crate) struct Faults {
    /// The host's copy.
    word: HostBuffer,
    /// The address of the word on the card.
    on_card: u64,
    calls: VecDeque<CheckedCall>,
    issued: u32,
    /// True if a call was issued whose word was not fetched.
    is_unread: bool,
}

impl Faults {
    /// `on_card`: the address of a word of the card's memory, for this alone. It is set to 0 on `stream`.
    pub(crate) fn new(context: &Arc<Context>, on_card: u64, stream: CUstream) -> Result<Faults, Error> {
        let word = HostBuffer::new(context, BYTES)?;
        // SAFETY: both are as long as a word, and live until the streams of the device are drained.
        unsafe { driver!(cuMemcpyHtoDAsync_v2(on_card, word.base().cast(), BYTES, stream))? };
        Ok(Faults { word, on_card, calls: VecDeque::new(), issued: 0, is_unread: false })
    }

    /// Brings the word to the host, behind what was issued to the stream, if a call may have written it.
    pub(crate) fn fetch(&mut self, stream: CUstream) -> Result<(), Error> {
        if !std::mem::take(&mut self.is_unread) {
            return Ok(());
        }
        // SAFETY: as in `new`.
        unsafe { driver!(cuMemcpyDtoHAsync_v2(self.word.base().cast(), self.on_card, BYTES, stream)) }
    }

    /// Notes a call that checks its data: the address of the word, and the number of the call.
    pub(crate) fn note(&mut self, checked: Checked, call: &'static str, site: Site) -> (u64, u32) {
        // 0 is no call.
        self.issued = self.issued.wrapping_add(1).max(1);
        if self.calls.len() == CALLS_MAX {
            self.calls.pop_front();
        }
        self.is_unread = true;
        self.calls.push_back(CheckedCall { number: self.issued, checked, call, site });
        (self.on_card, self.issued)
    }

    /// The fault that was written, if any.
    pub(crate) fn found(&self) -> Option<DeviceError> {
        // SAFETY: the buffer has a whole, aligned word; a copy may write it meanwhile, and the read is volatile.
        let word = unsafe { self.word.base().cast::<u64>().read_volatile() };
        let (number, found) = ((word >> 32) as u32, word as u32);
        let call = self.calls.iter().find(|call| call.number == number)?;
        Some(DeviceError { device: NAME, call: call.call, site: call.site, reason: call.checked.text(found) })
    }
}
