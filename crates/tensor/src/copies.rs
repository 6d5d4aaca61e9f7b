//! Copies between memories: uploads, downloads, staging, and numbers that are read late.
//!
//! Copies run on streams of their own. Each starts after everything that the compute stream was given before it.
//! A copy of tensors owns them until it is waited for ([`PendingCopy`]), so kernels that are issued meanwhile cannot use
//! them and run beside it; in the meantime the arenas count its ranges as in flight. Later kernels wait for an upload, which
//! borrows its target only. The dry run records each copy with its bytes, its stream and the events that order it.
//!
//! Copies to and from disk do not wait for kernels, so that many can be started ahead of their use, or finish behind
//! it: whoever waits for one gets its tensors back, and only then can a kernel or another copy use them.

use std::sync::Arc;

use phalanx_plan::trace::{Category, DType, Event, Memory, Rate, Site, Stream};

use crate::access::Access;
use crate::backend::{Call, DeviceError, DiskTransfer, StreamEvent};
use crate::buffer::Tensor;
use crate::device::Device;
use crate::flights::InFlight;
use crate::operation::{Describe, Price};
use crate::operations::Copy;
use crate::view::{Element, View, ViewMut};

/// A copy between memories that was started: it owns both tensors until it is done.
#[must_use = "a copy is over only when it was waited for"]
pub struct PendingCopy {
    device: Device,
    tensors: Option<(Tensor, Tensor)>,
    flights: Option<[InFlight; 2]>,
    done: StreamEvent,
}

impl PendingCopy {
    /// Blocks until the copy is over; gives back the source and the target.
    ///
    /// # Errors
    /// When the device failed.
    #[track_caller]
    pub fn wait(mut self) -> Result<(Tensor, Tensor), DeviceError> {
        let site = Site::caller();
        let backend = &self.device.backend;
        backend.synchronize(self.done)?;
        // Their owner may write either from here on.
        let tensors = self.tensors.iter().flat_map(|(from, to)| [from, to]);
        for tensor in tensors.filter(|tensor| tensor.memory() == Memory::Host) {
            backend.check_host_access(tensor.view(), Access::Write, "PendingCopy::wait", site)?;
        }
        // The ranges have landed: their tensors may be freed.
        self.flights = None;
        Ok(self.tensors.take().expect("taken once, here"))
    }

    /// The event that ends the copy.
    pub fn done(&self) -> StreamEvent {
        self.done
    }
}

impl Drop for PendingCopy {
    fn drop(&mut self) {
        let Some(tensors) = self.tensors.take() else { return };
        if self.device.backend.synchronize(self.done).is_err() {
            // The device is lost and nothing runs any more; what it may have left half done is not used again.
            std::mem::forget(tensors);
        }
        // Before the tensors go: they are in flight no longer.
        self.flights = None;
    }
}

/// Numbers on their way to the host.
#[must_use = "a number is there only when it was waited for"]
pub struct Fetch<'a> {
    device: &'a Device,
    numbers: Vec<Tensor>,
    flights: Vec<InFlight>,
    done: StreamEvent,
    sources: std::marker::PhantomData<View<'a>>,
}

impl Fetch<'_> {
    /// Blocks until the numbers have arrived. Zeros in a dry run.
    ///
    /// # Errors
    /// When the device failed.
    #[track_caller]
    pub fn wait(mut self) -> Result<Vec<f32>, DeviceError> {
        let site = Site::caller();
        let backend = &self.device.backend;
        backend.synchronize(self.done)?;
        for number in &self.numbers {
            backend.check_host_access(number.view(), Access::Read, "Fetch::wait", site)?;
        }
        let numbers = std::mem::take(&mut self.numbers);
        self.flights.clear();
        Ok(numbers.iter().flat_map(Tensor::host_numbers).collect())
    }
}

impl Drop for Fetch<'_> {
    fn drop(&mut self) {
        let numbers = std::mem::take(&mut self.numbers);
        if !numbers.is_empty() && self.device.backend.synchronize(self.done).is_err() {
            // As for a copy of tensors.
            std::mem::forget(numbers);
        }
        self.flights.clear();
    }
}

impl Device {
    /// Host elements into device memory; `from` is read before this returns. Later kernels see them.
    #[track_caller]
    pub fn upload<T: Element>(&self, from: &[T], to: ViewMut) {
        assert_eq!((T::DTYPE, from.len()), (to.dtype(), to.elements()), "upload into {to:?}");
        let (site, bytes, memories) = (Site::caller(), to.bytes(), [Memory::Host, Memory::Device]);
        if let Some(recorder) = self.recorder().filter(|recorder| recorder.is_placing()) {
            recorder.follow_write(&to, false);
        }
        self.begin_copy("upload", memories, bytes);
        let timer = self.timer("upload", Price::copy(memories, bytes), Stream::ToDevice);
        self.backend.upload(Stream::ToDevice, bytemuck::cast_slice(from), to, site, timer);
        self.compute_after(Stream::ToDevice);
    }

