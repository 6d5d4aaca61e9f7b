//! Layer norm, and without its mean RMS norm: of whole rows, or of vectors that lie among other elements of each row.
//!
//! If ranks have parts of a vector, each sums over its own part ([`NormSums`]), the sums are added over the ranks, and the norm
//! reads them.

use phalanx_plan::trace::{DType, Site};

use super::{gradient, same};
use crate::arguments::{RowNorm, WholeSums};
use crate::device::Device;
use crate::operation::{Describe, Price, operation};
use crate::operations::family::family;
use crate::placement::rules::{Rule, operand, result};
use crate::record::Recorder;
use crate::view::{View, ViewMut};

const WHOLE_ROWS: &str = "its rows are normalised whole";

family! {
    /// Normalisation of rows.
    Normalization { LayerNorm, LayerNormBackward, NormSums, }
}

/// Checks that the vectors, of `hidden` elements, lie in the rows of x, with `statistics` of each.
#[track_caller]
fn check_vectors<'a>(norm: RowNorm, x: View, hidden: usize, statistics: impl IntoIterator<Item = View<'a>>) {
    let [rows, columns] = x.shape().rows_cols();
    assert!(norm.count > 0 && norm.first + norm.count * hidden <= columns, "{norm:?} of {hidden} in {x:?}");
    for statistic in statistics {
        assert_eq!((statistic.elements(), statistic.dtype()), (rows * norm.count, DType::F32), "{norm:?}");
    }
}

/// The letters of statistics and of parameters, beside `rh` of rows.
fn letters(norm: RowNorm) -> [&'static str; 2] {
    if norm.by_heads { ["rh", "d"] } else { ["r", "h"] }
}

/// Dimensions that may not be sharded: vectors, unless they are heads or their sums are given.
fn whole(norm: RowNorm, sums: Option<WholeSums>) -> &'static [(char, &'static str)] {
    if norm.by_heads || sums.is_some() { &[] } else { &[('h', WHOLE_ROWS)] }
}

operation! {
    /// Layer norm over the last dimension (Ba et al., arXiv 1607.06450); without a mean RMS norm, `y = gamma * x / sqrt(avg(x²) + eps)`
    /// (Zhang and Sennrich, arXiv 1910.07467). Gamma is that of `norm`, its offset added.
    LayerNorm {
        /// `[.., columns]`
        x: View<'a>,
        /// `[hidden]`
        gamma: View<'a>,
        /// `[hidden]`; 0 where there is none.
        beta: Option<View<'a>>,
        /// The vectors of `hidden` elements that are normalised.
        norm: RowNorm,
        /// For RMS norm of vectors of which ranks have parts: their sums of squares.
        squares: Option<WholeSums<'a>>,
        /// `[.., columns]`, of which the vectors are overwritten.
        y: ViewMut<'a>,
        /// Mean of each vector, `[rows * count]` f32, overwritten; None for RMS norm. Backward reads it, and `rstd`.
        mean: Option<ViewMut<'a>>,
        /// 1/sqrt(var + eps) of each vector, f32, overwritten: `[rows * count]`, of heads `[rows, count]`.
        rstd: ViewMut<'a>,
    }
}

impl Describe for LayerNorm<'_> {
    const NAME: &'static str = "layer_norm";

    fn name(&self) -> &'static str {
        if self.mean.is_some() { Self::NAME } else { "rms_norm" }
    }

    fn check(&self) {
        let LayerNorm { x, gamma, beta, norm, squares, y, mean, rstd } = self;
        let hidden = gamma.elements();
        for parameter in [*gamma].iter().chain(beta) {
            assert_eq!((parameter.elements(), parameter.dtype()), (hidden, x.dtype()), "layer_norm of {x:?}");
        }
        assert_eq!((y.elements(), y.dtype()), (x.elements(), x.dtype()));
        let statistics = mean.iter().chain([rstd]).map(ViewMut::as_view);
        check_vectors(*norm, *x, hidden, statistics.chain(squares.map(|whole| whole.sums)));
        assert!(squares.is_none() || mean.is_none(), "sums of squares are those of RMS norm");
    }

    fn price(&self) -> Price {
        let [rows, _] = self.x.shape().rows_cols();
        Price::bytes(2 * rows * self.norm.count * self.gamma.bytes())
    }

    fn follow(&self, recorder: &Recorder, site: Site) {
        let LayerNorm { x, gamma, beta, norm, squares, y, mean, rstd } = self;
        let [of_vector, of_parameter] = letters(*norm);
        let mut factors = vec![operand("x", "rh", *x), operand("gamma", of_parameter, *gamma)];
        factors.extend(beta.map(|beta| operand("beta", of_parameter, beta)));
        let mut results = vec![result("y", "rh", y, false)];
        let of_rows = std::iter::once(result("rstd", of_vector, rstd, false));
        let of_rows = of_rows.chain(mean.iter().map(|mean| result("mean", of_vector, mean, false)));
        match squares {
            None => results.extend(of_rows),
            // What follows from sums over all ranks is the same on all.
            Some(whole) => {
                let sums = operand("squares", of_vector, whole.sums);
                let results: Vec<_> = of_rows.collect();
                let factors = &[sums];
                recorder.follow(&Rule::of(self.name(), factors, &results), site);
            }
        }
        let rule = Rule {
            op: self.name(),
            factors: &factors,
            addends: &[],
            results: &results,
            whole: whole(*norm, *squares),
        };
        recorder.follow(&rule, site);
    }
}

