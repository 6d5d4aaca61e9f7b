//! Filling, saving and restoring a rank's state.
//!
//! A rank sees its memory as spans of named global tensors ([`phalanx_parallel::zero::StateSpan`]). Files use the same
//! names, so a checkpoint of any layout loads into any other. Contents pass through a host buffer of bounded size.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use phalanx_checkpoint::{
    self as checkpoint, ADAPTER_PREFIX, Checkpoint, CheckpointError, HuggingFaceDir, TOKENS_END,
};
use phalanx_collectives::{CollectiveError, Group};
use phalanx_layers::lora::{adapted_by, is_beside_base, parameters_of, rescaled_by};
use phalanx_layers::{ParameterSpec, table_of_added};
use phalanx_models::{Model, RowsOf};
pub use phalanx_optim::PARAMETERS;
use phalanx_optim::{
    CountedSteps, KeptState, LossScale, LossScaleState, Optimizer, Restarted, Spread, StateSpec,
    UpdatedParameter,
};
use phalanx_parallel::zero::{Selection, updated};
use phalanx_plan::Stripe;
use phalanx_plan::trace::PhaseName;
use phalanx_tensor::{DType, Device, blocks, refused_thread};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::engine::base::{Base, fill_initial, is_whole};
use crate::engine::below::Below;
use crate::engine::error::RunError;
use crate::engine::rank::Rank;
pub use crate::engine::saving::SaveStep;
use crate::engine::saving::{self, Saves, WINDOW};
use crate::engine::spec::ModelPart;

/// Key of [`Updates`] in the manifest of a checkpoint.
pub const UPDATES: &str = "updates";

/// Counters that a checkpoint stores beside its tensors: the number of applied steps, and the loss scale.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Updates {
    /// Number of steps that were applied: the learning rate and Adam's bias correction depend on it.
    pub applied: u64,
    /// Number of steps that overflowed, or had no target.
    pub skipped: u64,
    /// The last restart of the learning rate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restarted: Option<Restarted>,
    /// State of the loss scale.
    pub loss_scale: LossScaleState,
}

impl Rank {
    /// Fills parameters and optimizer states. `read(kept, parameter, elements, out)` writes `elements` of this rank's part of the
    /// parameter, or of a state of it, to `out`.
    ///
    /// # Errors
    /// The errors of `read`; behind a step, those of a save, which waits for what the step has left behind.
    pub fn load(&mut self, mut read: impl Read) -> Result<(), RunError> {
        let device = self.device.clone();
        if self.in_flight {
            self.save(|_, _| Ok(()))?;
        }
        self.updated_in_part = None;
        device.try_phase(PhaseName::Load, || {
            let mut window = device.host_window(WINDOW);
            let Rank { stages, chunks, .. } = self;
            for (at, stage) in stages.iter().enumerate() {
                let mut rounding = chunks.rounding_window(at, WINDOW);
                let Some(window) = &mut window else { continue };
                for (state, name) in chunks.state_names(at).into_iter().enumerate() {
                    for piece in chunks.spans(at, state, Selection::Resident) {
                        let joint = &stage.network.parameters[piece.parameter];
                        let (spec, largest) =
                            (&joint.members()[piece.member], joint.kept.map(blocks::largest));
                        let kept = Kept::of(&self.spec.update.optimizer, name, spec);
                        let length = (piece.elements.end - piece.elements.start) as usize;
                        for start in (0..length).step_by(WINDOW) {
                            let within = start..(start + WINDOW).min(length);
                            let elements = piece.elements.start + within.start as u64
                                ..piece.elements.start + within.end as u64;
                            let out = &mut window[..within.len()];
                            read(&kept, spec, elements, out)?;
                            if let Some(value) =
                                largest.and_then(|limit| out.iter().find(|x| x.abs() > limit))
                            {
                                return Err(RunError::TooLarge { name: spec.name.clone(), value: *value });
                            }
                            chunks.write_span(state, &piece, within, out, rounding.as_mut())?;
                        }
                    }
                }
            }
            Ok(())
        })
    }