    /// Device memory into host elements, after everything that was issued before. Nothing is written in a dry run.
    ///
    /// # Errors
    /// When the device failed.
    #[track_caller]
    pub fn download<T: Element>(&self, from: View, to: &mut [T]) -> Result<(), DeviceError> {
        assert_eq!((T::DTYPE, to.len()), (from.dtype(), from.elements()), "download from {from:?}");
        let site = Site::caller();
        let mut into = ViewMut::over(to);
        let memories = [Memory::Device, Memory::Host];
        let done = self.start_copy("download", memories, from, into.reborrow(), site);
        self.backend.synchronize(done)?;
        self.backend.check_host_access(into.as_view(), Access::Read, "download", site)
    }

    /// Starts to copy a device tensor into a host tensor of the same element type and length.
    #[track_caller]
    pub fn copy_to_host(&self, from: Tensor, to: Tensor) -> PendingCopy {
        self.copy_to_host_at(from, to, Site::caller())
    }

    /// As [`Device::copy_to_host`], on behalf of a caller at `site`.
    pub fn copy_to_host_at(&self, from: Tensor, to: Tensor, site: Site) -> PendingCopy {
        assert_eq!([from.memory(), to.memory()], [Memory::Device, Memory::Host], "copy_to_host");
        self.copy_tensors("copy_to_host", from, to, site)
    }

    /// Starts to copy a host tensor into a device tensor of the same element type and length. Kernels that are issued before
    /// it is waited for run beside it.
    #[track_caller]
    pub fn copy_to_device(&self, from: Tensor, to: Tensor) -> PendingCopy {
        self.copy_to_device_at(from, to, Site::caller())
    }

    /// As [`Device::copy_to_device`], on behalf of a caller at `site`.
    pub fn copy_to_device_at(&self, from: Tensor, to: Tensor, site: Site) -> PendingCopy {
        assert_eq!([from.memory(), to.memory()], [Memory::Host, Memory::Device], "copy_to_device");
        self.copy_tensors("copy_to_device", from, to, site)
    }

    /// Starts to write a tensor to a disk tensor of the same element type and length. `from` lies in host memory, or in
    /// device memory that the host can address.
    #[track_caller]
    pub fn copy_to_disk(&self, from: Tensor, to: Tensor) -> PendingCopy {
        self.check_disk_copy("copy_to_disk", from.memory(), to.memory());
        self.copy_tensors("copy_to_disk", from, to, Site::caller())
    }

    /// Starts to read a disk tensor into a tensor of the same element type and length. `to` lies in host memory, or in
    /// device memory that the host can address.
    #[track_caller]
    pub fn copy_from_disk(&self, from: Tensor, to: Tensor) -> PendingCopy {
        self.check_disk_copy("copy_from_disk", to.memory(), from.memory());
        self.copy_tensors("copy_from_disk", from, to, Site::caller())
    }

    #[track_caller]
    fn check_disk_copy(&self, name: &str, other: Memory, disk: Memory) {
        assert_eq!(disk, Memory::Disk, "{name}");
        let is_addressable = other == Memory::Host || (other == Memory::Device && self.is_host_addressable());
        assert!(is_addressable, "{name}: {} memory is copied through host memory", other.name());
    }

    /// Starts to bring single f32 numbers to the host, after everything that was issued before.
    #[track_caller]
    pub fn fetch_later<'a>(&'a self, from: &[View<'a>]) -> Fetch<'a> {
        let site = Site::caller();
        let (mut numbers, mut flights) = (Vec::new(), Vec::new());
        let mut done = StreamEvent { stream: Stream::ToHost, number: 0 };
        for number in from {
            assert_eq!((number.dtype(), number.elements()), (DType::F32, 1), "one number, not {number:?}");
            if let Some(recorder) = self.recorder().filter(|recorder| recorder.is_placing()) {
                recorder.follow_fetch(*number, site);
            }
            let mut to =
                self.host_arena().alloc(DType::F32, [1].into(), Category::Workspace, "fetched", site);
            flights.push(self.arena().in_flight(number.address(), 4, Access::Read, "fetch", site));
            flights.push(to.in_flight(Access::Write, "fetch", site));
            done = self.start_copy("fetch", [Memory::Device, Memory::Host], *number, to.view_mut(), site);
            numbers.push(to);
        }
        Fetch { device: self, numbers, flights, done, sources: std::marker::PhantomData }
    }

    /// Single f32 numbers, with one wait for all of them. Zeros in a dry run.
    ///
    /// # Errors
    /// When the device failed.
    #[track_caller]
    pub fn fetch<const N: usize>(&self, from: [View; N]) -> Result<[f32; N], DeviceError> {
        let numbers = self.fetch_later(&from).wait()?;
        Ok(std::array::from_fn(|i| numbers[i]))
    }

    /// Blocks until everything that was issued to the device is over.
    ///
    /// # Errors
    /// When the device failed.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        [Stream::Compute, Stream::ToDevice, Stream::ToHost, Stream::Disk, Stream::Host]
            .into_iter()
            .try_for_each(|stream| self.backend.synchronize(self.backend.record(stream)))
    }

