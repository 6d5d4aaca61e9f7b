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
use crate::failure::Result;
use crate::init::Init;
use crate::layer::{Context, Gradient, ParameterSpec};

/// The last part of a model: it turns activations and targets into a loss.
pub trait Head: Send + Sync {
    /// The parameters, in the order in which the methods receive them.
    fn parameters(&self) -> Vec<ParameterSpec>;

    /// Sum of losses times `numbers.scale`, `[1]` f32.
    ///
    /// # Errors
    /// When a collective of the head fails.
    fn loss(
        &self,
        cx: &Context,
        parameters: &[View],
        x: Activation,
        targets: &Tensor,
        numbers: CrossEntropy,
    ) -> Result<Tensor>;

    /// The loss of [`Head::loss`], and dx. dx and the parameter gradients are those of the sum of losses times
    /// `numbers.gradient_scale`.
    ///
    /// # Errors
    /// The errors of [`Head::loss`].
    fn loss_and_gradient(
        &self,
        cx: &Context,
        parameters: &[View],
        gradients: &mut [Gradient],
        x: Activation,
        targets: &Tensor,
        numbers: CrossEntropy,
    ) -> Result<(Tensor, Activation)>;

    /// Logits of some rows, for sampling: x `[rows, hidden]` -> `[rows, vocab]`.
    fn logits(&self, cx: &Context, parameters: &[View], x: View) -> Tensor;

    /// The head itself, when its logits are a linear layer of x and it has all classes: for callers that compute the
    /// loss of the logits elsewhere.
    fn as_linear(&self) -> Option<&LinearCrossEntropy> {
        None
    }
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

/// What a head computes a loss of.
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

