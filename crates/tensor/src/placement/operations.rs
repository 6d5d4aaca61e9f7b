//! The rule of each operation; nothing is done where nobody placed anything.
//!
//! The signatures are those of [`rules`](super::rules). Flat operations (copies, sums, optimizer steps) go piece
//! by piece over what lies in their ranges.

use phalanx_trace::{Axis, Placement, Site};

use crate::buffer::{View, ViewMut};
use crate::device::Device;
use crate::kernels::{Epilogue, Layout, Weight};
use crate::placement::marks::Mark;
use crate::placement::rules::{Operand, Rule, adds};

const WHOLE_ROWS: &str = "its rows are normalised whole";
const WHOLE_SEQUENCE: &str = "every position looks at the others";
pub(super) const WHOLE_SUMS: &str =
    "its result would be a partial sum, which the function reads before it is reduced";

pub(super) fn operand<'a>(name: &'static str, letters: &'static str, view: View<'a>) -> Operand<'a> {
    Operand { name, letters, view, accumulates: false }
}

pub(super) fn result<'a>(
    name: &'static str,
    letters: &'static str,
    view: &'a ViewMut,
    accumulates: bool,
) -> Operand<'a> {
    Operand { name, letters, view: view.as_view(), accumulates }
}

/// Letters of a weight matrix.
pub(super) fn weight(layout: Layout) -> &'static str {
    match layout {
        Layout::InOut => "io",
        Layout::OutIn => "oi",
    }
}

impl Device {
    #[track_caller]
    pub(crate) fn follow_linear(&self, x: View, w: Weight, epilogue: Epilogue, y: &ViewMut) {
        let Some(recorder) = self.placing() else { return };
        recorder.follow(&Rule {
            op: "linear",
            factors: &[operand("x", "ri", x), operand("w", weight(w.layout), w.matrix)],
            addends: &[
                epilogue.bias.map(|b| operand("bias", "o", b)),
                epilogue.residual.map(|r| operand("residual", "ro", r)),
            ],
            results: &[result("y", "ro", y, false)],
            whole: &[],
        });
    }

    #[track_caller]
    pub(crate) fn follow_linear_gelu(&self, x: View, w: Weight, bias: View, pre: &ViewMut, y: &ViewMut) {
        let Some(recorder) = self.placing() else { return };
        recorder.follow(&Rule {
            op: "linear_gelu",
            factors: &[operand("x", "ri", x), operand("w", weight(w.layout), w.matrix)],
            addends: &[Some(operand("bias", "o", bias))],
            results: &[result("pre", "ro", pre, false), result("y", "ro", y, false)],
            whole: &[('i', WHOLE_SUMS)],
        });
    }

    #[track_caller]
    pub(crate) fn follow_linear_input_gradient(&self, dy: View, w: Weight, dx: &ViewMut, accumulate: bool) {
        let Some(recorder) = self.placing() else { return };
        recorder.follow(&Rule {
            op: "linear_input_gradient",
            factors: &[operand("dy", "ro", dy), operand("w", weight(w.layout), w.matrix)],
            addends: &[],
            results: &[result("dx", "ri", dx, accumulate)],
            whole: &[],
        });
    }

    #[track_caller]
    pub(crate) fn follow_linear_weight_gradient(
        &self,
        x: View,
        dy: View,
        dw: &ViewMut,
        layout: Layout,
        accumulate: bool,
    ) {
        let Some(recorder) = self.placing() else { return };
        recorder.follow(&Rule {
            op: "linear_weight_gradient",
            factors: &[operand("x", "ri", x), operand("dy", "ro", dy)],
            addends: &[],
            results: &[result("dw", weight(layout), dw, accumulate)],
            whole: &[],
        });
    }

    #[track_caller]
    pub(crate) fn follow_bias_gradient(&self, dy: View, db: &ViewMut, accumulate: bool) {
        let Some(recorder) = self.placing() else { return };
        recorder.follow(&Rule {
            op: "bias_gradient",
            factors: &[operand("dy", "ro", dy)],
            addends: &[],
            results: &[result("db", "o", db, accumulate)],
            whole: &[],
        });
    }

    #[track_caller]
    pub(crate) fn follow_layer_norm(&self, x: View, parameters: [View; 2], y: &ViewMut, rows: [&ViewMut; 2]) {
        let Some(recorder) = self.placing() else { return };
        let [gamma, beta] = parameters;
        recorder.follow(&Rule {
            op: "layer_norm",
            factors: &[operand("x", "rh", x), operand("gamma", "h", gamma), operand("beta", "h", beta)],
            addends: &[],
            results: &[
                result("y", "rh", y, false),
                result("mean", "r", rows[0], false),
                result("rstd", "r", rows[1], false),
            ],
            whole: &[('h', WHOLE_ROWS)],
        });
    }

