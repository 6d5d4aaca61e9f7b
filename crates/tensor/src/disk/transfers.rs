//! Transfers between disk memory and memory, cut into pieces of which several are in flight.
//!
//! A transfer sees the effects of those that were started before it: while it shares bytes with one of them, on disk or in
//! memory, and one of the two writes there, it waits. All others run beside each other, each direction with a number of
//! requests of its own, so that reads do not wait behind writes.
//!
//! Direct requests have whole blocks and aligned memory. Pieces of memory that is not aligned go through aligned buffers
//! (`bounce`). A part of a block, at the end of a transfer, is read with its block, and written with the block around it.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

use super::bounce::Bounce;
use super::checksums::Checksums;
use super::engine::{Engine, Request};
use super::stripes::StripePosition;
use super::{BLOCK, Layout, Mapping, Store};

/// Bytes to move between disk memory and memory.
#[derive(Clone, Copy)]
pub(crate) struct Transfer {
    /// True if it writes to disk.
    pub(crate) writes: bool,
    /// Offset in the disk memory.
    pub(crate) at: u64,
    /// An exposed address.
    pub(crate) memory: usize,
    pub(crate) bytes: usize,
}

/// A transfer that is over.
pub(crate) struct Over {
    pub(crate) number: u64,
    pub(crate) result: Result<(), String>,
    /// The part of the time that requests took which is its own.
    pub(crate) time: Duration,
}

/// A transfer that is not over.
struct Active {
    number: u64,
    transfer: Transfer,
    /// Its blocks on disk.
    blocks: Range<u64>,
    /// Bytes that were cut into pieces so far.
    cut: usize,
    /// Pieces in flight.
    pieces: usize,
    failure: Option<String>,
    time: Duration,
}

/// A request in flight.
struct Piece {
    /// The number of its transfer.
    number: u64,
    /// Request for its remaining bytes.
    request: Request,
    /// Offset of its first byte in the disk memory, and its memory.
    at: u64,
    memory: usize,
    bytes: usize,
    /// The aligned buffer that it uses: its number and address.
    bounce: Option<(usize, usize)>,
}

/// The transfers of a disk memory.
pub(super) struct Transfers {
    engine: Box<dyn Engine>,
    /// Reads in flight at once, and as many writes.
    depth: usize,
    /// In the order in which they were started.
    active: VecDeque<Active>,
    /// By the number of the request.
    pieces: Vec<Option<Piece>>,
    /// Requests in flight: reads and writes.
    in_flight: [usize; 2],
    bounce: Bounce,
    checksums: Option<Checksums>,
    /// When a request ended last, or the first of those in flight began.
    since: Instant,
}

/// The bytes of a request or a transfer.
///
/// # Safety
/// The memory is valid, and nobody writes it while the slice lives.
unsafe fn slice<'a>(memory: usize, bytes: usize) -> &'a [u8] {
    // SAFETY: kept by the caller.
    unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(memory), bytes) }
}

/// The same to write.
///
/// # Safety
/// The memory is valid, and nobody else uses it while the slice lives.
unsafe fn slice_mut<'a>(memory: usize, bytes: usize) -> &'a mut [u8] {
    // SAFETY: kept by the caller.
    unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(memory), bytes) }
}

impl Transfers {
    /// `checked`: the disk memory of which checksums are kept.
    pub(super) fn new(engine: Box<dyn Engine>, depth: usize, checked: Option<&Layout>) -> Transfers {
        Transfers {
            engine,
            depth,
            active: VecDeque::new(),
            pieces: (0..2 * depth).map(|_| None).collect(),
            in_flight: [0; 2],
            bounce: Bounce::default(),
            checksums: checked.map(Checksums::new),
            since: Instant::now(),
        }
    }

    pub(super) fn use_memory(&mut self, memory: Vec<Mapping>) {
        self.engine.use_memory(memory);
    }

    pub(super) fn registered_bytes(&self) -> u64 {
        self.engine.registered_bytes()
    }

    pub(super) fn start(&mut self, number: u64, transfer: Transfer, layout: &Layout) {
        let (block, end) = (layout.block as u64, transfer.at + transfer.bytes as u64);
        let blocks = transfer.at / block * block..end.next_multiple_of(block);
        let (failure, time) = (None, Duration::ZERO);
        self.active.push_back(Active { number, transfer, blocks, cut: 0, pieces: 0, failure, time });
    }

    pub(super) fn progress(&mut self, layout: &Layout) -> Vec<Over> {
        if self.in_flight == [0; 2] {
            self.since = Instant::now();
        }
        self.fill(layout);
        if self.in_flight != [0; 2] {
            let (id, result) = self.engine.complete();
            self.land(id, result, layout);
        }
        let mut over = Vec::new();
        self.active.retain_mut(|active| {
            let is_over = active.is_cut() && active.pieces == 0;
            if is_over {
                let result = active.failure.take().map_or(Ok(()), Err);
                over.push(Over { number: active.number, result, time: active.time });
            }
            !is_over
        });
        over
    }

