//! The linear layer, with bias, in either weight layout.

use std::ops::Range;
use std::sync::Arc;

use phalanx_tensor::{Category, Epilogue, Layout, Tensor, View, Weight};

use crate::activation::Activation;
use crate::call::{Call, Parameters};
use crate::cut::Cut;
use crate::failure::Result;
use crate::init::Init;
use crate::layer::{Context, Layer};
use crate::parameter::{Kind, ParameterSpec};
use crate::saved::{Deferred, Saved};
use crate::share::{CannotCut, Pieces, Share};

/// `y = x · w (+ b)`, with one or several results side by side in y. Weights and biases of several results join: one product computes
/// them where they are trained, or frozen, alike.
#[derive(Clone)]
pub struct Linear {
    /// The results, in their order in y. Several have `[out, in]` weights.
    pub outputs: Vec<Output>,
    /// Width of x.
    pub inputs: usize,
    /// `[in, out]` (GPT-2's `Conv1D`) or `[out, in]`.
    pub layout: Layout,
    /// Initial weight; the bias starts at zero.
    pub init: Init,
    /// True if there is a bias.
    pub bias: bool,
    /// The share of the outputs that this layer computes.
    pub share_of_outputs: Share,
    /// The share of the inputs that this layer has.
    pub share_of_inputs: Share,
}

/// A result of a linear layer.
#[derive(Clone)]
pub struct Output {
    /// Its parameters are `name.weight`, `name.bias`.
    pub name: String,
    /// Its columns.
    pub width: usize,
    /// Pieces into which it may be divided.
    pub pieces: Pieces,
}

impl Output {
    /// A result that may be divided at any column.
    pub fn new(name: impl Into<String>, width: usize) -> Output {
        Output { name: name.into(), width, pieces: Pieces::of(width) }
    }

    /// Its columns in a share.
    fn columns(&self, share: Share) -> Result<usize, CannotCut> {
        let (_, own) = share.of(&self.name, self.pieces)?;
        Ok(self.width / self.pieces.count * own)
    }
}

/// Tensors that the first part of backward saves for the second.
pub(crate) struct DeferredLinear {
    /// `[.., in]`; None if all weights are frozen.
    pub(crate) x: Option<Activation>,
    /// `[.., out]`; None if nothing is trained.
    pub(crate) dy: Option<Activation>,
}

/// A weight that products read.
pub(crate) struct Operand<'a> {
    kept: View<'a>,
    /// The same in the type of computing, if it is kept in another.
    numbers: Option<Tensor>,
    layout: Layout,
}

impl Operand<'_> {
    pub(crate) fn weight(&self) -> Weight<'_> {
        Weight { matrix: self.numbers.as_ref().map_or(self.kept, Tensor::view), layout: self.layout }
    }
}

impl Linear {
    /// A layer with these results: `[out, in]` weights with these initial values, and biases.
    pub fn new(outputs: impl Into<Vec<Output>>, inputs: usize, init: Init) -> Linear {
        let (share_of_outputs, share_of_inputs) = (Share::WHOLE, Share::WHOLE);
        let layout = Layout::OutIn;
        Linear {
            outputs: outputs.into(),
            inputs,
            layout,
            init,
            bias: true,
            share_of_outputs,
            share_of_inputs,
        }
    }

    /// Columns of y.
    pub fn width(&self) -> usize {
        self.columns(0..self.outputs.len()).end
    }

    /// The columns of some results in y.
    pub(crate) fn columns(&self, outputs: Range<usize>) -> Range<usize> {
        let width =
            |output: &Output| output.columns(self.share_of_outputs).expect("checked when it was divided");
        let before = |count: usize| self.outputs[..count].iter().map(width).sum();
        before(outputs.start)..before(outputs.end)
    }

