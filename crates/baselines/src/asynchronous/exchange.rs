//! What passes between a worker and a server: a header and a range of the gradient there, the staleness and the range
//! of the parameters back. Both ends have memory of their own for it.

use phalanx_tensor::{Category, DType, Device, Tensor};

use crate::whole::Whole;
use phalanx_train::spec::Spec;

/// Buffers of one end.
pub(super) struct Mail {
    /// [`Push`] and clip factor, `[2]` f32.
    pub(super) header: Tensor,
    /// In the type of communication.
    pub(super) gradient: Tensor,
    /// Of the push that is answered, `[1]` f32.
    pub(super) staleness: Tensor,
    /// In the type of computation.
    pub(super) parameters: Tensor,
}

impl Mail {
    pub(super) fn new(device: &Device, spec: &Spec, whole: &Whole) -> Mail {
        let elements = whole.part(0, spec.world_size()).len();
        let alloc = |dtype, n: usize, name| device.alloc(dtype, [n], Category::Communication, name);
        Mail {
            header: alloc(DType::F32, 2, "push.header"),
            gradient: alloc(spec.precision.communicate, elements, "push.gradient"),
            staleness: alloc(DType::F32, 1, "answer.staleness"),
            parameters: alloc(spec.precision.compute, elements, "answer.parameters"),
        }
    }
}

/// What a push brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Push {
    /// A gradient, to be applied.
    Gradient,
    /// A step that overflowed: it counts, and changes nothing.
    Skipped,
    /// Nothing more.
    Done,
}

impl Push {
    /// In a header.
    pub(super) fn code(self) -> f32 {
        match self {
            Push::Gradient => 0.0,
            Push::Skipped => 1.0,
            Push::Done => 2.0,
        }
    }

    /// # Panics
    /// On what no worker writes.
    pub(super) fn from_code(code: f32) -> Push {
        let all = [Push::Gradient, Push::Skipped, Push::Done];
        let found = all.into_iter().find(|push| push.code() == code);
        found.unwrap_or_else(|| panic!("{code} is no push"))
    }
}
