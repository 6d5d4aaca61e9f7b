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

use phalanx_collectives::{Group, Solo};
use phalanx_layers::{
    AnyLayer, Attention, Embedding, Head, Layer, Linear, LinearCrossEntropy, LinearGelu, Part,
};
use phalanx_plan::Stripe;
use phalanx_tensor::{Heads, Layout};

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
}

impl TensorParallel {
    /// Splits layers over the ranks of `group`; `sequence` switches sequence parallelism on.
    pub fn new(group: Arc<dyn Group>, sequence: bool) -> TensorParallel {
        let sequence = sequence && group.world_size() > 1;
        TensorParallel { exchange: Exchange::new(group), sequence }
    }

    /// One rank, which has every layer whole.
    pub fn solo() -> TensorParallel {
        TensorParallel::new(Arc::new(Solo::new("tensor")), false)
    }

    /// Number of ranks that share each layer.
    pub fn ranks(&self) -> usize {
        self.exchange.world_size()
    }

    /// Whether sequence parallelism is on: the residual stream is sharded by rows.
    pub fn sequence(&self) -> bool {
        self.sequence
    }

    /// This rank's part of a tensor of shape `whole`, of which dimension `dim` is split; that dimension holds
    /// `packed` tensors side by side. Only the first dimension of an unpacked tensor may be split unevenly: the last
    /// rank then has fewer rows.
    fn part(&self, whole: &[usize], dim: usize, packed: usize) -> (Vec<usize>, Part) {
        let (ranks, rank) = (self.ranks(), self.exchange.rank());
        let trailing: usize = whole[dim + 1..].iter().product();
        let each = (whole[dim] / packed).div_ceil(ranks);
        let even = (each * ranks * packed) == whole[dim];
        assert!(even || (dim == 0 && packed == 1), "{whole:?}: dimension {dim} over {ranks} ranks");
        let here = match even {
            true => each * packed,
            false => whole[0].saturating_sub(rank * each).min(each),
        };
        let mut shape = whole.to_vec();
        shape[dim] = here;
        let run = (each * trailing) as u64;
        let stripe = Stripe { run, ranks: ranks as u64, rank: rank as u64 };
        (shape, Part { whole: whole.to_vec(), dim, stripe })
    }

    /// A linear layer of which each rank has some outputs. The outputs are `packed` results side by side (3 for
    /// queries, keys and values), each of which is split. Elementwise layers and attention may follow, then
    /// [`TensorParallel::row`].
    pub fn column(&self, linear: Linear, packed: usize) -> Box<dyn AnyLayer> {
        if self.ranks() == 1 {
            return Box::new(linear);
        }
        let parts = self.output_parts(&linear, packed);
        let local = Linear { outputs: linear.outputs / self.ranks(), ..linear };
        Box::new(ColumnParallel::new(Box::new(local), parts, self.exchange.clone(), self.sequence))
    }

    /// [`TensorParallel::column`] with GELU of the outputs.
    pub fn column_gelu(&self, layer: LinearGelu) -> Box<dyn AnyLayer> {
        if self.ranks() == 1 {
            return Box::new(layer);
        }
        let parts = self.output_parts(&layer.linear, 1);
        let linear = Linear { outputs: layer.linear.outputs / self.ranks(), ..layer.linear };
        let local = LinearGelu { linear, gelu: layer.gelu };
        Box::new(ColumnParallel::new(Box::new(local), parts, self.exchange.clone(), self.sequence))
    }

    fn output_parts(&self, linear: &Linear, packed: usize) -> Vec<Part> {
        let Linear { inputs, outputs, .. } = *linear;
        let (_, weight) = match linear.layout {
            Layout::InOut => self.part(&[inputs, outputs], 1, packed),
            Layout::OutIn => self.part(&[outputs, inputs], 0, packed),
        };
        let (_, bias) = self.part(&[outputs], 0, packed);
        if linear.bias { vec![weight, bias] } else { vec![weight] }
    }

    /// A linear layer of which each rank has some inputs: the outputs of [`TensorParallel::column`] on the same rank.
    pub fn row(&self, linear: Linear) -> Box<dyn AnyLayer> {
        if self.ranks() == 1 {
            return Box::new(linear);
        }
        let Linear { inputs, outputs, .. } = linear;
        let (_, part) = match linear.layout {
            Layout::InOut => self.part(&[inputs, outputs], 0, 1),
            Layout::OutIn => self.part(&[outputs, inputs], 1, 1),
        };
        let local = Linear { inputs: inputs / self.ranks(), ..linear };
        Box::new(RowParallel::new(local, part, self.exchange.clone(), self.sequence))
    }

    /// Attention over this rank's heads: those of queries, and the ones of keys and values that they read.
    pub fn attention(&self, attention: Attention) -> Attention {
        let (ranks, rank) = (self.ranks(), self.exchange.rank());
        let Heads { heads: all, kv_heads, .. } = attention.heads;
        assert!(
            all.is_multiple_of(ranks) && kv_heads.is_multiple_of(ranks),
            "{all} heads of queries and {kv_heads} of keys and values over {ranks} tensor ranks: \
             parallel.tensor must divide both"
        );
        let heads = Heads { heads: all / ranks, kv_heads: kv_heads / ranks, ..attention.heads };
        Attention { heads, first_head: rank * (all / ranks), all_heads: all, ..attention }
    }

    /// A layer that every rank has whole and that treats each row independently (norms, dropout).
    pub fn rows(&self, layer: impl Layer + 'static) -> Box<dyn AnyLayer> {
        if self.sequence { Box::new(OnRows(layer)) } else { Box::new(layer) }
    }

    /// An embedding of which each rank has some rows of the token table.
    pub fn embedding(&self, embedding: Embedding) -> Box<dyn AnyLayer> {
        if self.ranks() == 1 {
            return Box::new(embedding);
        }
        let (shape, part) = self.part(&[embedding.vocab, embedding.hidden], 0, 1);
        Box::new(VocabularyEmbedding::new(embedding, shape, part, self.exchange.clone(), self.sequence))
    }

    /// An output projection with cross entropy of which each rank has some classes.
    pub fn head(&self, head: LinearCrossEntropy) -> Box<dyn Head> {
        if self.ranks() == 1 {
            return Box::new(head);
        }
        let weight = self.part(&[head.vocab, head.hidden], 0, 1);
        let bias = self.part(&[head.vocab], 0, 1);
        Box::new(VocabularyHead::new(head, weight, bias, self.exchange.clone(), self.sequence))
    }
}
