//! Tiles that visit the device in an update: those ahead arrive while the update works on one, and those behind return
//! meanwhile. The order is that of the update, so nothing has to be guessed.

use phalanx_tensor::DeviceError;

use super::states::{Role, States, is_in_reach};
use super::visits::{AHEAD, Coming, Tile, Visitor};
use crate::tiles::{self, Leaving};

impl States {
    /// An update begins: the first tiles start to arrive.
    pub(super) fn begin(&mut self) {
        self.visits.fetched = 0;
        self.visits.joined = self.visits.joined.map(|_| 0);
        (0..self.visits.window.ahead).for_each(|_| self.fetch_next());
    }

    /// Waits until a tile is on the device, if it is one that visits it. Tiles are entered in order.
    pub(super) fn enter(&mut self, tile: Tile) -> Result<(), DeviceError> {
        let entered = self.visits.fetched - self.visits.arriving.len();
        if self.visits.tiles.get(entered) != Some(&tile) {
            return Ok(());
        }
        self.fetch_next();
        self.join(entered);
        let arriving = self.visits.arriving.pop_front().expect("each tile is fetched before it is entered");
        let mut slots = Vec::with_capacity(arriving.len());
        for (slot, coming) in arriving {
            slots.push(match coming {
                Coming::Unread(stored) => {
                    let here = tiles::window(&self.device, stored.dtype(), stored.shape().elements());
                    (slot, Some(stored), here)
                }
                Coming::Arriving(arriving) => {
                    let (mut stored, here) = tiles::arrive(&self.device, *arriving)?;
                    let place = &mut self.chunks[tile.0].slots[slot];
                    if place.role == Role::Gradients {
                        place.tiles[tile.1] = stored.pop();
                    }
                    (slot, stored.pop(), here)
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
            let Some(stored) = stored else { continue };
            let all = 0..here.shape().elements();
            leaving.push((slot, tiles::send(&self.device, here, all, vec![stored], 0)));
        }
        self.visits.leaving.push_back((tile, leaving));
        // While the device works on this tile, the next one goes on from host memory to the device. Within backward, the first
        // one of the next chunk may still be read when kernels of the next block could be issued.
        let following = self.visits.tiles.get(self.visits.fetched - self.visits.arriving.len());
        let goes_on = self.visits.joined.is_none() || following.is_some_and(|next| next.0 == tile.0);
        if goes_on && let Some(next) = self.visits.arriving.pop_front() {
            let mut gone_on = Vec::with_capacity(next.len());
            for (slot, coming) in next {
                gone_on.push((slot, self.go_on(coming)?));
            }
            self.visits.arriving.push_front(gone_on);
        }
        if self.visits.leaving.len() > self.visits.window.behind { self.receive() } else { Ok(()) }
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
        let Some(tile) = self.visits.tiles.get(self.visits.fetched).copied() else { return };
        self.visits.fetched += 1;
        let is_early = self.visits.joined.is_some();
        let arriving = self.bring_slots(tile, |role| !(is_early && role == Role::Parameters));
        self.visits.arriving.push_back(arriving);
    }

    /// Within backward: brings the parameters of the tile that is entered, the `entered`-th, and of the next ones of its chunk.
    fn join(&mut self, entered: usize) {
        let Some(mut joined) = self.visits.joined else { return };
        let chunk = self.visits.tiles[entered].0;
        let end = (entered + 1 + AHEAD).min(self.visits.fetched);
        while joined < end && self.visits.tiles[joined].0 == chunk {
            let parameters = self.bring_slots(self.visits.tiles[joined], |role| role == Role::Parameters);
            self.visits.arriving[joined - entered].extend(parameters);
            joined += 1;
        }
        self.visits.joined = Some(joined);
    }

    /// Starts to bring the `wanted` parts of a tile that kernels do not reach where they lie.
    fn bring_slots(&mut self, (chunk, tile): Tile, wanted: impl Fn(Role) -> bool) -> Vec<(usize, Coming)> {
        let has_master = self.chunks[chunk].position(Role::Master).is_some();
        let elements = self.tiles(chunk)[tile].len();
        let mut arriving = Vec::new();
        for (number, slot) in self.chunks[chunk].slots.iter_mut().enumerate() {
            if is_in_reach(&self.device, slot.memory) || !wanted(slot.role) {
                continue;
            }
            let stored = slot.tiles[tile].take().expect("it is not in flight yet");
            // An update overwrites parameters with the rounded master weights.
            let coming = match slot.role == Role::Parameters && has_master {
                true => Coming::Unread(stored),
                false => {
                    // Tiles of states have as many numbers as belong to the elements; one of gradients may have more elements.
                    let read = match slot.role {
                        Role::State(_) => stored.shape().elements(),
                        _ => elements,
                    };
                    Coming::Arriving(Box::new(tiles::bring(&self.device, vec![stored], 0..read)))
                }
            };
            arriving.push((number, coming));
        }
        arriving
    }

    fn go_on(&self, coming: Coming) -> Result<Coming, DeviceError> {
        Ok(match coming {
            Coming::Arriving(arriving) => {
                Coming::Arriving(Box::new(tiles::continue_arrival(&self.device, *arriving)?))
            }
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
