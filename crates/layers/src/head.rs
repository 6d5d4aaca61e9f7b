//! The head of a language model: output projection and cross entropy in one.
//!
//! The logits of all tokens, `[tokens, vocab]`, are the largest tensor of a small model, and nothing else needs them.
//! So they are computed in slices of rows that fit a workspace; in training, the derivatives of a slice are computed
//! before the next slice (Liger Kernel's fused linear cross entropy). Loss and gradient come from one pass. Between
//! the statistics of a slice's logits and its loss, a caller may exchange four numbers per row with the ranks that
//! have other classes.

use std::sync::Arc;

use phalanx_tensor::operations::{BiasGradient, InputGradient, WeightGradient};
use phalanx_tensor::{
    Category, CrossEntropy, DType, Epilogue, Layout, Tensor, View, ViewMut, VocabularyLoss,
    VocabularyStatistics, Weight, logits_stride, vocabulary_blocks,
};

use crate::activation::Activation;
use crate::call::{Call, Parameters};
use crate::failure::Result;
use crate::init::Init;
use crate::inputs::TARGETS;
use crate::layer::Context;
use crate::parameter::{Kind, ParameterSpec};

/// The last part of a model: it turns activations into a loss, with what it reads of the inputs ([`Context::input`]).
pub trait Head: Send + Sync {
    /// The parameters, in the order in which the methods receive them.
    fn parameters(&self) -> Vec<ParameterSpec>;

    /// Sum of losses times `numbers.scale`, `[1]` f32, and dx where it is wanted. dx and the parameter gradients that are
    /// wanted are those of the sum of losses times `numbers.gradient_scale`.
    ///
    /// # Errors
    /// When a collective of the head fails.
    fn loss(&self, cx: &Context, call: Call, numbers: CrossEntropy) -> Result<(Tensor, Option<Activation>)>;

    /// The same with factors of the derivatives of each row's loss, and with these losses, before `numbers.scale`. The result is the sum
    /// of losses without these factors.
    ///
    /// # Errors
    /// As [`Head::loss`].
    ///
    /// # Panics
    /// When the loss is no sum over rows with targets.
    fn loss_of_rows(
        &self,
        _cx: &Context,
        _call: Call,
        _numbers: CrossEntropy,
        _terms: RowTerms,
    ) -> Result<(Tensor, Option<Activation>)> {
        panic!("only a head with a cross entropy of each row can weigh rows")
    }

    /// Logits of some rows, for sampling: x `[rows, hidden]` -> `[rows, vocab]`.
    ///
    /// # Panics
    /// When the head has none.
    fn logits(&self, _cx: &Context, _parameters: Parameters, _x: View) -> Tensor {
        panic!("only a head with logits can be sampled")
    }

    /// The head itself, when its logits are a linear layer of x and it has all classes: for callers that compute the
    /// loss of the logits elsewhere.
    fn as_linear(&self) -> Option<&LinearCrossEntropy> {
        None
    }
}

/// Terms of rows in [`Head::loss_of_rows`], `[rows]` f32 each.
#[derive(Default)]
pub struct RowTerms<'a> {
    /// Factors of the derivatives of the rows' losses; 1 if they are not given.
    pub weights: Option<&'a Tensor>,
    /// The rows' losses, overwritten; 0 without a target.
    pub losses: Option<&'a mut Tensor>,
}

/// `softmax(x · wᵀ (+ b))` against targets; w is often the token table (tied).
pub struct LinearCrossEntropy {
    /// Name of the weight, `[vocab, hidden]`.
    pub weight: String,
    /// Name of the bias, `[vocab]`, where there is one (BERT's decoder).
    pub bias: Option<String>,
    /// Classes.
    pub vocab: usize,
    /// Width.
    pub hidden: usize,
    /// Initial weight, the same as the table's when tied; the bias starts at zero.
    pub init: Init,
}

/// Input from which a head computes a loss.
#[derive(Clone, Copy)]
pub struct HeadInput<'a> {
    /// Activations, `[.., hidden]`.
    pub x: &'a Tensor,
    /// Targets, as many as x has rows, u32. They are numbered over the whole vocabulary; rows with the target
    /// [`IGNORED`](phalanx_tensor::IGNORED) have no loss.
    pub targets: &'a Tensor,
    /// Factors of the loss.
    pub numbers: CrossEntropy,
    /// The classes whose logits are computed here.
    pub classes: Classes,
    /// True if dx is wanted.
    pub input_wanted: bool,
}

/// A range of classes.
#[derive(Clone, Copy, Debug)]
pub struct Classes {
    /// The first class.
    pub first: usize,
    /// Number of classes.
    pub here: usize,
}

impl LinearCrossEntropy {
    fn all(&self) -> Classes {
        Classes { first: 0, here: self.vocab }
    }

