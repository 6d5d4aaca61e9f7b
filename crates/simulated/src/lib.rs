//! A simulated accelerator, for tests on machines without a GPU.
//!
//! [`Simulated`] behaves as an accelerator with a memory of its own does, and computes with the kernels of a processor:
//! - **Memory** (`memory`): bounded, and mapped twice. Tensors carry addresses of the mapping without access, so the host
//!   faults where it reads or writes one; the workers compute in the other mapping.
//! - **Streams** (`streams`): a worker thread for each stream takes its calls in order. Before each call it sleeps for a
//!   time drawn from the seed, so that streams finish in any order that their events allow. A copy between
//!   memories takes the time that its bytes take at a given rate.
//! - **Failures** (`failures`): requested by the number of a call.
//! - **Race checker** (`races`): finds two accesses to the same memory that no event orders, when they are issued.

mod delays;
mod factory;
mod failures;
mod memory;
mod races;
mod streams;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use phalanx_plan::trace::{Site, Stream};
use phalanx_tensor::address::Address;
use phalanx_tensor::backend::{Call, DiskTransfer, StreamEvent, Timer};
use phalanx_tensor::operation::Operands;
use phalanx_tensor::operations::{Copy, Elementwise, Operation};
use phalanx_tensor::region::Region;
use phalanx_tensor::{Access, Arena, Backend, Device, DeviceError, Kernels, Memory, View, ViewMut};

pub use factory::SimulatedFactory;
pub use failures::Failure;
pub use memory::{DeviceMemory, Error};

use races::Caller;
use streams::{Body, Run, Streams, Work};

/// The device's name, in errors and reports.
pub const NAME: &str = "simulated";

/// Options of a [`Simulated`] device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Size of its memory, in bytes.
    pub memory_bytes: u64,
    /// Rate of copies between host and device, in bytes per second; above zero. Infinite: copies take no extra time.
    pub copy_bytes_per_s: f64,
    /// Seed of the delays.
    pub seed: u64,
    /// Longest delay before a call starts; each delay is drawn evenly from zero to this.
    pub max_delay: Duration,
    /// Share of the calls that are delayed, from 0 to 1; which ones is drawn from the seed.
    pub delayed_share: f64,
    /// True if two accesses without a defined order are a failure.
    pub check_races: bool,
}

impl Options {
    /// A device with `memory_bytes` of memory: copies at 16 GB/s, delays up to 200 microseconds from seed 0, and the
    /// race checker.
    pub fn new(memory_bytes: u64) -> Options {
        Options {
            memory_bytes,
            copy_bytes_per_s: 16e9,
            seed: 0,
            max_delay: Duration::from_micros(200),
            delayed_share: 1.0,
            check_races: true,
        }
    }
}

/// The executor of a simulated accelerator. When it is dropped, it runs what was issued to it, and ends its threads.
pub struct Simulated {
    streams: Streams,
    /// Addresses that tensors carry.
    addresses: Range<usize>,
    /// From there to where the workers compute.
    delta: isize,
    kernels: Arc<dyn Kernels>,
    options: Options,
    /// The workers' mapping. Declared last: dropped after the threads have ended.
    _memory: Region,
}

impl Simulated {
    /// A device that computes with `kernels`, and its memory, from which one arena is made.
    ///
    /// # Errors
    /// When the system gives it no memory or no threads.
    ///
    /// # Panics
    /// When `options.copy_bytes_per_s` is not above zero.
    pub fn new(kernels: Arc<dyn Kernels>, options: Options) -> Result<(Arc<Simulated>, DeviceMemory), Error> {
        assert!(options.copy_bytes_per_s > 0.0, "copies at {} bytes per second", options.copy_bytes_per_s);
        let (memory, region) = DeviceMemory::map(options.memory_bytes)?;
        let addresses = memory.addresses();
        let delta = (region.base().addr() as isize).wrapping_sub(addresses.start as isize);
        let streams = Streams::start(options)?;
        let simulated = Simulated { streams, addresses, delta, kernels, options, _memory: region };
        Ok((Arc::new(simulated), memory))
    }

    /// A device without a plan, for tests: it hands out its memory as it is asked for, and the host's memory is the heap.
    ///
    /// # Errors
    /// When the system gives the device no memory or no threads.
    pub fn unplanned_device(kernels: Arc<dyn Kernels>, options: Options) -> Result<Device, Error> {
        let (simulated, memory) = Simulated::new(kernels, options)?;
        Ok(Device::with_memories(simulated, memory.unplanned(), Arena::heap_of(Memory::Host)))
    }

    /// Makes a later call fail. Calls and uploads count from 1, in the order in which they are issued to the device.
    pub fn fail_at(&self, call: u64, failure: Failure) {
        self.streams.plan_failure(call, failure);
    }

    /// Number of calls and uploads that were issued so far.
    pub fn calls(&self) -> u64 {
        self.streams.calls()
    }

