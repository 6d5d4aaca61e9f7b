//! What a device must be able to compute.
//!
//! One method an operation, on views whose shapes and element types [`Device`](crate::Device) has checked. A
//! method may only enqueue: results are seen through [`Kernels::download`]. `overwrite` and `accumulate` are
//! spelled out for every output; `accumulate = false` means that the old contents are never read.
//!
//! Element types: activations and parameters of a call are all f32, all bf16 or all f16 (the *compute* type);
//! gradients of parameters (dw, db, ...) are f32 or the compute type; row statistics, losses and optimizer
//! states are f32. Everything is computed in f32 (a bf16 product may be exact in its pairs) and rounded once,
//! when it is stored.

use crate::buffer::{View, ViewMut};

/// The target of a row that has no loss: loss and derivatives of the row are 0.
pub const IGNORED: u32 = u32::MAX;

/// Columns of a block of statistics of [`Kernels::vocabulary_statistics`].
pub const VOCABULARY_BLOCK: usize = 128;

/// Blocks of statistics of a row of logits that has `columns` classes.
pub fn vocabulary_blocks(columns: usize) -> usize {
    columns.div_ceil(VOCABULARY_BLOCK)
}

/// How a weight matrix lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// `[in, out]`: Hugging Face's `Conv1D`, as in GPT-2.
    InOut,
    /// `[out, in]`: `torch.nn.Linear`, embeddings used as an output layer.
    OutIn,
}

/// A weight matrix and its layout.
#[derive(Clone, Copy, Debug)]
pub struct Weight<'a> {
    /// `[in, out]` or `[out, in]`.
    pub matrix: View<'a>,
    /// Which of the two.
    pub layout: Layout,
}

impl Weight<'_> {
    /// `[in, out]`, whatever the layout.
    pub fn in_out(&self) -> [usize; 2] {
        let [a, b] = self.matrix.dims();
        match self.layout {
            Layout::InOut => [a, b],
            Layout::OutIn => [b, a],
        }
    }
}

/// Heads and masking of an attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Heads {
    /// Number of heads; they divide `hidden`.
    pub heads: usize,
    /// Each position sees itself and earlier ones only.
    pub causal: bool,
}

/// The two forms of GELU (Hendrycks and Gimpel, arXiv 1606.08415).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gelu {
    /// `0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x³)))`: `gelu_new` in transformers, as in GPT-2.
    Tanh,
    /// `0.5 x (1 + erf(x / sqrt(2)))`: `gelu` in transformers, as in BERT.
    Erf,
}

/// What an id asks for in a table. An id of 32 bits holds a token below and a token type (BERT's segment) in
/// its upper bit, so that one tensor brings both to a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// Row `token - first`: the table holds rows `first ..` of a vocabulary, and a token whose row is
    /// elsewhere finds zeros.
    Token {
        /// Token of the table's first row.
        first: usize,
        /// Tokens that there are in all; a larger one is a mistake, and panics.
        vocab: usize,
    },
    /// Row 0 or 1; a row that the table has not panics.
    Type,
}

impl Lookup {
    /// In a table that holds the whole vocabulary.
    pub fn whole(vocab: usize) -> Lookup {
        Lookup::Token { first: 0, vocab }
    }
}

/// Positions of rows that are a piece of whole samples: row i is at position `(first_row + i) % seq`.
#[derive(Clone, Copy, Debug)]
pub struct Positions<'a> {
    /// `[at least seq, hidden]`
    pub table: View<'a>,
    /// Number of row 0 within its micro-batch.
    pub first_row: usize,
    /// Rows of a sample.
    pub seq: usize,
}

/// The numbers of one AdamW step (Loshchilov and Hutter, arXiv 1711.05101, in PyTorch's form).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Learning rate of this step.
    pub lr: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay of this range; 0 for vectors.
    pub weight_decay: f32,
    /// Number of this step, from 1.
    pub step: u64,
}

/// The numbers of one SGD step with momentum, in PyTorch's form (no dampening, no Nesterov).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    /// Learning rate of this step.
    pub lr: f32,
    /// Decay of the velocity.
    pub momentum: f32,
    /// Added to the gradient as `weight_decay * parameter`; 0 for vectors.
    pub weight_decay: f32,
    /// First step: the velocity is the gradient itself and its old contents are not read.
    pub first: bool,
}

/// What a linear layer does to its product before it is stored.
#[derive(Clone, Copy, Default)]
pub struct Epilogue<'a> {
    /// `[out]`, added to every row.
    pub bias: Option<View<'a>>,
    /// Like the result, added to it.
    pub residual: Option<View<'a>>,
}

/// Which elements are dropped: element i of a tensor is kept where the generator's number for `key` and
/// `first + i` is at least p, and divided by 1 - p. Nothing is stored: backward asks the generator again.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// Share that is dropped, in `0.0..1.0`.
    pub p: f32,
    /// Of seed, step and layer.
    pub key: u64,
    /// Counter of element 0: where this tensor starts in that of the whole batch.
    pub first: u64,
    /// Elements from one sample to the next in that numbering. Only attention asks, which may have but some of
    /// the heads of every sample; a plain dropout numbers its elements in order.
    pub sample: u64,
}

