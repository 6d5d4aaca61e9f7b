//! Disk memory on a device whose kernels run at the call: transfers beside kernels, failures, and a storage that is
//! missing or too small. `simulated/tests/disk.rs` runs the same contract with plans and on the simulated device.

use std::io::{Error, ErrorKind, Result};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use phalanx_cpu::{Cpu, CpuFactory};
use phalanx_plan::trace::{Event, PhaseName, Rate, Stream};
use phalanx_plan::{MemoryPlan, plan_memory_of};
use phalanx_tensor::disk::DiskStorage;
use phalanx_tensor::operations::{Elementwise, Operation};
use phalanx_tensor::{
    Arena, Backend, Category, DType, Device, DeviceFactory, DeviceRequest, DiskMemory, DiskOptions,
    Immediate, Kernels, Memory, Region, Tensor,
};

const BYTES: usize = 1 << 16;
/// Longer than any thread of a loaded machine is late.
const PATIENCE: Duration = Duration::from_secs(60);

/// A storage in memory that does what a test wants of each call.
struct Scripted<F> {
    bytes: Mutex<Vec<u8>>,
    /// Given the number of the call from 0 and its bytes; says how many of these it transfers.
    each: F,
    calls: Mutex<usize>,
}

impl<F: Fn(usize, usize) -> Result<usize> + Send + Sync> Scripted<F> {
    fn next(&self, wanted: usize) -> Result<usize> {
        let mut calls = self.calls.lock().unwrap();
        *calls += 1;
        (self.each)(*calls - 1, wanted)
    }
}

impl<F: Fn(usize, usize) -> Result<usize> + Send + Sync> DiskStorage for Scripted<F> {
    fn read_at(&self, to: &mut [u8], offset: u64) -> Result<usize> {
        let count = self.next(to.len())?;
        to[..count].copy_from_slice(&self.bytes.lock().unwrap()[offset as usize..][..count]);
        Ok(count)
    }

    fn write_at(&self, from: &[u8], offset: u64) -> Result<usize> {
        let count = self.next(from.len())?;
        self.bytes.lock().unwrap()[offset as usize..][..count].copy_from_slice(&from[..count]);
        Ok(count)
    }
}

/// A device over a storage whose calls `each` decides.
fn device(
    kernels: Arc<dyn Kernels>,
    each: impl Fn(usize, usize) -> Result<usize> + Send + Sync + 'static,
) -> Device {
    let storage = Scripted { bytes: Mutex::new(vec![0; BYTES]), each, calls: Mutex::new(0) };
    let disk = DiskMemory::over(Box::new(storage), BYTES as u64, "the test".to_string());
    let backend = Arc::new(Immediate::with_disk_stream(kernels).unwrap());
    let host = Arena::heap_of(Memory::Host);
    Device::with_memories(backend, Arena::heap(), host).with_disk(Arena::unplanned_on_disk(disk))
}

fn host(device: &Device, value: f32) -> Tensor {
    let mut tensor = device.alloc_host(DType::F32, [100], Category::Optimizer, "host");
    tensor.host_slice_mut::<f32>().fill(value);
    tensor
}

fn on_disk(device: &Device) -> Tensor {
    device.alloc_disk(DType::F32, [100], Category::Optimizer, "stored")
}

/// Writes a tensor, and reads it into another.
fn round_trip(device: &Device) -> std::result::Result<Vec<f32>, phalanx_tensor::DeviceError> {
    let (_, stored) = device.copy_to_disk(host(device, 3.5), on_disk(device)).wait()?;
    let (_, read) = device.copy_from_disk(stored, host(device, 0.0)).wait()?;
    Ok(read.host_slice::<f32>().to_vec())
}

#[test]
fn transfers_that_are_cut_short_or_interrupted_go_on() {
    let device = device(Cpu::new(1), |call, wanted| match call % 3 {
        0 => Err(Error::from(ErrorKind::Interrupted)),
        1 => Ok(wanted.min(7)),
        _ => Ok(wanted.div_ceil(2)),
    });
    assert_eq!(round_trip(&device).unwrap(), [3.5; 100]);
}

