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

/// Where [`Kernels::linear_cross_entropy`] puts derivatives, when training.
pub struct CrossEntropyGradients<'a> {
    /// `[tokens, hidden]`, overwritten.
    pub dx: ViewMut<'a>,
    /// Like the weight.
    pub dw: ViewMut<'a>,
    /// Whether `dw` is added to or overwritten.
    pub accumulate: bool,
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
    fn linear_gelu(&self, x: View, w: Weight, bias: View, pre: ViewMut, y: ViewMut);
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

    /// GELU, tanh form: `0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x³)))`.
    fn gelu(&self, x: View, y: ViewMut);
    /// In place: `dy` becomes `dx = dy * gelu'(x)`; db (+)= sum over rows of dx.
    fn gelu_backward(&self, x: View, dy: ViewMut, db: ViewMut, accumulate: bool);

    /// `to = from` where it is kept, over 1 - p, else 0 `(+ residual)`.
    fn dropout(&self, from: View, dropout: Dropout, residual: Option<View>, to: ViewMut);

    /// Softmax(q·kᵀ/sqrt(head)) · v in tiles; qkv `[batch, seq, 3*hidden]` (q, k, v side by side, each
    /// split into heads), out `[batch, seq, hidden]`, log_sum_exp `[batch, heads, seq]` f32. With dropout the
    /// probabilities are dropped; they are numbered `[batch, heads, key, query]`.
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

    /// `y[t] = table[tokens[t]] + positions[t % seq]`; tokens `[batch, seq]`, y `[batch, seq, hidden]`.
    fn embedding(&self, tokens: View, table: View, positions: View, y: ViewMut);
    /// dtable (+)= by `accumulate.0`, dpositions (+)= by `accumulate.1`. Without accumulation every row
    /// is overwritten, those of absent tokens with zero.
    fn embedding_backward(
        &self,
        tokens: View,
        dy: View,
        dtable: ViewMut,
        dpositions: ViewMut,
        accumulate: [bool; 2],
    );

    /// Sum over rows of the losses of `x · w` against `targets`, times `scale`, into `loss` `[1]` f32
    /// (overwrites), and the derivatives when asked for, in slices of rows that fit in `logits` `[slice, vocab]`
    /// of the compute type.
    fn linear_cross_entropy(
        &self,
        x: View,
        w: Weight,
        targets: View,
        numbers: CrossEntropy,
        logits: ViewMut,
        loss: ViewMut,
        gradients: Option<CrossEntropyGradients>,
    );

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
    /// `norm[0] = sqrt(sum over a fixed balanced tree of squares) / loss_scale`, and what gradients are to be
    /// multiplied by, `factor[0] = min(1, max_norm / (norm + 1e-6)) / loss_scale` (PyTorch's
    /// `clip_grad_norm_`); no clipping when `max_norm` is 0.
    fn norm(&self, squares: View, clip: Clip, norm: ViewMut, factor: ViewMut);
    /// `count[0]` = elements that are infinite or not a number.
    fn count_non_finite(&self, x: View, count: ViewMut);
}
