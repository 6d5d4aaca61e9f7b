//! GELU, tanh, gated activations and dropout.

use phalanx_plan::trace::Site;

use super::{alike, floats, gradient};
use crate::arguments::{Dropout, Gate, Gelu};
use crate::device::Device;
use crate::operation::{Describe, Price, operation};
use crate::operations::family::family;
use crate::placement::rules::{Rule, operand, result};
use crate::record::Recorder;
use crate::view::{View, ViewMut};

family! {
    /// Activation functions and dropout.
    Activations { GeluForward, GeluBackward, TanhForward, TanhBackward, Gated, GatedBackward, DropoutForward, }
}

operation! {
    /// `y = gelu(x)`.
    GeluForward {
        /// Read.
        x: View<'a>,
        /// The form of GELU.
        gelu: Gelu,
        /// Like `x`, overwritten.
        y: ViewMut<'a>,
    }
}

impl Describe for GeluForward<'_> {
    const NAME: &'static str = "gelu";

    fn check(&self) {
        alike(self.x, self.y.as_view());
    }

    fn price(&self) -> Price {
        Price::bytes(self.x.bytes() + self.y.bytes())
    }

    fn follow(&self, recorder: &Recorder, site: Site) {
        let factors = &[operand("x", "rh", self.x)];
        let results = &[result("y", "rh", &self.y, false)];
        recorder.follow(&Rule::of(Self::NAME, factors, results), site);
    }
}

operation! {
    /// In place: `dy` becomes `dx = dy * gelu'(x)`; `db (+)= sum over rows of dx`, before it is rounded, where it is wanted.
    GeluBackward {
        /// The input of the forward pass, `[.., width]`.
        x: View<'a>,
        /// The form of GELU.
        gelu: Gelu,
        /// `[.., width]`, becomes dx.
        dy: ViewMut<'a>,
        /// `[width]`
        db: Option<ViewMut<'a>>,
        /// True to accumulate into `db`.
        accumulate: bool,
    }
}

impl Describe for GeluBackward<'_> {
    const NAME: &'static str = "gelu_backward";

    fn check(&self) {
        let GeluBackward { x, dy, db, .. } = self;
        let [_, width] = x.shape().rows_cols();
        alike(*x, dy.as_view());
        if let Some(db) = db {
            assert_eq!(width, db.elements(), "{x:?}, {dy:?} -> {db:?}");
            gradient(db, x.dtype());
        }
    }

    fn price(&self) -> Price {
        Price::bytes(self.x.bytes() + 2 * self.dy.bytes())
    }

    fn follow(&self, recorder: &Recorder, site: Site) {
        let GeluBackward { x, dy, db, accumulate, .. } = self;
        let mut results = vec![result("dx", "rh", dy, false)];
        results.extend(db.iter().map(|db| result("db", "h", db, *accumulate)));
        let factors = &[operand("x", "rh", *x), operand("dy", "rh", dy.as_view())];
        recorder.follow(&Rule::of(Self::NAME, factors, &results), site);
    }
}

operation! {
    /// `y = tanh(x)`.
    TanhForward {
        /// Read.
        x: View<'a>,
        /// Like `x`, overwritten.
        y: ViewMut<'a>,
    }
}

impl Describe for TanhForward<'_> {
    const NAME: &'static str = "tanh";

    fn check(&self) {
        alike(self.x, self.y.as_view());
    }

    fn price(&self) -> Price {
        Price::bytes(self.x.bytes() + self.y.bytes())
    }

    fn follow(&self, recorder: &Recorder, site: Site) {
        let factors = &[operand("x", "rh", self.x)];
        let results = &[result("y", "rh", &self.y, false)];
        recorder.follow(&Rule::of(Self::NAME, factors, results), site);
    }
}

operation! {
    /// In place: `dy` becomes `dx = dy * (1 - y²)`.
    TanhBackward {
        /// The output of the forward pass.
        y: View<'a>,
        /// Like `y`, becomes dx.
        dy: ViewMut<'a>,
    }
}

impl Describe for TanhBackward<'_> {
    const NAME: &'static str = "tanh_backward";

    fn check(&self) {
        alike(self.y, self.dy.as_view());
    }

    fn price(&self) -> Price {
        Price::bytes(self.y.bytes() + 2 * self.dy.bytes())
    }

    fn follow(&self, recorder: &Recorder, site: Site) {
        let factors = &[operand("y", "rh", self.y), operand("dy", "rh", self.dy.as_view())];
        let results = &[result("dx", "rh", &self.dy, false)];
        recorder.follow(&Rule::of(Self::NAME, factors, results), site);
    }
}

operation! {
    /// `y[i] = act(x[i]) * x[m + i]` for each row.
    Gated {
        /// `[.., 2 m]`: the gate, and what it lets through.
        x: View<'a>,
        /// The activation.
        gate: Gate,
        /// `[.., m]`, overwritten.
        y: ViewMut<'a>,
    }
}

impl Describe for Gated<'_> {
    const NAME: &'static str = "gated";

    fn check(&self) {
        let Gated { x, y, .. } = self;
        check_gated(*x, y.as_view());
    }

    fn price(&self) -> Price {
        Price::bytes(self.x.bytes() + self.y.bytes())
    }

    /// A shard of the last dimension has the same columns of both halves.
    fn follow(&self, recorder: &Recorder, site: Site) {
        let factors = &[operand("x", "rh", self.x)];
        let results = &[result("y", "rh", &self.y, false)];
        recorder.follow(&Rule::of(Self::NAME, factors, results), site);
    }
}

