//! Layer norm, and without its mean RMS norm.

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
    /// Layer norm over the last dimension (Ba et al., arXiv 1607.06450); without a mean RMS norm, `y = gamma * x / sqrt(avg(x²) + eps)`
    /// (Zhang and Sennrich, arXiv 1910.07467).
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
        /// Mean of each row, `[rows]` f32, overwritten; None for RMS norm. Backward reads it, and `rstd`.
        mean: Option<ViewMut<'a>>,
        /// 1/sqrt(var + eps) of each row, `[rows]` f32, overwritten.
        rstd: ViewMut<'a>,
    }
}

impl Describe for LayerNorm<'_> {
    const NAME: &'static str = "layer_norm";

    fn name(&self) -> &'static str {
        if self.mean.is_some() { Self::NAME } else { "rms_norm" }
    }

    fn check(&self) {
        let LayerNorm { x, gamma, beta, y, mean, rstd, .. } = self;
        let [rows, hidden] = x.shape().rows_cols();
        for parameter in [*gamma].iter().chain(beta) {
            assert_eq!((parameter.elements(), parameter.dtype()), (hidden, x.dtype()), "layer_norm of {x:?}");
        }
        assert_eq!((y.elements(), y.dtype()), (x.elements(), x.dtype()));
        for statistic in mean.iter().chain([rstd]) {
            assert_eq!((statistic.elements(), statistic.dtype()), (rows, DType::F32));
        }
    }

    fn price(&self) -> Price {
        Price::bytes(self.x.bytes() + self.y.bytes())
    }

    fn follow(&self, recorder: &Recorder, site: Site) {
        let LayerNorm { x, gamma, beta, y, mean, rstd, .. } = self;
        let mut factors = vec![operand("x", "rh", *x), operand("gamma", "h", *gamma)];
        factors.extend(beta.map(|beta| operand("beta", "h", beta)));
        let mut results = vec![result("y", "rh", y, false), result("rstd", "r", rstd, false)];
        results.extend(mean.iter().map(|mean| result("mean", "r", mean, false)));
        let rule = Rule {
            op: self.name(),
            factors: &factors,
            addends: &[],
            results: &results,
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
        /// What the forward pass stored, `[rows]` f32; None for RMS norm.
        mean: Option<View<'a>>,
        /// The same.
        rstd: View<'a>,
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

    fn name(&self) -> &'static str {
        if self.mean.is_some() { Self::NAME } else { "rms_norm_backward" }
    }

    fn check(&self) {
        let LayerNormBackward { x, gamma, mean, rstd, dy, dx, gradients, .. } = self;
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
        same(&[x.dtype(), gamma.dtype(), dy.dtype(), dx.dtype()]);
        for statistic in mean.iter().chain([rstd]) {
            assert_eq!((statistic.elements(), statistic.dtype()), (rows, DType::F32));
        }
    }

    fn price(&self) -> Price {
        let LayerNormBackward { x, dy, dx, accumulate_input, .. } = self;
        Price::bytes(x.bytes() + dy.bytes() + dx.bytes() * (1 + *accumulate_input as usize))
    }

    fn follow(&self, recorder: &Recorder, site: Site) {
        let LayerNormBackward { x, gamma, mean, rstd, dy, dx, gradients, .. } = self;
        let mut results = vec![result("dx", "rh", dx, self.accumulate_input)];
        for (name, wanted) in ["dgamma", "dbeta"].into_iter().zip(gradients) {
            results.extend(wanted.iter().map(|wanted| result(name, "h", wanted, self.accumulate_parameters)));
        }
        let mut factors = vec![operand("x", "rh", *x), operand("gamma", "h", *gamma)];
        factors.extend(mean.map(|mean| operand("mean", "r", mean)));
        factors.extend([operand("rstd", "r", *rstd), operand("dy", "rh", *dy)]);
        let rule = Rule {
            op: self.name(),
            factors: &factors,
            addends: &[],
            results: &results,
            whole: &[('h', WHOLE_ROWS)],
        };
        recorder.follow(&rule, site);
    }
}

impl Device {
    /// Layer norm over the last dimension, or RMS norm where there is no mean. x, y `[.., hidden]`, gamma, beta (0 where there is
    /// none) `[hidden]`; mean and rstd `[rows]` are stored for backward.
    #[track_caller]
    pub fn layer_norm(
        &self,
        x: View,
        (gamma, beta): (View, Option<View>),
        eps: f32,
        y: ViewMut,
        (mean, rstd): (Option<ViewMut>, ViewMut),
    ) {
        self.run(LayerNorm { x, gamma, beta, eps, y, mean, rstd });
    }
}
