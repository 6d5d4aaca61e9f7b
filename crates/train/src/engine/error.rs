//! Why a run ends early.

use std::path::PathBuf;

use phalanx_checkpoint::CheckpointError;
use phalanx_collectives::CollectiveError;
use phalanx_data::DataError;
use phalanx_plan::program::CheckError;
use phalanx_tensor::DeviceError;

use crate::engine::non_finite::NonFinite;

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
    #[error("{path}: {cause}; free space or choose another folder with --run, then continue with --resume")]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        cause: std::io::Error,
    },
    /// The run folder, or a file in it that a resume needs, was removed.
    #[error(
        "the run folder {path} was removed or changed while the run was using it ({what}): nothing can be saved \
         there any more; put it back and continue with --resume, or start a new run"
    )]
    FolderGone {
        /// The folder.
        path: PathBuf,
        /// The missing part.
        what: String,
    },
    /// Stored and configured shapes differ.
    #[error(
        "{name} has shape {given:?} in the file, but the configuration implies {expected:?}; correct [model]"
    )]
    Shape {
        /// The tensor.
        name: String,
        /// The shape in the file.
        given: Vec<usize>,
        /// The shape that the configuration implies.
        expected: Vec<usize>,
    },
    /// The state in the manifest of a checkpoint is impossible.
    #[error("state.{key} in {}: {reason}; load another checkpoint", .manifest.display())]
    State {
        /// The checkpoint's manifest.
        manifest: PathBuf,
        /// The key.
        key: String,
        /// Description of the fault.
        reason: String,
    },
    /// The checkpoint that a run resumes from cannot be used.
    #[error("{cause}")]
    Restore {
        /// Why.
        cause: Box<RunError>,
    },
    /// The weights that a run starts from cannot be used.
    #[error("model.init = {:?}: {cause}", .dir.display().to_string())]
    Init {
        /// Their folder.
        dir: PathBuf,
        /// Why.
        cause: Box<RunError>,
    },
    /// The weights below adapters are not those beside which these were trained.
    #[error(
        "{base}: it is not the base of the adapters of {}, which were trained beside another ({expected}; this one is {found}): put the base \
         back, or name a folder that has it in model.init",
        .checkpoint.display()
    )]
    OtherBase {
        /// The key that names the base, and its value.
        base: String,
        /// The checkpoint with the adapters.
        checkpoint: PathBuf,
        /// The stored digest.
        expected: String,
        /// The digest of this base.
        found: String,
    },
    /// A weight has no place in blocks.
    #[error(
        "{name} has {value:e}, which is too large for lora.base = \"q8_0\": leave lora.base out, or give \"nf4\""
    )]
    TooLarge {
        /// The parameter.
        name: String,
        /// The number.
        value: f32,
    },
    /// Other ranks failed in a save; their own message says why.
    #[error("{ranks} other rank(s) could not save; see their message above")]
    PeerFailed {
        /// Number of these ranks.
        ranks: usize,
    },
    /// The programs of a rank's chunks are wrong, or not those of the plan.
    #[error(transparent)]
    Program(#[from] Box<ProgramError>),
    /// The system does not give the memory of the plan, or the threads.
    #[error("the device of the rank: {0}")]
    Memory(std::io::Error),
    /// The system cannot start a thread.
    #[error(transparent)]
    Threads(std::io::Error),
    /// A checkpoint would hold numbers that are not finite.
    #[error(
        "{state} of {name} is no longer finite: nothing was saved, and older checkpoints are complete; lower \
         optimizer.lr or set optimizer.clip, then start again or --resume"
    )]
    Broken {
        /// `parameters`, or a state of the optimizer.
        state: &'static str,
        /// The parameter.
        name: String,
    },
    /// Updates within backward were stopped in the middle of a step.
    #[error(
        "nothing was saved: memory.update_in_backward has updated some parameters of step {step} and not the others; older \
         checkpoints are complete"
    )]
    UpdatedInPart {
        /// The step.
        step: u64,
    },
    /// The loss or the gradient norm is not finite, on all ranks.
    #[error("{0}")]
    NonFinite(Box<NonFinite>),
}

/// A rank that does not start what the plan says.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// A program breaks an invariant: a bug of `plan::program`.
    #[error("the chunk programs of rank {rank}: {cause}")]
    Check {
        /// The rank.
        rank: usize,
        /// The invariant, and the action that breaks it.
        cause: CheckError,
    },
    /// Its collectives are not those of the plan.
    #[error(
        "rank {rank} would start other collectives on its chunks than those that were planned (hash {found:016x}, planned {planned:016x}): do          all ranks run the same program and configuration? `phalanx plan CONFIG --chunk-program {rank}` prints them"
    )]
    Disagrees {
        /// The rank.
        rank: usize,
        /// The hash of its collectives.
        found: u64,
        /// The hash in the plan.
        planned: u64,
    },
}

/// Turns an I/O error on `path` into [`RunError::Write`].
pub(crate) fn writing(path: &std::path::Path) -> impl FnOnce(std::io::Error) -> RunError + '_ {
    move |cause| RunError::Write { path: path.to_path_buf(), cause }
}
