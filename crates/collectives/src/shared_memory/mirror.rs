//! The state of a rank as bytes: launchers send it to each other, so that a report on one host names what the ranks of
//! all hosts do.
//!
//! It is the rank's cell and those slots that a report needs: of its last call, and of its waits in each channel. They are
//! written to the same places of the other host's control block, where nothing but reports reads them. Every number
//! comes from another machine: places are checked here, contents where they are read, as those of any other rank are.

use crate::shared_memory::control::{CHANNELS, ChannelSlot, Control};

/// Maximum number of slots of one rank that are sent.
const SLOTS_MAX: usize = 8;

/// The state of `rank`.
pub(crate) fn write(control: &Control, rank: usize) -> Vec<u8> {
    let cell = control.rank(rank);
    let silent_ms = cell.silent_for().map_or(u64::MAX, |silent| silent.as_millis() as u64);
    let mut words = vec![silent_ms];
    cell.for_each_word(|word| words.push(word.load()));
    for (channel, peer) in places(control, rank) {
        words.push((channel as u64) << 32 | peer.map_or(0, |peer| peer as u64 + 1));
        slot(control, rank, channel, peer).for_each_word(|word| words.push(word.load()));
    }
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Takes over the state of `rank`, of another host.
pub(crate) fn read(control: &Control, rank: usize, bytes: &[u8]) {
    let mut words = bytes.chunks_exact(8).map(|eight| u64::from_le_bytes(eight.try_into().expect("8 bytes")));
    let Some(silent_ms) = words.next() else { return };
    let cell = control.rank(rank);
    cell.for_each_word(|word| {
        if let Some(value) = words.next() {
            word.store(value);
        }
    });
    cell.set_silent(silent_ms);
    for _ in 0..SLOTS_MAX {
        let Some(place) = words.next() else { return };
        let (channel, peer) =
            ((place >> 32) as usize, (place as u32).checked_sub(1).map(|peer| peer as usize));
        if channel >= CHANNELS || peer.is_some_and(|peer| peer >= control.world_size()) {
            return;
        }
        slot(control, rank, channel, peer).for_each_word(|word| {
            if let Some(value) = words.next() {
                word.store(value);
            }
        });
    }
}

/// The slots that a report on `rank` may read, at most [`SLOTS_MAX`]: those of its last call, and of the channels in which
/// it waits.
fn places(control: &Control, rank: usize) -> Vec<(usize, Option<usize>)> {
    let mut places: Vec<(usize, Option<usize>)> = Vec::new();
    let mut add = |place: (usize, Option<usize>)| {
        if places.len() < SLOTS_MAX && !places.contains(&place) {
            places.push(place);
        }
    };
    if let Some((channel, peer)) = control.rank(rank).last_place(control.world_size()) {
        // The slot of the group has the group's name and the waits.
        add((channel, None));
        if peer.is_some() {
            add((channel, peer));
        }
    }
    let waiting =
        (0..control.open_channels()).filter_map(|channel| Some((channel, control.noted(channel, rank)?)));
    for (channel, wait) in waiting {
        add((channel, None));
        if wait.pair {
            add((channel, Some(wait.peer)));
        }
    }
    places
}

fn slot(control: &Control, rank: usize, channel: usize, peer: Option<usize>) -> &ChannelSlot {
    peer.map_or(control.slot(channel, rank), |peer| control.pair(channel, rank, peer))
}
