//! The engine of one rank.
//!
//! A [`Rank`] is made the same way for the dry run and for training: on `Meta` with groups that only record, or on a
//! device with groups that communicate. What it allocates in a dry run, in that order, becomes the plan.

use std::sync::Arc;

use phalanx_collectives::{CollectiveError, Group, Solo};
use phalanx_layers::{Activation, Network, ParameterSpec, Rows, TARGETS, TOKENS};
use phalanx_optim::{CountedSteps, LossScale, LossScaling, Optimizer};
use phalanx_parallel::pipeline::Program;
use phalanx_parallel::zero::{self, Arithmetic, Holding, NotFinite, Residence, Schedules, SumGroups, Tie};
use phalanx_parallel::{BlockInputs, Chunks, InputOptions, Stage};
use phalanx_plan::program::BlockRun;
use phalanx_plan::trace::{Axis, PhaseName, Placement, Placements};
use phalanx_plan::{Coordinates, ParameterSize};
use phalanx_tensor::preference::PREFERENCE_SUMS;
use phalanx_tensor::{Category, DType, Device, Memory, Tensor, View};

pub use crate::engine::batch::{Batch, Numbers, SampleNumbers};
use crate::engine::groups::Groups;
use crate::engine::parameter_sizes::{reserved, size};
pub use crate::engine::scores::ClassScores;
use crate::engine::spec::{BatchPart, MeshPart, Spec};
pub use crate::engine::targets::{MeanLoss, Rewards};

/// The engine of one rank: its stages, and what a step, an evaluation and a checkpoint need.
pub struct Rank {
    pub(crate) device: Device,
    pub(crate) groups: Groups,
    pub(crate) at: Coordinates,
    pub(crate) stages: Vec<Stage>,
    pub(crate) chunks: Chunks,
    pub(crate) program: Program,
    pub(crate) evaluation: Program,
    pub(crate) spec: Spec,
    pub(crate) outline: Arc<Outline>,
    /// Steps so far: Adam's bias correction and the learning rate depend on those that were applied.
    pub(crate) counted: CountedSteps,
    pub(crate) loss_scale: LossScale,
    /// The count of a diagnosis, `[1]`. It is allocated for the whole run, so that a diagnosis needs no more memory
    /// than a step.
    pub(crate) count: Option<Tensor>,
    /// True if a step may have left gathers or updates behind that run on.
    pub(crate) in_flight: bool,
    /// The step of which updates within backward were stopped: the state is between two steps, and is not saved.
    pub(crate) updated_in_part: Option<u64>,
    /// The gradient because of which this rank has stopped to update within backward, in the last step.
    pub(crate) not_finite: Option<NotFinite>,
    /// The ranks that have parts of a step's gradients: all, or only this one if it is a replica.
    pub(crate) counted_over: Arc<dyn Group>,
    pub(crate) is_replica: bool,
    /// True if its checkpoints have all parameters: without adapters, and where the one that it goes on from has.
    pub(crate) saves_base: bool,
}

/// A rank with a copy of the whole model, whose gradients are those of its own part of a batch: what becomes of them, and where
/// parameters come from, is up to the caller (a parameter server, DataParallel).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replica {
    /// True if it has optimizer states and master weights, with which it updates its parameters.
    pub updates: bool,
}

/// The tensor in which losses are kept.
#[derive(Clone, Copy)]
pub(crate) struct LossPlaces {
    /// One; or, where they are added up later, one of each micro-batch of every replica.
    places: usize,
    /// Sums of each: the loss, and with pairs what is known of rewards.
    pub(crate) sums: usize,
    /// Numbers of each: these sums, and perhaps the log-probabilities of answers.
    pub(crate) width: usize,
}

impl LossPlaces {
    /// Elements of the tensor.
    pub(crate) fn elements(self) -> usize {
        self.places * self.width
    }

    /// True for a single number, which each micro-batch adds to.
    pub(crate) fn is_one(self) -> bool {
        self.elements() == 1
    }

    /// The first element of the micro-batch with number `number` in the global batch.
    pub(crate) fn at(self, number: usize) -> usize {
        if self.places == 1 { 0 } else { number * self.width }
    }
}

