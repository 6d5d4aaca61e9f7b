//! Parameters in chunks: whole (stages 0 to 2) or gathered when a block needs them (stage 3).

use phalanx_collectives::{CollectiveError, Group, Pending};
use phalanx_plan::Stage;
use phalanx_tensor::{Category, DType, Device, Tensor, View, ViewMut};
use phalanx_trace::PhaseName;

use super::Map;
use super::prefetch::Prefetch;

/// One chunk of parameters.
enum Chunk {
    /// All of it, on every rank.
    Whole(Tensor),
    /// All of it, the parts of others arriving after an update.
    Publishing(Pending<Tensor>),
    /// This rank's part.
    Sharded(Tensor),
    /// This rank's part, and the whole arriving.
    Gathering(Pending<(Tensor, Tensor)>),
    /// This rank's part and the whole.
    Gathered { shard: Tensor, whole: Tensor },
    /// Between two states, within one function.
    Moving,
}

pub(super) struct ParameterChunks {
    chunks: Vec<Chunk>,
    /// Element type, here and on the way.
    compute: DType,
    /// Phase whose order of uses counts.
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

    /// Starts the gather of a chunk that is only here in part.
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

    /// Waits until a chunk on its way is here.
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

    /// What is resident of a chunk, and which elements of the chunk that is.
    pub(super) fn resident(&self, map: &Map, c: usize) -> (View<'_>, std::ops::Range<usize>) {
        match &self.chunks[c] {
            Chunk::Whole(whole) => (whole.view(), map.whole(c)),
            Chunk::Sharded(shard) | Chunk::Gathered { shard, .. } => (shard.view(), map.shard(c)),
            _ => panic!("chunk {c} is on its way; settle first"),
        }
    }

    /// As [`ParameterChunks::resident`], to write. Gathered copies must not exist.
    pub(super) fn resident_mut(&mut self, map: &Map, c: usize) -> (ViewMut<'_>, std::ops::Range<usize>) {
        match &mut self.chunks[c] {
            Chunk::Whole(whole) => (whole.view_mut(), map.whole(c)),
            Chunk::Sharded(shard) => (shard.view_mut(), map.shard(c)),
            _ => panic!("chunk {c} is on its way or gathered; it cannot be written"),
        }
    }

    /// After the update of this rank's part of a whole chunk: everyone gets everyone's part.
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
