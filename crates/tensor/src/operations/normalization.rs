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
        /// `[hidden]`
        gamma: View<'a>,
        /// `[hidden]`; 0 where there is none.
        beta: Option<View<'a>>,
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
        let LayerNorm { x, gamma, beta, y, statistics: [mean, rstd], .. } = self;
        let [rows, hidden] = x.shape().rows_cols();
        for parameter in [*gamma].iter().chain(beta) {
            assert_eq!((parameter.elements(), parameter.dtype()), (hidden, x.dtype()), "layer_norm of {x:?}");
        }
        assert_eq!([y.elements(), mean.elements(), rstd.elements()], [x.elements(), rows, rows]);
        same(&[x.dtype(), y.dtype()]);
        same(&[DType::F32, mean.dtype(), rstd.dtype()]);
    }

    fn price(&self) -> Price {
        Price::bytes(self.x.bytes() + self.y.bytes())
    }

    fn follow(&self, recorder: &Recorder, site: Site) {
        let LayerNorm { x, gamma, beta, y, statistics: [mean, rstd], .. } = self;
        let mut factors = vec![operand("x", "rh", *x), operand("gamma", "h", *gamma)];
        factors.extend(beta.map(|beta| operand("beta", "h", beta)));
        let rule = Rule {
            op: Self::NAME,
            factors: &factors,
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
        /// dgamma and dbeta, `[hidden]` each, where they are wanted.
        gradients: [Option<ViewMut<'a>>; 2],
        /// Whether dgamma and dbeta are added to.
        accumulate_parameters: bool,
    }
}

impl Describe for LayerNormBackward<'_> {
    const NAME: &'static str = "layer_norm_backward";

    fn check(&self) {
        let LayerNormBackward { x, gamma, statistics: [mean, rstd], dy, dx, gradients, .. } = self;
        let [rows, hidden] = x.shape().rows_cols();
        assert_eq!(gamma.elements(), hidden);
        for wanted in gradients.iter().flatten() {
            assert_eq!(wanted.elements(), hidden);
            gradient(wanted, x.dtype());
        }
        if let [Some(dgamma), Some(dbeta)] = gradients {
            same(&[dgamma.dtype(), dbeta.dtype()]);
        }
        assert_eq!([dy.elements(), dx.elements()], [x.elements(); 2]);
        assert_eq!([mean.elements(), rstd.elements()], [rows; 2]);
        same(&[x.dtype(), gamma.dtype(), dy.dtype(), dx.dtype()]);
        same(&[DType::F32, mean.dtype(), rstd.dtype()]);
    }

    fn price(&self) -> Price {
        let LayerNormBackward { x, dy, dx, accumulate_input, .. } = self;
        Price::bytes(x.bytes() + dy.bytes() + dx.bytes() * (1 + *accumulate_input as usize))
    }

    fn follow(&self, recorder: &Recorder, site: Site) {
        let LayerNormBackward { x, gamma, statistics: [mean, rstd], dy, dx, gradients, .. } = self;
        let mut results = vec![result("dx", "rh", dx, self.accumulate_input)];
        for (name, wanted) in ["dgamma", "dbeta"].into_iter().zip(gradients) {
            results.extend(wanted.iter().map(|wanted| result(name, "h", wanted, self.accumulate_parameters)));
        }
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
            results: &results,
            whole: &[('h', WHOLE_ROWS)],
        };
        recorder.follow(&rule, site);
    }
}

impl Device {
    /// Layer norm over the last dimension. x, y `[.., hidden]`, gamma, beta (0 where there is none) `[hidden]`; mean and
    /// rstd `[rows]` are stored for backward.
    #[track_caller]
    pub fn layer_norm(
        &self,
        x: View,
        (gamma, beta): (View, Option<View>),
        eps: f32,
        y: ViewMut,
        statistics: [ViewMut; 2],
    ) {
        self.run(LayerNorm { x, gamma, beta, eps, y, statistics });
    }
}
