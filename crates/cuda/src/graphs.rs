//! Graphs of the driver, made of segments that come again.
//!
//! A step of training issues the same launches each time: the same functions, grids and addresses in the same order, because the arena
//! is planned. What differs are a few numbers (learning rate, step of AdamW, seeds of dropout, loss scale). So a segment that comes for
//! the second time is captured as a graph, and from then on a segment of that shape is one launch of its graph, after the nodes whose
//! numbers differ were updated. Nothing is predicted: the whole segment is compared before it is launched, and any other is issued step
//! by step. A graph has the segment's own launches in their order, so results have the same bits.

use std::collections::HashMap;
use std::hash::BuildHasher;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUgraph, CUgraphExec, CUgraphNode, CUstream, CUstreamCaptureMode};

use phalanx_plan::trace::Site;

use crate::driver::{Context, driver};
use crate::error::Error;
use crate::segment::{Issuer, Segment, Shape, Step, StepError};

/// Steps of a segment that is full. The card waits for the host's first segment behind each synchronisation, so they are short.
pub(crate) const STEPS_FULL: usize = 32;

/// Steps for which a graph is worth its launch.
const STEPS_MIN: usize = 4;

/// Most nodes of all graphs together, which bounds the driver's memory for them (`GRAPH_BYTES`).
pub(crate) const NODES_MAX: usize = 2048;

/// Bytes that graphs take of a card at most, about: 64 KiB for each node, as users saw with CUDA 11. `phalanx doctor --kernels` says what
/// they take of a card.
pub(crate) const GRAPH_BYTES: u64 = NODES_MAX as u64 * (64 << 10);

/// Shapes that are remembered as seen.
const SEEN_MAX: usize = 8192;

/// Segments after which a graph that was not launched gives way to another one.
const UNUSED_MAX: u64 = 4096;

/// A graph and what it was made of.
struct Graph {
    shape: Shape,
    graph: CUgraph,
    exec: CUgraphExec,
    /// The node of each step; null where it is none of a kernel.
    nodes: Vec<CUgraphNode>,
    /// Nodes in all: a product of the library may have several.
    size: usize,
    /// The arguments that its kernels have now.
    words: Vec<u64>,
    /// The bounds that its steps have now, where they are checked.
    bounds: Vec<Vec<(u64, usize)>>,
    /// Place of the graph that was launched next.
    next: Option<usize>,
    /// The segment in which it was launched last.
    used: u64,
}

/// Captures of a shape that may fail before it is never captured again, and segments of that shape that are issued step by step after the
/// first; twice as many after each other one. What fails once may have been another thread's doing, or missing memory; what fails again and
/// again costs a capture each time.
const TRIES_MAX: u32 = 4;
const SKIPPED: u32 = 8;

/// Record of a shape that was seen.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Seen {
    Once,
    /// Its captures have failed so often; so many segments are issued step by step before the next one.
    Refused {
        tries: u32,
        skipped: u32,
    },
}

/// The graphs of a stream.
pub(crate) struct Graphs {
    context: Arc<Context>,
    graphs: Vec<Option<Graph>>,
    by_shape: HashMap<Shape, usize>,
    /// Shapes without a graph, by their hashes.
    seen: HashMap<u64, Seen>,
    /// Nodes of all graphs.
    nodes: usize,
    /// The graph of the last segment.
    last: Option<usize>,
    segments: u64,
}

// SAFETY: graphs are handles of the driver; they are used under the device's lock, by a thread in which their context is current.
unsafe impl Send for Graphs {}

/// The functions of the driver that are used here and nowhere else.
const FUNCTIONS: [&[u8]; 10] = [
    b"cuStreamBeginCapture_v2",
    b"cuStreamGetCaptureInfo_v2",
    b"cuStreamEndCapture",
    b"cuGraphGetNodes",
    b"cuGraphInstantiateWithFlags",
    b"cuGraphUpload",
    b"cuGraphExecKernelNodeSetParams_v2",
    b"cuGraphLaunch",
    b"cuGraphExecDestroy",
    b"cuGraphDestroy",
];

/// Returns whether the loaded driver has all functions: a later driver may have replaced some.
fn is_supported() -> bool {
    // SAFETY: the driver is loaded; nothing is called.
    FUNCTIONS.iter().all(|name| unsafe { sys::culib().get::<unsafe extern "C" fn()>(*name).is_ok() })
}

impl Graphs {
    /// None where the driver has no graphs as they are used here.
    pub(crate) fn new(context: &Arc<Context>) -> Option<Graphs> {
        is_supported().then(|| Graphs {
            context: Arc::clone(context),
            graphs: Vec::new(),
            by_shape: HashMap::new(),
            seen: HashMap::new(),
            nodes: 0,
            last: None,
            segments: 0,
        })
    }

