//! The process groups of one rank, from the mesh: every axis, and what crosses several.
//!
//! All ranks make the same groups in the same order, each its own. An axis of one rank is a group of one.

use std::sync::Arc;

use phalanx_collectives::staged::on_device;
use phalanx_collectives::{Endpoint, Group, Isa, MetaGroup, Solo, Statistics};
use phalanx_parallel::pipeline::{Wires, wiring};
use phalanx_plan::Mesh;
use phalanx_tensor::Device;
use phalanx_tensor::record::Recorder;
use phalanx_trace::Axis;

use crate::spec::Spec;

/// See the module's head.
#[derive(Clone)]
pub struct Groups {
    /// All ranks.
    pub world: Arc<dyn Group>,
    /// Ranks that hold the stages of one replica.
    pub pipeline: Arc<dyn Group>,
    /// Ranks that hold the same part of the model, and share the batch.
    pub data: Arc<dyn Group>,
    /// Ranks that share each layer.
    pub tensor: Arc<dyn Group>,
    /// Between the stages.
    pub wires: Wires,
    /// By tied parameter ([`Spec::ties`]): the ranks that have a copy, when this is one of several.
    pub ties: Vec<Option<Arc<dyn Group>>>,
}

/// Where groups come from.
pub enum GroupSource<'a> {
    /// There is one rank, which sums with this instruction set.
    Alone(Isa),
    /// Ranks of this machine.
    Host(&'a Endpoint),
    /// A dry run of a rank, which writes here.
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

    /// A group of the world ranks `members` over some axes; none where this rank is not among them.
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
    /// The groups of the source's rank.
    pub fn new(source: &GroupSource, spec: &Spec) -> Groups {
        let (mesh, rank) = (spec.mesh, source.rank());
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
        let wiring = wiring(&spec.schedule);
        let count = wiring.values().max().map_or(0, |most| most + 1);
        let wire = |_| source.group("wire", &[Axis::Pipeline], &line).expect("in its own pipeline");
        let wires = Wires { groups: (0..count).map(wire).collect(), wiring };
        let ties = spec.ties.iter().map(|tie| {
            let holders = holders(mesh, spec, &tie.stages, rank);
            if holders.len() > 1 { source.group("tie", &[Axis::Pipeline], &holders) } else { None }
        });
        let ties = ties.collect();
        Groups { world, pipeline, data, tensor, wires, ties }
    }

    /// Groups over all axes of a world of one, with the best instruction set of the processor.
    pub fn alone(spec: &Spec) -> Groups {
        Groups::new(&GroupSource::Alone(Isa::detect()), spec)
    }

    /// The same groups for tensors in the memory of `device`: staged through host memory where their transport cannot
    /// read it.
    #[must_use]
    pub fn on_device(self, device: &Device) -> Groups {
        let on = |group| on_device(group, device);
        let Groups { world, pipeline, data, tensor, mut wires, ties } = self;
        wires.groups = wires.groups.into_iter().map(on).collect();
        let ties = ties.into_iter().map(|group| group.map(on)).collect();
        Groups { world: on(world), pipeline: on(pipeline), data: on(data), tensor: on(tensor), wires, ties }
    }

    /// What all groups did since this was last asked.
    pub fn take_statistics(&self) -> Statistics {
        let named = [&self.world, &self.pipeline, &self.data, &self.tensor].into_iter();
        let all = named.chain(&self.wires.groups).chain(self.ties.iter().flatten());
        all.map(|group| group.take_statistics()).fold(Statistics::default(), |sum, part| sum + part)
    }
}

/// World ranks, in this rank's replica, that hold one of the stages; each once.
fn holders(mesh: Mesh, spec: &Spec, stages: &[usize], rank: usize) -> Vec<usize> {
    let at = mesh.coordinates(rank);
    let mut places: Vec<usize> = stages.iter().map(|stage| spec.schedule.placement[*stage]).collect();
    places.sort_unstable();
    places.dedup();
    places.into_iter().map(|pipeline| mesh.rank(phalanx_plan::Coordinates { pipeline, ..at })).collect()
}
