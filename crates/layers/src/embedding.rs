//! Token, position and type embedding: the first block of a model.

use std::sync::Arc;

use phalanx_tensor::{Lookup, Positions, Tensor};

use crate::activation::Activation;
use crate::call::{Call, Parameters};
use crate::failure::Result;
use crate::init::Init;
use crate::layer::{Context, Layer};
use crate::parameter::{Kind, ParameterSpec};
use crate::saved::{Deferred, Saved};

/// `y[b, t] = tokens[x[b, t]] (+ positions[t]) (+ types[type of x[b, t]])`. Positions are those in a document, where a sequence has
/// several.
pub struct Embedding {
    /// Name of the token table.
    pub tokens: String,
    /// The table of positions, if the model learns them.
    pub positions: Option<PositionTable>,
    /// Name of the table of the two token types (BERT's segments), if there is one.
    pub types: Option<String>,
    /// Number of tokens.
    pub vocab: usize,
    /// The last of them whose rows are a parameter of their own, so that they are trained beside a frozen table ([`added_rows`]).
    pub added: usize,
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

/// Name of the rows of added tokens, beside those of the table of this name.
pub fn added_rows(table: &str) -> String {
    format!("{}{ADDED}", table.strip_suffix(".weight").unwrap_or(table))
}

/// The table beside which a parameter has the rows of added tokens; None for other parameters.
pub fn table_of_added(parameter: &str) -> Option<String> {
    Some(format!("{}.weight", parameter.strip_suffix(ADDED)?))
}

/// End of the name of the rows of added tokens.
const ADDED: &str = ".added.weight";

/// Number of token types.
const TYPES: usize = 2;

/// Rows that have an embedding of their position and type.
pub struct EmbeddedRows {
    /// The token ids of the rows, u32.
    pub ids: Activation,
    /// Their positions, u32, where a sequence has several documents.
    pub positions: Option<Activation>,
    /// Number of the first row in the micro-batch.
    pub first: usize,
}

impl Embedding {
    /// All rows of a micro-batch, or those from the first one that is here on.
    pub fn rows(&self, cx: &Context, ids: &Activation) -> EmbeddedRows {
        let positions = self.positions.as_ref().and_then(|_| cx.positions());
        EmbeddedRows { ids: Arc::clone(ids), positions, first: cx.rows.first }
    }

    /// Which parameter the table of types is.
    fn types_index(&self) -> usize {
        1 + usize::from(self.positions.is_some())
    }

    /// Which parameter the rows of added tokens are.
    fn added_index(&self) -> usize {
        self.types_index() + usize::from(self.types.is_some())
    }

    /// The added tokens' rows.
    fn added_lookup(&self) -> Lookup {
        Lookup::Token { first: self.vocab - self.added, vocab: self.vocab }
    }

    /// Returns whether the rows of added tokens are trained, and there are some.
    pub fn trains_added(&self, parameters: Parameters) -> bool {
        self.added > 0 && parameters.is_trained(self.added_index())
    }

    /// Writes or adds the gradient of the rows of added tokens, where it is wanted; of all ids.
    pub fn added_gradient(&self, cx: &Context, parameters: Parameters, ids: &Tensor, dy: &Tensor) {
        let wanted = if self.added > 0 { parameters.gradient(self.added_index()) } else { None };
        if let Some(mut gradient) = wanted {
            let (rows, accumulate) = gradient.write();
            cx.device.embedding_backward(ids.view(), self.added_lookup(), dy.view(), rows, accumulate);
        }
    }