    /// Issues a call whose operands still have the addresses of their tensors. `uploaded` are bytes that it reads.
    fn issue(&self, stream: Stream, mut call: Call<'static>, uploaded: Vec<u64>) {
        let by = Caller { call: call.name, site: call.site };
        let mut uses = Vec::new();
        let (mut on_device, mut on_host) = (false, false);
        call.operation.visit(&mut |operand| {
            if operand.bytes == 0 {
                return;
            }
            let start = place(*operand.address);
            uses.push((start..start + operand.bytes, operand.access));
            if self.addresses.contains(&start) {
                on_device = true;
                *operand.address = operand.address.moved(self.delta);
            } else {
                on_host = true;
            }
        });
        let is_copy = matches!(&call.operation, Operation::Elementwise(Elementwise::Copy(_)));
        // The operands of a copy have one length.
        let bytes = if on_device && on_host { uses.first().map_or(0, |(range, _)| range.len()) } else { 0 };
        let refused = match stream {
            Stream::Host => on_device.then(|| "an operation of the host was given device memory".to_string()),
            _ => (on_host && !is_copy).then(|| "a kernel was given host memory".to_string()),
        };
        let Call { operation, timer, .. } = call;
        let between_memories = self.copy_time(bytes);
        let run = self.run(Body::Kernel { operation, timer, uploaded }, by, between_memories, is_copy);
        self.streams.issue(stream, Work { run, uses, refused });
    }

    fn run(&self, body: Body, by: Caller, between_memories: Duration, is_copy: bool) -> Run {
        let (kernels, options) = (Arc::clone(&self.kernels), self.options);
        Run { body: Some(body), by, between_memories, is_copy, failure: None, kernels, options }
    }

    fn copy_time(&self, bytes: usize) -> Duration {
        let seconds = bytes as f64 / self.options.copy_bytes_per_s;
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }
}

/// Position of an operand: its address in the process, or on disk a number above all addresses.
fn place(address: Address) -> usize {
    usize::try_from(address.number()).expect("a device with memory has addresses of 64 bits")
}

impl Backend for Simulated {
    fn name(&self) -> &'static str {
        NAME
    }

    fn threads(&self) -> usize {
        self.kernels.threads()
    }

    fn is_host_addressable(&self) -> bool {
        false
    }

    fn launch(&self, stream: Stream, call: Call) {
        let Call { operation, name, site, timer } = call;
        // SAFETY: by the contract of `launch`, the caller keeps the operands valid and ordered; the mapping in which the
        // workers use device memory lives as long as their threads.
        let operation = unsafe { operation.detach() };
        self.issue(stream, Call { operation, name, site, timer }, Vec::new());
    }

    fn upload(&self, stream: Stream, from: &[u8], to: ViewMut, site: Site, timer: Option<Timer>) {
        let start = from.as_ptr().addr();
        self.streams.host_reads(&(start..start + from.len()), Caller { call: "upload", site });
        // Words, so that elements of every type are aligned.
        let mut words = vec![0u64; from.len().div_ceil(8)];
        let bytes = &mut bytemuck::cast_slice_mut(&mut words)[..from.len()];
        bytes.copy_from_slice(from);
        let dtype = to.dtype();
        let operation = Operation::from(Copy { from: View::over_bytes(bytes, dtype), to });
        // SAFETY: the words go with the call, and their elements do not move; `to` is kept as for `launch`.
        let operation = unsafe { operation.detach() };
        self.issue(stream, Call { operation, name: "upload", site, timer }, words);
    }

    fn transfer(&self, transfer: DiskTransfer) {
        let by = Caller { call: transfer.name, site: transfer.site };
        // SAFETY: by the contract of `transfer`, the caller keeps the tensors valid and ordered.
        let mut transfer = unsafe { transfer.detach() };
        let (mut uses, mut on_device) = (Vec::new(), false);
        transfer.copy.visit(&mut |operand| {
            let start = place(*operand.address);
            uses.push((start..start + operand.bytes, operand.access));
            on_device |= self.addresses.contains(&start);
        });
        let refused = on_device.then(|| "a disk was given device memory".to_string());
        let run = self.run(Body::Transfer(transfer), by, Duration::ZERO, true);
        self.streams.issue(Stream::Disk, Work { run, uses, refused });
    }

    fn record(&self, stream: Stream) -> StreamEvent {
        self.streams.record(stream)
    }

    fn wait(&self, stream: Stream, event: StreamEvent) {
        self.streams.wait(stream, event);
    }

    fn synchronize(&self, event: StreamEvent) -> Result<(), DeviceError> {
        self.streams.synchronize(event)
    }

    fn check_host_access(
        &self,
        tensor: View,
        access: Access,
        call: &'static str,
        site: Site,
    ) -> Result<(), DeviceError> {
        let start = tensor.address().as_ptr().addr();
        self.streams.check_host_access(&(start..start + tensor.bytes()), access, Caller { call, site })
    }
}
