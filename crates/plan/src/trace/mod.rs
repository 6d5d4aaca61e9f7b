//! Record of a dry run.
//!
//! A [`Trace`] is the ordered list of everything one rank does: allocations and frees, kernels,
//! collectives, uses of chunks. It is pure data: whoever runs the engine on the `Meta` device writes
//! it, `plan` turns it into decisions, and the real run replays those. Nothing here computes.

mod dtype;
mod interned;
mod phase;
mod placement;
mod tag;

use std::cell::Cell;
use std::panic::Location;
use std::sync::Arc;

use serde::{Deserialize, Serialize, Serializer};

pub use dtype::DType;
pub use interned::{StaticName, interned};
pub use phase::PhaseName;
pub use placement::{Axis, Fault, Placement, Placements};
pub use tag::{describe_tag, later_tag, micro_batch_tag};

/// A memory of a rank. Each has its own arena, its own plan and its own peak.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Memory {
    /// Memory in which the kernels compute. The host may not be able to read it.
    Device,
    /// Memory that the host, and the transports of collectives, read and write.
    Host,
    /// Files.
    Disk,
}

impl Memory {
    /// All memories.
    pub const ALL: [Memory; 3] = [Memory::Device, Memory::Host, Memory::Disk];

    /// Name as tables and JSON print it.
    pub const fn name(self) -> &'static str {
        match self {
            Memory::Device => "device",
            Memory::Host => "host",
            Memory::Disk => "disk",
        }
    }
}

/// The rate of a machine that limits a piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rate {
    /// Bytes that kernels read and write in device memory.
    Bandwidth,
    /// Floating-point operations of matrix products of this element type, and the bytes, whichever takes longer.
    MatrixProduct(DType),
    /// Bytes that the host's processor reads and writes in host memory.
    Host,
    /// Bytes that are copied between device and host memory.
    Copy,
    /// Bytes that are read from or written to disk.
    Disk,
    /// Bytes that the transport of a group sends.
    Transport,
}

impl Rate {
    /// The rate that limits a copy from one memory to another.
    pub const fn of_copy([from, to]: [Memory; 2]) -> Rate {
        match (from, to) {
            (Memory::Disk, _) | (_, Memory::Disk) => Rate::Disk,
            (Memory::Device | Memory::Host, Memory::Device | Memory::Host) => Rate::Copy,
        }
    }
}

/// Purpose of a byte of memory. Every allocation has exactly one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Category {
    /// Resident parameters: whole, or this rank's shard.
    Parameters,
    /// Resident gradients: whole, or this rank's shard.
    Gradients,
    /// Optimizer states and master weights.
    Optimizer,
    /// Tensors saved by forward for backward, and tensors that pass between blocks.
    Activations,
    /// Buffers that exist for a collective: gathered parameters, gradients on their way.
    Communication,
    /// Scratch inside one kernel, and gaps of the arena.
    Workspace,
}

impl Category {
    /// All categories, in the order in which tables print them.
    pub const ALL: [Category; 6] = [
        Category::Parameters,
        Category::Gradients,
        Category::Optimizer,
        Category::Activations,
        Category::Communication,
        Category::Workspace,
    ];

    /// Name as tables and JSON print it.
    pub const fn name(self) -> &'static str {
        match self {
            Category::Parameters => "parameters",
            Category::Gradients => "gradients",
            Category::Optimizer => "optimizer",
            Category::Activations => "activations",
            Category::Communication => "communication",
            Category::Workspace => "workspace",
        }
    }
}

/// Bytes by category.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bytes {
    /// Parameters.
    pub parameters: u64,
    /// Gradients.
    pub gradients: u64,
    /// Optimizer states and master weights.
    pub optimizer: u64,
    /// Activations.
    pub activations: u64,
    /// Buffers of collectives.
    pub communication: u64,
    /// Scratch memory of operations and copies.
    pub workspace: u64,
}

impl Bytes {
    /// The bytes of one category.
    pub fn get(&self, category: Category) -> u64 {
        let mut copy = *self;
        *copy.slot(category)
    }

    /// The bytes of one category, to change.
    pub fn slot(&mut self, category: Category) -> &mut u64 {
        match category {
            Category::Parameters => &mut self.parameters,
            Category::Gradients => &mut self.gradients,
            Category::Optimizer => &mut self.optimizer,
            Category::Activations => &mut self.activations,
            Category::Communication => &mut self.communication,
            Category::Workspace => &mut self.workspace,
        }
    }

