//! Graphs: work with dependencies, recorded once and launched often.

use crate::queues::{Clock, Launch, Queues, Work};

/// Work that was captured.
#[derive(Clone, Default)]
pub struct Graph {
    pub(super) nodes: Vec<Node>,
    /// How many streams took part.
    pub(super) streams: usize,
}

/// A node of a graph.
#[derive(Clone)]
pub(super) struct Node {
    /// Its handle.
    pub handle: usize,
    pub work: Work,
    /// Nodes that run before it.
    pub after: Vec<usize>,
    /// Which of the captured streams it was queued in.
    pub stream: usize,
}

/// A graph that can be launched.
#[derive(Clone)]
pub struct ReadyGraph {
    nodes: Vec<Node>,
    /// Places in clocks of its streams.
    indices: Vec<usize>,
}

impl Graph {
    /// How many nodes it has.
    pub fn nodes(&self) -> usize {
        self.nodes.len()
    }

    /// Whether a handle is that of one of its nodes.
    pub fn has(&self, node: usize) -> bool {
        self.nodes.iter().any(|known| known.handle == node)
    }
}

impl ReadyGraph {
    /// Replaces the launch of a node, for launches of the graph that come later; false if no node of the graph is one of a kernel with
    /// this handle.
    pub fn set_launch(&mut self, node: usize, launch: Launch) -> bool {
        let known = self.nodes.iter_mut().find(|known| known.handle == node);
        let Some(Node { work: Work::Launch(old), .. }) = known else { return false };
        *old = launch;
        true
    }
}

impl Queues {
    /// Makes a graph ready to be launched.
    pub fn instantiate(&mut self, graph: &Graph) -> ReadyGraph {
        let indices = (0..graph.streams).map(|_| self.operations.add_stream()).collect();
        ReadyGraph { nodes: graph.nodes.clone(), indices }
    }

    /// Runs the nodes in a random order that their dependencies allow. All are ordered after the clock, and what
    /// has the clock afterwards is ordered after all.
    pub(super) fn run_graph(&mut self, graph: &ReadyGraph, clock: &mut Clock) {
        let mut clocks: Vec<Option<Clock>> = vec![None; graph.nodes.len()];
        let mut left: Vec<usize> = (0..graph.nodes.len()).collect();
        let mut end = clock.clone();
        while !left.is_empty() {
            let is_ready =
                |node: usize| graph.nodes[node].after.iter().all(|&before| clocks[before].is_some());
            let ready: Vec<usize> = (0..left.len()).filter(|&at| is_ready(left[at])).take(16).collect();
            // Nodes only depend on earlier ones, so the first is always ready.
            let at = ready[self.pick(ready.len())];
            let number = left.remove(at);
            let node = &graph.nodes[number];
            let mut own = clock.clone();
            node.after
                .iter()
                .filter_map(|&before| clocks[before].as_ref())
                .for_each(|before| own.join(before));
            self.perform(node.work.clone(), graph.indices[node.stream], &mut own);
            end.join(&own);
            clocks[number] = Some(own);
        }
        *clock = end;
    }
}
