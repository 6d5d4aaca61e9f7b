//! Capture: the work of streams becomes the nodes of a graph instead of being done.
//!
//! A stream takes part from its beginning, or from a wait for an event that was recorded in the capture. At the end,
//! all streams must have been joined again by events.

use std::collections::BTreeMap;

use super::graph::{Graph, Node};
use super::{Point, Queues, StreamId, Work};

/// Why a capture cannot go on. The driver has an error code for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureError {
    /// The stream is captured already, or is not when it should be.
    IllegalState,
    /// The operation cannot be captured.
    Unsupported,
    /// A stream waits for an event of another capture.
    Merge,
    /// The capture began in another stream.
    Unmatched,
    /// Work of another stream was not joined before the end.
    Unjoined,
    /// A captured stream waits for an event that was not captured.
    Isolation,
    /// The capture has failed before, or fails because a test asked for it.
    Invalidated,
}

/// A capture that has begun.
pub(super) struct Capture {
    origin: StreamId,
    graph: Graph,
    /// For each stream: its number in the graph, and the nodes that its next one depends on.
    streams: BTreeMap<StreamId, (usize, Vec<usize>)>,
    /// Points that were recorded, with the nodes before them.
    points: Vec<(Point, Vec<usize>)>,
    has_failed: bool,
}

/// Captures that are to fail, for tests.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CaptureFaults {
    /// How many captures fail.
    captures: usize,
    /// How many nodes each of them has before.
    nodes: usize,
}

impl Queues {
    /// Whether the work of a stream is captured.
    pub fn is_capturing(&self, stream: StreamId) -> bool {
        self.streams.get(&stream).is_some_and(|stream| stream.capture.is_some())
    }

    /// Whether any stream is captured.
    pub fn is_any_capturing(&self) -> bool {
        self.streams.values().any(|stream| stream.capture.is_some())
    }

    /// Begins to capture a stream.
    ///
    /// # Errors
    /// If it is captured already, or is the default stream.
    pub fn begin_capture(&mut self, stream: StreamId) -> Result<(), CaptureError> {
        let number = self.captures.len();
        let state = self.streams.get_mut(&stream).ok_or(CaptureError::IllegalState)?;
        if stream == 0 {
            return Err(CaptureError::Unsupported);
        }
        if state.capture.is_some() {
            return Err(CaptureError::IllegalState);
        }
        state.capture = Some(number);
        let graph = Graph { nodes: Vec::new(), streams: 1 };
        let streams = BTreeMap::from([(stream, (0, Vec::new()))]);
        let (points, has_failed) = (Vec::new(), false);
        self.captures.push(Some(Capture { origin: stream, graph, streams, points, has_failed }));
        Ok(())
    }

    /// Ends the capture that began in a stream.
    ///
    /// # Errors
    /// If the capture began elsewhere, or other streams were not joined. The capture is over in the latter case.
    pub fn end_capture(&mut self, stream: StreamId) -> Result<Graph, CaptureError> {
        let number =
            self.streams.get(&stream).and_then(|stream| stream.capture).ok_or(CaptureError::IllegalState)?;
        let origin = self.captures[number].as_ref().map(|capture| capture.origin);
        if origin != Some(stream) {
            return Err(CaptureError::Unmatched);
        }
        let capture = self.captures[number].take().ok_or(CaptureError::IllegalState)?;
        for state in self.streams.values_mut().filter(|state| state.capture == Some(number)) {
            state.capture = None;
        }
        if capture.has_failed {
            return Err(CaptureError::Invalidated);
        }
        let joined = capture.ancestors(&capture.streams[&stream].1);
        let all_joined = capture.streams.values().flat_map(|(_, last)| last).all(|&node| joined[node]);
        if all_joined { Ok(capture.graph) } else { Err(CaptureError::Unjoined) }
    }

    /// Lets the next `captures` captures of so many nodes fail when they are given another one.
    pub fn fail_captures(&mut self, captures: usize, nodes: usize) {
        self.capture_faults = CaptureFaults { captures, nodes };
    }

