//! Rotary positions (Su et al., arXiv 2104.09864) of queries and keys, between their projection and attention.

use phalanx_tensor::{Device, Heads, Rotary, RowPositions, ViewMut};

use crate::activation::Activation;
use crate::call::Call;
use crate::failure::Result;
use crate::layer::{Context, Layer};
use crate::parameter::ParameterSpec;
use crate::saved::Saved;

/// Turns the queries and keys of each row by its position in its document, in place where nothing else holds them. Nothing is saved:
/// backward turns their derivatives back.
pub struct RotaryPositions {
    /// By how much.
    pub rotary: Rotary,
    /// By how much in sequences of more tokens than so many, where that is otherwise (longrope).
    pub beyond: Option<(usize, Rotary)>,
    /// The heads of the attention that follows, as this rank has them.
    pub heads: Heads,
}

impl RotaryPositions {
    /// Turns the rows of x `[batch, seq, qkv_width]` by their positions, or back: `turn` is the device's operation. Attention has whole
    /// sequences, or rows that follow the cached ones, which keep their turn. How far a sequence goes, and not a document in it, decides
    /// whether it turns as long ones do.
    fn turn(&self, cx: &Context, x: ViewMut, turn: fn(&Device, ViewMut, &Rotary, usize, RowPositions)) {
        let [_, seq, _] = x.dims();
        let first = if cx.cache.is_some() { cx.rows.first } else { 0 };
        let beyond = self.beyond.as_ref().filter(|(max, _)| first + seq > *max);
        let rotary = beyond.map_or(&self.rotary, |(_, rotary)| rotary);
        let of_documents = cx.positions();
        let positions = match &of_documents {
            Some(positions) => RowPositions::Each(positions.view()),
            None => RowPositions::From(first),
        };
        turn(cx.device, x, rotary, self.heads.heads + self.heads.kv_heads, positions);
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
        let [_, _, width] = x.dims();
        assert_eq!(self.heads.qkv_width(), width, "{:?} of {:?}", self.heads, x.shape());
        let mut y = cx.owned(x, "rotary.y");
        self.turn(cx, y.view_mut(), Device::rotary);
        Ok((cx.plus(y, sum), Saved::new(())))
    }

    /// dx becomes the derivative of the queries and keys turned back.
    fn backward(&self, cx: &Context, _: Saved<()>, call: Call) -> Result<Option<Activation>> {
        let Call { x: dy, sum, input_wanted, .. } = call;
        if !input_wanted {
            return Ok(None);
        }
        let mut dx = cx.owned(dy, "rotary.dx");
        self.turn(cx, dx.view_mut(), Device::rotary_backward);
        Ok(Some(cx.plus(dx, sum)))
    }
}
