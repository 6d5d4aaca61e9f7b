//! The process groups of one rank: one for each axis of the mesh, and those that several axes share.
//!
//! All ranks make their groups in the same order. An axis of one rank is a group of one rank.

use std::sync::Arc;

use phalanx_collectives::staged::on_device;
use phalanx_collectives::{CollectiveError, Endpoint, Group, GroupSums, Isa, MetaGroup, Solo, Statistics};
use phalanx_layers::Network;
use phalanx_parallel::pipeline::{Wires, wiring};
use phalanx_plan::Mesh;
use phalanx_plan::pipeline::PipelineSchedule;
use phalanx_plan::trace::{Axis, DType};
use phalanx_tensor::Device;
use phalanx_tensor::record::Recorder;

use crate::config::RunConfig;
use crate::engine::spec::{MeshPart, Spec, Tie};

/// Elements of which a gradient norm has one sum of squares, and room for parameters that end within a block.
const NORM_BLOCK: u64 = 4096;
const NORM_MORE: u64 = 1024;

/// The process groups of one rank.
#[derive(Clone)]
pub struct Groups {
    /// All ranks.
    pub world: Arc<dyn Group>,
    /// Ranks that have the stages of one replica.
    pub pipeline: Arc<dyn Group>,
    /// Ranks that have the same part of the model and compute different samples.
    pub data: Arc<dyn Group>,
    /// Ranks that share each layer.
    pub tensor: Arc<dyn Group>,
    /// The groups that send activations between stages.
    pub wires: Wires,
    /// True if large collectives go over links between the devices.
    pub linked: bool,
    /// Bytes of the parts of other ranks that a rank receives at once in a sum over links.
    pub piece_bytes: usize,
    /// For each tied parameter ([`MeshPart::ties`]): the ranks that have a copy; None when this rank is not one of several.
    pub ties: Vec<Option<Arc<dyn Group>>>,
}

/// Source of the groups of a rank.
pub enum GroupSource<'a> {
    /// One rank: groups of one, which sum with this instruction set.
    Alone(Isa),
    /// Ranks of a job, on one host or on several.
    Host(&'a Endpoint),
    /// A dry run of a rank, which records its collectives here.
    Meta(Arc<Recorder>, usize),
}

impl GroupSource<'_> {
    fn rank(&self) -> usize {
        match self {
            GroupSource::Alone(_) => 0,
            GroupSource::Host(endpoint) => endpoint.rank(),
            GroupSource::Meta(_, rank) => *rank,
        }
    }

    /// The instruction set that the groups sum with.
    pub fn isa(&self) -> Isa {
        match self {
            GroupSource::Alone(isa) => *isa,
            GroupSource::Host(endpoint) => endpoint.isa(),
            GroupSource::Meta(..) => Isa::Portable,
        }
    }

    /// A group of the world ranks `members` over some axes; None when this rank is not one of them.
    fn group(&self, name: &'static str, axes: &[Axis], members: &[usize]) -> Option<Arc<dyn Group>> {
        let place = members.iter().position(|member| *member == self.rank());
        match (self, place) {
            (GroupSource::Meta(recorder, _), Some(place)) => {
                Some(Arc::new(MetaGroup::over(name, axes, members, place, Arc::clone(recorder))))
            }
            (_, Some(_)) if members.len() == 1 => Some(Arc::new(Solo::new(name).with_isa(self.isa()))),
            (GroupSource::Host(endpoint), Some(_)) if axes == [Axis::Pipeline] => {
                Some(endpoint.sub_group_beside(name, members))
            }
            (GroupSource::Host(endpoint), Some(_)) => Some(endpoint.sub_group(name, members)),
            (GroupSource::Host(endpoint), None) => {
                endpoint.no_group();
                None
            }
            (GroupSource::Alone(_), Some(_)) => panic!("group {name} of {members:?} where there is one rank"),
            (GroupSource::Alone(_) | GroupSource::Meta(..), None) => None,
        }
    }
}

