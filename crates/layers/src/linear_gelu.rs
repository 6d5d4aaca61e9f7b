//! A linear layer and GELU (Hendrycks and Gimpel, arXiv 1606.08415) in one: the activation is taken while the
//! product is in registers, and backward sums the bias gradient while it is there.

use std::sync::Arc;

use phalanx_tensor::{Gelu, Tensor, View};

use crate::activation::Activation;
use crate::failure::Result;
use crate::layer::{Context, Gradient, Layer, ParameterSpec, Rebuild, add_residual};
use crate::linear::{DeferredLinear, Linear};
use crate::saved::{Deferred, Saved, restore, restore_mut};

/// `gelu(x · w + b)`.
pub struct LinearGelu {
    /// `x · w + b`
    pub linear: Linear,
    /// Exact, or the tanh approximation.
    pub gelu: Gelu,
}

struct SavedLinearGelu {
    /// `[batch, seq, out]`, before GELU.
    pre: Tensor,
}

/// What the first part of backward saves for the second.
struct DeferredLinearGelu {
    linear: DeferredLinear,
    /// `[out]`
    db: Tensor,
}

/// dy in memory that may be overwritten: its own, or a copy.
fn overwritable(cx: &Context, dy: Activation) -> Tensor {
    Arc::try_unwrap(dy).unwrap_or_else(|shared| {
        let mut copy = cx.activation(shared.shape(), "linear_gelu.dpre");
        cx.device.copy(shared.view(), copy.view_mut());
        copy
    })
}

impl Layer for LinearGelu {
    fn parameters(&self) -> Vec<ParameterSpec> {
        self.linear.parameters()
    }

    fn is_row_wise(&self) -> bool {
        true
    }

    /// x: `[batch, seq, in]` -> y: `[batch, seq, out]`
    fn forward(
        &self,
        cx: &Context,
        parameters: &[View],
        x: Activation,
        residual: Option<Activation>,
    ) -> Result<(Activation, Saved)> {
        let [batch, seq, _] = x.dims();
        let mut pre = cx.activation([batch, seq, self.linear.outputs], "linear_gelu.pre");
        let mut y = cx.activation([batch, seq, self.linear.outputs], "linear_gelu.y");
        let weight = self.linear.weight(parameters[0]);
        cx.device.linear_gelu(x.view(), weight, parameters[1], self.gelu, pre.view_mut(), y.view_mut());
        Ok((add_residual(cx, y, residual), Saved::new(SavedLinearGelu { pre }).with_input(x)))
    }

    fn rebuild(&self) -> Option<&dyn Rebuild> {
        Some(self)
    }

    /// dx overwrites, or adds to the residual; dw, db as `gradients` says.
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
        let SavedLinearGelu { pre } = restore(own);
        let mut dpre = overwritable(cx, dy);
        let [dw, db] = gradients else { panic!("a linear layer has two parameters") };
        let (view, accumulate) = db.write();
        cx.device.gelu_backward(pre.view(), self.gelu, dpre.view_mut(), view, accumulate);
        drop(pre);
        Ok(Some(self.linear.input_and_weight_gradients(cx, parameters, dw, x.into_held(), &dpre, residual)))
    }

    /// dx; x, the derivative before GELU and its sum over rows (in f32) are kept.
    fn backward_input(
        &self,
        cx: &Context,
        parameters: &[View],
        saved: Saved,
        dy: Activation,
        residual: Option<Activation>,
    ) -> Result<(Option<Activation>, Deferred)> {
        let x = saved.x.into_held();
        let SavedLinearGelu { pre } = restore(saved.own);
        let mut dpre = overwritable(cx, dy);
        let mut db = cx.statistics([self.linear.outputs], "deferred.gradient");
        cx.device.gelu_backward(pre.view(), self.gelu, dpre.view_mut(), db.view_mut(), false);
        drop(pre);
        let dx = self.linear.input_gradient(cx, parameters, x.shape(), &dpre, residual);
        let linear = DeferredLinear { x, dy: Arc::new(dpre) };
        Ok((Some(dx), Deferred::new(DeferredLinearGelu { linear, db })))
    }

    fn backward_weight(&self, cx: &Context, gradients: &mut [Gradient], deferred: Deferred) -> Result<()> {
        let DeferredLinearGelu { linear: DeferredLinear { x, dy }, db } = deferred.restore();
        gradients[1].add(cx, db.view());
        self.linear.weight_gradient(cx, &mut gradients[0], &x, &dy);
        Ok(())
    }
}

impl Rebuild for LinearGelu {
    fn reads_input(&self) -> bool {
        false
    }

    /// y = gelu(pre)
    fn output(&self, cx: &Context, _: &[View], saved: &mut Saved) -> Result<Activation> {
        let SavedLinearGelu { pre } = restore_mut(&mut *saved.own);
        let mut y = cx.activation(pre.shape(), "linear_gelu.y_again");
        cx.device.gelu(pre.view(), self.gelu, y.view_mut());
        Ok(Arc::new(y))
    }
}