    /// Submits requests of every transfer that may run, up to the depth.
    fn fill(&mut self, layout: &Layout) {
        for index in 0..self.active.len() {
            let active = &self.active[index];
            let direction = usize::from(active.transfer.writes);
            let waits = || self.active.range(..index).any(|earlier| earlier.conflicts(active));
            if active.is_cut() || (active.cut == 0 && waits()) {
                continue;
            }
            while self.in_flight[direction] < self.depth && !self.active[index].is_cut() {
                match self.cut(index, layout) {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(reason) => self.active[index].failure = Some(reason),
                }
            }
        }
    }

    /// Cuts a piece off a transfer and submits it, or moves a part of a block. False while there is no aligned buffer.
    fn cut(&mut self, index: usize, layout: &Layout) -> Result<bool, String> {
        let Active { number, transfer, cut, .. } = self.active[index];
        let Transfer { writes, at, memory, bytes } = transfer;
        let (at, memory, left) = (at + cut as u64, memory + cut, bytes - cut);
        let within = (at % layout.block as u64) as usize;
        if within != 0 || left < layout.block {
            let bytes = left.min(layout.block - within);
            let start = Instant::now();
            self.part_of_block(layout, at, Transfer { writes, at, memory, bytes })?;
            self.active[index].cut += bytes;
            self.active[index].time += start.elapsed();
            return Ok(true);
        }
        let StripePosition { folder, offset, room } = layout.stripes.place(at);
        let bytes = left.min(room as usize) / layout.block * layout.block;
        let mut bounce = None;
        if !memory.is_multiple_of(layout.memory_align) {
            bounce = self.bounce.take()?;
            if bounce.is_none() {
                return Ok(false);
            }
        }
        let target = bounce.map_or(memory, |(_, address)| address);
        if writes {
            // SAFETY: whoever started the transfer keeps its memory valid, and lets nobody write it meanwhile.
            let from = unsafe { slice(memory, bytes) };
            if let Some(checksums) = &mut self.checksums {
                checksums.note(at, from);
            }
            if bounce.is_some() {
                // SAFETY: the buffer has a piece's bytes, and is this piece's until it is given back.
                unsafe { slice_mut(target, bytes) }.copy_from_slice(from);
            }
        }
        let id = self.pieces.iter().position(Option::is_none).expect("room for twice the depth");
        let request = Request { id, store: folder, writes, offset, memory: target, bytes };
        self.pieces[id] = Some(Piece { number, request, at, memory, bytes, bounce });
        self.in_flight[usize::from(writes)] += 1;
        self.active[index].cut += bytes;
        self.active[index].pieces += 1;
        self.engine.submit(request);
        Ok(true)
    }

    /// A request has ended: the rest of a short one goes on.
    fn land(&mut self, id: usize, result: std::io::Result<usize>, layout: &Layout) {
        let mut piece = self.pieces[id].take().expect("a request in flight");
        let index = self.active.iter().position(|active| active.number == piece.number);
        let index = index.expect("a transfer is over after its pieces");
        let now = Instant::now();
        self.active[index].time += now.duration_since(std::mem::replace(&mut self.since, now));
        match piece.moved(result, layout) {
            Ok(false) => {
                self.engine.submit(piece.request);
                self.pieces[id] = Some(piece);
                return;
            }
            Ok(true) => {
                if let Err(reason) = self.arrived(&piece, layout) {
                    self.active[index].failure.get_or_insert(reason);
                }
            }
            Err(reason) => {
                self.active[index].failure.get_or_insert(reason);
            }
        }
        if let Some((buffer, _)) = piece.bounce {
            self.bounce.give_back(buffer);
        }
        self.active[index].pieces -= 1;
        self.in_flight[usize::from(piece.request.writes)] -= 1;
    }

    /// All bytes of a piece were moved.
    fn arrived(&mut self, piece: &Piece, layout: &Layout) -> Result<(), String> {
        let Piece { at, memory, bytes, bounce, request, .. } = *piece;
        if request.writes {
            return Ok(());
        }
        let target = bounce.map_or(memory, |(_, address)| address);
        // SAFETY: the request is over; the transfer keeps its memory, and the buffer is the piece's.
        let read = unsafe { slice(target, bytes) };
        self.check(at, read, layout)?;
        if bounce.is_some() {
            // SAFETY: whoever started the transfer keeps its memory valid, and lets nobody else use it meanwhile.
            unsafe { slice_mut(memory, bytes) }.copy_from_slice(read);
        }
        Ok(())
    }