impl Groups {
    /// Ends the job for all ranks when an error says that the device of this rank failed: the others learn at once which
    /// operation failed and where, instead of waiting for this rank.
    pub(crate) fn abort_for(&self, error: &CollectiveError) {
        if let CollectiveError::Device(failure) = error {
            self.world.abort(&failure.to_string());
        }
    }

    /// Makes the groups of the rank of `source`.
    pub fn new(source: &GroupSource, spec: &Spec) -> Groups {
        let (mesh, rank) = (spec.mesh.axes, source.rank());
        let sizes = [(Axis::Pipeline, mesh.pipeline), (Axis::Data, mesh.data), (Axis::Tensor, mesh.tensor)];
        let several = |axes: &[Axis]| -> Vec<Axis> {
            sizes
                .iter()
                .filter(|(axis, size)| *size > 1 && axes.contains(axis))
                .map(|(axis, _)| *axis)
                .collect()
        };
        let own = |name, axes: &[Axis], members: &[usize]| {
            source.group(name, &several(axes), members).expect("a rank is in its own groups")
        };
        let world = own("world", &Axis::ALL, &Vec::from_iter(0..mesh.world_size()));
        let line = mesh.members(Axis::Pipeline, rank);
        let pipeline = own("pipeline", &[Axis::Pipeline], &line);
        let data = own("data", &[Axis::Data], &mesh.members(Axis::Data, rank));
        let tensor = own("tensor", &[Axis::Tensor], &mesh.members(Axis::Tensor, rank));
        let wiring = wiring(&spec.pipeline.schedule);
        let count = wiring.values().max().map_or(0, |max| max + 1);
        let wire = |_| source.group("wire", &[Axis::Pipeline], &line).expect("a rank is in its own pipeline");
        let wires = Wires { groups: (0..count).map(wire).collect(), wiring };
        let ties = spec.mesh.ties.iter().map(|tie| {
            let holders = holders(mesh, &spec.pipeline.schedule, &tie.stages, rank);
            if holders.len() > 1 { source.group("tie", &[Axis::Pipeline], &holders) } else { None }
        });
        let ties = ties.collect();
        let (linked, piece_bytes) = (spec.device.linked, spec.device.slice_bytes / 4);
        Groups { world, pipeline, data, tensor, wires, linked, piece_bytes, ties }
    }

    /// The groups of a single rank, with the best instruction set of the processor.
    pub fn alone(spec: &Spec) -> Groups {
        Groups::new(&GroupSource::Alone(Isa::detect()), spec)
    }

    /// The same groups for tensors in the memory of `device`: over links between the devices if the run has them, else staged through host
    /// memory where their transport cannot read it. The world and the pipeline exchange single numbers, for which no link is made.
    #[must_use]
    pub fn on_device(self, device: &Device) -> Groups {
        let staged = |group| on_device(group, device);
        let Groups { world, pipeline, data, tensor, mut wires, linked, piece_bytes, ties } = self;
        let on = |group: Arc<dyn Group>| match linked && group.world_size() > 1 {
            true => phalanx_collectives::linked::linked_in_pieces(group, device, piece_bytes),
            false => staged(group),
        };
        wires.groups = wires.groups.into_iter().map(on).collect();
        let ties = ties.into_iter().map(|group| group.map(on)).collect();
        let (world, pipeline) = (staged(world), staged(pipeline));
        Groups { world, pipeline, data: on(data), tensor: on(tensor), wires, linked, piece_bytes, ties }
    }

    /// Connects the devices of the ranks where the run has links between them.
    ///
    /// # Errors
    /// A failure, which ends the job: what ended it, of any rank.
    pub(crate) fn connect(&self) -> Result<(), CollectiveError> {
        let all = [&self.data, &self.tensor].into_iter().chain(&self.wires.groups);
        // The order is the same on all ranks, so none waits for one that waits for it.
        for group in all.chain(self.ties.iter().flatten()) {
            if let Err(error) = group.connect() {
                self.world.abort(&error.to_string());
                return self.world.barrier().wait().and(Err(error));
            }
        }
        Ok(())
    }

