//! Tensor parallelism (Shoeybi et al., "Megatron-LM", arXiv 1909.08053) and sequence parallelism (Korthikanti et
//! al., arXiv 2205.05198).
//!
//! A model is written once, with whole sizes. [`TensorParallel`] makes this rank's part of each layer: some columns
//! ([`mod@column`]) or rows ([`row`]) of a linear layer, some heads of attention, some rows of the vocabulary of the
//! token table and the output projection ([`embedding`], [`head`]). Norms, and biases that are added to sums, are
//! whole on every rank. With one rank it returns the layers unchanged.
//!
//! ```text
//! x -> norm -> column -> attention -> row -> + x -> norm -> column, GELU -> row -> +
//!             f: -, all_reduce       g: all_reduce, -          as before
//! ```
//!
//! With sequence parallelism the residual stream, norms and dropout hold 1 / t of the micro-batch's rows (tokens,
//! batch-major) on each rank. An all_gather and a reduce_scatter replace the all_reduce, with the same number of
//! bytes, and gradients of parameters that every rank has whole become terms of a sum
//! ([`phalanx_layers::ParameterSpec::partial`]).
//!
//! Every collective is one line in a layer's forward; its conjugate is one line in the backward under it.

pub mod column;
pub mod embedding;
pub mod exchange;
pub mod head;
pub mod row;
pub mod rows;

use std::sync::Arc;

use phalanx_collectives::{Group, MetaGroup, Solo};
use phalanx_layers::{
    Adapt, AnyLayer, Attention, CannotCut, Embedding, Head, HeadNorm, Layer, LinearCrossEntropy, Lora,
    Pieces, Share, SharedHeads, SumOfShares,
};
use phalanx_tensor::Heads;

use column::ColumnParallel;
use embedding::VocabularyEmbedding;
pub use exchange::Exchange;
use head::VocabularyHead;
use row::RowParallel;
use rows::OnRows;

/// Makes this rank's part of each layer of a model.
#[derive(Clone)]
pub struct TensorParallel {
    exchange: Exchange,
    sequence: bool,
    adapters: Option<Arc<Lora>>,
}

impl TensorParallel {
    /// Splits layers over the ranks of `group`; `sequence` switches sequence parallelism on.
    pub fn new(group: Arc<dyn Group>, sequence: bool) -> TensorParallel {
        let sequence = sequence && group.world_size() > 1;
        TensorParallel { exchange: Exchange::new(group), sequence, adapters: None }
    }

    /// The same, with adapters of the linear layers.
    #[must_use]
    pub fn adapting(&self, adapters: Arc<Lora>) -> TensorParallel {
        TensorParallel { adapters: Some(adapters), ..self.clone() }
    }

    /// One rank, which has every layer whole.
    pub fn solo() -> TensorParallel {
        TensorParallel::new(Arc::new(Solo::new("tensor")), false)
    }

    /// The first of `ranks` ranks, which compute nothing: for whether they can divide the layers of a model.
    pub fn trial(ranks: usize) -> TensorParallel {
        TensorParallel::new(Arc::new(MetaGroup::new("tensor", 0, ranks, Arc::default())), false)
    }

    /// Number of ranks that share each layer.
    pub fn ranks(&self) -> usize {
        self.exchange.world_size()
    }

    /// Returns whether sequence parallelism is on: the residual stream is sharded by rows.
    pub fn sequence(&self) -> bool {
        self.sequence
    }

    /// This rank's share of a layer.
    fn share(&self) -> Share {
        Share { index: self.exchange.rank(), of: self.ranks() }
    }

    /// A linear layer of which each rank has some outputs. Elementwise layers and attention may follow, then
    /// [`TensorParallel::row`].
    ///
    /// # Errors
    /// When the ranks cannot share the outputs evenly.
    pub fn column(&self, layer: impl Adapt) -> Result<Box<dyn AnyLayer>, CannotCut> {
        if self.ranks() == 1 {
            return Ok(self.adapted(layer, None));
        }
        let own = self.adapted(layer.outputs(self.share())?, None);
        Ok(Box::new(ColumnParallel::new(own, self.exchange.clone(), self.sequence)))
    }

