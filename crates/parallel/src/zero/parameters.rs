//! Parameters in chunks: stored whole (stages 0 to 2), or gathered when a block uses them (stage 3). Tensors of chunks in blocks are words, as
//! messages are ([`DType::moved`](phalanx_tensor::DType::moved)).

use std::ops::Range;

use phalanx_collectives::{CollectiveError, Group, Pending};
use phalanx_plan::ZeroStage;
use phalanx_plan::trace::PhaseName;
use phalanx_tensor::{Category, Device, Memory, Tensor, View, ViewMut};

use super::Map;
use super::prefetch::Prefetch;
use super::states::States;
use crate::tiles::Arriving;

/// One chunk of parameters.
pub(super) enum Chunk {
    /// Every rank has all of it.
    Whole(Tensor),
    /// All of it; the updated parts of the other ranks are being received.
    Publishing(Pending<Tensor>),
    /// This rank's shard.
    Sharded(Tensor),
    /// This rank's shard, while the whole is being gathered.
    Gathering(Pending<(Tensor, Tensor)>),
    /// This rank's shard and the whole.
    Gathered { shard: Tensor, whole: Tensor },
    /// This rank's shard lies outside of device memory.
    Away,
    /// This rank's shard is on its way to the device.
    Arriving(Arriving),
    /// The whole; this rank's shard lies outside of device memory.
    Copied(Tensor),
    /// Placeholder while a function changes the state.
    Moving,
}

/// Objects with which chunks are gathered, and their sources.
pub(super) struct Source<'a> {
    pub(super) device: &'a Device,
    pub(super) group: &'a dyn Group,
    pub(super) map: &'a Map,
    /// Source of shards that are not in device memory.
    pub(super) states: &'a mut States,
}

pub(super) struct ParameterChunks {
    pub(super) chunks: Vec<Chunk>,
    /// The current phase: its order of uses is prefetched.
    pub(super) phase: PhaseName,
}

impl Source<'_> {
    /// Memory of a whole chunk.
    fn whole(&self, c: usize) -> Tensor {
        let elements = self.map.whole(c).len();
        self.device.alloc(self.map.types[c], [elements], Category::Communication, "gathered_chunk").moved()
    }
}

impl ParameterChunks {
    pub(super) fn new(device: &Device, map: &Map, stage: ZeroStage) -> ParameterChunks {
        let is_away = |c: usize| map.residence.of(c).parameters != Memory::Device;
        let alloc = |c: usize, elements: usize| {
            device.alloc(map.types[c], [elements], Category::Parameters, "parameter_chunk").moved()
        };
        let chunk = |c: usize| match stage {
            ZeroStage::Three if is_away(c) => Chunk::Away,
            _ if is_away(c) => panic!("only shards of stage 3 lie outside of device memory"),
            ZeroStage::Three if !map.residence.is_whole(c) => Chunk::Sharded(alloc(c, map.shard(c).len())),
            _ => Chunk::Whole(alloc(c, map.whole(c).len())),
        };
        ParameterChunks { chunks: (0..map.chunk_count()).map(chunk).collect(), phase: PhaseName::Init }
    }

    pub(super) fn acquire(
        &mut self,
        mut from: Source,
        prefetch: &mut Prefetch,
        block: usize,
        overlap: bool,
    ) -> Result<(), CollectiveError> {
        let chunks = &from.map.chunks[block];
        for c in chunks {
            prefetch.advance(*c as u32);
            self.fetch(&mut from, *c);
        }
        for c in prefetch.wanted() {
            self.fetch(&mut from, c as usize);
            if !overlap {
                self.receive(&mut from, c as usize)?;
            }
        }
        chunks.iter().try_for_each(|c| self.receive(&mut from, *c))
    }

    /// Starts the all_gather of a sharded chunk, or the copy of a shard that is not in device memory.
    fn fetch(&mut self, from: &mut Source, c: usize) {
        let slot = &mut self.chunks[c];
        *slot = match std::mem::replace(slot, Chunk::Moving) {
            Chunk::Sharded(shard) => Chunk::Gathering(from.group.all_gather(shard, from.whole(c))),
            Chunk::Away => Chunk::Arriving(from.states.fetch_parameters(c)),
            here => here,
        };
    }

    /// Waits until a chunk that was fetched has arrived.
    fn receive(&mut self, from: &mut Source, c: usize) -> Result<(), CollectiveError> {
        let slot = &mut self.chunks[c];
        *slot = match std::mem::replace(slot, Chunk::Moving) {
            Chunk::Arriving(arriving) => {
                let shard = from.states.receive_parameters(c, arriving)?.moved();
                match from.group.world_size() {
                    1 => Chunk::Copied(shard),
                    _ => Chunk::Copied(from.group.all_gather(shard, from.whole(c)).wait()?.1),
                }
            }
            here => here,
        };
        self.arrive(c)
    }

