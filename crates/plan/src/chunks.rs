//! The chunk layout: where each parameter lies.
//!
//! Parameters in execution order form one flat canonical space in which each starts at a multiple of
//! [`BLOCK`] elements; trained parameters come before frozen ones, of which those that are kept in a type of their own come last. That space depends on the model and on what is trained alone, so
//! norms taken block by block are the same for every chunk size and world. Chunks are consecutive spans of it: a parameter is never
//! split, one larger than a chunk gets its own, a chunk holds trained parameters or frozen ones of one type, and every chunk is a whole number
//! of blocks on every rank. A parameter that is updated as a whole lies in one of the equal shards of its chunk, behind a gap where
//! the shard before has no room; gaps count as blocks without elements.
//!
//! ```text
//! canonical  | wte ............ | wpe .. | h0 ... | h1 ... | h2 ... | ln |
//! chunks     [ 0: own size      ][ 1 ............... ][ 2 ............ ]
//! ```
//!
//! Source: chunk-based memory management of PatrickStar and Colossal-AI's Gemini; blocks are ours.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::chunk_error::{ChunkError, MAX_ELEMENTS, MAX_WORLD};
use crate::chunk_packing::{self, Grain, Item, Packed};
use crate::chunk_search::{Candidate, Search, search};
use crate::trace::DType;

/// Elements of a block: the unit of norm sums and of shards.
pub const BLOCK: u64 = 4096;

/// The size of a parameter, for the layout.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ParameterSize {
    /// Name, for error messages and tables.
    pub name: String,
    /// Elements, at least 1.
    pub elements: u64,
    /// Elements that it occupies in the layout, at least `elements`. For a tensor that is split unevenly this is the
    /// size of the largest part, so that all ranks have the same layout.
    pub reserved: u64,
    /// True if its chunk holds nothing else.
    pub alone: bool,
    /// True if it is trained. Trained parameters come first.
    pub trained: bool,
    /// True if it lies in one shard of its chunk, since the rank that updates it needs all of it.
    pub whole: bool,
    /// The type in which it is kept, if not that of computing. Such ones come last.
    pub kept: Option<DType>,
}

impl ParameterSize {
    /// A trained parameter that occupies `elements` elements, shares its chunk and may lie in several shards.
    pub fn new(name: impl Into<String>, elements: u64) -> ParameterSize {
        let name = name.into();
        let (reserved, alone, trained, whole, kept) = (elements, false, true, false, None);
        ParameterSize { name, elements, reserved, alone, trained, whole, kept }
    }
}

/// Size of chunks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ChunkSize {
    /// The size with the least waste.
    Auto(Search),
    /// This many elements, rounded up to whole blocks on every rank; at most the model, and at least so many that each shard has room
    /// for the largest parameter that lies in one shard.
    Elements(u64),
    /// No packing: one parameter per chunk. The baseline to compare with.
    None,
}

/// The position of one parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Placed {
    /// Number of the parameter in execution order.
    pub parameter: usize,
    /// Its chunk.
    pub chunk: usize,
    /// First element in the chunk: a multiple of [`BLOCK`].
    pub offset: u64,
    /// Elements, without padding.
    pub elements: u64,
}

/// Bytes of all chunks of a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkBytes {
    /// Those of the largest chunk.
    pub largest: u64,
    /// Those of all, padding included.
    pub all: u64,
    /// Those that hold no parameter.
    pub waste: u64,
}

/// A piece of one parameter in a span of a chunk. Both ranges have the same length.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Segment {
    /// Number of the parameter.
    pub parameter: usize,
    /// Elements of the parameter.
    pub in_parameter: Range<u64>,
    /// Elements of the chunk.
    pub in_chunk: Range<u64>,
}

/// The position of every parameter in the chunks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ChunkLayout {
    /// Elements of each chunk, padding included: a multiple of [`BLOCK`] * world.
    pub chunk_elements: Vec<u64>,
    /// For each chunk: the type in which it is kept, if not that of computing.
    pub kept: Vec<Option<DType>>,
    /// The positions, by parameter number; chunks and offsets ascend.
    pub placed: Vec<Placed>,
    /// Canonical index of each chunk's first block.
    pub first_block: Vec<u64>,
    /// Blocks of the canonical space.
    pub blocks: u64,
    /// Elements of all chunks that hold no parameter.
    pub waste_elements: u64,
    /// The sizes that the search tried, smallest first; empty where there was none.
    pub searched: Vec<Candidate>,
}

