//! The messages between a worker and a server. The worker sends a header and a range of its gradient; the server answers
//! with the staleness of that gradient and its range of the parameters. Both ends own buffers for these messages.

use std::ops::Range;

use phalanx_plan::Precision;
use phalanx_tensor::{Category, DType, Device, Tensor, View, ViewMut};
use phalanx_train::spec::MeshPart;

/// Elements of the header of a push.
pub(super) const HEADER: usize = 4;

/// The buffers of one end of the exchange.
pub(super) struct Mail {
    /// [`Push`], clip factor, loss and gradient norm, `[4]` f32.
    pub(super) header: Tensor,
    /// A range of the gradient, in the type of communication.
    pub(super) gradient: Tensor,
    /// The staleness of the push that is answered, `[1]` f32.
    pub(super) staleness: Tensor,
    /// A range of the parameters, in the type of computation.
    pub(super) parameters: Tensor,
}

impl Mail {
    pub(super) fn new(device: &Device, mesh: &MeshPart, precision: Precision) -> Mail {
        let elements = part(mesh, 0).len();
        let alloc = |dtype, n: usize, name| device.alloc(dtype, [n], Category::Communication, name);
        Mail {
            header: alloc(DType::F32, HEADER, "push.header"),
            gradient: alloc(precision.communicate, elements, "push.gradient"),
            staleness: alloc(DType::F32, 1, "answer.staleness"),
            parameters: alloc(precision.compute, elements, "answer.parameters"),
        }
    }
}

/// The elements of the model that a server has; the mesh holds all of them in one chunk.
pub(super) fn part(mesh: &MeshPart, server: usize) -> Range<usize> {
    let range = mesh.layout.shard(0, server as u64, mesh.axes.world_size() as u64);
    range.start as usize..range.end as usize
}

/// Copies elements into another type, or into the same.
pub(super) fn put(device: &Device, from: View, to: ViewMut) {
    match from.dtype() == to.dtype() {
        true => device.copy(from, to),
        false => device.convert(from, to),
    }
}

/// Message from a worker to a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Push {
    /// A gradient to apply.
    Gradient,
    /// A step whose gradient overflowed: it is counted, but changes no parameter.
    Skipped,
    /// The worker is done and will send nothing more.
    Done,
}

impl Push {
    /// The number that stands for this push in a message header.
    pub(super) fn code(self) -> f32 {
        match self {
            Push::Gradient => 0.0,
            Push::Skipped => 1.0,
            Push::Done => 2.0,
        }
    }

    /// The push with this number.
    ///
    /// # Panics
    /// On a number that no worker sends.
    pub(super) fn from_code(code: f32) -> Push {
        let all = [Push::Gradient, Push::Skipped, Push::Done];
        let found = all.into_iter().find(|push| push.code() == code);
        found.unwrap_or_else(|| panic!("{code} is not the code of a push"))
    }
}