/// The names of the whole model, so that a rank can name the tensors of other ranks.
pub struct Outline {
    /// Names of the blocks, the head last.
    pub blocks: Vec<String>,
    /// Names of the parameters.
    pub parameters: Vec<String>,
    /// For each block: its parameters.
    pub uses: Vec<Vec<usize>>,
}

impl Outline {
    fn of(network: &Network) -> Outline {
        Outline {
            blocks: (0..network.uses.len()).map(|i| network.block_name(i).to_string()).collect(),
            parameters: network.parameters.iter().map(|p| p.name.clone()).collect(),
            uses: network.uses.clone(),
        }
    }
}

impl Rank {
    /// Allocates everything that stays for the whole run: the phase `init` of the plan.
    ///
    /// # Errors
    /// Devices that cannot be connected, of any rank.
    pub fn new(device: Device, groups: Groups, spec: &Spec) -> Result<Rank, CollectiveError> {
        let groups = groups.on_device(&device);
        let network = spec.network(&groups.tensor);
        Rank::with_network(device, groups, spec, network)
    }

    /// Like [`Rank::new`], with the layers of `network` instead of the model's. They must have the same parameters and
    /// allocate the same memory.
    ///
    /// # Errors
    /// As for [`Rank::new`].
    pub fn with_network(
        device: Device,
        groups: Groups,
        spec: &Spec,
        network: Network,
    ) -> Result<Rank, CollectiveError> {
        // The configuration refuses it; a spec can be changed by hand.
        let needs_all = spec.update.clip != 0.0
            || !matches!(spec.precision.loss_scaling, LossScaling::Off)
            || spec.mesh.sequence_parallel;
        assert!(
            !(spec.zero.update_in_backward && needs_all),
            "updates within backward know no number of all gradients"
        );
        let groups = groups.on_device(&device);
        let here = device.clone();
        here.try_phase(PhaseName::Init, || Rank::allocate(device, groups, spec, network, None))
    }

    /// As [`Rank::with_network`], within the phase `init` that the caller has begun. A `replica` holds everything in the memory of
    /// its device, whatever the specification says.
    ///
    /// # Errors
    /// As for [`Rank::new`].
    pub fn allocate(
        device: Device,
        groups: Groups,
        spec: &Spec,
        network: Network,
        replica: Option<Replica>,
    ) -> Result<Rank, CollectiveError> {
        let spec = if replica.is_some() { spec.on_one_device() } else { spec.clone() };
        let at = spec.mesh.axes.coordinates(groups.world.rank());
        let outline = Arc::new(Outline::of(&network));
        let networks = network.into_stages(&spec.mesh.stages).into_iter().enumerate();
        let own = networks.filter(|(stage, _)| spec.pipeline.schedule.placement[*stage] == at.pipeline);
        groups.connect()?;
        let solo: Arc<dyn Group> = Arc::new(Solo::new("replica"));
        let (data, counted_over) = match replica {
            Some(_) => (Arc::clone(&solo), solo),
            None => (Arc::clone(&groups.data), Arc::clone(&groups.world)),
        };
        let is_updated = replica.is_none_or(|replica| replica.updates);
        let (stages, held): (Vec<Stage>, Vec<Holding>) =
            own.map(|own| spec.stage_of(&groups, own, is_updated)).unzip();
        let [program, evaluation] = spec.pipeline.programs(at.pipeline);
        let schedules = Schedules {
            step: program.steps().to_vec(),
            evaluation: evaluation.steps().to_vec(),
            parameters: outline.parameters.len(),
            slots: [spec.mesh.axes.tensor, at.tensor],
        };
        let sums = SumGroups { data, tensor: Arc::clone(&groups.tensor), world: Arc::clone(&counted_over) };
        let held: Vec<_> = stages.iter().map(|stage| &stage.network).zip(held).collect();
        let ties = spec.ties_of(&stages, &groups);
        let chunks = Chunks::new(&device, sums, &held, (&spec.zero, spec.arithmetic()), (schedules, ties));
        let count = device.alloc(DType::F32, [1], Category::Workspace, "diagnose.count");
        Ok(Rank {
            at,
            stages,
            chunks,
            program,
            evaluation,
            outline,
            loss_scale: LossScale::new(spec.precision.loss_scaling),
            saves_base: spec.model.adapters.is_none(),
            spec,
            counted: CountedSteps::default(),
            count: Some(count),
            in_flight: false,
            updated_in_part: None,
            not_finite: None,
            counted_over,
            is_replica: replica.is_some(),
            device,
            groups,
        })
    }

