//! Multiplication by a constant.

use crate::activation::Activation;
use crate::call::Call;
use crate::failure::Result;
use crate::layer::{Context, Layer};
use crate::parameter::ParameterSpec;
use crate::saved::Saved;

/// `y = factor * x`, in place where nothing else holds x; the factor is rounded to the type of x.
pub struct Times {
    /// The factor.
    pub factor: f32,
}

impl Times {
    fn apply(&self, cx: &Context, x: Activation, sum: Option<Activation>) -> Activation {
        let mut y = cx.owned(x, "times.y");
        cx.device.multiply(y.view_mut(), self.factor);
        cx.plus(y, sum)
    }
}

impl Layer for Times {
    type Own = ();

    fn parameters(&self) -> Vec<ParameterSpec> {
        Vec::new()
    }

    fn is_row_wise(&self) -> bool {
        true
    }

    /// x: any shape -> y: the same
    fn forward(&self, cx: &Context, Call { x, sum, .. }: Call) -> Result<(Activation, Saved<()>)> {
        Ok((self.apply(cx, x, sum), Saved::new(())))
    }

    /// dx = factor * dy, in the memory of dy where nothing else holds it.
    fn backward(&self, cx: &Context, _: Saved<()>, call: Call) -> Result<Option<Activation>> {
        let Call { x: dy, sum, input_wanted, .. } = call;
        Ok(input_wanted.then(|| self.apply(cx, dy, sum)))
    }
}
