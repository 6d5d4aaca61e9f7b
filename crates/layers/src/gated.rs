//! Gated activations (Shazeer, arXiv 2002.05202): the second half of each row, times a function of the first.

use std::sync::Arc;

use phalanx_tensor::{Gate, Tensor};

use crate::activation::Activation;
use crate::call::{Call, Parameters};
use crate::failure::Result;
use crate::layer::{Context, Layer, Rebuild};
use crate::parameter::ParameterSpec;
use crate::saved::{Saved, Shared};

/// `y[i] = act(x[i]) * x[m + i]` for rows of `2 m`: behind a linear layer with the results gate and up, of which every rank has the
/// same columns.
pub struct Gated {
    /// The activation of the gate.
    pub gate: Gate,
}

impl Gated {
    fn compute(&self, cx: &Context, x: &Tensor, name: &'static str) -> Tensor {
        let [batch, seq, width] = x.dims();
        let mut y = cx.activation([batch, seq, width / 2], name);
        cx.device.gated(x.view(), self.gate, y.view_mut());
        y
    }
}

impl Layer for Gated {
    type Own = ();

    fn parameters(&self) -> Vec<ParameterSpec> {
        Vec::new()
    }

    fn is_row_wise(&self) -> bool {
        true
    }

    /// x: `[batch, seq, 2 m]` -> y: `[batch, seq, m]`
    fn forward(&self, cx: &Context, call: Call) -> Result<(Activation, Saved<()>)> {
        let Call { x, sum, .. } = call;
        let y = self.compute(cx, &x, "gated.y");
        Ok((cx.plus(y, sum), Saved::new(()).with_input(x)))
    }

    /// dx, in the memory of x where nothing else holds it.
    fn backward(&self, cx: &Context, saved: Saved<()>, call: Call) -> Result<Option<Activation>> {
        let Call { x: dy, sum, input_wanted, .. } = call;
        if !input_wanted {
            return Ok(None);
        }
        let mut dx = cx.owned(saved.x.into_held(), "gated.dx");
        cx.device.gated_backward(dx.view_mut(), self.gate, dy.view());
        Ok(Some(cx.plus(dx, sum)))
    }

    fn rebuild(&self) -> Option<Rebuild> {
        Some(Rebuild { reads_input: true, always: false })
    }

    /// Recomputes the output.
    fn output(&self, cx: &Context, _: Parameters, x: &Shared, (): &mut ()) -> Result<Activation> {
        Ok(Arc::new(self.compute(cx, x.held(), "gated.y_again")))
    }
}
