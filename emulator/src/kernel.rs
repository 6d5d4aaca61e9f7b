//! A kernel as the executor runs it: instructions with register slots in place of names.

use std::collections::HashMap;
use std::sync::Arc;

use crate::alu::{Run, Slots};
use crate::ptx::{SourceLine, StateSpace};
use crate::registers::Class;

/// A kernel, ready to run.
pub struct Kernel {
    /// Its name.
    pub name: String,
    /// Offset and size of each parameter, in bytes.
    pub parameters: Vec<(usize, usize)>,
    /// Size of all parameters.
    pub parameter_bytes: usize,
    /// Shared memory that its variables take.
    pub static_shared: usize,
    /// Local memory of a thread.
    pub local_bytes: usize,
    /// The most threads in a block, 0 if the text does not say.
    pub max_threads: u32,
    /// Instructions.
    pub code: Vec<Instruction>,
    /// For each instruction, its line in the PTX text and in the source.
    pub lines: Vec<(u32, SourceLine)>,
    /// Source files by number.
    pub files: Arc<HashMap<u32, String>>,
    /// How many registers there are of each class.
    pub registers: RegisterCounts,
    /// Slots that hold constants of 32 bits.
    pub words: Vec<(u16, u32)>,
    /// Slots that hold constants of 64 bits.
    pub longs: Vec<(u16, u64)>,
    /// Predicates that are set in all lanes.
    pub set_predicates: Vec<u16>,
    /// Slots that hold special registers.
    pub specials: Vec<(u16, Special)>,
}

/// How many registers there are of each class.
#[derive(Clone, Copy, Debug, Default)]
pub struct RegisterCounts {
    /// Registers of at most 32 bits.
    pub words: usize,
    /// Registers of 64 bits.
    pub longs: usize,
    /// Predicates.
    pub predicates: usize,
}

/// A special register of 32 bits, which does not change while a warp runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Special {
    /// Place of the thread in its block, by axis.
    Thread(u8),
    /// Size of the block.
    BlockSize(u8),
    /// Place of the block in the grid.
    Block(u8),
    /// Size of the grid.
    GridSize(u8),
    /// Place of the thread in its warp.
    Lane,
    /// Place of the warp in its block.
    Warp,
    /// How many warps the block has.
    WarpCount,
    /// The multiprocessor: always 0.
    Multiprocessor,
    /// Bits of this lane, of those below, and so on.
    LaneMask(MaskOf),
    /// Dynamic shared memory in bytes.
    DynamicShared,
}

/// Which lanes a mask names, compared with the lane that reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum MaskOf {
    Equal,
    Below,
    UpTo,
    Above,
    From,
}

/// An instruction with its guard.
pub struct Instruction {
    /// The predicate that lanes need.
    pub guard: Option<Guard>,
    /// What it does.
    pub operation: Operation,
}

/// A predicate that lets lanes pass.
#[derive(Clone, Copy)]
pub struct Guard {
    /// Slot of the predicate.
    pub slot: u16,
    /// Whether lanes pass where it is not set.
    pub negated: bool,
}

/// A register of any class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Register {
    /// Its file.
    pub class: Class,
    /// Its row.
    pub slot: u16,
}

/// What an instruction does.
pub enum Operation {
    /// Computes lane by lane.
    Alu(Run, Slots),
    /// Continues at an instruction.
    Branch(u32),
    /// Ends the threads.
    Exit,
    /// Stops the kernel with an error.
    Trap,
    /// Reads memory.
    Load(Box<Transfer>),
    /// Writes memory.
    Store(Box<Transfer>),
    /// Reads and writes a place in memory at once.
    Atomic(Box<Atomic>),
    /// `bar.sync`, `bar.arrive`, `bar.red`
    Barrier(Box<Barrier>),
    /// `bar.warp.sync`: slot of the member mask.
    SyncWarp(u16),
    /// Orders memory; in this machine nothing is reordered.
    Fence,
    /// Exchanges values between lanes.
    Exchange(Box<Exchange>),
    /// Slot for the mask of lanes that run.
    ActiveMask(u16),
    /// Register for the clock.
    Clock(Register),
    /// `cp.async`
    AsyncCopy(Box<AsyncCopy>),
    /// `cp.async.commit_group`
    AsyncCommit,
    /// Waits until at most so many groups are unfinished.
    AsyncWait(u32),
    /// `cp.async.wait_all`
    AsyncWaitAll,
    /// `ldmatrix`
    LoadMatrix(Box<LoadMatrix>),
    /// `mma.sync`
    Multiply(Box<Multiply>),
}

