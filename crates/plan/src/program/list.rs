//! The program of one phase of a rank, and its buffers.

use std::hash::{Hash, Hasher};

use crate::trace::{Category, DType, Memory, PhaseName, Site};

use super::action::{Action, Buffer, Op, Span, SumGroup, Work};

/// Number of the factor of updates within backward: 1.
pub const WITHIN_BACKWARD: u8 = 3;

/// Contents of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// Stored parameters of a chunk.
    Parameters,
    /// A whole chunk of parameters, gathered for its uses.
    Gathered,
    /// Gradients of a whole chunk, which layers write.
    Gradient,
    /// This rank's part of a chunk's summed gradient.
    Sum,
    /// Gradients of a whole chunk of a micro-batch, or the part of their sum, which wait for their neighbour in a tree; by number.
    Partial(u16),
    /// Gradients of a whole chunk in the type in which they are communicated.
    Rounded,
    /// Gradients of a stage that are terms of sums over the tensor axis.
    Terms,
    /// This rank's part of the gradient of a parameter that several stages have.
    Tied,
    /// A piece of a sum over another axis than data, on its way to the memory in which gradients stay.
    Summed,
    /// An optimizer state of a chunk, by its number.
    State(u16),
    /// Master weights of a chunk.
    Master,
    /// The other place of a chunk's stored gradients: of the delayed update that runs.
    Twin,
    /// Parameters of a chunk that a delayed update has written, in host memory.
    Updated,
    /// Scaled gradients of a parameter that is updated as a whole.
    Scaled,
    /// The factor of gradients: on its way to the host, in host memory (0); of the delayed update that starts next (1) and of the one that
    /// runs (2); on the device, within backward, 1 ([`WITHIN_BACKWARD`]).
    Factor(u8),
    /// Numbers of elements that are not finite, of the gradients of a chunk.
    NotFinite,
    /// Sums of squares of the blocks of a stage.
    Squares,
    /// Sums of squares of all parameters.
    Norms,
}

impl Role {
    /// Its letter in texts.
    pub const fn letter(self) -> char {
        match self {
            Role::Parameters => 'p',
            Role::Gathered => 'P',
            Role::Gradient => 'g',
            Role::Sum => 's',
            Role::Partial(_) => 'h',
            Role::Rounded => 'c',
            Role::Terms => 'T',
            Role::Tied => 't',
            Role::Summed => 'u',
            Role::State(_) => 'o',
            Role::Master => 'w',
            Role::Twin => 'S',
            Role::Updated => 'r',
            Role::Scaled => 'x',
            Role::Factor(_) => 'f',
            Role::NotFinite => 'i',
            Role::Squares => 'q',
            Role::Norms => 'n',
        }
    }
}

/// The elements of a chunk that a buffer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Extent {
    /// All of them.
    Whole,
    /// Those of this rank's part.
    Part,
    /// Those of a tile of what this rank updates, or of a piece of it.
    Tile(u32),
}

/// A place of contents on their way between the memory in which they stay and the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stop {
    /// Their own place, or the only one.
    Home,
    /// On the device, as a visitor.
    Device,
    /// In host memory, between disk and device.
    Passage,
}

/// One buffer of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferSpec {
    /// Contents.
    pub role: Role,
    /// The chunk, counted over the stages of the rank; of terms and squares the stage, of norms 0.
    pub of: usize,
    /// The elements of the chunk that it has.
    pub extent: Extent,
    /// The place of its contents on their way.
    pub stop: Stop,
    /// The first of its elements in the row of buffers where they stay; 0 for others.
    pub start: u64,
    /// Number of its elements.
    pub elements: u64,
    /// Its memory.
    pub memory: Memory,
    /// Element type.
    pub dtype: DType,
    /// Purpose of its bytes.
    pub category: Category,
    /// Name for people.
    pub name: &'static str,
    /// True if it is allocated once for the whole run; else the program takes and frees it.
    pub is_resident: bool,
}

impl BufferSpec {
    /// Bytes.
    pub fn bytes(&self) -> u64 {
        self.dtype.bytes_of(self.elements as usize) as u64
    }
}

