//! Training state on disk: saved by any layout, loaded into any other, never half there.
//!
//! The way of a save: [`begin`] makes `step-N.tmp`; every rank streams its file with [`write_rank`];
//! rank 0 checks that the pieces cover every tensor exactly once, writes the manifest and renames the
//! folder in [`commit`]; [`purge`] then removes what is old. The way of a load: [`newest`] finds the
//! highest step that is whole; [`Checkpoint::read`] assembles any element range of any tensor, and
//! [`Checkpoint::read_stripe`] of any rank's part of one, from whatever pieces hold it, each verified against
//! its blake3 before its bytes are used.
//! [`HuggingFaceDir`] and [`write_hugging_face`] are the door to other programs.
//!
//! This crate knows no rank's role, strategy or model: a piece is a name, a global shape, an element
//! type and a range of the flattened tensor, or of one [`phalanx_plan::Stripe`] of it: three numbers that
//! say how a tensor-parallel rank's part lies in the whole.
#![forbid(unsafe_code)]

mod commit;
mod coverage;
mod error;
mod hugging_face;
mod hugging_face_export;
mod limits;
mod manifest;
mod nearest;
mod overlap;
mod rank_files;
mod read;
mod steps;
mod stream;
mod tensor_file;
mod verify;
mod write;

pub use commit::{begin, commit, discard, purge, settle};
pub use error::CheckpointError;
pub use hugging_face::HuggingFaceDir;
pub use hugging_face_export::{ReadTensor, write_hugging_face};
pub use manifest::{StoredPiece, StoredTensor};
pub use read::{Checkpoint, Newest, Skipped, newest};
pub use stream::READ_WINDOW_BYTES;
pub use verify::{Statistics, TensorReport};
pub use write::{Fill, Piece, write_rank};

/// Every fallible call of this crate fails with a [`CheckpointError`].
pub type Result<T, E = CheckpointError> = std::result::Result<T, E>;

// Files hold little-endian numbers, and buffers are read and written as they lie in memory.
const _: () = assert!(cfg!(target_endian = "little"));