    /// The group of all ranks.
    pub fn group(&self) -> &dyn Group {
        &*self.groups.world
    }

    /// The groups of this rank.
    pub fn groups(&self) -> &Groups {
        &self.groups
    }

    /// The coordinates of this rank in the mesh.
    pub fn at(&self) -> Coordinates {
        self.at
    }

    /// The optimizer.
    pub fn optimizer(&self) -> &Optimizer {
        &self.spec.update.optimizer
    }

    /// The chunks that the blocks of this rank read in a step, counted over its stages, in order.
    pub(crate) fn uses_of_step(&self) -> Vec<u32> {
        let described = self.chunks.described();
        let uses = |run: BlockRun| {
            let stage = described.stages.iter().find(|stage| stage.index == run.stage);
            let stage = stage.expect("the stage of a run");
            stage.uses[run.block].iter().map(|c| (stage.first_chunk + c) as u32)
        };
        let runs = described.demand(PhaseName::Step).into_iter();
        runs.filter(|run| run.pass.reads_parameters()).flat_map(uses).collect()
    }

    /// The stages of this rank.
    pub fn stages(&self) -> &[Stage] {
        &self.stages
    }

    /// Parameters, gradients and states of this rank.
    pub fn chunks(&self) -> &Chunks {
        &self.chunks
    }

    /// The same, to be changed.
    pub fn chunks_mut(&mut self) -> &mut Chunks {
        &mut self.chunks
    }

    /// Calls `see` with the flat gradients of a replica with one chunk, and the factor of the last step that was judged.
    ///
    /// # Errors
    /// Those of `see`.
    pub fn with_gradients(
        &mut self,
        mut see: impl FnMut(View, View) -> Result<(), CollectiveError>,
    ) -> Result<(), CollectiveError> {
        self.chunks.lend_gradients(|gradients, factor| see(gradients.view(), factor).map(|()| gradients))
    }

    /// The device of this rank.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The tensor of a step's losses, or of those of an evaluation.
    pub(crate) fn loss_places(&self, of_evaluation: bool) -> LossPlaces {
        let Spec { batch, mesh, model, .. } = &self.spec;
        let is_paired = model.preference.is_some();
        // An evaluation of pairs also tells the log-probability of each answer.
        let answers = if is_paired && of_evaluation { batch.micro_batch_size } else { 0 };
        let sums = if is_paired { PREFERENCE_SUMS } else { 1 };
        let micro_batches = match of_evaluation {
            true => batch.evaluation_parts * batch.evaluation_batches,
            false => batch.micro_batches,
        };
        let is_apart = answers > 0 || batch.sums_by_tree && !self.is_replica;
        let places = if is_apart { micro_batches * mesh.axes.data } else { 1 };
        LossPlaces { places, sums, width: sums + answers }
    }

    /// The sums over all micro-batches: of `before`, to which those of `losses` are added, each of which is zero in one of the two. They are
    /// added up in f64 in the order of the global batch.
    pub(crate) fn whole_loss(
        &self,
        losses: &Tensor,
        places: LossPlaces,
        before: &mut [f32],
    ) -> Result<Vec<f32>, CollectiveError> {
        let mut numbers = vec![0.0; before.len()];
        self.device.download(losses.view(), &mut numbers)?;
        before.iter_mut().zip(numbers).for_each(|(sum, loss)| *sum += loss);
        let sum =
            |index: usize| before[index..].iter().step_by(places.width).copied().map(f64::from).sum::<f64>();
        Ok((0..places.sums).map(|index| sum(index) as f32).collect())
    }

