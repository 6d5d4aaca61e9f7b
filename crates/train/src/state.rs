//! Filling, saving and restoring a rank's state.
//!
//! A rank sees its memory as pieces of named global tensors ([`phalanx_parallel::zero::Piece`]); files
//! hold the same, so any layout loads into any other. Bytes pass through a bounded window on the host.

use std::ops::Range;
use std::path::{Path, PathBuf};

use phalanx_checkpoint::{self as checkpoint, Checkpoint, HuggingFaceDir};
use phalanx_layers::ParameterSpec;
use phalanx_optim::{LossScale, LossScaleState};
use phalanx_parallel::zero::Extent;
use phalanx_tensor::{Category, DType};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::rank::Rank;
use crate::run::RunError;

/// Elements that pass through the host at once.
const WINDOW: usize = 1 << 18;

/// Name of the first state in checkpoints; the others are named by the update rule.
pub const PARAMETERS: &str = "parameters";

/// Key of [`Updates`] in the state that a checkpoint keeps.
const UPDATES: &str = "updates";

/// What a run keeps beside its tensors: which of its steps were applied.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Updates {
    /// Steps that were applied: they drive the learning rate and Adam's bias correction.
    pub applied: u64,
    /// Steps that overflowed.
    pub skipped: u64,
    /// Where the loss scale stands.
    pub loss_scale: LossScaleState,
}

/// The three parts of a save, between which all ranks agree that nothing failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Rank 0 makes the folder.
    Begin,
    /// Every rank writes what it owns.
    Write,
    /// Rank 0 writes the manifest and renames.
    Commit,
}

impl Rank {
    /// Fills everything resident through `read(state, parameter, elements, out)`.
    ///
    /// # Errors
    /// What `read` returns.
    pub fn load(
        &mut self,
        mut read: impl FnMut(&str, &ParameterSpec, Range<u64>, &mut [f32]) -> Result<(), RunError>,
    ) -> Result<(), RunError> {
        let device = self.device.clone();
        device.try_phase("load", || {
            let mut rounding = self.zero.rounding_window(WINDOW);
            if device.is_meta() {
                return Ok(());
            }
            let mut window = vec![0f32; WINDOW];
            for state in 0..self.zero.state_count() {
                for piece in self.zero.pieces(state, Extent::Resident) {
                    let length = (piece.in_parameter.end - piece.in_parameter.start) as usize;
                    for start in (0..length).step_by(WINDOW) {
                        let within = start..(start + WINDOW).min(length);
                        let elements = piece.in_parameter.start + within.start as u64
                            ..piece.in_parameter.start + within.end as u64;
                        let out = &mut window[..within.len()];
                        read(
                            self.state_name(state),
                            &self.network.parameters[piece.parameter],
                            elements,
                            out,
                        )?;
                        self.zero.write(state, &piece, within, out, rounding.as_mut());
                    }
                }
            }
            Ok(())
        })
    }

    /// Initial values from the seed; optimizer states at zero.
    ///
    /// # Errors
    /// None of its own.
    pub fn initialise(&mut self, seed: u64) -> Result<(), RunError> {
        let threads = self.spec.threads;
        self.load(|state, spec, elements, out| {
            if state != PARAMETERS {
                out.fill(0.0);
                return Ok(());
            }
            let share = out.len().div_ceil(threads).max(1 << 14);
            std::thread::scope(|scope| {
                for (i, part) in out.chunks_mut(share).enumerate() {
                    let start = elements.start + (i * share) as u64;
                    scope.spawn(move || spec.init.fill(seed, &spec.name, start, part));
                }
            });
            Ok(())
        })
    }

    /// Weights of a Hugging Face directory; optimizer states at zero.
    ///
    /// # Errors
    /// A tensor that is missing, of another shape, or unreadable.
    pub fn import(&mut self, dir: &HuggingFaceDir) -> Result<(), RunError> {
        self.load(|state, spec, elements, out| {
            if state != PARAMETERS {
                out.fill(0.0);
                return Ok(());
            }
            let name = hugging_face_name(dir, &spec.name);
            let shape = dir.shape(name)?;
            if shape != spec.shape {
                let (given, expected) = (shape.to_vec(), spec.shape.clone());
                return Err(RunError::Shape { name: name.to_string(), given, expected });
            }
            Ok(dir.read_f32(name, elements, out)?)
        })
    }

    /// Parameters, optimizer states, number of updates and loss scale of a checkpoint, whatever layout and
    /// precision wrote it.
    ///
    /// # Errors
    /// Damage, missing tensors, another shape.
    pub fn restore(&mut self, from: &Checkpoint) -> Result<(), RunError> {
        let updates = updates(from);
        (self.applied, self.skipped) = (updates.applied, updates.skipped);
        self.loss_scale = LossScale::resumed(self.spec.loss_scaling, updates.loss_scale);
        self.load(|state, spec, elements, out| {
            let stored = from.tensor(state, &spec.name)?;
            if stored.shape != spec.shape {
                let (given, expected) = (stored.shape.clone(), spec.shape.clone());
                return Err(RunError::Shape { name: spec.name.clone(), given, expected });
            }
            Ok(from.read(state, &spec.name, elements, bytemuck::cast_slice_mut(out))?)
        })
    }

