//! Saving of checkpoints: the ranks agree after each part that none has failed. All engines use it.

use std::ops::Range;
use std::path::{Path, PathBuf};

use phalanx_checkpoint as checkpoint;
use phalanx_collectives::{CollectiveError, Group};
use phalanx_plan::trace::PhaseName;
use phalanx_tensor::{Category, DType, Device, DeviceError};
use serde_json::Value;

use crate::engine::error::RunError;

/// Number of elements of the host buffer through which tensors are copied.
pub const WINDOW: usize = 1 << 18;

/// The three parts of a save, between which all ranks agree that nothing failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SaveStep {
    /// Rank 0 makes the folder.
    Begin,
    /// Every rank writes what it owns.
    Write,
    /// Rank 0 writes the manifest and renames.
    Commit,
}

/// An engine that writes checkpoints together with the engines of the other ranks.
pub trait Saves {
    /// The device that holds what is written.
    fn device(&self) -> &Device;

    /// All ranks.
    fn world(&self) -> &dyn Group;

    /// Waits until all communication that still changes the parameters is done.
    ///
    /// # Errors
    /// When that communication fails.
    fn settle(&mut self) -> Result<(), CollectiveError>;

    /// Writes what this rank owns into `tmp`, the folder of an unfinished checkpoint.
    ///
    /// # Errors
    /// A full disk, a folder that cannot be written, numbers that are not finite.
    fn write_pieces(&self, tmp: &Path) -> Result<(), RunError>;
}

/// Runs the parts of a save in order; after each part all ranks agree that none has failed.
///
/// # Errors
/// Errors of `part`, or that another rank failed.
pub fn save<S: Saves>(
    engine: &mut S,
    mut part: impl FnMut(&S, SaveStep) -> Result<(), RunError>,
) -> Result<(), RunError> {
    let device = engine.device().clone();
    device.try_phase(PhaseName::Save, || {
        engine.settle()?;
        for step in [SaveStep::Begin, SaveStep::Write, SaveStep::Commit] {
            let done = part(engine, step);
            agree(engine, done)?;
        }
        Ok(())
    })
}

/// Runs `write` on every rank and returns when all ranks have finished it.
///
/// # Errors
/// Errors of `write`, or that another rank failed.
pub fn report<S: Saves>(engine: &S, write: impl FnOnce(&S) -> Result<(), RunError>) -> Result<(), RunError> {
    engine.device().try_phase(PhaseName::Report, || {
        let done = write(engine);
        agree(engine, done)
    })
}

/// Writes checkpoint `step` under `checkpoints`, with `state`, an object, in its manifest.
///
/// # Errors
/// Errors of the parts of a save, or that another rank failed. Older checkpoints are untouched.
pub fn save_checkpoint<S: Saves>(
    engine: &mut S,
    checkpoints: &Path,
    step: u64,
    state: &Value,
) -> Result<PathBuf, RunError> {
    let tmp = checkpoints.join(format!("step-{step}.tmp"));
    let saved = save(engine, |engine, part| {
        let world = engine.world();
        match part {
            SaveStep::Begin if world.rank() == 0 => checkpoint::begin(checkpoints, step).map(drop)?,
            SaveStep::Write => engine.write_pieces(&tmp)?,
            SaveStep::Commit if world.rank() == 0 => {
                checkpoint::commit(&tmp, state.clone(), world.world_size()).map(drop)?
            }
            SaveStep::Begin | SaveStep::Commit => {}
        }
        Ok(())
    });
    if saved.is_err() && engine.world().rank() == 0 {
        // The first error is reported; the next save removes what remains.
        let _ = checkpoint::discard(&tmp);
    }
    saved.map(|()| checkpoints.join(format!("step-{step}")))
}

/// Writes the file of `rank`. `read(piece, within, out)` provides the elements of each piece, which must be finite.
///
/// # Errors
/// [`RunError::Broken`] for a number that is not finite, and errors of writing.
pub fn write_finite(
    tmp: &Path,
    rank: usize,
    described: &[checkpoint::TensorPiece],
    mut read: impl FnMut(usize, Range<usize>, &mut [f32]) -> Result<(), DeviceError>,
) -> Result<(), RunError> {
    let (mut broken, mut failed) = (None, None);
    let mut fill = |index: usize, within: Range<u64>, bytes: &mut [u8]| {
        let out: &mut [f32] = bytemuck::cast_slice_mut(bytes);
        if let Err(error) = read(index, within.start as usize..within.end as usize, out) {
            failed = failed.take().or(Some(error));
        }
        if broken.is_none() && !out.iter().all(|x| x.is_finite()) {
            broken = Some(index);
        }
    };
    checkpoint::write_rank(tmp, rank, described, 4 * WINDOW, &mut fill)?;
    failed.map_or(Ok(()), Err)?;
    let error = |index: usize| {
        let checkpoint::TensorPiece { state, name, .. } = &described[index];
        Err(RunError::Broken { state, name: name.clone() })
    };
    broken.map_or(Ok(()), error)
}

/// All ranks learn whether all of them succeeded.
fn agree(engine: &impl Saves, done: Result<(), RunError>) -> Result<(), RunError> {
    let device = engine.device();
    let mut failures = device.alloc(DType::F32, [1], Category::Workspace, "agreement");
    device.fill(failures.view_mut(), done.is_err() as u8 as f32);
    let failures = engine.world().all_reduce(failures).wait()?;
    let fetched = device.fetch([failures.view()]);
    done?;
    let [count] = fetched?;
    if count > 0.0 { Err(RunError::PeerFailed { ranks: count as usize }) } else { Ok(()) }
}
