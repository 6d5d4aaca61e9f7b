//! When each stream of a rank works: its pieces of work one by one, and as stretches without a gap.

use serde::Serialize;

use crate::trace::Stream;

/// A piece of work of a rank, in seconds from the beginning of its phase.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Stretch {
    /// The stream.
    pub stream: Stream,
    /// The group of a collective; else nothing.
    pub group: &'static str,
    /// Name of the kernel, copy or collective.
    pub name: &'static str,
    /// Bytes of it: of a collective those of the whole buffer.
    pub bytes: u64,
    /// When it begins.
    pub start: f64,
    /// When it ends.
    pub end: f64,
}

/// When each stream works, in seconds from the first call: for each of [`LANES`], stretches without a gap, ascending.
pub type Lanes = [Vec<(f64, f64)>; 6];

/// The streams of [`Lanes`], in order.
pub const LANES: [Stream; 6] =
    [Stream::Compute, Stream::Communication, Stream::ToDevice, Stream::ToHost, Stream::Disk, Stream::Host];

/// The stretches of pieces of work; shorter gaps than `gap` seconds are left out.
pub fn lanes_of(stretches: &[Stretch], gap: f64) -> Lanes {
    let mut sorted: Vec<&Stretch> = stretches.iter().collect();
    sorted.sort_by(|a, b| a.start.total_cmp(&b.start));
    let mut lanes = Lanes::default();
    for one in sorted {
        let lane = &mut lanes[one.stream as usize];
        match lane.last_mut() {
            Some(last) if one.start <= last.1 + gap => last.1 = last.1.max(one.end),
            _ => lane.push((one.start, one.end)),
        }
    }
    lanes
}