    fn check(&self, at: u64, blocks: &[u8], layout: &Layout) -> Result<(), String> {
        let Some(checksums) = &self.checksums else { return Ok(()) };
        checksums.check(at, blocks).map_err(|(at, [found, expected])| {
            let StripePosition { folder, offset, .. } = layout.stripes.place(at);
            let Store { place, bytes, .. } = &layout.stores[folder];
            format!(
                "the {BLOCK} bytes at offset {offset} of the disk memory of {bytes} bytes in {place} are not those that were \
                 written: their checksum is {found:08x}, not {expected:08x}; the disk, its driver or the memory is faulty"
            )
        })
    }

    /// Moves bytes of one block, now.
    fn part_of_block(&mut self, layout: &Layout, at: u64, part: Transfer) -> Result<(), String> {
        let within = (at % BLOCK as u64) as usize;
        let StripePosition { folder, offset, .. } = layout.stripes.place(at - within as u64);
        let store = &layout.stores[folder];
        let range = within..within + part.bytes;
        let block = self.bounce.block()?;
        let address = block.as_mut_ptr().expose_provenance();
        store.all("read", address, offset)?;
        // SAFETY: the buffer has a block, and nobody else uses it.
        let block = unsafe { slice_mut(address, BLOCK) };
        self.check(at - within as u64, block, layout)?;
        if !part.writes {
            // SAFETY: whoever started the transfer keeps its memory valid, and lets nobody else use it meanwhile.
            unsafe { slice_mut(part.memory, part.bytes) }.copy_from_slice(&block[range]);
            return Ok(());
        }
        // SAFETY: whoever started the transfer keeps its memory valid, and lets nobody write it meanwhile.
        block[range].copy_from_slice(unsafe { slice(part.memory, part.bytes) });
        if let Some(checksums) = &mut self.checksums {
            checksums.note(at - within as u64, block);
        }
        store.all("write", address, offset)
    }
}

impl Drop for Transfers {
    /// Waits for requests in flight, since others may use their memory afterwards.
    fn drop(&mut self) {
        for _ in 0..self.in_flight.iter().sum() {
            let _ = self.engine.complete();
        }
    }
}

impl Active {
    /// Returns whether no more pieces are cut off it.
    fn is_cut(&self) -> bool {
        self.cut == self.transfer.bytes || self.failure.is_some()
    }

    /// Returns whether a later transfer must wait for this one.
    fn conflicts(&self, later: &Active) -> bool {
        let memory = |transfer: &Transfer| transfer.memory..transfer.memory + transfer.bytes;
        let on_disk = self.blocks.start.max(later.blocks.start) < self.blocks.end.min(later.blocks.end);
        let (own, other) = (memory(&self.transfer), memory(&later.transfer));
        let in_memory = own.start.max(other.start) < own.end.min(other.end);
        let (writes, later_writes) = (self.transfer.writes, later.transfer.writes);
        // A transfer that writes to disk reads memory, and the other way round.
        (on_disk && (writes || later_writes)) || (in_memory && (!writes || !later_writes))
    }
}

impl Piece {
    /// Some of its bytes have moved: whether that was all. Otherwise its request has become that of the rest.
    fn moved(&mut self, result: std::io::Result<usize>, layout: &Layout) -> Result<bool, String> {
        let Request { store, writes, offset, bytes, .. } = self.request;
        let failed = |reason: &str| {
            let verb = if writes { "write" } else { "read" };
            layout.stores[store].failed(verb, bytes, offset, reason)
        };
        use std::io::ErrorKind::{Interrupted, WouldBlock};
        let moved = match result {
            Err(error) if matches!(error.kind(), Interrupted | WouldBlock) => return Ok(false),
            Err(error) => return Err(failed(&error.to_string())),
            Ok(0) if writes => return Err(failed("the system writes none of them")),
            Ok(0) => return Err(failed("the file ends before them")),
            Ok(moved) if moved == bytes => return Ok(true),
            // The rest begins at a block again.
            Ok(moved) => moved / layout.memory_align * layout.memory_align,
        };
        if moved == 0 {
            return Err(failed("the system transfers less than a block"));
        }
        self.request.offset += moved as u64;
        self.request.memory += moved;
        self.request.bytes -= moved;
        Ok(false)
    }
}

impl Store {
    /// Reads or writes a block now; `memory` is the address of an aligned buffer.
    fn all(&self, verb: &str, memory: usize, offset: u64) -> Result<(), String> {
        let (writes, mut done) = (verb == "write", 0);
        while done < BLOCK {
            let (at, left) = (offset + done as u64, BLOCK - done);
            let result = match writes {
                // SAFETY: the buffer has a block, and only the caller uses it.
                true => self.storage.write_at(unsafe { slice(memory + done, left) }, at),
                // SAFETY: as above.
                false => self.storage.read_at(unsafe { slice_mut(memory + done, left) }, at),
            };
            match result {
                Ok(0) => return Err(self.failed(verb, left, at, "the file ends there")),
                Ok(moved) => done += moved,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.failed(verb, left, at, &error.to_string())),
            }
        }
        Ok(())
    }
}