    /// What the next checkpoint keeps beside its tensors.
    pub fn updates(&self) -> Updates {
        let Rank { applied, skipped, loss_scale, .. } = self;
        Updates { applied: *applied, skipped: *skipped, loss_scale: loss_scale.state() }
    }

    /// Runs the parts of a save in order; all ranks agree after each that nobody failed.
    ///
    /// # Errors
    /// What `part` returned here, or that another rank failed.
    pub fn save(
        &mut self,
        mut part: impl FnMut(&Rank, Part) -> Result<(), RunError>,
    ) -> Result<(), RunError> {
        let device = self.device.clone();
        device.try_phase("save", || {
            self.zero.settle()?;
            for step in [Part::Begin, Part::Write, Part::Commit] {
                let done = part(self, step);
                self.agree(done)?;
            }
            Ok(())
        })
    }

    /// Runs `write` on every rank; returns when all have done it.
    ///
    /// # Errors
    /// What `write` returned here, or that another rank failed.
    pub fn report(&mut self, write: impl FnOnce(&Rank) -> Result<(), RunError>) -> Result<(), RunError> {
        let device = self.device.clone();
        device.try_phase("report", || {
            let done = write(self);
            self.agree(done)
        })
    }

    /// Writes checkpoint `step` under `checkpoints`; `state`, an object, goes into its manifest, with the
    /// updates so far.
    ///
    /// # Errors
    /// Disk full, folder unwritable, numbers that are not finite, here or on another rank. Older checkpoints
    /// are untouched.
    pub fn save_checkpoint(
        &mut self,
        checkpoints: &Path,
        step: u64,
        state: &Value,
    ) -> Result<PathBuf, RunError> {
        let tmp = checkpoints.join(format!("step-{step}.tmp"));
        let mut state = state.clone();
        state[UPDATES] = json!(self.updates());
        let saved = self.save(|rank, part| {
            let first = rank.group().rank() == 0;
            match part {
                Part::Begin if first => checkpoint::begin(checkpoints, step).map(drop)?,
                Part::Write => rank.write_pieces(&tmp)?,
                Part::Commit if first => {
                    checkpoint::commit(&tmp, state.clone(), rank.group().world_size()).map(drop)?
                }
                Part::Begin | Part::Commit => {}
            }
            Ok(())
        });
        if saved.is_err() && self.group().rank() == 0 {
            // The first error is the one to tell; what is left is removed by the next save.
            let _ = checkpoint::discard(&tmp);
        }
        saved.map(|()| checkpoints.join(format!("step-{step}")))
    }

    fn write_pieces(&self, tmp: &Path) -> Result<(), RunError> {
        let mut pieces = Vec::new();
        let mut described = Vec::new();
        for state in 0..self.zero.state_count() {
            for piece in self.zero.pieces(state, Extent::Owned) {
                let spec = &self.network.parameters[piece.parameter];
                described.push(checkpoint::Piece {
                    state: self.state_name(state),
                    name: spec.name.clone(),
                    shape: spec.shape.clone(),
                    dtype: DType::F32,
                    range: piece.in_parameter.clone(),
                });
                pieces.push((state, piece));
            }
        }
        let mut broken = None;
        let mut fill = |index: usize, within: Range<u64>, bytes: &mut [u8]| {
            let (state, piece) = &pieces[index];
            let out: &mut [f32] = bytemuck::cast_slice_mut(bytes);
            self.zero.read(*state, piece, within.start as usize..within.end as usize, out);
            if broken.is_none() && !out.iter().all(|x| x.is_finite()) {
                broken = Some(index);
            }
        };
        checkpoint::write_rank(tmp, self.group().rank(), &described, 4 * WINDOW, &mut fill)?;
        let error = |index: usize| {
            let checkpoint::Piece { state, name, .. } = &described[index];
            Err(RunError::Broken { state, name: name.clone() })
        };
        broken.map_or(Ok(()), error)
    }

    fn state_name(&self, state: usize) -> &'static str {
        match state {
            0 => PARAMETERS,
            s => self.spec.rule.states()[s - 1],
        }
    }

    /// All ranks learn whether all of them succeeded.
    fn agree(&self, done: Result<(), RunError>) -> Result<(), RunError> {
        let mut failures = self.device.alloc(DType::F32, [1], Category::Workspace, "agreement");
        self.device.fill(failures.view_mut(), done.is_err() as u8 as f32);
        let failures = self.group().all_reduce(failures).wait()?;
        let count = self.device.fetch(failures.view());
        done?;
        if count > 0.0 { Err(RunError::PeerFailed { ranks: count as usize }) } else { Ok(()) }
    }
}

/// Steps that a checkpoint applied and skipped; one that does not say was made without a loss scale.
pub fn updates(from: &Checkpoint) -> Updates {
    let stored = from.state().get(UPDATES).and_then(|value| Updates::deserialize(value).ok());
    stored.unwrap_or(Updates { applied: from.step(), skipped: 0, loss_scale: LossScaleState::Off })
}

/// What `dir` calls the parameter `name`: files written by the hub's first GPT-2 leave out the
/// `transformer.` prefix.
pub fn hugging_face_name<'a>(dir: &HuggingFaceDir, name: &'a str) -> &'a str {
    match name.strip_prefix("transformer.") {
        Some(short) if !dir.contains(name) && dir.contains(short) => short,
        _ => name,
    }
}