/// The actions of a rank on its chunks in one phase, in the order in which they are issued.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// The phase.
    pub phase: PhaseName,
    /// Buffers; the resident ones come first, in the same order in each phase of a rank.
    pub buffers: Vec<BufferSpec>,
    /// The number of each buffer.
    pub numbers: Vec<Buffer>,
    /// Operands of block runs and updates.
    pub operands: Vec<Buffer>,
    /// Actions.
    pub actions: Vec<Action>,
    /// Places in the source that made actions.
    pub sites: Vec<Site>,
    /// For each stage of the rank: its number, and that of its first block in the whole network.
    pub first_blocks: Vec<(usize, usize)>,
    /// Largest number of gathers of parameters and of reductions of gradients in flight.
    pub in_flight_max: [usize; 2],
}

impl Program {
    /// The place in the source that made an action.
    pub fn made_by(&self, action: &Action) -> Site {
        self.sites[usize::from(action.made_by.0)]
    }

    /// A buffer.
    pub fn spec(&self, buffer: Buffer) -> &BufferSpec {
        &self.buffers[buffer.0 as usize]
    }

    /// Number of resident buffers.
    pub fn residents(&self) -> usize {
        self.buffers.iter().take_while(|buffer| buffer.is_resident).count()
    }

    /// The buffers that a block run reads, and those that it writes.
    pub fn operands(&self, span: Span) -> (&[Buffer], &[Buffer]) {
        let Span { start, reads, writes } = span;
        let (start, reads) = (start as usize, usize::from(reads));
        self.operands[start..start + reads + usize::from(writes)].split_at(reads)
    }

    /// The buffers that a work reads and does not write.
    pub fn reads(&self, work: Work) -> &[Buffer] {
        match work {
            Work::AllGather { from, into } | Work::ReduceScatter { from, into, .. } if from == into => &[],
            Work::AllGather { from, .. } | Work::ReduceScatter { from, .. } | Work::ToTiles { from, .. } => {
                self.row(from, 1)
            }
            Work::AllReduce { .. } => &[],
            Work::FromTiles { tiles, from, .. } => self.row(from, tiles),
            Work::HostUpdate { operands } => self.operands(operands).0,
        }
    }

    /// The buffers that a work writes.
    pub fn writes(&self, work: Work) -> &[Buffer] {
        match work {
            Work::AllGather { into, .. }
            | Work::ReduceScatter { into, .. }
            | Work::FromTiles { into, .. } => self.row(into, 1),
            Work::AllReduce { buffer, .. } => self.row(buffer, 1),
            Work::ToTiles { into, tiles, .. } => self.row(into, tiles),
            Work::HostUpdate { operands } => self.operands(operands).1,
        }
    }

    /// Numbers of buffers, one behind another.
    fn row(&self, first: Buffer, tiles: u16) -> &[Buffer] {
        &self.numbers[first.0 as usize..first.0 as usize + usize::from(tiles)]
    }

    /// A hash of the collectives over data and over all ranks, which all ranks of a pipeline coordinate start alike. Those over other
    /// axes are left out: ranks have other parts of what they sum there.
    pub fn agreement(&self, state: &mut impl Hasher) {
        for (work, word) in self.named_collectives() {
            if !matches!(work, Work::AllReduce { group: SumGroup::Tensor | SumGroup::Tie, .. }) {
                word.hash(state);
            }
        }
    }

    /// The actions that ranks of a group must have in common, as words.
    pub fn collectives(&self) -> impl Iterator<Item = String> + '_ {
        self.named_collectives().map(|(_, word)| word)
    }

    fn named_collectives(&self) -> impl Iterator<Item = (Work, String)> + '_ {
        self.actions.iter().filter_map(|action| {
            let Op::Start { work, .. } = action.op else { return None };
            if !work.is_collective() {
                return None;
            }
            let spec = self.spec(self.writes(work)[0]);
            let (guard, text) = (self.guard(action), self.work(work));
            Some((work, format!("{guard}{text} of {} {}", spec.elements, spec.dtype.name())))
        })
    }
}