    /// Issues a segment: as a graph if there is one for it or it is worth one, else step by step.
    ///
    /// # Safety
    /// As for [`Segment::issue`].
    pub(crate) unsafe fn issue(&mut self, segment: &mut Segment, issuer: Issuer) -> Result<(), StepError> {
        self.segments += 1;
        let found = match self.find(&segment.shape) {
            None if self.is_worth_one(segment, issuer) => {
                // Capturing and instantiating may load kernels, and destroying may wait for the card.
                issuer.modules.gate().load(|| {
                    self.make_room(segment.len());
                    self.make(segment, issuer)
                })
            }
            found => found,
        };
        let made = &self.context.made;
        let Some(place) = found else {
            self.last = None;
            made.count_launches(segment.len());
            // SAFETY: the caller's promise.
            return unsafe { segment.issue(issuer, |_| Ok(())) };
        };
        made.count_graph(segment.len());
        if let Some(before) = self.last.replace(place).and_then(|last| self.graphs[last].as_mut()) {
            before.next = Some(place);
        }
        let graph = self.graphs[place].as_mut().expect("a graph that was found");
        graph.used = self.segments;
        // SAFETY: the caller's promise.
        let launched = unsafe { graph.launch(segment, issuer) };
        let (call, site) =
            segment.first_caller().map_or(("", Site::caller()), |first| (first.call, first.site));
        launched.map_err(|error| (error, call, site))
    }

    /// The place of a shape's graph. The one that came next the last time is tried first.
    fn find(&self, shape: &Shape) -> Option<usize> {
        let graph = |place: usize| self.graphs[place].as_ref();
        let next = self.last.and_then(graph).and_then(|last| last.next);
        next.filter(|next| graph(*next).is_some_and(|graph| graph.shape == *shape))
            .or_else(|| self.by_shape.get(shape).copied())
    }

    /// Returns whether to make a graph of a segment that has none: its shape must have come before.
    fn is_worth_one(&mut self, segment: &Segment, issuer: Issuer) -> bool {
        if segment.len() < STEPS_MIN || !segment.is_within_card() {
            return false;
        }
        let hash = self.by_shape.hasher().hash_one(&segment.shape);
        match self.seen.get_mut(&hash) {
            Some(Seen::Refused { tries: TRIES_MAX.., .. }) => false,
            Some(Seen::Refused { skipped, .. }) if *skipped > 0 => {
                *skipped -= 1;
                false
            }
            Some(Seen::Once | Seen::Refused { .. }) => {
                segment.is_loaded(issuer.blas) && self.may_have_room(segment.len())
            }
            None => {
                if self.seen.len() >= SEEN_MAX {
                    self.seen.clear();
                }
                self.seen.insert(hash, Seen::Once);
                false
            }
        }
    }

    /// Graphs that were not launched for long, the oldest last.
    fn unused(&self) -> Vec<usize> {
        let used = |place: usize| self.graphs[place].as_ref().map(|graph| graph.used);
        let mut unused: Vec<usize> = (0..self.graphs.len())
            .filter(|place| used(*place).is_some_and(|at| at + UNUSED_MAX < self.segments))
            .collect();
        unused.sort_by_key(|place| std::cmp::Reverse(used(*place)));
        unused
    }

    /// Returns whether there is room for this number of nodes, if graphs that are no longer used are removed.
    fn may_have_room(&self, nodes: usize) -> bool {
        let given_up: usize =
            self.unused().iter().flat_map(|place| &self.graphs[*place]).map(|graph| graph.size).sum();
        self.nodes + nodes <= NODES_MAX + given_up
    }

    /// Makes room for so many nodes, which there may be.
    fn make_room(&mut self, nodes: usize) {
        let mut unused = self.unused();
        while self.nodes + nodes > NODES_MAX {
            let Some(oldest) = unused.pop() else { break };
            self.remove(oldest);
        }
    }

    fn remove(&mut self, place: usize) {
        let Some(graph) = self.graphs[place].take() else { return };
        self.by_shape.remove(&graph.shape);
        self.nodes -= graph.size;
        graph.destroy();
    }

    /// Makes a graph of a segment; None if that fails. Then the segment is issued step by step, and so are the next ones of its shape.
    fn make(&mut self, segment: &mut Segment, issuer: Issuer) -> Option<usize> {
        self.context.made.count_object();
        let hash = self.by_shape.hasher().hash_one(&segment.shape);
        let Ok(graph) = Graph::capture(segment, issuer) else {
            let before =
                if let Some(Seen::Refused { tries, .. }) = self.seen.get(&hash) { *tries } else { 0 };
            self.seen.insert(hash, Seen::Refused { tries: before + 1, skipped: SKIPPED << before });
            return None;
        };
        self.seen.remove(&hash);
        self.nodes += graph.size;
        let free = self.graphs.iter().position(Option::is_none);
        let place = free.unwrap_or_else(|| {
            self.graphs.push(None);
            self.graphs.len() - 1
        });
        self.by_shape.insert(graph.shape.clone(), place);
        self.graphs[place] = Some(graph);
        Some(place)
    }
}

