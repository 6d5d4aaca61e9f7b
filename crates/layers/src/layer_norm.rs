//! Layer norm and RMS norm over the last dimension.

use std::sync::Arc;

use phalanx_tensor::{LayerNormBackward, RowNorm, Tensor};

use crate::activation::Activation;
use crate::call::{Call, Parameters};
use crate::failure::Result;
use crate::init::Init;
use crate::layer::{Context, Layer, Rebuild};
use crate::parameter::{Kind, ParameterSpec};
use crate::saved::{Saved, Shared};

/// `y = gamma * (x - mean) / sqrt(var + eps) (+ beta)` (Ba et al., arXiv 1607.06450), or RMS norm,
/// `y = gamma * x / sqrt(avg(x²) + eps)` (Zhang and Sennrich, arXiv 1910.07467).
pub struct LayerNorm {
    /// Names are `prefix.weight` (gamma), `prefix.bias` (beta, if there is one).
    pub prefix: String,
    /// Width.
    pub hidden: usize,
    /// Added to the variance.
    pub eps: f32,
    /// True if the mean is subtracted; otherwise this is RMS norm.
    pub centred: bool,
    /// True if there is a beta.
    pub bias: bool,
    /// True if gamma is 1 + weight (Gemma).
    pub from_one: bool,
}

/// Tensors that backward reads beside x.
pub struct SavedLayerNorm {
    /// `[batch * seq]`; None for RMS norm.
    mean: Option<Tensor>,
    /// `[batch * seq]`, 1 / sqrt(var + eps)
    rstd: Tensor,
}

/// Initial values of a weight, which gives a gamma of 1.
pub(crate) fn initial(from_one: bool) -> Init {
    if from_one { Init::Zeros } else { Init::Ones }
}

impl LayerNorm {
    fn norm(&self) -> RowNorm {
        RowNorm { offset: f32::from(u8::from(self.from_one)), ..self.eps.into() }
    }

    /// Writes the norm of x and the statistics of its rows.
    fn compute(
        &self,
        cx: &Context,
        parameters: Parameters,
        x: &Tensor,
        y: &mut Tensor,
        own: &mut SavedLayerNorm,
    ) {
        let statistics = (own.mean.as_mut().map(Tensor::view_mut), own.rstd.view_mut());
        let parameters = (parameters.value(0), parameters.get(1));
        cx.device.layer_norm(x.view(), parameters, self.norm(), y.view_mut(), statistics);
    }
}

impl Layer for LayerNorm {
    type Own = SavedLayerNorm;

    fn parameters(&self) -> Vec<ParameterSpec> {
        let vector = |suffix, init| {
            ParameterSpec::new(format!("{}.{suffix}", self.prefix), Kind::Norm, [self.hidden], init)
        };
        let beta = self.bias.then(|| vector("bias", Init::Zeros));
        [vector("weight", initial(self.from_one))].into_iter().chain(beta).collect()
    }

    fn is_row_wise(&self) -> bool {
        true
    }

    /// x: `[batch, seq, hidden]` -> y: the same
    fn forward(&self, cx: &Context, call: Call) -> Result<(Activation, Saved<SavedLayerNorm>)> {
        let Call { parameters, x, sum, .. } = call;
        let [rows, _] = x.shape().rows_cols();
        let mut y = cx.activation(x.shape(), "layer_norm.y");
        let mean = self.centred.then(|| cx.statistics([rows], "layer_norm.mean"));
        let rstd = cx.statistics([rows], "layer_norm.rstd");
        let mut own = SavedLayerNorm { mean, rstd };
        self.compute(cx, parameters, &x, &mut y, &mut own);
        Ok((cx.plus(y, sum), Saved::new(own).with_input(x)))
    }

    /// dx overwrites, or adds to the sum; dgamma, dbeta where they are wanted.
    fn backward(&self, cx: &Context, saved: Saved<SavedLayerNorm>, call: Call) -> Result<Option<Activation>> {
        let Call { parameters, x: dy, sum, .. } = call;
        let (x, SavedLayerNorm { mean, rstd }) = (saved.x.into_held(), saved.own);
        let (mut dx, add) = cx.target(sum, x.shape(), "layer_norm.dx");
        let mut slots = [parameters.gradient(0), parameters.gradient(1)];
        let mut accumulates = None;
        let gradients = slots.each_mut().map(|slot| {
            let (view, accumulate) = slot.as_mut()?.write();
            let of_other = accumulates.replace(accumulate);
            assert!(
                of_other.is_none_or(|other| other == accumulate),
                "gamma and beta are both added to, or none"
            );
            Some(view)
        });
        cx.device.run(LayerNormBackward {
            x: x.view(),
            gamma: parameters.value(0),
            norm: self.norm(),
            products: None,
            mean: mean.as_ref().map(Tensor::view),
            rstd: rstd.view(),
            dy: dy.view(),
            dx: dx.view_mut(),
            accumulate_input: add,
            gradients,
            accumulate_parameters: accumulates.unwrap_or(false),
        });
        Ok(Some(Arc::new(dx)))
    }

    fn rebuild(&self) -> Option<Rebuild> {
        Some(Rebuild { reads_input: true, always: false })
    }

    /// Recomputes the output; the statistics are written again, with the same values.
    fn output(
        &self,
        cx: &Context,
        parameters: Parameters,
        x: &Shared,
        own: &mut SavedLayerNorm,
    ) -> Result<Activation> {
        let x = x.held();
        let mut y = cx.activation(x.shape(), "layer_norm.y_again");
        self.compute(cx, parameters, x, &mut y, own);
        Ok(Arc::new(y))
    }
}
