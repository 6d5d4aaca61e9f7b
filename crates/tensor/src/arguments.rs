//! The arguments of operations that are not tensors: layouts, heads, dropout, and the numbers of an update.

use std::ops::Range;

use crate::view::View;

/// The target of a row that has no loss: loss and derivatives of the row are 0.
pub const IGNORED: u32 = u32::MAX;

/// Columns of a block of statistics of [`VocabularyStatistics`](crate::operations::VocabularyStatistics).
pub const VOCABULARY_BLOCK: usize = 128;

/// Blocks of statistics of a row of logits that has `columns` classes.
pub fn vocabulary_blocks(columns: usize) -> usize {
    columns.div_ceil(VOCABULARY_BLOCK)
}

/// Elements from one stored row of logits to the next, for `columns` classes. What follows the classes in a row is its padding.
///
/// Rows are whole 16 bytes, which products on tensor cores need; long ones, whole cache lines.
pub fn logits_stride(columns: usize) -> usize {
    columns.next_multiple_of(if columns < 1024 { 8 } else { 64 })
}

/// Returns whether rows of `stored` elements are rows of `columns` elements, or such rows with the padding of logits.
pub(crate) fn holds_rows(stored: usize, columns: usize) -> bool {
    stored == columns || stored == logits_stride(columns)
}

/// Memory layout of a weight matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
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
        self.layout.in_out(self.matrix.dims())
    }
}

impl Layout {
    /// `[in, out]` of a matrix with these extents.
    pub fn in_out(self, [a, b]: [usize; 2]) -> [usize; 2] {
        match self {
            Layout::InOut => [a, b],
            Layout::OutIn => [b, a],
        }
    }
}

/// The heads of an attention, what they see and how they score it.
///
/// q, k and v are one tensor: of each row, first all heads of queries, then those of keys, then those of values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Heads {
    /// Number of heads of queries.
    pub heads: usize,
    /// Number of heads of keys and values, a divisor of `heads`: query head h reads head `h / (heads / kv_heads)`
    /// (grouped queries, Ainslie et al., arXiv 2305.13245).
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Each position sees itself and earlier ones only.
    pub causal: bool,
    /// Each position sees only positions that are less than this far away; at least 1.
    pub window: Option<usize>,
    /// Factor of the scores q·kᵀ.
    pub scale: f32,
    /// Scores become `c tanh(score / c)` (Gemma 2, arXiv 2408.00118).
    pub soft_cap: Option<f32>,
}

impl Heads {
    /// As many heads of keys and values as of queries, scores divided by the root of `head_dim`, no window and no cap.
    pub fn equal(heads: usize, head_dim: usize, causal: bool) -> Heads {
        let scale = default_scale(head_dim);
        Heads { heads, kv_heads: heads, head_dim, causal, window: None, scale, soft_cap: None }
    }

    /// Columns of q, k and v of a row.
    pub fn qkv_width(&self) -> usize {
        self.out_width() + self.cache_width()
    }

    /// Columns of q, and of the output.
    pub fn out_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Columns of k and v of a row, as a cache has them.
    pub fn cache_width(&self) -> usize {
        2 * self.kv_heads * self.head_dim
    }

    /// Heads of queries that read the same keys and values.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Number of positions before and after itself that a position attends to.
    pub fn reach(&self) -> [usize; 2] {
        let far = self.window.map_or(usize::MAX, |window| window - 1);
        [far, if self.causal { 0 } else { far }]
    }

    /// Factor of q·kᵀ for exponents of 2: `log2(e) * scale`. Under a cap it is the factor of `tanh(score / c)`.
    pub fn exponent_factor(&self) -> f32 {
        let root = match self.soft_cap {
            Some(cap) => 1.0 / f64::from(cap),
            None if self.scale == default_scale(self.head_dim) => (self.head_dim as f64).sqrt(),
            None => 1.0 / f64::from(self.scale),
        };
        (std::f64::consts::LOG2_E / root) as f32
    }

    /// Factor of q·kᵀ under a cap, before the hyperbolic tangent.
    pub fn tanh_factor(&self) -> Option<f32> {
        self.soft_cap.map(|cap| self.scale / cap)
    }

