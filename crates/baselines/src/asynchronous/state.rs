//! Filling, gathering, saving and restoring what the ranks of asynchronous updates hold.
//!
//! A checkpoint has the pieces that servers own, in the format of every other run: a synchronous run goes on from
//! it, and this from one of a synchronous run. `updates.applied` in it counts steps (updates over workers), which is
//! what drives the learning rate of whoever goes on; `asynchronous.updates` counts updates, for Adam's correction here.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use phalanx_checkpoint::{self as checkpoint, Checkpoint, HuggingFaceDir};
use phalanx_collectives::{CollectiveError, Group};
use phalanx_optim::LossScale;
use phalanx_tensor::{Category, DType, Device, View};
use phalanx_trace::PhaseName;
use serde_json::{Value, json};

use super::Asynchronous;
use phalanx_train::RunError;
use phalanx_train::rank::{Batch, MeanLoss};
use phalanx_train::run::{Engine, Observer, Run};
use phalanx_train::saving::{self, Saves, WINDOW};
use phalanx_train::state::{
    LARGEST_COUNT, PARAMETERS, Read, UPDATES, Updates, bad_state, imported, initial, state_name, stored,
    updates,
};

/// Key of the number of updates in a checkpoint's state.
const ASYNCHRONOUS: &str = "asynchronous";

impl Asynchronous<'_> {
    /// Fills the worker's parameters, the server's range of them and the server's states, as `Rank::load`.
    ///
    /// # Errors
    /// The errors of `read`.
    pub fn load(&mut self, mut read: impl Read) -> Result<(), RunError> {
        let device = self.device.clone();
        device.try_phase(PhaseName::Load, || {
            let name = "load.rounding_window";
            let rounding = || device.alloc(DType::F32, [WINDOW], Category::Workspace, name);
            let mut rounding = self.spec.precision.has_master().then(rounding);
            let Some(mut window) = device.host_window(WINDOW) else { return Ok(()) };
            let mut served = self.server.lock();
            let (range, parameters) = (self.server.range.clone(), &mut self.worker.parameters);
            let parameters = parameters.as_mut().expect("parameters are absent only during a gather");
            for (p, spec) in self.whole.network.parameters.iter().enumerate() {
                let place = self.whole.range(p);
                for start in place.clone().step_by(WINDOW) {
                    let here = start..(start + WINDOW).min(place.end);
                    let out = &mut window[..here.len()];
                    read(PARAMETERS, spec, &spec.stripe(), of_parameter(&place, &here), out)?;
                    let to = parameters.view_mut().range(here.clone());
                    match &mut rounding {
                        None => device.upload(out, to),
                        Some(rounding) => {
                            device.upload(out, rounding.view_mut().range(0..out.len()));
                            device.convert(rounding.view().range(0..out.len()), to);
                        }
                    }
                    let own = here.start.max(range.start)..here.end.min(range.end);
                    if own.is_empty() {
                        continue;
                    }
                    let part = own.start - range.start..own.end - range.start;
                    device.upload(
                        &out[own.start - here.start..own.end - here.start],
                        served.exact.view_mut().range(part.clone()),
                    );
                    for (s, state) in served.states.iter_mut().enumerate() {
                        let out = &mut window[..own.len()];
                        let state_name = self.spec.optimizer.states()[s];
                        read(state_name, spec, &spec.stripe(), of_parameter(&place, &own), out)?;
                        device.upload(out, state.view_mut().range(part.clone()));
                    }
                }
            }
            Ok(())
        })
    }

    /// Gathers the servers' current parameters on all workers.
    pub(super) fn gather(&mut self) -> Result<(), CollectiveError> {
        let device = self.device.clone();
        device.try_phase(PhaseName::Gather, || {
            let mut parameters =
                self.worker.parameters.take().expect("parameters are absent only during a gather");
            let own = parameters.view_mut().range(self.server.range.clone());
            self.server.read(&self.server.lock(), own);
            self.worker.parameters = Some(self.links.world().all_gather_in_place(parameters).wait()?);
            Ok(())
        })
    }

    /// The pieces that this rank owns: name of the state, number of the parameter, range of its elements, and the
    /// values.
    pub fn pieces(&self) -> Vec<(&'static str, usize, Range<u64>, Vec<f32>)> {
        let served = self.server.lock();
        let read = |view: View| {
            let mut out = vec![0f32; view.elements()];
            self.device.download(view, &mut out).expect("kernels of the processor do not fail");
            out
        };
        let mut pieces = Vec::new();
        for state in 0..=served.states.len() {
            let tensor = if state == 0 { &served.exact } else { &served.states[state - 1] };
            for segment in self.whole.segments(self.server.range.clone()) {
                let numbers = read(tensor.view().range(self.local(&segment.in_chunk)));
                let name = state_name(&self.spec.optimizer, state);
                pieces.push((name, segment.parameter, segment.in_parameter, numbers));
            }
        }
        pieces
    }

    /// A range of the chunk as elements of the server's range.
    fn local(&self, in_chunk: &Range<u64>) -> Range<usize> {
        let start = self.server.range.start;
        in_chunk.start as usize - start..in_chunk.end as usize - start
    }
}

