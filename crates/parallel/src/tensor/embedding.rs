//! An embedding whose token table is split over ranks by rows of the vocabulary.
//!
//! Each rank looks up the tokens whose rows it has and leaves zeros for the others; the sum over the ranks is the
//! lookup. Every rank has the whole tables of positions and types, and the rows of added tokens, if there are any, which are added to the sum. Cost:
//! an all_reduce of the output in forward, nothing in backward; with sequence parallelism a reduce_scatter and an
//! all_gather.

use std::sync::Arc;

use phalanx_layers::embedding::EmbeddedRows;
use phalanx_layers::{
    Activation, Call, Context, Deferred, Embedding, Layer, ParameterSpec, Parameters, Result, Saved, Share,
    table_of_added,
};
use phalanx_plan::trace::{Axis, Placement, Placements};
use phalanx_tensor::{Category, Lookup};

use super::exchange::Exchange;

/// An embedding of which this rank has some rows of the token table.
pub struct VocabularyEmbedding {
    embedding: Embedding,
    share: Share,
    exchange: Exchange,
    sequence: bool,
}

impl VocabularyEmbedding {
    /// `embedding` describes the whole, of whose token table this rank has a share.
    pub fn new(
        embedding: Embedding,
        share: Share,
        exchange: Exchange,
        sequence: bool,
    ) -> VocabularyEmbedding {
        VocabularyEmbedding { embedding, share, exchange, sequence }
    }

    fn lookup(&self) -> Lookup {
        let rows = (self.embedding.vocab - self.embedding.added).div_ceil(self.share.of);
        Lookup::Token { first: self.share.index * rows, vocab: self.embedding.vocab }
    }

    /// This rank's rows. Ids by which a table is looked up are copied, so that the dry run knows the copy as sharded.
    fn own_rows(&self, cx: &Context, ids: &Activation) -> EmbeddedRows {
        let all = self.embedding.rows(cx, ids);
        if !self.sequence {
            return EmbeddedRows { first: 0, ..all };
        }
        let rows = ids.shape().elements() / self.exchange.world_size();
        let cut = |ids: Activation| {
            let mut own = cx.device.alloc(ids.dtype(), [rows], Category::Activations, "embedding.own_ids");
            cx.device.copy(ids.view().range(all.first..all.first + rows), own.view_mut());
            let cut = cx.device.placements(ids.view()).with(Axis::Tensor, Placement::Shard(0));
            cx.device.place(own.view(), cut);
            Arc::new(own)
        };
        let is_looked_up = self.embedding.types.is_some() || self.embedding.added > 0;
        let ids = if is_looked_up { cut(all.ids) } else { all.ids };
        EmbeddedRows { ids, positions: all.positions.map(cut), first: all.first }
    }
}

impl Layer for VocabularyEmbedding {
    type Own = ();

    fn parameters(&self) -> Vec<ParameterSpec> {
        let mut parameters = self.embedding.parameters().into_iter();
        let table = parameters.next().expect("the token table").rows_of(self.share);
        // Of rows of added tokens each rank has the gradient of all ids, which the output projection's is, too.
        let is_partial = |spec: &ParameterSpec| self.sequence && table_of_added(&spec.name).is_none();
        let everywhere = parameters.map(|spec| ParameterSpec { partial: is_partial(&spec), ..spec });
        std::iter::once(table).chain(everywhere).collect()
    }

    /// x: `[batch, seq]` u32 -> y: `[batch, seq, hidden]`, or this rank's rows of it
    fn forward(&self, cx: &Context, call: Call) -> Result<(Activation, Saved<()>)> {
        let Call { parameters, x, sum, .. } = call;
        let [batch, seq] = x.dims();
        let mut term = cx.activation([batch, seq, self.embedding.hidden], "embedding.term");
        cx.device.embedding(x.view(), self.lookup(), parameters.value(0), None, false, term.view_mut());
        let summing = match self.sequence {
            false => self.exchange.all_reduce(term),
            true => self.exchange.reduce_scatter(cx, term),
        };
        let mut y = summing.wait()?;
        self.embedding.add_everywhere(cx, parameters, &self.own_rows(cx, &x), &mut y);
        Ok((cx.plus(y, sum), Saved::new(()).with_input(x)))
    }

    /// Gradients of the tables; token ids have no gradient.
    fn backward(&self, cx: &Context, saved: Saved<()>, call: Call) -> Result<Option<Activation>> {
        let Call { parameters, x: dy, .. } = call;
        let ids = saved.x.into_held();
        let table = parameters.gradient(0);
        let is_read = table.is_some() || self.embedding.trains_added(parameters);
        let whole = match self.sequence && is_read {
            false => dy.clone(),
            true => self.exchange.all_gather(cx, &dy)?,
        };
        self.embedding.added_gradient(cx, parameters, &ids, &whole);
        if let Some(mut gradient) = table {
            let (dtable, accumulate) = gradient.write();
            if !accumulate {
                // The dry run cannot derive from ids and gradients which rows this rank has.
                let rows = Placements::REPLICATED.with(Axis::Tensor, Placement::Shard(0));
                cx.device.place(dtable.as_view(), rows);
            }
            cx.device.embedding_backward(ids.view(), self.lookup(), whole.view(), dtable, accumulate);
        }
        drop(whole);
        self.embedding.gradients_everywhere(cx, parameters, &self.own_rows(cx, &ids), &dy);
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