operation! {
    /// The gradient of [`struct@Gated`], in place: `x` becomes dx, `dx[i] = dy[i] * x[m + i] * act'(x[i])` and
    /// `dx[m + i] = dy[i] * act(x[i])`.
    GatedBackward {
        /// The input of the forward pass, `[.., 2 m]`; becomes dx.
        x: ViewMut<'a>,
        /// The activation.
        gate: Gate,
        /// `[.., m]`
        dy: View<'a>,
    }
}

impl Describe for GatedBackward<'_> {
    const NAME: &'static str = "gated_backward";

    fn check(&self) {
        let GatedBackward { x, dy, .. } = self;
        check_gated(x.as_view(), *dy);
    }

    fn price(&self) -> Price {
        Price::bytes(2 * self.x.bytes() + self.dy.bytes())
    }

    fn follow(&self, recorder: &Recorder, site: Site) {
        let factors = &[operand("x", "rh", self.x.as_view()), operand("dy", "rh", self.dy)];
        let results = &[result("dx", "rh", &self.x, false)];
        recorder.follow(&Rule::of(Self::NAME, factors, results), site);
    }
}

operation! {
    /// Dropout (Srivastava et al., 2014): `to = from / (1 - p)` where an element is kept, else 0, `(+ residual)`.
    DropoutForward {
        /// Read.
        from: View<'a>,
        /// Which elements are dropped.
        dropout: Dropout,
        /// Elements of a whole row, by which the mask counts the rows, where x has some columns of each; 0 where it has all.
        row: usize,
        /// Like the result, added to it.
        residual: Option<View<'a>>,
        /// Overwritten.
        to: ViewMut<'a>,
    }
}

impl Describe for DropoutForward<'_> {
    const NAME: &'static str = "dropout";

    fn check(&self) {
        let DropoutForward { from, dropout, row, residual, to } = self;
        assert_eq!((from.elements(), from.dtype()), (to.elements(), to.dtype()), "{from:?} -> {to:?}");
        assert!(residual.is_none_or(|r| (r.elements(), r.dtype()) == (to.elements(), to.dtype())));
        assert!((0.0..1.0).contains(&dropout.p), "{dropout:?}");
        assert!(*row == 0 || *row >= from.shape().rows_cols()[1], "rows of {row} for {from:?}");
    }

    fn price(&self) -> Price {
        let DropoutForward { from, residual, to, .. } = self;
        Price::bytes(from.bytes() + to.bytes() + residual.map_or(0, |r| r.bytes()))
    }

    fn follow(&self, recorder: &Recorder, site: Site) {
        let rule = Rule {
            op: Self::NAME,
            factors: &[operand("from", "rh", self.from).linear()],
            addends: &[self.residual.map(|r| operand("residual", "rh", r))],
            results: &[result("to", "rh", &self.to, false)],
            whole: &[],
        };
        recorder.follow(&rule, site);
    }
}

impl Device {
    /// `y = gelu(x)`, overwrites.
    #[track_caller]
    pub fn gelu(&self, x: View, gelu: Gelu, y: ViewMut) {
        self.run(GeluForward { x, gelu, y });
    }

    /// In place: `dy` becomes `dx = dy * gelu'(x)`; `db (+)= sum over rows of dx`, before it is rounded,
    /// where it is wanted. x, dy `[.., width]`, db `[width]`.
    #[track_caller]
    pub fn gelu_backward(&self, x: View, gelu: Gelu, dy: ViewMut, db: Option<ViewMut>, accumulate: bool) {
        self.run(GeluBackward { x, gelu, dy, db, accumulate });
    }

    /// `y = tanh(x)`, overwrites.
    #[track_caller]
    pub fn tanh(&self, x: View, y: ViewMut) {
        self.run(TanhForward { x, y });
    }

    /// The gradient of [`Device::tanh`], in place: dy becomes `dx = dy * (1 - y²)`, of the output y.
    #[track_caller]
    pub fn tanh_backward(&self, y: View, dy: ViewMut) {
        self.run(TanhBackward { y, dy });
    }

    /// `y[i] = act(x[i]) * x[m + i]` for each row, overwrites. x `[.., 2 m]`, y `[.., m]`.
    #[track_caller]
    pub fn gated(&self, x: View, gate: Gate, y: ViewMut) {
        self.run(Gated { x, gate, y });
    }

    /// The gradient of [`Device::gated`], in place: x `[.., 2 m]` becomes dx. dy `[.., m]`.
    #[track_caller]
    pub fn gated_backward(&self, x: ViewMut, gate: Gate, dy: View) {
        self.run(GatedBackward { x, gate, dy });
    }

    /// `to = from / (1 - p)` where an element is kept, else 0, `(+ residual)`; `to` is overwritten. The backward of
    /// dropout is the same operation on the gradient.
    #[track_caller]
    pub fn dropout(&self, from: View, dropout: Dropout, residual: Option<View>, to: ViewMut) {
        self.run(DropoutForward { from, dropout, row: 0, residual, to });
    }
}

/// A gate and what it lets through in the rows of `x`, and a row of half the length.
#[track_caller]
fn check_gated(x: View, y: View) {
    let ([rows, both], [y_rows, columns]) = (x.shape().rows_cols(), y.shape().rows_cols());
    assert_eq!((rows, both, x.dtype()), (y_rows, 2 * columns, y.dtype()), "gated {x:?} and {y:?}");
    floats([x.dtype(); 2]);
}
