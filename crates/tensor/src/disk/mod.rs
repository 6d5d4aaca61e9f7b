//! The disk memory of a rank: a file without a name in each of its folders, of which tensors have ranges.
//!
//! A tensor on disk has an offset instead of an address: nobody can read or write it but by a
//! [`DiskTransfer`](crate::backend::DiskTransfer), which runs on the disk stream beside everything else. Transfers are cut
//! into pieces (`transfers`), of which several are in flight: by io_uring (`ring`) or, where the system refuses it, by
//! threads (`engine`). They go past the page cache where the file system can. Over several folders, the memory is
//! striped (`stripes`).

mod bounce;
mod checksums;
mod engine;
mod ring;
mod stripes;
mod survey;
mod transfers;

use std::any::Any;
use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use engine::{Engine, Inline, Threads};
use ring::Ring;
pub use stripes::STRIPE;
use stripes::Stripes;
pub use survey::{DiskSurvey, survey, survey_folders};
pub(crate) use transfers::Transfer;
use transfers::Transfers;

/// Bytes of a block: direct transfers begin at multiples of it, on disk and in memory, and have multiples of it.
pub const BLOCK: usize = phalanx_plan::DISK_ALIGN as usize;

/// Reads in flight for each folder, and as many writes. On disks of several GB/s, more pieces of a MiB bring nothing.
pub const DEPTH: usize = 8;

/// Storage of the bytes of a disk memory. Each call may transfer fewer bytes than were asked for.
pub trait DiskStorage: Send + Sync {
    /// Reads bytes that begin at `offset`; returns how many. Zero at the end.
    ///
    /// # Errors
    /// The system's.
    fn read_at(&self, to: &mut [u8], offset: u64) -> Result<usize>;

    /// Writes bytes that begin at `offset`; returns how many.
    ///
    /// # Errors
    /// The system's.
    fn write_at(&self, from: &[u8], offset: u64) -> Result<usize>;
}

impl DiskStorage for File {
    fn read_at(&self, to: &mut [u8], offset: u64) -> Result<usize> {
        FileExt::read_at(self, to, offset)
    }

    fn write_at(&self, from: &[u8], offset: u64) -> Result<usize> {
        FileExt::write_at(self, from, offset)
    }
}

/// Folders and options of disk memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskOptions {
    /// Existing folders; the memory is striped over them.
    pub folders: Vec<PathBuf>,
    /// True if a checksum of each block is kept in memory, and compared when the block is read.
    pub checksums: bool,
    /// True if transfers use io_uring when the system has it; otherwise they use threads.
    pub io_uring: bool,
    /// True if transfers bypass the page cache when the file system can.
    pub direct: bool,
}

impl DiskOptions {
    /// Disk memory in these folders, as fast as the system can.
    pub fn new(folders: Vec<PathBuf>) -> DiskOptions {
        DiskOptions { folders, checksums: false, io_uring: true, direct: true }
    }
}

/// Memory that stays where it is as long as its owner lives.
pub(crate) struct Mapping {
    /// An exposed address.
    pub(crate) start: usize,
    pub(crate) bytes: usize,
    pub(crate) _owner: Arc<dyn Any + Send + Sync>,
}

impl Mapping {
    /// Offset of an address in it.
    fn offset(&self, address: usize) -> Option<usize> {
        address.checked_sub(self.start).filter(|offset| *offset < self.bytes)
    }
}

/// The part of a disk memory in one folder.
pub(crate) struct Store {
    storage: Arc<dyn DiskStorage>,
    bytes: u64,
    /// Its folder, for errors.
    place: String,
}

/// Layout of a disk memory, for transfers.
pub(crate) struct Layout {
    stores: Vec<Store>,
    stripes: Stripes,
    /// Offsets and lengths of requests are multiples of it.
    block: usize,
    /// Addresses of requests are multiples of it.
    memory_align: usize,
}

/// The storage of one disk memory, and its size.
pub struct DiskMemory {
    bytes: u64,
    layout: Layout,
    transfers: Mutex<Transfers>,
    how: String,
}

impl DiskMemory {
    /// Disk memory in one existing folder, as fast as the system can.
    ///
    /// # Errors
    /// As for [`DiskMemory::with_options`].
    pub fn create(folder: &Path, bytes: u64) -> Result<Arc<DiskMemory>> {
        DiskMemory::with_options(&DiskOptions::new(vec![folder.to_path_buf()]), bytes)
    }

