//! One pass over a whole token file by several threads: its blake3, and the first token that a vocabulary does
//! not have.
//!
//! blake3 is a tree: blocks of a power of two of bytes are hashed apart and merged, and the result is the one
//! that a single pass gives (`b3sum` prints the same).

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use blake3::Hasher;
use blake3::hazmat::{
    ChainingValue, HasherExt, Mode, left_subtree_len, merge_subtrees_non_root, merge_subtrees_root,
};

use super::source::OpenTokenFile;
use super::{Layout, exact, widen};
use crate::{DataError, Result};

/// Bytes that a thread hashes at once: a power of two.
const BLOCK_BYTES: u64 = 1 << 23;

/// Bytes that are read at once.
const WINDOW_BYTES: usize = 1 << 20;

/// Results of [`TokenFile::scan`](super::TokenFile::scan).
#[derive(Debug)]
pub struct Scan {
    /// Checksum of the whole file, in hexadecimal; of several files, those of all, with `+` between them.
    pub blake3: String,
    /// The largest id; `u32::MAX` also for one that no vocabulary has.
    pub largest: u32,
    /// [`DataError::TokenOutOfRange`] with the first token that the vocabulary does not have.
    pub out_of_range: Option<DataError>,
}

/// Number of a token, and its id.
type Token = (usize, i64);

/// One block: its part of the checksum, and its first token that is out of range.
struct Block {
    hasher: Hasher,
    largest: u32,
    out_of_range: Option<Token>,
}

/// Scans `source` for ids from `vocab` on, with at most `threads` threads.
pub(super) fn scan(source: &OpenTokenFile, layout: &Layout, vocab: usize, threads: usize) -> Result<Scan> {
    let count = source.bytes().div_ceil(BLOCK_BYTES).max(1);
    let next = AtomicU64::new(0);
    let done: Mutex<Vec<Option<Result<Block>>>> = Mutex::new((0..count).map(|_| None).collect());
    let work = || {
        let mut buffers = Buffers::new(layout);
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= count {
                return;
            }
            let block = buffers.block(source, layout, vocab, number * BLOCK_BYTES);
            done.lock().expect("no thread panics with the lock")[number as usize] = Some(block);
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads.min(count as usize) {
            // If the system cannot start a thread, this one does its work.
            let _ = thread::Builder::new().spawn_scoped(scope, work);
        }
        work();
    });
    let blocks = done.into_inner().expect("no thread panics with the lock");
    let blocks: Vec<Block> =
        blocks.into_iter().map(|block| block.expect("every block was done")).collect::<Result<_>>()?;
    let first = blocks.iter().find_map(|block| block.out_of_range);
    let out_of_range = first.map(|(position, id)| {
        let origin = source.path().display().to_string();
        DataError::TokenOutOfRange { origin, position, id, vocab }
    });
    let largest = blocks.iter().map(|block| block.largest).max().unwrap_or(0);
    Ok(Scan { blake3: root(&blocks, source.bytes()), largest, out_of_range })
}

/// The checksum of a file of `bytes` bytes, in hexadecimal.
fn root(blocks: &[Block], bytes: u64) -> String {
    if let [only] = blocks {
        return only.hasher.finalize().to_hex().to_string();
    }
    let (left, right) = halves(blocks, bytes);
    merge_subtrees_root(&left, &right, Mode::Hash).to_hex().to_string()
}

fn subtree(blocks: &[Block], bytes: u64) -> ChainingValue {
    if let [only] = blocks {
        return only.hasher.finalize_non_root();
    }
    let (left, right) = halves(blocks, bytes);
    merge_subtrees_non_root(&left, &right, Mode::Hash)
}

/// The two halves of a tree; the left one is full.
fn halves(blocks: &[Block], bytes: u64) -> (ChainingValue, ChainingValue) {
    let full = left_subtree_len(bytes);
    let (left, right) = blocks.split_at((full / BLOCK_BYTES) as usize);
    (subtree(left, full), subtree(right, bytes - full))
}

/// Memory of one thread.
struct Buffers {
    window: Vec<u8>,
    widened: Vec<u32>,
}

impl Buffers {
    fn new(layout: &Layout) -> Buffers {
        Buffers { window: vec![0; WINDOW_BYTES], widened: vec![0; WINDOW_BYTES / layout.ids.bytes()] }
    }

    /// The block from byte `start` on.
    fn block(&mut self, source: &OpenTokenFile, layout: &Layout, vocab: usize, start: u64) -> Result<Block> {
        let mut hasher = Hasher::new();
        hasher.set_input_offset(start);
        let (mut largest, mut out_of_range) = (0, None);
        let end = source.bytes().min(start + BLOCK_BYTES);
        let mut at = start;
        while at < end {
            let here = at..end.min(at + WINDOW_BYTES as u64);
            let window = &mut self.window[..(here.end - here.start) as usize];
            source.read(at, window)?;
            hasher.update(window);
            at = here.end;
            let (max, beyond) = first_beyond(layout, vocab, here, window, &mut self.widened);
            (largest, out_of_range) = (largest.max(max), out_of_range.or(beyond));
        }
        Ok(Block { hasher, largest, out_of_range })
    }
}

/// The largest id among the bytes `here` of a file, and the first token that a vocabulary of `vocab` ids does not have.
fn first_beyond(
    layout: &Layout,
    vocab: usize,
    here: Range<u64>,
    window: &[u8],
    widened: &mut [u32],
) -> (u32, Option<Token>) {
    let (data, width) = (&layout.data, layout.ids.bytes());
    let limit = u32::try_from(vocab).unwrap_or(u32::MAX);
    let ids = data.start.max(here.start)..data.end.min(here.end);
    if ids.start >= ids.end {
        return (0, None);
    }
    let bytes = &window[(ids.start - here.start) as usize..(ids.end - here.start) as usize];
    let widened = &mut widened[..bytes.len() / width];
    widen(layout.ids, bytes, widened);
    let largest = widened.iter().fold(0, |largest, &id| largest.max(id));
    let first = (largest >= limit).then(|| widened.iter().position(|&id| id >= limit)).flatten();
    let before = ((ids.start - data.start) / width as u64) as usize;
    (largest, first.map(|place| (before + place, exact(layout.ids, &bytes[place * width..][..width]))))
}
