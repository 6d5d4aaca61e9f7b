//! One rank's part of a checkpoint, streamed through a bounded window.
//!
//! `rank-00000.safetensors` holds the pieces that the rank owns, one after another; its header is known
//! before the first byte, so the file is written once, front to back, and never held whole. Each piece
//! is hashed as it passes. `rank-00000.pieces.json` tells rank 0 what was written; `commit` turns all of
//! these lists into one manifest.

use std::fs;
use std::io::Write;
use std::ops::Range;
use std::path::Path;

use phalanx_plan::Stripe;
use phalanx_plan::trace::DType;
use phalanx_system::files::AtomicFile;

use crate::manifest::{HeaderRecord, MANIFEST, PieceList, PieceRecord, digest};
use crate::tensor_file::{NewEntry, elements, header};
use crate::{CheckpointError, Result};

/// A part of one tensor that this rank saves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorPiece {
    /// Name of the state: `parameters`, `exp_avg`, `exp_avg_sq`, `momentum` ...
    pub state: &'static str,
    /// Name of the parameter.
    pub name: String,
    /// Shape of the whole tensor, not of the piece.
    pub shape: Vec<usize>,
    /// Type of an element, in memory and on disk.
    pub dtype: DType,
    /// The part of the flattened tensor to which `range` refers; the whole when `None`.
    pub stripe: Option<Stripe>,
    /// Elements of the flattened whole tensor, or of the stripe. Empty ranges (padding of a shard) are
    /// skipped.
    pub range: Range<u64>,
}

/// Fills bytes with the elements of a range of a piece, for [`write_rank`].
pub type Fill<'a> = dyn FnMut(usize, Range<u64>, &mut [u8]) + 'a;

/// Writes the file and the piece list of `rank` into `dir`, both synced.
///
/// `fill(piece, range, bytes)` must overwrite all of `bytes`, which are at most `window_bytes` (at least
/// 8) and aligned to 8, with the elements `range` of `pieces[piece]`, counted from the start of that
/// piece. It is called in order, each element once. The window is the only memory that grows with the
/// data; it is allocated here, once.
///
/// # Errors
/// [`CheckpointError::Write`]; what this rank wrote is removed again. The others should stop, and rank 0
/// then calls [`crate::discard`] instead of [`crate::commit`].
///
/// # Panics
/// On a stripe that does not fit its tensor, a range outside of them, or a window below 8 bytes: bugs of
/// the caller.
pub fn write_rank(
    dir: &Path,
    rank: usize,
    pieces: &[TensorPiece],
    window_bytes: usize,
    fill: &mut Fill<'_>,
) -> Result<()> {
    assert!(window_bytes >= 8, "a window of {window_bytes} bytes holds no element of 8 bytes");
    let data_path = dir.join(data_file(rank));
    let list_path = dir.join(list_file(rank));
    let written = write_data(&data_path, pieces, window_bytes, fill).and_then(|list| {
        let json = serde_json::to_vec(&list).expect("a piece list has only names and numbers");
        phalanx_system::files::write(&list_path, json).map_err(CheckpointError::writing(&list_path))
    });
    if written.is_err() {
        // Best effort: the first error is reported, and `discard` or `begin` removes the folder.
        let _ = fs::remove_file(&data_path);
        let _ = fs::remove_file(&list_path);
    }
    written
}

/// Name of the file with the data of `rank`.
pub(crate) fn data_file(rank: usize) -> String {
    format!("rank-{rank:05}.safetensors")
}

/// Name of the list that exists until commit.
pub(crate) fn list_file(rank: usize) -> String {
    format!("rank-{rank:05}.pieces.json")
}

/// Returns whether a save writes a file of this name.
pub(crate) fn is_own(name: &str) -> bool {
    let rank = |name: &str| {
        let rest = name.strip_prefix("rank-")?;
        rest.strip_suffix(".safetensors").or_else(|| rest.strip_suffix(".pieces.json"))?.parse::<usize>().ok()
    };
    let is_of_rank = |rank| name == data_file(rank) || name == list_file(rank);
    name == MANIFEST || phalanx_system::files::is_temporary(name) || rank(name).is_some_and(is_of_rank)
}

