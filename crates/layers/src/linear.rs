//! The linear layer, with bias, in either weight layout.

use std::sync::Arc;

use phalanx_tensor::{Epilogue, Layout, Tensor, View, Weight};

use crate::init::Init;
use crate::layer::{Activation, Context, Gradient, Layer, ParameterSpec, sum_target};
use crate::saved::Saved;

/// `y = x · w + b`.
pub struct Linear {
    /// Names are `prefix.weight`, `prefix.bias`.
    pub prefix: String,
    /// Width of x.
    pub inputs: usize,
    /// Width of y.
    pub outputs: usize,
    /// `[in, out]` (GPT-2's `Conv1D`) or `[out, in]`.
    pub layout: Layout,
    /// Initial weight; the bias starts at zero.
    pub init: Init,
}

impl Linear {
    pub(crate) fn weight<'a>(&self, matrix: View<'a>) -> Weight<'a> {
        Weight { matrix, layout: self.layout }
    }

    /// dx = dy · wᵀ (+ residual); dw as the gradient says.
    pub(crate) fn input_and_weight_gradients(
        &self,
        cx: &Context,
        parameters: &[View],
        dw: &mut Gradient,
        x: Activation,
        dy: &Tensor,
        residual: Option<Activation>,
    ) -> Activation {
        let (view, accumulate) = dw.write();
        cx.device.linear_weight_gradient(x.view(), dy.view(), view, self.layout, accumulate);
        let shape = x.shape();
        drop(x);
        let (mut dx, add) = sum_target(cx, residual, shape, "linear.dx");
        cx.device.linear_input_gradient(dy.view(), self.weight(parameters[0]), dx.view_mut(), add);
        Arc::new(dx)
    }
}

impl Layer for Linear {
    fn parameters(&self) -> Vec<ParameterSpec> {
        let shape = match self.layout {
            Layout::InOut => vec![self.inputs, self.outputs],
            Layout::OutIn => vec![self.outputs, self.inputs],
        };
        vec![
            ParameterSpec { name: format!("{}.weight", self.prefix), shape, init: self.init },
            ParameterSpec {
                name: format!("{}.bias", self.prefix),
                shape: vec![self.outputs],
                init: Init::Zeros,
            },
        ]
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
        let mut y = cx.activation([batch, seq, self.outputs], "linear.y");
        let weight = self.weight(parameters[0]);
        let residual = residual.as_ref().map(|r| r.view());
        let epilogue = Epilogue { bias: Some(parameters[1]), residual };
        cx.device.linear(x.view(), weight, epilogue, y.view_mut());
        (Arc::new(y), Saved::new(()).with_input(x))
    }

    /// The input alone: nothing is computed.
    fn save(&self, _: &Context, _: &[View], x: Activation) -> Saved {
        Saved::new(()).with_input(x)
    }

    /// dx = dy · wᵀ; dw, db as `gradients` says.
    fn backward(
        &self,
        cx: &Context,
        parameters: &[View],
        gradients: &mut [Gradient],
        saved: Saved,
        dy: Activation,
        residual: Option<Activation>,
    ) -> Option<Activation> {
        let x = saved.x.into_held();
        let [dw, db] = gradients else { panic!("a linear layer has two parameters") };
        let (view, accumulate) = db.write();
        cx.device.bias_gradient(dy.view(), view, accumulate);
        Some(self.input_and_weight_gradients(cx, parameters, dw, x, &dy, residual))
    }
}
