//! Linear layers: the product with its epilogues, and the gradients of input, weight and bias.

use phalanx_plan::trace::Site;

use super::{gradient, same};
use crate::arguments::{Epilogue, Gelu, Layout, Weight, logits_stride};
use crate::device::Device;
use crate::operation::{Describe, Price, operation};
use crate::operations::family::family;
use crate::placement::rules::{Rule, WHOLE_SUMS, operand, result, weight};
use crate::record::Recorder;
use crate::view::{View, ViewMut};

family! {
    /// Matrix products of linear layers.
    Products { Linear, LinearGelu, InputGradient, WeightGradient, BiasGradient, }
}

operation! {
    /// `y = x · w (+ bias) (+ residual)`.
    Linear {
        /// `[.., in]`
        x: View<'a>,
        /// `[in, out]`, by its layout.
        w: Weight<'a>,
        /// Bias `[out]` and residual `[.., out]`.
        epilogue: Epilogue<'a>,
        /// `[.., out]`, overwritten.
        y: ViewMut<'a>,
    }
}

impl Describe for Linear<'_> {
    const NAME: &'static str = "linear";

    fn check(&self) {
        let Linear { x, w, epilogue: Epilogue { bias, residual }, y } = self;
        check_linear(*x, *w, *bias, y);
        assert!(residual.is_none_or(|r| r.elements() == y.elements()), "residual {residual:?} for {y:?}");
        assert!(residual.is_none_or(|r| r.dtype() == y.dtype()), "residual {residual:?} for {y:?}");
    }

    fn price(&self) -> Price {
        let added = self.epilogue.residual.map_or(0, |r| r.bytes());
        price_linear(self.x, self.w, &self.y, added)
    }

    fn follow(&self, recorder: &Recorder, site: Site) {
        let Epilogue { bias, residual } = self.epilogue;
        let rule = Rule {
            op: Self::NAME,
            factors: &[
                operand("x", "ri", self.x).linear(),
                operand("w", weight(self.w.layout), self.w.matrix),
            ],
            addends: &[bias.map(|b| operand("bias", "o", b)), residual.map(|r| operand("residual", "ro", r))],
            results: &[result("y", "ro", &self.y, false)],
            whole: &[],
        };
        recorder.follow(&rule, site);
    }
}

operation! {
    /// `pre = x · w + bias`, `y = gelu(pre)`, of `pre` as it is stored, so that `y` can be computed again.
    LinearGelu {
        /// `[.., in]`
        x: View<'a>,
        /// `[in, out]`, by its layout.
        w: Weight<'a>,
        /// `[out]`, if there is one.
        bias: Option<View<'a>>,
        /// The form of GELU.
        gelu: Gelu,
        /// `[.., out]`, overwritten.
        pre: ViewMut<'a>,
        /// `[.., out]`, overwritten.
        y: ViewMut<'a>,
    }
}

impl Describe for LinearGelu<'_> {
    const NAME: &'static str = "linear_gelu";

    fn check(&self) {
        let LinearGelu { x, w, bias, pre, y, .. } = self;
        check_linear(*x, *w, *bias, y);
        assert_eq!((pre.elements(), pre.dtype()), (y.elements(), y.dtype()), "{pre:?} for {y:?}");
    }

    fn price(&self) -> Price {
        price_linear(self.x, self.w, &self.y, self.pre.bytes())
    }

    fn follow(&self, recorder: &Recorder, site: Site) {
        let rule = Rule {
            op: Self::NAME,
            factors: &[operand("x", "ri", self.x), operand("w", weight(self.w.layout), self.w.matrix)],
            addends: &[self.bias.map(|bias| operand("bias", "o", bias))],
            results: &[result("pre", "ro", &self.pre, false), result("y", "ro", &self.y, false)],
            whole: &[('i', WHOLE_SUMS)],
        };
        recorder.follow(&rule, site);
    }
}

