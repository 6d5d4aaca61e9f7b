//! Mistakes that a decorating backend makes: it drops, moves or misdirects one call on its way to the device.

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use phalanx_plan::trace::{Site, Stream};
use phalanx_simulated::Simulated;
use phalanx_tensor::backend::{Call, DiskTransfer, StreamEvent, Timer};
use phalanx_tensor::operations::{Copy, Elementwise, Operation};
use phalanx_tensor::{Access, Backend, DeviceError, View, ViewMut};

use super::chain::{self, Numbers, PLANTED_ROUND};

/// A mistake, made once in the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plant {
    UploadUnseenByKernels,
    UploadBeforeKernelsAreDone,
    CopyBeforeKernelsAreDone,
    FetchBeforeKernelsAreDone,
    EventRecordedTooEarly,
    WaitAfterTheCopy,
    KernelOnAnotherStream,
    CopyOnAnotherStream,
    TwoCopiesIntoOneHostTensor,
    DeviceTensorReusedWhileCopied,
    HostTensorWrittenWhileCopied,
    FetchReadEarly,
    HostWaitsForAnEarlierEvent,
    DownloadReadEarly,
    HostTensorWrittenOnItsWayToDisk,
    DiskReadEarly,
    HostReadsDeviceMemory,
}

use Plant::{
    CopyBeforeKernelsAreDone, CopyOnAnotherStream, DeviceTensorReusedWhileCopied, DiskReadEarly,
    DownloadReadEarly, EventRecordedTooEarly, FetchBeforeKernelsAreDone, FetchReadEarly,
    HostReadsDeviceMemory, HostTensorWrittenOnItsWayToDisk, HostTensorWrittenWhileCopied,
    HostWaitsForAnEarlierEvent, KernelOnAnotherStream, TwoCopiesIntoOneHostTensor,
    UploadBeforeKernelsAreDone, UploadUnseenByKernels, WaitAfterTheCopy,
};

impl Plant {
    /// All of them, with what each does.
    pub const ALL: [(Plant, &'static str); 17] = [
        (UploadUnseenByKernels, "kernels do not wait for an upload"),
        (UploadBeforeKernelsAreDone, "an upload does not wait for the kernels that read its target"),
        (CopyBeforeKernelsAreDone, "a copy to the host does not wait for the kernels"),
        (FetchBeforeKernelsAreDone, "a late fetch does not wait for the kernels"),
        (EventRecordedTooEarly, "an event is recorded one kernel too early"),
        (WaitAfterTheCopy, "a wait is issued after the copy instead of before it"),
        (KernelOnAnotherStream, "a kernel is issued to a stream of its own"),
        (CopyOnAnotherStream, "a copy is issued to a stream that no event orders"),
        (TwoCopiesIntoOneHostTensor, "two copies write one host tensor"),
        (
            DeviceTensorReusedWhileCopied,
            "a device tensor is freed and its place reused while a copy reads it",
        ),
        (HostTensorWrittenWhileCopied, "the host overwrites a tensor while a copy reads it"),
        (FetchReadEarly, "a late fetch is read before it was waited for"),
        (HostWaitsForAnEarlierEvent, "the host waits for an event before that of its fetch"),
        (DownloadReadEarly, "a download is read before it was waited for"),
        (HostTensorWrittenOnItsWayToDisk, "the host overwrites a tensor while it is written to disk"),
        (DiskReadEarly, "a tensor from disk is read before it was waited for"),
        (HostReadsDeviceMemory, "the host reads device memory"),
    ];
}

/// Result of a run of the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Right,
    Race,
    WrongBits,
    Fault,
}

/// Variable that makes a child process run the chain with a host read of device memory.
pub const HOST_READ: &str = "PHALANX_TEST_HOST_READ";

