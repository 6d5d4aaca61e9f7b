//! Dropout of a layer's output (Srivastava et al., 2014).
//!
//! No mask is saved: it is a function of seed, step, name and the element's number in the global batch ([`Draw`]), and
//! backward computes it again. So it does not depend on how the batch is cut, nor on whether a layer is recomputed.

use std::sync::Arc;

use phalanx_tensor::operations::DropoutForward;

use crate::activation::Activation;
use crate::call::{Call, Parameters};
use crate::failure::Result;
use crate::layer::{AnyLayer, Context, Draw, Layer};
use crate::parameter::ParameterSpec;
use crate::saved::{AnySaved, Deferred, Saved, Shared};
use crate::share::Share;

/// `y = dropout(f(x)) (+ sum)`; outside of training, and when p is 0, `y = f(x) (+ sum)`.
pub struct Dropped {
    /// f
    pub layer: Box<dyn AnyLayer>,
    /// Probability that training drops an element of f(x); the others are divided by `1 - p`.
    pub p: f32,
    /// Key of the dropout random numbers.
    pub name: String,
}

/// State that backward reads beside x.
pub struct SavedDropped {
    /// The tensors that f saved, without its input.
    layer: AnySaved,
    /// Key of the mask; None when nothing was dropped.
    draw: Option<Draw>,
}

impl Dropped {
    /// Saved state of forward: the input is that of f.
    fn saved(&self, cx: &Context, mut layer: AnySaved) -> Saved<SavedDropped> {
        let x = std::mem::replace(&mut layer.x, Shared::Unread);
        Saved { x, ..Saved::new(SavedDropped { layer, draw: cx.draws(self.p) }) }
    }

    /// Returns the saved state of f, and its backward call with the derivative of f(x).
    fn undo<'a>(&self, cx: &Context, saved: Saved<SavedDropped>, call: Call<'a>) -> (AnySaved, Call<'a>) {
        let SavedDropped { layer, draw } = saved.own;
        let dy = match draw {
            None => call.x,
            Some(draw) => dropped(cx, draw, (self.p, &self.name), call.x, None),
        };
        (Saved { x: saved.x, ..layer }, Call { x: dy, ..call })
    }
}

/// Drops elements of x `[.., width]` into a new tensor, with this probability and by the mask of this name, and adds the sum. Where x has
/// only some rows of the micro-batch, they start at `cx.rows.first`.
#[track_caller]
pub(crate) fn dropped(
    cx: &Context,
    draw: Draw,
    dropout: (f32, &str),
    x: Activation,
    sum: Option<Activation>,
) -> Activation {
    dropped_part(cx, draw, dropout, (x, Share::WHOLE), sum)
}

/// The same of a share of the columns of x: the mask is a part of that of all columns.
#[track_caller]
pub(crate) fn dropped_part(
    cx: &Context,
    draw: Draw,
    (p, name): (f32, &str),
    (x, share): (Activation, Share),
    sum: Option<Activation>,
) -> Activation {
    let [rows, columns] = x.shape().rows_cols();
    let ([batch, seq], row) = (cx.rows.tokens, columns * share.of);
    let mut dropout = draw.dropout(p, name, seq * row);
    dropout.first += (columns * share.index) as u64;
    if rows < batch * seq {
        dropout.first += (cx.rows.first * row) as u64;
    }
    let mut y = cx.activation(x.shape(), "dropout.y");
    let (residual, to) = (sum.as_ref().map(|sum| sum.view()), y.view_mut());
    cx.device.run(DropoutForward { from: x.view(), dropout, row, residual, to });
    Arc::new(y)
}

impl Layer for Dropped {
    type Own = SavedDropped;

    fn parameters(&self) -> Vec<ParameterSpec> {
        self.layer.parameters()
    }

    fn is_row_wise(&self) -> bool {
        self.layer.is_row_wise()
    }

    fn forward(&self, cx: &Context, call: Call) -> Result<(Activation, Saved<SavedDropped>)> {
        let Some(draw) = cx.draws(self.p) else {
            let (y, layer) = self.layer.forward(cx, call)?;
            return Ok((y, self.saved(cx, layer)));
        };
        let Call { sum, .. } = call;
        let (y, layer) = self.layer.forward(cx, Call { sum: None, ..call })?;
        Ok((dropped(cx, draw, (self.p, &self.name), y, sum), self.saved(cx, layer)))
    }

    /// dx = fᵀ(dropout(dy)); parameter gradients as f writes them.
    fn backward(&self, cx: &Context, saved: Saved<SavedDropped>, call: Call) -> Result<Option<Activation>> {
        let (layer, call) = self.undo(cx, saved, call);
        self.layer.backward(cx, layer, call)
    }

    fn save(&self, cx: &Context, call: Call) -> Result<Saved<SavedDropped>> {
        Ok(self.saved(cx, self.layer.save(cx, call)?))
    }

    fn backward_input(
        &self,
        cx: &Context,
        saved: Saved<SavedDropped>,
        call: Call,
    ) -> Result<(Option<Activation>, Deferred)> {
        let (layer, call) = self.undo(cx, saved, call);
        self.layer.backward_input(cx, layer, call)
    }

    fn backward_weight(&self, cx: &Context, parameters: Parameters, deferred: Deferred) -> Result<()> {
        self.layer.backward_weight(cx, parameters, deferred)
    }
}