/// The address of a memory operand.
#[derive(Clone, Copy, Debug)]
pub struct Address {
    /// The register, of class word or long.
    pub register: Register,
    /// Bytes that are added.
    pub offset: i64,
}

/// A load or a store.
pub struct Transfer {
    /// Where the address lies.
    pub space: StateSpace,
    /// The address.
    pub address: Address,
    /// Bytes of each value.
    pub bytes: usize,
    /// Whether loads extend the sign.
    pub signed: bool,
    /// Registers of the values, in order of addresses.
    pub values: Vec<Register>,
}

/// An atomic operation, with a result or without (`red`).
pub struct Atomic {
    /// Where the address lies.
    pub space: StateSpace,
    /// The address.
    pub address: Address,
    /// What it does.
    pub operation: AtomicOperation,
    /// Bytes of the value.
    pub bytes: usize,
    /// Register for the value before.
    pub result: Option<Register>,
    /// The operand.
    pub operand: Register,
    /// For `cas`, the new value; the operand is the expected one.
    pub new: Option<Register>,
}

/// Read, modify, write: bits before and operand to bits after, both as 64 bits.
#[derive(Clone, Copy)]
pub enum AtomicOperation {
    /// A function of the value and the operand.
    Apply(fn(u64, u64) -> u64),
    /// Compare and swap.
    CompareAndSwap,
}

/// A barrier of the block.
pub struct Barrier {
    /// Its number, 0 to 15.
    pub number: Register,
    /// How many threads it waits for; without it, all.
    pub threads: Option<Register>,
    /// Whether the warp waits.
    pub waits: bool,
    /// For `bar.red`: the function of all threads' predicates, its operand and result.
    pub reduction: Option<(BarrierReduction, Register, Register)>,
}

/// A function of the predicates of all threads at a barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum BarrierReduction {
    And,
    Or,
    Count,
}

/// An exchange between the lanes of a warp.
pub struct Exchange {
    /// What is exchanged.
    pub kind: ExchangeKind,
    /// Register of the result.
    pub result: Register,
    /// Predicate that is set as well.
    pub predicate: Option<u16>,
    /// The operand.
    pub operand: Register,
    /// For shuffles, slots of the lane and of the clamp.
    pub lane: [u16; 2],
    /// Slot of the member mask.
    pub members: u16,
}

/// Kinds of exchanges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum ExchangeKind {
    ShuffleXor,
    ShuffleDown,
    ShuffleUp,
    ShuffleIndex,
    VoteAll,
    VoteAny,
    VoteUniform,
    Ballot,
    MatchAny,
    MatchAll,
    ReduceAdd,
    ReduceMin,
    ReduceMax,
    ReduceMinSigned,
    ReduceMaxSigned,
    ReduceAnd,
    ReduceOr,
    ReduceXor,
}

/// `cp.async`: a copy from global to shared memory that ends later.
pub struct AsyncCopy {
    /// In shared memory.
    pub to: Address,
    /// In global memory.
    pub from: Address,
    /// Bytes that are written: 4, 8 or 16.
    pub bytes: usize,
    /// Slot of how many bytes are read; the others are zeros.
    pub source_bytes: Option<u16>,
}

/// `ldmatrix`: 1, 2 or 4 matrices of 8 by 8 elements of 16 bits.
pub struct LoadMatrix {
    /// In shared memory.
    pub address: Address,
    /// Whether the address is generic.
    pub space: StateSpace,
    /// Whether each matrix is transposed.
    pub transposed: bool,
    /// One slot for each matrix.
    pub results: Vec<u16>,
}

/// `mma.sync`: d = a * b + c, on fragments that lie across the lanes of a warp.
pub struct Multiply {
    /// Columns of a and rows of b. Rows of a are 16, columns of b are 8.
    pub depth: usize,
    /// Type of a and b.
    pub kind: MatrixKind,
    /// Whether c and d are f16, two to a register.
    pub half_sum: bool,
    /// Slots of d.
    pub d: Vec<u16>,
    /// Slots of a.
    pub a: Vec<u16>,
    /// Slots of b.
    pub b: Vec<u16>,
    /// Slots of c.
    pub c: Vec<u16>,
}

/// Types of the factors of `mma.sync`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum MatrixKind {
    F16,
    Bf16,
    Tf32,
}

impl Kernel {
    /// File and line of an instruction in the source, if the PTX says.
    pub fn source(&self, instruction: usize) -> Option<(&str, u32)> {
        let (_, source) = self.lines.get(instruction)?;
        if source.line == 0 {
            return None;
        }
        let file = self.files.get(&source.file)?;
        Some((file, source.line))
    }
}
