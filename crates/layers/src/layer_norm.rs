//! Layer norm over the last dimension.

use std::sync::Arc;

use phalanx_tensor::{LayerNormBackward, Tensor, View};

use crate::activation::Activation;
use crate::failure::Result;
use crate::init::Init;
use crate::layer::{Context, Gradient, Layer, ParameterSpec, Rebuild, add_residual, sum_target};
use crate::saved::{Saved, restore, restore_mut};

/// `y = gamma * (x - mean) / sqrt(var + eps) + beta` (Ba et al., arXiv 1607.06450).
pub struct LayerNorm {
    /// Names are `prefix.weight` (gamma), `prefix.bias` (beta).
    pub prefix: String,
    /// Width.
    pub hidden: usize,
    /// Added to the variance.
    pub eps: f32,
}

struct SavedLayerNorm {
    /// `[batch * seq]`
    mean: Tensor,
    /// `[batch * seq]`, 1 / sqrt(var + eps)
    rstd: Tensor,
}

impl Layer for LayerNorm {
    fn parameters(&self) -> Vec<ParameterSpec> {
        let vector =
            |suffix, init| ParameterSpec::new(format!("{}.{suffix}", self.prefix), [self.hidden], init);
        vec![vector("weight", Init::Ones), vector("bias", Init::Zeros)]
    }

    fn is_row_wise(&self) -> bool {
        true
    }

    /// x: `[batch, seq, hidden]` -> y: the same
    fn forward(
        &self,
        cx: &Context,
        parameters: &[View],
        x: Activation,
        residual: Option<Activation>,
    ) -> Result<(Activation, Saved)> {
        let [rows, _] = x.shape().rows_cols();
        let mut y = cx.activation(x.shape(), "layer_norm.y");
        let mut mean = cx.statistics([rows], "layer_norm.mean");
        let mut rstd = cx.statistics([rows], "layer_norm.rstd");
        let statistics = [mean.view_mut(), rstd.view_mut()];
        cx.device.layer_norm(x.view(), [parameters[0], parameters[1]], self.eps, y.view_mut(), statistics);
        Ok((add_residual(cx, y, residual), Saved::new(SavedLayerNorm { mean, rstd }).with_input(x)))
    }

    fn rebuild(&self) -> Option<&dyn Rebuild> {
        Some(self)
    }

    /// dx overwrites, or adds to the residual; dgamma, dbeta as `gradients` says.
    fn backward(
        &self,
        cx: &Context,
        parameters: &[View],
        gradients: &mut [Gradient],
        saved: Saved,
        dy: Activation,
        residual: Option<Activation>,
    ) -> Result<Option<Activation>> {
        let Saved { x, own, .. } = saved;
        let (x, SavedLayerNorm { mean, rstd }) = (x.into_held(), restore(own));
        let [dgamma, dbeta] = gradients else { panic!("a layer norm has two parameters") };
        let (mut dx, add) = sum_target(cx, residual, x.shape(), "layer_norm.dx");
        let (dgamma, accumulate) = dgamma.write();
        let (dbeta, accumulate_beta) = dbeta.write();
        assert_eq!(
            accumulate, accumulate_beta,
            "gamma and beta are either both accumulated or both overwritten"
        );
        let statistics = [mean.view(), rstd.view()];
        let derivatives = [dgamma, dbeta];
        cx.device.run(LayerNormBackward {
            x: x.view(),
            gamma: parameters[0],
            statistics,
            dy: dy.view(),
            dx: dx.view_mut(),
            accumulate_input: add,
            gradients: derivatives,
            accumulate_parameters: accumulate,
        });
        Ok(Some(Arc::new(dx)))
    }
}

impl Rebuild for LayerNorm {
    fn reads_input(&self) -> bool {
        true
    }

    /// Recomputes the output; mean and rstd are written again, with the same values.
    fn output(&self, cx: &Context, parameters: &[View], saved: &mut Saved) -> Result<Activation> {
        let x = saved.x.held();
        let SavedLayerNorm { mean, rstd } = restore_mut(&mut *saved.own);
        let mut y = cx.activation(x.shape(), "layer_norm.y_again");
        let statistics = [mean.view_mut(), rstd.view_mut()];
        cx.device.layer_norm(x.view(), [parameters[0], parameters[1]], self.eps, y.view_mut(), statistics);
        Ok(Arc::new(y))
    }
}
