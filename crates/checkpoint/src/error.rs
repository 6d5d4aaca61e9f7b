//! Errors of saving and loading checkpoints.
//!
//! Each message says what was given, what was expected and what to do, and contains its cause (the
//! cause is not repeated as `source()`), so printing the error alone tells everything.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// An error of a checkpoint or of a Hugging Face folder.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The disk refused to read.
    #[error("cannot read {}: {cause}{}", .path.display(), read_advice(.cause))]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// Error of the system.
        cause: io::Error,
    },

    /// The disk refused to write, rename, sync or remove.
    #[error(
        "cannot write {}: {cause}{}; what was there before is untouched",
        .path.display(), write_advice(.cause)
    )]
    Write {
        /// The file or folder.
        path: PathBuf,
        /// Error of the system.
        cause: io::Error,
    },

    /// The folder holds no committed checkpoint.
    #[error("{} is not a checkpoint: {reason}", .path.display())]
    NotACheckpoint {
        /// The folder.
        path: PathBuf,
        /// The missing part, and what to give instead.
        reason: String,
    },

    /// Another process keeps removing and replacing checkpoints.
    #[error("{} is being replaced again and again; try again when its run saves less often", .path.display())]
    Busy {
        /// The folder.
        path: PathBuf,
    },

    /// The manifest cannot be trusted or understood.
    #[error("the manifest {} cannot be used: {reason}", .path.display())]
    Manifest {
        /// The manifest.
        path: PathBuf,
        /// The defect.
        reason: String,
    },

    /// The ranks' pieces do not form complete tensors.
    #[error("the checkpoint would be incomplete: {reason}; it was not committed")]
    NotWhole {
        /// Which tensor or rank, and what is missing or duplicated.
        reason: String,
    },

    /// A file is shorter or longer than the manifest says.
    #[error(
        "{} has {found} bytes and {expected} were expected{}: load another checkpoint or copy \
         this one again", .path.display(), needed_for(.tensor.as_ref())
    )]
    WrongSize {
        /// The file.
        path: PathBuf,
        /// Bytes it must have.
        expected: u64,
        /// Bytes it has; 0 when it is not there.
        found: u64,
        /// The tensor that was being read, if any.
        tensor: Option<String>,
    },

    /// The bytes on disk are not the bytes that were saved.
    #[error(
        "{tensor} is damaged: the checksum of its piece, elements {} to {} (bytes {} to {} of {}), \
         does not match: load another checkpoint or copy this one again",
        .elements.start, .elements.end, .bytes.start, .bytes.end, .path.display()
    )]
    Damaged {
        /// State and name.
        tensor: String,
        /// The piece, in elements of the whole tensor.
        elements: std::ops::Range<u64>,
        /// The piece, in bytes of its file.
        bytes: std::ops::Range<u64>,
        /// The file.
        path: PathBuf,
    },

    /// The checkpoint has no such tensor.
    #[error("no {wanted} in {}{}", .path.display(), nearest_is(.nearest.as_ref()))]
    UnknownTensor {
        /// State and name that were asked for.
        wanted: String,
        /// The checkpoint or folder.
        path: PathBuf,
        /// The most similar tensor that it has.
        nearest: Option<String>,
    },

    /// More elements were asked for than the tensor has.
    #[error(
        "{tensor} in {} has shape {shape:?}, so elements {} to {} do not exist: was it saved by \
         another model?", .path.display(), .range.start, .range.end
    )]
    OutsideTensor {
        /// State and name.
        tensor: String,
        /// Its shape on disk.
        shape: Vec<usize>,
        /// The elements that were requested.
        range: std::ops::Range<u64>,
        /// The checkpoint or folder.
        path: PathBuf,
    },

    /// The tensor has another shape or type than the model that asks for it.
    #[error(
        "{tensor} in {} is {found}, but {expected} is expected: was it saved by another model?", .path.display()
    )]
    OtherTensor {
        /// State and name.
        tensor: String,
        /// The checkpoint.
        path: PathBuf,
        /// Its type and shape on disk.
        found: String,
        /// The type and shape that were asked for.
        expected: String,
    },

    /// A weight that is not finite.
    #[error(
        "element {element} of {tensor} in {} is {value}: every weight must be finite; take another file",
        .path.display()
    )]
    NotFinite {
        /// The file.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Number of the first such element, of the flattened tensor.
        element: u64,
        /// Its value.
        value: f32,
    },

    /// A number that the type of an export does not have.
    #[error(
        "element {element} of {tensor} is {value}, which is too large for {stored}: export as bf16 or f32"
    )]
    TooLarge {
        /// Name of the tensor.
        tensor: String,
        /// Number of the first such element, of the flattened tensor.
        element: u64,
        /// Its value.
        value: f32,
        /// The type.
        stored: &'static str,
    },

    /// Two tensors that the model ties have different values.
    #[error(
        "{tensor} and {copy} in {} are one parameter of the model, and their elements {element} are {} and {}: \
         the file is of a model that does not tie them", .path.display(), .values[0], .values[1]
    )]
    CopyDiffers {
        /// The file of the copy.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Name of its copy.
        copy: String,
        /// Number of the first element that differs, of the flattened tensor.
        element: u64,
        /// Its values in the tensor and in the copy.
        values: [f32; 2],
    },

    /// A folder or file is not what Hugging Face's programs write.
    #[error("{} cannot be imported: {reason}", .path.display())]
    HuggingFace {
        /// The folder or file.
        path: PathBuf,
        /// The defect, and what to do.
        reason: String,
    },

    /// An export that failed while it replaced files.
    #[error(
        "cannot write {}: {cause}; it has no config.json now and is incomplete: once the cause is gone, export again with \
         --force", .dir.display()
    )]
    HalfExported {
        /// The folder.
        dir: PathBuf,
        /// Why.
        cause: io::Error,
    },

    /// A safetensors file whose header contradicts itself or its length.
    #[error("{} is damaged or not a safetensors file: {reason}", .path.display())]
    TensorFile {
        /// The file.
        path: PathBuf,
        /// The defect of the header.
        reason: String,
    },
}

impl CheckpointError {
    /// Turns an I/O error on `path` into [`CheckpointError::Read`].
    pub(crate) fn reading(path: &Path) -> impl FnOnce(io::Error) -> CheckpointError + '_ {
        move |cause| CheckpointError::Read { path: path.to_path_buf(), cause }
    }

    /// Turns an I/O error on `path` into [`CheckpointError::Write`].
    pub(crate) fn writing(path: &Path) -> impl FnOnce(io::Error) -> CheckpointError + '_ {
        move |cause| CheckpointError::Write { path: path.to_path_buf(), cause }
    }
}

fn read_advice(cause: &io::Error) -> &'static str {
    match cause.kind() {
        io::ErrorKind::PermissionDenied => "; give this user the right to read it",
        io::ErrorKind::NotADirectory => "; a part of this path is a file, not a folder",
        _ => "",
    }
}

fn write_advice(cause: &io::Error) -> &'static str {
    match cause.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "; free space there, keep fewer checkpoints, or choose another folder"
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "; give this user the right to write there or choose another folder"
        }
        io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => {
            "; a file is in the place of a folder: move it or choose another folder"
        }
        _ => "",
    }
}

fn needed_for(tensor: Option<&String>) -> String {
    tensor.map_or_else(String::new, |tensor| format!(", {tensor} needs them"))
}

fn nearest_is(nearest: Option<&String>) -> String {
    nearest.map_or_else(
        || "; it holds no tensors".to_string(),
        |name| format!("; the nearest that it has is {name}"),
    )
}
