//! `Backend`: executes the calls of a device. The contract between [`Device`](crate::Device) and its machine.
//!
//! Work is issued to named streams. Calls of one stream run in the order in which they were issued; calls of
//! different streams run beside each other unless an event orders them, as in CUDA. Implementations:
//! [`Immediate`](crate::Immediate) runs each call on the caller's thread before it returns (the processor),
//! [`Meta`](crate::meta::Meta) only records (the dry run), and the crate `simulated` queues them for worker threads.

use std::sync::Arc;
use std::time::{Duration, Instant};

use phalanx_plan::trace::{Site, Stream};

use crate::access::Access;
use crate::address::Address;
use crate::disk::{DiskMemory, Transfer};
pub use crate::events::{DeviceError, StreamEvent};
use crate::links::Links;
use crate::operations::{Copy, Operation};
use crate::profile::{KernelKey, Profile};
use crate::view::{View, ViewMut};

/// The kernels of a processor: computes any operation now, on the caller's thread and its pool.
pub trait Kernels: Send + Sync {
    /// Short name for people: `cpu`.
    fn name(&self) -> &'static str;

    /// Threads that one kernel uses.
    fn threads(&self) -> usize;

    /// Computes `operation`, whose shapes and element types were checked. It is over when this returns.
    fn execute(&self, operation: Operation);
}

/// One call of an operation, on its way to whatever executes it.
pub struct Call<'a> {
    /// Operation to compute.
    pub operation: Operation<'a>,
    /// The name under which it is timed and reported: the operation's, or what the caller does with it.
    pub name: &'static str,
    /// Call site.
    pub site: Site,
    /// Timer to which its time is added, when kernels are timed.
    pub timer: Option<Timer>,
}

impl Call<'_> {
    /// Runs it now, with its time measured.
    pub fn execute(self, kernels: &dyn Kernels) {
        let Some(timer) = self.timer else { return kernels.execute(self.operation) };
        let start = Instant::now();
        kernels.execute(self.operation);
        timer.add(start.elapsed());
    }
}

/// One copy between disk memory and memory that the host addresses, on its way to whatever executes it.
pub struct DiskTransfer<'a> {
    /// The disk memory.
    pub disk: Arc<DiskMemory>,
    /// Source and destination; exactly one of the two lies in the disk memory.
    pub copy: Copy<'a>,
    /// The name under which it is timed and reported.
    pub name: &'static str,
    /// Call site.
    pub site: Site,
    /// Timer to which its time is added, when kernels are timed.
    pub timer: Option<Timer>,
}

impl DiskTransfer<'_> {
    /// Reads or writes now, with its time measured. No other transfer of the disk memory runs meanwhile.
    ///
    /// # Errors
    /// Why it failed: an error of the system, or a file that ends too early. No failure ends the program here: whoever
    /// runs transfers must go on, so that those who wait for them learn of it.
    pub fn execute(self) -> Result<(), String> {
        // SAFETY: the transfer borrows its memory, and is over when this returns.
        unsafe { self.disk.start(0, self.bytes()?) };
        loop {
            if let Some(over) = self.disk.progress().pop() {
                self.note_time(over.time);
                return over.result;
            }
        }
    }

    /// Transfer between disk memory and host memory.
    fn bytes(&self) -> Result<Transfer, String> {
        let (from, to) = (self.copy.from.address(), self.copy.to.address());
        let memory = |address: Address| address.real().map(|memory| memory.as_ptr().expose_provenance());
        let (writes, at, memory) = match (from.disk_offset(), to.disk_offset()) {
            (None, Some(offset)) => (true, offset, memory(from)),
            (Some(offset), None) => (false, offset, memory(to)),
            _ => (false, 0, None),
        };
        let memory = memory.ok_or("it is not between disk memory and memory that the host addresses")?;
        Ok(Transfer { writes, at, memory, bytes: self.copy.to.bytes() })
    }

    /// Adds the time that it has taken.
    pub(crate) fn note_time(&self, time: Duration) {
        if let Some(timer) = &self.timer {
            timer.add(time);
        }
    }

    /// The same transfer without the lifetimes of its tensors, to be queued.
    ///
    /// # Safety
    /// The memory of both tensors stays valid until the transfer is over, and is used meanwhile only by work that a
    /// stream or an event orders before or after it.
    pub unsafe fn detach(self) -> DiskTransfer<'static> {
        let DiskTransfer { disk, copy, name, site, timer } = self;
        // SAFETY: only lifetimes change; the caller keeps the memory valid.
        let copy = unsafe { std::mem::transmute::<Copy<'_>, Copy<'static>>(copy) };
        DiskTransfer { disk, copy, name, site, timer }
    }
}