    /// Waits until the collective of a chunk is over.
    fn arrive(&mut self, c: usize) -> Result<(), CollectiveError> {
        let slot = &mut self.chunks[c];
        *slot = match std::mem::replace(slot, Chunk::Moving) {
            Chunk::Publishing(pending) => Chunk::Whole(pending.wait()?),
            Chunk::Gathering(pending) => {
                let (shard, whole) = pending.wait()?;
                Chunk::Gathered { shard, whole }
            }
            here => here,
        };
        Ok(())
    }

    pub(super) fn release(&mut self, map: &Map, prefetch: &Prefetch, block: usize) {
        for c in &map.chunks[block] {
            if !prefetch.keeps(*c as u32) {
                self.give_up(*c);
            }
        }
    }

    fn give_up(&mut self, c: usize) {
        let slot = &mut self.chunks[c];
        *slot = match std::mem::replace(slot, Chunk::Moving) {
            Chunk::Gathered { shard, .. } => Chunk::Sharded(shard),
            Chunk::Copied(_) => Chunk::Away,
            here => here,
        };
    }

    pub(super) fn settle(&mut self) -> Result<(), CollectiveError> {
        (0..self.chunks.len()).try_for_each(|c| {
            if matches!(self.chunks[c], Chunk::Publishing(_)) { self.arrive(c) } else { Ok(()) }
        })
    }

    pub(super) fn views(&self, map: &Map, block: usize) -> Vec<View<'_>> {
        let view = |p: &usize| {
            let c = map.layout.placed[*p].chunk;
            let chunk = match &self.chunks[c] {
                Chunk::Whole(whole) | Chunk::Gathered { whole, .. } | Chunk::Copied(whole) => whole,
                _ => panic!("block {block} was not acquired"),
            };
            chunk.view().typed(map.types[c]).range(map.range(*p)).reshape(map.shapes[*p])
        };
        map.uses[block].iter().map(view).collect()
    }

    /// This rank's stored part of a chunk, and the elements of the chunk that it holds.
    pub(super) fn resident(&self, map: &Map, c: usize) -> (View<'_>, Range<usize>) {
        let (tensor, range) = match &self.chunks[c] {
            Chunk::Whole(whole) => (whole, map.whole(c)),
            Chunk::Sharded(shard) | Chunk::Gathered { shard, .. } => (shard, map.shard(c)),
            _ => panic!("chunk {c} is still being received; call settle first"),
        };
        (tensor.view().typed(map.types[c]), range)
    }

    /// The mutable form of [`ParameterChunks::resident`]. Gathered copies must not exist.
    pub(super) fn resident_mut(&mut self, map: &Map, c: usize) -> (ViewMut<'_>, Range<usize>) {
        let (tensor, range) = match &mut self.chunks[c] {
            Chunk::Whole(whole) => (whole, map.whole(c)),
            Chunk::Sharded(shard) => (shard, map.shard(c)),
            _ => panic!("chunk {c} is still being received or gathered; it cannot be written"),
        };
        (tensor.view_mut().typed(map.types[c]), range)
    }

    /// Elements `range` of a chunk, of what this rank stores of it.
    pub(super) fn part(&self, map: &Map, c: usize, range: &Range<usize>) -> View<'_> {
        let (here, resident) = self.resident(map, c);
        here.range(range.start - resident.start..range.end - resident.start)
    }

    /// The mutable form of [`ParameterChunks::part`].
    pub(super) fn part_mut(&mut self, map: &Map, c: usize, range: &Range<usize>) -> ViewMut<'_> {
        let (here, resident) = self.resident_mut(map, c);
        here.range(range.start - resident.start..range.end - resident.start)
    }

    /// Checks that no copy of a chunk exists whose parameters lie elsewhere, before they are updated there.
    pub(super) fn assert_away(&self, c: usize) {
        assert!(
            matches!(self.chunks[c], Chunk::Away),
            "a copy of chunk {c} would keep parameters of the last step"
        );
    }

    /// Sends this rank's updated part of a whole chunk to the others and receives theirs.
    pub(super) fn publish(
        &mut self,
        group: &dyn Group,
        c: usize,
        overlap: bool,
    ) -> Result<(), CollectiveError> {
        let slot = &mut self.chunks[c];
        *slot = match std::mem::replace(slot, Chunk::Moving) {
            Chunk::Whole(whole) => Chunk::Publishing(group.all_gather_in_place(whole)),
            here => here,
        };
        if overlap { Ok(()) } else { self.arrive(c) }
    }
}