    /// The number of the capture that takes the work of a stream, and the handles of the nodes that its next one depends on; `None` for
    /// a stream that is not captured.
    pub fn captured(&self, stream: StreamId) -> Option<(usize, Vec<usize>)> {
        let number = self.streams.get(&stream)?.capture?;
        let capture = self.captures[number].as_ref()?;
        let (_, last) = capture.streams.get(&stream)?;
        Some((number, last.iter().map(|node| capture.graph.nodes[*node].handle).collect()))
    }

    /// Adds work of a captured stream to its graph.
    pub(super) fn capture_work(&mut self, stream: StreamId, work: Work) -> Result<(), CaptureError> {
        let number =
            self.streams.get(&stream).and_then(|stream| stream.capture).ok_or(CaptureError::IllegalState)?;
        let capture = self.captures[number].as_mut().ok_or(CaptureError::IllegalState)?;
        let faults = &mut self.capture_faults;
        if !capture.has_failed && faults.captures > 0 && capture.graph.nodes.len() == faults.nodes {
            faults.captures -= 1;
            capture.has_failed = true;
        }
        if capture.has_failed {
            return Err(CaptureError::Invalidated);
        }
        let (ordinal, last) = capture.streams.get(&stream).cloned().ok_or(CaptureError::IllegalState)?;
        match work {
            Work::Record(point) => capture.points.push((point, last)),
            Work::Wait(point) => {
                let found = capture.points.iter().find(|(known, _)| known.is(&point));
                let Some((_, nodes)) = found else { return Err(CaptureError::Isolation) };
                let nodes = nodes.clone();
                capture.join(stream, &nodes);
            }
            Work::WaitValue(_) => return Err(CaptureError::Unsupported),
            work => {
                self.next_node += 1;
                capture.graph.nodes.push(Node { handle: self.next_node, work, after: last, stream: ordinal });
                let node = capture.graph.nodes.len() - 1;
                capture.streams.insert(stream, (ordinal, vec![node]));
            }
        }
        Ok(())
    }

    /// Lets a stream that is not captured join the capture in which a point was recorded, if there is one.
    ///
    /// # Errors
    /// If the stream belongs to another capture.
    pub fn join_capture(&mut self, stream: StreamId, point: &Point) -> Result<bool, CaptureError> {
        let recorded_in = |capture: &Option<Capture>| {
            capture.as_ref().is_some_and(|capture| capture.points.iter().any(|(known, _)| known.is(point)))
        };
        let Some(number) = self.captures.iter().position(recorded_in) else { return Ok(false) };
        let state = self.streams.get_mut(&stream).ok_or(CaptureError::IllegalState)?;
        match state.capture {
            Some(other) if other != number => return Err(CaptureError::Merge),
            Some(_) => {}
            None => {
                state.capture = Some(number);
                if let Some(capture) = self.captures[number].as_mut() {
                    let ordinal = capture.graph.streams;
                    capture.graph.streams += 1;
                    capture.streams.insert(stream, (ordinal, Vec::new()));
                }
            }
        }
        self.capture_work(stream, Work::Wait(point.clone()))?;
        Ok(true)
    }
}

impl Capture {
    /// Lets the next node of a stream depend on nodes, too.
    fn join(&mut self, stream: StreamId, nodes: &[usize]) {
        if let Some((_, last)) = self.streams.get_mut(&stream) {
            for node in nodes {
                if !last.contains(node) {
                    last.push(*node);
                }
            }
        }
    }

    /// Which nodes come before or are among some.
    fn ancestors(&self, nodes: &[usize]) -> Vec<bool> {
        let mut found = vec![false; self.graph.nodes.len()];
        let mut left = nodes.to_vec();
        while let Some(node) = left.pop() {
            if !std::mem::replace(&mut found[node], true) {
                left.extend(&self.graph.nodes[node].after);
            }
        }
        found
    }
}
