//! Streams, events and graphs: work that is queued, and the order in which it runs.
//!
//! Nothing says when queued work runs, except streams and events. So the seed decides: as late as possible (only what
//! somebody waits for), as early as possible, or in between at random. A program that lacks an event computes wrong
//! results under some seed; and under every seed, `StreamOrder` reports the accesses that nothing orders.

mod capture;
mod clock;
mod copies;
mod exchange;
mod graph;
mod perform;
mod product;
mod schedule;
mod work;

use std::collections::{BTreeMap, VecDeque};

use phalanx_system::random::SplitMix64;

use crate::checks::{Checks, Finding, Report, Reports};
use crate::execute::Statistics;
use crate::memory::DeviceMemory;

pub use capture::CaptureError;
pub use clock::{Clock, Point};
pub use exchange::{Exchange, Header, Line, Parcel};
pub use graph::{Graph, ReadyGraph};
pub use product::{Element, Matrix, Product};
pub use work::{Copy, Fill, HostCall, HostWord, Launch, Location, Work};

use capture::{Capture, CaptureFaults};
use clock::Operations;

/// A stream's number. 0 is the default stream.
pub type StreamId = u64;

/// The most instructions of warps in a launch, which then counts as endless.
const INSTRUCTION_LIMIT: u64 = 1 << 33;

/// Handles of nodes come behind this number, which no memory has.
const FIRST_NODE: usize = 0x6_0000_0000;

/// Work in a stream, with what the host knew when it queued it.
struct Queued {
    /// Its number among all work.
    number: u64,
    work: Work,
    host: Clock,
}

/// A stream.
struct Stream {
    queue: VecDeque<Queued>,
    /// Its place in clocks.
    index: usize,
    /// What work that runs next is ordered after.
    clock: Clock,
    /// The device's queue that it shares with other streams, where streams share queues: its work begins in their common order.
    connection: Option<usize>,
    /// Whether it is ordered with the default stream.
    blocking: bool,
    /// The capture that takes its work.
    capture: Option<usize>,
}

/// When queued work runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Eagerness {
    Late,
    Early,
    Random,
}

/// The streams of a device, and what their work uses.
pub struct Queues {
    /// The device's memory.
    pub memory: DeviceMemory,
    /// What was found.
    pub reports: Reports,
    /// Which checks run.
    pub checks: Checks,
    /// What all launches did together.
    pub statistics: Statistics,
    /// How many products libraries have computed.
    pub products: usize,
    /// How many kernels were launched one by one.
    pub launches: usize,
    /// How many graphs were launched.
    pub graph_launches: usize,
    /// How many exchanges with other devices have ended.
    pub exchanges: usize,
    /// The stream that was waited for when a wait ended early: its work waits for another device or for the host.
    stuck: Option<StreamId>,
    streams: BTreeMap<StreamId, Stream>,
    next_stream: StreamId,
    /// How much work was queued so far.
    pushed: u64,
    captures: Vec<Option<Capture>>,
    capture_faults: CaptureFaults,
    /// The last handle of a node.
    next_node: usize,
    operations: Operations,
    /// What the host has waited for.
    host: Clock,
    seed: u64,
    random: SplitMix64,
    eagerness: Eagerness,
    /// The first finding, which every later call returns. Work goes on after one that is not fatal, to find others.
    failure: Option<Finding>,
}

impl Queues {
    /// Streams over a memory, with the default stream.
    pub fn new(memory: DeviceMemory, seed: u64, checks: Checks) -> Self {
        let eagerness = match seed % 4 {
            0 => Eagerness::Late,
            1 => Eagerness::Early,
            _ => Eagerness::Random,
        };
        let mut queues = Self {
            memory,
            reports: Reports::default(),
            checks,
            statistics: Statistics::default(),
            products: 0,
            launches: 0,
            graph_launches: 0,
            exchanges: 0,
            stuck: None,
            streams: BTreeMap::new(),
            next_stream: 0x100,
            pushed: 0,
            captures: Vec::new(),
            capture_faults: CaptureFaults::default(),
            next_node: FIRST_NODE,
            operations: Operations::default(),
            host: Clock::default(),
            seed,
            random: SplitMix64::new(seed),
            eagerness,
            failure: None,
        };
        queues.add_stream(0, true);
        queues
    }

