//! Parameters in chunks: stored whole (stages 0 to 2), or gathered when a block uses them (stage 3).

use phalanx_collectives::{CollectiveError, Group, Pending};
use phalanx_plan::Stage;
use phalanx_tensor::{Category, DType, Device, Tensor, View, ViewMut};
use phalanx_trace::PhaseName;

use super::Map;
use super::prefetch::Prefetch;

/// One chunk of parameters.
enum Chunk {
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
    /// Placeholder while a function changes the state.
    Moving,
}

pub(super) struct ParameterChunks {
    chunks: Vec<Chunk>,
    /// Element type, in memory and in collectives.
    compute: DType,
    /// The current phase: its order of uses is prefetched.
    pub(super) phase: PhaseName,
}

impl ParameterChunks {
    pub(super) fn new(device: &Device, map: &Map, stage: Stage, compute: DType) -> ParameterChunks {
        let alloc =
            |elements: usize| device.alloc(compute, [elements], Category::Parameters, "parameter_chunk");
        let chunk = |c: usize| match stage {
            Stage::Three => Chunk::Sharded(alloc(map.shard(c).len())),
            _ => Chunk::Whole(alloc(map.whole(c).len())),
        };
        ParameterChunks {
            chunks: (0..map.chunk_count()).map(chunk).collect(),
            compute,
            phase: PhaseName::Init,
        }
    }

    pub(super) fn acquire(
        &mut self,
        device: &Device,
        group: &dyn Group,
        map: &Map,
        prefetch: &mut Prefetch,
        block: usize,
        overlap: bool,
    ) -> Result<(), CollectiveError> {
        for c in &map.chunks[block] {
            prefetch.advance(*c as u32);
            self.fetch(device, group, map, *c);
        }
        for c in prefetch.wanted() {
            self.fetch(device, group, map, c as usize);
            if !overlap {
                self.arrive(c as usize)?;
            }
        }
        map.chunks[block].iter().try_for_each(|c| self.arrive(*c))
    }

    /// Starts the all_gather of a sharded chunk.
    fn fetch(&mut self, device: &Device, group: &dyn Group, map: &Map, c: usize) {
        let slot = &mut self.chunks[c];
        *slot = match std::mem::replace(slot, Chunk::Moving) {
            Chunk::Sharded(shard) => {
                let elements = map.whole(c).len();
                let whole = device.alloc(self.compute, [elements], Category::Communication, "gathered_chunk");
                Chunk::Gathering(group.all_gather(shard, whole))
            }
            here => here,
        };
    }

    /// Waits until a chunk has arrived.
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
            let chunk = match &self.chunks[map.layout.placed[*p].chunk] {
                Chunk::Whole(whole) | Chunk::Gathered { whole, .. } => whole,
                _ => panic!("block {block} was not acquired"),
            };
            chunk.view().range(map.range(*p)).reshape(map.shapes[*p])
        };
        map.uses[block].iter().map(view).collect()
    }

    /// What this rank stores of a chunk, and which elements of the chunk these are.
    pub(super) fn resident(&self, map: &Map, c: usize) -> (View<'_>, std::ops::Range<usize>) {
        match &self.chunks[c] {
            Chunk::Whole(whole) => (whole.view(), map.whole(c)),
            Chunk::Sharded(shard) | Chunk::Gathered { shard, .. } => (shard.view(), map.shard(c)),
            _ => panic!("chunk {c} is still being received; call settle first"),
        }
    }

    /// The mutable form of [`ParameterChunks::resident`]. Gathered copies must not exist.
    pub(super) fn resident_mut(&mut self, map: &Map, c: usize) -> (ViewMut<'_>, std::ops::Range<usize>) {
        match &mut self.chunks[c] {
            Chunk::Whole(whole) => (whole.view_mut(), map.whole(c)),
            Chunk::Sharded(shard) => (shard.view_mut(), map.shard(c)),
            _ => panic!("chunk {c} is still being received or gathered; it cannot be written"),
        }
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
