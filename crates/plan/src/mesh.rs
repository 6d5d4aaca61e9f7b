//! Ranks as a box: pipeline stages x data replicas x tensor parts.
//!
//! The order is Megatron-LM's: tensor fastest, since its ranks speak in every layer and should be
//! nearest, then data, then pipeline. `rank = (pipeline * D + data) * T + tensor`. A group along an axis
//! is the ranks that differ in that coordinate alone; groups of one axis partition the world. The mesh is
//! plain data that is passed on; who may speak to whom is derived from it and nothing else.

use std::fmt;

use crate::trace::Axis;
use serde::{Deserialize, Serialize};

use crate::split::divisors;

/// Maximum number of ranks of a mesh.
const MAX_WORLD: usize = 1 << 20;

/// Number of possible meshes that an error suggests.
const NEAREST: usize = 2;

/// Sizes of the axes, each at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Mesh {
    /// Pipeline stages.
    pub pipeline: usize,
    /// Data-parallel replicas of each stage.
    pub data: usize,
    /// Parts that a layer is split into.
    pub tensor: usize,
}

/// The coordinates of a rank: each is below the axis's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Coordinates {
    /// Its stage.
    pub pipeline: usize,
    /// Its replica.
    pub data: usize,
    /// Its part of each layer.
    pub tensor: usize,
}

/// An error of the sizes of a mesh.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MeshError {
    /// A size of 0.
    #[error("{knob} is 0: expected at least 1")]
    Zero {
        /// Name of the size in the configuration.
        knob: &'static str,
    },
    /// Too many ranks.
    #[error("the mesh {given} has more than {MAX_WORLD} ranks: make an axis smaller")]
    TooLarge {
        /// The sizes asked for; `data` is 1 where it was left out.
        given: Mesh,
    },
    /// The pipeline and tensor sizes do not divide the number of ranks.
    #[error(
        "parallel.pipeline {pipeline} x parallel.tensor {tensor} does not divide {world} ranks: nearest {}",
        listed(.nearest, without_data)
    )]
    Indivisible {
        /// Stages asked for.
        pipeline: usize,
        /// Tensor parts asked for.
        tensor: usize,
        /// Number of ranks.
        world: usize,
        /// Meshes of exactly that many ranks, nearest first.
        nearest: Vec<Mesh>,
    },
    /// The product of the sizes is not the number of ranks.
    #[error(
        "parallel.pipeline {} x parallel.data {} x parallel.tensor {} is {} ranks, and there are {world}: \
         nearest {}", .given.pipeline, .given.data, .given.tensor, .given.world_size(),
        listed(.nearest, Mesh::to_string)
    )]
    WrongWorld {
        /// The sizes asked for.
        given: Mesh,
        /// Number of ranks.
        world: usize,
        /// Meshes of exactly that many ranks, nearest first.
        nearest: Vec<Mesh>,
    },
}

