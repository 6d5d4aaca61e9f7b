//! An evaluation, in parts. They run the same program, and between them all ranks agree whether to go on: an evaluation can be asked to stop
//! as often as steps can.

use std::cell::RefCell;

use phalanx_collectives::CollectiveError;
use phalanx_layers::Context;
use phalanx_parallel::Stage;
use phalanx_parallel::pipeline::{Feed, SeeMicroBatch, run};
use phalanx_plan::trace::{PhaseName, Placements};
use phalanx_plan::{Action, Kind, Mesh, PipelineSchedule};
use phalanx_tensor::{Category, CrossEntropy, DType, Device, Tensor, View};

use crate::config::RunConfig;
use crate::engine::rank::{Batch, ClassScores, LossPlaces, MeanLoss, Rank, Rewards, uploads, zeroed};
use crate::engine::scores::ClassCounts;
use crate::engine::targets::mean_over;

/// The losses of the parts of an evaluation so far.
struct Losses {
    places: LossPlaces,
    /// The sum of this rank's, where one number has it.
    own: f32,
    /// Those of all replicas.
    all: Vec<f32>,
}

/// Divides an evaluation of `evaluated` windows over all ranks into parts of at most as many micro-batches as a step has: number of parts,
/// and the schedule of each. The last rows may have no window.
pub(crate) fn parts(
    config: &RunConfig,
    mesh: Mesh,
    schedule: &PipelineSchedule,
    evaluated: usize,
) -> (usize, PipelineSchedule) {
    let whole = match evaluated.div_ceil(config.micro_batch_size() * mesh.data) {
        // The answers of pairs are evaluated by the reference, in any case.
        0 if config.has_reference() => config.micro_batches(),
        whole => whole,
    };
    let parts = whole.div_ceil(config.micro_batches());
    (parts, forward_only(schedule, if parts == 0 { 0 } else { whole.div_ceil(parts) }))
}

/// The schedule that only runs forward of every micro-batch through the same stages.
fn forward_only(schedule: &PipelineSchedule, micro_batches: usize) -> PipelineSchedule {
    let of_rank = |rank: usize| {
        let actions = (0..micro_batches).flat_map(|micro_batch| {
            let action = move |stage| Some(Action { stage, kind: Kind::Forward, micro_batch });
            schedule.stages_of(rank).map(action)
        });
        actions.collect()
    };
    PipelineSchedule {
        name: "evaluation".into(),
        ranks: (0..schedule.ranks.len()).map(of_rank).collect(),
        placement: schedule.placement.clone(),
        micro_batches,
    }
}

impl Rank {
    /// Computes the mean loss over the targets in the micro-batches of `batch` on all ranks: all parts of an evaluation. Rows
    /// without a target do not count.
    ///
    /// # Errors
    /// When a collective fails.
    pub fn evaluate(&mut self, batch: &Batch) -> Result<MeanLoss, CollectiveError> {
        Ok(self.evaluate_unless(batch, &|| false)?.expect("nobody asks to stop"))
    }

    /// The same, unless a rank says `stop` between two parts: None on all ranks then.
    ///
    /// # Errors
    /// When a collective fails.
    pub fn evaluate_unless(
        &mut self,
        batch: &Batch,
        stop: &dyn Fn() -> bool,
    ) -> Result<Option<MeanLoss>, CollectiveError> {
        Ok(self.evaluated(batch, stop)?.map(|(mean, _)| mean))
    }

    /// The log-probability of each sequence of `answers` on all ranks, those of one replica behind those of the one before.
    ///
    /// # Errors
    /// When a collective fails.
    ///
    /// # Panics
    /// If samples are no pairs.
    pub fn log_probabilities(&mut self, answers: &Batch) -> Result<Vec<f32>, CollectiveError> {
        let (_, Losses { places, all, .. }) =
            self.evaluated(answers, &|| false)?.expect("nobody asks to stop");
        assert!(places.width > places.sums, "only pairs have answers");
        Ok(all.chunks(places.width).flat_map(|each| each[places.sums..].to_vec()).collect())
    }

    fn evaluated(
        &mut self,
        batch: &Batch,
        stop: &dyn Fn() -> bool,
    ) -> Result<Option<(MeanLoss, Losses)>, CollectiveError> {
        let rows = self.spec.batch.micro_batch_size * self.spec.batch.evaluation_batches;
        let parts = batch.rows(&self.spec.batch).checked_div(rows).unwrap_or(0);
        let places = self.loss_places(true);
        let mut losses = Losses { places, own: 0.0, all: vec![0.0; places.elements()] };
        let mut mean = MeanLoss::over(0, 0.0);
        let counts = RefCell::new(ClassCounts::new(self.spec.batch.classes));
        for part in 0..parts {
            let evaluated = self.evaluate_part(batch, part, (&mut losses, &counts), stop());
            let (stop_requests, whole) = evaluated.inspect_err(|error| self.groups.abort_for(error))?;
            mean = whole;
            if stop_requests > 0.0 && part + 1 < parts {
                return Ok(None);
            }
        }
        Ok(Some((mean, losses)))
    }