    fn bias<'a>(&self, parameters: &[View<'a>]) -> Option<View<'a>> {
        self.bias.as_ref().map(|_| parameters[1])
    }

    /// Computes dx, with the shape of x `[.., hidden]`, and parameter gradients from the derivatives of
    /// [`Head::logits`], `[rows, vocab]`.
    pub fn logits_backward(
        &self,
        cx: &Context,
        parameters: &[View],
        gradients: &mut [Gradient],
        x: &Tensor,
        dlogits: View,
    ) -> Tensor {
        let mut dx = cx.activation(x.shape(), "head.dx");
        let rows = x.shape().rows_cols();
        let (flat, to) = (x.view().reshape(rows), dx.view_mut().reshape(rows));
        linear_gradients(cx, flat, self.weight(parameters[0]), (dlogits, false), to, gradients);
        dx
    }

    /// Rows of a slice of logits: there are at least two slices, and a slice of the whole vocabulary has at most
    /// [`Context::slice_bytes`]. So ranks with different classes use the same slices.
    fn slice_rows(&self, cx: &Context, rows: usize) -> usize {
        let fit = (cx.slice_bytes / (cx.compute.bytes() * self.vocab)).max(1);
        let fit = if fit > 64 { fit / 64 * 64 } else { fit };
        fit.min(rows.div_ceil(2))
    }

    /// Computes the loss `[1]` f32 of [`Head::loss`] with some of the classes; `parameters` are the weight `[here,
    /// hidden]` and the bias `[here]` of these classes. With `gradients`, it also computes their parameter gradients
    /// and their term of dx, with the shape of x.
    ///
    /// `exchange` is called once for each slice of rows, in order: it is given the statistics of these classes,
    /// `[rows, 4]` f32, and returns those of all classes, `[parts, rows, 4]`.
    ///
    /// # Errors
    /// The errors of `exchange`.
    pub fn pass(
        &self,
        cx: &Context,
        parameters: &[View],
        mut gradients: Option<&mut [Gradient]>,
        input: HeadInput,
        exchange: &mut dyn FnMut(Tensor) -> Result<Tensor>,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let HeadInput { x: input, targets, numbers, classes: Classes { first, here: columns } } = input;
        let (x, targets) = (input.view(), targets.view());
        let [rows, hidden] = x.shape().rows_cols();
        assert!(rows > 0 && targets.elements() == rows, "{rows} rows against {targets:?}");
        assert_eq!(parameters[0].dims(), [columns, hidden], "classes {first} .. of {}", self.vocab);
        let max_rows = self.slice_rows(cx, rows);
        let train = gradients.is_some();
        let workspace =
            |dtype, shape: [usize; 2], name| cx.device.alloc(dtype, shape, Category::Workspace, name);
        let stride = logits_stride(columns);
        let mut logits = train.then(|| workspace(cx.compute, [max_rows, stride], "head.logits_slice"));
        let width = 4 * vocabulary_blocks(columns);
        let mut blocks = workspace(DType::F32, [max_rows, width], "head.blocks");
        let mut sum = cx.device.alloc(DType::F64, [1], Category::Workspace, "head.sum");
        let mut dx = train.then(|| cx.activation(x.shape(), "head.dx"));
        for start in (0..rows).step_by(max_rows) {
            let count = max_rows.min(rows - start);
            let flat = start * hidden..(start + count) * hidden;
            let x = x.range(flat.clone()).reshape([count, hidden]);
            let mut slice = Slice {
                x,
                w: self.weight(parameters[0]),
                bias: self.bias(parameters),
                targets: targets.range(start..start + count),
                first,
                classes: self.vocab,
                numbers,
                logits: logits
                    .as_mut()
                    .map(|l| l.view_mut().range(0..count * stride).reshape([count, stride])),
                blocks: blocks.view_mut().range(0..count * width).reshape([count, width]),
            };
            let own = slice.statistics(cx);
            slice.loss(cx, exchange(own)?, sum.view_mut(), start > 0);
            if let (Some(dx), Some(gradients)) = (&mut dx, gradients.as_deref_mut()) {
                let dx = dx.view_mut().range(flat).reshape([count, hidden]);
                slice.gradients(cx, dx, gradients);
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
    fn loss(&mut self, cx: &Context, all: Tensor, sum: ViewMut, accumulate: bool) {
        cx.device.run(VocabularyLoss {
            statistics: all.view(),
            blocks: self.blocks.as_view(),
            targets: self.targets,
            first: self.first,
            columns: self.w.in_out()[1],
            classes: self.classes,
            numbers: self.numbers,
            exponentials: self.logits.as_mut().map(|l| l.reborrow()),
            loss: sum,
            accumulate,
        });
    }

    fn gradients(&self, cx: &Context, dx: ViewMut, gradients: &mut [Gradient]) {
        let Some(dlogits) = self.logits.as_ref().map(|l| l.as_view()) else {
            panic!("derivatives need the logits that only training stores");
        };
        linear_gradients(cx, self.x, self.w, (dlogits, true), dx, gradients);
    }
}

/// dx = dlogits · w (overwrites); writes or adds dw, and db where there is a bias. `dlogits`: with whether its rows are padded.
fn linear_gradients(
    cx: &Context,
    x: View,
    w: Weight,
    dlogits: (View, bool),
    dx: ViewMut,
    gradients: &mut [Gradient],
) {
    let (dy, padded) = dlogits;
    cx.device.run(InputGradient { dy, padded, w, dx, accumulate: false });
    let (dw, accumulate) = gradients[0].write();
    cx.device.run(WeightGradient { x, dy, padded, dw, layout: w.layout, accumulate });
    if let Some(bias) = gradients.get_mut(1) {
        let (db, accumulate) = bias.write();
        cx.device.run(BiasGradient { dy, padded, db, accumulate });
    }
}

impl Head for LinearCrossEntropy {
    fn parameters(&self) -> Vec<ParameterSpec> {
        let shape = vec![self.vocab, self.hidden];
        let weight = ParameterSpec::new(&self.weight, shape, self.init);
        let bias = |name: &String| ParameterSpec::new(name, [self.vocab], Init::Zeros);
        std::iter::once(weight).chain(self.bias.as_ref().map(bias)).collect()
    }

    /// x: `[batch, seq, hidden]`, targets: `[batch, seq]` u32 -> `[1]`
    fn loss(
        &self,
        cx: &Context,
        parameters: &[View],
        x: Activation,
        targets: &Tensor,
        numbers: CrossEntropy,
    ) -> Result<Tensor> {
        let input = HeadInput { x: &x, targets, numbers, classes: self.all() };
        Ok(self.pass(cx, parameters, None, input, &mut alone)?.0)
    }

    /// The loss of [`Head::loss`], and dx `[batch, seq, hidden]`; writes or adds dw and db.
    fn loss_and_gradient(
        &self,
        cx: &Context,
        parameters: &[View],
        gradients: &mut [Gradient],
        x: Activation,
        targets: &Tensor,
        numbers: CrossEntropy,
    ) -> Result<(Tensor, Activation)> {
        let input = HeadInput { x: &x, targets, numbers, classes: self.all() };
        let (loss, dx) = self.pass(cx, parameters, Some(gradients), input, &mut alone)?;
        Ok((loss, Arc::new(dx.expect("dx is computed when gradients are requested"))))
    }

    fn logits(&self, cx: &Context, parameters: &[View], x: View) -> Tensor {
        let [rows, _] = x.shape().rows_cols();
        let mut y = cx.device.alloc(cx.compute, [rows, self.vocab], Category::Workspace, "head.logits");
        let epilogue = Epilogue { bias: self.bias(parameters), residual: None };
        cx.device.linear(x, self.weight(parameters[0]), epilogue, y.view_mut());
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