impl Engine for Asynchronous<'_> {
    fn initialise(&mut self, seed: u64) -> Result<(), RunError> {
        self.load(initial(seed, self.spec.threads))
    }

    fn import(&mut self, dir: &HuggingFaceDir) -> Result<(), RunError> {
        self.load(imported(dir, Arc::clone(&self.spec.model)))
    }

    fn restore(&mut self, from: &Checkpoint) -> Result<(), RunError> {
        let ranks = self.links.ranks() as u64;
        let counted = updates(from)?;
        let version = version(from)?.unwrap_or(counted.applied * ranks);
        self.worker.loss_scale = LossScale::resumed(self.spec.loss_scaling, counted.loss_scale);
        {
            let mut served = self.server.lock();
            served.version = version;
            served.pushes.total = from.step() * ranks;
        }
        self.load(stored(from))
    }

    fn part_of_data(&self) -> usize {
        self.rank()
    }

    fn advance(
        &mut self,
        run: &mut Run,
        observer: &mut dyn Observer,
    ) -> Result<(Option<f32>, bool), RunError> {
        self.run_to_next_meeting(run, observer)
    }

    fn evaluate_unless(
        &mut self,
        windows: &Batch,
        stop: &dyn Fn() -> bool,
    ) -> Result<Option<MeanLoss>, CollectiveError> {
        let device = self.device.clone();
        device.try_phase(PhaseName::Evaluate, || {
            let (world, spec) = (self.links.world(), &self.spec);
            let planned = spec.evaluation_targets(world.rank());
            let targets = spec.count_targets(&device, world, windows, planned)?;
            let sums = self.worker.evaluate(&self.whole, windows, targets, stop);
            let sums = world.all_reduce(sums).wait()?;
            let [loss, stopped] = device.fetch([sums.view().range(0..1), sums.view().range(1..2)])?;
            Ok((stopped == 0.0).then(|| MeanLoss::over(targets, loss)))
        })
    }

    fn save_checkpoint(&mut self, checkpoints: &Path, step: u64, state: &Value) -> Result<PathBuf, RunError> {
        let mut state = state.clone();
        let steps = self.steps();
        let version = self.server.lock().version;
        let applied = version / self.links.ranks() as u64;
        let loss_scale = self.worker.loss_scale.state();
        state[UPDATES] = json!(Updates { applied, skipped: steps - applied, restarted: None, loss_scale });
        state[ASYNCHRONOUS] = json!({ "updates": version });
        saving::save_checkpoint(self, checkpoints, step, &state)
    }
}

impl Saves for Asynchronous<'_> {
    fn device(&self) -> &Device {
        &self.device
    }

    fn world(&self) -> &dyn Group {
        self.links.world()
    }

    /// Does nothing, because a step ends when all answers have arrived.
    fn settle(&mut self) -> Result<(), CollectiveError> {
        Ok(())
    }

    fn write_pieces(&self, tmp: &Path) -> Result<(), RunError> {
        let served = self.server.lock();
        let mut described = Vec::new();
        let mut tensors = Vec::new();
        for state in 0..=served.states.len() {
            let tensor = if state == 0 { &served.exact } else { &served.states[state - 1] };
            for segment in self.whole.segments(self.server.range.clone()) {
                let spec = &self.whole.network.parameters[segment.parameter];
                tensors.push(tensor.view().range(self.local(&segment.in_chunk)));
                described.push(checkpoint::TensorPiece {
                    state: state_name(&self.spec.optimizer, state),
                    name: spec.name.clone(),
                    shape: spec.shape.clone(),
                    dtype: DType::F32,
                    stripe: None,
                    range: segment.in_parameter,
                });
            }
        }
        saving::write_finite(tmp, self.rank(), &described, |index, within, out| {
            self.device.download(tensors[index].range(within), out)
        })
    }
}

/// A range of the flat space as elements of the parameter that lies in `place`.
fn of_parameter(place: &Range<usize>, here: &Range<usize>) -> Range<u64> {
    (here.start - place.start) as u64..(here.end - place.start) as u64
}

/// Number of updates, from a checkpoint; `None` for one of a synchronous run.
fn version(from: &Checkpoint) -> Result<Option<u64>, RunError> {
    let Some(stored) = from.state().get(ASYNCHRONOUS) else { return Ok(None) };
    let given = &stored["updates"];
    let version = given.as_u64().filter(|updates| *updates <= LARGEST_COUNT);
    let reason = || format!("it is {given}; expected an integer from 0 to {LARGEST_COUNT}");
    version.map(Some).ok_or_else(|| bad_state(from, "asynchronous.updates", &reason()))
}