    /// A file without a name in each folder, whose blocks are all allocated.
    ///
    /// # Errors
    /// A folder that is missing or cannot be written, or a file system with too few bytes left: the error says which
    /// folder, how many bytes, and what to do.
    pub fn with_options(options: &DiskOptions, bytes: u64) -> Result<Arc<DiskMemory>> {
        let stripes = Stripes::new(bytes.next_multiple_of(BLOCK as u64), options.folders.len());
        let (mut files, mut is_direct) = (Vec::new(), options.direct);
        for (number, folder) in options.folders.iter().enumerate() {
            let bytes = stripes.bytes_in(number);
            let file = phalanx_system::files::scratch_file(folder, bytes);
            let file = file.map_err(|error| survey::refused(folder, bytes, &error))?;
            is_direct = is_direct && reads_directly(&file, bytes)?;
            files.push(Arc::new(file));
        }
        if !is_direct {
            files.iter().try_for_each(|file| phalanx_system::files::set_buffered(file))?;
        }
        let (engine, by): (Box<dyn Engine>, _) = match Ring::start(&files, 2 * DEPTH) {
            Ok(ring) if options.io_uring => (Box::new(ring), "io_uring"),
            _ => (Box::new(Threads::new(&files)), "threads"),
        };
        let place = |number: usize| options.folders[number].display().to_string();
        let store = |(number, file): (usize, &Arc<File>)| Store {
            storage: Arc::clone(file) as Arc<dyn DiskStorage>,
            bytes: stripes.bytes_in(number),
            place: place(number),
        };
        let stores = files.iter().enumerate().map(store).collect();
        let block = if is_direct || options.checksums { BLOCK } else { 1 };
        let layout = Layout { stores, stripes, block, memory_align: if is_direct { BLOCK } else { 1 } };
        let how = format!("{by}, {}", if is_direct { "direct" } else { "through the page cache" });
        let transfers = Transfers::new(engine, DEPTH * files.len(), options.checksums.then_some(&layout));
        Ok(DiskMemory::new(bytes, layout, transfers, how))
    }

    /// The first `bytes` bytes of a storage, one transfer after the other; errors name its `place`.
    pub fn over(storage: Box<dyn DiskStorage>, bytes: u64, place: String) -> Arc<DiskMemory> {
        DiskMemory::over_with(storage, bytes, place, false)
    }

    /// The same with checksums; the storage has whole blocks.
    pub fn over_with_checksums(storage: Box<dyn DiskStorage>, bytes: u64, place: String) -> Arc<DiskMemory> {
        DiskMemory::over_with(storage, bytes, place, true)
    }

    fn over_with(storage: Box<dyn DiskStorage>, bytes: u64, place: String, checks: bool) -> Arc<DiskMemory> {
        let storage: Arc<dyn DiskStorage> = Arc::from(storage);
        let engine = Box::new(Inline::new(Arc::clone(&storage)));
        let stores = vec![Store { storage, bytes, place }];
        let block = if checks { BLOCK } else { 1 };
        let layout = Layout { stores, stripes: Stripes::new(bytes, 1), block, memory_align: 1 };
        let transfers = Transfers::new(engine, 1, checks.then_some(&layout));
        DiskMemory::new(bytes, layout, transfers, "one by one".to_string())
    }

    fn new(bytes: u64, layout: Layout, transfers: Transfers, how: String) -> Arc<DiskMemory> {
        Arc::new(DiskMemory { bytes, layout, transfers: Mutex::new(transfers), how })
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Method of transfers, for people: `io_uring, direct`.
    pub fn how(&self) -> &str {
        &self.how
    }

    /// Bytes of memory that are registered with the system for faster transfers so far.
    pub fn registered_bytes(&self) -> u64 {
        self.lock().registered_bytes()
    }

    /// Transfers will go from and to this memory: it may be registered with the system, and is kept as long as the disk
    /// memory.
    pub(crate) fn use_memory(&self, memory: Vec<Mapping>) {
        self.lock().use_memory(memory);
    }

    /// Adds a transfer under a number of the caller's.
    ///
    /// # Safety
    /// Its memory stays valid until the transfer is over, and is used meanwhile only by work that is ordered before or
    /// after it.
    pub(crate) unsafe fn start(&self, number: u64, transfer: Transfer) {
        assert!(transfer.at + transfer.bytes as u64 <= self.bytes, "a transfer beyond the disk memory");
        self.lock().start(number, transfer, &self.layout);
    }

    /// Starts what can start and waits for a part of a transfer, if any is in flight. Returns the transfers that are over.
    pub(crate) fn progress(&self) -> Vec<transfers::Over> {
        self.lock().progress(&self.layout)
    }

    /// Nothing panics under this lock but what is a bug.
    fn lock(&self) -> MutexGuard<'_, Transfers> {
        self.transfers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Store {
    /// Why a request failed.
    fn failed(&self, verb: &str, bytes: usize, offset: u64, reason: &str) -> String {
        let Store { place, bytes: size, .. } = self;
        format!(
            "cannot {verb} {bytes} bytes at offset {offset} of the disk memory of {size} bytes in {place}: {reason}"
        )
    }
}

/// Makes transfers of a new file go past the page cache, if its file system and its disk can.
fn reads_directly(file: &File, bytes: u64) -> Result<bool> {
    if !phalanx_system::files::set_direct(file)? {
        return Ok(false);
    }
    let mut blocks = bounce::Blocks::new()?;
    match FileExt::read_at(file, blocks.block(), 0) {
        Ok(read) => Ok(read as u64 == bytes.min(BLOCK as u64)),
        Err(error) if error.kind() == ErrorKind::InvalidInput => Ok(false),
        Err(error) => Err(Error::new(error.kind(), format!("the first block cannot be read: {error}"))),
    }
}
