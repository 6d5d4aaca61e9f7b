//! Why a run ends early.

use std::path::PathBuf;

use phalanx_checkpoint::CheckpointError;
use phalanx_collectives::CollectiveError;
use phalanx_data::DataError;
use phalanx_tensor::DeviceError;

use crate::non_finite::NonFinite;

/// Why a run ended early. Checkpoints that were committed are complete.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// A peer died, stalled or disagreed.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A checkpoint could not be written or read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Data is missing or damaged.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A file of the run folder could not be written.
    #[error("{path}: {source}; free space or choose another folder with --run, then go on with --resume")]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The run folder, or a file in it that a resume needs, has gone.
    #[error(
        "the run folder {path} was removed or changed while the run was using it ({what}): nothing can be saved \
         there any more; put it back and go on with --resume, or start anew"
    )]
    FolderGone {
        /// The folder.
        path: PathBuf,
        /// What has gone.
        what: String,
    },
    /// Stored and configured shapes differ.
    #[error(
        "{name} has shape {given:?} in the file, the configuration makes it {expected:?}; correct [model]"
    )]
    Shape {
        /// The tensor.
        name: String,
        /// The shape in the file.
        given: Vec<usize>,
        /// The shape that the configuration makes.
        expected: Vec<usize>,
    },
    /// The state in the manifest of a checkpoint is impossible.
    #[error("state.{key} in {}: {reason}; load another checkpoint", .manifest.display())]
    State {
        /// The checkpoint's manifest.
        manifest: PathBuf,
        /// The key.
        key: String,
        /// What is wrong.
        reason: String,
    },
    /// The weights that a run starts from cannot be used.
    #[error("model.init = {:?}: {cause}", .dir.display().to_string())]
    Init {
        /// Their folder.
        dir: PathBuf,
        /// Why.
        cause: Box<RunError>,
    },
    /// Other ranks failed in a save; their own message says why.
    #[error("{ranks} other rank(s) could not save; see their message above")]
    PeerFailed {
        /// How many.
        ranks: usize,
    },
    /// The system does not give the memory of the plan, or the threads.
    #[error("the device of the rank: {0}")]
    Memory(std::io::Error),
    /// The system starts no more threads.
    #[error(transparent)]
    Threads(std::io::Error),
    /// A checkpoint would hold numbers with which no run can go on.
    #[error(
        "{state} of {name} is not finite any more: nothing was saved, and older checkpoints are whole; lower \
         optimizer.lr or set optimizer.clip, then start again or --resume"
    )]
    Broken {
        /// `parameters`, or a state of the optimizer.
        state: &'static str,
        /// The parameter.
        name: String,
    },
    /// The loss or the gradient norm is not a number any more; the same on all ranks.
    #[error("{0}")]
    NonFinite(Box<NonFinite>),
}
