//! Any range of any tensor, from pieces of whatever layout saved it.
//!
//! A read walks the pieces that hold the range. The first time a piece is touched, all of it streams
//! through a window and its blake3 is compared; the wanted part lands in the caller's buffer on the way,
//! so a load in the layout of the save reads every byte once. Positional reads need no map and no lock:
//! one open checkpoint may serve many threads.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::Value;

use crate::manifest::{MANIFEST, Manifest, StoredPiece, StoredTensor};
use crate::nearest::nearest;
use crate::steps::{self, SaveStage};
use crate::{CheckpointError, Result};

/// Bytes of the window that a read needs at most, besides the caller's buffer.
pub const READ_WINDOW_BYTES: usize = 1 << 20;

/// A committed checkpoint, open for reading.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    pub(crate) manifest: Manifest,
    /// Per tensor and piece: whether its checksum was compared.
    verified: Vec<Vec<AtomicBool>>,
}

/// What [`newest`] found.
#[derive(Debug)]
pub struct Newest {
    /// The highest step that is whole; `None` when there is none.
    pub checkpoint: Option<Checkpoint>,
    /// Higher steps that are damaged, highest first: to be told to the user.
    pub skipped: Vec<Skipped>,
}

/// A checkpoint that [`newest`] passed over.
#[derive(Debug)]
pub struct Skipped {
    /// Its folder.
    pub path: PathBuf,
    /// What is wrong with it.
    pub reason: CheckpointError,
}

/// The checkpoint of the highest step under `checkpoints` whose manifest is valid and whose files are
/// there in full length. Checksums of tensors are compared when they are read. Folders of unfinished
/// saves are ignored, and a folder that does not exist holds no checkpoint.
///
/// # Errors
/// [`CheckpointError::Read`] when `checkpoints` cannot be listed.
pub fn newest(checkpoints: &Path) -> Result<Newest> {
    let folders = steps::list(checkpoints)?;
    let mut skipped = Vec::new();
    for folder in folders.iter().filter(|folder| folder.stage != SaveStage::Unfinished) {
        let opened = Checkpoint::open(&folder.path)
            .and_then(|checkpoint| checkpoint.check_files().map(|()| checkpoint));
        match opened {
            Ok(checkpoint) => return Ok(Newest { checkpoint: Some(checkpoint), skipped }),
            Err(reason) => skipped.push(Skipped { path: folder.path.clone(), reason }),
        }
    }
    Ok(Newest { checkpoint: None, skipped })
}

