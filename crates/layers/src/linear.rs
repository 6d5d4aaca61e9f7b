//! The linear layer, with bias, in either weight layout.

use std::sync::Arc;

use phalanx_tensor::{Epilogue, Layout, Tensor, Weight};

use crate::activation::Activation;
use crate::call::{Call, Parameters};
use crate::failure::Result;
use crate::init::Init;
use crate::layer::{Context, Kind, Layer, ParameterSpec};
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
    /// `[.., in]`; None where the weight is frozen.
    pub(crate) x: Option<Activation>,
    /// `[.., out]`; None where nothing is trained.
    pub(crate) dy: Option<Activation>,
}

impl Linear {
    /// The weight as an operand of a product.
    pub(crate) fn weight<'a>(&self, parameters: Parameters<'a>) -> Weight<'a> {
        Weight { matrix: parameters.value(0), layout: self.layout }
    }

    /// Writes or adds db, if there is a bias.
    fn bias_gradient(cx: &Context, parameters: Parameters, dy: &Tensor) {
        if let Some(mut db) = parameters.gradient(1) {
            let (view, accumulate) = db.write();
            cx.device.bias_gradient(dy.view(), view, accumulate);
        }
    }

    /// Saves x where dw will be wanted.
    pub(crate) fn saved<Own>(own: Own, parameters: Parameters, x: Activation) -> Saved<Own> {
        match parameters.is_trained(0) {
            true => Saved::new(own).with_input(x),
            false => Saved::new(own),
        }
    }

    /// Writes or adds dw, where it is wanted: then x was saved.
    pub(crate) fn weight_gradient(
        &self,
        cx: &Context,
        parameters: Parameters,
        x: Option<Activation>,
        dy: &Tensor,
    ) {
        if let (Some(mut dw), Some(x)) = (parameters.gradient(0), x) {
            let (view, accumulate) = dw.write();
            cx.device.linear_weight_gradient(x.view(), dy.view(), view, self.layout, accumulate);
        }
    }

    /// dx = dy · wᵀ (+ sum), `[batch, seq, in]`.
    pub(crate) fn input_gradient(
        &self,
        cx: &Context,
        parameters: Parameters,
        dy: &Tensor,
        sum: Option<Activation>,
    ) -> Activation {
        let [batch, seq, _] = dy.dims();
        let (mut dx, add) = cx.target(sum, [batch, seq, self.inputs].into(), "linear.dx");
        cx.device.linear_input_gradient(dy.view(), self.weight(parameters), dx.view_mut(), add);
        Arc::new(dx)
    }
}

impl Layer for Linear {
    type Own = ();

    fn parameters(&self) -> Vec<ParameterSpec> {
        let shape = match self.layout {
            Layout::InOut => vec![self.inputs, self.outputs],
            Layout::OutIn => vec![self.outputs, self.inputs],
        };
        let weight = ParameterSpec::new(format!("{}.weight", self.prefix), Kind::Matrix, shape, self.init);
        let bias =
            || ParameterSpec::new(format!("{}.bias", self.prefix), Kind::Bias, [self.outputs], Init::Zeros);
        if self.bias { vec![weight, bias()] } else { vec![weight] }
    }

    fn is_row_wise(&self) -> bool {
        true
    }

    /// x: `[batch, seq, in]` -> y: `[batch, seq, out]`
    fn forward(&self, cx: &Context, call: Call) -> Result<(Activation, Saved<()>)> {
        let Call { parameters, x, sum, .. } = call;
        let [batch, seq, _] = x.dims();
        let mut y = cx.activation([batch, seq, self.outputs], "linear.y");
        let epilogue = Epilogue { bias: parameters.get(1), residual: sum.as_ref().map(|sum| sum.view()) };
        cx.device.linear(x.view(), self.weight(parameters), epilogue, y.view_mut());
        Ok((Arc::new(y), Linear::saved((), parameters, x)))
    }

    /// Saves the input only: nothing is computed.
    fn save(&self, _: &Context, call: Call) -> Result<Saved<()>> {
        Ok(Linear::saved((), call.parameters, call.x))
    }

    /// dx = dy · wᵀ; writes or adds dw and db.
    fn backward(&self, cx: &Context, saved: Saved<()>, call: Call) -> Result<Option<Activation>> {
        let Call { parameters, x: dy, sum, input_wanted } = call;
        Linear::bias_gradient(cx, parameters, &dy);
        self.weight_gradient(cx, parameters, saved.x.if_read(), &dy);
        Ok(input_wanted.then(|| self.input_gradient(cx, parameters, &dy, sum)))
    }

    /// dx; x and dy are saved for the second part, where it reads them.
    fn backward_input(
        &self,
        cx: &Context,
        saved: Saved<()>,
        call: Call,
    ) -> Result<(Option<Activation>, Deferred)> {
        let Call { parameters, x: dy, sum, input_wanted } = call;
        let dx = input_wanted.then(|| self.input_gradient(cx, parameters, &dy, sum));
        let dy = parameters.are_trained().then_some(dy);
        Ok((dx, Deferred::new(DeferredLinear { x: saved.x.if_read(), dy })))
    }

    fn backward_weight(&self, cx: &Context, parameters: Parameters, deferred: Deferred) -> Result<()> {
        if let DeferredLinear { x, dy: Some(dy) } = deferred.restore() {
            Linear::bias_gradient(cx, parameters, &dy);
            self.weight_gradient(cx, parameters, x, &dy);
        }
        Ok(())
    }
}