/// The numbers of a cross entropy. The loss of a row with logits l, log-sum-exp s and target t is
/// `(1 - label_smoothing) (s - l[t]) + label_smoothing (s - mean of l) + z_loss s²` (Szegedy et al., arXiv
/// 1512.00567; Chowdhery et al., arXiv 2204.02311).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CrossEntropy {
    /// What the sum of losses is multiplied by.
    pub scale: f32,
    /// What the derivatives of the sum are multiplied by: `scale`, times the loss scale of f16.
    pub gradient_scale: f32,
    /// Probability that is spread over all classes.
    pub label_smoothing: f32,
    /// Weight of the squared log-sum-exp.
    pub z_loss: f32,
}

impl CrossEntropy {
    /// The plain one.
    pub fn scaled(scale: f32) -> CrossEntropy {
        CrossEntropy { scale, gradient_scale: scale, label_smoothing: 0.0, z_loss: 0.0 }
    }
}

/// What becomes of a global gradient norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Clip {
    /// Largest norm; 0 for no clipping.
    pub max_norm: f32,
    /// What gradients were multiplied by (the loss scale); 1 for nothing.
    pub loss_scale: f32,
}

/// The operations of a device. See the module's head for the contract.
pub trait Kernels: Send + Sync {
    /// Short name for people: `cpu`, `meta`.
    fn name(&self) -> &'static str;

    /// Threads (or streams' worth of width) that one kernel uses.
    fn threads(&self) -> usize;

    /// Host bytes into device memory.
    fn upload(&self, from: &[u8], to: ViewMut);
    /// Device memory into host bytes, after everything enqueued before.
    fn download(&self, from: View, to: &mut [u8]);

    /// Every element becomes `value`.
    fn fill(&self, x: ViewMut, value: f32);
    /// `to = from`.
    fn copy(&self, from: View, to: ViewMut);
    /// `to = from`, rounded to the type of `to`; any two of f32, bf16, f16.
    fn convert(&self, from: View, to: ViewMut);
    /// `into += from`; any two of f32, bf16, f16, or both f64.
    fn add(&self, from: View, into: ViewMut);

    /// `y = x · w (+ bias) (+ residual)`; x `[rows, in]`, y and residual `[rows, out]`, bias `[out]`.
    fn linear(&self, x: View, w: Weight, epilogue: Epilogue, y: ViewMut);
    /// `pre = x · w + bias`, `y = gelu(pre)`, of `pre` as it is stored; both overwritten.
    fn linear_gelu(&self, x: View, w: Weight, bias: View, gelu: Gelu, pre: ViewMut, y: ViewMut);
    /// `dx (+)= dy · wᵀ`.
    fn linear_input_gradient(&self, dy: View, w: Weight, dx: ViewMut, accumulate: bool);
    /// `dw (+)= xᵀ · dy`, in the layout given.
    fn linear_weight_gradient(&self, x: View, dy: View, dw: ViewMut, layout: Layout, accumulate: bool);
    /// `db (+)= sum over rows of dy`.
    fn bias_gradient(&self, dy: View, db: ViewMut, accumulate: bool);

    /// y, and per row mean and 1/sqrt(var + eps); x `[rows, hidden]`.
    fn layer_norm(
        &self,
        x: View,
        gamma: View,
        beta: View,
        eps: f32,
        y: ViewMut,
        mean: ViewMut,
        rstd: ViewMut,
    );
    /// dx (+)=; dgamma, dbeta (+)= by `accumulate_parameters`.
    fn layer_norm_backward(
        &self,
        x: View,
        gamma: View,
        mean: View,
        rstd: View,
        dy: View,
        dx: ViewMut,
        accumulate_input: bool,
        dgamma: ViewMut,
        dbeta: ViewMut,
        accumulate_parameters: bool,
    );

    /// `y = gelu(x)`.
    fn gelu(&self, x: View, gelu: Gelu, y: ViewMut);
    /// In place: `dy` becomes `dx = dy * gelu'(x)`; db (+)= sum over rows of dx.
    fn gelu_backward(&self, x: View, gelu: Gelu, dy: ViewMut, db: ViewMut, accumulate: bool);

    /// `to = from` where it is kept, over 1 - p, else 0 `(+ residual)`.
    fn dropout(&self, from: View, dropout: Dropout, residual: Option<View>, to: ViewMut);

    /// Softmax(q·kᵀ/sqrt(head)) · v in tiles; qkv `[batch, seq, 3*hidden]` (q, k, v side by side, each
    /// split into heads), out `[batch, seq, hidden]`, log_sum_exp `[batch, heads, seq]` f32. With dropout the
    /// probabilities are dropped; that of (sample, head, key, query) has the number `first + sample *
    /// dropout.sample + (head * seq + key) * seq + query`.
    fn attention(
        &self,
        qkv: View,
        heads: Heads,
        dropout: Option<Dropout>,
        out: ViewMut,
        log_sum_exp: ViewMut,
    );
    /// dqkv is overwritten; probabilities are computed again from `log_sum_exp`.
    fn attention_backward(
        &self,
        qkv: View,
        out: View,
        log_sum_exp: View,
        dout: View,
        heads: Heads,
        dropout: Option<Dropout>,
        dqkv: ViewMut,
    );

