//! The driver's functions as a program calls them, with results in place of pointers.

use std::ffi::{CString, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use phalanx_cuda_emulator::driver::*;

const PTX: &str = include_str!("../kernels/sequences.ptx");

/// The process has one driver, so tests take turns.
static TURN: Mutex<()> = Mutex::new(());

/// A new driver with a context and a module.
pub struct Session {
    pub module: usize,
    _turn: MutexGuard<'static, ()>,
}

/// A parameter of a kernel.
#[derive(Clone, Copy)]
pub enum Argument {
    Address(u64),
    Integer(i32),
    Float(f32),
}

#[track_caller]
pub fn ok(status: Status) {
    assert_eq!(status, Status::SUCCESS, "{:?}", reports());
}

/// Runs a call with a place for its result.
#[track_caller]
pub fn result<T: Default>(call: impl FnOnce(*mut T) -> Status) -> T {
    let mut out = T::default();
    ok(call(&mut out));
    out
}

/// The texts of all reports.
pub fn reports() -> Vec<String> {
    let mut count = 0;
    // SAFETY: all pointers are to local values, with the sizes that are given.
    unsafe {
        assert_eq!(phalanxEmulatorReports(&mut count), Status::SUCCESS);
        let report = |index| {
            let mut bytes = [0u8; 1000];
            assert_eq!(phalanxEmulatorReport(index, bytes.as_mut_ptr().cast(), bytes.len()), Status::SUCCESS);
            let end = bytes.iter().position(|byte| *byte == 0).unwrap();
            String::from_utf8_lossy(&bytes[..end]).into_owned()
        };
        (0..count).map(report).collect()
    }
}

/// Calls functions of the driver.
macro_rules! driver {
    ($calls:expr) => {{
        // SAFETY: pointers are to values that live as long as the call, or as long as the session for pinned memory.
        unsafe { $calls }
    }};
}

impl Session {
    pub fn new(seed: u64) -> Self {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the text lives as long as the call that reads it.
        unsafe {
            ok(phalanxEmulatorReset(seed));
            ok(cuInit(0));
            let context = result(|out| cuDevicePrimaryCtxRetain(out, 0));
            ok(cuCtxSetCurrent(context));
            let text = CString::new(PTX).unwrap();
            let module = result(|out| cuModuleLoadData(out, text.as_ptr().cast()));
            Self { module, _turn: turn }
        }
    }

    /// Makes the context that of this thread as well.
    pub fn enter(&self) {
        driver!(ok(cuCtxSetCurrent(result(|out| cuDevicePrimaryCtxRetain(out, 0)))));
    }

    pub fn function(&self, name: &str) -> usize {
        let name = CString::new(name).unwrap();
        driver!(result(|out| cuModuleGetFunction(out, self.module, name.as_ptr())))
    }

    /// A stream that is not ordered with the default one.
    pub fn stream(&self) -> usize {
        driver!(result(|out| cuStreamCreate(out, 1)))
    }

    /// An event; after a fault was found, none, like all that follows.
    pub fn event(&self) -> usize {
        let mut event = 0;
        driver!(cuEventCreate(&mut event, 2));
        event
    }

    pub fn allocate(&self, floats: usize) -> u64 {
        driver!(result(|out| cuMemAlloc_v2(out, floats * 4)))
    }

    /// Memory that holds zeros.
    pub fn zeros(&self, floats: usize) -> u64 {
        let address = self.allocate(floats);
        driver!(ok(cuMemsetD32Async(address, 0, floats, 0)));
        ok(self.synchronize());
        address
    }

    /// Pinned memory for floats.
    pub fn pinned(&self, floats: usize) -> *mut f32 {
        let mut out = std::ptr::null_mut::<c_void>();
        driver!(ok(cuMemHostAlloc(&mut out, floats * 4, 0)));
        out.cast()
    }

    pub fn record(&self, event: usize, stream: usize) {
        driver!(cuEventRecord(event, stream));
    }

    pub fn wait(&self, stream: usize, event: usize) {
        driver!(cuStreamWaitEvent(stream, event, 0));
    }

    /// Lets a stream wait for another.
    pub fn order(&self, before: usize, after: usize) {
        let event = self.event();
        self.record(event, before);
        self.wait(after, event);
    }

    pub fn to_device(&self, to: u64, from: &[f32], stream: usize) -> Status {
        driver!(cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), from.len() * 4, stream))
    }

    pub fn to_host(&self, to: *mut f32, from: u64, floats: usize, stream: usize) -> Status {
        driver!(cuMemcpyDtoHAsync_v2(to.cast(), from, floats * 4, stream))
    }

    pub fn launch(&self, name: &str, threads: u32, stream: usize, arguments: &[Argument]) -> Status {
        self.launch_shared(name, threads, stream, arguments, 0)
    }

    pub fn launch_shared(
        &self,
        name: &str,
        threads: u32,
        stream: usize,
        arguments: &[Argument],
        shared: u32,
    ) -> Status {
        let name = CString::new(name).unwrap();
        let mut function = 0;
        let status = driver!(cuModuleGetFunction(&mut function, self.module, name.as_ptr()));
        if status != Status::SUCCESS {
            return status;
        }
        let values: Vec<u64> = arguments
            .iter()
            .map(|argument| match *argument {
                Argument::Address(value) => value,
                Argument::Integer(value) => value as u32 as u64,
                Argument::Float(value) => u64::from(value.to_bits()),
            })
            .collect();
        let pointers: Vec<*const u8> = values.iter().map(|value| (value as *const u64).cast()).collect();
        let (parameters, extra) = (pointers.as_ptr(), std::ptr::null());
        driver!(cuLaunchKernel(function, 1, 1, 1, threads, 1, 1, shared, stream, parameters, extra))
    }

    /// Gives a node of a graph that is ready another `fill`, of so many threads.
    pub fn set_fill(
        &self,
        [graph, node]: [usize; 2],
        threads: u32,
        out: u64,
        floats: usize,
        value: f32,
    ) -> Status {
        let values = [out, floats as u64, u64::from(value.to_bits())];
        let pointers: Vec<*const u8> = values.iter().map(|value| (value as *const u64).cast()).collect();
        let (function, parameters) = (self.function("fill"), pointers.as_ptr());
        let (grid, block, extra) = ([1; 3], [threads, 1, 1], std::ptr::null());
        let launch =
            KernelNode { function, grid, block, shared_bytes: 0, parameters, extra, kernel: 0, context: 0 };
        driver!(cuGraphExecKernelNodeSetParams_v2(graph, node, &launch))
    }

    /// The node that was captured last in a stream.
    pub fn last_node(&self, stream: usize) -> usize {
        let (mut status, mut nodes, mut count) = (0, std::ptr::null(), 0);
        let (id, graph) = (std::ptr::null_mut(), std::ptr::null_mut());
        driver!(ok(cuStreamGetCaptureInfo_v2(stream, &mut status, id, graph, &mut nodes, &mut count)));
        assert_eq!((status, count), (1, 1));
        driver!(*nodes)
    }

    pub fn fill(&self, out: u64, floats: usize, value: f32, stream: usize) -> Status {
        self.launch(
            "fill",
            128,
            stream,
            &[Argument::Address(out), Argument::Integer(floats as i32), Argument::Float(value)],
        )
    }

    pub fn add(&self, out: u64, from: u64, floats: usize, stream: usize) -> Status {
        self.launch(
            "add",
            128,
            stream,
            &[Argument::Address(out), Argument::Address(from), Argument::Integer(floats as i32)],
        )
    }

    pub fn synchronize(&self) -> Status {
        driver!(cuCtxSynchronize())
    }

    /// Waits and reads.
    pub fn read(&self, from: u64, floats: usize) -> Vec<f32> {
        let mut out = vec![0f32; floats];
        ok(self.synchronize());
        driver!(ok(cuMemcpyDtoH_v2(out.as_mut_ptr().cast(), from, floats * 4)));
        out
    }
}
