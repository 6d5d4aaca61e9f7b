//! The group in which a fault is planted.

use std::sync::{Arc, Mutex, PoisonError};

use phalanx_collectives::{Buffers, Call, CollectiveOp, Group, Pending, Statistics};
use phalanx_plan::trace::{Axis, Site};
use phalanx_tensor::{Category, Device, Positions, Tensor};

use crate::planted::sites::Calls;
use crate::planted::{FaultKind, PlantedFault};

/// Collectives that are waited for inside another call: tests in which a rank ends plant no faults.
const NOBODY_ENDS: &str = "a test with a planted fault, in which no rank ends";

/// A group whose collectives go wrong at one call site.
pub struct Planted {
    group: Arc<dyn Group>,
    fault: PlantedFault,
    device: Device,
    other: Arc<dyn Group>,
    /// Lines of the site's file that have started such collectives, in the order of their first call.
    lines: Mutex<Vec<Site>>,
}

impl Planted {
    /// Wraps `group`. `device` is the rank's, which copies what a dropped collective would have moved; `other` is the
    /// group of [`FaultKind::OtherGroup`].
    pub fn around(
        group: Arc<dyn Group>,
        fault: PlantedFault,
        device: &Device,
        other: &Arc<dyn Group>,
    ) -> Arc<dyn Group> {
        let (device, other) = (device.clone(), Arc::clone(other));
        Arc::new(Planted { group, fault, device, other, lines: Mutex::default() })
    }

    fn is_faulty(&self, call: &Call) -> bool {
        let site = &self.fault.site;
        if !call.site.file.ends_with(site.file) || !site.calls.contain(call) {
            return false;
        }
        let Some(wanted) = site.line else { return true };
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let known = lines.iter().position(|line| *line == call.site);
        known.unwrap_or_else(|| {
            lines.push(call.site);
            lines.len() - 1
        }) == wanted
    }

    /// Each rank keeps its own values.
    fn drop_call(&self, call: Call) -> Buffers {
        let Call { op, accumulate, mut buffers, .. } = call;
        match (op, &mut buffers) {
            (CollectiveOp::ReduceScatter, Buffers { source: Some(whole), target: Some(shard) }) => {
                let n = shard.shape().elements();
                let start = self.group.rank() * n;
                let own = whole.view().range(start..start + n);
                match accumulate {
                    true => self.device.add(own, shard.view_mut()),
                    false => self.device.copy(own, shard.view_mut()),
                }
            }
            (CollectiveOp::AllGather, Buffers { source: Some(own), target: Some(whole) }) => {
                let n = own.shape().elements();
                for rank in 0..self.group.world_size() {
                    self.device.copy(own.view(), whole.view_mut().range(rank * n..(rank + 1) * n));
                }
            }
            // What is summed or gathered in place is there already.
            _ => {}
        }
        buffers
    }

    fn sum(&self, group: &Arc<dyn Group>, site: Site, x: Tensor) -> Tensor {
        let call = Call { site, ..Call::new(CollectiveOp::AllReduce, Some(x), None) };
        let buffers = group.submit(call).wait().expect(NOBODY_ENDS);
        buffers.source.expect("an all_reduce gives its tensor back")
    }

    /// The values are summed over the ranks once more than they should be.
    fn double(&self, mut call: Call) -> Buffers {
        let site = call.site;
        let again = |x: Tensor| self.sum(&self.group, site, x);
        if call.op == CollectiveOp::AllGather {
            let mut buffers = self.group.submit(call).wait().expect(NOBODY_ENDS);
            buffers.target = buffers.target.map(again);
            return buffers;
        }
        call.buffers.source = call.buffers.source.map(again);
        self.group.submit(call).wait().expect(NOBODY_ENDS)
    }

    /// The values are summed over the other group.
    fn send_elsewhere(&self, mut call: Call) -> Buffers {
        let (site, other) = (call.site, &self.other);
        call.buffers.source = call.buffers.source.map(|x| self.sum(other, site, x));
        self.drop_call(call)
    }

    /// A bias is added to this rank's term of a sum.
    fn bias_terms(&self, mut call: Call) -> Call {
        if let Some(term) = &mut call.buffers.source {
            let [_, width] = term.shape().rows_cols();
            let mut bias = self.device.alloc(term.dtype(), [1, width], Category::Workspace, "planted.bias");
            self.device.fill(bias.view_mut(), 0.0);
            // Not the same in all columns: a norm would take that away.
            self.device.fill(bias.view_mut().range(0..width / 2), 0.5);
            let table = Positions { table: bias.view(), first_row: 0, seq: 1 };
            self.device.add_positions(table, term.view_mut());
        }
        call
    }
}

impl Group for Planted {
    fn name(&self) -> &'static str {
        self.group.name()
    }
    fn axes(&self) -> &[Axis] {
        self.group.axes()
    }
    fn members(&self) -> &[usize] {
        self.group.members()
    }
    fn rank(&self) -> usize {
        self.group.rank()
    }
    fn world_size(&self) -> usize {
        self.group.world_size()
    }

    fn submit(&self, call: Call) -> Pending<Buffers> {
        if !self.is_faulty(&call) {
            return self.group.submit(call);
        }
        match self.fault.kind {
            FaultKind::Dropped => Pending::ready(self.drop_call(call)),
            FaultKind::Doubled => Pending::ready(self.double(call)),
            FaultKind::OtherGroup => Pending::ready(self.send_elsewhere(call)),
            FaultKind::BiasedTerms => self.group.submit(self.bias_terms(call)),
            FaultKind::OtherMicroBatch => {
                assert_eq!(self.fault.site.calls, Calls::Sends, "messages carry micro-batches");
                // The lowest bit says that these are activations, the next ones which micro-batch.
                let tag = call.tag.map(|tag| if tag & 1 == 1 { tag ^ 2 } else { tag });
                self.group.submit(Call { tag, ..call })
            }
        }
    }

    fn abort(&self, reason: &str) {
        self.group.abort(reason);
    }

    fn take_statistics(&self) -> Statistics {
        self.group.take_statistics()
    }
}

/// A group in which this rank takes itself for another.
pub struct Renumbered {
    group: Arc<dyn Group>,
    rank: usize,
}

impl Renumbered {
    /// Wraps `group`: [`Group::rank`] is `rank`. Collectives are those of the wrapped group.
    pub fn around(group: Arc<dyn Group>, rank: usize) -> Arc<dyn Group> {
        Arc::new(Renumbered { group, rank })
    }
}

impl Group for Renumbered {
    fn name(&self) -> &'static str {
        self.group.name()
    }
    fn axes(&self) -> &[Axis] {
        self.group.axes()
    }
    fn members(&self) -> &[usize] {
        self.group.members()
    }
    fn rank(&self) -> usize {
        self.rank
    }
    fn world_size(&self) -> usize {
        self.group.world_size()
    }
    fn submit(&self, call: Call) -> Pending<Buffers> {
        self.group.submit(call)
    }
    fn abort(&self, reason: &str) {
        self.group.abort(reason);
    }

    fn take_statistics(&self) -> Statistics {
        self.group.take_statistics()
    }
}