    /// Panics if the numbers are no attention.
    #[track_caller]
    pub(crate) fn check(&self) {
        let Heads { heads, kv_heads, head_dim, window, scale, soft_cap, .. } = *self;
        assert!(kv_heads > 0 && heads.is_multiple_of(kv_heads) && head_dim > 0, "{self:?}");
        assert!(window != Some(0), "a position sees itself at least: {self:?}");
        assert!(scale.is_finite() && soft_cap.is_none_or(|cap| cap > 0.0 && cap.is_finite()), "{self:?}");
    }
}

fn default_scale(head_dim: usize) -> f32 {
    1.0 / (head_dim as f32).sqrt()
}

/// Vectors of each row that a norm normalises: `count` of them one behind another, each by itself. A bare epsilon means whole
/// rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowNorm {
    /// Added to the variance.
    pub eps: f32,
    /// Added to gamma: 1 where weights are stored as their difference from 1 (Gemma).
    pub offset: f32,
    /// Column of the first vector.
    pub first: usize,
    /// Number of vectors of a row.
    pub count: usize,
    /// True if each vector is a head; ranks may have different heads.
    pub by_heads: bool,
}

impl From<f32> for RowNorm {
    fn from(eps: f32) -> RowNorm {
        RowNorm { eps, offset: 0.0, first: 0, count: 1, by_heads: false }
    }
}

impl RowNorm {
    /// The vectors of `rows`, of `width` elements each in rows of `stride`: in runs without a gap between them, the elements and the
    /// numbers of the vectors.
    pub fn runs(
        self,
        rows: Range<usize>,
        stride: usize,
        width: usize,
    ) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        let RowNorm { first, count, .. } = self;
        let together = if count * width == stride { rows.len().max(1) } else { 1 };
        rows.step_by(together).map(move |row| {
            let start = row * stride + first;
            (start..start + together * count * width, row * count..(row + together) * count)
        })
    }
}

/// Sums over vectors of which each rank has some elements.
#[derive(Clone, Copy, Debug)]
pub struct WholeSums<'a> {
    /// The sum of each vector over all ranks, `[rows * count]` f32.
    pub sums: View<'a>,
    /// Elements that were summed, those of all ranks.
    pub elements: usize,
}

/// The two forms of GELU (Hendrycks and Gimpel, arXiv 1606.08415).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gelu {
    /// `0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x³)))`: `gelu_new` in transformers, as in GPT-2.
    Tanh,
    /// `0.5 x (1 + erf(x / sqrt(2)))`: `gelu` in transformers, as in BERT.
    Erf,
}

/// The activation of a gate (Shazeer, arXiv 2002.05202).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// `x / (1 + exp(-x))`: `silu` in transformers, as in Llama.
    Silu,
    /// GELU, in one of its forms.
    Gelu(Gelu),
}

/// Patches of an image, as convolutions and pooling read them: the kernel's extents each, one for each pixel of the output. Padding is
/// around the image. Extents are `[height, width]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patches {
    /// Pixels of the image.
    pub image: [usize; 2],
    /// Pixels of a patch.
    pub kernel: [usize; 2],
    /// Pixels from one patch to the next.
    pub stride: [usize; 2],
    /// Pixels before the first of the image, and behind its last.
    pub padding: [usize; 2],
}

impl Patches {
    /// Square patches of an image of `image` `[height, width]`.
    ///
    /// # Panics
    /// When no patch fits into the image, or there is no kernel or stride.
    pub fn square(image: [usize; 2], kernel: usize, stride: usize, padding: usize) -> Patches {
        let patches = Patches { image, kernel: [kernel; 2], stride: [stride; 2], padding: [padding; 2] };
        patches.check();
        patches
    }

    /// Stops the program when no patch fits into the image.
    #[track_caller]
    pub(crate) fn check(&self) {
        let Patches { image: [height, width], kernel: [high, wide], padding: [above, left], .. } = *self;
        let fits = (1..=height + 2 * above).contains(&high) && (1..=width + 2 * left).contains(&wide);
        assert!(
            fits && !self.stride.contains(&0),
            "patches of {high} x {wide} with the strides {:?} in an image of {height} x {width} with {above} and {left} pixels of \
             padding: expected a kernel from 1 x 1 to {} x {}, and strides of at least 1",
            self.stride,
            height + 2 * above,
            width + 2 * left
        );
    }