    #[track_caller]
    pub(crate) fn follow_layer_norm_backward(
        &self,
        [x, gamma, mean, rstd, dy]: [View; 5],
        (dx, accumulate_input): (&ViewMut, bool),
        ([dgamma, dbeta], accumulate_parameters): ([&ViewMut; 2], bool),
    ) {
        let Some(recorder) = self.placing() else { return };
        recorder.follow(&Rule {
            op: "layer_norm_backward",
            factors: &[
                operand("x", "rh", x),
                operand("gamma", "h", gamma),
                operand("mean", "r", mean),
                operand("rstd", "r", rstd),
                operand("dy", "rh", dy),
            ],
            addends: &[],
            results: &[
                result("dx", "rh", dx, accumulate_input),
                result("dgamma", "h", dgamma, accumulate_parameters),
                result("dbeta", "h", dbeta, accumulate_parameters),
            ],
            whole: &[('h', WHOLE_ROWS)],
        });
    }

    #[track_caller]
    pub(crate) fn follow_gelu(&self, x: View, y: &ViewMut) {
        let Some(recorder) = self.placing() else { return };
        recorder.follow(&Rule {
            op: "gelu",
            factors: &[operand("x", "rh", x)],
            addends: &[],
            results: &[result("y", "rh", y, false)],
            whole: &[],
        });
    }

    #[track_caller]
    pub(crate) fn follow_gelu_backward(&self, x: View, dy: &ViewMut, db: &ViewMut, accumulate: bool) {
        let Some(recorder) = self.placing() else { return };
        recorder.follow(&Rule {
            op: "gelu_backward",
            factors: &[operand("x", "rh", x), operand("dy", "rh", dy.as_view())],
            addends: &[],
            results: &[result("dx", "rh", dy, false), result("db", "h", db, accumulate)],
            whole: &[],
        });
    }

    #[track_caller]
    pub(crate) fn follow_dropout(&self, from: View, residual: Option<View>, to: &ViewMut) {
        let Some(recorder) = self.placing() else { return };
        recorder.follow(&Rule {
            op: "dropout",
            factors: &[operand("from", "rh", from)],
            addends: &[residual.map(|r| operand("residual", "rh", r))],
            results: &[result("to", "rh", to, false)],
            whole: &[],
        });
    }

    /// A shard of the last dimension is one of heads: q, k and v of each head lie on one rank.
    #[track_caller]
    pub(crate) fn follow_attention(&self, qkv: View, out: &ViewMut, log_sum_exp: &ViewMut) {
        let Some(recorder) = self.placing() else { return };
        recorder.follow(&Rule {
            op: "attention",
            factors: &[operand("qkv", "bsh", qkv)],
            addends: &[],
            results: &[result("out", "bsh", out, false), result("log_sum_exp", "bhs", log_sum_exp, false)],
            whole: &[('s', WHOLE_SEQUENCE)],
        });
    }

    #[track_caller]
    pub(crate) fn follow_attention_backward(
        &self,
        qkv: View,
        [out, log_sum_exp, dout]: [View; 3],
        dqkv: &ViewMut,
    ) {
        let Some(recorder) = self.placing() else { return };
        recorder.follow(&Rule {
            op: "attention_backward",
            factors: &[
                operand("qkv", "bsh", qkv),
                operand("out", "bsh", out),
                operand("log_sum_exp", "bhs", log_sum_exp),
                operand("dout", "bsh", dout),
            ],
            addends: &[],
            results: &[result("dqkv", "bsh", dqkv, false)],
            whole: &[('s', WHOLE_SEQUENCE)],
        });
    }

    /// The root of a sum: of all blocks, on every rank.
    #[track_caller]
    pub(crate) fn follow_norm(&self, squares: View, norm: &ViewMut, factor: &ViewMut) {
        let Some(recorder) = self.placing() else { return };
        recorder.follow(&Rule {
            op: "norm",
            factors: &[],
            addends: &[],
            results: &[result("norm", "", norm, false), result("factor", "", factor, false)],
            whole: &[],
        });
        self.check_pieces("norm", "squares", squares, Site::caller(), |placement| match placement {
            Placement::Shard(_) => Some("holds this rank's blocks alone: an all_reduce or all_gather"),
            Placement::Partial => Some("is a partial sum: an all_reduce"),
            Placement::Replicated => None,
        });
    }

    /// What the host writes is as the caller placed it, but no longer a partial sum; a zero is one afterwards.
    pub(crate) fn follow_write(&self, x: &ViewMut, zero: bool) {
        let Some(recorder) = self.recorder().filter(|recorder| zero || recorder.is_placing()) else { return };
        if zero {
            return recorder.mark(x.as_view(), Some(Mark::ZERO));
        }
        recorder.combine_marks(x.as_view(), x.as_view(), |mark, _| {
            mark.filter(|mark| {
                Axis::ALL.iter().all(|a| !matches!(mark.get(*a), None | Some(Placement::Partial)))
            })
        });
    }

