//! A linear layer and GELU (Hendrycks and Gimpel, arXiv 1606.08415) in one: the activation is taken while the
//! product is in registers, and backward sums the bias gradient while it is there.

use std::sync::Arc;

use phalanx_tensor::{Tensor, View};

use crate::layer::{Activation, Context, Gradient, Layer, ParameterSpec, Rebuild, add_residual};
use crate::linear::Linear;
use crate::saved::{Saved, restore, restore_mut};

/// `gelu(x · w + b)` with `gelu(x) = 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x³)))`, `gelu_new` in
/// transformers.
pub struct LinearGelu(pub Linear);

struct SavedLinearGelu {
    /// `[batch, seq, out]`, before GELU.
    pre: Tensor,
}

impl Layer for LinearGelu {
    fn parameters(&self) -> Vec<ParameterSpec> {
        self.0.parameters()
    }

    /// x: `[batch, seq, in]` -> y: `[batch, seq, out]`
    fn forward(
        &self,
        cx: &Context,
        parameters: &[View],
        x: Activation,
        residual: Option<Activation>,
    ) -> (Activation, Saved) {
        let [batch, seq, _] = x.dims();
        let mut pre = cx.activation([batch, seq, self.0.outputs], "linear_gelu.pre");
        let mut y = cx.activation([batch, seq, self.0.outputs], "linear_gelu.y");
        let weight = self.0.weight(parameters[0]);
        cx.device.linear_gelu(x.view(), weight, parameters[1], pre.view_mut(), y.view_mut());
        (add_residual(cx, y, residual), Saved::new(SavedLinearGelu { pre }).with_input(x))
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
    ) -> Option<Activation> {
        let Saved { x, own, .. } = saved;
        let SavedLinearGelu { pre } = restore(own);
        let mut dpre = Arc::try_unwrap(dy).unwrap_or_else(|shared| {
            let mut copy = cx.activation(shared.shape(), "linear_gelu.dpre");
            cx.device.copy(shared.view(), copy.view_mut());
            copy
        });
        let [dw, db] = gradients else { panic!("a linear layer has two parameters") };
        let (view, accumulate) = db.write();
        cx.device.gelu_backward(pre.view(), dpre.view_mut(), view, accumulate);
        drop(pre);
        Some(self.0.input_and_weight_gradients(cx, parameters, dw, x.into_held(), &dpre, residual))
    }
}

impl Rebuild for LinearGelu {
    fn reads_input(&self) -> bool {
        false
    }

    /// y = gelu(pre)
    fn output(&self, cx: &Context, _: &[View], saved: &mut Saved) -> Activation {
        let SavedLinearGelu { pre } = restore_mut(&mut *saved.own);
        let mut y = cx.activation(pre.shape(), "linear_gelu.y_again");
        cx.device.gelu(pre.view(), y.view_mut());
        Arc::new(y)
    }
}
