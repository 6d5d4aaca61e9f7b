//! Multi-head attention over packed queries, keys and values.

use std::sync::Arc;

use phalanx_tensor::{Heads, Tensor, View};

use crate::layer::{Activation, Context, Gradient, Layer, ParameterSpec, Saved, add_residual, restore};

/// Softmax(q·kᵀ/sqrt(head)) · v, tile by tile; the projections around it are linear layers.
pub struct Attention {
    /// Heads and mask.
    pub heads: Heads,
}

struct SavedAttention {
    /// `[batch, seq, 3 * hidden]`
    qkv: Activation,
    /// `[batch, seq, hidden]`
    out: Activation,
    /// `[batch, heads, seq]`
    log_sum_exp: Tensor,
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
    ) -> (Activation, Saved) {
        let [batch, seq, hidden3] = x.dims();
        let mut out = cx.activation([batch, seq, hidden3 / 3], "attention.out");
        let mut log_sum_exp = cx.statistics([batch, self.heads.heads, seq], "attention.log_sum_exp");
        cx.device.attention(x.view(), self.heads, None, out.view_mut(), log_sum_exp.view_mut());
        let out = Arc::new(out);
        let y = match residual {
            None => Arc::clone(&out),
            Some(_) => {
                let mut copy = cx.activation(out.shape(), "attention.y");
                cx.device.copy(out.view(), copy.view_mut());
                add_residual(cx, copy, residual)
            }
        };
        (y, Box::new(SavedAttention { qkv: x, out, log_sum_exp }))
    }

    /// dx overwrites; probabilities are computed again from the row statistics.
    fn backward(
        &self,
        cx: &Context,
        _: &[View],
        _: &mut [Gradient],
        saved: Saved,
        dy: Activation,
        residual: Option<Activation>,
    ) -> Option<Activation> {
        let SavedAttention { qkv, out, log_sum_exp } = restore(saved);
        let mut dqkv = cx.activation(qkv.shape(), "attention.dqkv");
        let rows = [out.view(), log_sum_exp.view(), dy.view()];
        cx.device.attention_backward(qkv.view(), rows, self.heads, None, dqkv.view_mut());
        Some(add_residual(cx, dqkv, residual))
    }
}