    /// Fills parameters with initial values from the seed, and optimizer states with zeros.
    ///
    /// # Errors
    /// When the system starts no more threads.
    pub fn initialise(&mut self, seed: u64) -> Result<(), RunError> {
        let fresh = self.fresh(Base::initial(seed), seed);
        self.load(fresh)
    }

    /// The base for the parameters of the model, and initial values from the seed for others: for magnitudes the norms of the base's
    /// weights, for adapters that do not start as nothing the principal parts of these.
    fn fresh(&self, base: Base, seed: u64) -> impl Read + use<> {
        let ModelPart { definition, quantised, adapters, .. } = &self.spec.model;
        let threads = self.spec.device.threads;
        let (model, whole) = (Arc::clone(definition), definition.whole());
        let is_initial = base.is_initial();
        let base = base.below(adapters.as_ref(), &*model, threads);
        let below = Below::new(base, self.spec.precision.types.compute, quantised.clone());
        let mut initial = initial(seed, threads);
        move |kept: &Kept, spec: &ParameterSpec, elements: Range<u64>, out: &mut [f32]| {
            if kept.state != PARAMETERS {
                return initial(kept, spec, elements, out);
            }
            let runs = || {
                spec.stripe().runs(elements.clone()).map(|(here, whole)| {
                    ((here.start - elements.start) as usize..(here.end - elements.start) as usize, whole)
                })
            };
            if let Some(result) = rescaled_by(&spec.name) {
                let weight = format!("{result}.weight");
                let weight =
                    whole.members().find(|spec| spec.name == weight).expect("the layer of the magnitudes");
                return runs()
                    .try_for_each(|(here, outputs)| below.norms(&*model, weight, outputs, &mut out[here]));
            }
            let Some(result) = adapted_by(&spec.name) else {
                if is_initial && !below.base().has_principal() {
                    return initial(kept, spec, elements, out);
                }
                return below.base().read(&*model, spec, elements, out);
            };
            let Some(factors) = below.base().principal(&*model, result)? else {
                return initial(kept, spec, elements, out);
            };
            let [a, _] = parameters_of(result);
            let from = if spec.name == a { &factors.a } else { &factors.b };
            runs().for_each(|(here, there)| {
                out[here].copy_from_slice(&from[there.start as usize..there.end as usize]);
            });
            Ok(())
        }
    }

    /// Fills parameters with the weights of a Hugging Face directory, adapters with those of [`ModelPart::adapter`] or with initial
    /// values, and optimizer states with zeros.
    ///
    /// # Errors
    /// A tensor that is missing, of another shape, or unreadable.
    pub fn import(&mut self, dir: &HuggingFaceDir) -> Result<(), RunError> {
        let ModelPart { adapter, seed, .. } = &self.spec.model;
        let adapter = adapter.as_deref().map(HuggingFaceDir::open_adapter).transpose()?;
        let mut fresh = self.fresh(Base::open(Some(dir.path()), *seed)?, *seed);
        self.load(move |kept: &Kept, spec: &ParameterSpec, elements, out: &mut [f32]| match &adapter {
            Some(adapter) if kept.state == PARAMETERS && is_beside_base(&spec.name) => {
                read_adapter(adapter, spec, elements, out)
            }
            _ => fresh(kept, spec, elements, out),
        })
    }

