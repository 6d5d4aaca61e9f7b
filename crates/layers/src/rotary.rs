//! Rotary positions (Su et al., arXiv 2104.09864) of queries and keys, between their projection and attention.

use phalanx_tensor::{Heads, Rotary};

use crate::activation::Activation;
use crate::call::Call;
use crate::failure::Result;
use crate::layer::{Context, Layer};
use crate::parameter::ParameterSpec;
use crate::saved::Saved;

/// Turns the queries and keys of each row by its position, in place where nothing else holds them. Nothing is saved: backward turns
/// their derivatives back.
pub struct RotaryPositions {
    /// By how much.
    pub rotary: Rotary,
    /// By how much in sequences of more tokens than so many, where that is otherwise (longrope).
    pub beyond: Option<(usize, Rotary)>,
    /// The heads of the attention that follows, as this rank has them.
    pub heads: Heads,
}

impl RotaryPositions {
    fn heads(&self) -> usize {
        self.heads.heads + self.heads.kv_heads
    }

    /// How `seq` rows turn, and the position of the first: attention has whole sequences, or rows that follow the cached ones, which keep
    /// their turn.
    fn turn(&self, cx: &Context, seq: usize) -> (&Rotary, usize) {
        let first = if cx.cache.is_some() { cx.first_row } else { 0 };
        let beyond = self.beyond.as_ref().filter(|(most, _)| first + seq > *most);
        (beyond.map_or(&self.rotary, |(_, rotary)| rotary), first)
    }
}

impl Layer for RotaryPositions {
    type Own = ();

    fn parameters(&self) -> Vec<ParameterSpec> {
        Vec::new()
    }

    /// x: `[batch, seq, qkv_width]` of [`Heads`] -> y: the same
    fn forward(&self, cx: &Context, call: Call) -> Result<(Activation, Saved<()>)> {
        let Call { x, sum, .. } = call;
        let [_, seq, width] = x.dims();
        assert_eq!(self.heads.qkv_width(), width, "{:?} of {:?}", self.heads, x.shape());
        let mut y = cx.owned(x, "rotary.y");
        let (rotary, first) = self.turn(cx, seq);
        cx.device.rotary(y.view_mut(), rotary, self.heads(), first);
        Ok((cx.plus(y, sum), Saved::new(())))
    }

    /// dx becomes the derivative of the queries and keys turned back.
    fn backward(&self, cx: &Context, _: Saved<()>, call: Call) -> Result<Option<Activation>> {
        let Call { x: dy, sum, input_wanted, .. } = call;
        if !input_wanted {
            return Ok(None);
        }
        let [_, seq, _] = dy.dims();
        let mut dx = cx.owned(dy, "rotary.dx");
        let (rotary, first) = self.turn(cx, seq);
        cx.device.rotary_backward(dx.view_mut(), rotary, self.heads(), first);
        Ok(Some(cx.plus(dx, sum)))
    }
}