operation! {
    /// `dx (+)= dy · wᵀ`.
    InputGradient {
        /// `[.., out]`; where `padded`, `[.., logits_stride(out)]`: rows with the padding of logits, which is zeros.
        dy: View<'a>,
        /// True if rows of `dy` are padded.
        padded: bool,
        /// `[in, out]`, by its layout.
        w: Weight<'a>,
        /// `[.., in]`
        dx: ViewMut<'a>,
        /// True to accumulate into `dx`.
        accumulate: bool,
    }
}

impl Describe for InputGradient<'_> {
    const NAME: &'static str = "linear_input_gradient";

    fn check(&self) {
        let InputGradient { dy, padded, w, dx, .. } = self;
        let [rows, stride] = dy.shape().rows_cols();
        let [inner, out] = w.in_out();
        assert_eq!(stride, row_of(out, *padded), "dx of {dy:?} · {w:?}");
        assert_eq!([rows, inner], dx.shape().rows_cols(), "dx of {dy:?} · {w:?} -> {dx:?}");
        same(&[dy.dtype(), w.matrix.dtype(), dx.dtype()]);
    }

    fn price(&self) -> Price {
        let InputGradient { dy, w, dx, accumulate, .. } = self;
        let bytes = dy.bytes() + w.matrix.bytes() + dx.bytes() * (1 + *accumulate as usize);
        Price::product(dy.dtype(), product_flops(dx.shape().rows_cols()[0], *w), bytes)
    }

    fn follow(&self, recorder: &Recorder, site: Site) {
        let rule = Rule {
            op: Self::NAME,
            factors: &[
                operand("dy", "ro", self.dy).linear(),
                operand("w", weight(self.w.layout), self.w.matrix),
            ],
            addends: &[],
            results: &[result("dx", "ri", &self.dx, self.accumulate)],
            whole: &[],
        };
        recorder.follow(&rule, site);
    }
}

operation! {
    /// `dw (+)= xᵀ · dy`.
    WeightGradient {
        /// `[.., in]`
        x: View<'a>,
        /// `[.., out]`; where `padded`, as that of [`InputGradient`].
        dy: View<'a>,
        /// True if rows of `dy` are padded.
        padded: bool,
        /// `[in, out]`, by its layout.
        dw: ViewMut<'a>,
        /// The layout of `dw`.
        layout: Layout,
        /// True to accumulate into `dw`.
        accumulate: bool,
    }
}

impl Describe for WeightGradient<'_> {
    const NAME: &'static str = "linear_weight_gradient";

    fn check(&self) {
        let WeightGradient { x, dy, padded, dw, layout, .. } = self;
        let [rows, inner] = x.shape().rows_cols();
        let [dy_rows, stride] = dy.shape().rows_cols();
        let [dw_inner, out] = layout.in_out(dw.dims());
        assert_eq!(stride, row_of(out, *padded), "dw of {x:?}, {dy:?} -> {dw:?}");
        assert_eq!((dy_rows, dw_inner), (rows, inner), "dw of {x:?}, {dy:?} -> {dw:?}");
        same(&[x.dtype(), dy.dtype()]);
        gradient(dw, x.dtype());
    }

    fn price(&self) -> Price {
        let WeightGradient { x, dy, dw, accumulate, .. } = self;
        let bytes = x.bytes() + dy.bytes() + dw.bytes() * (1 + *accumulate as usize);
        let flops = 2 * x.shape().rows_cols()[0] * dw.elements();
        Price::product(x.dtype(), flops, bytes)
    }

    fn follow(&self, recorder: &Recorder, site: Site) {
        let rule = Rule {
            op: Self::NAME,
            factors: &[operand("x", "ri", self.x).linear(), operand("dy", "ro", self.dy).linear()],
            addends: &[],
            results: &[result("dw", weight(self.layout), &self.dw, self.accumulate)],
            whole: &[],
        };
        recorder.follow(&rule, site);
    }
}

operation! {
    /// `db (+)= sum over rows of dy`.
    BiasGradient {
        /// `[.., out]`; where `padded`, as that of [`InputGradient`].
        dy: View<'a>,
        /// True if rows of `dy` are padded.
        padded: bool,
        /// `[out]`
        db: ViewMut<'a>,
        /// True to accumulate into `db`.
        accumulate: bool,
    }
}