    /// Weights or biases, each joint one with its index and its columns in y.
    pub(crate) fn each<'a>(&self, parameters: Parameters<'a>) -> impl Iterator<Item = (usize, Range<usize>)> {
        let mut done = 0;
        parameters.members().enumerate().map(move |(index, members)| {
            let outputs = done..done + members;
            done = outputs.end;
            (index, self.columns(outputs))
        })
    }

    /// Weights and biases.
    fn split<'a>(&self, parameters: Parameters<'a>) -> (Parameters<'a>, Parameters<'a>) {
        parameters.split_at(self.outputs.len())
    }

    /// A weight as an operand of products: what is kept in blocks is dequantised into memory of its own.
    pub(crate) fn operand<'a>(&self, cx: &Context, weights: Parameters<'a>, index: usize) -> Operand<'a> {
        let (kept, layout) = (weights.value(index), self.layout);
        let numbers = kept.dtype().is_blocks().then(|| {
            let mut numbers =
                cx.device.alloc(cx.compute, kept.shape(), Category::Workspace, "linear.dequantised");
            cx.device.dequantise(kept, numbers.view_mut());
            numbers
        });
        Operand { kept, numbers, layout }
    }

    /// Columns of dy: dy itself where they are all.
    pub(crate) fn part(&self, cx: &Context, dy: &Tensor, columns: Range<usize>) -> Option<Tensor> {
        let [batch, seq, width] = dy.dims();
        (columns.len() < width).then(|| {
            let mut part = cx.activation([batch, seq, columns.len()], "linear.part");
            cx.device.copy_columns((dy.view(), columns.start), (part.view_mut(), 0), columns.len());
            part
        })
    }

    /// Writes or adds db, if there is a bias.
    pub(crate) fn bias_gradient(&self, cx: &Context, biases: Parameters, dy: &Tensor) {
        for (index, columns) in self.each(biases) {
            if let Some(mut db) = biases.gradient(index) {
                let part = self.part(cx, dy, columns);
                let (view, accumulate) = db.write();
                cx.device.bias_gradient(part.as_ref().unwrap_or(dy).view(), view, accumulate);
            }
        }
    }

    /// Saves x where dw will be wanted.
    pub(crate) fn saved<Own>(&self, own: Own, parameters: Parameters, x: Activation) -> Saved<Own> {
        match self.split(parameters).0.are_trained() {
            true => Saved::new(own).with_input(x),
            false => Saved::new(own),
        }
    }

    /// Writes or adds dw, where it is wanted: then x was saved.
    pub(crate) fn weight_gradient(
        &self,
        cx: &Context,
        weights: Parameters,
        x: Option<Activation>,
        dy: &Tensor,
    ) {
        for (index, columns) in self.each(weights) {
            if let (Some(mut dw), Some(x)) = (weights.gradient(index), &x) {
                let part = self.part(cx, dy, columns);
                let (view, accumulate) = dw.write();
                let dy = part.as_ref().unwrap_or(dy).view();
                cx.device.linear_weight_gradient(x.view(), dy, view, self.layout, accumulate);
            }
        }
    }

    /// dx = dy · wᵀ (+ sum), `[batch, seq, in]`.
    pub(crate) fn input_gradient(
        &self,
        cx: &Context,
        weights: Parameters,
        dy: &Tensor,
        sum: Option<Activation>,
    ) -> Activation {
        let [batch, seq, _] = dy.dims();
        let inputs = self.inputs / self.share_of_inputs.of;
        let (mut dx, mut add) = cx.target(sum, [batch, seq, inputs].into(), "linear.dx");
        for (index, columns) in self.each(weights) {
            let part = self.part(cx, dy, columns);
            let w = self.operand(cx, weights, index);
            let dy = part.as_ref().unwrap_or(dy).view();
            cx.device.linear_input_gradient(dy, w.weight(), dx.view_mut(), add);
            add = true;
        }
        Arc::new(dx)
    }

    /// y, of weights that are not all one: a product for each, whose columns are copied into y.
    fn apart(&self, cx: &Context, parameters: Parameters, x: &Activation) -> Tensor {
        let [batch, seq, _] = x.dims();
        let (weights, biases) = self.split(parameters);
        let bias = self.bias.then(|| {
            let mut bias = cx.activation([self.width()], "linear.bias");
            for (index, columns) in self.each(biases) {
                cx.device.copy(biases.value(index), bias.view_mut().range(columns));
            }
            bias
        });
        let mut y = cx.activation([batch, seq, self.width()], "linear.y");
        for (index, columns) in self.each(weights) {
            let mut part = cx.activation([batch, seq, columns.len()], "linear.part");
            let bias: Option<View> = bias.as_ref().map(|bias| bias.view().range(columns.clone()));
            let w = self.operand(cx, weights, index);
            cx.device.linear(x.view(), w.weight(), Epilogue { bias, residual: None }, part.view_mut());
            cx.device.copy_columns((part.view(), 0), (y.view_mut(), columns.start), columns.len());
        }
        y
    }

    /// A weight or bias of a result, or this layer's share of it.
    fn spec(&self, index: usize, kind: Kind) -> Result<ParameterSpec, CannotCut> {
        let Output { name, width, pieces } = &self.outputs[index];
        let spec = match kind {
            Kind::Bias => ParameterSpec::new(format!("{name}.bias"), kind, [*width], Init::Zeros).cut(
                0,
                *pieces,
                self.share_of_outputs,
            ),
            _ => {
                let (shape, outputs, inputs) = match self.layout {
                    Layout::InOut => ([self.inputs, *width], 1, 0),
                    Layout::OutIn => ([*width, self.inputs], 0, 1),
                };
                let weight = ParameterSpec::new(format!("{name}.weight"), kind, shape, self.init);
                match self.share_of_inputs {
                    Share::WHOLE => weight.cut(outputs, *pieces, self.share_of_outputs),
                    share => weight.cut(inputs, Pieces::of(self.inputs), share),
                }
            }
        }?;
        Ok(ParameterSpec { joins: index > 0, ..spec })
    }
}

