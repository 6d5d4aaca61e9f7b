//! Reads any range of a tensor, or of a stripe of it, from pieces that any layout saved.
//!
//! A read visits the pieces that overlap the requested range. On the first visit, the whole piece streams through a
//! window and its blake3 is verified; the requested part is copied to the caller's buffer in the same pass, so loading in
//! the layout of the save reads every byte once. Where stored and requested parts are cut differently, long runs are read
//! in place and short ones a window at a time, so that a split along columns does not cost one call per row.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use phalanx_plan::Stripe;
use phalanx_plan::trace::DType;
use serde_json::Value;

use crate::limits::MANIFEST_BYTES;
use crate::manifest::{MANIFEST, Manifest};
use crate::nearest::nearest;
use crate::overlap::{Limits, Overlaps, ReadSpans};
use crate::rank_files::{RankFiles, undisturbed};
use crate::steps::{self, SaveStage};
use crate::stored_tensor::{StoredPiece, StoredTensor, part};
use crate::stream::{READ_WINDOW_BYTES, Stream};
use crate::{CheckpointError, Result};

/// Runs of at least this length are read in place, where the cost of the call is small. Gaps up to this length are read
/// and discarded, which is cheaper than another call and a seek.
const CALL_BYTES: u64 = 1 << 16;

/// Maximum number of times that a checkpoint may be removed or replaced while it is being opened. A run saves less
/// often than once a millisecond.
const ATTEMPTS: usize = 100;

/// A committed checkpoint, open for reading.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    pub(crate) manifest: Manifest,
    files: RankFiles,
    /// Per tensor and piece: whether its checksum was compared.
    verified: Vec<Vec<AtomicBool>>,
}

/// Result of [`newest`].
#[derive(Debug)]
pub struct Newest {
    /// The highest step that is whole; `None` when there is none.
    pub checkpoint: Option<Checkpoint>,
    /// Higher steps that are damaged, highest first, to be reported to the user.
    pub skipped: Vec<Skipped>,
}

/// A checkpoint that [`newest`] passed over.
#[derive(Debug)]
pub struct Skipped {
    /// Its folder.
    pub path: PathBuf,
    /// Error found in it.
    pub reason: CheckpointError,
}

impl Skipped {
    /// The folder, and why it was passed over.
    pub fn describe(&self) -> String {
        format!("{}: {}", self.path.display(), self.reason)
    }
}

/// The checkpoint of the highest step under `checkpoints` whose manifest is valid and whose files are
/// there in full length, with their headers. Checksums of tensors are compared when they are read. Folders
/// of unfinished saves are ignored, and a folder that does not exist holds no checkpoint. A checkpoint that
/// is removed or replaced while it is looked at is not damaged: the search begins again.
///
/// # Errors
/// [`CheckpointError::Read`] when `checkpoints` cannot be listed, [`CheckpointError::Busy`].
pub fn newest(checkpoints: &Path) -> Result<Newest> {
    for _ in 0..ATTEMPTS {
        if let Some(found) = search(checkpoints)? {
            return Ok(found);
        }
    }
    Err(CheckpointError::Busy { path: checkpoints.to_path_buf() })
}

/// `None` when a checkpoint was removed or replaced meanwhile.
fn search(checkpoints: &Path) -> Result<Option<Newest>> {
    let folders = steps::list(checkpoints)?;
    let was_listed = |step| folders.iter().any(|f| f.step == step && f.stage == SaveStage::Committed);
    let mut skipped = Vec::new();
    for folder in folders.iter().filter(|folder| folder.stage != SaveStage::Unfinished) {
        let opened = undisturbed(&folder.path, || {
            let checkpoint = Checkpoint::read_folder(&folder.path)?;
            checkpoint.check_files().map(|()| checkpoint)
        });
        match opened {
            None => return Ok(None),
            Some(Ok(checkpoint)) => return Ok(Some(Newest { checkpoint: Some(checkpoint), skipped })),
            // The checkpoint that replaces this one was committed meanwhile, so this one is being removed.
            Some(Err(_)) if !was_listed(folder.step) && is_committed(checkpoints, folder.step) => {
                return Ok(None);
            }
            Some(Err(reason)) => skipped.push(Skipped { path: folder.path.clone(), reason }),
        }
    }
    Ok(Some(Newest { checkpoint: None, skipped }))
}

fn is_committed(checkpoints: &Path, step: u64) -> bool {
    steps::committed(checkpoints, step).symlink_metadata().is_ok()
}

impl Checkpoint {
    /// Opens the folder `dir`, reading and checking its manifest only. From here on it can be read even if a
    /// run removes or replaces it.
    ///
    /// # Errors
    /// [`CheckpointError::NotACheckpoint`], [`CheckpointError::Manifest`], [`CheckpointError::Read`];
    /// [`CheckpointError::Busy`] for a folder that is replaced again and again.
    pub fn open(dir: &Path) -> Result<Checkpoint> {
        for _ in 0..ATTEMPTS {
            match undisturbed(dir, || Checkpoint::read_folder(dir)) {
                Some(opened) => return opened,
                None if dir.symlink_metadata().is_err() => return Err(no_manifest(dir)),
                None => {}
            }
        }
        Err(CheckpointError::Busy { path: dir.to_path_buf() })
    }

