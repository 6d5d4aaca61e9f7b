//! A linear layer and GELU (Hendrycks and Gimpel, arXiv 1606.08415) in one: the activation is taken while the
//! product is in registers, and backward sums the gradient of the bias while it is there.

use std::sync::Arc;

use phalanx_tensor::{Gelu, Tensor};

use crate::activation::Activation;
use crate::call::{Call, Parameters};
use crate::cut::Cut;
use crate::failure::Result;
use crate::layer::{Context, Layer, Rebuild};
use crate::linear::Linear;
use crate::parameter::ParameterSpec;
use crate::saved::{Deferred, Saved, Shared};
use crate::share::{CannotCut, Share};

/// `gelu(x · w (+ b))`, of a linear layer with one result.
pub struct LinearGelu {
    /// `x · w (+ b)`
    pub linear: Linear,
    /// Exact, or the tanh approximation.
    pub gelu: Gelu,
}

/// Tensors that backward reads beside x.
pub struct SavedLinearGelu {
    /// `[batch, seq, out]`, before GELU.
    pre: Tensor,
}

/// Tensors that the first part of backward saves for the second.
struct DeferredLinearGelu {
    linear: Deferred,
    /// `[out]`, if it is wanted.
    db: Option<Tensor>,
}

impl Cut for LinearGelu {
    fn outputs(self, share: Share) -> Result<LinearGelu, CannotCut> {
        Ok(LinearGelu { linear: self.linear.outputs(share)?, ..self })
    }

    /// GELU of a sum is not the sum of GELUs.
    fn inputs(self, share: Share) -> Result<(LinearGelu, Option<ParameterSpec>), CannotCut> {
        Err(CannotCut { what: self.linear.outputs[0].name.clone(), pieces: 1, holders: share.of })
    }
}

/// `gelu(x)`, where what is before it cannot take it in.
pub(crate) struct GeluAlone {
    pub(crate) gelu: Gelu,
}

impl Layer for GeluAlone {
    type Own = ();

    fn parameters(&self) -> Vec<ParameterSpec> {
        Vec::new()
    }

    fn is_row_wise(&self) -> bool {
        true
    }

    /// x: any shape -> y: the same
    fn forward(&self, cx: &Context, Call { x, sum, .. }: Call) -> Result<(Activation, Saved<()>)> {
        let mut y = cx.activation(x.shape(), "gelu.y");
        cx.device.gelu(x.view(), self.gelu, y.view_mut());
        Ok((cx.plus(y, sum), Saved::new(()).with_input(x)))
    }

    /// dx = dy * gelu'(x), in the memory of dy where nothing else holds it.
    fn backward(&self, cx: &Context, saved: Saved<()>, call: Call) -> Result<Option<Activation>> {
        let Call { x: dy, sum, .. } = call;
        let mut dx = cx.owned(dy, "gelu.dx");
        cx.device.gelu_backward(saved.x.into_held().view(), self.gelu, dx.view_mut(), None, false);
        Ok(Some(cx.plus(dx, sum)))
    }

    fn rebuild(&self) -> Option<Rebuild> {
        Some(Rebuild { reads_input: true, always: false })
    }

    /// y = gelu(x)
    fn output(&self, cx: &Context, _: Parameters, x: &Shared, (): &mut ()) -> Result<Activation> {
        let x = x.held();
        let mut y = cx.activation(x.shape(), "gelu.y_again");
        cx.device.gelu(x.view(), self.gelu, y.view_mut());
        Ok(Arc::new(y))
    }
}

impl Layer for LinearGelu {
    type Own = SavedLinearGelu;

    fn parameters(&self) -> Vec<ParameterSpec> {
        self.linear.parameters()
    }

    fn is_row_wise(&self) -> bool {
        true
    }

