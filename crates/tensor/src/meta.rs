//! The backend that computes nothing.
//!
//! Its arenas hand out no memory and its calls do nothing: running a step on it records what a real device would
//! do, with its streams and events. Everything that a call must satisfy is checked before it gets here.

use std::sync::Arc;

use phalanx_plan::trace::{Event, Site, Stream};

use crate::backend::{Backend, Call, DeviceError, DiskTransfer, StreamEvent, Timer};
use crate::record::Recorder;
use crate::view::ViewMut;

/// Stands in for a device in a dry run.
pub struct Meta {
    /// Threads of the device that it stands in for, so that whatever depends on them is planned.
    pub threads: usize,
    /// True if the host may read the memory of the device that it stands in for.
    pub host_addressable: bool,
    /// Recorder of the events of streams.
    pub recorder: Arc<Recorder>,
}

impl Meta {
    /// Returns whether work of a stream runs later than it is issued, so that events order it. If the host can address device
    /// memory, calls run at once, but for transfers of the disk.
    fn runs_later(&self, stream: Stream) -> bool {
        !self.host_addressable || stream == Stream::Disk
    }
}

impl Backend for Meta {
    fn name(&self) -> &'static str {
        "meta"
    }

    fn threads(&self) -> usize {
        self.threads
    }

    fn is_host_addressable(&self) -> bool {
        self.host_addressable
    }

    fn launch(&self, _: Stream, _: Call) {}

    fn upload(&self, _: Stream, _: &[u8], _: ViewMut, _: Site, _: Option<Timer>) {}

    fn transfer(&self, _: DiskTransfer) {}

    fn record(&self, stream: Stream) -> StreamEvent {
        let number = if self.runs_later(stream) { self.recorder.event(stream) } else { 0 };
        StreamEvent { stream, number: number.into() }
    }

    fn wait(&self, stream: Stream, event: StreamEvent) {
        if self.runs_later(event.stream) {
            self.recorder.push(Event::StreamWait { number: event.number as u32, stream });
        }
    }

    fn synchronize(&self, event: StreamEvent) -> Result<(), DeviceError> {
        if self.runs_later(event.stream) {
            self.recorder.push(Event::HostWait { number: event.number as u32 });
        }
        Ok(())
    }
}