    /// A linear layer of which each rank has some inputs: the outputs of [`TensorParallel::column`] on the same rank.
    ///
    /// # Errors
    /// When the ranks cannot share the inputs evenly.
    pub fn row(&self, layer: impl Adapt) -> Result<Box<dyn AnyLayer>, CannotCut> {
        if self.ranks() == 1 {
            return Ok(self.adapted(layer, None));
        }
        let (own, bias) = layer.inputs(self.share())?;
        let exchange = self.exchange.clone();
        let own = self.adapted(own, Some(Box::new(move |x| exchange.all_reduce(x).wait())));
        Ok(Box::new(RowParallel::new(own, bias, self.exchange.clone(), self.sequence)))
    }

    /// This rank's part of a linear layer, with its adapters; `sum` adds over the ranks that have other inputs.
    fn adapted(&self, own: impl Adapt, sum: Option<SumOfShares>) -> Box<dyn AnyLayer> {
        match &self.adapters {
            Some(adapters) => own.adapted(adapters, sum),
            None => Box::new(own),
        }
    }

    /// Attention over this rank's heads: those of queries, and the ones of keys and values that they read.
    ///
    /// # Errors
    /// When the ranks cannot share the heads evenly.
    pub fn attention(&self, attention: Attention) -> Result<Attention, CannotCut> {
        let (heads, first_head) = self.heads(attention.heads)?;
        Ok(Attention { heads, first_head, ..attention })
    }

    /// This rank's heads of an attention, and the number of its first one.
    ///
    /// # Errors
    /// When the ranks cannot share the heads evenly.
    pub fn heads(&self, all: Heads) -> Result<(Heads, usize), CannotCut> {
        let kv = Pieces { repeat: true, ..Pieces::of(all.kv_heads) };
        let (first, heads) = self.share().of("heads of attention", Pieces::of(all.heads))?;
        let (_, kv_heads) = self.share().of("heads of keys and values", kv)?;
        Ok((Heads { heads, kv_heads, ..all }, first))
    }

    /// Norms of this rank's heads of queries and keys; those over all heads sum over the ranks.
    ///
    /// # Errors
    /// When the ranks cannot share the heads evenly.
    pub fn head_norm(&self, norm: HeadNorm) -> Result<HeadNorm, CannotCut> {
        if self.ranks() == 1 {
            return Ok(norm);
        }
        let (all, exchange) = (norm.heads, self.exchange.clone());
        let sum = Box::new(move |x| exchange.all_reduce(x).wait());
        let shared = Some(SharedHeads { all, share: self.share(), sum });
        Ok(HeadNorm { heads: self.heads(all)?.0, shared, ..norm })
    }

    /// A layer that every rank has whole and that treats each row independently (norms, dropout).
    pub fn rows(&self, layer: impl Layer + 'static) -> Box<dyn AnyLayer> {
        if self.sequence { Box::new(OnRows(layer)) } else { Box::new(layer) }
    }

    /// Number of tokens whose rows are trained beside those of the tables.
    fn added(&self) -> usize {
        self.adapters.as_ref().map_or(0, |adapters| adapters.added)
    }

    /// An embedding of which each rank has some rows of the token table.
    pub fn embedding(&self, embedding: Embedding) -> Box<dyn AnyLayer> {
        let embedding = Embedding { added: self.added(), ..embedding };
        if self.ranks() == 1 {
            return Box::new(embedding);
        }
        Box::new(VocabularyEmbedding::new(embedding, self.share(), self.exchange.clone(), self.sequence))
    }

    /// An output projection with cross entropy of which each rank has some classes.
    pub fn head(&self, head: LinearCrossEntropy) -> Box<dyn Head> {
        let head = LinearCrossEntropy { added: self.added(), ..head };
        if self.ranks() == 1 {
            return Box::new(head);
        }
        Box::new(VocabularyHead::new(head, self.share(), self.exchange.clone(), self.sequence))
    }
}
