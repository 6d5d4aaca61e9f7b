//! Magnitudes of the outputs of a linear layer, apart from their directions (Liu et al., "DoRA", arXiv 2402.09353): norms of weights with
//! what an adapter adds, columns that are multiplied by magnitude over norm, and the gradient of the magnitudes.

use phalanx_plan::trace::{DType, Site};

use super::{alike, gradient, same};
use crate::arguments::Weight;
use crate::device::Device;
use crate::operation::{Describe, Price, operation};
use crate::operations::family::family;
use crate::placement::rules::{Operand, Rule, operand, result, weight};
use crate::record::Recorder;
use crate::view::{View, ViewMut};

family! {
    /// Norms of weights by outputs, and columns over them.
    Magnitudes { WeightSquares, Rescale, RescaleGradient, }
}

operation! {
    /// `squares[o]` = the sum over i of `(w[o, i] + scale * sum over k of b[o, k] a[k, i])²`, in f32.
    WeightSquares {
        /// The weight, in either layout.
        w: Weight<'a>,
        /// `[rank, in]`
        a: View<'a>,
        /// `[out, rank]`
        b: View<'a>,
        /// Factor of the product.
        scale: f32,
        /// `[out]` f32, overwritten.
        squares: ViewMut<'a>,
    }
}

impl WeightSquares<'_> {
    /// Inputs, outputs, and rank.
    pub fn extents(&self) -> [usize; 3] {
        let ([inputs, outputs], [width, _]) = (self.w.in_out(), self.a.dims());
        [inputs, outputs, width]
    }
}

impl Describe for WeightSquares<'_> {
    const NAME: &'static str = "weight_squares";

    fn check(&self) {
        let (WeightSquares { w, a, b, squares, .. }, [inputs, outputs, width]) = (self, self.extents());
        assert_eq!(
            (a.dims(), b.dims()),
            ([width, inputs], [outputs, width]),
            "{a:?} and {b:?} for {:?}",
            w.matrix
        );
        same(&[w.matrix.dtype(), a.dtype(), b.dtype()]);
        assert_eq!((squares.dtype(), squares.elements()), (DType::F32, outputs));
    }

    fn price(&self) -> Price {
        Price::bytes(self.w.matrix.bytes() + self.a.bytes() + self.b.bytes())
    }

    /// Squares of a part of the inputs are a partial sum.
    fn follow(&self, recorder: &Recorder, site: Site) {
        let WeightSquares { w, a, b, squares, .. } = self;
        let factors =
            [operand("w", weight(w.layout), w.matrix), operand("a", "ki", *a), operand("b", "ok", *b)];
        recorder.follow(&Rule::of(Self::NAME, &factors, &[result("squares", "o", squares, false)]), site);
    }
}

operation! {
    /// `y = (x - bias) * magnitude / sqrt(squares) + bias` in some columns; the others of y stay. The factor is 0 where the squares are.
    Rescale {
        /// `[.., columns]`
        x: View<'a>,
        /// The first of the columns.
        first: usize,
        /// `[n]`, for as many columns.
        magnitudes: View<'a>,
        /// `[n]` f32
        squares: View<'a>,
        /// `[n]`; 0 where there is none.
        bias: Option<View<'a>>,
        /// `[.., columns]`
        y: ViewMut<'a>,
    }
}

/// Operands that have a number for each column.
fn by_column<'a>(squares: View<'a>, bias: Option<View<'a>>) -> Vec<Operand<'a>> {
    let bias = bias.map(|bias| operand("bias", "o", bias));
    std::iter::once(operand("squares", "o", squares)).chain(bias).collect()
}

/// Checks numbers for each of some columns of x.
#[track_caller]
fn check_columns(x: View, first: usize, squares: View, bias: Option<View>) {
    let ([_, columns], n) = (x.shape().rows_cols(), squares.elements());
    assert!(first + n <= columns && squares.dtype() == DType::F32, "{squares:?} from {first} of {x:?}");
    assert!(bias.is_none_or(|bias| (bias.elements(), bias.dtype()) == (n, x.dtype())), "{bias:?}");
}

impl Describe for Rescale<'_> {
    const NAME: &'static str = "rescale";

    fn check(&self) {
        let Rescale { x, first, magnitudes, squares, bias, y } = self;
        alike(*x, y.as_view());
        check_columns(*x, *first, *squares, *bias);
        assert_eq!((magnitudes.elements(), magnitudes.dtype()), (squares.elements(), x.dtype()));
    }

    fn price(&self) -> Price {
        let [rows, _] = self.x.shape().rows_cols();
        Price::bytes(2 * rows * self.magnitudes.bytes())
    }

    fn follow(&self, recorder: &Recorder, site: Site) {
        let Rescale { x, magnitudes, squares, bias, y, .. } = self;
        let x = operand("x", "ro", *x);
        let mut factors = vec![if bias.is_none() { x.linear() } else { x }];
        factors.push(operand("magnitudes", "o", *magnitudes));
        factors.extend(by_column(*squares, *bias));
        recorder.follow(&Rule::of(Self::NAME, &factors, &[result("y", "ro", y, false)]), site);
    }
}

operation! {
    /// The gradient of the magnitudes of [`Rescale`]: `dm (+)= the sum over rows of dy * (x - bias) / sqrt(squares)`.
    RescaleGradient {
        /// `[.., columns]`, of the forward pass.
        x: View<'a>,
        /// The same.
        first: usize,
        /// The same.
        squares: View<'a>,
        /// The same.
        bias: Option<View<'a>>,
        /// `[.., columns]`
        dy: View<'a>,
        /// `[n]`
        dm: ViewMut<'a>,
        /// True to accumulate into `dm`.
        accumulate: bool,
    }
}

impl Describe for RescaleGradient<'_> {
    const NAME: &'static str = "rescale_gradient";

    fn check(&self) {
        let RescaleGradient { x, first, squares, bias, dy, dm, .. } = self;
        alike(*x, *dy);
        check_columns(*x, *first, *squares, *bias);
        assert_eq!(dm.elements(), squares.elements());
        gradient(dm, x.dtype());
    }

    fn price(&self) -> Price {
        let [rows, _] = self.x.shape().rows_cols();
        Price::bytes(2 * rows * self.squares.elements() * self.x.dtype().bytes())
    }

    fn follow(&self, recorder: &Recorder, site: Site) {
        let RescaleGradient { x, squares, bias, dy, dm, accumulate, .. } = self;
        let x = operand("x", "ro", *x);
        let mut factors = vec![if bias.is_none() { x.linear() } else { x }, operand("dy", "ro", *dy)];
        factors.extend(by_column(*squares, *bias));
        recorder.follow(&Rule::of(Self::NAME, &factors, &[result("dm", "o", dm, *accumulate)]), site);
    }
}

impl Device {
    /// `squares[o]` = the sum over i of `(w + scale * b · a)[o, i]²`; a `[rank, in]`, b `[out, rank]`, squares `[out]` f32, overwritten.
    #[track_caller]
    pub fn weight_squares(&self, w: Weight, [a, b]: [View; 2], scale: f32, squares: ViewMut) {
        self.run(WeightSquares { w, a, b, scale, squares });
    }
}