operation! {
    /// The gradients of [`LayerNorm`].
    LayerNormBackward {
        /// The input of the forward pass, `[.., columns]`.
        x: View<'a>,
        /// `[hidden]`
        gamma: View<'a>,
        /// As in the forward pass.
        norm: RowNorm,
        /// For RMS norm of vectors of which ranks have parts: their sums of x times its part of `gamma dy`.
        products: Option<WholeSums<'a>>,
        /// The mean that the forward pass stored; None for RMS norm.
        mean: Option<View<'a>>,
        /// The same.
        rstd: View<'a>,
        /// `[.., columns]`
        dy: View<'a>,
        /// `[.., columns]`, of which the vectors are written.
        dx: ViewMut<'a>,
        /// True to accumulate into `dx`.
        accumulate_input: bool,
        /// dgamma and dbeta, `[hidden]` each, if they are wanted.
        gradients: [Option<ViewMut<'a>>; 2],
        /// True to accumulate into dgamma and dbeta.
        accumulate_parameters: bool,
    }
}

impl Describe for LayerNormBackward<'_> {
    const NAME: &'static str = "layer_norm_backward";

    fn name(&self) -> &'static str {
        if self.mean.is_some() { Self::NAME } else { "rms_norm_backward" }
    }

    fn check(&self) {
        let LayerNormBackward { x, gamma, norm, products, mean, rstd, dy, dx, gradients, .. } = self;
        let hidden = gamma.elements();
        for wanted in gradients.iter().flatten() {
            assert_eq!(wanted.elements(), hidden);
            gradient(wanted, x.dtype());
        }
        if let [Some(dgamma), Some(dbeta)] = gradients {
            same(&[dgamma.dtype(), dbeta.dtype()]);
        }
        assert_eq!([dy.elements(), dx.elements()], [x.elements(); 2]);
        same(&[x.dtype(), gamma.dtype(), dy.dtype(), dx.dtype()]);
        let sums = products.map(|whole| whole.sums);
        check_vectors(*norm, *x, hidden, mean.iter().chain([rstd]).copied().chain(sums));
    }

    fn price(&self) -> Price {
        let [rows, _] = self.x.shape().rows_cols();
        Price::bytes((3 + self.accumulate_input as usize) * rows * self.norm.count * self.gamma.bytes())
    }

    fn follow(&self, recorder: &Recorder, site: Site) {
        let LayerNormBackward { x, gamma, norm, products, mean, rstd, dy, dx, gradients, .. } = self;
        let [of_vector, of_parameter] = letters(*norm);
        let mut results = vec![result("dx", "rh", dx, self.accumulate_input)];
        for (name, wanted) in ["dgamma", "dbeta"].into_iter().zip(gradients) {
            let of = |wanted| result(name, of_parameter, wanted, self.accumulate_parameters);
            results.extend(wanted.iter().map(of));
        }
        let mut factors = vec![operand("x", "rh", *x), operand("gamma", of_parameter, *gamma)];
        factors.extend(mean.map(|mean| operand("mean", of_vector, mean)));
        factors.extend(products.map(|whole| operand("products", of_vector, whole.sums)));
        factors.extend([operand("rstd", of_vector, *rstd), operand("dy", "rh", *dy)]);
        let rule = Rule {
            op: self.name(),
            factors: &factors,
            addends: &[],
            results: &results,
            whole: whole(*norm, *products),
        };
        recorder.follow(&rule, site);
    }
}

operation! {
    /// For RMS norm of vectors of which other ranks have other parts: the sum of x² of each, or with `dy`, for backward, of
    /// `x (gamma + offset) dy`.
    NormSums {
        /// `[.., columns]`
        x: View<'a>,
        /// `[hidden]`
        gamma: View<'a>,
        /// As in the norm.
        norm: RowNorm,
        /// `[.., columns]`, for backward.
        dy: Option<View<'a>>,
        /// `[rows * count]` f32, overwritten.
        sums: ViewMut<'a>,
    }
}

impl Describe for NormSums<'_> {
    const NAME: &'static str = "norm_sums";

    fn check(&self) {
        let NormSums { x, gamma, norm, dy, sums } = self;
        check_vectors(*norm, *x, gamma.elements(), [sums.as_view()]);
        assert!(dy.is_none_or(|dy| dy.elements() == x.elements()), "{dy:?} for {x:?}");
        same(&[x.dtype(), dy.map_or(x.dtype(), |dy| dy.dtype()), gamma.dtype()]);
        assert!(!norm.by_heads, "heads are normalised whole");
    }

    fn price(&self) -> Price {
        let [rows, _] = self.x.shape().rows_cols();
        let tensors = 1 + usize::from(self.dy.is_some());
        Price::bytes(tensors * rows * self.norm.count * self.gamma.bytes())
    }

    fn follow(&self, recorder: &Recorder, site: Site) {
        let NormSums { x, gamma, dy, sums, .. } = self;
        let mut factors = vec![operand("x", "rh", *x), operand("gamma", "h", *gamma)];
        factors.extend(dy.map(|dy| operand("dy", "rh", dy)));
        let results = [result("sums", "r", sums, false)];
        recorder.follow(&Rule::of(Self::NAME, &factors, &results), site);
    }
}

impl Device {
    /// Layer norm, or RMS norm where there is no mean, of whole rows (given an epsilon) or of vectors among them. x, y `[.., columns]`,
    /// gamma, beta (0 where there is none) `[hidden]`; mean and rstd of each vector are stored for backward.
    #[track_caller]
    pub fn layer_norm(
        &self,
        x: View,
        (gamma, beta): (View, Option<View>),
        norm: impl Into<RowNorm>,
        y: ViewMut,
        (mean, rstd): (Option<ViewMut>, ViewMut),
    ) {
        self.run(LayerNorm { x, gamma, beta, norm: norm.into(), squares: None, y, mean, rstd });
    }
}
