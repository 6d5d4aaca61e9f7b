//! Ways between the memory in which contents stay and the device.
//!
//! Host memory is one copy away. Disk is one copy away from a device whose memory the host can address; otherwise contents pass through
//! host memory, and what waits for them starts the second half of their way.

use super::action::{Buffer, Op, Token, Work};
use super::builder::{Builder, Row};
use super::chunks::Policies;
use super::list::{BufferSpec, Stop};

/// Contents on their way to the device, or back.
#[derive(Clone, Copy)]
pub(super) enum Moving {
    /// To their end, from a buffer that is freed then unless it is where they stay.
    Last { token: Token, passage: Option<Buffer>, end: Buffer },
    /// To host memory; the second half of the way leads to where they stay, or to the device.
    First { token: Token, from: Buffer, passage: Buffer, home: Option<Row> },
}

/// Starts to bring contents of a row to a new buffer on the device, a visitor like `visitor`.
#[track_caller]
pub(super) fn bring(list: &mut Builder, policies: &Policies, from: Row, visitor: BufferSpec) -> Moving {
    let is_far = policies.is_two_copies_away(list.spec(from.first).memory);
    let into = list.take_visitor(visitor, if is_far { Stop::Passage } else { Stop::Device });
    let token = list.start(Work::FromTiles { tiles: from.tiles, from: from.first, into });
    match is_far {
        true => Moving::First { token, from: from.first, passage: into, home: None },
        false => Moving::Last { token, passage: None, end: into },
    }
}

/// Starts to send contents back to where they stay; of the buffer of a whole chunk, this rank's part if `is_part`.
#[track_caller]
pub(super) fn send(
    list: &mut Builder,
    policies: &Policies,
    from: Buffer,
    home: Row,
    is_part: bool,
) -> Moving {
    let Row { first: into, tiles } = home;
    if policies.is_two_copies_away(list.spec(into).memory) {
        let whole = *list.spec(from);
        let elements = if is_part { policies.part(whole.elements) } else { whole.elements };
        let passage = list.take_visitor(BufferSpec { elements, ..whole }, Stop::Passage);
        let token = list.start(Work::ToTiles { tiles: 1, is_part, from, into: passage });
        return Moving::First { token, from, passage, home: Some(home) };
    }
    let token = list.start(Work::ToTiles { tiles, is_part, from, into });
    Moving::Last { token, passage: Some(from), end: into }
}

/// Starts the second half of a way, if there is one.
#[track_caller]
pub(super) fn go_on(list: &mut Builder, moving: Moving) -> Moving {
    let Moving::First { token, from, passage, home } = moving else { return moving };
    list.emit(Op::Wait(token));
    match home {
        Some(Row { first: into, tiles }) => {
            list.emit(Op::Free(from));
            let token = list.start(Work::ToTiles { tiles, is_part: false, from: passage, into });
            Moving::Last { token, passage: Some(passage), end: into }
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
