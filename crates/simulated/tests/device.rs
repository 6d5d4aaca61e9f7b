//! Guarantees of the simulated device: concurrent streams, kept failures, bounded memory, the processor's bits.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::support::chain;
use phalanx_cpu::Cpu;
use phalanx_plan::plan_memory;
use phalanx_plan::trace::{PhaseName, Site, Stream};
use phalanx_simulated::{Error, Failure, Options, Simulated};
use phalanx_tensor::backend::Call;
use phalanx_tensor::operations::{Copy, Elementwise, Operation};
use phalanx_tensor::{Arena, Backend, Category, DType, Device, DeviceError, Kernels, Memory, Tensor};

const MEMORY_BYTES: u64 = 1 << 20;

fn device_of(options: Options) -> (Arc<Simulated>, Device) {
    with_kernels(Cpu::new(1), options)
}

fn with_kernels(kernels: Arc<dyn Kernels>, options: Options) -> (Arc<Simulated>, Device) {
    let (simulated, memory) = Simulated::new(kernels, options).unwrap();
    let host = Arena::heap_of(Memory::Host);
    let device = Device::with_memories(simulated.clone(), memory.unplanned(), host);
    (simulated, device)
}

fn tensor(device: &Device, values: &[f32]) -> Tensor {
    let mut tensor = device.alloc(DType::F32, [values.len()], Category::Activations, "test");
    device.upload(values, tensor.view_mut());
    tensor
}

/// A processor whose `fill` waits for a message, and whose `add` panics.
struct Blocking {
    inner: Arc<Cpu>,
    go: Mutex<Receiver<()>>,
}

impl Blocking {
    fn new() -> (Arc<Blocking>, Sender<()>) {
        let (sender, go) = channel();
        (Arc::new(Blocking { inner: Cpu::new(1), go: Mutex::new(go) }), sender)
    }
}

impl Kernels for Blocking {
    fn name(&self) -> &'static str {
        "blocking"
    }

    fn threads(&self) -> usize {
        1
    }

    fn execute(&self, operation: Operation) {
        match &operation {
            Operation::Elementwise(Elementwise::Fill(_)) => self.go.lock().unwrap().recv().unwrap(),
            Operation::Elementwise(Elementwise::Add(_)) => panic!("no kernel for add"),
            _ => {}
        }
        self.inner.execute(operation);
    }
}

/// Many delays of zero, and a few seeds with delays.
#[test]
fn results_have_the_bits_of_the_processor() {
    let right = chain::on_the_processor().bits();
    let delays = [Duration::ZERO, Duration::from_micros(200)];
    let cases = delays.into_iter().flat_map(|max_delay| (0..5).map(move |seed| (max_delay, seed)));
    for (max_delay, seed) in cases {
        let options = Options { max_delay, ..chain::options(seed, true) };
        let mut last = chain::downloaded();
        let device = chain::simulated(options, |simulated| simulated);
        let numbers = chain::run(&device, &mut last).unwrap();
        assert_eq!(numbers.bits(), right, "delays up to {max_delay:?}, seed {seed}");
    }
}

#[test]
fn a_copy_runs_beside_a_kernel_that_it_does_not_wait_for() {
    let (kernels, go) = Blocking::new();
    let (_, device) = with_kernels(kernels, Options::new(MEMORY_BYTES));
    let x = tensor(&device, &[1.0, 2.0]);
    let mut y = tensor(&device, &[0.0; 4]);
    let host = device.alloc_host(DType::F32, [2], Category::Workspace, "host");
    let copied = device.copy_to_host(x, host);
    device.fill(y.view_mut(), 3.0);
    // Were the copy behind the kernel, this would wait for ever.
    let (_x, host) = copied.wait().unwrap();
    assert_eq!(host.host_slice::<f32>(), [1.0, 2.0]);
    go.send(()).unwrap();
    let mut filled = [0f32; 4];
    device.download(y.view(), &mut filled).unwrap();
    assert_eq!(filled, [3.0; 4]);
}

#[test]
fn an_upload_takes_its_bytes_before_it_returns() {
    let (_, device) = device_of(Options::new(MEMORY_BYTES));
    let mut tensor = device.alloc(DType::U32, [3], Category::Activations, "ids");
    let mut ids = [1u32, 2, 3];
    device.upload(&ids, tensor.view_mut());
    ids = [9; 3];
    let mut back = [0u32; 3];
    device.download(tensor.view(), &mut back).unwrap();
    assert_eq!((back, ids), ([1, 2, 3], [9; 3]));
}

/// Device and error after a failure, three calls and a download.
fn after_a_failure(failure: Failure, call: u64) -> (Device, DeviceError) {
    let (simulated, device) = device_of(Options::new(MEMORY_BYTES));
    simulated.fail_at(call, failure);
    let mut x = tensor(&device, &[1.0; 16]); // call 1
    device.fill(x.view_mut(), 2.0); // call 2
    device.fill(x.view_mut(), 3.0); // call 3
    let mut back = [7f32; 16];
    let error = device.download(x.view(), &mut back).unwrap_err(); // call 4
    assert_eq!(simulated.calls(), 4);
    assert_eq!(back, [7.0; 16], "nothing runs after the failure");
    (device, error)
}

