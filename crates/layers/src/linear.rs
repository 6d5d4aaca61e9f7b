//! The linear layer, with bias, in either weight layout.

use std::sync::Arc;

use phalanx_tensor::{Epilogue, Layout, Shape, Tensor, View, Weight};

use crate::activation::Activation;
use crate::failure::Result;
use crate::init::Init;
use crate::layer::{Context, Gradient, Layer, ParameterSpec, sum_target};
use crate::saved::{Deferred, Saved};

/// `y = x · w (+ b)`.
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
    /// Whether there is a bias.
    pub bias: bool,
}

/// What the first part of backward saves for the second.
pub(crate) struct DeferredLinear {
    /// `[.., in]`
    pub(crate) x: Activation,
    /// `[.., out]`
    pub(crate) dy: Activation,
}

impl Linear {
    pub(crate) fn weight<'a>(&self, matrix: View<'a>) -> Weight<'a> {
        Weight { matrix, layout: self.layout }
    }

    /// Writes or adds db, if there is a bias.
    fn bias_gradient(&self, cx: &Context, gradients: &mut [Gradient], dy: &Tensor) {
        if let [_, db] = gradients {
            let (view, accumulate) = db.write();
            cx.device.bias_gradient(dy.view(), view, accumulate);
        }
    }

    /// dx = dy · wᵀ (+ residual); writes or adds dw.
    pub(crate) fn input_and_weight_gradients(
        &self,
        cx: &Context,
        parameters: &[View],
        dw: &mut Gradient,
        x: Activation,
        dy: &Tensor,
        residual: Option<Activation>,
    ) -> Activation {
        self.weight_gradient(cx, dw, &x, dy);
        let shape = x.shape();
        drop(x);
        self.input_gradient(cx, parameters, shape, dy, residual)
    }

    /// Writes or adds dw.
    pub(crate) fn weight_gradient(&self, cx: &Context, dw: &mut Gradient, x: &Tensor, dy: &Tensor) {
        let (view, accumulate) = dw.write();
        cx.device.linear_weight_gradient(x.view(), dy.view(), view, self.layout, accumulate);
    }

    /// dx = dy · wᵀ (+ residual), of the shape of x.
    pub(crate) fn input_gradient(
        &self,
        cx: &Context,
        parameters: &[View],
        shape: Shape,
        dy: &Tensor,
        residual: Option<Activation>,
    ) -> Activation {
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
        let weight = ParameterSpec::new(format!("{}.weight", self.prefix), shape, self.init);
        let bias = || ParameterSpec::new(format!("{}.bias", self.prefix), [self.outputs], Init::Zeros);
        if self.bias { vec![weight, bias()] } else { vec![weight] }
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
        let mut y = cx.activation([batch, seq, self.outputs], "linear.y");
        let weight = self.weight(parameters[0]);
        let residual = residual.as_ref().map(|r| r.view());
        let epilogue = Epilogue { bias: self.bias.then(|| parameters[1]), residual };
        cx.device.linear(x.view(), weight, epilogue, y.view_mut());
        Ok((Arc::new(y), Saved::new(()).with_input(x)))
    }

    /// Saves the input only: nothing is computed.
    fn save(&self, _: &Context, _: &[View], x: Activation) -> Result<Saved> {
        Ok(Saved::new(()).with_input(x))
    }

    /// dx = dy · wᵀ; writes or adds dw and db.
    fn backward(
        &self,
        cx: &Context,
        parameters: &[View],
        gradients: &mut [Gradient],
        saved: Saved,
        dy: Activation,
        residual: Option<Activation>,
    ) -> Result<Option<Activation>> {
        let x = saved.x.into_held();
        self.bias_gradient(cx, gradients, &dy);
        Ok(Some(self.input_and_weight_gradients(cx, parameters, &mut gradients[0], x, &dy, residual)))
    }

    /// dx; x and dy are saved for the second part.
    fn backward_input(
        &self,
        cx: &Context,
        parameters: &[View],
        saved: Saved,
        dy: Activation,
        residual: Option<Activation>,
    ) -> Result<(Option<Activation>, Deferred)> {
        let x = saved.x.into_held();
        let dx = self.input_gradient(cx, parameters, x.shape(), &dy, residual);
        Ok((Some(dx), Deferred::new(DeferredLinear { x, dy })))
    }

    fn backward_weight(&self, cx: &Context, gradients: &mut [Gradient], deferred: Deferred) -> Result<()> {
        let DeferredLinear { x, dy } = deferred.restore();
        self.bias_gradient(cx, gradients, &dy);
        self.weight_gradient(cx, &mut gradients[0], &x, &dy);
        Ok(())
    }
}