#[test]
fn a_processor_transfers_its_own_memory_without_the_host() {
    let device = device(Cpu::new(1), |_, wanted| Ok(wanted));
    let mut from = device.alloc(DType::F32, [100], Category::Optimizer, "from");
    device.fill(from.view_mut(), 2.0);
    let (mut from, stored) = device.copy_to_disk(from, on_disk(&device)).wait().unwrap();
    device.fill(from.view_mut(), 0.0);
    let (_, from) = device.copy_from_disk(stored, from).wait().unwrap();
    let mut numbers = [0f32; 100];
    device.download(from.view(), &mut numbers).unwrap();
    assert_eq!(numbers, [2.0; 100]);
}

/// A processor whose `fill` lets the storage go on, and waits until it has.
struct Meeting {
    inner: Arc<Cpu>,
    go: Mutex<Sender<()>>,
    gone: Mutex<Receiver<()>>,
}

impl Kernels for Meeting {
    fn name(&self) -> &'static str {
        "meeting"
    }

    fn threads(&self) -> usize {
        1
    }

    fn execute(&self, operation: Operation) {
        if matches!(&operation, Operation::Elementwise(Elementwise::Fill(_))) {
            self.go.lock().unwrap().send(()).unwrap();
            self.gone.lock().unwrap().recv_timeout(PATIENCE).expect("the transfer runs during the kernel");
        }
        self.inner.execute(operation);
    }
}

/// A transfer that was issued first waits in the storage for a kernel that was issued later; the kernel waits for the
/// storage. Neither could end if they did not run at the same time.
#[test]
fn a_transfer_runs_beside_a_kernel() {
    let ((go, storage_go), (storage_gone, gone)) = (channel(), channel());
    let kernels = Meeting { inner: Cpu::new(1), go: Mutex::new(go), gone: Mutex::new(gone) };
    let ends = Mutex::new((storage_go, storage_gone));
    let device = device(Arc::new(kernels), move |_, wanted| {
        let (go, gone) = &*ends.lock().unwrap();
        go.recv_timeout(PATIENCE).map_err(Error::other)?;
        gone.send(()).map_err(Error::other)?;
        Ok(wanted)
    });
    let mut x = device.alloc(DType::F32, [100], Category::Activations, "x");
    let pending = device.copy_to_disk(host(&device, 1.0), on_disk(&device));
    device.fill(x.view_mut(), 1.0);
    let (_, stored) = pending.wait().unwrap();
    let pending = device.copy_from_disk(stored, host(&device, 0.0));
    device.fill(x.view_mut(), 2.0);
    assert_eq!(pending.wait().unwrap().1.host_slice::<f32>(), [1.0; 100]);
}

/// Returns when the thread `task`, a path in `/proc`, sleeps.
fn sleeps(task: &Path) {
    let stat = Path::new("/proc").join(task).join("stat");
    let state = || {
        let stat = std::fs::read_to_string(&stat).ok()?;
        stat.rsplit(')').next()?.trim_start().chars().next()
    };
    while state().is_some_and(|state| state != 'S') {
        std::thread::yield_now();
    }
}

