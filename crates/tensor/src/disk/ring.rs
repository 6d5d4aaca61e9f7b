//! Requests by io_uring: many in flight, on one thread, and without the page cache.
//!
//! Memory of the device is registered with the ring in windows, each when a request first uses it, so that the system does
//! not look its pages up for every request. Where it may not be (`ulimit -l`, old systems), requests run all the same.

use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::os::fd::AsRawFd;
use std::sync::Arc;

use io_uring::{IoUring, Probe, opcode, squeue, types};

use super::Mapping;
use super::engine::{Engine, Request};

/// Bytes of memory that are registered at a time. Requests that cross the end of a window use unregistered memory.
const WINDOW: usize = 64 << 20;

/// Windows that a ring may have, by the limit of the system.
const WINDOWS_MAX: usize = 1 << 14;

/// A ring over some files.
pub(super) struct Ring {
    ring: IoUring,
    files: Vec<Arc<File>>,
    memory: Registered,
    /// Requests that are not over.
    in_flight: Vec<usize>,
}

/// Memory that may be registered.
#[derive(Default)]
struct Registered {
    mappings: Vec<Windows>,
    /// The system has refused a window: no more are tried.
    is_refused: bool,
    bytes: u64,
}

/// The windows of one mapping.
struct Windows {
    /// Keeps its memory as long as the ring may use it.
    mapping: Mapping,
    /// The number of the first.
    first: usize,
    /// For each: whether it is registered.
    are_registered: Vec<bool>,
}

impl Ring {
    /// A ring with room for `requests` at once for each file.
    ///
    /// # Errors
    /// If the system has no io_uring, lacks its reads and writes, or does not let this process use it.
    pub(super) fn start(files: &[Arc<File>], requests: usize) -> Result<Ring> {
        let entries = (requests * files.len()).next_power_of_two().clamp(8, 4096) as u32;
        let ring = IoUring::builder().dontfork().build(entries)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let needed =
            [opcode::Read::CODE, opcode::Write::CODE, opcode::ReadFixed::CODE, opcode::WriteFixed::CODE];
        if !needed.into_iter().all(|code| probe.is_supported(code)) {
            return Err(Error::new(ErrorKind::Unsupported, "its io_uring has no reads and writes"));
        }
        Ok(Ring { ring, files: files.to_vec(), memory: Registered::default(), in_flight: Vec::new() })
    }

    fn entry(&mut self, request: &Request) -> squeue::Entry {
        let Request { id, store, writes, offset, memory, bytes } = *request;
        let (file, length) = (types::Fd(self.files[store].as_raw_fd()), bytes as u32);
        let address = std::ptr::with_exposed_provenance_mut::<u8>(memory);
        let entry = match (self.memory.window(&self.ring, memory, bytes), writes) {
            (Some(window), true) => {
                opcode::WriteFixed::new(file, address, length, window).offset(offset).build()
            }
            (Some(window), false) => {
                opcode::ReadFixed::new(file, address, length, window).offset(offset).build()
            }
            (None, true) => opcode::Write::new(file, address, length).offset(offset).build(),
            (None, false) => opcode::Read::new(file, address, length).offset(offset).build(),
        };
        entry.user_data(id as u64)
    }
}

impl Engine for Ring {
    fn submit(&mut self, request: Request) {
        let entry = self.entry(&request);
        self.in_flight.push(request.id);
        loop {
            // SAFETY: whoever made the request keeps its memory valid until it is over, and the ring has the files open.
            if unsafe { self.ring.submission().push(&entry) }.is_ok() {
                return;
            }
            // The queue is full. An error is met again in `complete`.
            if self.ring.submit().is_err() {
                std::thread::yield_now();
            }
        }
    }

    fn complete(&mut self) -> (usize, Result<usize>) {
        loop {
            if let Some(entry) = self.ring.completion().next() {
                let (id, result) = (entry.user_data() as usize, entry.result());
                self.in_flight.retain(|other| *other != id);
                let result = usize::try_from(result).map_err(|_| Error::from_raw_os_error(-result));
                return (id, result);
            }
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if matches!(error.kind(), ErrorKind::Interrupted) => {}
                // EAGAIN, EBUSY: the system has no memory for requests now, or results must be taken first.
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::ResourceBusy) => {
                    std::thread::yield_now();
                }
                Err(error) => return (self.in_flight.pop().expect("a request was submitted"), Err(error)),
            }
        }
    }

    fn use_memory(&mut self, memory: Vec<Mapping>) {
        self.memory = Registered::new(&self.ring, memory);
    }

    fn registered_bytes(&self) -> u64 {
        self.memory.bytes
    }
}

impl Registered {
    fn new(ring: &IoUring, memory: Vec<Mapping>) -> Registered {
        let mut windows: Vec<Windows> = Vec::new();
        let mut count = 0;
        for mapping in memory {
            let own = mapping.bytes.div_ceil(WINDOW);
            if count + own <= WINDOWS_MAX {
                windows.push(Windows { mapping, first: count, are_registered: vec![false; own] });
                count += own;
            }
        }
        let is_refused = count == 0 || ring.submitter().register_buffers_sparse(count as u32).is_err();
        Registered { mappings: windows, is_refused, bytes: 0 }
    }

    /// The number of the registered window that has these bytes, which is registered now if it was not.
    fn window(&mut self, ring: &IoUring, memory: usize, bytes: usize) -> Option<u16> {
        let of = |windows: &&mut Windows| windows.mapping.offset(memory).is_some();
        let windows = self.mappings.iter_mut().find(of)?;
        let Mapping { start, bytes: all, .. } = windows.mapping;
        let offset = memory - start;
        let number = offset / WINDOW;
        if (offset + bytes - 1) / WINDOW != number {
            return None;
        }
        let index = windows.first + number;
        if !windows.are_registered[number] {
            if self.is_refused {
                return None;
            }
            let length = WINDOW.min(all - number * WINDOW);
            let base = std::ptr::with_exposed_provenance_mut(start + number * WINDOW);
            let window = [libc::iovec { iov_base: base, iov_len: length }];
            // SAFETY: the range lies inside the mapping, which stays as long as the ring: it holds the owner.
            let done = unsafe { ring.submitter().register_buffers_update(index as u32, &window, None) };
            self.is_refused = done.is_err();
            if self.is_refused {
                return None;
            }
            windows.are_registered[number] = true;
            self.bytes += length as u64;
        }
        Some(index as u16)
    }
}
