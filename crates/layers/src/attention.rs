//! Multi-head attention over packed queries, keys and values.

use std::sync::Arc;

use phalanx_tensor::{Dropout, Heads, Tensor};

use crate::activation::Activation;
use crate::cache::KeyValueCache;
use crate::call::{Call, Parameters};
use crate::failure::Result;
use crate::layer::{Context, Layer, Rebuild};
use crate::parameter::ParameterSpec;
use crate::saved::{Saved, Shared};

/// Dropout(softmax(scale q·kᵀ)) · v, tile by tile; the projections around it are linear layers. Rows see those of their own
/// document.
pub struct Attention {
    /// Heads, mask and scores.
    pub heads: Heads,
    /// Probability that training drops an attention probability.
    pub dropout: f32,
    /// Key of the dropout random numbers.
    pub name: String,
    /// Index of this rank's first head among all heads of the layer; dropout masks depend on it.
    pub first_head: usize,
    /// Number of heads of the whole layer.
    pub all_heads: usize,
}

/// State that backward reads beside queries, keys, values and the output.
pub struct SavedAttention {
    /// `[batch, heads, seq]`; None if keys and values are in a cache, and no backward follows.
    log_sum_exp: Option<Tensor>,
    /// The dropout whose mask was applied.
    dropout: Option<Dropout>,
}

impl Layer for Attention {
    type Own = SavedAttention;

    fn parameters(&self) -> Vec<ParameterSpec> {
        Vec::new()
    }

    /// x: `[batch, seq, qkv_width]` -> y: `[batch, seq, out_width]`, of [`Heads`]
    fn forward(&self, cx: &Context, call: Call) -> Result<(Activation, Saved<SavedAttention>)> {
        let Call { x, sum, .. } = call;
        let [batch, seq, _] = x.dims();
        if let Some(cache) = cx.cache {
            let own = SavedAttention { log_sum_exp: None, dropout: None };
            return Ok((self.cached(cx, cache, &x, seq, sum), Saved::new(own)));
        }
        let per_sample = self.all_heads * seq * seq;
        let dropout = cx.draws(self.dropout).map(|draw| {
            let dropout = draw.dropout(self.dropout, &self.name, per_sample);
            Dropout { first: dropout.first + (self.first_head * seq * seq) as u64, ..dropout }
        });
        let mut out = cx.activation([batch, seq, self.heads.out_width()], "attention.out");
        let mut log_sum_exp = cx.statistics([batch, self.heads.heads, seq], "attention.log_sum_exp");
        self.attend(cx, &x, dropout, [&mut out, &mut log_sum_exp]);
        let out = Arc::new(out);
        let y = match sum {
            None => Arc::clone(&out),
            Some(_) => {
                let mut copy = cx.activation(out.shape(), "attention.y");
                cx.device.copy(out.view(), copy.view_mut());
                cx.plus(copy, sum)
            }
        };
        let own = SavedAttention { log_sum_exp: Some(log_sum_exp), dropout };
        Ok((y, Saved::new(own).with_input(x).with_output(out)))
    }

    /// dx overwrites; probabilities are recomputed from the row statistics.
    fn backward(&self, cx: &Context, saved: Saved<SavedAttention>, call: Call) -> Result<Option<Activation>> {
        let Call { x: dy, sum, input_wanted, .. } = call;
        let Saved { x, y, own: SavedAttention { log_sum_exp, dropout } } = saved;
        if !input_wanted {
            return Ok(None);
        }
        let (qkv, out) = (x.into_held(), y.into_held());
        let log_sum_exp = log_sum_exp.expect("no backward follows a forward with a cache");
        let mut dqkv = cx.activation(qkv.shape(), "attention.dqkv");
        let rows = [out.view(), log_sum_exp.view(), dy.view()];
        let positions = cx.positions();
        let positions = positions.as_ref().map(|positions| positions.view());
        cx.device.attention_backward(qkv.view(), rows, self.heads, positions, dropout, dqkv.view_mut());
        Ok(Some(cx.plus(dqkv, sum)))
    }

    fn last_row(&self, cx: &Context, call: Call) -> Result<Activation> {
        let Call { x, sum, .. } = call;
        let [_, seq, _] = x.dims();
        Ok(match cx.cache {
            Some(cache) => self.cached(cx, cache, &x, 1, sum),
            None => self.cached(cx, &KeyValueCache::new(cx.device, seq), &x, 1, sum),
        })
    }

    fn rebuild(&self) -> Option<Rebuild> {
        Some(Rebuild { reads_input: true, always: false })
    }

    /// Recomputes the output; the row statistics are written again, with the same values.
    fn output(
        &self,
        cx: &Context,
        _: Parameters,
        x: &Shared,
        own: &mut SavedAttention,
    ) -> Result<Activation> {
        let qkv = x.held();
        let log_sum_exp = own.log_sum_exp.as_mut().expect("no backward follows a forward with a cache");
        let [batch, seq, _] = qkv.dims();
        let mut out = cx.activation([batch, seq, self.heads.out_width()], "attention.out_again");
        self.attend(cx, qkv, own.dropout, [&mut out, log_sum_exp]);
        Ok(Arc::new(out))
    }
}

impl Attention {
    /// Forward of whole sequences.
    fn attend(
        &self,
        cx: &Context,
        qkv: &Tensor,
        dropout: Option<Dropout>,
        [out, log_sum_exp]: [&mut Tensor; 2],
    ) {
        let positions = cx.positions();
        let positions = positions.as_ref().map(|positions| positions.view());
        let (out, log_sum_exp) = (out.view_mut(), log_sum_exp.view_mut());
        cx.device.attention(qkv.view(), self.heads, positions, dropout, out, log_sum_exp);
    }

    /// Forward of all rows of `qkv`, which begins at `cx.rows.first`, or of the last one, over the keys and values in `cache`
    /// and its own.
    fn cached(
        &self,
        cx: &Context,
        cache: &KeyValueCache,
        qkv: &Activation,
        rows: usize,
        sum: Option<Activation>,
    ) -> Activation {
        let [batch, _, _] = qkv.dims();
        let mut out = cx.activation([batch, rows, self.heads.out_width()], "attention.out");
        cache.attend(&self.name, self.heads, cx.rows.first, qkv.view(), out.view_mut());
        cx.plus(out, sum)
    }
}