    /// The extents of the output: patches below and beside each other, of which none reaches beyond the padding.
    pub fn output(&self) -> [usize; 2] {
        [0, 1].map(|d| (self.image[d] + 2 * self.padding[d] - self.kernel[d]) / self.stride[d] + 1)
    }

    /// Pixels of the image.
    pub fn pixels(&self) -> usize {
        self.image[0] * self.image[1]
    }

    /// Number of patches: pixels of the output.
    pub fn count(&self) -> usize {
        let [height, width] = self.output();
        height * width
    }

    /// Pixels of a patch.
    pub fn size(&self) -> usize {
        self.kernel[0] * self.kernel[1]
    }

    /// Calls `see` with each pixel of patch `patch` that is in the image, in order: its number within the patch and in the image.
    pub fn each_pixel(&self, patch: usize, mut see: impl FnMut(usize, usize)) {
        let [_, wide] = self.output();
        let [rows, columns] = [(0, patch / wide), (1, patch % wide)].map(|(d, at)| {
            let (first, padding) = (at * self.stride[d], self.padding[d]);
            let inside = padding.saturating_sub(first)
                ..self.kernel[d].min((self.image[d] + padding).saturating_sub(first));
            (inside, first, padding)
        });
        for i in rows.0.clone() {
            for j in columns.0.clone() {
                let pixel = (rows.1 + i - rows.2) * self.image[1] + columns.1 + j - columns.2;
                see(i * self.kernel[1] + j, pixel);
            }
        }
    }

    /// Calls `see` with each patch that has pixel `pixel` of the image, in order: its number, and the pixel's number within it.
    pub fn each_patch(&self, pixel: usize, mut see: impl FnMut(usize, usize)) {
        let output = self.output();
        let [rows, columns] = [(0, pixel / self.image[1]), (1, pixel % self.image[1])].map(|(d, at)| {
            let (at, stride) = (at + self.padding[d], self.stride[d]);
            let first = (at + 1).saturating_sub(self.kernel[d]).div_ceil(stride);
            (first..output[d].min(at / stride + 1), at, stride)
        });
        for y in rows.0.clone() {
            for x in columns.0.clone() {
                let element = (rows.1 - y * rows.2) * self.kernel[1] + columns.1 - x * columns.2;
                see(y * output[1] + x, element);
            }
        }
    }
}

/// Row of a table that an id selects. An id of 32 bits holds a token below and a token type (BERT's segment) in its upper bit, so
/// that one tensor brings both to a model.
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
    /// Row 0 or 1. Panics if the table has no such row.
    Type,
}

impl Lookup {
    /// In a table that holds the whole vocabulary.
    pub fn whole(vocab: usize) -> Lookup {
        Lookup::Token { first: 0, vocab }
    }
}

/// The positions of rows `[batch, seq]`.
#[derive(Clone, Copy, Debug)]
pub enum RowPositions<'a> {
    /// Those of each sequence count from this one.
    From(usize),
    /// `[batch, seq]` u32: each row's own.
    Each(View<'a>),
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

/// Additions of a linear layer to its product before it is stored.
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
    /// Key of the random numbers: a function of seed, step and layer.
    pub key: u64,
    /// Counter of element 0: where this tensor starts in that of the whole batch.
    pub first: u64,
    /// Stride between samples in that numbering. Attention uses it, of which a rank may hold some heads only; a plain
    /// dropout numbers its elements in order.
    pub sample: u64,
}

/// The numbers of a cross entropy. The loss of a row with logits l, log-sum-exp s and target t is
/// `(1 - label_smoothing) (s - l[t]) + label_smoothing (s - mean of l) + z_loss s²` (Szegedy et al., arXiv
/// 1512.00567; Chowdhery et al., arXiv 2204.02311).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CrossEntropy {
    /// Factor of the sum of losses.
    pub scale: f32,
    /// Factor of the derivatives of the sum: `scale`, times the loss scale of f16.
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

/// Clipping of gradients by their global norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Clip {
    /// Largest norm; 0 for no clipping.
    pub max_norm: f32,
    /// Loss scale by which gradients were multiplied; 1 for none.
    pub loss_scale: f32,
}