    /// Makes work that is issued to `stream` from here on run after `event`, which may be of any stream: [`PendingCopy::done`],
    /// [`PendingHostWork::done`](crate::PendingHostWork::done). The host goes on at once if the device lets its streams wait for
    /// each other.
    pub fn run_after(&self, event: StreamEvent, stream: Stream) {
        self.backend.wait(stream, event);
    }

    /// Later work of the compute stream runs after what was issued to `stream` so far.
    fn compute_after(&self, stream: Stream) {
        let done = self.backend.record(stream);
        self.backend.wait(Stream::Compute, done);
    }

    fn copy_tensors(&self, name: &'static str, from: Tensor, mut to: Tensor, site: Site) -> PendingCopy {
        let memories = [from.memory(), to.memory()];
        let flights = [from.in_flight(Access::Read, name, site), to.in_flight(Access::Write, name, site)];
        let done = self.start_copy(name, memories, from.view(), to.view_mut(), site);
        PendingCopy { device: self.clone(), tensors: Some((from, to)), flights: Some(flights), done }
    }

    /// Issues a copy on the stream between two memories, after what the compute stream was given so far.
    pub(crate) fn start_copy(
        &self,
        name: &'static str,
        memories: [Memory; 2],
        from: View,
        to: ViewMut,
        site: Site,
    ) -> StreamEvent {
        let operation = Copy { from, to };
        operation.check();
        if let Some(recorder) = self.recorder().filter(|recorder| recorder.is_placing()) {
            operation.follow(recorder, site);
        }
        let bytes = operation.to.bytes();
        let stream = self.begin_copy(name, memories, bytes);
        let timer = self.timer(name, Price::copy(memories, bytes), stream);
        match stream {
            Stream::Disk => {
                // None on a device that only records.
                if let Some(disk) = self.disk_arena().disk() {
                    let disk = Arc::clone(disk);
                    self.backend.transfer(DiskTransfer { disk, copy: operation, name, site, timer });
                }
            }
            _ => self.backend.launch(stream, Call { operation: operation.into(), name, site, timer }),
        }
        self.backend.record(stream)
    }

    /// Orders the stream of a copy after the compute stream, and records the copy.
    fn begin_copy(&self, name: &'static str, memories: [Memory; 2], bytes: usize) -> Stream {
        let stream = match memories {
            [Memory::Disk, _] | [_, Memory::Disk] => Stream::Disk,
            [_, Memory::Device] => Stream::ToDevice,
            [_, Memory::Host] => Stream::ToHost,
        };
        // Kernels use no host memory: a copy between host and disk has no kernel to wait for.
        if memories.contains(&Memory::Device) {
            let computed = self.backend.record(Stream::Compute);
            self.backend.wait(stream, computed);
        }
        if let Some(recorder) = self.recorder() {
            let ([from, to], rate) = (memories, Rate::of_copy(memories));
            recorder.push(Event::Copy { name, from, to, bytes: bytes as u64, rate, stream });
        }
        stream
    }
}

impl Tensor {
    /// The elements of a tensor in host memory. Nothing may be in flight to it.
    #[track_caller]
    pub fn host_slice<T: Element>(&self) -> &[T] {
        assert_eq!(self.memory(), Memory::Host, "the host reads tensors in its own memory only");
        self.view().as_slice()
    }

    /// The elements of a tensor in host memory, to write. Nothing may be in flight from or to it.
    #[track_caller]
    pub fn host_slice_mut<T: Element>(&mut self) -> &mut [T] {
        assert_eq!(self.memory(), Memory::Host, "the host writes tensors in its own memory only");
        self.view_mut().into_slice()
    }

    /// The f32 numbers of a tensor in host memory; zeros in a dry run. Nothing may be in flight to it.
    pub fn host_numbers(&self) -> Vec<f32> {
        match self.view().address().real() {
            Some(_) => self.host_slice().to_vec(),
            None => vec![0.0; self.shape().elements()],
        }
    }
}
