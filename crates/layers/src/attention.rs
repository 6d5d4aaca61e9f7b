//! Multi-head attention over packed queries, keys and values.

use std::sync::Arc;

use phalanx_tensor::{Dropout, Heads, Tensor, View};

use crate::activation::Activation;
use crate::cache::KeyValueCache;
use crate::failure::Result;
use crate::layer::{Context, Gradient, Layer, ParameterSpec, Rebuild, add_residual};
use crate::saved::{Saved, restore, restore_mut};

/// Dropout(softmax(q·kᵀ/sqrt(head))) · v, tile by tile; the projections around it are linear layers.
pub struct Attention {
    /// Heads and mask.
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

struct SavedAttention {
    /// `[batch, heads, seq]`
    log_sum_exp: Tensor,
    /// The dropout whose mask was applied.
    dropout: Option<Dropout>,
}

impl Layer for Attention {
    fn parameters(&self) -> Vec<ParameterSpec> {
        Vec::new()
    }

    /// x: `[batch, seq, 3 * hidden]` -> y: `[batch, seq, hidden]`
    fn forward(
        &self,
        cx: &Context,
        _: &[View],
        x: Activation,
        residual: Option<Activation>,
    ) -> Result<(Activation, Saved)> {
        if let Some(cache) = cx.cache {
            let [_, new, _] = x.dims();
            return Ok((self.cached(cx, cache, &x, new, residual), Saved::new(())));
        }
        let [batch, seq, hidden3] = x.dims();
        let per_sample = self.all_heads * seq * seq;
        let dropout = cx.draws(self.dropout).map(|draw| {
            let dropout = draw.dropout(self.dropout, &self.name, per_sample);
            Dropout { first: dropout.first + (self.first_head * seq * seq) as u64, ..dropout }
        });
        let mut out = cx.activation([batch, seq, hidden3 / 3], "attention.out");
        let mut log_sum_exp = cx.statistics([batch, self.heads.heads, seq], "attention.log_sum_exp");
        cx.device.attention(x.view(), self.heads, dropout, out.view_mut(), log_sum_exp.view_mut());
        let out = Arc::new(out);
        let y = match residual {
            None => Arc::clone(&out),
            Some(_) => {
                let mut copy = cx.activation(out.shape(), "attention.y");
                cx.device.copy(out.view(), copy.view_mut());
                add_residual(cx, copy, residual)
            }
        };
        Ok((y, Saved::new(SavedAttention { log_sum_exp, dropout }).with_input(x).with_output(out)))
    }

    fn last_row(
        &self,
        cx: &Context,
        _: &[View],
        x: Activation,
        residual: Option<Activation>,
    ) -> Result<Activation> {
        let [_, seq, _] = x.dims();
        Ok(match cx.cache {
            Some(cache) => self.cached(cx, cache, &x, 1, residual),
            None => self.cached(cx, &KeyValueCache::new(cx.device, seq), &x, 1, residual),
        })
    }

    fn rebuild(&self) -> Option<&dyn Rebuild> {
        Some(self)
    }

    /// dx overwrites; probabilities are recomputed from the row statistics.
    fn backward(
        &self,
        cx: &Context,
        _: &[View],
        _: &mut [Gradient],
        saved: Saved,
        dy: Activation,
        residual: Option<Activation>,
    ) -> Result<Option<Activation>> {
        let Saved { x, y, own } = saved;
        let (qkv, out) = (x.into_held(), y.into_held());
        let SavedAttention { log_sum_exp, dropout } = restore(own);
        let mut dqkv = cx.activation(qkv.shape(), "attention.dqkv");
        let rows = [out.view(), log_sum_exp.view(), dy.view()];
        cx.device.attention_backward(qkv.view(), rows, self.heads, dropout, dqkv.view_mut());
        Ok(Some(add_residual(cx, dqkv, residual)))
    }
}

impl Attention {
    /// Forward of all rows of `qkv`, which begins at `cx.first_row`, or of the last one, over the keys and values in `cache`
    /// and its own.
    fn cached(
        &self,
        cx: &Context,
        cache: &KeyValueCache,
        qkv: &Activation,
        rows: usize,
        residual: Option<Activation>,
    ) -> Activation {
        let [batch, _, hidden3] = qkv.dims();
        let mut out = cx.activation([batch, rows, hidden3 / 3], "attention.out");
        cache.attend(&self.name, self.heads, cx.first_row, qkv.view(), out.view_mut());
        add_residual(cx, out, residual)
    }
}

impl Rebuild for Attention {
    fn reads_input(&self) -> bool {
        true
    }

    /// Recomputes the output; the row statistics are written again, with the same values.
    fn output(&self, cx: &Context, _: &[View], saved: &mut Saved) -> Result<Activation> {
        let qkv = saved.x.held();
        let SavedAttention { log_sum_exp, dropout } = restore_mut(&mut *saved.own);
        let [batch, seq, hidden3] = qkv.dims();
        let mut out = cx.activation([batch, seq, hidden3 / 3], "attention.out_again");
        cx.device.attention(qkv.view(), self.heads, *dropout, out.view_mut(), log_sum_exp.view_mut());
        Ok(Arc::new(out))
    }
}
