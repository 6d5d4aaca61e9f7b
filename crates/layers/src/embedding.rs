//! Token, position and type embedding: the first block of a model.

use phalanx_tensor::{Lookup, Positions, Tensor};

use crate::activation::Activation;
use crate::call::{Call, Parameters};
use crate::failure::Result;
use crate::init::Init;
use crate::layer::{Context, Layer};
use crate::parameter::{Kind, ParameterSpec};
use crate::saved::{Deferred, Saved};

/// `y[b, t] = tokens[x[b, t]] (+ positions[t]) (+ types[type of x[b, t]])`.
pub struct Embedding {
    /// Name of the token table.
    pub tokens: String,
    /// The table of positions, if the model learns them.
    pub positions: Option<PositionTable>,
    /// Name of the table of the two token types (BERT's segments), if there is one.
    pub types: Option<String>,
    /// Rows of the token table.
    pub vocab: usize,
    /// Width.
    pub hidden: usize,
    /// Initial values of all tables.
    pub init: Init,
}

/// A table of learned positions.
pub struct PositionTable {
    /// Its name.
    pub name: String,
    /// Its rows: the longest sequence.
    pub rows: usize,
}

/// Number of token types.
const TYPES: usize = 2;

/// The rows over which gradients of position and type tables are summed.
pub struct EmbeddingGradients<'a> {
    /// The token ids of the rows, u32.
    pub ids: &'a Tensor,
    /// `[.., hidden]`
    pub dy: &'a Tensor,
    /// Number of the first row in the micro-batch.
    pub first_row: usize,
}

impl Embedding {
    /// What is added to rows that start at `first_row`, if positions are learned.
    fn positions<'a>(
        &self,
        cx: &Context,
        parameters: Parameters<'a>,
        first_row: usize,
    ) -> Option<Positions<'a>> {
        let of = |_: &PositionTable| Positions { table: parameters.value(1), first_row, seq: cx.tokens[1] };
        self.positions.as_ref().map(of)
    }

    /// Which parameter the table of types is.
    fn types_index(&self) -> usize {
        1 + usize::from(self.positions.is_some())
    }

    /// Adds position and type embeddings to y, whose rows have these `ids` and start at row `first_row` of the
    /// micro-batch.
    pub fn add_everywhere(
        &self,
        cx: &Context,
        parameters: Parameters,
        ids: &Tensor,
        first_row: usize,
        y: &mut Tensor,
    ) {
        if let Some(positions) = self.positions(cx, parameters, first_row) {
            cx.device.add_positions(positions, y.view_mut());
        }
        self.add_types(cx, parameters, ids, y);
    }

    fn add_types(&self, cx: &Context, parameters: Parameters, ids: &Tensor, y: &mut Tensor) {
        if self.types.is_some() {
            let table = parameters.value(self.types_index());
            cx.device.embedding(ids.view(), Lookup::Type, table, None, true, y.view_mut());
        }
    }

    /// Writes or adds the gradients of the position and type tables, where they are wanted.
    pub fn gradients_everywhere(&self, cx: &Context, parameters: Parameters, from: EmbeddingGradients) {
        let EmbeddingGradients { ids, dy, first_row } = from;
        if let Some(mut gradient) = parameters.gradient(1).filter(|_| self.positions.is_some()) {
            let (dpositions, accumulate) = gradient.write();
            cx.device.position_gradient(dy.view(), first_row, cx.tokens[1], dpositions, accumulate);
        }
        if let Some(mut gradient) = parameters.gradient(self.types_index()) {
            let (dtypes, accumulate) = gradient.write();
            cx.device.embedding_backward(ids.view(), Lookup::Type, dy.view(), dtypes, accumulate);
        }
    }
}

impl Layer for Embedding {
    type Own = ();

    fn parameters(&self) -> Vec<ParameterSpec> {
        let table =
            |name: &String, rows| ParameterSpec::new(name, Kind::Table, [rows, self.hidden], self.init);
        let positions = self.positions.iter().map(|positions| table(&positions.name, positions.rows));
        let types = self.types.iter().map(|name| table(name, TYPES));
        std::iter::once(table(&self.tokens, self.vocab)).chain(positions).chain(types).collect()
    }

    /// x: `[batch, seq]` u32 -> y: `[batch, seq, hidden]`
    fn forward(&self, cx: &Context, call: Call) -> Result<(Activation, Saved<()>)> {
        let Call { parameters, x, sum, .. } = call;
        let [batch, seq] = x.dims();
        let mut y = cx.activation([batch, seq, self.hidden], "embedding.y");
        let lookup = Lookup::Token { first: 0, vocab: self.vocab };
        let positions = self.positions(cx, parameters, cx.first_row);
        cx.device.embedding(x.view(), lookup, parameters.value(0), positions, false, y.view_mut());
        self.add_types(cx, parameters, &x, &mut y);
        Ok((cx.plus(y, sum), Saved::new(()).with_input(x)))
    }

    /// Gradients of the tables; token ids have no gradient.
    fn backward(&self, cx: &Context, saved: Saved<()>, call: Call) -> Result<Option<Activation>> {
        let Call { parameters, x: dy, .. } = call;
        let ids = saved.x.into_held();
        if let Some(mut gradient) = parameters.gradient(0) {
            let (dtable, accumulate) = gradient.write();
            let lookup = Lookup::Token { first: 0, vocab: self.vocab };
            cx.device.embedding_backward(ids.view(), lookup, dy.view(), dtable, accumulate);
        }
        self.gradients_everywhere(cx, parameters, EmbeddingGradients { ids: &ids, dy: &dy, first_row: 0 });
        Ok(None)
    }

    /// Computes nothing: ids and dy are saved for the second part.
    fn backward_input(
        &self,
        _: &Context,
        saved: Saved<()>,
        call: Call,
    ) -> Result<(Option<Activation>, Deferred)> {
        Ok((None, Deferred::new((saved, call.x))))
    }

    fn backward_weight(&self, cx: &Context, parameters: Parameters, deferred: Deferred) -> Result<()> {
        let (saved, dy): (Saved<()>, Activation) = deferred.restore();
        self.backward(cx, saved, Call::new(parameters, dy)).map(drop)
    }
}