    /// Adds the losses of a part of an evaluation to `losses`, and its samples to `counts`. Returns how many ranks ask to stop; and the mean, which is that of the whole evaluation behind its last part.
    fn evaluate_part(
        &mut self,
        batch: &Batch,
        part: usize,
        (losses, counts): (&mut Losses, &RefCell<ClassCounts>),
        stop: bool,
    ) -> Result<(f32, MeanLoss), CollectiveError> {
        let device = self.device.clone();
        device.try_phase(PhaseName::Evaluate, || {
            let spec = &self.spec;
            let planned = spec.batch.evaluation_targets(self.at.data);
            let counted = spec.batch.count_targets(&device, &*self.groups.data, batch, planned)?;
            let numbers = CrossEntropy::scaled(mean_over(counted));
            let mut loss = zeroed(&device, losses.all.len(), "evaluate.loss");
            let (places, is_one) = (losses.places, losses.places.is_one());
            if is_one {
                device.fill(loss.view_mut(), losses.own);
            }
            let rows = spec.mesh.rows(&spec.batch, self.at.tensor);
            let context = |_: usize| Context {
                keep: false,
                rows,
                slice_bytes: spec.device.slice_bytes,
                ..Context::new(&device, spec.precision.types.compute, rows.tokens)
            };
            let of_batch = (&spec.batch, spec.precision.types.compute);
            let upload = uploads(&device, of_batch, spec.mesh.batch_placements(), batch);
            let first = part * spec.batch.evaluation_batches;
            let first_of_rank = self.at.data * spec.batch.evaluation_parts * spec.batch.evaluation_batches;
            let loss_at = |index: usize| places.at(first_of_rank + first + index);
            let rows_each = spec.batch.micro_batch_size;
            let see_logits = |index: usize, logits: View| {
                let numbers = numbers_of(&device, logits)?;
                // The batch of a dry run is not read.
                if !device.is_meta() {
                    let labels = &batch.targets[(first + index) * rows_each..][..rows_each];
                    counts.borrow_mut().add(&numbers, labels);
                }
                Ok(())
            };
            let feed = Feed {
                device: &device,
                context: &context,
                upload: &|index, name| upload(first + index, name),
                first: spec.batch.first_input(),
                has_targets: spec.batch.has_targets(),
                numbers,
                loss_at: &loss_at,
                loss_width: places.width,
                see_logits: (spec.batch.classes > 0).then_some(&see_logits as SeeMicroBatch),
                ranks_of_rows: spec.mesh.ranks_of_rows(),
                placements: spec.mesh.boundary(),
            };
            self.chunks.begin(PhaseName::Evaluate);
            let (owned, wires) = ((&mut self.stages[..], &mut self.chunks), &self.groups.wires);
            run(owned, &self.evaluation, wires, self.at.pipeline, &feed, &mut loss, None)?;
            self.chunks.finish(true, None)?;
            let stop_requests = self.groups.world.all_reduce(self.stop_request(stop, "evaluate.stop"));
            if is_one && self.stages.iter().any(Stage::is_last) {
                losses.own = own_loss(&device, &loss)?;
            }
            let loss = self.sum_of_replicas(loss)?;
            let stop_requests = stop_requests.wait()?;
            let [first, stop_requests] = device.fetch([loss.view().range(0..1), stop_requests.view()])?;
            let sums = match is_one {
                true => vec![first],
                false => self.whole_loss(&loss, places, &mut losses.all)?,
            };
            let (scores, rewards) = (self.scores(&counts.borrow())?, Rewards::of(&sums));
            Ok((stop_requests, MeanLoss { scores, rewards, ..MeanLoss::over(counted, sums[0]) }))
        })
    }

    /// The scores of the samples that all replicas have counted; None where no class is chosen.
    fn scores(&self, counts: &ClassCounts) -> Result<Option<ClassScores>, CollectiveError> {
        let mut numbers = counts.numbers().to_vec();
        if numbers.is_empty() {
            return Ok(None);
        }
        let mut sums = self.device.alloc(DType::F32, [numbers.len()], Category::Workspace, "evaluate.counts");
        self.device.upload(&numbers, sums.view_mut());
        let sums = self.groups.data.all_reduce(sums).wait()?;
        // Other stages than the last one have counted nothing.
        let sums = self.groups.pipeline.all_reduce(sums).wait()?;
        self.device.download(sums.view(), &mut numbers)?;
        Ok(ClassCounts::of(&numbers).scores())
    }
}

/// Reads the sum of a rank's own losses, to go on with it. It is taken for no more than that.
fn own_loss(device: &Device, loss: &Tensor) -> Result<f32, CollectiveError> {
    let placements = device.placements(loss.view());
    device.place(loss.view(), Placements::REPLICATED);
    let [own] = device.fetch([loss.view()])?;
    device.place(loss.view(), placements);
    Ok(own)
}

/// The numbers of a tensor, as f32.
fn numbers_of(device: &Device, x: View) -> Result<Vec<f32>, CollectiveError> {
    let mut numbers = vec![0.0; x.elements()];
    if x.dtype() == DType::F32 {
        device.download(x, &mut numbers)?;
        return Ok(numbers);
    }
    let mut wide = device.alloc(DType::F32, x.shape(), Category::Workspace, "evaluate.logits");
    device.convert(x, wide.view_mut());
    device.download(wide.view(), &mut numbers)?;
    Ok(numbers)
}