/// A kernel that is to run after a transfer: its launch waits, since it would run at once.
#[test]
fn a_kernel_after_the_event_of_a_transfer_comes_later() {
    let over = Arc::new(AtomicBool::new(false));
    let (waiting, waits) = channel::<PathBuf>();
    let waits = Mutex::new(waits);
    let each = {
        let over = Arc::clone(&over);
        move |_, wanted| {
            // If the launch does not wait, the test has ended by then.
            sleeps(&waits.lock().unwrap().recv_timeout(PATIENCE).map_err(Error::other)?);
            over.store(true, Ordering::Relaxed);
            Ok(wanted)
        }
    };
    let storage = Scripted { bytes: Mutex::new(vec![0; BYTES]), each, calls: Mutex::new(0) };
    let disk = DiskMemory::over(Box::new(storage), BYTES as u64, "the test".to_string());
    let backend = Arc::new(Immediate::with_disk_stream(Cpu::new(1)).unwrap());
    let device = Device::with_memories(backend.clone(), Arena::heap(), Arena::heap_of(Memory::Host))
        .with_disk(Arena::unplanned_on_disk(disk));
    let pending = device.copy_to_disk(host(&device, 1.0), on_disk(&device));
    assert_eq!(pending.done(), backend.record(Stream::Disk));
    waiting.send(std::fs::read_link("/proc/thread-self").unwrap()).unwrap();
    backend.wait(Stream::Compute, pending.done());
    let mut x = device.alloc(DType::F32, [1], Category::Activations, "x");
    device.fill(x.view_mut(), 1.0);
    assert!(over.load(Ordering::Relaxed), "the kernel ran before the transfer was over");
    assert_eq!(device.fetch([x.view()]).unwrap(), [1.0]);
}

#[test]
fn a_failure_names_operation_call_site_and_disk_and_stays() {
    type Each = fn(usize, usize) -> Result<usize>;
    let cases: [(Each, &str, &str); 4] = [
        (
            |_, _| Err(Error::other("the disk is on fire")),
            "copy_to_disk",
            "cannot write 400 bytes at offset 0",
        ),
        (|_, _| Ok(0), "copy_to_disk", "the system writes none of them"),
        (
            |call, wanted| if call == 0 { Ok(wanted) } else { Err(Error::other("the disk is on fire")) },
            "copy_from_disk",
            "of the disk memory of 65536 bytes in the test: the disk is on fire",
        ),
        (
            |call, wanted| Ok([wanted, 300, 0][call]),
            "copy_from_disk",
            "cannot read 100 bytes at offset 300 of the disk memory of 65536 bytes in the test: the file ends",
        ),
    ];
    for (each, call, words) in cases {
        let device = device(Cpu::new(1), each);
        let error = round_trip(&device).unwrap_err();
        assert_eq!((error.device, error.call), ("cpu", call));
        assert!(error.site.file.ends_with("tests/disk.rs") && error.reason.contains(words), "{error}");
        // Nothing runs any more, and every synchronisation says why.
        assert_eq!(
            device.copy_to_disk(host(&device, 1.0), on_disk(&device)).wait().err(),
            Some(error.clone())
        );
        let x = device.alloc(DType::F32, [1], Category::Activations, "x");
        assert_eq!(device.fetch([x.view()]), Err(error.clone()));
        assert_eq!(device.synchronize(), Err(error));
    }
}

/// Whoever drops a device waits for its transfers, and its thread ends.
#[test]
fn a_device_that_is_dropped_finishes_its_transfers() {
    let written = Arc::new(Mutex::new(0));
    let device = device(Cpu::new(1), {
        let written = Arc::clone(&written);
        move |_, wanted| {
            *written.lock().unwrap() += wanted;
            Ok(wanted)
        }
    });
    drop([1.0, 2.0].map(|value| device.copy_to_disk(host(&device, value), on_disk(&device))));
    drop(device);
    assert_eq!(*written.lock().unwrap(), 800);
    assert_eq!(Arc::strong_count(&written), 1, "the storage is gone, and the thread that held it");
}

/// The text of the panic that stops `run`.
#[track_caller]
fn stopped<T>(run: impl FnOnce() -> T) -> String {
    let payload = catch_unwind(AssertUnwindSafe(run)).err().expect("nothing was refused");
    *payload.downcast::<String>().expect("a text")
}

#[test]
fn a_tensor_on_disk_is_no_operand() {
    let device = device(Cpu::new(1), |_, wanted| Ok(wanted));
    let mut stored = on_disk(&device);
    let text = stopped(|| device.fill(stored.view_mut(), 1.0));
    assert!(text.contains("not a disk"), "{text}");
    let without = Device::new(Cpu::new(1), Arena::heap());
    let text = stopped(|| on_disk(&without));
    assert!(text.contains("no disk memory for `stored` (400 bytes, allocated at"), "{text}");
    let accelerator = Device::meta_of(1, false);
    let tensor = accelerator.alloc(DType::F32, [100], Category::Activations, "on the device");
    let text = stopped(|| accelerator.copy_to_disk(tensor, on_disk(&accelerator)));
    assert!(text.contains("device memory is copied through host memory"), "{text}");
}

