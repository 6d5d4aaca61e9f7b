//! The pass of parameters: makes the chunks of a block readable before it runs, and frees gathered ones behind it.

use crate::trace::Memory;

use super::action::{Buffer, Op, Token, Work};
use super::builder::Builder;
use super::chunks::{Policies, StageChunks};
use super::demand::BlockRun;
use super::lane::Lane;
use super::list::{BufferSpec, Extent, Role};
use super::visits::{Moving, arrive, bring};

/// A chunk of parameters in a phase.
#[derive(Clone, Copy)]
enum Chunk {
    /// Stored whole; a publication of an earlier phase may still write it.
    Stored,
    /// Stored whole, and nothing writes it.
    Landed,
    /// Stored in parts, on the device.
    Parted,
    /// Being gathered.
    Gathering(Token),
    /// Gathered.
    Gathered,
    /// This rank's part is outside of device memory.
    Away,
    /// This rank's part is on its way to the device.
    Arriving(Moving),
    /// This rank's part has arrived, and it is the whole chunk.
    Arrived(Buffer),
}

/// The parameters of a stage in a phase.
pub(super) struct ParameterPass<'a> {
    stage: &'a StageChunks,
    policies: &'a Policies,
    lane: Lane,
    chunks: Vec<Chunk>,
}

impl<'a> ParameterPass<'a> {
    /// `runs`: the block runs of the stage, in order.
    pub(super) fn new(
        stage: &'a StageChunks,
        policies: &'a Policies,
        runs: impl Iterator<Item = BlockRun>,
    ) -> ParameterPass<'a> {
        let reading = runs.filter(|run| run.pass.reads_parameters());
        let order = reading.flat_map(|run| stage.uses[run.block].iter().map(|c| *c as u32)).collect();
        let chunk = |c: usize| match stage.is_gathered(policies.stage, c) {
            true if stage.chunks[c].parameters != Memory::Device => Chunk::Away,
            true => Chunk::Parted,
            false if policies.outlives(stage, c) => Chunk::Stored,
            false => Chunk::Landed,
        };
        let chunks = (0..stage.chunks.len()).map(chunk).collect();
        ParameterPass { stage, policies, lane: Lane::new(order, policies.prefetch, 0), chunks }
    }

    /// The buffer in which blocks read a chunk.
    pub(super) fn read(&self, list: &Builder, c: usize) -> Buffer {
        let of = self.stage.first_chunk + c;
        match self.chunks[c] {
            Chunk::Stored | Chunk::Landed => list.buffer(Role::Parameters, of),
            Chunk::Arrived(visitor) => visitor,
            _ => list.buffer(Role::Gathered, of),
        }
    }

    /// Before a block runs.
    pub(super) fn before(&mut self, list: &mut Builder, run: BlockRun) {
        if !run.pass.reads_parameters() {
            return;
        }
        let stage = self.stage;
        for c in &stage.uses[run.block] {
            self.lane.advance();
            self.fetch(list, *c);
        }
        for c in self.lane.ahead() {
            self.fetch(list, c);
            if !self.policies.overlap {
                self.receive(list, c);
            }
        }
        stage.uses[run.block].iter().for_each(|c| self.receive(list, *c));
    }

    /// Behind a block: gathered chunks that are not used next are freed.
    pub(super) fn behind(&mut self, list: &mut Builder, run: BlockRun) {
        if !run.pass.reads_parameters() {
            return;
        }
        for c in &self.stage.uses[run.block] {
            let (buffer, without) = match self.chunks[*c] {
                _ if self.lane.keeps(*c) => continue,
                Chunk::Gathered if self.stage.chunks[*c].parameters != Memory::Device => {
                    (list.buffer(Role::Gathered, self.stage.first_chunk + c), Chunk::Away)
                }
                Chunk::Gathered => (list.buffer(Role::Gathered, self.stage.first_chunk + c), Chunk::Parted),
                Chunk::Arrived(visitor) => (visitor, Chunk::Away),
                _ => continue,
            };
            list.emit(Op::Free(buffer));
            self.chunks[*c] = without;
        }
    }

    fn fetch(&mut self, list: &mut Builder, c: usize) {
        let of = self.stage.first_chunk + c;
        self.chunks[c] = match self.chunks[c] {
            Chunk::Parted => {
                let from = list.buffer(Role::Parameters, of);
                Chunk::Gathering(self.gather(list, c, from))
            }
            Chunk::Away => {
                let home = list.row(Role::Parameters, of);
                let elements = self.policies.part(self.stage.chunks[c].elements);
                let part = BufferSpec { extent: Extent::Part, elements, ..*list.spec(home.first) };
                Chunk::Arriving(bring(list, self.policies, home, part))
            }
            here => here,
        };
    }

    /// Takes memory of a whole chunk, and starts to gather it.
    #[track_caller]
    fn gather(&self, list: &mut Builder, c: usize, from: Buffer) -> Token {
        let (of, spec) = (self.stage.first_chunk + c, &self.stage.chunks[c]);
        let (elements, dtype) = (spec.elements, spec.dtype);
        let into = list.take(Role::Gathered, of, elements, (dtype, "gathered_chunk"));
        list.start(Work::AllGather { from, into })
    }

    fn receive(&mut self, list: &mut Builder, c: usize) {
        self.chunks[c] = match self.chunks[c] {
            Chunk::Gathering(token) => {
                list.emit(Op::Wait(token));
                Chunk::Gathered
            }
            Chunk::Arriving(moving) => {
                let visitor = arrive(list, moving);
                if self.policies.data_ranks == 1 {
                    Chunk::Arrived(visitor)
                } else {
                    let token = self.gather(list, c, visitor);
                    list.emit(Op::Wait(token));
                    list.emit(Op::Free(visitor));
                    Chunk::Gathered
                }
            }
            Chunk::Stored => {
                list.emit(Op::Land(Token::published(self.stage.first_chunk + c)));
                Chunk::Landed
            }
            here => here,
        };
    }
}

impl Policies {
    /// Returns whether the publication of a chunk may outlive its phase.
    pub(super) fn outlives(&self, stage: &StageChunks, c: usize) -> bool {
        self.overlap && self.host_addressable && stage.is_published(self.stage, c)
    }
}

/// Sends this rank's updated part of a chunk to the others, where they store all of it.
pub(super) fn publish(list: &mut Builder, policies: &Policies, stage: &StageChunks, c: usize) {
    if !stage.is_published(policies.stage, c) {
        return;
    }
    let of = stage.first_chunk + c;
    let (token, whole) = (Token::published(of), list.buffer(Role::Parameters, of));
    list.emit(Op::Start { token, work: Work::AllGather { from: whole, into: whole } });
    if !policies.overlap {
        list.emit(Op::Wait(token));
    }
}