    /// Sums losses over replicas and stages; only the last stage has some.
    pub(crate) fn sum_of_replicas(&self, loss: Tensor) -> Result<Tensor, CollectiveError> {
        if loss.shape().elements() > 1 && self.stages.iter().any(Stage::is_last) {
            // Other elements are zero here.
            let micro_batches = (0..loss.shape().elements()).map(|at| loss.view().range(at..at + 1));
            let own = micro_batches.map(|element| self.device.placements(element));
            let own = own.into_iter().find(|placements| *placements != Placements::REPLICATED);
            own.into_iter().for_each(|placements| self.device.place(loss.view(), placements));
        }
        if self.spec.mesh.axes.pipeline > 1 && self.stages.iter().any(Stage::is_last) {
            let placements = self.device.placements(loss.view()).with(Axis::Pipeline, Placement::Partial);
            self.device.place(loss.view(), placements);
        }
        // Sums over the data axis first, so that the bits do not depend on which rank has the last stage.
        let loss = self.groups.data.all_reduce(loss).wait()?;
        self.groups.pipeline.all_reduce(loss).wait()
    }
}

/// A function that uploads an input of a micro-batch of `batch` to the device, floats as `compute`.
pub(crate) fn uploads<'a>(
    device: &'a Device,
    (part, compute): (&'a BatchPart, DType),
    placements: Placements,
    batch: &'a Batch,
) -> impl Fn(usize, &str) -> Activation + 'a {
    let inputs = &part.inputs;
    move |index, name| {
        let input = inputs.iter().find(|input| input.name == name);
        let input = input
            .unwrap_or_else(|| panic!("a layer asks for {name}, which the model does not read: {inputs:?}"));
        let shape = input.shape.of([part.micro_batch_size, part.seq]);
        let here = index * shape.elements()..(index + 1) * shape.elements();
        let alloc = |dtype, name| device.alloc(dtype, shape, Category::Activations, name);
        let tensor = match name {
            TOKENS => ids(device, &batch.tokens[here], alloc(DType::U32, "batch.tokens")),
            TARGETS => ids(device, &batch.targets[here], alloc(DType::U32, "batch.targets")),
            _ => match &batch.others[name] {
                Numbers::Ids(all) => ids(device, &all[here], alloc(DType::U32, input.name)),
                Numbers::Floats(all) => {
                    let mut floats = alloc(DType::F32, input.name);
                    device.upload(&all[here], floats.view_mut());
                    match input.dtype(compute) {
                        DType::F32 => floats,
                        compute => {
                            device.place(floats.view(), placements);
                            let mut rounded = alloc(compute, input.name);
                            device.convert(floats.view(), rounded.view_mut());
                            rounded
                        }
                    }
                }
            },
        };
        device.place(tensor.view(), placements);
        Arc::new(tensor)
    }
}

fn ids(device: &Device, ids: &[u32], mut to: Tensor) -> Tensor {
    device.upload(ids, to.view_mut());
    to
}

/// Allocates `elements` elements and sets them to zero.
pub fn zeroed(device: &Device, elements: usize, name: &'static str) -> Tensor {
    let mut numbers = device.alloc(DType::F32, [elements], Category::Activations, name);
    device.fill(numbers.view_mut(), 0.0);
    numbers
}

impl Spec {
    /// The same run with everything in the memory of the device, and updates after backward.
    fn on_one_device(&self) -> Spec {
        let zero = zero::Options {
            stage: phalanx_plan::ZeroStage::Zero,
            residence: vec![Residence::DEVICE; self.mesh.stages.len()],
            overlap: false,
            defer: true,
            updates_on_host: false,
            delayed_update: false,
            gradients_in_place: false,
            update_in_backward: false,
            ..self.zero.clone()
        };
        let inputs = InputOptions { memory: Memory::Device, ..self.inputs };
        Spec { zero, inputs, ..self.clone() }
    }