    /// x: `[batch, seq, in]` -> y: `[batch, seq, out]`
    fn forward(&self, cx: &Context, call: Call) -> Result<(Activation, Saved<SavedLinearGelu>)> {
        let Call { parameters, x, sum, .. } = call;
        let [batch, seq, _] = x.dims();
        let mut pre = cx.activation([batch, seq, self.linear.width()], "linear_gelu.pre");
        let mut y = cx.activation([batch, seq, self.linear.width()], "linear_gelu.y");
        let (w, bias) = (self.linear.operand(cx, parameters, 0), parameters.get(1));
        cx.device.linear_gelu(x.view(), w.weight(), bias, self.gelu, pre.view_mut(), y.view_mut());
        Ok((cx.plus(y, sum), self.linear.saved(SavedLinearGelu { pre }, parameters, x)))
    }

    /// dx overwrites, or adds to the sum; dw, db where they are wanted.
    fn backward(
        &self,
        cx: &Context,
        saved: Saved<SavedLinearGelu>,
        call: Call,
    ) -> Result<Option<Activation>> {
        let Call { parameters, x: dy, sum, input_wanted } = call;
        let Saved { x, own: SavedLinearGelu { pre }, .. } = saved;
        let mut dpre = cx.owned(dy, "linear_gelu.dpre");
        {
            let mut gradient = parameters.gradient(1);
            let (db, accumulate) = gradient.as_mut().map(|gradient| gradient.write()).unzip();
            let accumulate = accumulate.unwrap_or(false);
            cx.device.gelu_backward(pre.view(), self.gelu, dpre.view_mut(), db, accumulate);
        }
        drop(pre);
        let weight = parameters.split_at(1).0;
        self.linear.weight_gradient(cx, weight, x.if_read(), &dpre);
        Ok(input_wanted.then(|| self.linear.input_gradient(cx, weight, &dpre, sum)))
    }

    fn rebuild(&self) -> Option<Rebuild> {
        Some(Rebuild { reads_input: false, always: false })
    }

    /// y = gelu(pre)
    fn output(
        &self,
        cx: &Context,
        _: Parameters,
        _: &Shared,
        own: &mut SavedLinearGelu,
    ) -> Result<Activation> {
        let mut y = cx.activation(own.pre.shape(), "linear_gelu.y_again");
        cx.device.gelu(own.pre.view(), self.gelu, y.view_mut());
        Ok(Arc::new(y))
    }

    /// dx; x, the derivative before GELU and its sum over rows (in f32) are kept.
    fn backward_input(
        &self,
        cx: &Context,
        saved: Saved<SavedLinearGelu>,
        call: Call,
    ) -> Result<(Option<Activation>, Deferred)> {
        let Call { parameters, x: dy, .. } = call;
        let Saved { x, y, own: SavedLinearGelu { pre } } = saved;
        let mut dpre = cx.owned(dy, "linear_gelu.dpre");
        let has_db = parameters.is_trained(1);
        let mut db = has_db.then(|| cx.statistics([self.linear.width()], "deferred.gradient"));
        let sums = db.as_mut().map(|db| db.view_mut());
        cx.device.gelu_backward(pre.view(), self.gelu, dpre.view_mut(), sums, false);
        drop(pre);
        // The bias has its gradient: the linear layer is asked for that of the weight.
        let call = Call { parameters: parameters.split_at(1).0, x: Arc::new(dpre), ..call };
        let (dx, linear) = self.linear.backward_input(cx, Saved { x, y, own: () }, call)?;
        Ok((dx, Deferred::new(DeferredLinearGelu { linear, db })))
    }

    fn backward_weight(&self, cx: &Context, parameters: Parameters, deferred: Deferred) -> Result<()> {
        let DeferredLinearGelu { linear, db } = deferred.restore();
        if let (Some(mut gradient), Some(db)) = (parameters.gradient(1), db) {
            gradient.add(cx.device, db.view());
        }
        self.linear.backward_weight(cx, parameters.split_at(1).0, linear)
    }
}
