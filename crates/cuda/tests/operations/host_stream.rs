//! Operations of the host beside the card: the thread that issues them goes on, and events order them with the card in both directions.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use cudarc::driver::sys;
use phalanx_cpu::Cpu;
use phalanx_cuda::checks::bench::{read, tensor};
use phalanx_plan::trace::Stream;
use phalanx_tensor::operations::{Elementwise, Operation};
use phalanx_tensor::{Category, DType, Device, Kernels, PendingHostWork, Tensor, View};

use crate::bench::Bench;

const ELEMENTS: usize = 1000;

/// A processor whose `fill` waits for a message and then notes the number at an address, and whose `add` panics.
struct Watching {
    inner: Arc<Cpu>,
    go: Mutex<Receiver<()>>,
    /// The address of an f32, or 0.
    watched: AtomicUsize,
    seen: Mutex<Vec<f32>>,
}

impl Watching {
    fn new() -> (Arc<Watching>, Sender<()>) {
        let (sender, go) = channel();
        let (inner, go, seen) = (Cpu::new(1), Mutex::new(go), Mutex::default());
        (Arc::new(Watching { inner, go, watched: AtomicUsize::new(0), seen }), sender)
    }
}

impl Kernels for Watching {
    fn name(&self) -> &'static str {
        "watching"
    }

    fn threads(&self) -> usize {
        1
    }

    fn execute(&self, operation: Operation) {
        match &operation {
            Operation::Elementwise(Elementwise::Fill(_)) => {
                self.go.lock().unwrap().recv().unwrap();
                let watched = self.watched.load(Ordering::Acquire);
                if watched != 0 {
                    let number = std::ptr::with_exposed_provenance::<f32>(watched);
                    // SAFETY: the test keeps the number until it has waited for this; volatile, because the card may write it.
                    self.seen.lock().unwrap().push(unsafe { number.read_volatile() });
                }
            }
            Operation::Elementwise(Elementwise::Add(_)) => panic!("no kernel for add"),
            _ => {}
        }
        self.inner.execute(operation);
    }
}

/// Memory of a tensor that the driver knows, so that copies from and to it run when streams let them.
struct Pinned(usize);

impl Pinned {
    fn new(tensor: &Tensor) -> Pinned {
        let start = tensor.view().address().as_ptr();
        // SAFETY: the memory is the tensor's, which lives longer.
        let result = unsafe { sys::cuMemHostRegister_v2(start.cast(), ELEMENTS * 4, 0) };
        assert_eq!(result, sys::CUresult::CUDA_SUCCESS);
        Pinned(start.expose_provenance())
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: registered in `new`.
        let _ = unsafe { sys::cuMemHostUnregister(std::ptr::with_exposed_provenance_mut(self.0)) };
    }
}

fn on_host(device: &Device, value: f32) -> Tensor {
    let mut tensor = device.alloc_host(DType::F32, [ELEMENTS], Category::Workspace, "host");
    tensor.host_slice_mut::<f32>().fill(value);
    tensor
}

fn fill_on_host(device: &Device, tensor: Tensor, value: f32) -> PendingHostWork {
    device.run_on_host("test", vec![tensor], |host, tensors| host.fill(tensors[0].view_mut(), value))
}

#[test]
fn host_work_runs_beside_the_thread_that_issues_it_and_beside_kernels() {
    let (kernels, go) = Watching::new();
    let Some(bench) = Bench::computing("host work", kernels) else { return };
    let device = bench.card();
    let work = fill_on_host(device, on_host(device, 0.0), 2.0);
    // None of this could come to its end if it waited for the fill.
    let mut sum = tensor(device, DType::F32, &[3], &[1.0, 2.0, 3.0]);
    let one = tensor(device, DType::F32, &[3], &[1.0; 3]);
    device.add(one.view(), sum.view_mut());
    assert_eq!(read(device, sum.view()).unwrap(), [2.0, 3.0, 4.0]);
    go.send(()).unwrap();
    assert_eq!(work.wait().unwrap()[0].host_slice::<f32>(), [2.0; ELEMENTS]);
}

#[test]
fn host_work_waits_for_the_card_and_the_card_for_host_work() {
    let (kernels, go) = Watching::new();
    let Some(bench) = Bench::computing("host work in order", kernels.clone()) else { return };
    let device = bench.card();
    for round in 1..=20 {
        let value = round as f32;
        let mut x = device.alloc(DType::F32, [ELEMENTS], Category::Workspace, "x");
        device.fill(x.view_mut(), value);
        let arrived = on_host(device, -1.0);
        let pinned = Pinned::new(&arrived);
        kernels.watched.store(pinned.0, Ordering::Release);
        let copy = device.copy_to_host(x, arrived);
        device.run_after(copy.done(), Stream::Host);

        let filled = on_host(device, -2.0);
        let of_work = Pinned::new(&filled);
        let work = fill_on_host(device, filled, 10.0 * value);
        device.run_after(work.done(), Stream::Compute);
        // SAFETY: the work owns the tensor until it is waited for, behind the card; events order its uses.
        let bytes =
            unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(of_work.0), ELEMENTS * 4) };
        let mut y = device.alloc(DType::F32, [ELEMENTS], Category::Workspace, "y");
        device.copy(View::over_bytes(bytes, DType::F32), y.view_mut());

        // Everything was issued before the work begins.
        go.send(()).unwrap();
        assert_eq!(read(device, y.view()).unwrap(), [10.0 * f64::from(value); ELEMENTS]);
        assert_eq!(kernels.seen.lock().unwrap().last(), Some(&value), "round {round}");
        drop((pinned, of_work));
        let _ = (work.wait().unwrap(), copy.wait().unwrap());
    }
}

#[test]
fn a_panic_of_host_work_names_the_call_and_lets_nobody_wait() {
    let (kernels, go) = Watching::new();
    let Some(bench) = Bench::computing("host work that panics", kernels) else { return };
    let device = bench.card();
    let work =
        device.run_on_host("test", vec![on_host(device, 0.0), on_host(device, 0.0)], |host, tensors| {
            let [x, y] = tensors else { panic!("two tensors") };
            host.add(x.view(), y.view_mut());
        });
    let line = line!() - 2;
    let late = fill_on_host(device, on_host(device, 0.0), 1.0);
    device.run_after(late.done(), Stream::Compute);
    let mut x = device.alloc(DType::F32, [ELEMENTS], Category::Workspace, "x");
    device.fill(x.view_mut(), 1.0);
    let failure = work.wait().map(drop).unwrap_err().to_string();
    let expected = format!("`add` at {}:{line}", file!().rsplit('/').next().unwrap());
    assert!(failure.contains("no kernel for add") && failure.contains("`add` at"), "{failure}");
    assert!(failure.contains(expected.trim_start_matches("`add` at ")), "{failure} without {expected}");
    // The fill behind it never gets its message.
    assert_eq!(late.wait().map(drop).unwrap_err().to_string(), failure);
    assert_eq!(device.synchronize().unwrap_err().to_string(), failure);
    drop(go);
}
