//! Checkpoints: training state on disk, saved in any layout, loaded in any other, and never incomplete.
//!
//! To save, [`begin`] creates `step-N.tmp`, and every rank streams its file with [`write_rank`]. Rank 0 then checks
//! that the pieces cover every tensor exactly once, writes the manifest and renames the folder in [`commit`];
//! [`purge`] removes old checkpoints. To load, [`newest`] finds the highest step that is complete. [`Checkpoint::read`]
//! reads any range of elements of any tensor, and [`Checkpoint::read_stripe`] any range of a rank's part of it. Both
//! assemble the range from the pieces that hold it, and verify each piece against its blake3 hash before its bytes are
//! used. [`HuggingFaceDir`] and [`write_hugging_face`] exchange weights with other programs, and [`write_gguf`] writes them for llama.cpp.
//!
//! This crate knows no rank's role, strategy or model. A piece is a name, a global shape, an element type and a range
//! of the flattened tensor, or of one [`phalanx_plan::Stripe`] of it: three numbers that describe the part of the whole
//! that a tensor-parallel rank holds.
#![forbid(unsafe_code)]

mod adapter;
mod commit;
mod coverage;
mod error;
mod gguf;
mod hugging_face;
mod hugging_face_export;
mod limits;
mod manifest;
mod narrow;
mod nearest;
mod overlap;
mod rank_files;
mod read;
mod steps;
mod stored_tensor;
mod stream;
mod tensor_file;
mod verify;
mod write;

pub use adapter::{ADAPTER_PREFIX, AdapterConfig, TOKENS_END};
pub use commit::{added, begin, commit, discard, is_checkpoint, purge, settle};
pub use error::CheckpointError;
pub use gguf::{GGUF_MAGIC, GgufTensor, GgufType, GgufValue, write_gguf};
pub use hugging_face::HuggingFaceDir;
pub use hugging_face_export::{FolderNames, ReadTensor, write_adapter, write_hugging_face};
pub use read::{Checkpoint, Newest, Skipped, newest};
pub use steps::saved_steps;
pub use stored_tensor::{StoredPiece, StoredTensor};
pub use stream::READ_WINDOW_BYTES;
pub use verify::{Statistics, TensorReport};
pub use write::{Fill, TensorPiece, write_rank};

/// Every fallible call of this crate fails with a [`CheckpointError`].
pub type Result<T, E = CheckpointError> = std::result::Result<T, E>;

// Files hold little-endian numbers, and buffers are read and written without conversion.
const _: () = assert!(cfg!(target_endian = "little"));