    /// Learned position embeddings, if there are any, for rows whose positions count from that of the first one.
    fn counted<'a>(
        &self,
        cx: &Context,
        parameters: Parameters<'a>,
        rows: &EmbeddedRows,
    ) -> Option<Positions<'a>> {
        let [_, seq] = cx.rows.tokens;
        let of = |_: &PositionTable| Positions { table: parameters.value(1), first_row: rows.first, seq };
        self.positions.as_ref().filter(|_| rows.positions.is_none()).map(of)
    }

    /// Adds position and type embeddings to y.
    pub fn add_everywhere(&self, cx: &Context, parameters: Parameters, rows: &EmbeddedRows, y: &mut Tensor) {
        if let Some(positions) = self.counted(cx, parameters, rows) {
            cx.device.add_positions(positions, y.view_mut());
        }
        self.add_looked_up(cx, parameters, rows, y);
    }

    /// Adds the embeddings that rows look up by positions of their own and by their types.
    fn add_looked_up(&self, cx: &Context, parameters: Parameters, rows: &EmbeddedRows, y: &mut Tensor) {
        if let Some((of, positions)) = self.positions.as_ref().zip(rows.positions.as_ref()) {
            let table = parameters.value(1);
            cx.device.embedding(positions.view(), of.lookup(), table, None, true, y.view_mut());
        }
        if self.types.is_some() {
            let table = parameters.value(self.types_index());
            cx.device.embedding(rows.ids.view(), Lookup::Type, table, None, true, y.view_mut());
        }
        if self.added > 0 {
            let table = parameters.value(self.added_index());
            cx.device.embedding(rows.ids.view(), self.added_lookup(), table, None, true, y.view_mut());
        }
    }

    /// Writes or adds the gradients of the position and type tables, where they are wanted; dy `[.., hidden]`.
    pub fn gradients_everywhere(
        &self,
        cx: &Context,
        parameters: Parameters,
        rows: &EmbeddedRows,
        dy: &Tensor,
    ) {
        let wanted = self.positions.as_ref().and_then(|of| Some((of, parameters.gradient(1)?)));
        if let Some((of, mut gradient)) = wanted {
            let (to, accumulate) = gradient.write();
            match &rows.positions {
                None => {
                    let [_, seq] = cx.rows.tokens;
                    cx.device.position_gradient(dy.view(), rows.first, seq, to, accumulate);
                }
                Some(positions) => {
                    cx.device.embedding_backward(positions.view(), of.lookup(), dy.view(), to, accumulate);
                }
            }
        }
        let of_types = self.types.as_ref().and_then(|_| parameters.gradient(self.types_index()));
        if let Some(mut gradient) = of_types {
            let (dtypes, accumulate) = gradient.write();
            cx.device.embedding_backward(rows.ids.view(), Lookup::Type, dy.view(), dtypes, accumulate);
        }
    }
}

impl PositionTable {
    fn lookup(&self) -> Lookup {
        Lookup::Token { first: 0, vocab: self.rows }
    }
}

impl Layer for Embedding {
    type Own = ();

    fn parameters(&self) -> Vec<ParameterSpec> {
        let table =
            |name: &String, rows| ParameterSpec::new(name, Kind::Table, [rows, self.hidden], self.init);
        let positions = self.positions.iter().map(|positions| table(&positions.name, positions.rows));
        let types = self.types.iter().map(|name| table(name, TYPES));
        let added = (self.added > 0).then(|| table(&added_rows(&self.tokens), self.added));
        let own = std::iter::once(table(&self.tokens, self.vocab - self.added));
        own.chain(positions).chain(types).chain(added).collect()
    }

    /// x: `[batch, seq]` u32 -> y: `[batch, seq, hidden]`
    fn forward(&self, cx: &Context, call: Call) -> Result<(Activation, Saved<()>)> {
        let Call { parameters, x, sum, .. } = call;
        let [batch, seq] = x.dims();
        let mut y = cx.activation([batch, seq, self.hidden], "embedding.y");
        let lookup = Lookup::Token { first: 0, vocab: self.vocab };
        let rows = self.rows(cx, &x);
        let positions = self.counted(cx, parameters, &rows);
        cx.device.embedding(x.view(), lookup, parameters.value(0), positions, false, y.view_mut());
        self.add_looked_up(cx, parameters, &rows, &mut y);
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
        self.added_gradient(cx, parameters, &ids, &dy);
        self.gradients_everywhere(cx, parameters, &self.rows(cx, &ids), &dy);
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
