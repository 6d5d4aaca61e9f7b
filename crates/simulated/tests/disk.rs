//! The disk memory of planned devices: chunks of numbers stream through a window of host memory, read ahead of their
//! use and written back behind it, as when optimizer states are kept on disk. The same bits on the processor and on the
//! simulated device; in each memory the measured peak is the planned one.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use phalanx_cpu::{Cpu, CpuFactory};
use phalanx_plan::trace::{Event, PhaseName, Stream, Trace};
use phalanx_plan::{MemoryPlan, plan_memory_of};
use phalanx_simulated::{Failure, Options, Simulated, SimulatedFactory};
use phalanx_tensor::operations::{Elementwise, Operation};
use phalanx_tensor::{
    Arena, Category, DType, Device, DeviceError, DeviceFactory, DeviceRequest, DiskMemory, DiskOptions,
    Kernels, Memory, PendingCopy, Region, Tensor,
};

const CHUNKS: usize = 7;
const ELEMENTS: usize = 1000;
/// Chunks that are read before they are used.
const AHEAD: usize = 2;
/// Host buffers: one in use, those that are read ahead, and two that are written back.
const WINDOW: usize = 1 + AHEAD + 2;
const STEPS: usize = 3;

/// Numbers on disk, and the window through which they pass.
struct Offloaded {
    /// None while a chunk is on its way.
    chunks: Vec<Option<Tensor>>,
    /// Host buffers that nothing uses.
    free: Vec<Tensor>,
    reads: VecDeque<PendingCopy>,
    /// With the number of the chunk.
    writes: VecDeque<(usize, PendingCopy)>,
}

impl Offloaded {
    /// Chunk c begins with the number c in every element.
    fn new(device: &Device) -> Result<Offloaded, DeviceError> {
        let stored = |_| device.alloc_disk(DType::F32, [ELEMENTS], Category::Optimizer, "chunk");
        let buffer = |_| device.alloc_host(DType::F32, [ELEMENTS], Category::Communication, "window");
        let chunks = (0..CHUNKS).map(stored).map(Some).collect();
        let free = (0..WINDOW).map(buffer).collect();
        let mut all = Offloaded { chunks, free, reads: VecDeque::new(), writes: VecDeque::new() };
        for chunk in 0..CHUNKS {
            let mut staged = device.alloc(DType::F32, [ELEMENTS], Category::Workspace, "initial");
            device.fill(staged.view_mut(), chunk as f32);
            let buffer = all.buffer()?;
            let (_, buffer) = device.copy_to_host(staged, buffer).wait()?;
            all.write_back(device, chunk, buffer);
        }
        all.finish()?;
        Ok(all)
    }

    /// A buffer that nothing uses: waits for the oldest chunk that is written back when there is no other.
    fn buffer(&mut self) -> Result<Tensor, DeviceError> {
        if self.free.is_empty() {
            self.finish_one()?;
        }
        Ok(self.free.pop().expect("the window holds all that is read ahead"))
    }

    fn write_back(&mut self, device: &Device, chunk: usize, buffer: Tensor) {
        let stored = self.chunks[chunk].take().expect("the chunk is on disk");
        self.writes.push_back((chunk, device.copy_to_disk(buffer, stored)));
    }

    fn finish_one(&mut self) -> Result<(), DeviceError> {
        let (chunk, pending) = self.writes.pop_front().expect("a chunk is written back");
        let (buffer, stored) = pending.wait()?;
        self.chunks[chunk] = Some(stored);
        self.free.push(buffer);
        Ok(())
    }

    fn finish(&mut self) -> Result<(), DeviceError> {
        while !self.writes.is_empty() {
            self.finish_one()?;
        }
        Ok(())
    }

