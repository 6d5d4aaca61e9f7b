//! Meshes up to 64 ranks against counting, and what is derived and refused.

use phalanx_plan::trace::Axis;
use phalanx_plan::{Coordinates, Mesh, MeshError};

const AXES: [Axis; 3] = [Axis::Pipeline, Axis::Data, Axis::Tensor];

fn meshes() -> impl Iterator<Item = Mesh> {
    let sizes = |max: usize| 1..=max;
    sizes(64).flat_map(move |pipeline| {
        sizes(64 / pipeline).flat_map(move |data| {
            sizes(64 / pipeline / data).map(move |tensor| Mesh { pipeline, data, tensor })
        })
    })
}

#[test]
fn tensor_is_fastest_then_data_then_pipeline() {
    for mesh in meshes() {
        let mut rank = 0;
        for pipeline in 0..mesh.pipeline {
            for data in 0..mesh.data {
                for tensor in 0..mesh.tensor {
                    let at = Coordinates { pipeline, data, tensor };
                    assert_eq!((mesh.rank(at), mesh.coordinates(rank)), (rank, at), "{mesh}");
                    assert_eq!(AXES.map(|axis| at.along(axis)), [pipeline, data, tensor]);
                    rank += 1;
                }
            }
        }
        assert_eq!(rank, mesh.world_size());
    }
}

#[test]
fn groups_partition_the_world() {
    for mesh in meshes() {
        for axis in AXES {
            let mut groups = vec![0; mesh.world_size()];
            for rank in 0..mesh.world_size() {
                let members = mesh.members(axis, rank);
                assert_eq!(members.len(), mesh.size(axis));
                assert!(members.is_sorted() && members[mesh.coordinates(rank).along(axis)] == rank);
                // All members name the same group, so counting it at its first is counting it once.
                assert!(members.iter().all(|&member| mesh.members(axis, member) == members));
                if members[0] == rank {
                    members.iter().for_each(|&member| groups[member] += 1);
                }
                // They differ only in this coordinate.
                for other in AXES.into_iter().filter(|&other| other != axis) {
                    let along = |rank: usize| mesh.coordinates(rank).along(other);
                    assert!(members.iter().all(|&member| along(member) == along(rank)));
                }
            }
            assert!(groups.iter().all(|&count| count == 1), "{mesh} {axis:?}");
        }
    }
}

#[test]
fn megatrons_example() {
    // 16 ranks, tensor 2, pipeline 4: the groups that Megatron-LM's documentation lists.
    let mesh = Mesh::derive(Some(16), 4, None, 2).unwrap();
    assert_eq!(mesh, Mesh { pipeline: 4, data: 2, tensor: 2 });
    assert_eq!(mesh.members(Axis::Tensor, 0), [0, 1]);
    assert_eq!(mesh.members(Axis::Data, 0), [0, 2]);
    assert_eq!(mesh.members(Axis::Pipeline, 0), [0, 4, 8, 12]);
    assert_eq!(mesh.members(Axis::Data, 15), [13, 15]);
}

#[test]
fn derived() {
    for (world, pipeline, data, tensor, expected) in [
        (None, 1, None, 1, [1, 1, 1]),
        (None, 2, None, 3, [2, 1, 3]),
        (None, 2, Some(4), 3, [2, 4, 3]),
        (Some(8), 1, None, 1, [1, 8, 1]),
        (Some(8), 2, None, 2, [2, 2, 2]),
        (Some(8), 2, None, 4, [2, 1, 4]),
        (Some(12), 2, Some(3), 2, [2, 3, 2]),
    ] {
        let mesh = Mesh::derive(world, pipeline, data, tensor).unwrap();
        assert_eq!([mesh.pipeline, mesh.data, mesh.tensor], expected);
    }
}

#[test]
fn refused_with_the_nearest() {
    for (world, pipeline, data, tensor, message) in [
        (
            Some(8),
            3,
            None,
            2,
            "parallel.pipeline 3 x parallel.tensor 2 does not divide 8 ranks: nearest are \
             pipeline 4 x tensor 2, pipeline 2 x tensor 2 (data 2)",
        ),
        (
            Some(6),
            1,
            None,
            4,
            "parallel.pipeline 1 x parallel.tensor 4 does not divide 6 ranks: nearest are \
             pipeline 1 x tensor 3 (data 2), pipeline 2 x tensor 3",
        ),
        (
            Some(6),
            2,
            Some(2),
            2,
            "parallel.pipeline 2 x parallel.data 2 x parallel.tensor 2 is 8 ranks, and there are 6: nearest \
             are pipeline 3 x data 1 x tensor 2, pipeline 2 x data 1 x tensor 3",
        ),
        (
            Some(1),
            2,
            None,
            1,
            "parallel.pipeline 2 x parallel.tensor 1 does not divide 1 ranks: nearest is \
             pipeline 1 x tensor 1",
        ),
        (Some(8), 0, None, 2, "parallel.pipeline is 0: expected at least 1"),
        (Some(8), 1, Some(0), 2, "parallel.data is 0: expected at least 1"),
        (None, 1, None, 0, "parallel.tensor is 0: expected at least 1"),
        (Some(0), 1, None, 1, "the number of ranks is 0: expected at least 1"),
    ] {
        let error = Mesh::derive(world, pipeline, data, tensor).unwrap_err();
        assert_eq!(error.to_string(), message);
    }
    for (world, pipeline) in [(None, usize::MAX), (None, (1 << 20) + 1), (Some(usize::MAX), 1)] {
        let error = Mesh::derive(world, pipeline, Some(2), 1).unwrap_err();
        assert!(matches!(error, MeshError::TooLarge { .. }), "{error}");
    }
}

/// For any request, the meshes that an error suggests have the given number of ranks, and each of them is accepted.
#[test]
fn what_is_named_is_possible() {
    for world in 1..=64 {
        for (pipeline, tensor) in (1..=9).flat_map(|pipeline| (1..=9).map(move |tensor| (pipeline, tensor))) {
            let possible = world % (pipeline * tensor) == 0;
            match Mesh::derive(Some(world), pipeline, None, tensor) {
                Ok(mesh) => assert!(possible && mesh.world_size() == world),
                Err(MeshError::Indivisible { nearest, .. }) => {
                    assert!(!possible && !nearest.is_empty());
                    for mesh in nearest {
                        let again = Mesh::derive(Some(world), mesh.pipeline, None, mesh.tensor);
                        assert_eq!(again, Ok(mesh));
                    }
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
}
