//! Lifetimes to offsets: items that are live together never share a byte, and the arena is small.
//!
//! The problem (dynamic storage allocation) is NP-hard, so cheap orders are tried and the
//! smallest result kept:
//! - best fit in order of time, forward and backward (it is symmetric): n log n, and nearly optimal
//!   for the stack-like lifetimes of forward and backward;
//! - greedy by size (Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference",
//!   2020; TensorFlow Lite): largest first, at the lowest offset that is free over its whole lifetime.
//!   Up to n^2 / 2 comparisons, so it has a budget, counted in comparisons to stay deterministic.
//!
//! No packing is smaller than the most bytes live at once; one that reaches it ends the search.

use std::collections::{BTreeMap, BTreeSet};

/// Bytes to which every allocation is aligned: a cache line, and a vector register of AVX-512.
pub const ALIGN: u64 = 64;

/// The same for a rank with disk memory, in all its memories: direct transfers of a disk go in whole blocks, from and to
/// addresses that are aligned as blocks are.
pub const DISK_ALIGN: u64 = 4096;

/// Comparisons that greedy by size may spend: all of 5,600 items, a few hundredths of a second.
const GREEDY_COMPARISONS: u64 = 16_000_000;

/// Items beyond which greedy by size would spend its comparisons in vain.
const GREEDY_ITEMS: usize = 20_000;

/// The lifetime and size of an allocation. Times count allocations and frees, so no two within a phase are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lifetime {
    /// Time of the allocation.
    pub start: usize,
    /// Time of the free, after `start`.
    pub end: usize,
    /// Bytes, a multiple of the alignment.
    pub bytes: u64,
}

/// The offset of each item, and the size of the arena.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packing {
    /// First byte of each item.
    pub offsets: Vec<u64>,
    /// End of the highest item.
    pub arena_bytes: u64,
}

/// The smallest packing found.
pub fn pack(items: &[Lifetime]) -> Packing {
    let floor = live_peak(items);
    let mut best = best_fit(items);
    if best.arena_bytes > floor {
        best = smaller(best, best_fit(&backward(items)));
    }
    if best.arena_bytes > floor
        && items.len() <= GREEDY_ITEMS
        && let Some(greedy) = greedy_by_size(items, GREEDY_COMPARISONS)
    {
        best = smaller(best, greedy);
    }
    assert!(best.arena_bytes >= floor, "a packing below the live peak overlaps");
    best
}

/// Maximum of the bytes that are live at once: no arena can be smaller.
pub fn live_peak(items: &[Lifetime]) -> u64 {
    let (mut live, mut peak) = (0, 0);
    for (item, starts) in moments(items) {
        if starts {
            live += items[item].bytes;
            peak = peak.max(live);
        } else {
            live -= items[item].bytes;
        }
    }
    peak
}

/// Starts (`true`) and ends of the items, in order of time.
fn moments(items: &[Lifetime]) -> Vec<(usize, bool)> {
    assert!(items.iter().all(|item| item.start < item.end), "an item is freed before it is allocated");
    dense_moments(items).unwrap_or_else(|| {
        let mut moments: Vec<(usize, usize, bool)> = Vec::with_capacity(2 * items.len());
        for (item, lifetime) in items.iter().enumerate() {
            moments.push((lifetime.start, item, true));
            moments.push((lifetime.end, item, false));
        }
        moments.sort_unstable();
        moments.into_iter().map(|(_, item, starts)| (item, starts)).collect()
    })
}

/// [`moments`] without sorting, where the moments are few and differ: as the allocations and frees of a phase do.
fn dense_moments(items: &[Lifetime]) -> Option<Vec<(usize, bool)>> {
    let last = items.iter().map(|item| item.end).max()?;
    if last > 4 * items.len() {
        return None;
    }
    let mut at = vec![None; last + 1];
    for (item, lifetime) in items.iter().enumerate() {
        for (moment, starts) in [(lifetime.start, true), (lifetime.end, false)] {
            if at[moment].replace((item, starts)).is_some() {
                return None;
            }
        }
    }
    Some(at.into_iter().flatten().collect())
}

