//! Placements in a dry run: what a collective expects of its buffers, and how it leaves them.
//!
//! Along each axis that the group runs over: sums want partial sums, gathers want parts. What was neither placed
//! nor computed is left alone, as are zeros. Pieces of a buffer (parameters in a chunk) are followed one by one,
//! so what is true of them along other axes stays true.

use phalanx_plan::trace::{Axis, CollectiveOp, Placement, Placements, Site};
use phalanx_tensor::placement::Mark;
use phalanx_tensor::record::Recorder;
use phalanx_tensor::{Tensor, View};

use crate::call::{Buffers, Call};
use crate::parts;

/// One call of a recording group.
pub(crate) struct Following<'a> {
    pub(crate) recorder: &'a Recorder,
    pub(crate) group: &'a str,
    /// Axes that the group runs over.
    pub(crate) axes: &'a [Axis],
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
}

impl Following<'_> {
    /// Checks the placements of a call's buffers, updates those that it writes, and returns those that it reads.
    pub(crate) fn follow(&self, call: &Call) -> Placements {
        let Buffers { source, target } = &call.buffers;
        let Some(first) = source.as_ref().or(target.as_ref()) else { return Placements::REPLICATED };
        let read = first.view();
        let before = self.recorder.mark_of(read).unwrap_or(Mark::REPLICATED);
        let before = before.seen_in(read.shape().as_slice().len());
        if self.recorder.is_placing() {
            self.pass(call);
        }
        before
    }

    fn pass(&self, call: &Call) {
        use CollectiveOp::*;
        let Call { op, site, buffers: Buffers { source, target }, .. } = call;
        let is_root = call.root == Some(self.rank);
        let replicated = |mark: Mark| self.along(mark, |_| Placement::Replicated);
        match (op, source, target) {
            (AllReduce | Reduce, Some(x), _) => {
                self.check(x.view(), *op, *site, true);
                let everywhere = *op == AllReduce || is_root;
                self.change(x.view(), x.view(), |mark, _| mark.map(replicated).filter(|_| everywhere));
            }
            (Broadcast, Some(x), _) => self.change(x.view(), x.view(), |mark, _| mark.map(replicated)),
            (ReduceScatter, Some(whole), shard) => self.reduce_scatter(call, whole, shard.as_ref()),
            (AllGather, shard, Some(whole)) => {
                let own = self.part(whole);
                self.check(shard.as_ref().map_or(own, Tensor::view), *op, *site, false);
                self.all_gather(shard.as_ref(), whole);
            }
            (Gather, Some(part), whole) => {
                self.check(part.view(), *op, *site, false);
                if let Some(whole) = whole {
                    self.all_gather(Some(part), whole);
                }
            }
            (Scatter, Some(whole), Some(part)) => {
                self.change(self.part(whole), part.view(), |mark, old| {
                    mark.map(|m| self.cut(m, old, part)).or(old)
                });
            }
            (AllToAll, Some(from), Some(to)) => self.change(from.view(), to.view(), |mark, _| mark),
            // A received message has the placement of the receiver's buffer; the plan compares it with the sender's.
            _ => {}
        }
    }

    fn reduce_scatter(&self, call: &Call, whole: &Tensor, shard: Option<&Tensor>) {
        self.check(whole.view(), call.op, call.site, true);
        let own = self.part(whole);
        if let Some(shard) = shard {
            if call.accumulate {
                self.check_old(shard, call.site);
            }
            return self.change(own, shard.view(), |mark, old| mark.map(|m| self.cut(m, old, shard)).or(old));
        }
        self.change(own, own, |mark, _| mark.map(|m| self.cut(m, None, whole)));
        // Outside this rank's part the contents are unspecified.
        let n = own.elements();
        for others in [0..self.rank * n, (self.rank + 1) * n..self.world_size * n] {
            self.recorder.mark(whole.view().range(others), None);
        }
    }

    /// A whole without placements gets that of the shard, if the shard has one piece. Otherwise the pieces of the whole
    /// stay, this rank's part gets the pieces of the shard, and unmarked ranges (padding between parameters) stay
    /// unmarked.
    fn all_gather(&self, shard: Option<&Tensor>, whole: &Tensor) {
        let replicated = |mark: Mark| self.along(mark, |_| Placement::Replicated);
        let fresh = self.recorder.marks_in(whole.view()).iter().all(Option::is_none);
        let pieces = shard.map_or(Vec::new(), |shard| self.recorder.marks_in(shard.view()));
        if let ([Some(mark)], true) = (&pieces[..], fresh) {
            return self.recorder.mark(whole.view(), Some(replicated(*mark)));
        }
        self.change(whole.view(), whole.view(), |mark, _| mark.map(replicated));
        if let Some(shard) = shard {
            self.change(shard.view(), self.part(whole), |mark, old| mark.map(replicated).or(old));
        }
    }

    fn change(&self, from: View, to: View, f: impl FnMut(Option<Mark>, Option<Mark>) -> Option<Mark>) {
        self.recorder.combine_marks(from, to, f);
    }

    /// This rank's part of a buffer.
    fn part<'a>(&self, whole: &'a Tensor) -> View<'a> {
        let count = whole.shape().elements();
        whole.view().range(parts::equal(count, self.world_size, self.rank))
    }

    /// The same mark with a new placement along the group's axes.
    fn along(&self, mark: Mark, placement: impl Fn(Axis) -> Placement) -> Mark {
        self.axes.iter().fold(mark, |mark, axis| mark.with(*axis, Some(placement(*axis))))
    }

    /// The mark of a part of a whole: sharded in dimension 0, or in the dimension in which its owner placed it.
    fn cut(&self, mark: Mark, old: Option<Mark>, part: &Tensor) -> Mark {
        let dimensions = part.shape().as_slice().len().max(mark.dimensions());
        let old = old.map(|old| old.of_dimensions(dimensions));
        self.along(mark.of_dimensions(dimensions), |axis| match old.and_then(|old| old.get(axis)) {
            Some(placed @ Placement::Shard(_)) => placed,
            _ => Placement::Shard(0),
        })
    }

    /// Reports, along each axis of the group, the first piece of `x` that is not a partial sum (if `sums`) or not a
    /// shard.
    fn check(&self, x: View, op: CollectiveOp, site: Site, sums: bool) {
        let marks = self.recorder.marks_in(x);
        for axis in self.axes.iter().filter(|axis| self.recorder.is_checked(**axis)) {
            let mut placements = marks.iter().flatten().filter_map(|mark| mark.get(*axis));
            let fits = |p: &Placement| match p {
                Placement::Replicated => false,
                Placement::Shard(_) => !sums,
                Placement::Partial => sums,
            };
            if let Some(found) = placements.find(|p| !fits(p)) {
                self.recorder.fault(x, *axis, self.words(op, found, *axis), site);
            }
        }
    }

    fn words(&self, op: CollectiveOp, found: Placement, axis: Axis) -> String {
        let (op, axis, group) = (op.name(), axis.name(), self.group);
        match found {
            Placement::Replicated => format!(
                "goes into {op} of group `{group}` but is already replicated over `{axis}`: doubled? Remove one of \
                 the two, or look where it should have been cut over `{axis}` before"
            ),
            Placement::Shard(dimension) => format!(
                "goes into {op} of group `{group}` but is sharded over `{axis}` in dimension {dimension}: wrong \
                 collective or axis? {op} expects a partial sum over `{axis}`; parts are joined by an all_gather"
            ),
            Placement::Partial => format!(
                "goes into {op} of group `{group}` but is a partial sum over `{axis}`: wrong collective or axis? \
                 {op} expects parts; a partial sum is reduced by an all_reduce or reduce_scatter"
            ),
        }
    }

    /// Checks that the shard to which a reduce_scatter adds is placed like its result, or zero.
    fn check_old(&self, shard: &Tensor, site: Site) {
        let marks = self.recorder.marks_in(shard.view());
        for axis in self.axes.iter().filter(|axis| self.recorder.is_checked(**axis)) {
            let wrong = |p: &Placement| !matches!(p, Placement::Shard(_));
            let mut placements = marks.iter().flatten().filter_map(|mark| mark.get(*axis));
            if let Some(found) = placements.find(wrong) {
                let (group, axis_name) = (self.group, axis.name());
                let what = format!(
                    "is {found} along `{axis_name}`, but reduce_scatter of group `{group}` adds this rank's part of \
                     a sum to it: expected it sharded or zero"
                );
                self.recorder.fault(shard.view(), *axis, what, site);
            }
        }
    }
}
