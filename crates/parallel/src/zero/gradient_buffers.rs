//! The buffers of a chunk of gradients, and what happens to them.

use phalanx_collectives::Pending;
use phalanx_plan::{Precision, ZeroStage};
use phalanx_tensor::{Memory, Tensor, ViewMut};

use super::order::is_updated_in_backward;
use super::residence::ChunkResidence;
use super::{Arithmetic, Map, Options, update};
use crate::tiles::Arriving;

/// Which buffers a chunk of gradients has.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum GradientBuffering {
    /// A whole buffer, reduced in place.
    InPlace,
    /// A whole buffer and a shard, both kept.
    Pair,
    /// A shard that is kept, and a whole buffer until it is reduced.
    Transient,
}

impl GradientBuffering {
    pub(super) fn of(map: &Map, options: &Options, arithmetic: &Arithmetic) -> GradientBuffering {
        let Precision { accumulate, communicate, .. } = arithmetic.precision;
        let several = arithmetic.micro_batches > 1;
        // With one rank and equal types, nothing is communicated or rounded, so micro-batches accumulate in one buffer.
        let alone = map.world == 1 && communicate == accumulate;
        match options.stage {
            _ if alone || (several && options.defer) => GradientBuffering::InPlace,
            ZeroStage::Zero | ZeroStage::One if several => GradientBuffering::Pair,
            ZeroStage::Zero | ZeroStage::One => GradientBuffering::InPlace,
            ZeroStage::Two | ZeroStage::Three => GradientBuffering::Transient,
        }
    }
}

impl Arithmetic<'_> {
    /// Returns whether there is something to add by a tree.
    pub(super) fn has_tree(&self) -> bool {
        self.sums_by_tree && self.micro_batches > 1
    }
}

/// Location of the reduced gradients of a chunk.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum GradientPlace {
    /// In a buffer of their own in device memory.
    Buffer,
    /// In another memory than the device's.
    Elsewhere,
    /// In the place of the chunk's parameters.
    Parameters,
    /// Nowhere: the chunk is updated within backward, as soon as they are reduced, and their buffer is freed.
    Update,
}

impl GradientPlace {
    /// Gradients take the place of parameters in chunks that lie in device memory with all their parts: a step that is
    /// skipped restores the parameters from the master weights there.
    pub(super) fn of(map: &Map, options: &Options, c: usize) -> GradientPlace {
        if is_updated_in_backward(map, options, c) {
            return GradientPlace::Update;
        }
        let lies = map.residence.of(c);
        match lies.gradients {
            Memory::Device if options.gradients_in_place && lies == ChunkResidence::DEVICE => {
                GradientPlace::Parameters
            }
            Memory::Device => GradientPlace::Buffer,
            Memory::Host | Memory::Disk => GradientPlace::Elsewhere,
        }
    }
}

/// Elements of a chunk's gradients where they are stored outside of device memory: the sum, or the whole buffer in which
/// micro-batches accumulate.
pub(super) fn stored_elements(map: &Map, options: &Options, arithmetic: &Arithmetic, c: usize) -> usize {
    let buffering = GradientBuffering::of(map, options, arithmetic);
    let accumulates_whole =
        buffering == GradientBuffering::InPlace && arithmetic.micro_batches > 1 && !arithmetic.has_tree();
    if accumulates_whole { map.whole(c).len() } else { update::stepped(map, options.stage, c).len() }
}

/// The buffers of a chunk that no collective uses.
pub(super) enum GradientBuffers {
    /// A whole buffer (in place).
    Whole(Tensor),
    /// This rank's shard of the sum (transient, between uses).
    Shard(Tensor),
    /// A whole buffer that layers write, and this rank's shard of the sum.
    Both { whole: Tensor, shard: Tensor },
    /// No buffer on the device: the sum so far is stored elsewhere, lies in the place of parameters, or was used by an update
    /// within backward.
    Away,
    /// The whole buffer, in which micro-batches accumulate elsewhere, is on its way to the device.
    Coming(Box<Arriving>),
    /// A whole buffer that layers write; the shard of the sum so far arrives from elsewhere, if there is one.
    Bucket { whole: Tensor, sum: Option<Box<Arriving>> },
}

/// One chunk of gradients.
pub(super) enum Chunk {
    /// No collective uses it.
    Here(GradientBuffers),
    /// A whole buffer is being reduced in place.
    ReducingWhole(Pending<Tensor>),
    /// A whole buffer is being reduced into this rank's shard.
    ReducingBoth(Pending<(Tensor, Tensor)>),
    /// A copy in the communication type is being reduced.
    ReducingCopy(Box<ReducingCopy>),
    /// Placeholder while a function changes the state.
    Moving,
}

/// A copy that is being reduced in place, and the buffers that its sum is written or added to.
pub(super) struct ReducingCopy {
    pub(super) copy: Pending<Tensor>,
    pub(super) held: GradientBuffers,
    pub(super) accumulate: bool,
}

impl Chunk {
    /// The whole buffer, while no collective uses it.
    pub(super) fn whole(&self) -> Option<&Tensor> {
        match self {
            Chunk::Here(
                GradientBuffers::Whole(whole)
                | GradientBuffers::Both { whole, .. }
                | GradientBuffers::Bucket { whole, .. },
            ) => Some(whole),
            _ => None,
        }
    }

    /// The whole buffer of chunk `c`, mutable.
    pub(super) fn whole_mut(&mut self, c: usize) -> ViewMut<'_> {
        match self {
            Chunk::Here(
                GradientBuffers::Whole(whole)
                | GradientBuffers::Both { whole, .. }
                | GradientBuffers::Bucket { whole, .. },
            ) => whole.view_mut(),
            _ => panic!("gradients of chunk {c} were not opened"),
        }
    }
}