    /// Restores parameters, optimizer states, number of updates and loss scale from a checkpoint of any layout and
    /// precision. What lies below adapters, and is not in the checkpoint, comes from where the run began ([`Base`]).
    ///
    /// # Errors
    /// Damage, missing tensors, another shape; a base that cannot be read.
    pub fn restore(&mut self, from: &Checkpoint) -> Result<(), RunError> {
        self.restore_updates(from)?;
        self.saves_base = is_whole(from);
        let model = Arc::clone(&self.spec.model.definition);
        let mut saved = stored(from, Arc::clone(&model));
        let base = if self.saves_base { None } else { Base::of(&self.spec.model, self.spec.device.threads)? };
        let Some(base) = base else { return self.load(saved) };
        self.load(move |kept: &Kept, spec: &ParameterSpec, elements, out: &mut [f32]| {
            match is_beside_base(&spec.name) {
                false => base.read(&*model, spec, elements, out),
                true => saved(kept, spec, elements, out),
            }
        })
    }

    /// Restores number of updates and loss scale alone.
    ///
    /// # Errors
    /// Invalid counts, or an invalid loss scale.
    pub fn restore_updates(&mut self, from: &Checkpoint) -> Result<(), RunError> {
        let Updates { applied, skipped, restarted, loss_scale } = updates(from)?;
        self.counted = CountedSteps { applied, skipped, restarted };
        self.loss_scale = LossScale::resumed(self.spec.precision.loss_scaling, loss_scale);
        Ok(())
    }

    /// The state that the next checkpoint stores beside its tensors.
    pub fn updates(&self) -> Updates {
        let CountedSteps { applied, skipped, restarted } = self.counted;
        Updates { applied, skipped, restarted, loss_scale: self.loss_scale.state() }
    }

    /// Runs the parts of a save in order; after each part all ranks agree that none has failed.
    ///
    /// # Errors
    /// Errors of `part`, or that another rank failed.
    pub fn save(
        &mut self,
        part: impl FnMut(&Rank, SaveStep) -> Result<(), RunError>,
    ) -> Result<(), RunError> {
        saving::save(self, part)
    }

    /// Runs `write` on every rank and returns when all ranks have finished it.
    ///
    /// # Errors
    /// Errors of `write`, or that another rank failed.
    pub fn report(&mut self, write: impl FnOnce(&Rank) -> Result<(), RunError>) -> Result<(), RunError> {
        saving::report(self, write)
    }

    /// Writes checkpoint `step` under `checkpoints`; `state`, an object, goes into its manifest, with the
    /// updates so far.
    ///
    /// # Errors
    /// Disk full, folder unwritable, numbers that are not finite, here or on another rank; a step that was updated in part.
    /// Older checkpoints are untouched.
    pub fn save_checkpoint(
        &mut self,
        checkpoints: &Path,
        step: u64,
        state: &Value,
    ) -> Result<PathBuf, RunError> {
        if let Some(step) = self.updated_in_part {
            return Err(RunError::UpdatedInPart { step });
        }
        let mut state = state.clone();
        state[UPDATES] = json!(self.updates());
        saving::save_checkpoint(self, checkpoints, step, &state)
    }
}

impl Saves for Rank {
    fn device(&self) -> &Device {
        &self.device
    }

    fn world(&self) -> &dyn Group {
        self.group()
    }

    fn settle(&mut self) -> Result<(), CollectiveError> {
        self.in_flight = false;
        self.chunks.begin(PhaseName::Save);
        self.chunks.finish(true, None)?;
        Ok(())
    }

    fn write_pieces(&self, tmp: &Path) -> Result<(), RunError> {
        let mut pieces = Vec::new();
        let mut described = Vec::new();
        for (at, stage) in self.stages.iter().enumerate() {
            for (state, name) in self.chunks.state_names(at).into_iter().enumerate() {
                for piece in self.chunks.spans(at, state, Selection::Owned) {
                    let spec = &stage.network.parameters[piece.parameter].members()[piece.member];
                    if !self.saves_base && !is_beside_base(&spec.name) {
                        continue;
                    }
                    let Kept { state: name, shape, stripe } =
                        Kept::of(&self.spec.update.optimizer, name, spec);
                    described.push(checkpoint::TensorPiece {
                        state: name,
                        name: spec.name.clone(),
                        shape,
                        dtype: DType::F32,
                        stripe: spec.part.as_ref().map(|_| stripe),
                        range: piece.elements.clone(),
                    });
                    pieces.push((state, piece));
                }
            }
        }
        saving::write_finite(tmp, self.group().rank(), &described, |index, within, out| {
            let (state, piece) = &pieces[index];
            self.chunks.read_span(*state, piece, within, out)
        })
    }
}

