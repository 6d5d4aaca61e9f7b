//! The rules of the two ends of a language model: see [`rules`](super::rules) for how they are written.

use phalanx_trace::{Axis, Placement};

use super::marks::Mark;
use super::operations::{WHOLE_SUMS, operand, result, weight};
use super::rules::Rule;
use crate::buffer::{View, ViewMut};
use crate::device::Device;
use crate::kernels::{Positions, Weight};

impl Device {
    /// A table of which each rank has some rows gives terms of a sum, to which positions may not be added yet.
    #[track_caller]
    pub(crate) fn follow_embedding(
        &self,
        ids: View,
        table: View,
        positions: Option<Positions>,
        accumulate: bool,
        y: &ViewMut,
    ) {
        let Some(recorder) = self.placing() else { return };
        recorder.follow(&Rule {
            op: "embedding",
            factors: &[operand("ids", "r", ids), operand("table", "vh", table)],
            addends: &[positions.map(|p| operand("positions", "ph", p.table))],
            results: &[result("y", "rh", y, accumulate)],
            whole: &[],
        });
    }

    #[track_caller]
    pub(crate) fn follow_add_positions(&self, positions: Positions, y: &ViewMut) {
        let Some(recorder) = self.placing() else { return };
        recorder.follow(&Rule {
            op: "add_positions",
            factors: &[],
            addends: &[Some(operand("positions", "ph", positions.table))],
            results: &[result("y", "rh", y, true)],
            whole: &[],
        });
    }

    #[track_caller]
    pub(crate) fn follow_embedding_backward(&self, ids: View, dy: View, dtable: &ViewMut, accumulate: bool) {
        let Some(recorder) = self.placing() else { return };
        recorder.follow(&Rule {
            op: "embedding_backward",
            factors: &[operand("ids", "r", ids), operand("dy", "rh", dy)],
            addends: &[],
            results: &[result("dtable", "vh", dtable, accumulate)],
            whole: &[],
        });
    }

    #[track_caller]
    pub(crate) fn follow_position_gradient(&self, dy: View, dpositions: &ViewMut, accumulate: bool) {
        let Some(recorder) = self.placing() else { return };
        recorder.follow(&Rule {
            op: "position_gradient",
            factors: &[operand("dy", "rh", dy)],
            addends: &[],
            results: &[result("dpositions", "ph", dpositions, accumulate)],
            whole: &[],
        });
    }

    /// What one part of the classes gives of its rows is that part's: to be gathered.
    #[track_caller]
    pub(crate) fn follow_vocabulary_statistics(
        &self,
        x: View,
        w: Weight,
        bias: Option<View>,
        targets: View,
        exponentials: Option<&ViewMut>,
        [blocks, statistics]: [&ViewMut; 2],
    ) {
        let Some(recorder) = self.placing() else { return };
        let blocks = result("blocks", "ro", blocks, false);
        let exponentials = exponentials.map(|e| result("exponentials", "ro", e, false));
        let factors = [
            operand("x", "ri", x),
            operand("w", weight(w.layout), w.matrix),
            operand("targets", "r", targets),
        ];
        recorder.follow(&Rule {
            op: "vocabulary_statistics",
            factors: &factors,
            addends: &[bias.map(|b| operand("bias", "o", b))],
            results: &[blocks, exponentials.unwrap_or(blocks)],
            whole: &[('i', WHOLE_SUMS)],
        });
        self.follow_statistics_of_rows("vocabulary_statistics", targets, blocks.view, statistics);
    }

    /// The same of logits that are stored, which become exponentials.
    #[track_caller]
    pub(crate) fn follow_logits_statistics(
        &self,
        logits: &ViewMut,
        targets: View,
        [blocks, statistics]: [&ViewMut; 2],
    ) {
        let Some(recorder) = self.placing() else { return };
        let blocks = result("blocks", "ro", blocks, false);
        recorder.follow(&Rule {
            op: "logits_statistics",
            factors: &[operand("logits", "ro", logits.as_view()), operand("targets", "r", targets)],
            addends: &[],
            results: &[blocks, result("exponentials", "ro", logits, false)],
            whole: &[],
        });
        self.follow_statistics_of_rows("logits_statistics", targets, blocks.view, statistics);
    }

    /// Statistics lie as their rows do; of logits that are cut by classes, they are to be gathered.
    #[track_caller]
    fn follow_statistics_of_rows(&self, op: &'static str, targets: View, blocks: View, statistics: &ViewMut) {
        let Some(recorder) = self.placing() else { return };
        recorder.follow(&Rule {
            op,
            factors: &[operand("targets", "r", targets)],
            addends: &[],
            results: &[result("statistics", "rk", statistics, false)],
            whole: &[],
        });
        let known = |view: View| recorder.mark_of(view).unwrap_or(Mark::REPLICATED);
        let (mut own, cut) = (known(statistics.as_view()), known(blocks));
        let rows = known(statistics.as_view());
        for axis in Axis::ALL.into_iter().filter(|axis| recorder.is_checked(*axis)) {
            let by_classes = matches!(cut.get(axis), Some(Placement::Shard(_)));
            if by_classes && rows.get(axis) == Some(Placement::Replicated) {
                own = own.with(axis, Some(Placement::Shard(0)));
            }
        }
        recorder.mark(statistics.as_view(), Some(own));
    }

    /// The loss needs the statistics of all classes; derivatives stay where their classes are.
    #[track_caller]
    pub(crate) fn follow_vocabulary_loss(
        &self,
        statistics: View,
        targets: View,
        exponentials: Option<&ViewMut>,
        loss: &ViewMut,
        accumulate: bool,
    ) {
        let Some(recorder) = self.placing() else { return };
        let statistics = operand("statistics", "rk", statistics);
        recorder.follow(&Rule {
            op: "vocabulary_loss",
            factors: &[statistics, operand("targets", "r", targets)],
            addends: &[],
            results: &[result("loss", "", loss, accumulate)],
            whole: &[],
        });
        let Some(exponentials) = exponentials else { return };
        recorder.follow(&Rule {
            op: "vocabulary_loss",
            factors: &[operand("exponentials", "ro", exponentials.as_view())],
            addends: &[],
            results: &[result("derivatives", "ro", exponentials, false)],
            whole: &[],
        });
    }

    /// The sum of a list of which each rank has a part is a partial sum.
    pub(crate) fn follow_tree_sum(&self, x: View, out: &ViewMut) {
        let Some(recorder) = self.placing() else { return };
        let sum = |mark: Mark| {
            Axis::ALL.into_iter().fold(mark.of_dimensions(1), |mark, axis| match mark.get(axis) {
                Some(Placement::Shard(_)) => mark.with(axis, Some(Placement::Partial)),
                _ => mark,
            })
        };
        recorder.mark(out.as_view(), recorder.mark_of(x).map(sum));
    }

    /// A multiple of a partial sum is one.
    pub(crate) fn follow_scaled(&self, x: View, out: &ViewMut) {
        let Some(recorder) = self.placing() else { return };
        recorder.mark(out.as_view(), recorder.mark_of(x));
    }
}