/// Lays the parameters, in execution order, out in chunks for `world` ranks.
///
/// All chunks have one size, save those of a parameter larger than that size and the last, which is trimmed to what it
/// holds.
///
/// # Errors
/// No parameters, an empty one, a world or a model outside the bounds, a knob with an invalid value, or a chunk for each of several
/// parameters that lie in one shard each: all would be the first rank's.
pub fn lay_out(
    parameters: &[ParameterSize],
    world: u64,
    size: &ChunkSize,
) -> Result<ChunkLayout, ChunkError> {
    if world == 0 || world > MAX_WORLD {
        return Err(ChunkError::World { world });
    }
    let grain = Grain { block: BLOCK, world };
    let padded = pad(parameters)?;
    let elements: u64 = parameters.iter().map(|p| p.elements).sum();
    let items: Vec<Item> = (0..parameters.len()).map(|p| item(parameters, p, padded[p])).collect();
    let together = items.iter().filter(|item| !item.alone);
    // Each shard has room for the largest parameter that lies in one.
    let largest_whole = together.filter(|item| item.whole).map(|item| item.padded).max();
    let min_elements = largest_whole.unwrap_or(0).saturating_mul(world);
    let too_large = |(p, item): (&ParameterSize, &Item)| {
        (item.whole && item.padded > MAX_ELEMENTS / world)
            .then(|| ChunkError::TooLarge { name: p.name.clone() })
    };
    if let Some(error) = parameters.iter().zip(&items).find_map(too_large) {
        return Err(error);
    }
    let (size, searched) = match size {
        ChunkSize::Auto(knobs) => {
            let packed = parameters.iter().zip(&items).filter(|(p, _)| !p.alone);
            let of_class = |class: (bool, bool)| {
                let own = packed.clone().filter(|(p, _)| (p.trained, p.kept.is_some()) == class);
                own.map(|(_, item)| item.together()).collect::<Vec<Item>>()
            };
            let elements = packed.clone().map(|(p, _)| p.elements).sum();
            let mut classes = [(true, false), (false, false), (false, true)].map(of_class);
            if classes.iter().all(Vec::is_empty) {
                classes[0] = items.iter().map(|item| item.together()).collect();
            }
            let (best, tried) = search(&classes, elements, (grain, min_elements), knobs)?;
            (best.chunk_elements, tried)
        }
        ChunkSize::Elements(0) => {
            return Err(ChunkError::Knob { knob: "chunk_elements", given: 0.0, expected: "at least 1" });
        }
        ChunkSize::Elements(wanted) => {
            let model: u64 = padded.iter().sum();
            ((*wanted).min(model).max(min_elements).next_multiple_of(grain.unit()), Vec::new())
        }
        ChunkSize::None if min_elements > 0 && world > 1 => return Err(ChunkError::Whole { world }),
        ChunkSize::None => (0, Vec::new()),
    };
    let mut layout = pack(parameters, &items, size, grain);
    layout.searched = searched;
    layout.waste_elements = layout.chunk_elements.iter().sum::<u64>() - elements;
    Ok(layout)
}

/// Elements of each parameter, padded to blocks.
fn pad(parameters: &[ParameterSize]) -> Result<Vec<u64>, ChunkError> {
    if parameters.is_empty() {
        return Err(ChunkError::NoParameters);
    }
    let mut total = 0;
    let pad_one = |p: &ParameterSize| {
        assert!(p.reserved >= p.elements, "{}: {} reserved for {}", p.name, p.reserved, p.elements);
        if p.elements == 0 {
            return Err(ChunkError::EmptyParameter { name: p.name.clone() });
        }
        if p.reserved > MAX_ELEMENTS - total {
            return Err(ChunkError::TooLarge { name: p.name.clone() });
        }
        total += p.reserved;
        Ok(p.reserved.next_multiple_of(BLOCK))
    };
    parameters.iter().map(pad_one).collect()
}

/// A parameter, as packing sees it.
fn item(parameters: &[ParameterSize], number: usize, padded: u64) -> Item {
    let given = &parameters[number];
    let class = |p: &ParameterSize| (!p.trained, p.kept);
    let before = number.checked_sub(1).map_or(class(given), |before| class(&parameters[before]));
    assert!(before <= class(given), "{}: trained parameters come first, kept ones last", given.name);
    let ParameterSize { whole, alone, .. } = *given;
    Item { padded, whole, alone, begins: alone || before != class(given) }
}