    /// Passes every chunk through `update`, in device memory. Returns the first number of each.
    fn step(&mut self, device: &Device, update: &dyn Fn(&mut Tensor)) -> Result<Vec<f32>, DeviceError> {
        let mut first = Vec::new();
        for chunk in 0..CHUNKS {
            for ahead in (chunk + self.reads.len())..CHUNKS.min(chunk + AHEAD + 1) {
                let buffer = self.buffer()?;
                let stored = self.chunks[ahead].take().expect("the chunk is on disk");
                self.reads.push_back(device.copy_from_disk(stored, buffer));
            }
            let (stored, buffer) = self.reads.pop_front().expect("read ahead").wait()?;
            self.chunks[chunk] = Some(stored);
            let computed = device.alloc(DType::F32, [ELEMENTS], Category::Workspace, "computed");
            let (buffer, mut computed) = device.copy_to_device(buffer, computed).wait()?;
            update(&mut computed);
            first.extend(device.fetch([computed.view().range(0..1)])?);
            let (_, buffer) = device.copy_to_host(computed, buffer).wait()?;
            self.write_back(device, chunk, buffer);
        }
        self.finish()?;
        Ok(first)
    }
}

/// Objects that stay on the device after training.
type Kept = (Offloaded, Tensor);

/// Initialisation and some steps, each of which adds one to every number: the first numbers of the chunks, by step.
fn train(device: &Device) -> Result<(Vec<f32>, Kept), DeviceError> {
    let mut numbers = Vec::new();
    let (mut all, one) = device.phase(PhaseName::Init, || {
        let mut one = device.alloc(DType::F32, [ELEMENTS], Category::Parameters, "one");
        device.fill(one.view_mut(), 1.0);
        Offloaded::new(device).map(|all| (all, one))
    })?;
    for _ in 0..STEPS {
        let add_one = |x: &mut Tensor| device.add(one.view(), x.view_mut());
        numbers.extend(device.phase(PhaseName::Step, || all.step(device, &add_one))?);
    }
    Ok((numbers, (all, one)))
}

/// Expected numbers.
fn expected() -> Vec<f32> {
    (1..=STEPS).flat_map(|step| (0..CHUNKS).map(move |chunk| (chunk + step) as f32)).collect()
}

fn trace(host_addressable: bool) -> Trace {
    let dry = Device::meta_of(1, host_addressable);
    let kept = train(&dry).unwrap();
    let trace = dry.take_trace(0);
    drop(kept);
    trace
}

/// Trains on a device of `factory` that replays the plan, and compares every peak with it.
fn train_as_planned(factory: &dyn DeviceFactory) {
    let trace = trace(factory.is_host_addressable());
    let plans: [MemoryPlan; 3] = Memory::ALL.map(|memory| plan_memory_of(&trace, memory).unwrap());
    let [device_plan, host_plan, disk_plan] = &plans;
    let disk = DiskOptions::new(vec![std::env::temp_dir()]);
    let request = DeviceRequest {
        index: 0,
        threads: 1,
        products: None,
        device_plan,
        host_plan,
        disk_plan,
        disk: Some(&disk),
        pin_host: None,
        map_shared: &Region::anonymous,
    };
    let device = factory.make(&request).unwrap();
    let (numbers, kept) = train(&device).unwrap();
    assert_eq!(numbers, expected());
    for (arena, plan) in [device.arena(), device.host_arena(), device.disk_arena()].into_iter().zip(&plans) {
        assert_eq!(arena.peak(), Some(plan.peak), "{:?}", arena.memory());
    }
    let chunk_bytes = (ELEMENTS * 4) as u64;
    assert_eq!(disk_plan.peak.categories.optimizer, CHUNKS as u64 * chunk_bytes);
    assert_eq!(host_plan.peak.categories.communication, WINDOW as u64 * chunk_bytes);
    drop(kept);
}

#[test]
fn chunks_stream_through_a_window_on_the_processor() {
    train_as_planned(&CpuFactory::new());
}

#[test]
fn chunks_stream_through_a_window_on_the_simulated_device() {
    for seed in 0..20 {
        let options = Options { seed, ..Options::new(0) };
        train_as_planned(&SimulatedFactory::new(options, None, |request| Ok(Cpu::new(request.threads))));
    }
}

