//! Runs the phases of a rank on `Meta`.
//!
//! A schedule repeats the same steps in its steady state. So a rank runs dry with fewer micro-batches
//! (`plan::pipeline::abridge`), and the periods that are left out are put back into its trace (`plan::expand`). Where a
//! program does not repeat itself, or its trace does not, the rank runs dry with all micro-batches; both give the same
//! trace (see the test below).

use std::sync::Arc;

use phalanx_collectives::CollectiveError;
use phalanx_parallel::pipeline::steps_with_backward_from;
use phalanx_plan::pipeline::{Abridged, abridge};
use phalanx_plan::trace::Trace;
use phalanx_tensor::Device;

use crate::engine::abridged_programs::AbridgedPrograms;
use crate::engine::groups::{GroupSource, Groups};
use crate::engine::rank::{Batch, Rank};
use crate::engine::spec::{PipelinePart, Spec};

/// Makes the engine of a rank from its device and its groups; see [`Rank::new`].
pub type MakeRank<'a> = dyn Fn(Device, Groups, &Spec) -> Result<Rank, CollectiveError> + 'a;

impl Spec {
    /// The specification of a dry run that leaves out repeated micro-batches, at a coordinate of the pipeline.
    fn abridged(&self, pipeline: usize) -> Option<Spec> {
        // The sums of a tree lie in other buffers after each micro-batch.
        if self.batch.sums_by_tree {
            return None;
        }
        let PipelinePart { schedule, evaluation, lowest_stage, .. } = &self.pipeline;
        let short = |schedule| abridge(&steps_with_backward_from(schedule, pipeline, *lowest_stage));
        // An evaluation of pairs keeps the losses of all its micro-batches.
        let evaluation = if self.batch.has_pairs { None } else { short(evaluation) };
        let step = short(schedule);
        if step.is_none() && evaluation.is_none() {
            return None;
        }
        let mut spec = self.clone();
        if let Some(Abridged { omitted, .. }) = &step {
            spec.batch.micro_batches -= omitted.all_micro_batches();
            spec.batch.targets_per_step =
                self.batch.targets_per_step / self.batch.micro_batches * spec.batch.micro_batches;
        }
        if let Some(Abridged { omitted, .. }) = &evaluation {
            spec.batch.evaluation_batches -= omitted.all_micro_batches();
        }
        spec.pipeline.abridged = Some(Arc::new(AbridgedPrograms { step, evaluation }));
        Some(spec)
    }
}

/// The dry runs of a specification.
pub(crate) struct DryRuns<'a> {
    pub(crate) spec: &'a Spec,
    pub(crate) make_rank: &'a MakeRank<'a>,
    /// True if repeated micro-batches are left out.
    abridges: bool,
    /// False leaves out the diagnosis, which has the tensors of a step.
    diagnoses: bool,
}

impl<'a> DryRuns<'a> {
    /// Dry runs that leave out repeated micro-batches.
    pub(crate) fn of(spec: &'a Spec, make_rank: &'a MakeRank<'a>) -> DryRuns<'a> {
        DryRuns { spec, make_rank, abridges: true, diagnoses: true }
    }

    /// The same, or of all micro-batches.
    #[must_use]
    pub(crate) fn abridging(self, abridges: bool) -> DryRuns<'a> {
        DryRuns { abridges, ..self }
    }

    /// The same without a diagnosis.
    #[must_use]
    pub(crate) fn without_diagnosis(self) -> DryRuns<'a> {
        DryRuns { diagnoses: false, ..self }
    }

    fn abridged(&self, rank: usize) -> Option<(Spec, Arc<AbridgedPrograms>)> {
        let spec =
            self.spec.abridged(self.spec.mesh.axes.coordinates(rank).pipeline).filter(|_| self.abridges)?;
        let programs = spec.pipeline.abridged.clone()?;
        Some((spec, programs))
    }

    /// Runs all phases of a rank, and leaves repeated micro-batches out of the trace. As much is live at once as in the
    /// whole trace, but it may be placed otherwise.
    pub(crate) fn short_trace(&self, rank: usize) -> Trace {
        let abridged = self.abridged(rank);
        self.run(abridged.as_ref().map_or(self.spec, |(spec, _)| spec), rank)
    }

    /// Runs all phases of a rank.
    pub(crate) fn trace(&self, rank: usize) -> Trace {
        let (short, whole) = self.short_and_whole(rank);
        whole.unwrap_or(short)
    }

    /// The trace of [`DryRuns::short_trace`] and the whole one, if that is another.
    pub(crate) fn short_and_whole(&self, rank: usize) -> (Trace, Option<Trace>) {
        if let Some((spec, programs)) = self.abridged(rank) {
            let short = self.run(&spec, rank);
            if let Some(whole) = programs.expand(&short, spec.pipeline.depths) {
                return (short, Some(whole));
            }
        }
        (self.run(self.spec, rank), None)
    }

    fn run(&self, spec: &Spec, rank: usize) -> Trace {
        run(spec, rank, self.make_rank, self.diagnoses)
    }
}

/// Makes the engine of a rank on `Meta`.
pub(crate) fn on_meta(spec: &Spec, rank: usize, make_rank: &MakeRank) -> (Device, Rank) {
    let device = Device::meta_of(spec.device.threads, spec.device.host_addressable);
    let recorder = Arc::clone(device.recorder().expect("Meta records"));
    let groups = Groups::new(&GroupSource::Meta(recorder, rank), spec);
    let mut engine = make_rank(device.clone(), groups, spec).expect(NEVER);
    engine.chunks_mut().expect_update();
    (device, engine)
}

