//! Layer norm.

use phalanx_trace::{DType, Site};

use super::{gradient, same};
use crate::device::Device;
use crate::operation::{Describe, Price, operation};
use crate::operations::family::family;
use crate::placement::rules::{Rule, operand, result};
use crate::record::Recorder;
use crate::view::{View, ViewMut};

const WHOLE_ROWS: &str = "its rows are normalised whole";

family! {
    /// Normalisation of rows.
    Normalization { LayerNorm, LayerNormBackward, }
}

operation! {
    /// Layer norm over the last dimension (Ba et al., arXiv 1607.06450).
    LayerNorm {
        /// `[.., hidden]`
        x: View<'a>,
        /// gamma and beta, `[hidden]` each.
        parameters: [View<'a>; 2],
        /// Added to the variance.
        eps: f32,
        /// `[.., hidden]`, overwritten.
        y: ViewMut<'a>,
        /// Mean and 1/sqrt(var + eps) of each row, `[rows]` f32 each, overwritten; backward reads them.
        statistics: [ViewMut<'a>; 2],
    }
}

impl Describe for LayerNorm<'_> {
    const NAME: &'static str = "layer_norm";

    fn check(&self) {
        let LayerNorm { x, parameters: [gamma, beta], y, statistics: [mean, rstd], .. } = self;
        let [rows, hidden] = x.shape().rows_cols();
        assert_eq!([gamma.elements(), beta.elements()], [hidden; 2], "layer_norm of {x:?}");
        assert_eq!([y.elements(), mean.elements(), rstd.elements()], [x.elements(), rows, rows]);
        same(&[x.dtype(), gamma.dtype(), beta.dtype(), y.dtype()]);
        same(&[DType::F32, mean.dtype(), rstd.dtype()]);
    }

    fn price(&self) -> Price {
        Price::bytes(self.x.bytes() + self.y.bytes())
    }

    fn follow(&self, recorder: &Recorder, site: Site) {
        let LayerNorm { x, parameters: [gamma, beta], y, statistics: [mean, rstd], .. } = self;
        let rule = Rule {
            op: Self::NAME,
            factors: &[operand("x", "rh", *x), operand("gamma", "h", *gamma), operand("beta", "h", *beta)],
            addends: &[],
            results: &[
                result("y", "rh", y, false),
                result("mean", "r", mean, false),
                result("rstd", "r", rstd, false),
            ],
            whole: &[('h', WHOLE_ROWS)],
        };
        recorder.follow(&rule, site);
    }
}

operation! {
    /// The gradients of [`LayerNorm`].
    LayerNormBackward {
        /// The input of the forward pass, `[.., hidden]`.
        x: View<'a>,
        /// `[hidden]`
        gamma: View<'a>,
        /// What the forward pass stored, `[rows]` f32 each.
        statistics: [View<'a>; 2],
        /// `[.., hidden]`
        dy: View<'a>,
        /// `[.., hidden]`
        dx: ViewMut<'a>,
        /// Whether `dx` is added to.
        accumulate_input: bool,
        /// dgamma and dbeta, `[hidden]` each.
        gradients: [ViewMut<'a>; 2],
        /// Whether dgamma and dbeta are added to.
        accumulate_parameters: bool,
    }
}

impl Describe for LayerNormBackward<'_> {
    const NAME: &'static str = "layer_norm_backward";

    fn check(&self) {
        let LayerNormBackward { x, gamma, statistics: [mean, rstd], dy, dx, gradients, .. } = self;
        let [dgamma, dbeta] = gradients;
        let [rows, hidden] = x.shape().rows_cols();
        assert_eq!([gamma.elements(), dgamma.elements(), dbeta.elements()], [hidden; 3]);
        assert_eq!([dy.elements(), dx.elements()], [x.elements(); 2]);
        assert_eq!([mean.elements(), rstd.elements()], [rows; 2]);
        same(&[x.dtype(), gamma.dtype(), dy.dtype(), dx.dtype()]);
        same(&[DType::F32, mean.dtype(), rstd.dtype()]);
        same(&[dgamma.dtype(), dbeta.dtype()]);
        gradient(dgamma, x.dtype());
    }

    fn price(&self) -> Price {
        let LayerNormBackward { x, dy, dx, accumulate_input, .. } = self;
        Price::bytes(x.bytes() + dy.bytes() + dx.bytes() * (1 + *accumulate_input as usize))
    }

    fn follow(&self, recorder: &Recorder, site: Site) {
        let LayerNormBackward { x, gamma, statistics: [mean, rstd], dy, dx, gradients, .. } = self;
        let [dgamma, dbeta] = gradients;
        let rule = Rule {
            op: Self::NAME,
            factors: &[
                operand("x", "rh", *x),
                operand("gamma", "h", *gamma),
                operand("mean", "r", *mean),
                operand("rstd", "r", *rstd),
                operand("dy", "rh", *dy),
            ],
            addends: &[],
            results: &[
                result("dx", "rh", dx, self.accumulate_input),
                result("dgamma", "h", dgamma, self.accumulate_parameters),
                result("dbeta", "h", dbeta, self.accumulate_parameters),
            ],
            whole: &[('h', WHOLE_ROWS)],
        };
        recorder.follow(&rule, site);
    }
}

impl Device {
    /// Layer norm over the last dimension. x, y `[.., hidden]`, gamma, beta `[hidden]`; mean and rstd `[rows]` are
    /// stored for backward.
    #[track_caller]
    pub fn layer_norm(&self, x: View, parameters: [View; 2], eps: f32, y: ViewMut, statistics: [ViewMut; 2]) {
        self.run(LayerNorm { x, parameters, eps, y, statistics });
    }
}