impl Cut for Linear {
    fn outputs(self, share: Share) -> Result<Linear, CannotCut> {
        self.outputs.iter().try_for_each(|output| output.columns(share).map(drop))?;
        Ok(Linear { share_of_outputs: share, ..self })
    }

    fn inputs(self, share: Share) -> Result<(Linear, Option<ParameterSpec>), CannotCut> {
        assert!(
            self.outputs.len() == 1 && self.share_of_outputs == Share::WHOLE,
            "one whole result is summed"
        );
        let bias = self.bias.then(|| self.spec(0, Kind::Bias)).transpose()?;
        let layer = Linear { bias: false, share_of_inputs: share, ..self };
        layer.spec(0, Kind::Matrix)?;
        Ok((layer, bias))
    }
}

impl Layer for Linear {
    type Own = ();

    /// The weights, then the biases.
    fn parameters(&self) -> Vec<ParameterSpec> {
        let kinds: &[Kind] = if self.bias { &[Kind::Matrix, Kind::Bias] } else { &[Kind::Matrix] };
        let of = |kind: &Kind| {
            let kind = *kind;
            (0..self.outputs.len())
                .map(move |index| self.spec(index, kind).expect("checked when it was divided"))
        };
        kinds.iter().flat_map(of).collect()
    }

    fn is_row_wise(&self) -> bool {
        true
    }

    /// x: `[batch, seq, in]` -> y: `[batch, seq, out]`
    fn forward(&self, cx: &Context, call: Call) -> Result<(Activation, Saved<()>)> {
        let Call { parameters, x, sum, .. } = call;
        let [batch, seq, _] = x.dims();
        let y = if parameters.len() == 1 + usize::from(self.bias) {
            let mut y = cx.activation([batch, seq, self.width()], "linear.y");
            let epilogue = Epilogue { bias: parameters.get(1), residual: sum.as_ref().map(|sum| sum.view()) };
            let w = self.operand(cx, parameters, 0);
            cx.device.linear(x.view(), w.weight(), epilogue, y.view_mut());
            Arc::new(y)
        } else {
            cx.plus(self.apart(cx, parameters, &x), sum)
        };
        Ok((y, self.saved((), parameters, x)))
    }

    /// Saves the input only: nothing is computed.
    fn save(&self, _: &Context, call: Call) -> Result<Saved<()>> {
        Ok(self.saved((), call.parameters, call.x))
    }

    /// dx = dy · wᵀ; writes or adds dw and db.
    fn backward(&self, cx: &Context, saved: Saved<()>, call: Call) -> Result<Option<Activation>> {
        let Call { parameters, x: dy, sum, input_wanted } = call;
        let (weights, biases) = self.split(parameters);
        self.bias_gradient(cx, biases, &dy);
        self.weight_gradient(cx, weights, saved.x.if_read(), &dy);
        Ok(input_wanted.then(|| self.input_gradient(cx, weights, &dy, sum)))
    }

    /// dx; x and dy are saved for the second part, where it reads them.
    fn backward_input(
        &self,
        cx: &Context,
        saved: Saved<()>,
        call: Call,
    ) -> Result<(Option<Activation>, Deferred)> {
        let Call { parameters, x: dy, sum, input_wanted } = call;
        let dx = input_wanted.then(|| self.input_gradient(cx, self.split(parameters).0, &dy, sum));
        let dy = parameters.are_trained().then_some(dy);
        Ok((dx, Deferred::new(DeferredLinear { x: saved.x.if_read(), dy })))
    }

    fn backward_weight(&self, cx: &Context, parameters: Parameters, deferred: Deferred) -> Result<()> {
        if let DeferredLinear { x, dy: Some(dy) } = deferred.restore() {
            let (weights, biases) = self.split(parameters);
            self.bias_gradient(cx, biases, &dy);
            self.weight_gradient(cx, weights, x, &dy);
        }
        Ok(())
    }
}