/// A parameter, or a state that the optimizer keeps of it, as files have it.
pub struct Kept {
    /// [`PARAMETERS`], or the optimizer's name of the state.
    pub state: &'static str,
    /// Shape of the whole.
    pub shape: Vec<usize>,
    /// Which of its elements this rank's part has.
    pub stripe: Stripe,
}

impl Kept {
    /// The parameter, or a state of it, by name.
    ///
    /// # Panics
    /// When the optimizer keeps no such state of it.
    pub fn of(optimizer: &Optimizer, state: &'static str, spec: &ParameterSpec) -> Kept {
        let stripe = spec.stripe();
        if state == PARAMETERS {
            return Kept { state, shape: spec.whole_shape().to_vec(), stripe };
        }
        let whole = UpdatedParameter { shape: spec.whole_shape().to_vec(), ..updated(spec) };
        let kept = optimizer.kept(&whole).expect("the rule was checked with the whole model");
        let kept = kept.into_iter().find(|kept| kept.spec.name == state);
        let KeptState { spec: StateSpec { shape, .. }, spread } =
            kept.expect("a span is of a state that there is");
        let stripe = match spread {
            Spread::Elements => stripe,
            Spread::Blocks(block) => Stripe { run: stripe.run.div_ceil(block as u64), ..stripe },
            Spread::Whole(numbers) => Stripe::whole(numbers as u64),
        };
        Kept { state, shape, stripe }
    }
}

/// Function that fills an engine: `(kept, parameter, elements, out)` as for [`Rank::load`].
pub trait Read: FnMut(&Kept, &ParameterSpec, Range<u64>, &mut [f32]) -> Result<(), RunError> {}

impl<F> Read for F where F: FnMut(&Kept, &ParameterSpec, Range<u64>, &mut [f32]) -> Result<(), RunError> {}

/// Initial values from the seed for parameters, by so many threads, and zeros for optimizer states. It fails when the system starts no
/// more threads.
pub fn initial(seed: u64, threads: usize) -> impl Read {
    move |kept: &Kept, spec: &ParameterSpec, elements: Range<u64>, out: &mut [f32]| {
        if kept.state != PARAMETERS {
            out.fill(0.0);
            return Ok(());
        }
        let share = out.len().div_ceil(threads).max(1 << 14);
        std::thread::scope(|scope| {
            for (i, part) in out.chunks_mut(share).enumerate() {
                let start = elements.start + (i * share) as u64;
                let fill = move || fill_initial(spec, seed, start, part);
                let started = std::thread::Builder::new().spawn_scoped(scope, fill);
                let refused = |error| refused_thread("a thread for initial values", &error);
                started.map_err(|error| RunError::Threads(refused(error)))?;
            }
            Ok(())
        })
    }
}

/// The tensors of a checkpoint, which an earlier version may have saved. It fails on damage, missing tensors, another shape.
pub fn stored(from: &Checkpoint, model: Arc<dyn Model>) -> impl Read {
    move |kept: &Kept, spec: &ParameterSpec, elements: Range<u64>, out: &mut [f32]| {
        let Kept { state, shape, stripe } = kept;
        if shape == spec.whole_shape() {
            return Ok(read_stored(from, &*model, (state, spec), elements, out)?);
        }
        from.expect(state, &spec.name, shape, DType::F32)?;
        Ok(from.read_stripe(state, &spec.name, stripe, elements, bytemuck::cast_slice_mut(out))?)
    }
}