impl Checkpoint {
    /// Opens the folder `dir`, reading and checking its manifest only.
    ///
    /// # Errors
    /// [`CheckpointError::NotACheckpoint`], [`CheckpointError::Manifest`], [`CheckpointError::Read`].
    pub fn open(dir: &Path) -> Result<Checkpoint> {
        let path = dir.join(MANIFEST);
        let bytes = match fs::read(&path) {
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Err(no_manifest(dir)),
            other => other.map_err(CheckpointError::reading(&path))?,
        };
        let manifest = Manifest::decode(&path, &bytes)?;
        let verified = manifest
            .tensors
            .iter()
            .map(|tensor| tensor.pieces.iter().map(|_| AtomicBool::new(false)).collect())
            .collect();
        Ok(Checkpoint { dir: dir.to_path_buf(), manifest, verified })
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Steps that were done when it was saved.
    pub fn step(&self) -> u64 {
        self.manifest.step
    }

    /// How many ranks saved it; they need not be as many to load it.
    pub fn ranks(&self) -> usize {
        self.manifest.ranks
    }

    /// What the caller of [`crate::commit`] gave to keep.
    pub fn state(&self) -> &Value {
        &self.manifest.state
    }

    /// All tensors, ordered by state, then name.
    pub fn tensors(&self) -> &[StoredTensor] {
        &self.manifest.tensors
    }

    /// One tensor's record.
    ///
    /// # Errors
    /// [`CheckpointError::UnknownTensor`], which names the nearest known.
    pub fn tensor(&self, state: &str, name: &str) -> Result<&StoredTensor> {
        self.find(state, name).map(|index| &self.manifest.tensors[index])
    }

    /// Fills `out` with the elements `range` of the flattened tensor, in its stored type. On an error
    /// `out` holds nothing of use.
    ///
    /// # Errors
    /// [`CheckpointError::UnknownTensor`], [`CheckpointError::OutsideTensor`],
    /// [`CheckpointError::Damaged`], [`CheckpointError::WrongSize`], [`CheckpointError::Read`].
    ///
    /// # Panics
    /// When `out` has not as many bytes as the range.
    pub fn read(&self, state: &str, name: &str, range: Range<u64>, out: &mut [u8]) -> Result<()> {
        let index = self.find(state, name)?;
        let tensor = &self.manifest.tensors[index];
        if range.start > range.end || range.end > tensor.elements() {
            return Err(CheckpointError::OutsideTensor {
                tensor: tensor.label(),
                shape: tensor.shape.clone(),
                range,
                path: self.dir.clone(),
            });
        }
        let element_bytes = tensor.dtype.bytes() as u64;
        let needed = (range.end - range.start) * element_bytes;
        assert_eq!(out.len() as u64, needed, "{}: the buffer does not fit {range:?}", tensor.label());
        let first = tensor.pieces.partition_point(|piece| piece.range[1] <= range.start);
        let mut rest = out;
        for (piece, verified) in tensor.pieces.iter().zip(&self.verified[index]).skip(first) {
            let [start, end] = piece.range;
            let wanted = range.start.max(start)..range.end.min(end);
            if wanted.is_empty() {
                break;
            }
            let (part, after) = rest.split_at_mut(((wanted.end - wanted.start) * element_bytes) as usize);
            let skip_bytes = (wanted.start - start) * element_bytes;
            self.read_part(tensor, piece, verified, skip_bytes, part)?;
            rest = after;
        }
        assert!(rest.is_empty(), "{}: pieces do not tile the tensor", tensor.label());
        Ok(())
    }

    /// Compares the lengths of all files with the manifest; reads no tensor.
    ///
    /// # Errors
    /// [`CheckpointError::WrongSize`] for the first file that is missing, too short or too long.
    pub fn check_files(&self) -> Result<()> {
        for (name, &expected) in &self.manifest.files {
            let path = self.dir.join(name);
            let found = match fs::metadata(&path) {
                Err(cause) if cause.kind() == io::ErrorKind::NotFound => 0,
                other => other.map_err(CheckpointError::reading(&path))?.len(),
            };
            if found != expected {
                return Err(CheckpointError::WrongSize { path, expected, found, tensor: None });
            }
        }
        Ok(())
    }

    /// Position of a tensor in the manifest.
    fn find(&self, state: &str, name: &str) -> Result<usize> {
        let tensors = &self.manifest.tensors;
        tensors
            .binary_search_by(|tensor| (tensor.state.as_str(), tensor.name.as_str()).cmp(&(state, name)))
            .map_err(|_| {
                let labels: Vec<String> = tensors.iter().map(StoredTensor::label).collect();
                let wanted = format!("{state}/{name}");
                let nearest = nearest(&wanted, labels.iter().map(String::as_str)).map(str::to_string);
                CheckpointError::UnknownTensor { wanted, path: self.dir.clone(), nearest }
            })
    }

    /// Copies the part of `piece` that begins `skip_bytes` into it to `out`, verifying the piece if this
    /// is its first use.
    fn read_part(
        &self,
        tensor: &StoredTensor,
        piece: &StoredPiece,
        verified: &AtomicBool,
        skip_bytes: u64,
        out: &mut [u8],
    ) -> Result<()> {
        let bytes = piece.bytes(tensor.dtype);
        let begin = bytes.start + skip_bytes;
        let end = begin + out.len() as u64;
        let file = self.open_file(tensor, piece)?;
        if verified.load(Ordering::Acquire) {
            return file
                .read_exact_at(out, begin)
                .map_err(CheckpointError::reading(&self.dir.join(&piece.file)));
        }
        let mut hasher = blake3::Hasher::new();
        let mut hash = |bytes: &[u8]| {
            hasher.update(bytes);
        };
        let scanned = scan(&file, bytes.start..begin, &mut hash)
            .and_then(|()| fill(&file, begin, out, &mut hash))
            .and_then(|()| scan(&file, end..bytes.end, &mut hash));
        scanned.map_err(CheckpointError::reading(&self.dir.join(&piece.file)))?;
        self.compare(tensor, piece, &hasher)?;
        verified.store(true, Ordering::Release);
        Ok(())
    }

    /// The file of a piece, which must be long enough to hold it.
    pub(crate) fn open_file(&self, tensor: &StoredTensor, piece: &StoredPiece) -> Result<File> {
        let path = self.dir.join(&piece.file);
        let wrong_size = |found| CheckpointError::WrongSize {
            path: path.clone(),
            expected: self.manifest.files[&piece.file],
            found,
            tensor: Some(tensor.label()),
        };
        let file = match File::open(&path) {
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Err(wrong_size(0)),
            other => other.map_err(CheckpointError::reading(&path))?,
        };
        let found = file.metadata().map_err(CheckpointError::reading(&path))?.len();
        if found < piece.bytes(tensor.dtype).end {
            return Err(wrong_size(found));
        }
        Ok(file)
    }

    /// An error that names tensor, piece and file when what was hashed is not what was saved.
    pub(crate) fn compare(
        &self,
        tensor: &StoredTensor,
        piece: &StoredPiece,
        hasher: &blake3::Hasher,
    ) -> Result<()> {
        if hasher.finalize().to_hex().as_str() == piece.blake3 {
            return Ok(());
        }
        Err(CheckpointError::Damaged {
            tensor: tensor.label(),
            elements: piece.elements(),
            bytes: piece.bytes(tensor.dtype),
            path: self.dir.join(&piece.file),
        })
    }
}

/// Shows the bytes `range` of a file to `see`, a window at a time.
pub(crate) fn scan(file: &File, range: Range<u64>, see: &mut dyn FnMut(&[u8])) -> io::Result<()> {
    let mut window = vec![0; (range.end - range.start).min(READ_WINDOW_BYTES as u64) as usize];
    let mut at = range.start;
    while at < range.end {
        let bytes = (range.end - at).min(READ_WINDOW_BYTES as u64) as usize;
        file.read_exact_at(&mut window[..bytes], at)?;
        see(&window[..bytes]);
        at += bytes as u64;
    }
    Ok(())
}

/// Reads `out` from `begin`, showing it to `see` while it is in the cache.
fn fill(file: &File, begin: u64, out: &mut [u8], see: &mut dyn FnMut(&[u8])) -> io::Result<()> {
    let mut at = begin;
    for window in out.chunks_mut(READ_WINDOW_BYTES) {
        file.read_exact_at(window, at)?;
        see(window);
        at += window.len() as u64;
    }
    Ok(())
}

fn no_manifest(dir: &Path) -> CheckpointError {
    let reason = if !dir.exists() {
        "there is no such folder"
    } else if dir.extension().is_some_and(|extension| extension == "tmp") {
        "its save was interrupted before the commit; give a step-N folder"
    } else {
        "it has no manifest.json; give a step-N folder, as runs/NAME/checkpoints/step-100"
    };
    CheckpointError::NotACheckpoint { path: dir.to_path_buf(), reason: reason.to_string() }
}