    /// `y[i] (+)= table[lookup of ids[i]] (+ positions[(first_row + i) % seq])`, rounded once; zeros for a row
    /// that is not in the table. ids `[rows]` u32, y `[rows, hidden]`.
    fn embedding(
        &self,
        ids: View,
        lookup: Lookup,
        table: View,
        positions: Option<Positions>,
        accumulate: bool,
        y: ViewMut,
    );
    /// `y[i] += positions[(first_row + i) % seq]`; y `[rows, hidden]`.
    fn add_positions(&self, positions: Positions, y: ViewMut);
    /// `dtable[lookup of ids[i]] (+)= dy[i]` of the rows that are in the table. Without accumulation every row
    /// is overwritten, those of absent ids with zero.
    fn embedding_backward(&self, ids: View, lookup: Lookup, dy: View, dtable: ViewMut, accumulate: bool);
    /// `dpositions[(first_row + i) % seq] (+)= dy[i]`. Without accumulation every row is overwritten, those
    /// that dy does not touch with zero.
    fn position_gradient(
        &self,
        dy: View,
        first_row: usize,
        seq: usize,
        dpositions: ViewMut,
        accumulate: bool,
    );

    /// The logits `x · w (+ bias)` of one part of a vocabulary, in f32 and never stored: `statistics` `[rows, 4]`
    /// f32 become, of each row, the largest logit, the sum of exponentials relative to it, the sum of logits,
    /// and the logit of the target (0 where the part, classes `first ..`, has it not). `blocks`
    /// `[rows, 4 * vocabulary_blocks(columns)]` f32 become the same four of each [`VOCABULARY_BLOCK`] columns,
    /// and `exponentials` `[rows, columns]`, when given, those relative to the largest of their block. All are
    /// overwritten.
    fn vocabulary_statistics(
        &self,
        x: View,
        w: Weight,
        bias: Option<View>,
        targets: View,
        first: usize,
        exponentials: Option<ViewMut>,
        blocks: ViewMut,
        statistics: ViewMut,
    );
    /// As [`Kernels::vocabulary_statistics`], of `logits` `[rows, columns]` that are stored: those are read as they
    /// were rounded, and become the exponentials.
    fn logits_statistics(
        &self,
        logits: ViewMut,
        targets: View,
        first: usize,
        blocks: ViewMut,
        statistics: ViewMut,
    );
    /// From the statistics `[parts, rows, 4]` of all parts, in their order: the sum of the rows' losses, one
    /// after the other in f64, goes (+)= to `loss` `[1]` f64 (not times `numbers.scale`), and `exponentials` of
    /// this part, when given, become the derivatives of its logits times `numbers.gradient_scale`. `blocks` as
    /// [`Kernels::vocabulary_statistics`] left them; `classes` are those of all parts.
    fn vocabulary_loss(
        &self,
        statistics: View,
        blocks: View,
        targets: View,
        first: usize,
        classes: usize,
        numbers: CrossEntropy,
        exponentials: Option<ViewMut>,
        loss: ViewMut,
        accumulate: bool,
    );
    /// `out[0] = x[0] * scale`; x f64, out f32.
    fn scaled(&self, x: View, scale: f32, out: ViewMut);

    /// One pass over flat ranges: p, m, v (f32) are updated from `g * gradient_scale[0]`; `rounded`, when
    /// given, becomes p in its own type.
    fn adamw(
        &self,
        step: AdamW,
        p: ViewMut,
        g: View,
        m: ViewMut,
        v: ViewMut,
        gradient_scale: View,
        rounded: Option<ViewMut>,
    );
    /// One pass over flat ranges: p and the velocity (f32) are updated from `g * gradient_scale[0]`; `rounded`
    /// as in [`Kernels::adamw`].
    fn sgd(
        &self,
        step: Sgd,
        p: ViewMut,
        g: View,
        velocity: ViewMut,
        gradient_scale: View,
        rounded: Option<ViewMut>,
    );

    /// Sum of squares of each block of 4,096 elements (the last may be short), in f64: not finite where an
    /// element is not.
    fn block_squares(&self, x: View, squares: ViewMut);
    /// `out[0]` = sum of x along a fixed balanced tree; both f64.
    fn tree_sum(&self, x: View, out: ViewMut);
    /// `norm[0] = sqrt(sum over a fixed balanced tree of squares) / loss_scale`, and what gradients are to be
    /// multiplied by, `factor[0] = min(1, max_norm / (norm + 1e-6)) / loss_scale` (PyTorch's
    /// `clip_grad_norm_`); no clipping when `max_norm` is 0.
    fn norm(&self, squares: View, clip: Clip, norm: ViewMut, factor: ViewMut);
    /// `count[0]` = elements that are infinite or not a number.
    fn count_non_finite(&self, x: View, count: ViewMut);
}
