//! Which chunk is needed next: the order of uses, known from the schedule before the first step.
//!
//! Prefetch asks for the next few distinct chunks; eviction asks for the next use of a chunk and drops
//! the one whose next use is farthest, which is optimal (Belady, "A study of replacement algorithms
//! for a virtual-storage computer", 1966). A phase ends where it ends: what the next step needs
//! first is not looked up, because the optimizer changes it in between.

use std::collections::BTreeMap;

use crate::trace::{Event, Memory, PhaseName, Site, Trace};

/// Number of uses of chunks in a phase before device memory is fullest.
pub fn uses_before_peak(trace: &Trace, phase: PhaseName) -> usize {
    let mut sizes = BTreeMap::new();
    let (mut live, mut peak, mut uses, mut before) = (0u64, 0, 0, 0);
    for event in trace.phase(phase).map(|p| &p.events[..]).unwrap_or_default() {
        match event {
            Event::Alloc { id, memory: Memory::Device, bytes, .. } => {
                sizes.insert(*id, *bytes);
                live += bytes;
                if live > peak {
                    (peak, before) = (live, uses);
                }
            }
            Event::Free { id, memory: Memory::Device } => live -= sizes.remove(id).unwrap_or(0),
            Event::Use { .. } => uses += 1,
            _ => {}
        }
    }
    before
}

/// Bytes of tensors that are live in each memory in a phase, without those that `is_left_out` by the place that allocates them: the most
/// before the first use of chunks, and from each group of uses, which is that of a block, on to the next.
pub fn live_over_uses(
    trace: &Trace,
    phase: PhaseName,
    is_left_out: impl Fn(Site) -> bool,
) -> Vec<[u64; Memory::ALL.len()]> {
    let (mut sizes, mut live) = (BTreeMap::new(), [0u64; Memory::ALL.len()]);
    let mut peaks = Vec::new();
    for here in &trace.phases {
        let mut follows_use = false;
        peaks = vec![live];
        for event in &here.events {
            if matches!(event, Event::Use { .. }) && !std::mem::replace(&mut follows_use, true) {
                peaks.push(live);
            }
            follows_use &= matches!(event, Event::Use { .. });
            match event {
                Event::Alloc { id, memory, bytes, site, .. } if !is_left_out(*site) => {
                    sizes.insert(*id, *bytes);
                    live[*memory as usize] += bytes;
                    let peak = peaks.last_mut().expect("the one before the first use");
                    peak[*memory as usize] = peak[*memory as usize].max(live[*memory as usize]);
                }
                Event::Free { id, memory } => live[*memory as usize] -= sizes.remove(id).unwrap_or(0),
                _ => {}
            }
        }
        if here.name == phase {
            break;
        }
    }
    peaks
}

/// Answers queries about the order of uses. Building it takes n log n; queries do not allocate.
#[derive(Clone, Debug)]
pub struct Lookahead {
    order: Vec<u32>,
    /// For each position: the previous position at which the same chunk was used.
    previous: Vec<Option<usize>>,
    /// (chunk, position) of every use, sorted.
    uses: Vec<(u32, usize)>,
}

impl Lookahead {
    /// Prepares queries for one order of uses.
    pub fn new(order: Vec<u32>) -> Lookahead {
        let mut uses: Vec<(u32, usize)> = order.iter().copied().zip(0..).collect();
        uses.sort_unstable();
        let mut previous = vec![None; order.len()];
        for pair in uses.windows(2) {
            let [(before, position), (chunk, next)] = [pair[0], pair[1]];
            if before == chunk {
                previous[next] = Some(position);
            }
        }
        Lookahead { order, previous, uses }
    }

    /// The order of uses.
    pub fn order(&self) -> &[u32] {
        &self.order
    }

    /// The distinct chunks used at or after `position`, in order of their first use there; the first is the chunk in
    /// use at `position`.
    pub fn upcoming(&self, position: usize) -> impl Iterator<Item = u32> + '_ {
        let fresh = move |at: &usize| self.previous[*at].is_none_or(|before| before < position);
        (position..self.order.len()).filter(fresh).map(|at| self.order[at])
    }

    /// The next `count` distinct chunks after `position`, without the chunk in use at `position`.
    pub fn ahead(&self, position: usize, count: usize) -> impl Iterator<Item = u32> + '_ {
        self.upcoming(position).skip(1).take(count)
    }

    /// The position of the first use of `chunk` after `position`, in O(log n); `None` if there is none.
    pub fn next_use(&self, chunk: u32, position: usize) -> Option<usize> {
        let index = self.uses.partition_point(|used| *used <= (chunk, position));
        self.uses.get(index).filter(|(found, _)| *found == chunk).map(|(_, at)| *at)
    }
}