/// Packs in order. A `size` of 0 gives every parameter its own chunk.
fn pack(parameters: &[ParameterSize], items: &[Item], size: u64, grain: Grain) -> ChunkLayout {
    let mut layout = ChunkLayout {
        chunk_elements: Vec::new(),
        kept: Vec::new(),
        placed: Vec::with_capacity(parameters.len()),
        first_block: Vec::new(),
        blocks: 0,
        waste_elements: 0,
        searched: Vec::new(),
    };
    for Packed { items: numbers, elements } in chunk_packing::chunks(items, size, grain) {
        let chunk = layout.chunks();
        layout.first_block.push(layout.blocks);
        layout.chunk_elements.push(elements);
        layout.kept.push(parameters[numbers.start].kept);
        let own = &items[numbers.clone()];
        for (parameter, offset) in numbers.zip(chunk_packing::offsets(own, elements, grain)) {
            let elements = parameters[parameter].elements;
            layout.placed.push(Placed { parameter, chunk, offset, elements });
            layout.blocks = layout.first_block[chunk] + (offset + items[parameter].padded) / BLOCK;
        }
    }
    layout
}

impl ChunkLayout {
    /// Number of chunks.
    pub fn chunks(&self) -> usize {
        self.chunk_elements.len()
    }

    /// Elements of the largest chunk: what a buffer for any chunk must hold.
    pub fn largest_chunk(&self) -> u64 {
        self.chunk_elements.iter().copied().max().unwrap_or(0)
    }

    /// Elements of all chunks, padding included.
    pub fn padded_elements(&self) -> u64 {
        self.chunk_elements.iter().sum()
    }

    /// The type in which a chunk is kept; `compute` is that of computing.
    pub fn dtype(&self, chunk: usize, compute: DType) -> DType {
        self.kept[chunk].unwrap_or(compute)
    }

    /// Bytes of the chunks; `compute` is the type of computing.
    pub fn bytes(&self, compute: DType) -> ChunkBytes {
        let of = |chunk: usize, elements: u64| {
            let dtype = self.dtype(chunk, compute);
            elements * dtype.block_bytes() as u64 / dtype.block() as u64
        };
        let each = self.chunk_elements.iter().enumerate().map(|(chunk, elements)| of(chunk, *elements));
        let held: u64 = self.placed.iter().map(|placed| of(placed.chunk, placed.elements)).sum();
        let (largest, all) = each.fold((0, 0), |(largest, all), bytes| (bytes.max(largest), all + bytes));
        ChunkBytes { largest, all, waste: all - held }
    }

    /// The elements of a chunk that one rank owns: the `rank`-th of `world` equal parts, whole blocks.
    ///
    /// # Panics
    /// On a rank outside the world, or a world that the layout was not made for.
    pub fn shard(&self, chunk: usize, rank: u64, world: u64) -> Range<u64> {
        assert!(rank < world, "rank {rank} is outside a world of {world}");
        let elements = self.chunk_elements[chunk];
        assert_eq!(
            elements % (BLOCK * world),
            0,
            "chunk {chunk} cannot be divided into whole blocks on {world} ranks"
        );
        let part = elements / world;
        rank * part..(rank + 1) * part
    }

    /// The parameters of a chunk, as a range of their numbers.
    pub fn parameters(&self, chunk: usize) -> Range<usize> {
        let start = self.placed.partition_point(|p| p.chunk < chunk);
        let end = self.placed.partition_point(|p| p.chunk <= chunk);
        start..end
    }

    /// The real parameter elements in an element range of a chunk, in order, without padding.
    pub fn segments(&self, chunk: usize, range: Range<u64>) -> impl Iterator<Item = Segment> + '_ {
        let placed = &self.placed[self.parameters(chunk)];
        let first = placed.partition_point(|p| p.offset + p.elements <= range.start);
        placed[first..].iter().take_while(move |p| p.offset < range.end).filter_map(move |p| {
            let start = p.offset.max(range.start);
            let end = (p.offset + p.elements).min(range.end);
            (start < end).then(|| Segment {
                parameter: p.parameter,
                in_parameter: start - p.offset..end - p.offset,
                in_chunk: start..end,
            })
        })
    }

    /// The canonical blocks that a chunk holds; its padding after them has none.
    pub fn blocks_of_chunk(&self, chunk: usize) -> Range<u64> {
        let end = self.first_block.get(chunk + 1).copied().unwrap_or(self.blocks);
        self.first_block[chunk]..end
    }

    /// The canonical blocks of a parameter.
    pub fn blocks_of_parameter(&self, parameter: usize) -> Range<u64> {
        let placed = self.placed[parameter];
        let start = self.first_block[placed.chunk] + placed.offset / BLOCK;
        start..start + placed.elements.div_ceil(BLOCK)
    }

    /// Canonical index of a chunk's `block`-th block; `None` in the chunk's padding.
    pub fn canonical_block(&self, chunk: usize, block: u64) -> Option<u64> {
        let held = self.blocks_of_chunk(chunk);
        let index = held.start + block;
        held.contains(&index).then_some(index)
    }
}