#[test]
fn the_first_failure_is_kept_with_the_name_and_the_call_site() {
    for (failure, reason) in [(Failure::OutOfMemory, "out of memory"), (Failure::Lost, "the device was lost")]
    {
        for (call, name) in [(1, "upload"), (2, "fill"), (4, "download")] {
            let (device, error) = after_a_failure(failure, call);
            assert_eq!(error.call, name);
            assert!(error.site.file.ends_with("tests/device.rs"), "{error}");
            assert!(error.reason.starts_with(reason), "{error}");
            assert_eq!(device.synchronize().unwrap_err(), error, "it stays");
            let text = format!("`{name}` at {} failed on the simulated device: {}", error.site, error.reason);
            assert_eq!(error.to_string(), text);
        }
    }
}

#[test]
fn a_slow_copy_is_late_and_right() {
    let (simulated, device) = device_of(Options::new(MEMORY_BYTES));
    let slow = Duration::from_millis(30);
    let mut x = tensor(&device, &[1.0; 16]);
    simulated.fail_at(2, Failure::SlowCopy(slow));
    device.fill(x.view_mut(), 2.0);
    let start = Instant::now();
    let mut back = [0f32; 16];
    device.download(x.view(), &mut back).unwrap();
    assert!(start.elapsed() >= slow);
    assert_eq!(back, [2.0; 16]);
}

#[test]
fn copies_take_the_time_of_their_bytes() {
    // 40,000 bytes at 1 MB/s: 40 ms there, and 40 ms back.
    let options = Options { copy_bytes_per_s: 1e6, max_delay: Duration::ZERO, ..Options::new(MEMORY_BYTES) };
    let (_, device) = device_of(options);
    let start = Instant::now();
    let x = tensor(&device, &[1.0; 10_000]);
    let mut back = vec![0f32; 10_000];
    device.download(x.view(), &mut back).unwrap();
    assert!(start.elapsed() >= Duration::from_millis(80), "{:?}", start.elapsed());
}

#[test]
fn a_kernel_that_panics_fails_the_device() {
    let (kernels, _go) = Blocking::new();
    let (_, device) = with_kernels(kernels, Options::new(MEMORY_BYTES));
    let [x, mut y] = [0.0, 1.0].map(|value| tensor(&device, &[value; 16]));
    device.add(x.view(), y.view_mut());
    let error = device.synchronize().unwrap_err();
    assert_eq!((error.call, error.reason.as_str()), ("add", "the kernel panicked: no kernel for add"));
}

#[test]
fn a_race_names_both_calls_and_both_call_sites() {
    let (simulated, device) = device_of(Options::new(MEMORY_BYTES));
    let [from, mut to] = [1.0, 2.0].map(|value| tensor(&device, &[value; 16]));
    device.synchronize().unwrap();
    device.fill(to.view_mut(), 3.0);
    let operation = Copy { from: from.view(), to: to.view_mut() }.into();
    let call = Call { operation, name: "copy on a stream of its own", site: Site::caller(), timer: None };
    simulated.launch(Stream::Disk, call);
    let error = device.synchronize().unwrap_err();
    assert_eq!(error.call, "copy on a stream of its own");
    let Site { file, line } = error.site;
    let expected = format!(
        "data race: it writes memory that `fill` at {file}:{} writes on stream compute, and no event or wait orders the \
         two",
        line - 2
    );
    assert_eq!(error.reason, expected);
}

#[test]
fn a_kernel_is_not_given_host_memory() {
    let (_, device) = device_of(Options::new(MEMORY_BYTES));
    let mut x = device.alloc_host(DType::F32, [16], Category::Workspace, "host");
    device.fill(x.view_mut(), 1.0);
    let error = device.synchronize().unwrap_err();
    assert_eq!((error.call, error.reason.as_str()), ("fill", "a kernel was given host memory"));
}

#[test]
fn the_host_computes_in_its_own_memory_beside_kernels() {
    let (_, device) = device_of(Options::new(MEMORY_BYTES));
    let host = |name| device.alloc_host(DType::F32, [16], Category::Workspace, name);
    let (_, x) = device.copy_to_host(tensor(&device, &[1.5; 16]), host("x")).wait().unwrap();
    let work = device.run_on_host("test", vec![x, host("y")], |host, tensors| {
        let [x, y] = tensors else { unreachable!() };
        host.fill(y.view_mut(), 2.0);
        host.add(x.view(), y.view_mut());
    });
    let y = work.wait().unwrap().pop().unwrap();
    assert_eq!(y.host_slice::<f32>(), [3.5; 16]);
    let on_device = device.alloc(DType::F32, [16], Category::Workspace, "device");
    let (_, back) = device.copy_to_device(y, on_device).wait().unwrap();
    let mut numbers = [0f32; 16];
    device.download(back.view(), &mut numbers).unwrap();
    assert_eq!(numbers, [3.5; 16]);
}

