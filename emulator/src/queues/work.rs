//! What a stream can be asked to do.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::execute::Operands;
use crate::kernel::Kernel;

use super::{Exchange, Point, Product, ReadyGraph};

/// Work of a stream.
#[derive(Clone)]
pub enum Work {
    /// Runs a kernel.
    Launch(Launch),
    /// Copies bytes.
    Copy(Copy),
    /// Fills device memory.
    Fill(Fill),
    /// Multiplies matrices.
    Product(Box<Product>),
    /// Exchanges bytes with other devices.
    Exchange(Box<Exchange>),
    /// Calls a function of the host.
    Call(HostCall),
    /// Frees an allocation.
    Free(u64),
    /// Begins a region of an allocation: address, bytes, name.
    BeginRegion(u64, usize, String),
    /// Ends the region at an address.
    EndRegion(u64),
    /// Marks a point as reached.
    Record(Point),
    /// Waits until a point is reached.
    Wait(Point),
    /// Waits until a word of host memory has reached a value.
    WaitValue(HostWord),
    /// Runs a graph.
    Graph(Arc<ReadyGraph>),
}

/// A word of pinned host memory, and the value from which on those who wait for it go on.
#[derive(Clone, Copy)]
pub struct HostWord {
    /// Its address. Whoever queued the wait keeps the word there.
    pub address: usize,
    /// The value.
    pub value: u32,
}

impl HostWord {
    /// Whether the value is reached: the difference, as a signed number, is not negative.
    pub(super) fn is_reached(&self) -> bool {
        let word = std::ptr::with_exposed_provenance_mut::<u32>(self.address);
        // SAFETY: the address was checked to be that of a word of pinned memory, which whoever queued the wait keeps; other threads
        // only access it as an atomic number.
        let found = unsafe { AtomicU32::from_ptr(word) }.load(Ordering::Acquire);
        found.wrapping_sub(self.value) as i32 >= 0
    }
}

/// A launch with its parameters.
#[derive(Clone)]
pub struct Launch {
    /// The kernel.
    pub kernel: Arc<Kernel>,
    /// Blocks by axis.
    pub grid: [u32; 3],
    /// Threads of a block by axis.
    pub block: [u32; 3],
    /// Parameters as the kernel reads them.
    pub parameters: Vec<u8>,
    /// Bytes of dynamic shared memory.
    pub dynamic_shared: usize,
    /// What it may use of the allocations that these lie in.
    pub operands: Arc<Operands>,
}

/// One end of a copy.
#[derive(Clone)]
pub enum Location {
    /// An address of device memory.
    Device(u64),
    /// An address of host memory, which the caller keeps until the copy has ended.
    Host(usize),
    /// Bytes that were read when the copy was queued.
    Bytes(Arc<[u8]>),
}

/// A copy of rows.
#[derive(Clone)]
pub struct Copy {
    /// Where it writes.
    pub to: Location,
    /// Where it reads.
    pub from: Location,
    /// Bytes of a row.
    pub width: usize,
    /// Rows.
    pub height: usize,
    /// Bytes from row to row where it writes.
    pub to_pitch: usize,
    /// Bytes from row to row where it reads.
    pub from_pitch: usize,
}

impl Copy {
    /// A copy of bytes in one piece.
    pub fn whole(to: Location, from: Location, bytes: usize) -> Self {
        Self { to, from, width: bytes, height: 1, to_pitch: bytes, from_pitch: bytes }
    }
}

/// A fill with a pattern.
#[derive(Clone)]
pub struct Fill {
    /// Where it writes.
    pub to: u64,
    /// The pattern of 1, 2 or 4 bytes.
    pub pattern: Vec<u8>,
    /// How often.
    pub count: usize,
}

/// A function of the host with its argument.
#[derive(Clone, Copy)]
pub struct HostCall {
    /// The function.
    pub function: unsafe extern "C" fn(*mut c_void),
    /// Its argument, as an address.
    pub argument: usize,
}
