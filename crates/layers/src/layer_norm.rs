//! Layer norm over the last dimension.

use std::sync::Arc;

use phalanx_tensor::{Tensor, View};

use crate::init::Init;
use crate::layer::{
    Activation, Context, Gradient, Layer, ParameterSpec, Saved, add_residual, restore, sum_target,
};

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
    /// `[batch, seq, hidden]`
    x: Activation,
    /// `[batch * seq]`
    mean: Tensor,
    /// `[batch * seq]`, 1 / sqrt(var + eps)
    rstd: Tensor,
}

impl Layer for LayerNorm {
    fn parameters(&self) -> Vec<ParameterSpec> {
        let vector = |suffix, init| ParameterSpec {
            name: format!("{}.{suffix}", self.prefix),
            shape: vec![self.hidden],
            init,
        };
        vec![vector("weight", Init::Ones), vector("bias", Init::Zeros)]
    }

    /// x: `[batch, seq, hidden]` -> y: the same
    fn forward(
        &self,
        cx: &Context,
        parameters: &[View],
        x: Activation,
        residual: Option<Activation>,
    ) -> (Activation, Saved) {
        let [rows, _] = x.shape().rows_cols();
        let mut y = cx.activation(x.shape(), "layer_norm.y");
        let mut mean = cx.statistics([rows], "layer_norm.mean");
        let mut rstd = cx.statistics([rows], "layer_norm.rstd");
        let statistics = [mean.view_mut(), rstd.view_mut()];
        cx.device.layer_norm(x.view(), [parameters[0], parameters[1]], self.eps, y.view_mut(), statistics);
        (add_residual(cx, y, residual), Box::new(SavedLayerNorm { x, mean, rstd }))
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
    ) -> Option<Activation> {
        let SavedLayerNorm { x, mean, rstd } = restore(saved);
        let [dgamma, dbeta] = gradients else { panic!("a layer norm has two parameters") };
        let (mut dx, add) = sum_target(cx, residual, x.shape(), "layer_norm.dx");
        let (dgamma, accumulate) = dgamma.write();
        let (dbeta, accumulate_beta) = dbeta.write();
        assert_eq!(accumulate, accumulate_beta, "gamma and beta are written together");
        let statistics = [mean.view(), rstd.view()];
        let derivatives = [dgamma, dbeta];
        cx.device.layer_norm_backward(
            x.view(),
            parameters[0],
            statistics,
            dy.view(),
            dx.view_mut(),
            add,
            derivatives,
            accumulate,
        );
        Some(Arc::new(dx))
    }
}