/// Reads elements of this rank's part of a parameter from a checkpoint, which an earlier version may have saved.
///
/// # Errors
/// Damage, a missing tensor, another shape.
pub fn read_stored(
    from: &Checkpoint,
    model: &dyn Model,
    (state, spec): (&str, &ParameterSpec),
    elements: Range<u64>,
    out: &mut [f32],
) -> Result<(), CheckpointError> {
    let stripe = spec.stripe();
    let earlier = model.earlier(spec).filter(|earlier| from.tensor(state, &earlier.name).is_ok());
    let Some(RowsOf { name, shape, first }) = earlier else {
        from.expect(state, &spec.name, spec.whole_shape(), DType::F32)?;
        return from.read_stripe(state, &spec.name, &stripe, elements, bytemuck::cast_slice_mut(out));
    };
    from.expect(state, &name, &shape, DType::F32)?;
    let whole = Stripe::whole(shape.iter().product::<usize>() as u64);
    for (here, there) in stripe.runs(elements.clone()) {
        let [start, end] = [here.start, here.end].map(|at| (at - elements.start) as usize);
        let (there, out) = (first + there.start..first + there.end, &mut out[start..end]);
        from.read_stripe(state, &name, &whole, there, bytemuck::cast_slice_mut(out))?;
    }
    Ok(())
}

/// The name of a parameter in PEFT's folder of an adapter.
pub fn adapter_name(parameter: &str) -> String {
    match table_of_added(parameter) {
        None => format!("{ADAPTER_PREFIX}{parameter}"),
        Some(table) => {
            let module = table.strip_suffix(".weight").unwrap_or(&table);
            format!("{ADAPTER_PREFIX}{module}{TOKENS_END}")
        }
    }
}

/// Reads the elements of this rank's part of a parameter of an adapter from PEFT's folder.
///
/// # Errors
/// A tensor that is missing, of another shape, unreadable, or not finite.
fn read_adapter(
    dir: &HuggingFaceDir,
    spec: &ParameterSpec,
    elements: Range<u64>,
    out: &mut [f32],
) -> Result<(), RunError> {
    let name = adapter_name(&spec.name);
    let (given, expected) = (dir.shape(&name)?.to_vec(), spec.whole_shape().to_vec());
    if given != expected {
        return Err(RunError::Shape { name, given, expected });
    }
    Ok(dir.read_weights(&name, &spec.stripe(), elements, out)?)
}

/// Steps that were applied and skipped, from a checkpoint. A checkpoint without these counts was saved without a loss
/// scale.
///
/// # Errors
/// Invalid counts, counts that do not add up to the checkpoint's step, or an invalid loss scale.
pub fn updates(from: &Checkpoint) -> Result<Updates, RunError> {
    let step = from.step();
    let Some(stored) = from.state().get(UPDATES) else {
        let loss_scale = LossScaleState::Off;
        return Ok(Updates { applied: step, skipped: 0, restarted: None, loss_scale });
    };
    let updates =
        Updates::deserialize(stored).map_err(|cause| bad_state(from, UPDATES, &cause.to_string()))?;
    let Updates { applied, skipped, loss_scale, .. } = updates;
    if applied.checked_add(skipped) != Some(step) {
        let reason = format!(
            "{applied} steps applied and {skipped} skipped do not add up to the {step} that were done"
        );
        return Err(bad_state(from, UPDATES, &reason));
    }
    loss_scale.check().map_err(|reason| bad_state(from, "updates.loss_scale", &reason))?;
    Ok(updates)
}

/// Largest number of steps or samples that a checkpoint may have: tokens and bytes counted from it are far
/// below 2^64.
pub const LARGEST_COUNT: u64 = 1 << 40;

/// An error about the state in a checkpoint's manifest.
pub fn bad_state(from: &Checkpoint, key: &str, reason: &str) -> RunError {
    let manifest = from.dir().join("manifest.json");
    RunError::State { manifest, key: key.to_string(), reason: reason.to_string() }
}
