//! Capture of streams, and graphs.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::sync::Arc;

use super::{Driver, LaunchConfig, Status, call_in_context, entry_points, put};
use crate::queues::Work;

/// `CU_STREAM_CAPTURE_STATUS_NONE` and `CU_STREAM_CAPTURE_STATUS_ACTIVE`
const NOT_CAPTURED: c_int = 0;
const CAPTURED: c_int = 1;

/// A launch in a graph (`CUDA_KERNEL_NODE_PARAMS_v2`).
#[derive(Clone, Copy)]
#[repr(C)]
#[allow(missing_docs)]
pub struct KernelNode {
    pub function: usize,
    pub grid: [c_uint; 3],
    pub block: [c_uint; 3],
    pub shared_bytes: c_uint,
    pub parameters: *const *const u8,
    pub extra: *const c_void,
    pub kernel: usize,
    pub context: usize,
}

impl Driver {
    fn is_capturing(&self, stream: usize) -> Result<c_int, Status> {
        Ok(c_int::from(self.queues.is_capturing(self.stream(stream)?)))
    }

    /// Gives a node of a graph that is ready another launch, which is checked as any other.
    fn set_kernel_node(&mut self, graph: usize, node: usize, launch: &KernelNode) -> Result<(), Status> {
        let KernelNode { function, grid, block, shared_bytes, parameters, extra, kernel, .. } = *launch;
        if kernel != 0 {
            return Err(Status::NOT_SUPPORTED);
        }
        let (attributes, attribute_count, stream) = (std::ptr::null(), 0, 0);
        let config = LaunchConfig { grid, block, shared_bytes, stream, attributes, attribute_count };
        let launch = self.checked_launch(function, &config, parameters, extra)?;
        // The node is one of the graph that this one was made of, which must be there.
        let is_known = self.graphs.iter().any(|(_, graph)| graph.has(node));
        let ready = self.ready_graphs.get_mut(graph)?;
        // Launches that were queued keep the graph that they have.
        let is_set = is_known && Arc::make_mut(ready).set_launch(node, launch);
        if is_set { Ok(()) } else { Err(Status::INVALID_VALUE) }
    }
}

entry_points! {
    /// Begins to capture a stream.
    cuStreamBeginCapture_v2(stream: usize, mode: c_int) call_in_context |driver| {
        if !(0..=2).contains(&mode) {
            return Err(Status::INVALID_VALUE);
        }
        let stream = driver.stream(stream)?;
        if !driver.config.captures {
            return Err(Status::STREAM_CAPTURE_UNSUPPORTED);
        }
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

    /// About the capture of a stream: whether there is one, its number, and the nodes that the stream's next one depends on, which stay
    /// where they are until the next such question. The graph itself is not given before the end.
    cuStreamGetCaptureInfo_v2(
        stream: usize, status: *mut c_int, id: *mut u64, graph: *mut usize, nodes: *mut *const usize, count: *mut usize,
    ) call_in_context |driver| {
        let handle = stream;
        let stream = driver.stream(stream)?;
        let captured = driver.queues.captured(stream);
        put(status, if captured.is_some() { CAPTURED } else { NOT_CAPTURED })?;
        let Some((number, last)) = captured else { return Ok(()) };
        let (place, length) = (last.as_ptr(), last.len());
        driver.captured.insert(handle, last);
        if !id.is_null() {
            put(id, number as u64 + 1)?;
        }
        if !graph.is_null() {
            put(graph, 0)?;
        }
        if !nodes.is_null() {
            put(nodes, place)?;
        }
        if count.is_null() { Ok(()) } else { put(count, length) }
    }

    /// Gives a node of a graph that is ready another launch, for launches of the graph that come later.
    cuGraphExecKernelNodeSetParams_v2(graph: usize, node: usize, launch: *const KernelNode) call_in_context |driver| {
        if launch.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        // SAFETY: the caller gives a valid description.
        let launch = unsafe { *launch };
        driver.set_kernel_node(graph, node, &launch)
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
        driver.queues.graph_launches += 1;
        Ok(driver.queues.enqueue(stream, Work::Graph(graph))?)
    }

    /// Ends a graph that is ready.
    cuGraphExecDestroy(graph: usize) call_in_context |driver| { driver.ready_graphs.remove(graph).map(|_| ()) }

    /// Ends a graph.
    cuGraphDestroy(graph: usize) call_in_context |driver| { driver.graphs.remove(graph).map(|_| ()) }
}
