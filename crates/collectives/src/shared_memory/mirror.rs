//! The state of a rank as bytes: launchers send it to each other, so that a report on one host names what the ranks of
//! all hosts do.
//!
//! It is the rank's cell and those slots that a report needs: of its last call, and of its waits in each channel. They are
//! written to the same places of the other host's control block, where nothing but reports reads them. Every number
//! comes from another machine: places are checked here, contents where they are read, as those of any other rank are.

use crate::shared_memory::control::{ChannelSlot, Control};
use crate::shared_memory::rank_cell::CHANNELS;

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
    let mut is_listed = [false; CHANNELS];
    for _ in 0..SLOTS_MAX {
        let Some(place) = words.next() else { break };
        let (channel, peer) =
            ((place >> 32) as usize, (place as u32).checked_sub(1).map(|peer| peer as usize));
        if channel >= CHANNELS || peer.is_some_and(|peer| peer >= control.world_size()) {
            break;
        }
        is_listed[channel] |= peer.is_none();
        slot(control, rank, channel, peer).for_each_word(|word| {
            if let Some(value) = words.next() {
                word.store(value);
            }
        });
    }
    // Elsewhere it does not wait any more: an old note would lead who follows it to the wrong rank.
    let others = (0..CHANNELS).filter(|channel| !is_listed[*channel]);
    others.for_each(|channel| control.slot(channel, rank).note_wait(None));
}

/// The slots that a report on `rank` may read, at most [`SLOTS_MAX`]: those of its last call, of the channels in which it waits, and
/// those in which others wait for it, as far as is known here: it may have gone on long ago, and they lack what it has sent.
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
    let for_it = |channel: usize, other: usize| {
        let wait = control.noted(channel, other).filter(|wait| wait.peer == rank)?;
        Some((channel, wait.pair.then_some(other)))
    };
    let awaited = (0..control.open_channels())
        .flat_map(|channel| (0..control.world_size()).filter_map(move |other| for_it(channel, other)));
    for (channel, wait) in waiting {
        add((channel, None));
        if wait.pair {
            add((channel, Some(wait.peer)));
        }
    }
    for (channel, other) in awaited {
        add((channel, other));
    }
    places
}

fn slot(control: &Control, rank: usize, channel: usize, peer: Option<usize>) -> &ChannelSlot {
    peer.map_or(control.slot(channel, rank), |peer| control.pair(channel, rank, peer))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;
    use std::time::Duration;

    use phalanx_plan::trace::{CollectiveOp, DType, Site};
    use phalanx_tensor::Region;
    use phalanx_testing::hostile::{mutate, survive};

    use crate::shared_memory::descriptor::Descriptor;
    use crate::shared_memory::rank_cell::{LastCall, Life};
    use crate::shared_memory::waits::Wait;

    fn control() -> Control {
        Control::create(Region::anonymous(Control::bytes(4)).unwrap(), 4, 2)
    }

    /// Rank 2 waits in channel 5 for rank 3.
    fn busy() -> Control {
        let control = control();
        control.open_channel(5);
        let cell = control.rank(2);
        cell.life.store(Life::JOINED, Ordering::Release);
        cell.step.store(8, Ordering::Relaxed);
        let own = Descriptor {
            group: 1,
            sequence: 4,
            op: CollectiveOp::AllReduce,
            dtype: DType::F32,
            accumulate: false,
            by_device: false,
            count: 100,
            root: None,
            tag: None,
            source: 0,
            source_bytes: 0,
            target: 0,
        };
        let slot = control.slot(5, 2);
        slot.name.write("data", 0);
        slot.descriptors[0].write(&own, Site { file: "src/x.rs", line: 10 });
        cell.begin(LastCall { channel: 5, peer: None, parity: 0 }, crate::shared_memory::clock::now_ns());
        slot.publish(7);
        slot.note_wait(Some(Wait { peer: 3, pair: false, until: 7 }));
        cell.block_on(Some(5));
        control
    }

    /// Rank 3 has ended the call for which rank 2 waits, and has gone on in another channel; so does rank 2 later.
    #[test]
    fn what_others_wait_for_is_known_and_waits_that_are_over_are_not() {
        let (second, third) = (busy(), control());
        third.open_channel(6);
        read(&third, 2, &write(&second, 2));
        third.slot(5, 3).publish(7);
        third
            .rank(3)
            .begin(LastCall { channel: 6, peer: None, parity: 0 }, crate::shared_memory::clock::now_ns());
        read(&second, 3, &write(&third, 3));
        assert_eq!(second.slot(5, 3).counter(), 7);
        second.slot(5, 2).note_wait(None);
        second
            .rank(2)
            .begin(LastCall { channel: 6, peer: None, parity: 0 }, crate::shared_memory::clock::now_ns());
        read(&third, 2, &write(&second, 2));
        assert_eq!(third.noted(5, 2), None);
    }

    #[test]
    fn reports_on_another_host_say_what_the_rank_does() {
        let (own, other) = (busy(), control());
        read(&other, 2, &write(&own, 2));
        assert!(
            other
                .last_activity(2)
                .contains("step 7, all_reduce of 100 f32 (call 4 of group data) at src/x.rs:10")
        );
        assert_eq!((other.noted(5, 2), other.rank(2).blocked_on()), (own.noted(5, 2), Some(5)));
        assert!(other.rank(2).silent_for().unwrap() < Duration::from_secs(5));
        assert_eq!(other.slot(5, 2).counter(), 7);
        // Who waits for rank 2 finds that it waits for rank 3.
        let wait = Wait { peer: 2, pair: false, until: 8 };
        other.slot(6, 0).note_wait(Some(wait));
        assert_eq!(other.chain(6, 0, wait, Duration::from_secs(60), &|_, _| true).ranks, [0, 2, 3]);
    }

    #[test]
    fn a_state_from_a_hostile_host_harms_no_report() {
        let (state, other) = (write(&busy(), 2), control());
        let wait = Wait { peer: 2, pair: false, until: 8 };
        other.slot(5, 0).note_wait(Some(wait));
        let read = |bytes: &[u8]| {
            read(&other, 2, bytes);
            let chain = other.chain(5, 0, wait, Duration::from_secs(60), &|_, _| true);
            other.describe_chain(&chain, Duration::from_secs(1)).len() < 100_000
        };
        assert_eq!(survive("states of ranks", 5000, 1 << 20, |random| mutate(random, &state), read), 5000);
    }
}