#[test]
fn the_host_is_not_given_device_memory() {
    let (_, device) = device_of(Options::new(MEMORY_BYTES));
    let x = tensor(&device, &[1.0; 16]);
    let y = device.alloc_host(DType::F32, [16], Category::Workspace, "host");
    let work = device.run_on_host("test", vec![y], |host, tensors| host.add(x.view(), tensors[0].view_mut()));
    let error = work.wait().unwrap_err();
    assert_eq!(
        (error.call, error.reason.as_str()),
        ("add", "an operation of the host was given device memory")
    );
}

#[test]
fn a_pending_copy_that_is_dropped_is_waited_for() {
    let (_, device) = device_of(Options::new(MEMORY_BYTES));
    for _ in 0..3 {
        let host = || device.alloc_host(DType::F32, [16], Category::Workspace, "host");
        drop(device.copy_to_host(tensor(&device, &[1.0; 16]), host()));
        let number = tensor(&device, &[1.0]);
        drop(device.fetch_later(&[number.view()]));
    }
    device.arena().end();
    device.host_arena().end();
    device.synchronize().unwrap();
}

/// A failed copy still gives its memory to nobody, and the error is the device's, not the arena's.
#[test]
fn after_a_failure_pending_copies_return_it() {
    let (simulated, device) = device_of(Options::new(MEMORY_BYTES));
    let x = tensor(&device, &[1.0; 16]);
    let number = tensor(&device, &[1.0]);
    simulated.fail_at(simulated.calls() + 1, Failure::Lost);
    let host = device.alloc_host(DType::F32, [16], Category::Workspace, "host");
    let pending = device.copy_to_host(x, host);
    let late = device.fetch_later(&[number.view()]);
    assert_eq!(pending.wait().unwrap_err().call, "copy_to_host");
    assert_eq!(late.wait().unwrap_err().call, "copy_to_host");
    device.arena().end();
    device.host_arena().end();
}

#[test]
fn a_plan_is_replayed_if_it_fits() {
    let step = |device: &Device| {
        let mut first = device.alloc(DType::F32, [1000], Category::Activations, "first");
        device.fill(first.view_mut(), 1.0);
        drop(first);
        let mut second = device.alloc(DType::F32, [1000], Category::Activations, "second");
        device.fill(second.view_mut(), 2.0);
        let mut back = vec![0f32; 1000];
        device.download(second.view(), &mut back).map(|()| back)
    };
    let dry = Device::meta_of(1, false);
    dry.phase(PhaseName::Init, || {});
    dry.phase(PhaseName::Step, || step(&dry)).unwrap();
    let plan = plan_memory(&dry.take_trace(0)).unwrap();
    let needed_bytes = plan.arena_bytes;
    assert_eq!(needed_bytes, 4032);
    let make = |memory_bytes| {
        let host = Arena::heap_of(Memory::Host);
        let (simulated, memory) = Simulated::new(Cpu::new(1), Options::new(memory_bytes)).unwrap();
        memory.replaying(plan.clone()).map(|arena| Device::with_memories(simulated, arena, host))
    };
    let device = make(needed_bytes).unwrap();
    device.phase(PhaseName::Init, || {});
    for _ in 0..3 {
        assert_eq!(device.phase(PhaseName::Step, || step(&device)).unwrap(), [2.0; 1000]);
    }
    let Err(error) = make(needed_bytes - 1) else { panic!("a plan of {needed_bytes} bytes fits") };
    assert!(matches!(error, Error::TooSmall { memory_bytes: 4031, needed_bytes: 4032 }), "{error}");
}

#[test]
fn memory_without_a_plan_is_bounded() {
    let (_, device) = device_of(Options::new(8192));
    let alloc = |name| device.alloc(DType::F32, [1024], Category::Activations, name);
    let [first, _second] = ["first", "second"].map(alloc);
    let refused = catch_unwind(AssertUnwindSafe(|| alloc("third"))).err().unwrap();
    let text = refused.downcast_ref::<String>().unwrap();
    let expected = "device memory of 8192 bytes has no room for `third` (4096 bytes, allocated at";
    assert!(text.starts_with(expected), "{text}");
    drop(first);
    alloc("third, after the first");
}

#[test]
fn a_device_that_is_dropped_runs_what_was_issued() {
    let (kernels, go) = Blocking::new();
    let cpu = Arc::downgrade(&kernels);
    let (simulated, device) = with_kernels(kernels, Options::new(MEMORY_BYTES));
    let mut x = tensor(&device, &[0.0; 16]);
    device.fill(x.view_mut(), 1.0);
    go.send(()).unwrap();
    drop((x, device, simulated));
    assert!(cpu.upgrade().is_none(), "no thread holds the kernels any more");
}