    /// The statistics of all groups since the last call.
    pub fn take_statistics(&self) -> Statistics {
        let named = [&self.world, &self.pipeline, &self.data, &self.tensor].into_iter();
        let all = named.chain(&self.wires.groups).chain(self.ties.iter().flatten());
        all.map(|group| group.take_statistics()).fold(Statistics::default(), |sum, part| sum + part)
    }
}

/// The world ranks of this rank's pipeline that have one of the stages, without repetition.
fn holders(mesh: Mesh, schedule: &PipelineSchedule, stages: &[usize], rank: usize) -> Vec<usize> {
    let at = mesh.coordinates(rank);
    let mut places: Vec<usize> = stages.iter().map(|stage| schedule.placement[*stage]).collect();
    places.sort_unstable();
    places.dedup();
    places.into_iter().map(|pipeline| mesh.rank(phalanx_plan::Coordinates { pipeline, ..at })).collect()
}

/// The ranks of each group of a rank that is a link between devices, at most, where there are links and so many tied parameters, each of two
/// stages.
fn links(mesh: Mesh, schedule: &PipelineSchedule, ties: usize) -> Vec<usize> {
    let Mesh { pipeline, data, tensor, .. } = mesh;
    let wires = wiring(schedule).values().max().map_or(0, |max| max + 1);
    let of_pipeline = [(pipeline, wires), (pipeline.min(2), ties)];
    let groups = [(data, 1), (tensor, 1)].into_iter().chain(of_pipeline);
    groups
        .filter(|(ranks, _)| *ranks > 1)
        .flat_map(|(ranks, count)| std::iter::repeat_n(ranks, count))
        .collect()
}

impl Spec {
    /// The groups of a rank with the largest sum of each, for what transports between hosts keep in memory. Sums of gradients
    /// are those of chunks; the world sums single numbers and the squares of norms.
    pub fn group_sums(&self, rank: usize) -> Vec<GroupSums> {
        let MeshPart { axes: mesh, layout, ties, .. } = &self.mesh;
        let (mesh, network, schedule) = (*mesh, self.model.whole(), &self.pipeline.schedule);
        let numbers = GroupSums {
            members: (0..mesh.world_size()).collect(),
            dtype: DType::F64,
            elements: (layout.padded_elements() / NORM_BLOCK + NORM_MORE) as usize,
        };
        let sums = |members: Vec<usize>, elements: usize| GroupSums { members, dtype: DType::F32, elements };
        let rows = self.batch.micro_batch_size * self.batch.seq * network.width();
        let line = mesh.members(Axis::Pipeline, rank);
        let wires = wiring(schedule).values().max().map_or(0, |max| max + 1);
        let mut groups = vec![
            numbers,
            sums(mesh.members(Axis::Data, rank), layout.largest_chunk() as usize),
            sums(mesh.members(Axis::Tensor, rank), rows),
        ];
        groups.extend(std::iter::repeat_n(sums(line.clone(), 0), 1 + wires));
        let tied = |tie: &Tie| {
            let members = holders(mesh, schedule, &tie.stages, rank);
            sums(members, network.parameters[network.place_of(&tie.name)].elements())
        };
        groups.extend(ties.iter().map(tied));
        groups
    }

    /// The ranks of each group of a rank that is a link between devices, at most.
    pub fn communicators(&self) -> Vec<usize> {
        let MeshPart { axes, ties, .. } = &self.mesh;
        if self.device.linked { links(*axes, &self.pipeline.schedule, ties.len()) } else { Vec::new() }
    }
}

impl RunConfig {
    /// The ranks of each group of a rank that is a link between devices, at most: one tied parameter is assumed.
    pub fn communicators(&self) -> Vec<usize> {
        match (self.mesh(), self.schedule()) {
            (Ok(mesh), Ok(schedule)) if self.device.is_linked() => links(mesh, &schedule, 1),
            _ => Vec::new(),
        }
    }
}

impl Spec {
    /// The network of a rank, which is not cut into stages.
    pub(crate) fn network_of(&self, rank: usize) -> Network {
        let device = Device::meta_of(self.device.threads, self.device.host_addressable);
        let recorder = Arc::clone(device.recorder().expect("Meta records"));
        self.network(&Groups::new(&GroupSource::Meta(recorder, rank), self).tensor)
    }
}