    /// Sum over the categories.
    pub fn total(&self) -> u64 {
        Category::ALL.iter().map(|c| self.get(*c)).sum()
    }
}

thread_local! {
    /// The place that made the action which this thread executes.
    static ACTING: Cell<Option<Site>> = const { Cell::new(None) };
}

/// A place in the source: where an allocation or a collective was asked for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Site {
    /// Source file.
    #[serde(deserialize_with = "interned")]
    pub file: StaticName,
    /// Line, from 1.
    pub line: u32,
}

impl Site {
    /// The place that called the function which calls this (with `#[track_caller]` on it); or, while an action of a program runs
    /// ([`Site::act`]), the place that made the action.
    #[track_caller]
    pub fn caller() -> Site {
        let at = Location::caller();
        ACTING.get().unwrap_or(Site { file: at.file(), line: at.line() })
    }

    /// Executes an action that this place made.
    pub fn act<T>(self, action: impl FnOnce() -> T) -> T {
        let before = ACTING.replace(Some(self));
        let done = action();
        ACTING.set(before);
        done
    }
}

impl std::fmt::Display for Site {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.file, self.line)
    }
}

impl std::fmt::Debug for Site {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self}")
    }
}

/// A queue on which work runs in order; queues run beside each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stream {
    /// Kernels.
    Compute,
    /// Collectives of a group.
    Communication,
    /// Copies from the host to the device.
    ToDevice,
    /// Copies from the device to the host.
    ToHost,
    /// Reads and writes of files.
    Disk,
    /// Operations of the host's processor on host memory.
    Host,
}

/// The collective operations of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum CollectiveOp {
    /// Every rank gets the sum.
    AllReduce = 1,
    /// Rank r gets the r-th part of the sum.
    ReduceScatter,
    /// Every rank gets all parts.
    AllGather,
    /// Every rank gets the root's buffer.
    Broadcast,
    /// The root gets the sum.
    Reduce,
    /// The root gets all parts.
    Gather,
    /// Rank r gets the r-th part of the root's buffer.
    Scatter,
    /// Rank r gets the r-th part of every rank's buffer.
    AllToAll,
    /// To one peer.
    Send,
    /// From one peer.
    Recv,
    /// Nobody leaves before everybody came.
    Barrier,
}

impl CollectiveOp {
    /// All operations.
    pub const ALL: [CollectiveOp; 11] = [
        CollectiveOp::AllReduce,
        CollectiveOp::ReduceScatter,
        CollectiveOp::AllGather,
        CollectiveOp::Broadcast,
        CollectiveOp::Reduce,
        CollectiveOp::Gather,
        CollectiveOp::Scatter,
        CollectiveOp::AllToAll,
        CollectiveOp::Send,
        CollectiveOp::Recv,
        CollectiveOp::Barrier,
    ];

    /// Name as error messages and benches spell it.
    pub const fn name(self) -> &'static str {
        match self {
            CollectiveOp::AllReduce => "all_reduce",
            CollectiveOp::ReduceScatter => "reduce_scatter",
            CollectiveOp::AllGather => "all_gather",
            CollectiveOp::Broadcast => "broadcast",
            CollectiveOp::Reduce => "reduce",
            CollectiveOp::Gather => "gather",
            CollectiveOp::Scatter => "scatter",
            CollectiveOp::AllToAll => "all_to_all",
            CollectiveOp::Send => "send",
            CollectiveOp::Recv => "recv",
            CollectiveOp::Barrier => "barrier",
        }
    }

    /// The operation with this wire number.
    pub fn from_number(number: u8) -> Option<CollectiveOp> {
        CollectiveOp::ALL.into_iter().find(|op| *op as u8 == number)
    }
}

/// One collective, as every rank of its group must issue it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Collective {
    /// Name of the group (`data`, `tensor`, `pipeline`).
    pub group: &'static str,
    /// World ranks of the group, in the order of its own ranks; empty when all ranks are in it.
    #[serde(serialize_with = "as_list")]
    pub members: Arc<[usize]>,
    /// Ranks in the group.
    pub world_size: usize,
    /// The operation.
    pub op: CollectiveOp,
    /// Element type on the wire.
    pub dtype: DType,
    /// Elements of the whole buffer (the sum of all parts for gathers and scatters).
    pub count: u64,
    /// The one rank that differs: root, or the peer of a send or recv.
    pub root: Option<usize>,
    /// Number of the message in a send or recv, on which both ends agree.
    pub tag: Option<u64>,
    /// Placements of the buffer; both ends of a message must give the same.
    pub placements: Placements,
    /// Bytes this rank sends to others.
    pub sent_bytes: u64,
    /// Call site.
    pub site: Site,
}