/// Runs the chain with a plant and one seed. `child` starts a process that calls [`read_device_memory`].
pub fn outcome(
    plant: Option<Plant>,
    seed: u64,
    check_races: bool,
    right: &Numbers,
    child: &dyn Fn() -> Command,
) -> Outcome {
    if plant == Some(HostReadsDeviceMemory) {
        return in_a_child(seed, check_races, child);
    }
    let mut last = chain::downloaded();
    let decorate = |simulated| -> Arc<dyn Backend> { Arc::new(Planted::new(simulated, plant)) };
    let device = chain::simulated(chain::options(seed, check_races), decorate);
    match chain::run(&device, &mut last) {
        Ok(numbers) if numbers.bits() == right.bits() => Outcome::Right,
        Ok(_) => Outcome::WrongBits,
        Err(error) if error.reason.starts_with("data race") => Outcome::Race,
        Err(error) => panic!("{plant:?}, seed {seed}: {error}"),
    }
}

/// SIGSEGV on Linux.
const SEGMENTATION_FAULT: i32 = 11;

fn in_a_child(seed: u64, check_races: bool, child: &dyn Fn() -> Command) -> Outcome {
    use std::os::unix::process::ExitStatusExt;
    let mut command = child();
    command.env(HOST_READ, format!("{seed} {check_races}")).stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = phalanx_testing::process::finish(command.spawn().unwrap());
    match output.status.signal() {
        Some(SEGMENTATION_FAULT) => Outcome::Fault,
        _ => Outcome::Right,
    }
}

/// In the child process: the host reads a tensor in device memory. Does nothing elsewhere.
pub fn read_device_memory() {
    let Ok(text) = std::env::var(HOST_READ) else { return };
    let (seed, check_races) = text.split_once(' ').unwrap();
    let options = chain::options(seed.parse().unwrap(), check_races.parse().unwrap());
    let device = chain::simulated(options, |simulated| simulated);
    let category = phalanx_tensor::Category::Activations;
    let mut tensor = device.alloc(phalanx_tensor::DType::F32, [16], category, "read by the host");
    device.fill(tensor.view_mut(), 1.0);
    device.synchronize().unwrap();
    std::hint::black_box(tensor.view().as_slice::<f32>()[3]);
}

/// Which call of a kind the plant changes: counted from 1.
#[derive(Default)]
struct Nth(AtomicUsize);

impl Nth {
    /// Counts a call of the kind; whether it is number `n`.
    fn is(&self, n: usize) -> bool {
        self.0.fetch_add(1, Ordering::Relaxed) + 1 == n
    }
}

/// Passes every call on, but for its plant.
struct Planted {
    inner: Arc<Simulated>,
    plant: Option<Plant>,
    matching: Nth,
    /// A wait that is issued late.
    held_wait: Mutex<Option<(Stream, StreamEvent)>>,
    /// True if the next check of the host's accesses is left out.
    skips_check: AtomicBool,
    /// For the copy too many.
    zeros: Vec<u8>,
}

impl Planted {
    fn new(inner: Arc<Simulated>, plant: Option<Plant>) -> Planted {
        Planted {
            inner,
            plant,
            matching: Nth::default(),
            held_wait: Mutex::default(),
            skips_check: AtomicBool::new(false),
            zeros: vec![0; 1 << 16],
        }
    }

    /// Returns whether this is the call that the plant changes: number `n` of those that come here with `plant`.
    fn is_hit(&self, plant: Plant, n: usize) -> bool {
        self.plant == Some(plant) && self.matching.is(n)
    }
}

impl Backend for Planted {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn threads(&self) -> usize {
        self.inner.threads()
    }

    fn is_host_addressable(&self) -> bool {
        self.inner.is_host_addressable()
    }