    /// The weight as an operand of a product.
    pub fn weight<'a>(&self, matrix: View<'a>) -> Weight<'a> {
        Weight { matrix, layout: Layout::OutIn }
    }

    /// Computes dx, with the shape of x `[.., hidden]`, and parameter gradients from the derivatives of
    /// [`Head::logits`], `[rows, vocab]`.
    pub fn logits_backward(&self, cx: &Context, parameters: Parameters, x: &Tensor, dlogits: View) -> Tensor {
        let mut dx = cx.activation(x.shape(), "head.dx");
        let rows = x.shape().rows_cols();
        let (flat, to) = (x.view().reshape(rows), dx.view_mut().reshape(rows));
        linear_gradients(cx, flat, self.weight(parameters.value(0)), (dlogits, false), Some(to), parameters);
        dx
    }

    /// Rows of a slice of logits: there are at least two slices, and a slice of the whole vocabulary has at most
    /// [`Context::slice_bytes`]. So ranks with different classes use the same slices.
    fn slice_rows(&self, cx: &Context, rows: usize) -> usize {
        let fit = (cx.slice_bytes / (cx.compute.bytes() * self.vocab)).max(1);
        let fit = if fit > 64 { fit / 64 * 64 } else { fit };
        fit.min(rows.div_ceil(2))
    }

    /// Computes the loss `[1]` f32 of [`Head::loss_of_rows`] with some of the classes; `parameters` are the weight `[here,
    /// hidden]` and the bias `[here]` of these classes. It also computes their parameter gradients that are wanted, and where
    /// dx is wanted, their term of it, with the shape of x.
    ///
    /// `exchange` is called once for each slice of rows, in order: it is given the statistics of these classes,
    /// `[rows, 4]` f32, and returns those of all classes, `[parts, rows, 4]`.
    ///
    /// # Errors
    /// The errors of `exchange`.
    pub fn pass(
        &self,
        cx: &Context,
        parameters: Parameters,
        (input, mut terms): (HeadInput, RowTerms),
        exchange: &mut dyn FnMut(Tensor) -> Result<Tensor>,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let HeadInput { x: input, targets, numbers, classes, input_wanted } = input;
        let Classes { first, here: columns } = classes;
        let (x, targets) = (input.view(), targets.view());
        let [rows, hidden] = x.shape().rows_cols();
        assert!(rows > 0 && targets.elements() == rows, "{rows} rows against {targets:?}");
        let w = self.weight(parameters.value(0));
        assert_eq!(w.matrix.dims(), [columns, hidden], "classes {first} .. of {}", self.vocab);
        let max_rows = self.slice_rows(cx, rows);
        let train = input_wanted || parameters.want_gradients();
        let workspace =
            |dtype, shape: [usize; 2], name| cx.device.alloc(dtype, shape, Category::Workspace, name);
        let stride = logits_stride(columns);
        let mut logits = train.then(|| workspace(cx.compute, [max_rows, stride], "head.logits_slice"));
        let width = 4 * vocabulary_blocks(columns);
        let mut blocks = workspace(DType::F32, [max_rows, width], "head.blocks");
        let mut sum = cx.device.alloc(DType::F64, [1], Category::Workspace, "head.sum");
        let mut dx = input_wanted.then(|| cx.activation(x.shape(), "head.dx"));
        for start in (0..rows).step_by(max_rows) {
            let count = max_rows.min(rows - start);
            let flat = start * hidden..(start + count) * hidden;
            let mut slice = Slice {
                x: x.range(flat.clone()).reshape([count, hidden]),
                w,
                bias: parameters.get(1),
                targets: targets.range(start..start + count),
                first,
                classes: self.vocab,
                numbers,
                logits: logits
                    .as_mut()
                    .map(|l| l.view_mut().range(0..count * stride).reshape([count, stride])),
                blocks: blocks.view_mut().range(0..count * width).reshape([count, width]),
            };
            let here = start..start + count;
            let own = slice.statistics(cx);
            let weights = terms.weights.map(|weights| weights.view().range(here.clone()));
            let losses = terms.losses.as_mut().map(|losses| losses.view_mut().range(here));
            slice.loss(cx, exchange(own)?, (weights, losses), (sum.view_mut(), start > 0));
            if train {
                let dx = dx.as_mut().map(|dx| dx.view_mut().range(flat).reshape([count, hidden]));
                slice.gradients(cx, dx, parameters);
            }
        }
        let mut loss = cx.statistics([1], "head.loss");
        cx.device.scaled(sum.view(), numbers.scale, loss.view_mut());
        Ok((loss, dx))
    }
}

/// A slice of rows, while the head computes it.
struct Slice<'a> {
    /// `[rows, hidden]`
    x: View<'a>,
    /// `[columns, hidden]`
    w: Weight<'a>,
    /// `[columns]`
    bias: Option<View<'a>>,
    /// `[rows]`
    targets: View<'a>,
    /// Class of the first column.
    first: usize,
    classes: usize,
    numbers: CrossEntropy,
    /// `[rows, logits_stride(columns)]`, in training: exponentials, then derivatives, with zeros behind the columns.
    logits: Option<ViewMut<'a>>,
    /// Statistics of blocks of columns, `[rows, 4 * blocks]`.
    blocks: ViewMut<'a>,
}