fn as_list<S: Serializer>(members: &Arc<[usize]>, serializer: S) -> Result<S::Ok, S::Error> {
    members.as_ref().serialize(serializer)
}

/// One thing that a rank does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// Memory is taken. `id` counts allocations of the whole trace from 0, over all memories.
    Alloc {
        /// Number of this allocation in the trace.
        id: u32,
        /// Its memory.
        memory: Memory,
        /// Bytes, as asked for (the arena aligns).
        bytes: u64,
        /// Its purpose.
        category: Category,
        /// Name for people.
        name: &'static str,
        /// Call site.
        site: Site,
    },
    /// Memory is given back.
    Free {
        /// The allocation's number.
        id: u32,
        /// Its memory.
        memory: Memory,
    },
    /// A kernel runs on the compute stream.
    Kernel {
        /// Name of the operation.
        name: &'static str,
        /// Floating-point operations of matrix products.
        flops: u64,
        /// Bytes read and written at least.
        bytes: u64,
        /// Rate that limits it.
        rate: Rate,
        /// True if it has run before in the step, and runs again in place of keeping what it has computed.
        again: bool,
    },
    /// Bytes are copied from one memory to another.
    Copy {
        /// Name of the copy: `upload`, `download`, `copy_to_host`, `copy_to_device`, `copy_to_disk`, `copy_from_disk`, `fetch`.
        name: &'static str,
        /// Memory that is read.
        from: Memory,
        /// Memory that is written.
        to: Memory,
        /// Number of bytes.
        bytes: u64,
        /// Rate that limits it.
        rate: Rate,
        /// The stream on which it runs.
        stream: Stream,
    },
    /// An event: the end of everything that was issued to a stream so far.
    Record {
        /// Number of the event in the trace, from 0.
        number: u32,
        /// The stream.
        stream: Stream,
    },
    /// A stream waits for an event: work issued to the stream from here on runs after it.
    StreamWait {
        /// Number of the event.
        number: u32,
        /// The stream that waits.
        stream: Stream,
    },
    /// The host waits for an event.
    HostWait {
        /// Number of the event.
        number: u32,
    },
    /// A collective is started. In a box: the other events are many more, and a third of its size.
    Collective(Box<Collective>),
    /// The compute stream waits for the n-th collective of the trace (from 0).
    Wait {
        /// Number of the collective.
        collective: u32,
    },
    /// Elements of a gradient are counted in the norm of all.
    Counted {
        /// Number of the parameter in the model.
        parameter: u32,
        /// Number of elements.
        elements: u64,
    },
    /// A step of the pipeline's program begins; with the number after the last step, what comes after the program.
    Step {
        /// Number of the step in the rank's program, from 0.
        number: u32,
    },
    /// A block's chunk is needed from here on.
    Use {
        /// Chunk number.
        chunk: u32,
    },
}

/// One part of a rank's life: `init`, `step`, `evaluate`, `save`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Phase {
    /// Its name.
    pub name: PhaseName,
    /// Events, in order.
    pub events: Vec<Event>,
}

/// Everything one rank does, phase by phase. What the first phase allocates stays; every later phase
/// frees what it takes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Trace {
    /// The rank that was run.
    pub rank: usize,
    /// Its phases; the first is `init`.
    pub phases: Vec<Phase>,
    /// Tensors that were not placed as their readers need them, in the order in which they were found; the
    /// first ones only.
    pub faults: Vec<Fault>,
}

impl Trace {
    /// The phase with this name.
    pub fn phase(&self, name: PhaseName) -> Option<&Phase> {
        self.phases.iter().find(|p| p.name == name)
    }
}

impl Phase {
    /// The collectives of the phase, in order.
    pub fn collectives(&self) -> impl Iterator<Item = &Collective> {
        self.events.iter().filter_map(|e| match e {
            Event::Collective(c) => Some(&**c),
            _ => None,
        })
    }

    /// Floating-point operations of all kernels.
    pub fn flops(&self) -> u64 {
        let of = |e: &Event| match e {
            Event::Kernel { flops, .. } => *flops,
            _ => 0,
        };
        self.events.iter().map(of).sum()
    }
}
