//! The pooler of BERT (Devlin et al., arXiv 1810.04805): what a head that looks at whole sequences reads of them.

use std::sync::Arc;

use phalanx_tensor::{Dropout, Tensor};

use crate::activation::Activation;
use crate::call::Call;
use crate::failure::Result;
use crate::layer::{Context, Layer};
use crate::linear::Linear;
use crate::parameter::ParameterSpec;
use crate::saved::Saved;

/// `dropout(tanh(x0 · w + b))`, where x0 is the first row of each sample.
pub struct Pooler {
    /// `x0 · w + b`, of one result.
    pub linear: Linear,
    /// Probability that training drops an element; the others are divided by `1 - p`.
    pub p: f32,
    /// Key of the dropout random numbers.
    pub name: String,
}

/// State that backward reads.
pub struct SavedPooler {
    /// `[batch, 1, in]`: the first rows.
    first: Activation,
    /// `[batch, 1, out]`: the result of tanh.
    y: Activation,
    /// The dropout that was applied.
    dropout: Option<Dropout>,
}

impl Pooler {
    /// `y` without the elements that `dropout` drops; y itself without dropout.
    fn dropped(cx: &Context, y: Activation, dropout: Option<Dropout>) -> Activation {
        let Some(dropout) = dropout else { return y };
        let mut dropped = cx.activation(y.shape(), "pooler.dropped");
        cx.device.dropout(y.view(), dropout, None, dropped.view_mut());
        Arc::new(dropped)
    }
}

impl Layer for Pooler {
    type Own = SavedPooler;

    fn parameters(&self) -> Vec<ParameterSpec> {
        self.linear.parameters()
    }

    /// x: `[batch, seq, in]` -> y: `[batch, 1, out]`
    fn forward(&self, cx: &Context, call: Call) -> Result<(Activation, Saved<SavedPooler>)> {
        let Call { parameters, x, sum, .. } = call;
        let [batch, seq, width] = x.dims();
        assert_eq!([batch, seq], cx.rows.tokens, "every rank has whole samples");
        let mut first = cx.activation([batch, 1, width], "pooler.first");
        for sample in 0..batch {
            let row = x.view().range(sample * seq * width..(sample * seq + 1) * width);
            cx.device.copy(row, first.view_mut().range(sample * width..(sample + 1) * width));
        }
        let first = Arc::new(first);
        let (pre, _) = self.linear.forward(cx, Call::new(parameters, Arc::clone(&first)))?;
        let mut y = cx.activation(pre.shape(), "pooler.y");
        cx.device.tanh(pre.view(), y.view_mut());
        let y = Arc::new(y);
        let dropout = cx.draws(self.p).map(|draw| draw.dropout(self.p, &self.name, self.linear.width()));
        let dropped = Pooler::dropped(cx, Arc::clone(&y), dropout);
        let dropped = match sum {
            None => dropped,
            Some(_) => cx.plus(cx.owned(dropped, "pooler.sum"), sum),
        };
        Ok((dropped, Saved::new(SavedPooler { first, y, dropout })))
    }

    /// dx is zero but in the first rows (overwrites, or adds to the sum); dw, db where they are wanted.
    fn backward(&self, cx: &Context, saved: Saved<SavedPooler>, call: Call) -> Result<Option<Activation>> {
        let Call { parameters, x: dy, sum, input_wanted } = call;
        let SavedPooler { first, y, dropout } = saved.own;
        let [batch, _, width] = first.dims();
        let [_, seq] = cx.rows.tokens;
        let mut dpre: Tensor = cx.owned(Pooler::dropped(cx, dy, dropout), "pooler.dpre").reshape(y.shape());
        cx.device.tanh_backward(y.view(), dpre.view_mut());
        drop(y);
        let saved = Saved::new(()).with_input(first);
        let call = Call { input_wanted, ..Call::new(parameters, Arc::new(dpre)) };
        let Some(dfirst) = self.linear.backward(cx, saved, call)? else { return Ok(None) };
        let mut dx = cx.activation([batch, seq, width], "pooler.dx");
        cx.device.fill(dx.view_mut(), 0.0);
        for sample in 0..batch {
            let row = dfirst.view().range(sample * width..(sample + 1) * width);
            cx.device.copy(row, dx.view_mut().range(sample * seq * width..(sample * seq + 1) * width));
        }
        Ok(Some(cx.plus(dx, sum)))
    }
}