impl DiskTransfer<'static> {
    /// Starts it under a number of its own; its disk memory says when it is over.
    ///
    /// # Errors
    /// When it is not between disk memory and memory that the host addresses.
    pub(crate) fn start(&self, number: u64) -> Result<(), String> {
        let bytes = self.bytes()?;
        // SAFETY: `detach` says that the memory stays valid and ordered until the transfer is over.
        unsafe { self.disk.start(number, bytes) };
        Ok(())
    }
}

/// Profile, key and stream under which the time of a call is counted when it has run.
pub struct Timer {
    /// The profile.
    pub profile: Arc<Profile>,
    /// Key under which it is counted.
    pub key: KernelKey,
    /// The stream on which it runs.
    pub stream: Stream,
}

impl Timer {
    /// Adds the time of a call that ends now.
    pub fn add(&self, time: Duration) {
        self.profile.add(self.key, time);
        self.profile.add_span(self.stream, &self.key, time);
    }
}

/// Executes calls on streams.
pub trait Backend: Send + Sync {
    /// Short name for people: `cpu`, `simulated`, `meta`.
    fn name(&self) -> &'static str;

    /// Threads that one kernel uses.
    fn threads(&self) -> usize;

    /// Returns whether the host may read and write tensors in device memory, when no kernel does.
    fn is_host_addressable(&self) -> bool;

    /// Issues a call to a stream.
    ///
    /// The memory of its operands stays valid, and unused by other streams except as events order them, until the
    /// call has run: [`Device`](crate::Device) and the arenas keep that.
    fn launch(&self, stream: Stream, call: Call);

    /// Issues a copy of host bytes into a tensor. `from` is read before this returns; the time of the copy goes to `timer`.
    fn upload(&self, stream: Stream, from: &[u8], to: ViewMut, site: Site, timer: Option<Timer>);

    /// Issues a transfer to the disk stream. Its tensors are kept as the operands of [`Backend::launch`] are.
    fn transfer(&self, transfer: DiskTransfer);

    /// The end of everything that was issued to `stream` so far.
    fn record(&self, stream: Stream) -> StreamEvent;

    /// Makes work that is issued to `stream` from here on run after `event`.
    fn wait(&self, stream: Stream, event: StreamEvent);

    /// Blocks the host until `event` has happened.
    ///
    /// # Errors
    /// The first failure of the device, if there was one. No call that was issued before `event` runs any more when
    /// this returns, whatever it returns.
    fn synchronize(&self, event: StreamEvent) -> Result<(), DeviceError>;

    /// Links from the memory of the device to that of other ranks' devices; None if only the host connects them.
    fn links(&self) -> Option<&dyn Links> {
        None
    }

    /// The host, after `call`, may from here on read (or, with [`Access::Write`], also write) a tensor in its own
    /// memory that the device used. A backend that looks for races checks that the host waited for every such use.
    ///
    /// # Errors
    /// When it did not.
    fn check_host_access(&self, _: View, _: Access, _call: &'static str, _: Site) -> Result<(), DeviceError> {
        Ok(())
    }
}