    /// A number that decides something is the same on all ranks.
    #[track_caller]
    pub(crate) fn follow_fetch(&self, from: View) {
        self.check_pieces("the host", "a number", from, Site::caller(), |placement| {
            (placement == Placement::Partial).then_some("is a partial sum: an all_reduce")
        });
    }

    /// Of copies and conversions.
    pub(crate) fn follow_copy(&self, from: View, to: &ViewMut) {
        let Some(recorder) = self.placing() else { return };
        recorder.combine_marks(from, to.as_view(), |from, _| from);
    }

    /// Both sides of a sum are placed likewise, or one is zero.
    #[track_caller]
    pub(crate) fn follow_add(&self, from: View, into: &ViewMut) {
        let Some(recorder) = self.placing() else { return };
        let mut fault = None;
        let checked = Axis::ALL.map(|axis| recorder.is_checked(axis));
        recorder.combine_marks(from, into.as_view(), |from, into| {
            // Of padding nothing is known before or afterwards.
            from.or(into)?;
            let known = |mark: Option<Mark>| mark.unwrap_or(Mark::REPLICATED);
            let (from, into) = (known(from), known(into));
            for axis in Axis::ALL.into_iter().filter(|axis| checked[*axis as usize]) {
                let pair = from.get(axis).zip(into.get(axis)).filter(|_| !from.agrees(into, axis));
                fault = fault.or(pair.map(|(found, expected)| (axis, found, expected)));
            }
            Some(into.or(from))
        });
        if let Some((axis, found, expected)) = fault {
            recorder.fault(from, axis, adds("add", "from", found, expected, axis), Site::caller());
        }
    }

    /// A gradient is reduced before it is applied. A part of a replicated parameter that is updated from its part
    /// of the gradient is this rank's alone until it is gathered.
    #[track_caller]
    pub(crate) fn follow_update(&self, op: &'static str, p: &ViewMut, g: View, rounded: Option<&ViewMut>) {
        let Some(recorder) = self.placing() else { return };
        self.check_pieces(op, "gradient", g, Site::caller(), |placement| {
            (placement == Placement::Partial).then_some("is a partial sum: an all_reduce or reduce_scatter")
        });
        recorder.combine_marks(g, p.as_view(), |g, p| {
            let (Some(g), p) = (g, p.unwrap_or(Mark::REPLICATED)) else { return p };
            // Along an axis where p is replicated, its part is placed as g's.
            let open = Axis::ALL.into_iter().fold(p, |p, axis| match (g.get(axis), p.get(axis)) {
                (Some(Placement::Shard(_)), Some(Placement::Replicated)) => p.with(axis, None),
                _ => p,
            });
            Some(open.or(g).or(Mark::REPLICATED))
        });
        if let Some(rounded) = rounded {
            recorder.combine_marks(p.as_view(), rounded.as_view(), |p, _| p);
        }
    }

    /// Squares of a part are a partial sum; whether those of replicated elements are counted once or on every
    /// rank is for the caller to know.
    #[track_caller]
    pub(crate) fn follow_block_squares(&self, x: View, squares: &ViewMut) {
        let Some(recorder) = self.placing() else { return };
        self.check_pieces("block_squares", "x", x, Site::caller(), |placement| {
            (placement == Placement::Partial).then_some("is a partial sum: an all_reduce or reduce_scatter")
        });
        let mut mark = Mark::ZERO;
        for axis in Axis::ALL {
            let cut = |m: &Mark| matches!(m.get(axis), Some(Placement::Shard(_)));
            if recorder.marks_in(x).iter().flatten().any(cut) {
                mark = mark.with(axis, Some(Placement::Partial));
            }
        }
        recorder.mark(squares.as_view(), Some(mark));
    }

    /// A count of what is wrong may be summed or not.
    pub(crate) fn follow_count(&self, count: &ViewMut) {
        let Some(recorder) = self.placing() else { return };
        recorder.mark(count.as_view(), Some(Mark::ZERO));
    }

    /// Records a fault along each axis along which `wrong` finds words for the placement of a piece.
    fn check_pieces(
        &self,
        op: &str,
        name: &str,
        x: View,
        site: Site,
        wrong: impl Fn(Placement) -> Option<&'static str>,
    ) {
        let Some(recorder) = self.placing() else { return };
        let marks = recorder.marks_in(x);
        for axis in Axis::ALL.into_iter().filter(|axis| recorder.is_checked(*axis)) {
            let mut placements = marks.iter().flatten().filter_map(|mark| mark.get(axis));
            if let Some(words) = placements.find_map(&wrong) {
                let axis_name = axis.name();
                let what = format!("{words} over `{axis_name}` is missing before {op} reads it as `{name}`");
                recorder.fault(x, axis, what, site);
            }
        }
    }
}