    fn launch(&self, stream: Stream, mut call: Call) {
        if call.name == "layer_norm" && self.is_hit(KernelOnAnotherStream, PLANTED_ROUND) {
            return self.inner.launch(Stream::Communication, call);
        }
        if call.name == "copy_to_host" {
            if self.is_hit(CopyOnAnotherStream, PLANTED_ROUND) {
                return self.inner.launch(Stream::Communication, call);
            }
            if self.is_hit(TwoCopiesIntoOneHostTensor, PLANTED_ROUND)
                && let Operation::Elementwise(Elementwise::Copy(copy)) = &mut call.operation
            {
                let from = View::over_bytes(&self.zeros[..copy.to.bytes()], copy.to.dtype());
                let operation = Copy { from, to: copy.to.reborrow() }.into();
                let second = Call { operation, name: "second copy", site: call.site, timer: None };
                self.inner.launch(Stream::Communication, second);
            }
        }
        self.inner.launch(stream, call);
        let held = self.held_wait.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some((stream, event)) = held {
            self.inner.wait(stream, event);
        }
    }

    fn upload(&self, stream: Stream, from: &[u8], to: ViewMut, site: Site, timer: Option<Timer>) {
        self.inner.upload(stream, from, to, site, timer);
    }

    fn transfer(&self, transfer: DiskTransfer) {
        self.inner.transfer(transfer);
    }

    fn record(&self, stream: Stream) -> StreamEvent {
        self.inner.record(stream)
    }

    fn wait(&self, stream: Stream, event: StreamEvent) {
        // In each round: ToDevice waits for kernels before the upload and before the copy of the weights; kernels wait for
        // either; ToHost waits for kernels before the copy out and before the fetch.
        let first = 2 * PLANTED_ROUND - 1;
        match (stream, event.stream) {
            (Stream::Compute, Stream::ToDevice) if self.is_hit(UploadUnseenByKernels, first) => {}
            (Stream::ToDevice, Stream::Compute) if self.is_hit(UploadBeforeKernelsAreDone, first) => {}
            (Stream::ToHost, Stream::Compute) if self.is_hit(CopyBeforeKernelsAreDone, first) => {}
            (Stream::ToHost, Stream::Compute) if self.is_hit(FetchBeforeKernelsAreDone, first + 1) => {}
            (Stream::ToHost, Stream::Compute) if self.is_hit(EventRecordedTooEarly, first) => {
                self.inner.wait(stream, StreamEvent { number: event.number - 1, ..event });
            }
            (Stream::ToHost, Stream::Compute) if self.is_hit(WaitAfterTheCopy, first) => {
                *self.held_wait.lock().unwrap_or_else(PoisonError::into_inner) = Some((stream, event));
            }
            _ => self.inner.wait(stream, event),
        }
    }

    fn synchronize(&self, event: StreamEvent) -> Result<(), DeviceError> {
        // In each round the host waits for the copy of the weights, the copy out, and the fetch; in each round
        // also for the disk twice; in the end for the download.
        let first = 2 * PLANTED_ROUND - 1;
        let downloads = 2 * 3 + 1;
        match event.stream {
            Stream::ToDevice if self.is_hit(HostTensorWrittenWhileCopied, PLANTED_ROUND) => Ok(()),
            Stream::ToHost if self.is_hit(DeviceTensorReusedWhileCopied, first) => {
                self.skips_check.store(true, Ordering::Relaxed);
                Ok(())
            }
            Stream::ToHost if self.is_hit(FetchReadEarly, first + 1) => Ok(()),
            Stream::ToHost if self.is_hit(HostWaitsForAnEarlierEvent, first + 1) => {
                self.inner.synchronize(StreamEvent { number: event.number - 1, ..event })
            }
            Stream::ToHost if self.is_hit(DownloadReadEarly, downloads) => Ok(()),
            Stream::Disk if self.is_hit(HostTensorWrittenOnItsWayToDisk, first) => Ok(()),
            Stream::Disk if self.is_hit(DiskReadEarly, first + 1) => Ok(()),
            _ => self.inner.synchronize(event),
        }
    }

    fn check_host_access(
        &self,
        tensor: View,
        access: Access,
        call: &'static str,
        site: Site,
    ) -> Result<(), DeviceError> {
        if self.skips_check.swap(false, Ordering::Relaxed) {
            return Ok(());
        }
        self.inner.check_host_access(tensor, access, call, site)
    }
}
