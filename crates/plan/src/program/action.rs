//! One action of a program. It takes 24 bytes, so that a step of 10^5 actions takes 2.4 MB.

use super::demand::{BlockRun, Pass};

/// Number of a buffer in its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Buffer(pub u32);

/// Name of work in flight, from its start to its wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token(u32);

/// Added to a chunk number in the token of its publication.
const PUBLISHED: u32 = 1 << 31;

/// Added to the number of a tile in the token of its delayed update.
const UPDATED: u32 = 1 << 30;

impl Token {
    /// The `number`-th work of a phase, which is over before the phase ends.
    pub fn of_phase(number: u32) -> Token {
        assert!(number < UPDATED, "{number} works in flight");
        Token(number)
    }

    /// The publication of a chunk, which may outlive its phase.
    pub fn published(chunk: usize) -> Token {
        Token(PUBLISHED | chunk as u32)
    }

    /// The delayed update of a tile, counted over the stages of the rank, which outlives its phase.
    pub fn updated(tile: usize) -> Token {
        Token(UPDATED | tile as u32)
    }

    /// The chunk whose publication this is; None for other work.
    pub fn published_chunk(self) -> Option<u32> {
        (self.0 >= PUBLISHED).then_some(self.0 & !PUBLISHED)
    }

    /// The tile whose delayed update this is; None for other work.
    pub fn updated_tile(self) -> Option<u32> {
        (self.0 & (PUBLISHED | UPDATED) == UPDATED).then_some(self.0 & !UPDATED)
    }

    /// The number of work that ends in its phase.
    pub fn number(self) -> u32 {
        self.0
    }
}

/// A fact that all ranks of a job share: it may guard actions, since all of them skip the same ones. What one rank decides alone guards
/// nothing; it masks arithmetic ([`Op::Mask`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The step is applied: its loss and norm are finite.
    Apply,
    /// A delayed update runs as the phase begins.
    Pending,
}

/// The facts without which an action is skipped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Guard {
    /// Whether the step is applied; None where it does not matter.
    pub apply: Option<bool>,
    /// Whether a delayed update runs as the phase begins; None where it does not matter.
    pub pending: Option<bool>,
}

impl Guard {
    /// Returns whether the action is never skipped.
    pub fn is_open(self) -> bool {
        self == Guard::default()
    }
}

/// Number of the place in the source that made an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SiteNumber(pub u16);

/// Operands of an action: buffers that it reads, then buffers that it writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The first one in [`Program::operands`](super::Program::operands).
    pub start: u32,
    /// Number of buffers that are read.
    pub reads: u16,
    /// Number of buffers that are written.
    pub writes: u16,
}

/// Ranks over which sums of numbers run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SumGroup {
    /// The replicas of this rank's part of the model.
    Data,
    /// The tensor-parallel ranks that have the same part of the model.
    Tensor,
    /// The ranks of a pipeline that have a copy of a parameter.
    Tie,
    /// All ranks.
    World,
}

impl SumGroup {
    /// Name of the process group.
    pub const fn name(self) -> &'static str {
        match self {
            SumGroup::Data => "data",
            SumGroup::Tensor => "tensor",
            SumGroup::Tie => "tie",
            SumGroup::World => "world",
        }
    }
}

/// Work that runs beside later actions, until it is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Each rank of the data axis gets the parts of all; in place where both buffers are one.
    AllGather {
        /// This rank's part.
        from: Buffer,
        /// All parts.
        into: Buffer,
    },
    /// This rank gets its part of the sum over the data axis; in place where both buffers are one.
    ReduceScatter {
        /// Terms of the whole chunk.
        from: Buffer,
        /// This rank's part of the sum.
        into: Buffer,
        /// True if the sum is added to what is there.
        accumulates: bool,
    },
    /// Each rank gets the sum of the whole buffer.
    AllReduce {
        /// The ranks.
        group: SumGroup,
        /// Terms, and then their sum.
        buffer: Buffer,
    },
    /// Copies elements of a row of buffers, one behind another, from another memory: as many as the target has, from its start on.
    FromTiles {
        /// Number of buffers of the row.
        tiles: u16,
        /// The first of them.
        from: Buffer,
        /// The elements.
        into: Buffer,
    },
    /// The host updates a tile in its memory.
    HostUpdate {
        /// The summed gradient and its factor, which it reads; optimizer states, master weights and parameters, which it writes.
        operands: Span,
    },
    /// Copies a buffer to a row of buffers in another memory, from the start that it says on.
    ToTiles {
        /// Number of buffers of the row.
        tiles: u16,
        /// True if only this rank's part of the buffer of a whole chunk is copied.
        is_part: bool,
        /// The elements.
        from: Buffer,
        /// The first of them.
        into: Buffer,
    },
}