impl Mesh {
    /// The mesh of the sizes in a configuration. `world` is the number of ranks if it is given separately. If `data` is
    /// None, it takes all remaining ranks, or is 1 if `world` is None too.
    ///
    /// # Errors
    /// [`MeshError`]: a size of 0, too many ranks, or sizes that do not make up the world.
    pub fn derive(
        world: Option<usize>,
        pipeline: usize,
        data: Option<usize>,
        tensor: usize,
    ) -> Result<Mesh, MeshError> {
        let given = Mesh { pipeline, data: data.unwrap_or(1), tensor };
        let sizes = [
            ("parallel.pipeline", pipeline),
            ("parallel.data", given.data),
            ("parallel.tensor", tensor),
            ("the number of ranks", world.unwrap_or(1)),
        ];
        if let Some(&(knob, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            return Err(MeshError::Zero { knob });
        }
        let product = pipeline.checked_mul(given.data).and_then(|ranks| ranks.checked_mul(tensor));
        let Some(product) = product.filter(|&product| product.max(world.unwrap_or(1)) <= MAX_WORLD) else {
            return Err(MeshError::TooLarge { given });
        };
        match (world, data) {
            (None, _) => Ok(given),
            (Some(world), None) if world.is_multiple_of(product) => {
                Ok(Mesh { data: world / product, ..given })
            }
            (Some(world), None) => {
                let distance = |mesh: &Mesh| mesh.pipeline.abs_diff(pipeline) + mesh.tensor.abs_diff(tensor);
                let nearest = nearest_meshes(world, distance);
                Err(MeshError::Indivisible { pipeline, tensor, world, nearest })
            }
            (Some(world), Some(_)) if world == product => Ok(given),
            (Some(world), Some(data)) => {
                let nearest = nearest_meshes(world, |mesh| {
                    mesh.pipeline.abs_diff(pipeline) + mesh.data.abs_diff(data) + mesh.tensor.abs_diff(tensor)
                });
                Err(MeshError::WrongWorld { given, world, nearest })
            }
        }
    }

    /// Ranks in all.
    pub fn world_size(&self) -> usize {
        self.pipeline * self.data * self.tensor
    }

    /// Ranks along an axis.
    pub fn size(&self, axis: Axis) -> usize {
        match axis {
            Axis::Pipeline => self.pipeline,
            Axis::Data => self.data,
            Axis::Tensor => self.tensor,
        }
    }

    /// The coordinates of `rank`.
    ///
    /// # Panics
    /// When `rank` is not below the world.
    pub fn coordinates(&self, rank: usize) -> Coordinates {
        assert!(rank < self.world_size(), "rank {rank} is outside the mesh {self}");
        Coordinates {
            pipeline: rank / self.tensor / self.data,
            data: rank / self.tensor % self.data,
            tensor: rank % self.tensor,
        }
    }

    /// The rank with these coordinates.
    ///
    /// # Panics
    /// When a coordinate is not below its axis's size.
    pub fn rank(&self, at: Coordinates) -> usize {
        let inside = at.pipeline < self.pipeline && at.data < self.data && at.tensor < self.tensor;
        assert!(inside, "{at:?} is outside the mesh {self}");
        (at.pipeline * self.data + at.data) * self.tensor + at.tensor
    }

    /// World ranks of the group of `rank` along `axis`, itself included, in the order of the axis.
    ///
    /// # Panics
    /// When `rank` is not below the world.
    pub fn members(&self, axis: Axis, rank: usize) -> Vec<usize> {
        let own = self.coordinates(rank);
        let at = |position| match axis {
            Axis::Pipeline => Coordinates { pipeline: position, ..own },
            Axis::Data => Coordinates { data: position, ..own },
            Axis::Tensor => Coordinates { tensor: position, ..own },
        };
        (0..self.size(axis)).map(|position| self.rank(at(position))).collect()
    }
}

impl Coordinates {
    /// The coordinate along an axis, which is the rank within the group of that axis.
    pub fn along(&self, axis: Axis) -> usize {
        match axis {
            Axis::Pipeline => self.pipeline,
            Axis::Data => self.data,
            Axis::Tensor => self.tensor,
        }
    }
}

/// `pipeline 2 x data 1 x tensor 4`
impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Mesh { pipeline, data, tensor } = self;
        write!(f, "pipeline {pipeline} x data {data} x tensor {tensor}")
    }
}

/// The meshes of exactly `world` ranks with the least `distance`; of equals, the one with the most
/// pipeline and tensor ranks first.
fn nearest_meshes(world: usize, distance: impl Fn(&Mesh) -> usize) -> Vec<Mesh> {
    let mut meshes: Vec<Mesh> = divisors(world)
        .flat_map(|tensor| {
            let rest = world / tensor;
            divisors(rest).map(move |pipeline| Mesh { pipeline, data: rest / pipeline, tensor })
        })
        .collect();
    meshes.sort_unstable_by_key(|mesh| (distance(mesh), mesh.data, mesh.tensor, mesh.pipeline));
    meshes.dedup();
    meshes.truncate(NEAREST);
    meshes
}

/// `is A` or `are A, B`
fn listed(meshes: &[Mesh], show: impl Fn(&Mesh) -> String) -> String {
    let verb = if meshes.len() == 1 { "is" } else { "are" };
    format!("{verb} {}", meshes.iter().map(show).collect::<Vec<_>>().join(", "))
}

/// Displays a mesh whose data size was not given: `data` is shown only if it is above 1.
fn without_data(mesh: &Mesh) -> String {
    let Mesh { pipeline, data, tensor } = mesh;
    let rest = if *data > 1 { format!(" (data {data})") } else { String::new() };
    format!("pipeline {pipeline} x tensor {tensor}{rest}")
}
