//! The backend that runs each call on the caller's thread, before the launch returns: the processor.
//!
//! Only transfers of the disk run later, on a thread of their own ([`DiskStream`]). All other work is over when it was
//! issued, so its events have always happened.

use std::sync::Arc;

use phalanx_plan::trace::{Site, Stream};

use crate::backend::{Backend, Call, DeviceError, DiskTransfer, Kernels, StreamEvent, Timer};
use crate::disk_stream::DiskStream;
use crate::operations::Copy;
use crate::view::{View, ViewMut};

/// Runs every call now, with the kernels of a processor.
pub struct Immediate {
    kernels: Arc<dyn Kernels>,
    disk: Option<DiskStream>,
}

impl Immediate {
    /// Executes with `kernels`, without a disk stream.
    pub fn new(kernels: Arc<dyn Kernels>) -> Immediate {
        Immediate { kernels, disk: None }
    }

    /// Executes with `kernels`, and starts the thread of a disk stream.
    ///
    /// # Errors
    /// When the system starts no further thread.
    pub fn with_disk_stream(kernels: Arc<dyn Kernels>) -> std::io::Result<Immediate> {
        let disk = Some(DiskStream::start(kernels.name())?);
        Ok(Immediate { kernels, disk })
    }
}

impl Backend for Immediate {
    fn name(&self) -> &'static str {
        self.kernels.name()
    }

    fn threads(&self) -> usize {
        self.kernels.threads()
    }

    fn is_host_addressable(&self) -> bool {
        true
    }

    fn launch(&self, _: Stream, call: Call) {
        call.execute(&*self.kernels);
    }

    fn upload(&self, _: Stream, from: &[u8], to: ViewMut, site: Site, timer: Option<Timer>) {
        let operation = Copy { from: View::over_bytes(from, to.dtype()), to }.into();
        Call { operation, name: "upload", site, timer }.execute(&*self.kernels);
    }

    fn transfer(&self, transfer: DiskTransfer) {
        let disk = self.disk.as_ref().expect("a device with disk memory has a disk stream");
        // SAFETY: by the contract of `transfer`, the caller keeps the tensors valid and ordered until the event after it.
        disk.issue(unsafe { transfer.detach() });
    }

    fn record(&self, stream: Stream) -> StreamEvent {
        let number = match (stream, &self.disk) {
            (Stream::Disk, Some(disk)) => disk.issued(),
            _ => 0,
        };
        StreamEvent { stream, number }
    }

    /// A kernel that waits for a transfer is one whose launch comes after it.
    fn wait(&self, stream: Stream, event: StreamEvent) {
        if let Some(disk) =
            self.disk.as_ref().filter(|_| event.stream == Stream::Disk && stream != Stream::Disk)
        {
            disk.wait(event.number);
        }
    }

    fn synchronize(&self, event: StreamEvent) -> Result<(), DeviceError> {
        let Some(disk) = &self.disk else { return Ok(()) };
        if event.stream == Stream::Disk {
            disk.wait(event.number);
        }
        disk.check()
    }
}