impl Work {
    /// Returns whether several ranks take part.
    pub fn is_collective(self) -> bool {
        matches!(self, Work::AllGather { .. } | Work::ReduceScatter { .. } | Work::AllReduce { .. })
    }
}

/// Operation of an action. Those that are no start run on the compute stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Allocates a buffer; its contents are whatever was there.
    Take(Buffer),
    /// Frees a buffer.
    Free(Buffer),
    /// Runs a block.
    Run {
        /// The pass.
        pass: Pass,
        /// Number of the pipeline stage.
        stage: u16,
        /// Number of the block in its stage.
        block: u16,
        /// Number of the micro-batch.
        micro_batch: u32,
        /// Buffers that it reads and writes.
        operands: Span,
    },
    /// The rank goes on with other things than chunks: messages between stages behind a block run, or numbers of all gradients.
    Pause,
    /// Sets the gradients of a chunk to zero that no layer has written; the next layer overwrites all.
    Clear(Buffer),
    /// Writes a gradient or a sum in another element type.
    Convert {
        /// Source.
        from: Buffer,
        /// Target, which is overwritten.
        into: Buffer,
    },
    /// Adds a rounded sum to the sum of earlier micro-batches, or the terms of one stage to those of another.
    Add {
        /// The term.
        from: Buffer,
        /// The sum.
        into: Buffer,
    },
    /// Copies this rank's part, or a tile of it, between buffers on the device.
    CopyPart {
        /// Source.
        from: Buffer,
        /// Target, which is overwritten.
        into: Buffer,
    },
    /// Copies terms from a summed gradient to a buffer in which they are summed over another axis.
    Pack {
        /// The summed gradient.
        from: Buffer,
        /// The terms.
        into: Buffer,
    },
    /// Copies sums over another axis back to the gradient.
    Unpack {
        /// The sums.
        from: Buffer,
        /// The summed gradient.
        into: Buffer,
    },
    /// Looks for elements of a chunk's summed gradient that are not finite.
    Look(Buffer),
    /// Writes the sums of squares of this rank's part of a chunk's summed gradient.
    Count {
        /// The summed gradient.
        from: Buffer,
        /// Sums of squares of the blocks of a stage.
        into: Buffer,
    },
    /// Adds the squares of each parameter of a stage that this rank counts.
    Total {
        /// Sums of squares of the blocks of a stage, over the data axis.
        from: Buffer,
        /// Sums of squares of all parameters.
        into: Buffer,
    },
    /// Computes norm and clipping factor from the squares of all parameters.
    Norm(Buffer),
    /// Writes the factor by which updates multiply gradients: 1, or what clips them and removes the loss scale.
    Factor(Buffer),
    /// Exchanges the contents of two buffers that are alike.
    Swap(Buffer, Buffer),
    /// Counts the elements of a chunk's summed gradient that are not finite, by parameter.
    CountNotFinite {
        /// The summed gradient.
        from: Buffer,
        /// The counts.
        into: Buffer,
    },
    /// The host reads such counts: from the first gradient on that is not finite, the updates of this rank change nothing in the step.
    /// They are issued all the same.
    Mask(Buffer),
    /// Reads loss and norm, which decide. It is the only place where the host waits for numbers.
    Fetch,
    /// Updates what this rank owns of a chunk, or the tile of it that one of the buffers has.
    Update {
        /// The summed gradient.
        gradient: Buffer,
        /// Parameters.
        parameters: Buffer,
        /// Within backward, the factor of gradients; memory for scaled gradients, if it needs any. Optimizer states and master weights,
        /// which it writes.
        states: Span,
    },
    /// Writes the parameters back from the master weights, where gradients have taken their place.
    Restore {
        /// Master weights.
        from: Buffer,
        /// Parameters.
        into: Buffer,
    },
    /// Begins work.
    Start {
        /// Its name.
        token: Token,
        /// The work.
        work: Work,
    },
    /// Waits for work that was started.
    Wait(Token),
    /// Waits for work that this phase or an earlier one may have started, if it is still in flight.
    Land(Token),
}

/// One action of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Action {
    /// The operation.
    pub op: Op,
    /// The facts without which it is skipped.
    pub when: Guard,
    /// The place in the source that made it.
    pub made_by: SiteNumber,
}

const _: () = assert!(size_of::<Action>() <= 24);

impl Op {
    /// The block run, if the operation is one.
    pub fn block_run(self) -> Option<BlockRun> {
        let Op::Run { pass, stage, block, micro_batch, .. } = self else { return None };
        Some(BlockRun { stage: stage.into(), block: block.into(), pass, micro_batch: micro_batch as usize })
    }
}