impl Describe for BiasGradient<'_> {
    const NAME: &'static str = "bias_gradient";

    fn check(&self) {
        let BiasGradient { dy, padded, db, .. } = self;
        assert_eq!(dy.shape().rows_cols()[1], row_of(db.elements(), *padded), "db of {dy:?} -> {db:?}");
        gradient(db, dy.dtype());
    }

    fn price(&self) -> Price {
        Price::bytes(self.dy.bytes())
    }

    fn follow(&self, recorder: &Recorder, site: Site) {
        let rule = Rule {
            op: Self::NAME,
            factors: &[operand("dy", "ro", self.dy)],
            addends: &[],
            results: &[result("db", "o", &self.db, self.accumulate)],
            whole: &[],
        };
        recorder.follow(&rule, site);
    }
}

impl Device {
    /// `y = x · w (+ bias) (+ residual)`; x `[.., in]`, w `[in, out]` by its layout, y, residual
    /// `[.., out]`, bias `[out]`. y is overwritten.
    #[track_caller]
    pub fn linear(&self, x: View, w: Weight, epilogue: Epilogue, y: ViewMut) {
        self.run(Linear { x, w, epilogue, y });
    }

    /// `pre = x · w (+ bias)`, `y = gelu(pre)`; shapes as those of [`Device::linear`], both overwritten.
    #[track_caller]
    pub fn linear_gelu(&self, x: View, w: Weight, bias: Option<View>, gelu: Gelu, pre: ViewMut, y: ViewMut) {
        self.run(LinearGelu { x, w, bias, gelu, pre, y });
    }

    /// `dx (+)= dy · wᵀ`; dy `[.., out]`, dx `[.., in]`.
    #[track_caller]
    pub fn linear_input_gradient(&self, dy: View, w: Weight, dx: ViewMut, accumulate: bool) {
        self.run(InputGradient { dy, padded: false, w, dx, accumulate });
    }

    /// `dw (+)= xᵀ · dy`; x `[.., in]`, dy `[.., out]`, dw in the layout given.
    #[track_caller]
    pub fn linear_weight_gradient(&self, x: View, dy: View, dw: ViewMut, layout: Layout, accumulate: bool) {
        self.run(WeightGradient { x, dy, padded: false, dw, layout, accumulate });
    }

    /// `db (+)= sum over rows of dy`; dy `[.., out]`, db `[out]`.
    #[track_caller]
    pub fn bias_gradient(&self, dy: View, db: ViewMut, accumulate: bool) {
        self.run(BiasGradient { dy, padded: false, db, accumulate });
    }
}

/// Elements of a row of `columns` derivatives.
fn row_of(columns: usize, padded: bool) -> usize {
    if padded { logits_stride(columns) } else { columns }
}

#[track_caller]
fn check_linear(x: View, w: Weight, bias: Option<View>, y: &ViewMut) {
    let [rows, inner] = x.shape().rows_cols();
    let [w_in, out] = w.in_out();
    assert_eq!((w_in, [rows, out]), (inner, y.shape().rows_cols()), "linear {x:?} · {w:?} -> {y:?}");
    assert!(bias.is_none_or(|b| b.elements() == out), "bias {bias:?} for {out} outputs");
    assert!(bias.is_none_or(|b| b.dtype() == y.dtype()), "bias {bias:?} for {y:?}");
    same(&[x.dtype(), w.matrix.dtype(), y.dtype()]);
}

/// The price of `x · w -> y`; `more` bytes are read or written beside these.
fn price_linear(x: View, w: Weight, y: &ViewMut, more: usize) -> Price {
    let bytes = x.bytes() + w.matrix.bytes() + y.bytes() + more;
    Price::product(x.dtype(), product_flops(x.shape().rows_cols()[0], w), bytes)
}

/// Operations of a product of `rows` rows with a weight.
pub(super) fn product_flops(rows: usize, w: Weight) -> usize {
    let [inner, out] = w.in_out();
    2 * rows * inner * out
}
