//! Which tiles visit the device in an update, and where each of them is (`visiting` moves them).

use std::collections::VecDeque;

use phalanx_tensor::Tensor;

use crate::tiles::{Arriving, Leaving};

/// A chunk and one of its tiles.
pub(super) type Tile = (usize, usize);

/// Tiles that arrive while the update works on an earlier one. Two keep a transfer waiting behind the one that runs, so
/// that the stream does not idle between them.
pub(super) const AHEAD: usize = 2;

/// Tiles that return while the update works on a later one.
pub(super) const BEHIND: usize = 2;

/// Numbers of tiles that an update keeps in flight beside the one that it works on.
#[derive(Clone, Copy, Default)]
pub(super) struct Window {
    /// Those that arrive.
    pub(super) ahead: usize,
    /// Those that return.
    pub(super) behind: usize,
}

/// The tiles that visit the device, and how far they have come.
#[derive(Default)]
pub(super) struct Visits {
    /// All of them, in order.
    pub(super) tiles: Vec<Tile>,
    /// Number of them that have begun to arrive.
    pub(super) fetched: usize,
    /// Numbers of tiles that arrive and return while the update works on another one.
    pub(super) window: Window,
    /// With updates within backward: number of tiles whose parameters are being fetched or have come. Backward of a chunk reads its
    /// parameters until its update.
    pub(super) joined: Option<usize>,
    /// Tiles that arrive: for each, its slots.
    pub(super) arriving: VecDeque<Vec<(usize, Coming)>>,
    pub(super) visitor: Option<Visitor>,
    /// Tiles that return: for each, its slots.
    pub(super) leaving: VecDeque<(Tile, Vec<(usize, Leaving)>)>,
}

/// One slot of a tile that arrives.
pub(super) enum Coming {
    Arriving(Box<Arriving>),
    /// It is only written on the device.
    Unread(Tensor),
}

/// A tile on the device whose place is elsewhere.
pub(super) struct Visitor {
    pub(super) tile: Tile,
    /// For each of its slots that visit: the number, the place to which it returns (None for what was only read), and the
    /// tensor on the device.
    pub(super) slots: Vec<(usize, Option<Tensor>, Tensor)>,
}

impl Visits {
    /// Visits of `tiles`, in this order; `in_backward` for updates within backward.
    pub(super) fn new(tiles: Vec<Tile>, window: Window, in_backward: bool) -> Visits {
        Visits { tiles, window, joined: in_backward.then_some(0), ..Visits::default() }
    }

    /// The slots of a tile that are on the device as visitors; None for a tile that does not visit.
    pub(super) fn visitor_mut(&mut self, tile: Tile) -> Option<impl Iterator<Item = (usize, &mut Tensor)>> {
        let visitor = self.visitor.as_mut().filter(|visitor| visitor.tile == tile)?;
        Some(visitor.slots.iter_mut().map(|(slot, _, here)| (*slot, here)))
    }
}