impl Slice<'_> {
    /// `[rows, 4]`
    fn statistics(&mut self, cx: &Context) -> Tensor {
        let shape = [self.targets.elements(), 4];
        let mut own = cx.device.alloc(DType::F32, shape, Category::Workspace, "head.statistics");
        cx.device.run(VocabularyStatistics {
            x: self.x,
            w: self.w,
            bias: self.bias,
            targets: self.targets,
            first: self.first,
            exponentials: self.logits.as_mut().map(|l| l.reborrow()),
            blocks: self.blocks.reborrow(),
            statistics: own.view_mut(),
        });
        own
    }

    /// sum (+)= losses of the rows, from the statistics `[parts, rows, 4]`.
    fn loss(
        &mut self,
        cx: &Context,
        all: Tensor,
        (weights, losses): (Option<View>, Option<ViewMut>),
        (sum, accumulate): (ViewMut, bool),
    ) {
        cx.device.run(VocabularyLoss {
            statistics: all.view(),
            blocks: self.blocks.as_view(),
            targets: self.targets,
            first: self.first,
            columns: self.w.in_out()[1],
            classes: self.classes,
            numbers: self.numbers,
            exponentials: self.logits.as_mut().map(|l| l.reborrow()),
            weights,
            losses,
            loss: sum,
            accumulate,
        });
    }

    fn gradients(&self, cx: &Context, dx: Option<ViewMut>, parameters: Parameters) {
        let Some(dlogits) = self.logits.as_ref().map(|l| l.as_view()) else {
            panic!("derivatives need the logits that only training stores");
        };
        linear_gradients(cx, self.x, self.w, (dlogits, true), dx, parameters);
    }
}

/// dx = dlogits · w (overwrites), and dw and db (written or added), where they are wanted. `dlogits`: with whether its rows are
/// padded.
fn linear_gradients(
    cx: &Context,
    x: View,
    w: Weight,
    (dy, padded): (View, bool),
    dx: Option<ViewMut>,
    parameters: Parameters,
) {
    if let Some(dx) = dx {
        cx.device.run(InputGradient { dy, padded, w, dx, accumulate: false });
    }
    if let Some(mut gradient) = parameters.gradient(0) {
        let (dw, accumulate) = gradient.write();
        cx.device.run(WeightGradient { x, dy, padded, dw, layout: w.layout, accumulate });
    }
    if let Some(mut gradient) = parameters.gradient(1) {
        let (db, accumulate) = gradient.write();
        cx.device.run(BiasGradient { dy, padded, db, accumulate });
    }
}

impl Head for LinearCrossEntropy {
    fn parameters(&self) -> Vec<ParameterSpec> {
        let shape = vec![self.vocab, self.hidden];
        let weight = ParameterSpec::new(&self.weight, Kind::Head, shape, self.init);
        let bias = |name: &String| ParameterSpec::new(name, Kind::Bias, [self.vocab], Init::Zeros);
        std::iter::once(weight).chain(self.bias.as_ref().map(bias)).collect()
    }

    /// x: `[batch, seq, hidden]`, input `targets`: `[batch, seq]` u32 -> `[1]`, and dx
    fn loss(&self, cx: &Context, call: Call, numbers: CrossEntropy) -> Result<(Tensor, Option<Activation>)> {
        self.loss_of_rows(cx, call, numbers, RowTerms::default())
    }

    fn loss_of_rows(
        &self,
        cx: &Context,
        call: Call,
        numbers: CrossEntropy,
        terms: RowTerms,
    ) -> Result<(Tensor, Option<Activation>)> {
        let Call { parameters, x, input_wanted, .. } = call;
        let targets = cx.input(TARGETS);
        let input = HeadInput { x: &x, targets: &targets, numbers, classes: self.all(), input_wanted };
        let (loss, dx) = self.pass(cx, parameters, (input, terms), &mut alone)?;
        Ok((loss, dx.map(Arc::new)))
    }

    fn logits(&self, cx: &Context, parameters: Parameters, x: View) -> Tensor {
        let [rows, _] = x.shape().rows_cols();
        let mut y = cx.device.alloc(cx.compute, [rows, self.vocab], Category::Workspace, "head.logits");
        let epilogue = Epilogue { bias: parameters.get(1), residual: None };
        cx.device.linear(x, self.weight(parameters.value(0)), epilogue, y.view_mut());
        y
    }

    fn as_linear(&self) -> Option<&LinearCrossEntropy> {
        Some(self)
    }
}

/// The exchange on one rank, which has all classes: `[rows, 4]` becomes `[1, rows, 4]`.
fn alone(own: Tensor) -> Result<Tensor> {
    let [rows, four] = own.dims();
    Ok(own.reshape([1, rows, four]))
}