/// The same items with time reversed: live together if and only if they were.
fn backward(items: &[Lifetime]) -> Vec<Lifetime> {
    let last = items.iter().map(|i| i.end).max().unwrap_or(0);
    items.iter().map(|i| Lifetime { start: last - i.end, end: last - i.start, bytes: i.bytes }).collect()
}

/// The smaller packing; the first if they are equal.
fn smaller(first: Packing, second: Packing) -> Packing {
    if second.arena_bytes < first.arena_bytes { second } else { first }
}

/// In order of time: each item takes the smallest hole that it fits (the lowest of equals), else grows the arena.
fn best_fit(items: &[Lifetime]) -> Packing {
    let mut holes = Holes::default();
    let mut offsets = vec![0; items.len()];
    let mut arena_bytes = 0;
    for (item, starts) in moments(items) {
        let bytes = items[item].bytes;
        if bytes == 0 {
            continue;
        }
        if starts {
            offsets[item] = holes.take(bytes);
            arena_bytes = arena_bytes.max(offsets[item] + bytes);
        } else {
            holes.give(offsets[item], bytes);
        }
    }
    Packing { offsets, arena_bytes }
}

/// The free ranges below `top`, by offset and by size. Adjacent holes are merged, and no hole touches `top`, above
/// which everything is free.
#[derive(Default)]
struct Holes {
    by_offset: BTreeMap<u64, u64>,
    by_size: BTreeSet<(u64, u64)>,
    top: u64,
}

impl Holes {
    fn take(&mut self, bytes: u64) -> u64 {
        let Some(&(size, offset)) = self.by_size.range((bytes, 0)..).next() else {
            let offset = self.top;
            self.top += bytes;
            return offset;
        };
        self.remove(offset, size);
        if size > bytes {
            self.insert(offset + bytes, size - bytes);
        }
        offset
    }

    fn give(&mut self, offset: u64, bytes: u64) {
        let (mut start, mut end) = (offset, offset + bytes);
        if let Some((&below, &size)) = self.by_offset.range(..start).next_back()
            && below + size == start
        {
            self.remove(below, size);
            start = below;
        }
        if let Some(&size) = self.by_offset.get(&end) {
            self.remove(end, size);
            end += size;
        }
        if end == self.top {
            self.top = start;
        } else {
            self.insert(start, end - start);
        }
    }

    fn insert(&mut self, offset: u64, size: u64) {
        self.by_offset.insert(offset, size);
        self.by_size.insert((size, offset));
    }

    fn remove(&mut self, offset: u64, size: u64) {
        self.by_offset.remove(&offset);
        self.by_size.remove(&(size, offset));
    }
}

/// Largest first, each at the lowest offset that is free over its lifetime. `None` when the budget
/// of comparisons runs out.
fn greedy_by_size(items: &[Lifetime], mut comparisons: u64) -> Option<Packing> {
    let mut order: Vec<usize> = (0..items.len()).filter(|i| items[*i].bytes > 0).collect();
    order.sort_unstable_by_key(|i| (std::cmp::Reverse(items[*i].bytes), items[*i].start));
    let mut offsets = vec![0; items.len()];
    let mut arena_bytes = 0;
    // Lowest offset first.
    let mut placed: Vec<(u64, Lifetime)> = Vec::with_capacity(order.len());
    for index in order {
        let item = items[index];
        let mut offset = 0;
        let mut seen = 0;
        for &(at, other) in &placed {
            seen += 1;
            if at >= offset + item.bytes {
                break;
            }
            if other.start > item.end || item.start > other.end {
                continue;
            }
            offset = offset.max(at + other.bytes);
        }
        comparisons = comparisons.checked_sub(seen)?;
        offsets[index] = offset;
        arena_bytes = arena_bytes.max(offset + item.bytes);
        let position = placed.partition_point(|(at, _)| *at < offset);
        placed.insert(position, (offset, item));
    }
    Some(Packing { offsets, arena_bytes })
}
