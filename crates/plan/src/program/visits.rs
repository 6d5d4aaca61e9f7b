//! Ways between the memory in which contents stay and the device, and the tiles that visit it in an update.
//!
//! Host memory is one copy away. Disk is one copy away from a device whose memory the host can address; otherwise contents pass through
//! host memory, and what waits for them starts the second half of their way. A lane says which tiles come ahead of the update of an
//! earlier one, and which return behind it.

use super::action::{Buffer, Op, Token, Work};
use super::builder::Builder;
use super::chunks::Policies;
use super::list::{Extent, Stop};

/// Contents on their way to the device, or back.
#[derive(Clone, Copy)]
pub(super) enum Moving {
    /// To their end, from a buffer that is freed then unless it is where they stay.
    Last { token: Token, passage: Option<Buffer>, end: Buffer },
    /// To host memory; the second half of the way leads to a row of buffers, or to the device (None).
    First { token: Token, from: Buffer, passage: Buffer, home: Option<Buffer> },
}

/// Starts to bring a row of `tiles` buffers to a new one on the device.
#[track_caller]
pub(super) fn bring(
    list: &mut Builder,
    policies: &Policies,
    (from, tiles): (Buffer, usize),
    extent: Extent,
) -> Moving {
    let row = from.0 as usize..from.0 as usize + tiles;
    let elements = row.map(|buffer| list.spec(Buffer(buffer as u32)).elements).sum();
    let spec = super::list::BufferSpec { elements, extent, ..*list.spec(from) };
    let is_far = policies.is_two_copies_away(spec.memory);
    let into = list.take_visitor(spec, if is_far { Stop::Passage } else { Stop::Device });
    let token = list.start(Work::FromTiles { tiles: tiles as u16, from, into });
    match is_far {
        true => Moving::First { token, from, passage: into, home: None },
        false => Moving::Last { token, passage: None, end: into },
    }
}

/// Starts to send a tile back to where it stays.
#[track_caller]
pub(super) fn send(list: &mut Builder, policies: &Policies, from: Buffer, home: Buffer) -> Moving {
    if policies.is_two_copies_away(list.spec(home).memory) {
        let passage = list.take_visitor(*list.spec(from), Stop::Passage);
        let token = list.start(Work::ToTiles { tiles: 1, from, into: passage });
        return Moving::First { token, from, passage, home: Some(home) };
    }
    let token = list.start(Work::ToTiles { tiles: 1, from, into: home });
    Moving::Last { token, passage: Some(from), end: home }
}

/// Starts the second half of a way, if there is one.
#[track_caller]
pub(super) fn go_on(list: &mut Builder, moving: Moving) -> Moving {
    let Moving::First { token, from, passage, home } = moving else { return moving };
    list.emit(Op::Wait(token));
    match home {
        Some(home) => {
            list.emit(Op::Free(from));
            let token = list.start(Work::ToTiles { tiles: 1, from: passage, into: home });
            Moving::Last { token, passage: Some(passage), end: home }
        }
        None => {
            let into = list.take_visitor(*list.spec(passage), Stop::Device);
            let token = list.start(Work::FromTiles { tiles: 1, from: passage, into });
            Moving::Last { token, passage: Some(passage), end: into }
        }
    }
}

/// Waits until contents are where they go.
#[track_caller]
pub(super) fn arrive(list: &mut Builder, moving: Moving) -> Buffer {
    let Moving::Last { token, passage, end } = go_on(list, moving) else {
        unreachable!("the second half has begun")
    };
    list.emit(Op::Wait(token));
    passage.into_iter().for_each(|buffer| list.emit(Op::Free(buffer)));
    end
}