    fn add_stream(&mut self, id: StreamId, blocking: bool) {
        let index = self.operations.add_stream();
        let (queue, clock) = (VecDeque::new(), Clock::default());
        let connection = None;
        self.streams.insert(id, Stream { queue, index, clock, connection, blocking, capture: None });
    }

    /// Makes a stream; a blocking one is ordered with the default stream.
    pub fn create_stream(&mut self, blocking: bool) -> StreamId {
        let id = self.next_stream;
        self.next_stream += 0x10;
        self.add_stream(id, blocking);
        id
    }

    /// Lets a stream share a queue of a device with others.
    pub fn share_queue(&mut self, stream: StreamId, connection: usize) {
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.connection = Some(connection);
        }
    }

    /// Whether there is such a stream.
    pub fn has_stream(&self, stream: StreamId) -> bool {
        self.streams.contains_key(&stream)
    }

    /// Finishes a stream's work and removes it.
    pub fn destroy_stream(&mut self, stream: StreamId) {
        self.synchronize(stream);
        if self.stuck.is_none() {
            self.streams.remove(&stream);
        }
    }

    /// The stream that was waited for when a wait ended early, if one did since the last question: its work waits for another device or
    /// for the host.
    pub fn take_stuck(&mut self) -> Option<StreamId> {
        self.stuck.take()
    }

    /// Whether a wait has ended early.
    pub fn is_stuck(&self) -> bool {
        self.stuck.is_some()
    }

    /// The finding that every call returns the status of.
    pub fn failure(&self) -> Option<Finding> {
        self.failure
    }

    /// Queues work.
    ///
    /// # Errors
    /// If the stream is captured and the work cannot be.
    pub fn enqueue(&mut self, stream: StreamId, work: Work) -> Result<(), CaptureError> {
        if self.is_capturing(stream) {
            return self.capture_work(stream, work);
        }
        if stream == 0 {
            let others: Vec<StreamId> = self
                .streams
                .iter()
                .filter(|(id, other)| **id != 0 && other.blocking)
                .map(|(id, _)| *id)
                .collect();
            others.into_iter().for_each(|other| self.join(0, other));
        } else if self.streams[&stream].blocking {
            self.join(stream, 0);
        }
        self.push(stream, work);
        self.advance();
        Ok(())
    }

    /// Lets the next work of a stream wait for all that another has queued.
    fn join(&mut self, stream: StreamId, other: StreamId) {
        let point = Point::default();
        self.push(other, Work::Record(point.clone()));
        self.push(stream, Work::Wait(point));
    }

    fn push(&mut self, stream: StreamId, work: Work) {
        let (host, number) = (self.host.clone(), self.pushed);
        self.pushed += 1;
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.queue.push_back(Queued { number, work, host });
        }
    }

    /// A random number below `count`.
    fn pick(&mut self, count: usize) -> usize {
        (self.random.next_u64() % count as u64) as usize
    }

    /// Adds a report that is not of a kernel.
    pub fn report(&mut self, finding: Finding, operation: &str, address: Option<u64>, detail: String) {
        self.reports.add(Report {
            finding,
            operation: operation.to_string(),
            source: None,
            ptx_line: 0,
            block: [0; 3],
            thread: None,
            address,
            detail,
        });
        self.fail(finding);
    }

    /// Remembers the first finding; a fatal one counts more.
    fn fail(&mut self, finding: Finding) {
        let first = self.failure.get_or_insert(finding);
        if finding.is_fatal() && !first.is_fatal() {
            *first = finding;
        }
    }
}