pub(crate) const NEVER: &str = "nothing fails on Meta";

/// Runs all phases of a rank on `Meta`.
pub(crate) fn dry_run(spec: &Spec, rank: usize, make_rank: &MakeRank) -> Trace {
    run(spec, rank, make_rank, true)
}

fn run(spec: &Spec, rank: usize, make_rank: &MakeRank, diagnoses: bool) -> Trace {
    let (device, mut engine) = on_meta(spec, rank, make_rank);
    let part = &spec.batch;
    let batch = Batch::of(part, part.micro_batch_size * part.micro_batches);
    engine.load(|_, _, _, _| Ok(())).expect(NEVER);
    engine.step(1, &batch, false).expect(NEVER);
    if diagnoses {
        engine.diagnose(1, &batch, part.targets_per_step, 1.0).expect(NEVER);
    }
    if part.evaluation_batches > 0 {
        let windows = Batch::of(part, part.micro_batch_size * part.evaluation_batches);
        engine.evaluate(&windows).expect(NEVER);
    }
    engine.save(|_, _| Ok(())).expect(NEVER);
    engine.report(|_| Ok(())).expect(NEVER);
    device.take_trace(rank)
}

#[cfg(test)]
mod tests {
    use phalanx_models::Gpt2;
    use phalanx_system::random::SplitMix64;

    use super::*;
    use crate::RunConfig;
    use crate::config::{Checkpointing, CheckpointingWord, DeviceKind, Float, Reduce};

    /// A random configuration with many micro-batches, and its specification if there is one.
    fn random_spec(random: &mut SplitMix64) -> Option<(String, Spec)> {
        let mut config = RunConfig::default();
        let mut pick = |count: usize| (random.next_u64() % count as u64) as usize;
        let schedules = ["model", "1f1b", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "gpipe"];
        let (pipeline, data, tensor) = ([1, 1, 2, 3, 4][pick(5)], [1, 2, 3][pick(3)], [1, 2][pick(2)]);
        let parallel = &mut config.parallel;
        (parallel.pipeline, parallel.data, parallel.tensor) = (pipeline, Some(data), tensor);
        parallel.schedule = schedules[pick(schedules.len())].into();
        parallel.zero = pick(4) as u8;
        parallel.sequence_parallel = tensor > 1 && pick(2) == 0;
        parallel.overlap = pick(3) > 0;
        config.memory.prefetch = pick(3);
        config.memory.checkpointing = match pick(3) {
            0 => Checkpointing::Word(CheckpointingWord::None),
            1 => Checkpointing::Word(CheckpointingWord::Selective),
            _ => Checkpointing::Every(1 + pick(2)),
        };
        config.precision.compute = [Float::F32, Float::Bf16, Float::F16][pick(3)];
        config.batch.reduce = [Reduce::Each, Reduce::Defer][pick(2)];
        config.device.kind = [DeviceKind::Cpu, DeviceKind::Simulated][pick(2)];
        let micro_batches = pipeline * (9 + pick(6));
        config.batch.micro = Some(2);
        config.batch.global = 2 * data * micro_batches;
        config.model.seq = 8;
        config.model.dropout = [0.0, 0.1][pick(2)];
        let trained: [&[&str]; 3] = [&[], &["*.h.7.*", "*.ln_f.*"], &["*.bias"]];
        config.model.trainable = trained[pick(3)].iter().map(|pattern| pattern.to_string()).collect();
        config.train.threads = Some(1);
        let model = Gpt2 { layers: 8, hidden: 16, heads: 2, vocab: 50, positions: 8, ..Gpt2::default() };
        let evaluated = 2 * data * pick(20);
        let spec = Spec::new(&config, model, evaluated, 1).ok()?;
        Some((format!("{config:?}"), spec))
    }

    #[test]
    fn an_expanded_trace_is_that_of_all_micro_batches() {
        let mut random = SplitMix64::new(11);
        let (mut compared, mut micro_batches) = (0, 0);
        while compared < 48 {
            let Some((config, spec)) = random_spec(&mut random) else { continue };
            let mesh = spec.mesh.axes;
            let rank = (random.next_u64() % mesh.world_size() as u64) as usize;
            let runs = |abridges| DryRuns::of(&spec, &Rank::new).abridging(abridges);
            let Some((left, programs)) = runs(true).abridged(rank) else {
                assert!(spec.pipeline.schedule.name == "gpipe", "nothing is left out of {config}");
                continue;
            };
            let expanded = programs.expand(&dry_run(&left, rank, &Rank::new), spec.pipeline.depths);
            let expanded = expanded.unwrap_or_else(|| panic!("rank {rank} does not repeat itself: {config}"));
            let expected = dry_run(&spec, rank, &Rank::new);
            for (expanded, expected) in expanded.phases.iter().zip(&expected.phases) {
                let pairs = expanded.events.iter().zip(&expected.events);
                if let Some((at, (expanded, expected))) =
                    pairs.enumerate().find(|(_, (one, other))| one != other)
                {
                    panic!("rank {rank}, event {at}: {expanded:?} instead of {expected:?}: {config}");
                }
            }
            assert!(expanded == expected, "rank {rank}: {config}");
            micro_batches += spec.batch.micro_batches - left.batch.micro_batches;
            compared += 1;
        }
        assert!(micro_batches > 200, "only {micro_batches} micro-batches were left out");
    }
}