fn write_data(
    path: &Path,
    pieces: &[TensorPiece],
    window_bytes: usize,
    fill: &mut Fill<'_>,
) -> Result<PieceList> {
    let owned: Vec<(usize, &TensorPiece)> =
        pieces.iter().enumerate().filter(|(_, piece)| !piece.range.is_empty()).collect();
    let entries: Vec<NewEntry> = owned.iter().map(|(_, piece)| entry(piece)).collect();
    let largest = entries.iter().map(|entry| entry.bytes).max().unwrap_or(0);
    let window_bytes = (window_bytes as u64).min(largest.next_multiple_of(8)) as usize;
    // Words, so that a caller may view the bytes as numbers of any type.
    let mut window = vec![0u64; window_bytes / 8];
    let mut output = Output::create(path)?;
    let header = header(&entries, &[]);
    output.write(&header)?;
    let header = HeaderRecord { bytes: header.len() as u64, blake3: digest(&header) };
    let mut records = Vec::with_capacity(owned.len());
    for (index, piece) in owned {
        let offset = output.bytes;
        let mut hasher = blake3::Hasher::new();
        let element_bytes = piece.dtype.bytes();
        let step = (window.len() * 8 / element_bytes) as u64;
        let count = piece.range.end - piece.range.start;
        let mut done = 0;
        while done < count {
            let next = count.min(done + step);
            let bytes = (next - done) as usize * element_bytes;
            let filled = &mut bytemuck::cast_slice_mut(&mut window)[..bytes];
            fill(index, done..next, filled);
            hasher.update(filled);
            output.write(filled)?;
            done = next;
        }
        records.push(PieceRecord {
            state: piece.state.to_string(),
            name: piece.name.clone(),
            shape: piece.shape.clone(),
            dtype: piece.dtype,
            stripe: stripe(piece),
            range: [piece.range.start, piece.range.end],
            offset,
            blake3: hasher.finalize().to_hex().to_string(),
        });
    }
    let file_bytes = output.bytes;
    output.finish()?;
    Ok(PieceList { file_bytes, header, pieces: records })
}

/// The header entry of a piece, which must lie within its tensor.
fn entry(piece: &TensorPiece) -> NewEntry {
    let TensorPiece { state, name, shape, dtype, range, .. } = piece;
    let whole = elements(shape).expect("a tensor has fewer than 2^64 elements");
    let stripe = stripe(piece);
    let local = stripe.map_or(Some(whole), |stripe| stripe.local_elements(whole));
    let inside = local.is_some_and(|local| range.end <= local);
    assert!(inside, "{state}/{name}: {range:?} of {stripe:?} lies outside shape {shape:?}");
    let count = range.end - range.start;
    let part = stripe.map_or_else(String::new, |stripe| format!(" ({stripe})"));
    NewEntry {
        key: format!("{state}/{name}{part}@{}", range.start),
        dtype: *dtype,
        shape: vec![count as usize],
        bytes: count * dtype.bytes() as u64,
    }
}

/// The stripe of a piece; None for a stripe of a single rank, which is the whole tensor.
fn stripe(piece: &TensorPiece) -> Option<Stripe> {
    piece.stripe.filter(|stripe| !stripe.is_whole())
}

/// A file that is written in order and tracks its position.
struct Output {
    file: AtomicFile,
    bytes: u64,
}

impl Output {
    fn create(path: &Path) -> Result<Output> {
        let file = AtomicFile::create(path).map_err(CheckpointError::writing(path))?;
        Ok(Output { file, bytes: 0 })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(CheckpointError::writing(self.file.target()))?;
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    fn finish(self) -> Result<()> {
        let path = self.file.target().to_path_buf();
        self.file.commit().map_err(CheckpointError::writing(&path))
    }
}