    /// Makes one stage, and says what a rank stores of it.
    fn stage_of(
        &self,
        groups: &Groups,
        (index, network): (usize, Network),
        is_updated: bool,
    ) -> (Stage, Holding) {
        let at = self.mesh.axes.coordinates(groups.world.rank());
        let tied = |p: usize| self.mesh.ties.iter().find(|tie| tie.name == network.parameters[p].name);
        let split = self.pipeline.schedule.splits_backward() && network.head.is_some();
        let head: &[usize] = if split { &network.uses[network.head_index()] } else { &[] };
        let size = |(p, spec): (usize, &ParameterSpec)| ParameterSize {
            reserved: reserved(spec),
            alone: tied(p).is_some() || head.contains(&p),
            ..size(&self.update.optimizer, spec)
        };
        let sizes: Vec<ParameterSize> = network.parameters.iter().enumerate().map(size).collect();
        let layout = self.mesh.lay_out(&sizes).expect("the knobs were checked with the whole model");
        let everywhere = at.tensor == 0;
        let answers = |(p, spec): (usize, &ParameterSpec)| {
            let first = tied(p).is_none_or(|tie| tie.stages[0] == index);
            // All members of a joint parameter are parts alike.
            first
                && spec.members()[0]
                    .part
                    .as_ref()
                    .map_or(everywhere, |part| at.tensor.is_multiple_of(part.copies))
        };
        let answers = network.parameters.iter().enumerate().map(answers).collect();
        let tied = (0..network.parameters.len()).map(|p| tied(p).is_some()).collect();
        let held = Holding { stage: index, layout: Arc::new(layout), answers, tied, is_updated };
        let inputs = BlockInputs::new(self.inputs, &groups.tensor);
        (Stage { index, network, inputs }, held)
    }

    /// The arithmetic of a step on a rank.
    fn arithmetic(&self) -> Arithmetic<'_> {
        Arithmetic {
            precision: self.precision.types,
            micro_batches: self.batch.micro_batches,
            sums_by_tree: self.batch.sums_by_tree,
            optimizer: &self.update.optimizer,
            rates: &self.update.rates,
        }
    }

    /// The copies of tied parameters in some stages of a rank, for each tie.
    fn ties_of(&self, stages: &[Stage], groups: &Groups) -> Vec<Tie> {
        let tie = |(tie, group): (&super::spec::Tie, &Option<Arc<dyn Group>>)| {
            let own = stages.iter().enumerate().filter(|(_, stage)| tie.stages.contains(&stage.index));
            let copies = own.map(|(at, stage)| (at, stage.network.place_of(&tie.name))).collect();
            Tie { copies, group: group.clone() }
        };
        self.mesh.ties.iter().zip(&groups.ties).map(tie).collect()
    }
}

impl BatchPart {
    /// The input that the first block receives.
    pub(crate) fn first_input(&self) -> &'static str {
        self.inputs.first().map_or(TOKENS, |input| input.name)
    }
}

impl MeshPart {
    /// The rows of the residual stream of a micro-batch on a tensor-parallel rank.
    pub(crate) fn rows(&self, batch: &BatchPart, tensor: usize) -> Rows {
        let tokens = [batch.micro_batch_size, batch.seq];
        let each = if self.sequence_parallel { tokens[0] * tokens[1] / self.axes.tensor } else { 0 };
        Rows { documents: batch.documents, ..Rows::all(tokens).from(tensor * each) }
    }

    /// Tensor-parallel ranks that share the rows of activations between stages.
    pub(crate) fn ranks_of_rows(&self) -> usize {
        if self.sequence_parallel { self.axes.tensor } else { 1 }
    }

    /// The placement of a batch on the mesh.
    pub(crate) fn batch_placements(&self) -> Placements {
        match self.axes.data {
            1 => Placements::REPLICATED,
            _ => Placements::REPLICATED.with(Axis::Data, Placement::Shard(0)),
        }
    }

    /// Placement of the activations between stages.
    pub(crate) fn boundary(&self) -> Placements {
        match self.sequence_parallel {
            false => self.batch_placements(),
            true => self.batch_placements().with(Axis::Tensor, Placement::Shard(0)),
        }
    }
}