/// In the dry run, a chunk is read before its predecessors are used, and written back while later ones are.
#[test]
fn reads_are_ahead_and_writes_behind() {
    let trace = trace(false);
    let step = trace.phase(PhaseName::Step).unwrap();
    let names: String = step
        .events
        .iter()
        .filter_map(|event| match event {
            Event::Copy { name: "copy_from_disk", .. } => Some('r'),
            Event::Copy { name: "copy_to_disk", .. } => Some('w'),
            Event::Kernel { .. } => Some('k'),
            _ => None,
        })
        .collect();
    assert_eq!(names, "rrrkwrkwrkwrkwrkwkwkw");
    // The only waits for the disk are those for a chunk that is used now and for a buffer that is needed now.
    let waits =
        step.events.iter().filter(|event| matches!(event, Event::Record { stream: Stream::Disk, .. }));
    assert_eq!(waits.count(), 2 * CHUNKS);
}

/// A simulated device without a plan, with disk memory.
fn simulated(options: Options) -> (Arc<Simulated>, Device) {
    let (simulated, memory) = Simulated::new(Cpu::new(1), options).unwrap();
    let disk = DiskMemory::create(&std::env::temp_dir(), 1 << 16).unwrap();
    let host = Arena::heap_of(Memory::Host);
    let device = Device::with_memories(simulated.clone(), memory.unplanned(), host);
    (simulated, device.with_disk(Arena::unplanned_on_disk(disk)))
}

fn transfer(device: &Device) -> Result<(), DeviceError> {
    let host = device.alloc_host(DType::F32, [ELEMENTS], Category::Optimizer, "host");
    let stored = device.alloc_disk(DType::F32, [ELEMENTS], Category::Optimizer, "stored");
    device.copy_to_disk(host, stored).wait().map(drop)
}

#[test]
fn a_device_that_is_lost_during_a_transfer_is_reported_with_the_call_site() {
    let (simulated, device) = simulated(Options::new(1 << 16));
    simulated.fail_at(2, Failure::Lost);
    transfer(&device).unwrap();
    let error = transfer(&device).unwrap_err();
    assert_eq!((error.device, error.call), ("simulated", "copy_to_disk"));
    assert!(
        error.site.file.ends_with("tests/disk.rs") && error.reason.contains("the device was lost"),
        "{error}"
    );
    assert_eq!(transfer(&device).unwrap_err(), error, "it stays");
}

/// A transfer waits for no kernel: it is over while a kernel that was issued before it still waits its turn.
#[test]
fn a_transfer_waits_for_no_kernel() {
    let (go, wait) = channel();
    let kernels = Waiting { inner: Cpu::new(1), wait: Mutex::new(wait) };
    let (simulated, memory) = Simulated::new(Arc::new(kernels), Options::new(1 << 16)).unwrap();
    let disk = DiskMemory::create(&std::env::temp_dir(), 1 << 16).unwrap();
    let device = Device::with_memories(simulated, memory.unplanned(), Arena::heap_of(Memory::Host))
        .with_disk(Arena::unplanned_on_disk(disk));
    let mut x = device.alloc(DType::F32, [1], Category::Activations, "x");
    device.fill(x.view_mut(), 1.0);
    transfer(&device).unwrap();
    go.send(()).unwrap();
    assert_eq!(device.fetch([x.view()]).unwrap(), [1.0]);
}

/// A processor whose `fill` waits for a message.
struct Waiting {
    inner: Arc<Cpu>,
    wait: Mutex<Receiver<()>>,
}

impl Kernels for Waiting {
    fn name(&self) -> &'static str {
        "waiting"
    }

    fn threads(&self) -> usize {
        1
    }

    fn execute(&self, operation: Operation) {
        if matches!(&operation, Operation::Elementwise(Elementwise::Fill(_))) {
            let waited = self.wait.lock().unwrap().recv_timeout(Duration::from_secs(60));
            waited.expect("the transfer ends first");
        }
        self.inner.execute(operation);
    }
}
