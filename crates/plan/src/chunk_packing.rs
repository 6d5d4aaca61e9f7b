//! Parameters in order to chunks: which share one, how large it is, and where in it each begins.

use std::ops::Range;

/// A parameter, as packing sees it.
#[derive(Clone, Copy)]
pub(crate) struct Item {
    /// Elements, padded to blocks.
    pub(crate) padded: u64,
    /// True if it lies in one shard.
    pub(crate) whole: bool,
    /// True if its chunk holds nothing else.
    pub(crate) alone: bool,
    /// True if no parameter before it may be in its chunk.
    pub(crate) begins: bool,
}

impl Item {
    /// The same where parameters of its class are all.
    pub(crate) fn together(self) -> Item {
        Item { alone: false, begins: false, ..self }
    }
}

/// Chunks are whole blocks of every rank.
#[derive(Clone, Copy)]
pub(crate) struct Grain {
    /// Elements of a block.
    pub(crate) block: u64,
    /// Ranks, of which each has an equal shard of a chunk.
    pub(crate) world: u64,
}

impl Grain {
    /// Elements of a block on every rank.
    pub(crate) fn unit(self) -> u64 {
        self.block * self.world
    }
}

/// A chunk: its parameters, and its elements.
pub(crate) struct Packed {
    pub(crate) items: Range<usize>,
    pub(crate) elements: u64,
}

/// Packs in order into chunks of `size` elements. A `size` of 0 gives every
/// parameter its own chunk.
pub(crate) fn chunks(items: &[Item], size: u64, grain: Grain) -> impl Iterator<Item = Packed> + '_ {
    let mut first = 0;
    std::iter::from_fn(move || {
        let packed = chunk_from(items, first, size, grain)?;
        first = packed.items.end;
        Some(packed)
    })
}

/// The first element of each parameter of a chunk of so many elements.
pub(crate) fn offsets(items: &[Item], elements: u64, grain: Grain) -> impl Iterator<Item = u64> + '_ {
    let mut used = 0;
    items.iter().map(move |item| {
        let offset = begin(used, *item, elements / grain.world);
        used = offset + item.padded;
        offset
    })
}

/// The chunk that begins with item `first`. One that another parameter must begin anew is trimmed to its contents, as the last is.
fn chunk_from(items: &[Item], first: usize, size: u64, grain: Grain) -> Option<Packed> {
    let (item, world) = (items.get(first)?, grain.world);
    let fits = |used: u64, item: &Item| end(used, *item, size / world).filter(|end| *end <= size);
    let mut used = match fits(0, item) {
        Some(end) if !item.alone => end,
        _ => {
            let elements =
                if item.whole { item.padded * world } else { item.padded.next_multiple_of(grain.unit()) };
            return Some(Packed { items: first..first + 1, elements });
        }
    };
    let mut last = first + 1;
    while let Some(next) = items.get(last).filter(|next| !next.begins)
        && let Some(end) = fits(used, next)
    {
        (used, last) = (end, last + 1);
    }
    let is_trimmed = items.get(last).is_none_or(|next| next.begins);
    let elements = if is_trimmed { min_elements(&items[first..last], size, grain) } else { size };
    Some(Packed { items: first..last, elements })
}

/// The fewest elements of a chunk of these parameters, of which one of `size` elements has room for all.
fn min_elements(items: &[Item], size: u64, grain: Grain) -> u64 {
    let elements: u64 = items.iter().map(|item| item.padded).sum();
    if items.iter().all(|item| !item.whole) {
        return elements.next_multiple_of(grain.unit());
    }
    let Grain { block, world } = grain;
    let has_room = |blocks: u64| {
        let add = |used, item: &Item| end(used, *item, blocks * block);
        items.iter().try_fold(0, add).is_some_and(|used| used <= blocks * block * world)
    };
    let (mut too_few, mut enough) = (0, size / grain.unit());
    while enough - too_few > 1 {
        let middle = too_few.midpoint(enough);
        if has_room(middle) { enough = middle } else { too_few = middle }
    }
    enough * grain.unit()
}

/// Offset at which a parameter begins behind `used` elements of a chunk with shards of `shard` elements.
fn begin(used: u64, item: Item, shard: u64) -> u64 {
    let is_cut = item.whole && used % shard + item.padded > shard;
    if is_cut { used.next_multiple_of(shard) } else { used }
}

/// Offset at which it ends; None when it must be in one shard and is larger.
fn end(used: u64, item: Item, shard: u64) -> Option<u64> {
    (!item.whole || item.padded <= shard).then(|| begin(used, item, shard) + item.padded)
}