    fn read_folder(dir: &Path) -> Result<Checkpoint> {
        let path = dir.join(MANIFEST);
        let bytes = match phalanx_system::files::read_bounded(&path, MANIFEST_BYTES) {
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Err(no_manifest(dir)),
            other => other.map_err(CheckpointError::reading(&path))?,
        };
        let manifest = Manifest::decode(&path, &bytes)?;
        let named = dir.file_name().and_then(|name| name.to_str()).and_then(steps::parse);
        if let Some((step, _)) = named.filter(|(step, _)| *step != manifest.step) {
            let reason = format!("its step is {}, and its folder is that of step {step}", manifest.step);
            return Err(CheckpointError::Manifest { path, reason });
        }
        let verified = manifest
            .tensors
            .iter()
            .map(|tensor| tensor.pieces.iter().map(|_| AtomicBool::new(false)).collect())
            .collect();
        let files = RankFiles::open(dir, &manifest);
        Ok(Checkpoint { dir: dir.to_path_buf(), manifest, files, verified })
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Steps that were done when it was saved.
    pub fn step(&self) -> u64 {
        self.manifest.step
    }

    /// Number of ranks that saved it. Any number of ranks can load it.
    pub fn ranks(&self) -> usize {
        self.manifest.ranks
    }

    /// The state that was passed to [`crate::commit`].
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

    /// One tensor's record, which must have this shape and type.
    ///
    /// # Errors
    /// [`CheckpointError::UnknownTensor`], [`CheckpointError::OtherTensor`].
    pub fn expect(&self, state: &str, name: &str, shape: &[usize], dtype: DType) -> Result<&StoredTensor> {
        let tensor = self.tensor(state, name)?;
        if tensor.shape == shape && tensor.dtype == dtype {
            return Ok(tensor);
        }
        let describe = |dtype: DType, shape: &[usize]| format!("{} of shape {shape:?}", dtype.name());
        Err(CheckpointError::OtherTensor {
            tensor: tensor.label(),
            path: self.dir.clone(),
            found: describe(tensor.dtype, &tensor.shape),
            expected: describe(dtype, shape),
        })
    }

    /// Fills `out` with the elements `range` of the flattened tensor, in its stored type. On an error, the contents of
    /// `out` are unspecified.
    ///
    /// # Errors
    /// [`CheckpointError::UnknownTensor`], [`CheckpointError::OutsideTensor`], [`CheckpointError::Damaged`],
    /// [`CheckpointError::WrongSize`], [`CheckpointError::Read`].
    ///
    /// # Panics
    /// When `out` does not have as many bytes as the range.
    pub fn read(&self, state: &str, name: &str, range: Range<u64>, out: &mut [u8]) -> Result<()> {
        let whole = self.tensor(state, name)?.elements();
        self.read_stripe(state, name, &Stripe::whole(whole), range, out)
    }

    /// Fills `out` with the elements `local` of the part `stripe` of the flattened tensor, in its stored type, whatever
    /// stripes it was saved in. On an error, the contents of `out` are unspecified.
    ///
    /// # Errors
    /// As [`Checkpoint::read`]; [`CheckpointError::OutsideTensor`] also for a stripe that does not fit the tensor.
    ///
    /// # Panics
    /// When `out` does not have as many bytes as the range.
    pub fn read_stripe(
        &self,
        state: &str,
        name: &str,
        stripe: &Stripe,
        local: Range<u64>,
        out: &mut [u8],
    ) -> Result<()> {
        let index = self.find(state, name)?;
        let tensor = &self.manifest.tensors[index];
        let whole = tensor.elements();
        let count = stripe.local_elements(whole);
        if local.start > local.end || count.is_none_or(|count| local.end > count) {
            return Err(CheckpointError::OutsideTensor {
                tensor: part(&tensor.label(), (!stripe.is_whole()).then_some(*stripe)),
                shape: tensor.shape.clone(),
                range: local,
                path: self.dir.clone(),
            });
        }
        let needed = (local.end - local.start) * tensor.dtype.bytes() as u64;
        assert_eq!(out.len() as u64, needed, "{}: the buffer does not fit {local:?}", tensor.label());
        let mut filled = 0;
        for at in holders(&tensor.pieces, whole, stripe, &local) {
            let verified = &self.verified[index][at];
            filled += self.read_part(tensor, &tensor.pieces[at], verified, (*stripe, &local), out)?;
        }
        assert_eq!(filled, local.end - local.start, "{}: pieces do not tile the tensor", tensor.label());
        Ok(())
    }

    /// Compares lengths and headers of all files with the manifest; reads no tensor.
    ///
    /// # Errors
    /// [`CheckpointError::WrongSize`] for the first file that is missing, too short or too long,
    /// [`CheckpointError::TensorFile`] for one whose header is not what was saved.
    pub fn check_files(&self) -> Result<()> {
        self.files.check(&self.manifest)
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

    /// Copies those elements of `wanted` (a stripe and a range of it) that `piece` holds into `out`, and returns their
    /// number. Verifies the piece on its first use. A piece that holds none is not read.
    fn read_part(
        &self,
        tensor: &StoredTensor,
        piece: &StoredPiece,
        verified: &AtomicBool,
        wanted: (Stripe, &Range<u64>),
        out: &mut [u8],
    ) -> Result<u64> {
        let (stripe, local) = wanted;
        let stored = (piece.stripe_in(tensor.elements()), piece.elements());
        let overlaps = Overlaps::new(stored, (stripe, local.clone()));
        if overlaps.clone().next().is_none() {
            return Ok(0);
        }
        let file = self.open_file(tensor, piece)?;
        let hashes = !verified.load(Ordering::Acquire);
        let bytes = piece.bytes(tensor.dtype);
        let mut stream = Stream::new(&file, bytes.start, hashes);
        let element_bytes = tensor.dtype.bytes();
        let in_elements = |bytes: u64| bytes / element_bytes as u64;
        let limits = Limits {
            window: in_elements(READ_WINDOW_BYTES as u64),
            alone: in_elements(CALL_BYTES),
            // Hashing reads the gaps anyway.
            gap: if hashes { u64::MAX } else { in_elements(CALL_BYTES) },
        };
        let byte = |element: u64| bytes.start + (element - piece.range[0]) * element_bytes as u64;
        let mut filled = 0;
        let copy = || {
            for span in ReadSpans::new(overlaps, limits) {
                stream.skip_to(byte(span.source.start))?;
                if let Some(target) = &span.single {
                    let place =
                        [target.start, target.end].map(|at| (at - local.start) as usize * element_bytes);
                    stream.fill(&mut out[place[0]..place[1]])?;
                    filled += target.end - target.start;
                } else {
                    let window = stream.window_before(byte(span.source.end))?.expect("a span is not empty");
                    filled += span.scatter(window, element_bytes, out, local.start);
                }
            }
            stream.skip_to(bytes.end)
        };
        copy().map_err(CheckpointError::reading(&self.dir.join(&piece.file)))?;
        if let Some(hasher) = stream.into_hasher() {
            self.compare(tensor, piece, &hasher)?;
            verified.store(true, Ordering::Release);
        }
        Ok(filled)
    }

    /// The file of a piece, which must be long enough to hold it.
    pub(crate) fn open_file(&self, tensor: &StoredTensor, piece: &StoredPiece) -> Result<Arc<File>> {
        let path = self.dir.join(&piece.file);
        let wrong_size = |found| CheckpointError::WrongSize {
            path: path.clone(),
            expected: self.manifest.files[&piece.file],
            found,
            tensor: Some(tensor.label()),
        };
        let file = match self.files.get(&piece.file) {
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Err(wrong_size(0)),
            other => other.map_err(CheckpointError::reading(&path))?,
        };
        let found = file.metadata().map_err(CheckpointError::reading(&path))?.len();
        if found < piece.bytes(tensor.dtype).end {
            return Err(wrong_size(found));
        }
        Ok(file)
    }

    /// Returns an error that names tensor, piece and file if the checksum does not match.
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
            tensor: part(&tensor.label(), piece.stripe),
            elements: piece.elements(),
            bytes: piece.bytes(tensor.dtype),
            path: self.dir.join(&piece.file),
        })
    }
}

/// Finds, by binary search, the pieces that may hold elements `local` of the part `stripe`: those whose elements lie
/// between the first and the last wanted element of the whole.
fn holders(
    pieces: &[StoredPiece],
    whole: u64,
    stripe: &Stripe,
    local: &Range<u64>,
) -> impl Iterator<Item = usize> {
    let stretch = match local.end.checked_sub(1).filter(|last| *last >= local.start) {
        Some(last) => stripe.global(local.start)..stripe.global(last) + 1,
        None => 0..0,
    };
    let mut from = 0;
    std::iter::from_fn(move || {
        // The pieces of one stripe are adjacent and in order.
        let stored = pieces.get(from)?.stripe;
        let part = pieces[from].stripe_in(whole);
        let near = part.locals_before(stretch.start)..part.locals_before(stretch.end);
        let own = &pieces[from..from + pieces[from..].partition_point(|piece| piece.stripe == stored)];
        let first = from + own.partition_point(|piece| piece.range[1] <= near.start);
        let end = from + own.partition_point(|piece| piece.range[0] < near.end);
        from += own.len();
        Some(first..end)
    })
    .flatten()
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
