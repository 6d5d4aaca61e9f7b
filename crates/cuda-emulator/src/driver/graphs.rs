//! Capture of streams, and graphs.

use std::ffi::{c_int, c_ulonglong};
use std::sync::Arc;

use super::{Driver, Status, call_in_context, entry_points, put};
use crate::queues::Work;

impl Driver {
    fn is_capturing(&self, stream: usize) -> Result<c_int, Status> {
        Ok(c_int::from(self.queues.is_capturing(self.stream(stream)?)))
    }
}

entry_points! {
    /// Begins to capture a stream.
    cuStreamBeginCapture_v2(stream: usize, mode: c_int) call_in_context |driver| {
        if !(0..=2).contains(&mode) {
            return Err(Status::INVALID_VALUE);
        }
        let stream = driver.stream(stream)?;
        Ok(driver.queues.begin_capture(stream)?)
    }

    /// Ends the capture of a stream.
    cuStreamEndCapture(stream: usize, out: *mut usize) call_in_context |driver| {
        let stream = driver.stream(stream)?;
        let graph = driver.queues.end_capture(stream)?;
        let handle = driver.graphs.add(graph);
        put(out, handle)
    }

    /// Whether a stream is captured.
    cuStreamIsCapturing(stream: usize, out: *mut c_int) call_in_context |driver| {
        let status = driver.is_capturing(stream)?;
        put(out, status)
    }

    /// How many nodes a graph has. Handles of nodes are not supported.
    cuGraphGetNodes(graph: usize, nodes: *mut usize, count: *mut usize) call_in_context |driver| {
        if !nodes.is_null() {
            return Err(Status::NOT_SUPPORTED);
        }
        put(count, driver.graphs.get(graph)?.nodes())
    }

    /// Makes a graph ready to be launched.
    cuGraphInstantiateWithFlags(out: *mut usize, graph: usize, _flags: c_ulonglong) call_in_context |driver| {
        let graph = driver.graphs.get(graph)?.clone();
        let ready = driver.queues.instantiate(&graph);
        let handle = driver.ready_graphs.add(Arc::new(ready));
        put(out, handle)
    }

    /// Prepares a launch: nothing to do here.
    cuGraphUpload(graph: usize, stream: usize) call_in_context |driver| {
        driver.stream(stream)?;
        driver.ready_graphs.get(graph).map(|_| ())
    }

    /// Queues a graph.
    cuGraphLaunch(graph: usize, stream: usize) call_in_context |driver| {
        let stream = driver.stream(stream)?;
        let graph = driver.ready_graphs.get(graph)?.clone();
        if driver.queues.is_capturing(stream) {
            return Err(Status::STREAM_CAPTURE_UNSUPPORTED);
        }
        Ok(driver.queues.enqueue(stream, Work::Graph(graph))?)
    }

    /// Ends a graph that is ready.
    cuGraphExecDestroy(graph: usize) call_in_context |driver| { driver.ready_graphs.remove(graph).map(|_| ()) }

    /// Ends a graph.
    cuGraphDestroy(graph: usize) call_in_context |driver| { driver.graphs.remove(graph).map(|_| ()) }
}