/// Makes a device on the processor whose plan has a tensor on disk.
fn make(folder: Option<&Path>, elements: usize) -> Result<Device> {
    let disk = folder.map(|folder| DiskOptions::new(vec![folder.to_path_buf()]));
    let dry = Device::meta(1);
    let alloc = |device: &Device| device.alloc_disk(DType::F32, [elements], Category::Optimizer, "stored");
    let kept = dry.phase(PhaseName::Init, || alloc(&dry));
    let trace = dry.take_trace(0);
    drop(kept);
    let plan = |memory| -> MemoryPlan { plan_memory_of(&trace, memory).unwrap() };
    let request = DeviceRequest {
        index: 0,
        threads: 1,
        products: None,
        device_plan: &plan(Memory::Device),
        host_plan: &plan(Memory::Host),
        disk_plan: &plan(Memory::Disk),
        disk: disk.as_ref(),
        pin_host: None,
        map_shared: &Region::anonymous,
    };
    let device = CpuFactory::new().make(&request)?;
    drop(device.phase(PhaseName::Init, || alloc(&device)));
    Ok(device)
}

#[test]
fn a_folder_that_cannot_hold_the_disk_memory_is_refused_before_the_first_step() {
    let folder = tempfile::tempdir().unwrap();
    make(Some(folder.path()), 1000).unwrap();
    let error = |folder, elements| make(folder, elements).err().unwrap().to_string();
    assert_eq!(error(None, 1000), "the plan places 4096 bytes on disk, but no folder was given for them");
    let missing = folder.path().join("missing");
    let text = error(Some(&missing), 1000);
    let expected = format!("disk memory of 4096 bytes in {}: ", missing.display());
    assert!(text.starts_with(&expected) && text.contains("give a folder that exists"), "{text}");
    let text = error(Some(folder.path()), 1 << 55);
    let expected = format!("disk memory of {} bytes in {}: ", 4u64 << 55, folder.path().display());
    assert!(text.starts_with(&expected) && text.contains("give a folder on a larger disk"), "{text}");
    // A tensor without elements needs no room.
    make(Some(folder.path()), 0).unwrap();
}

/// The trace of a dry run has the disk transfers, for devices of either kind.
#[test]
fn a_dry_run_records_transfers_and_what_waits_for_them() {
    for host_addressable in [true, false] {
        let device = Device::meta_of(1, host_addressable);
        device.phase(PhaseName::Init, || {
            let [host, stored] =
                [device.alloc_host(DType::F32, [100], Category::Optimizer, "host"), on_disk(&device)];
            let (host, stored) = device.copy_to_disk(host, stored).wait().unwrap();
            drop(device.copy_from_disk(stored, host).wait().unwrap());
        });
        let trace = device.take_trace(0);
        let events: Vec<&Event> = trace.phases[0].events.iter().collect();
        let copy = |name, from, to| Event::Copy {
            name,
            from,
            to,
            bytes: 400,
            rate: Rate::Disk,
            stream: Stream::Disk,
        };
        let recorded = |number| Event::Record { number, stream: Stream::Disk };
        let expected = [
            copy("copy_to_disk", Memory::Host, Memory::Disk),
            recorded(0),
            Event::HostWait { number: 0 },
            copy("copy_from_disk", Memory::Disk, Memory::Host),
            recorded(1),
            Event::HostWait { number: 1 },
        ];
        let copies =
            events.into_iter().filter(|event| !matches!(event, Event::Alloc { .. } | Event::Free { .. }));
        assert!(copies.eq(expected.iter()), "{:?}", trace.phases[0]);
    }
}