impl Graph {
    /// Captures the steps of a segment, which runs nothing, and makes a graph of them.
    fn capture(segment: &mut Segment, issuer: Issuer) -> Result<Graph, Error> {
        let stream = issuer.stream;
        // Other threads may do what they like meanwhile: none of them uses this stream.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the context is current, the stream is of it and used under the device's lock.
        unsafe { driver!(cuStreamBeginCapture_v2(stream, mode))? };
        let mut nodes = Vec::with_capacity(segment.len());
        let note_node = |step: &Step| {
            nodes.push(if matches!(step, Step::Kernel(_)) {
                last_node(stream)?
            } else {
                std::ptr::null_mut()
            });
            Ok(())
        };
        // SAFETY: nothing runs while it is captured.
        let captured = unsafe { segment.issue(issuer, note_node) };
        let mut graph = Graph {
            shape: segment.shape.clone(),
            graph: std::ptr::null_mut(),
            exec: std::ptr::null_mut(),
            nodes,
            size: 0,
            words: segment.words.clone(),
            bounds: segment.steps().map(|(_, _, caller, _)| caller.bounds.clone()).collect(),
            next: None,
            used: 0,
        };
        // SAFETY: as above. A capture that failed ends, too, and gives no graph.
        let ended = unsafe { driver!(cuStreamEndCapture(stream, &mut graph.graph)) };
        let made = captured.map_err(|(error, ..)| error).and(ended).and_then(|()| graph.instantiate(stream));
        match made {
            Ok(()) => Ok(graph),
            Err(error) => {
                graph.destroy();
                Err(error)
            }
        }
    }

    fn instantiate(&mut self, stream: CUstream) -> Result<(), Error> {
        // SAFETY: the graph was captured; with no room for nodes, their number is written.
        unsafe {
            driver!(cuGraphGetNodes(self.graph, std::ptr::null_mut(), &mut self.size))?;
            driver!(cuGraphInstantiateWithFlags(&mut self.exec, self.graph, 0))?;
            driver!(cuGraphUpload(self.exec, stream))
        }
    }

    /// Launches it with the arguments of a segment of the same shape.
    ///
    /// # Safety
    /// As for [`Segment::issue`].
    unsafe fn launch(&mut self, segment: &mut Segment, issuer: Issuer) -> Result<(), Error> {
        let mut start = 0;
        for (number, step, caller, words) in segment.steps() {
            let known = &mut self.words[start..start + words.len()];
            start += words.len();
            let Step::Kernel(kernel) = step else { continue };
            if known == words && self.bounds[number] == caller.bounds {
                continue;
            }
            known.copy_from_slice(words);
            self.bounds[number].clone_from(&caller.bounds);
            // SAFETY: the node was made of this step; launches that were issued before keep their arguments.
            let update = || unsafe { kernel.update(self.exec, self.nodes[number], words) };
            issuer.bounds.within(&caller.bounds, update)?;
        }
        // SAFETY: the caller's promise.
        unsafe { driver!(cuGraphLaunch(self.exec, issuer.stream)) }
    }

    /// Ends it; launches that were issued run to their end.
    fn destroy(&self) {
        // SAFETY: each was made by the driver and is not used again. A failure leaves it.
        unsafe {
            if !self.exec.is_null() {
                let _ = driver!(cuGraphExecDestroy(self.exec));
            }
            if !self.graph.is_null() {
                let _ = driver!(cuGraphDestroy(self.graph));
            }
        }
    }
}

/// The node that was captured last in a stream.
fn last_node(stream: CUstream) -> Result<CUgraphNode, Error> {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let (mut id, mut graph, mut nodes, mut count) = (0, std::ptr::null_mut(), std::ptr::null(), 0);
    // SAFETY: the stream is captured; the nodes are the driver's until its next call for the stream.
    let node = unsafe {
        driver!(cuStreamGetCaptureInfo_v2(stream, &mut status, &mut id, &mut graph, &mut nodes, &mut count))?;
        (count == 1).then(|| *nodes)
    };
    node.ok_or_else(|| Error::Unsupported("a capture without one last node".to_string()))
}

impl Drop for Graphs {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            self.graphs.iter().flatten().for_each(Graph::destroy);
        }
    }
}
