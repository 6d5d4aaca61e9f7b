//! Tiles that visit the device in an update: those ahead arrive while the update works on one, and those behind return
//! meanwhile. The order is that of the update, so nothing has to be guessed.

use std::collections::VecDeque;

use phalanx_tensor::{DeviceError, Tensor};

use super::states::{Role, States, is_in_reach};
use super::tiles::{self, Arriving, Leaving};

/// Tiles that arrive while the update works on an earlier one. Two keep a transfer waiting behind the one that runs, so
/// that the stream does not idle between them.
const AHEAD: usize = 2;

/// Tiles that return while the update works on a later one.
const BEHIND: usize = 2;

/// A chunk and one of its tiles.
pub(super) type Tile = (usize, usize);

/// The tiles that visit the device, and how far they have come.
#[derive(Default)]
pub(super) struct Visits {
    /// All of them, in order.
    tiles: Vec<Tile>,
    /// How many of them have begun to arrive.
    fetched: usize,
    /// Tiles that arrive: for each, its slots.
    arriving: VecDeque<Vec<(usize, Coming)>>,
    visitor: Option<Visitor>,
    /// Tiles that return: for each, its slots.
    leaving: VecDeque<(Tile, Vec<(usize, Leaving)>)>,
}

/// One slot of a tile that arrives.
enum Coming {
    Arriving(Arriving),
    /// It is only written on the device.
    Unread(Tensor),
}

/// A tile on the device whose place is elsewhere.
struct Visitor {
    tile: Tile,
    /// For each of its slots that visit: the number, the place to which it returns, and the tensor on the device.
    slots: Vec<(usize, Tensor, Tensor)>,
}

impl Visits {
    /// Visits of `tiles`, in this order.
    pub(super) fn new(tiles: Vec<Tile>) -> Visits {
        Visits { tiles, ..Visits::default() }
    }

    /// The slots of a tile that are on the device as visitors; None for a tile that does not visit.
    pub(super) fn visitor_mut(&mut self, tile: Tile) -> Option<impl Iterator<Item = (usize, &mut Tensor)>> {
        let visitor = self.visitor.as_mut().filter(|visitor| visitor.tile == tile)?;
        Some(visitor.slots.iter_mut().map(|(slot, _, here)| (*slot, here)))
    }
}

impl States {
    /// An update begins: the first tiles start to arrive.
    pub(super) fn begin(&mut self) {
        self.visits.fetched = 0;
        (0..AHEAD).for_each(|_| self.fetch_next());
    }

    /// Waits until a tile is on the device, if it is one that visits it. Tiles are entered in order.
    pub(super) fn enter(&mut self, tile: Tile) -> Result<(), DeviceError> {
        let entered = self.visits.fetched - self.visits.arriving.len();
        if self.visits.tiles.get(entered) != Some(&tile) {
            return Ok(());
        }
        self.fetch_next();
        let arriving = self.visits.arriving.pop_front().expect("each tile is fetched before it is entered");
        let mut slots = Vec::with_capacity(arriving.len());
        for (slot, coming) in arriving {
            slots.push(match coming {
                Coming::Unread(stored) => {
                    let here = tiles::window(&self.device, stored.dtype(), stored.shape().elements());
                    (slot, stored, here)
                }
                Coming::Arriving(arriving) => {
                    let (mut stored, here) = tiles::arrive(&self.device, arriving)?;
                    (slot, stored.pop().expect("one tile"), here)
                }
            });
        }
        self.visits.visitor = Some(Visitor { tile, slots });
        Ok(())
    }

    /// The update of the tile that was entered has been issued: it returns.
    pub(super) fn leave(&mut self) -> Result<(), DeviceError> {
        let Some(Visitor { tile, slots }) = self.visits.visitor.take() else { return Ok(()) };
        let mut leaving = Vec::with_capacity(slots.len());
        for (slot, stored, here) in slots {
            let all = 0..here.shape().elements();
            leaving.push((slot, tiles::send(&self.device, here, all, vec![stored], 0)));
        }
        self.visits.leaving.push_back((tile, leaving));
        // While the device works on this tile, the next one goes on from host memory to the device.
        if let Some(next) = self.visits.arriving.pop_front() {
            let mut gone_on = Vec::with_capacity(next.len());
            for (slot, coming) in next {
                gone_on.push((slot, self.go_on(coming)?));
            }
            self.visits.arriving.push_front(gone_on);
        }
        if self.visits.leaving.len() > BEHIND { self.receive() } else { Ok(()) }
    }

    /// Waits until all tiles are in their places.
    pub(super) fn finish(&mut self) -> Result<(), DeviceError> {
        while !self.visits.leaving.is_empty() {
            self.receive()?;
        }
        Ok(())
    }

    /// Starts to bring the next tile to the device, if there is one.
    fn fetch_next(&mut self) {
        let Some((chunk, tile)) = self.visits.tiles.get(self.visits.fetched).copied() else { return };
        self.visits.fetched += 1;
        let has_master = self.chunks[chunk].position(Role::Master).is_some();
        let mut arriving = Vec::new();
        for (number, slot) in self.chunks[chunk].slots.iter_mut().enumerate() {
            if is_in_reach(&self.device, slot.memory) {
                continue;
            }
            let stored = slot.tiles[tile].take().expect("it is not in flight yet");
            // An update overwrites parameters with the rounded master weights.
            let coming = match slot.role == Role::Parameters && has_master {
                true => Coming::Unread(stored),
                false => {
                    let all = 0..stored.shape().elements();
                    Coming::Arriving(tiles::bring(&self.device, vec![stored], all))
                }
            };
            arriving.push((number, coming));
        }
        self.visits.arriving.push_back(arriving);
    }

    fn go_on(&self, coming: Coming) -> Result<Coming, DeviceError> {
        Ok(match coming {
            Coming::Arriving(arriving) => Coming::Arriving(tiles::continue_arrival(&self.device, arriving)?),
            unread => unread,
        })
    }

    /// Waits until the tile that returns first is in its place; the one behind it starts the second half of its way.
    fn receive(&mut self) -> Result<(), DeviceError> {
        let Some(((chunk, tile), leaving)) = self.visits.leaving.pop_front() else { return Ok(()) };
        let go_on = |leaving: Vec<(usize, Leaving)>| -> Result<Vec<_>, DeviceError> {
            let each = |(slot, leaving)| Ok((slot, tiles::continue_departure(&self.device, leaving)?));
            leaving.into_iter().map(each).collect()
        };
        let leaving = go_on(leaving)?;
        if let Some((behind, next)) = self.visits.leaving.pop_front() {
            self.visits.leaving.push_front((behind, go_on(next)?));
        }
        for (slot, leaving) in leaving {
            let stored = tiles::depart(&self.device, leaving)?.pop();
            self.chunks[chunk].slots[slot].tiles[tile] = stored;
        }
        Ok(())
    }
}
