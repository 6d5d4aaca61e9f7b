//! Token and position embedding: the first block of a model.

use phalanx_tensor::View;

use crate::init::Init;
use crate::layer::{Activation, Context, Gradient, Layer, ParameterSpec, add_residual};
use crate::saved::Saved;

/// `y[b, t] = tokens[x[b, t]] + positions[t]`.
pub struct Embedding {
    /// Name of the token table.
    pub tokens: String,
    /// Name of the position table.
    pub positions: String,
    /// Rows of the token table.
    pub vocab: usize,
    /// Rows of the position table.
    pub length: usize,
    /// Width.
    pub hidden: usize,
    /// Initial values of both.
    pub init: Init,
}

impl Layer for Embedding {
    fn parameters(&self) -> Vec<ParameterSpec> {
        let table = |name: &String, rows| ParameterSpec {
            name: name.clone(),
            shape: vec![rows, self.hidden],
            init: self.init,
        };
        vec![table(&self.tokens, self.vocab), table(&self.positions, self.length)]
    }

    /// x: `[batch, seq]` u32 -> y: `[batch, seq, hidden]`
    fn forward(
        &self,
        cx: &Context,
        parameters: &[View],
        x: Activation,
        residual: Option<Activation>,
    ) -> (Activation, Saved) {
        let [batch, seq] = x.dims();
        let mut y = cx.activation([batch, seq, self.hidden], "embedding.y");
        cx.device.embedding(x.view(), parameters[0], parameters[1], y.view_mut());
        (add_residual(cx, y, residual), Saved::new(()).with_input(x))
    }

    /// Tables as `gradients` says; token ids have no gradient.
    fn backward(
        &self,
        cx: &Context,
        _: &[View],
        gradients: &mut [Gradient],
        saved: Saved,
        dy: Activation,
        _: Option<Activation>,
    ) -> Option<Activation> {
        let tokens = saved.x.into_held();
        let [table, positions] = gradients else { panic!("an embedding has two parameters") };
        let (dtable, add_table) = table.write();
        let (dpositions, add_positions) = positions.write();
        let accumulate = [add_table, add_positions];
        cx.device.embedding_backward(tokens.view(), dy.view(), dtable, dpositions, accumulate);
        None
    }
}
