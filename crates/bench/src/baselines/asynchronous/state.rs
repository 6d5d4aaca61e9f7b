//! Filling, gathering, saving and restoring what the ranks of asynchronous updates hold.
//!
//! A checkpoint has the pieces that servers own, in the format of every other run: a synchronous run goes on from
//! it, and this from one of a synchronous run. `updates.applied` in it counts steps (updates over workers), which is
//! what drives the learning rate of whoever goes on; `asynchronous.updates` counts updates, for Adam's correction here.

use std::ops::Range;
use std::path::{Path, PathBuf};

use phalanx_checkpoint::{Checkpoint, HuggingFaceDir};
use phalanx_collectives::{CollectiveError, Group};
use phalanx_parallel::zero::Selection;
use phalanx_plan::trace::PhaseName;
use phalanx_tensor::Device;
use phalanx_train::RunError;
use phalanx_train::rank::{Batch, MeanLoss, Rank};
use phalanx_train::run::{Engine, Observer, Run};
use phalanx_train::saving::{self, Saves};
use phalanx_train::state::{LARGEST_COUNT, UPDATES, Updates, bad_state, updates};
use serde_json::{Value, json};

use super::Asynchronous;

/// Key of the number of updates in a checkpoint's state.
const ASYNCHRONOUS: &str = "asynchronous";

impl Asynchronous<'_> {
    /// Fills what the server holds, and gathers the parameters on all workers.
    pub(super) fn fill(
        &mut self,
        fill: impl FnOnce(&mut Rank) -> Result<(), RunError>,
    ) -> Result<(), RunError> {
        fill(&mut self.server.lock().rank)?;
        Ok(self.gather()?)
    }

    /// Gathers the servers' current parameters on all workers.
    pub(super) fn gather(&mut self) -> Result<(), CollectiveError> {
        let Asynchronous { device, links, server, worker, .. } = self;
        device.try_phase(PhaseName::Gather, || {
            worker.rank.chunks_mut().lend_parameters(|mut whole| {
                server.read(&mut server.lock(), whole.view_mut().range(server.range.clone()))?;
                links.gather().all_gather_in_place(whole).wait()
            })
        })
    }

    /// The pieces that this rank owns: name of the state, number of the parameter, range of its elements, and the
    /// values.
    pub fn pieces(&self) -> Vec<(&'static str, usize, Range<u64>, Vec<f32>)> {
        let served = self.server.lock();
        let chunks = served.rank.chunks();
        let read = |(state, name): (usize, &'static str)| {
            let spans = chunks.spans(0, state, Selection::Owned).into_iter();
            spans.map(move |piece| (state, name, piece)).collect::<Vec<_>>()
        };
        let pieces =
            chunks.state_names(0).into_iter().enumerate().flat_map(read).map(|(state, name, piece)| {
                let mut values = vec![0f32; (piece.elements.end - piece.elements.start) as usize];
                chunks
                    .read_span(state, &piece, 0..values.len(), &mut values)
                    .expect("kernels of the processor do not fail");
                (name, piece.parameter, piece.elements, values)
            });
        pieces.collect()
    }
}

impl Engine for Asynchronous<'_> {
    fn initialise(&mut self, seed: u64) -> Result<(), RunError> {
        self.fill(|rank| rank.initialise(seed))
    }

    fn import(&mut self, dir: &HuggingFaceDir) -> Result<(), RunError> {
        self.fill(|rank| rank.import(dir))
    }

    fn restore(&mut self, from: &Checkpoint) -> Result<(), RunError> {
        let ranks = self.links.ranks() as u64;
        let version = version(from)?.unwrap_or(updates(from)?.applied * ranks);
        self.worker.rank.restore_updates(from)?;
        {
            let mut served = self.server.lock();
            served.version = version;
            served.pushes.total = from.step() * ranks;
        }
        self.fill(|rank| rank.restore(from))
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
        self.worker.rank.evaluate_unless(windows, stop)
    }

    fn log_probabilities(&mut self, _answers: &Batch) -> Result<Vec<f32>, CollectiveError> {
        unreachable!("the configuration refuses pairs with asynchronous updates")
    }

    fn save_checkpoint(&mut self, checkpoints: &Path, step: u64, state: &Value) -> Result<PathBuf, RunError> {
        let mut state = state.clone();
        let steps = self.steps();
        let version = self.server.lock().version;
        let applied = version / self.links.ranks() as u64;
        let loss_scale = self.worker.rank.updates().loss_scale;
        state[UPDATES] = json!(Updates { applied, skipped: steps - applied, restarted: None, loss_scale });
        state[ASYNCHRONOUS] = json!({ "updates": version });
        saving::save_checkpoint(&mut self.server.lock().rank, checkpoints, step, &state)
    }
}

impl Saves for Asynchronous<'_> {
    fn device(&self) -> &Device {
        &self.device
    }

    fn world(&self) -> &dyn Group {
        &*self.links.groups().world
    }

    /// Does nothing, because a step ends when all answers have arrived.
    fn settle(&mut self) -> Result<(), CollectiveError> {
        Ok(())
    }

    fn write_pieces(&self, tmp: &Path) -> Result<(), RunError> {
        self.server.lock().rank.write_pieces(tmp)
    }
}

/// Number of updates, from a checkpoint; `None` for one of a synchronous run.
fn version(from: &Checkpoint) -> Result<Option<u64>, RunError> {
    let Some(stored) = from.state().get(ASYNCHRONOUS) else { return Ok(None) };
    let given = &stored["updates"];
    let version = given.as_u64().filter(|updates| *updates <= LARGEST_COUNT);
    let reason = || format!("it is {given}; expected an integer from 0 to {LARGEST_COUNT}");
    version.map(Some).ok_or_else(|| bad_state(from, "asynchronous.updates", &reason()))
}
