//! Low-rank adapters around a linear layer (Hu et al., "LoRA", arXiv 2106.09685), with the names and initial values of PEFT.
//!
//! An adapter has two parameters, `a` `[rank, in]` and `b` `[out, rank]`, and adds `scale * drop(x) · aᵀ · bᵀ` to a result of the layer.
//! Results that one product computes have an adapter each, and the mask of dropout in common. Where the layer has a share of its outputs,
//! so has b; every holder then has the whole of a, and one term of its gradient. With a share of the inputs, a and b change places. What is
//! summed over the holders is what the layer sums: none of them waits for a narrow tensor.

use std::fmt;
use std::sync::Arc;

use phalanx_tensor::{Epilogue, Layout, Tensor, View, Weight};

use crate::activation::Activation;
use crate::call::{Call, Parameters};
use crate::combinators::Sequence;
use crate::cut::Cut;
use crate::dropout::dropped;
use crate::failure::Result;
use crate::init::Init;
use crate::layer::{AnyLayer, Context, Layer};
use crate::linear::{Linear, Output};
use crate::linear_gelu::{GeluAlone, LinearGelu};
use crate::parameter::ParameterSpec;
use crate::saved::{Deferred, Saved, Shared};

/// Ends of the names of an adapter's parameters, behind the name of the result: `a` and `b`.
const ENDS: [&str; 2] = [".lora_A", ".lora_B"];

/// The adapters of a model's linear layers.
#[derive(Clone)]
pub struct Lora {
    /// Rows of a and columns of b: the adapters' rank.
    pub width: usize,
    /// Factor of an adapter's result.
    pub scale: f32,
    /// Probability that training drops an element of an adapter's input.
    pub dropout: f32,
    /// Initial values of a; b starts at zero.
    pub init: AdapterInit,
    /// Returns whether the result of this name of a linear layer has an adapter.
    pub targets: Arc<dyn Fn(&str) -> bool + Send + Sync>,
}

/// Initial values of the first matrix of an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdapterInit {
    /// Uniform up to `1 / sqrt(in)` (He et al., arXiv 1502.01852, with a negative slope of the root of 5).
    Uniform,
    /// Normal with a standard deviation of `1 / rank`.
    Gaussian,
}

impl fmt::Debug for Lora {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Lora { width, scale, dropout, init, targets: _ } = self;
        write!(f, "Lora {{ width: {width}, scale: {scale}, dropout: {dropout}, init: {init:?} }}")
    }
}

impl Lora {
    /// The layer, or its share, with adapters; the layer itself where it has none.
    ///
    /// # Errors
    /// The layer, unchanged, where none of its results is a target.
    pub fn around(&self, linear: Linear) -> std::result::Result<Adapted, Linear> {
        let targets = (0..linear.outputs.len()).filter(|i| (self.targets)(&linear.outputs[*i].name));
        let adapters: Vec<Adapter> = targets.map(|output| self.adapter(&linear, output)).collect();
        if adapters.is_empty() {
            return Err(linear);
        }
        let Lora { scale, dropout, .. } = *self;
        let mask = format!("{}.lora_dropout", linear.outputs[0].name);
        Ok(Adapted { linear, adapters, scale, dropout, mask })
    }

    fn adapter(&self, linear: &Linear, output: usize) -> Adapter {
        let init = match self.init {
            AdapterInit::Uniform => Init::Uniform(1.0 / (linear.inputs as f32).sqrt()),
            AdapterInit::Gaussian => Init::Normal(1.0 / self.width as f32),
        };
        let wide = linear.outputs[output].clone();
        let [a, b] = ENDS.map(|end| format!("{}{end}", wide.name));
        let plain = |output, inputs, init| Linear { bias: false, ..Linear::new([output], inputs, init) };
        let (inputs, outputs) = (linear.share_of_inputs, linear.share_of_outputs);
        Adapter {
            output,
            down: Linear {
                share_of_inputs: inputs,
                ..plain(Output::new(a, self.width), linear.inputs, init)
            },
            up: Linear {
                share_of_outputs: outputs,
                ..plain(Output { name: b, ..wide }, self.width, Init::Zeros)
            },
        }
    }
}

/// A layer that adapters may be put around.
pub trait Adapt: Cut {
    /// The layer, which may have a share already, with the adapters that `lora` has for it: none for a layer of a kind of its own.
    fn adapted(self, _lora: &Lora) -> Box<dyn AnyLayer> {
        Box::new(self)
    }
}

impl Adapt for Linear {
    fn adapted(self, lora: &Lora) -> Box<dyn AnyLayer> {
        match lora.around(self) {
            Ok(adapted) => Box::new(adapted),
            Err(linear) => Box::new(linear),
        }
    }
}

impl Adapt for LinearGelu {
    /// GELU then follows the sum of the linear layer and its adapter.
    fn adapted(self, lora: &Lora) -> Box<dyn AnyLayer> {
        let LinearGelu { linear, gelu } = self;
        match lora.around(linear) {
            Ok(adapted) => Box::new(Sequence::new(vec![Box::new(adapted), Box::new(GeluAlone { gelu })])),
            Err(linear) => Box::new(LinearGelu { linear, gelu }),
        }
    }
}

/// The result of a linear layer to which the adapter with this parameter belongs; None for other parameters.
pub fn adapted_by(parameter: &str) -> Option<&str> {
    let name = parameter.strip_suffix(".weight")?;
    ENDS.iter().find_map(|end| name.strip_suffix(end))
}

/// Names of the parameters a and b of the adapter of this result.
pub fn parameters_of(result: &str) -> [String; 2] {
    ENDS.map(|end| format!("{result}{end}.weight"))
}

/// A linear layer, or its share, with adapters.
pub struct Adapted {
    linear: Linear,
    adapters: Vec<Adapter>,
    scale: f32,
    dropout: f32,
    /// Key of the mask.
    mask: String,
}

/// An adapter of one result.
struct Adapter {
    /// Index of the result.
    output: usize,
    /// `x · aᵀ`
    down: Linear,
    /// `h · bᵀ`
    up: Linear,
}

/// Tensors that backward reads beside x.
pub struct SavedAdapted {
    /// `[batch, seq, rank]`, the scaled input of each b; None where b is frozen.
    narrow: Vec<Option<Tensor>>,
}

/// Tensors that the first part of backward saves for the second.
struct DeferredAdapted {
    base: Deferred,
    /// `[batch, seq, in]`, if a gradient reads it.
    x: Option<Activation>,
    /// `[batch, seq, out]`
    dy: Activation,
    narrow: Vec<Option<Tensor>>,
    /// `[batch, seq, rank]` of each adapter.
    d_narrow: Vec<Tensor>,
}

/// The parameters of an adapter.
#[derive(Clone, Copy)]
struct Pair<'a> {
    a: Parameters<'a>,
    b: Parameters<'a>,
}

impl Adapted {
    /// The parameters of the linear layer, and those of each adapter.
    fn split<'a>(&self, all: Parameters<'a>) -> (Parameters<'a>, Vec<Pair<'a>>) {
        let (base, mut rest) = all.split_at(Layer::parameters(&self.linear).len());
        let pair = |_: &Adapter| {
            let (a, others) = rest.split_at(1);
            let (b, others) = others.split_at(1);
            rest = others;
            Pair { a, b }
        };
        let pairs = self.adapters.iter().map(pair).collect();
        (base, pairs)
    }

    /// x, of which elements are dropped in training.
    fn dropped(&self, cx: &Context, x: &Activation) -> Activation {
        match cx.draws(self.dropout) {
            None => x.clone(),
            Some(draw) => dropped(cx, draw, (self.dropout, &self.mask), x.clone(), None),
        }
    }

    /// `scale * drop(x) · aᵀ` of each adapter, `[batch, seq, rank]`.
    fn narrow(&self, cx: &Context, pairs: &[Pair], x: &Activation) -> Vec<Tensor> {
        let x = self.dropped(cx, x);
        let of = |pair: &Pair| {
            self.scaled(cx, &x, pair.a.value(0), |to| {
                let a = Weight { matrix: pair.a.value(0), layout: Layout::OutIn };
                cx.device.linear(x.view(), a, Epilogue { bias: None, residual: None }, to.view_mut());
            })
        };
        pairs.iter().map(of).collect()
    }

    /// A narrow tensor with the rows of `like` that `fill` computes, times the scale. It may be a partial sum over holders: what is
    /// computed from it is one, too, and summed with that of the linear layer.
    fn scaled(&self, cx: &Context, like: &Tensor, a: View, fill: impl FnOnce(&mut Tensor)) -> Tensor {
        let ([batch, seq, _], [width, _]) = (like.dims(), a.dims());
        let mut narrow = cx.activation([batch, seq, width], "lora.narrow");
        fill(&mut narrow);
        cx.device.multiply(narrow.view_mut(), self.scale);
        cx.device.sum_later(narrow.view());
        narrow
    }

    /// The results of all adapters in their columns (+ sum), `[batch, seq, out]`.
    fn wide(&self, cx: &Context, pairs: &[Pair], narrow: &[Tensor], sum: Option<Activation>) -> Activation {
        let [batch, seq, _] = narrow[0].dims();
        let product = |index: usize, columns: usize, residual: Option<View>| {
            let mut y = cx.activation([batch, seq, columns], "lora.wide");
            let b = Weight { matrix: pairs[index].b.value(0), layout: Layout::OutIn };
            cx.device.linear(narrow[index].view(), b, Epilogue { bias: None, residual }, y.view_mut());
            y
        };
        let width = self.linear.width();
        if self.linear.outputs.len() == 1 {
            return Arc::new(product(0, width, sum.as_ref().map(|sum| sum.view())));
        }
        let mut y = cx.activation([batch, seq, width], "lora.y");
        if self.adapters.len() < self.linear.outputs.len() {
            cx.device.fill(y.view_mut(), 0.0);
        }
        for (index, adapter) in self.adapters.iter().enumerate() {
            let columns = self.linear.columns(adapter.output..adapter.output + 1);
            let part = product(index, columns.len(), None);
            cx.device.copy_columns((part.view(), 0), (y.view_mut(), columns.start), columns.len());
        }
        cx.plus(y, sum)
    }

    /// Inputs of backward: x where a gradient of the linear layer or of an a is wanted, and the inputs of each b that is trained.
    fn saved(&self, kept: Shared, pairs: &[Pair], x: Activation, narrow: Vec<Tensor>) -> Saved<SavedAdapted> {
        let is_read = !kept.is_unread() || pairs.iter().any(|pair| pair.a.are_trained());
        let keep = |(narrow, pair): (Tensor, &Pair)| pair.b.are_trained().then_some(narrow);
        let saved = Saved::new(SavedAdapted { narrow: narrow.into_iter().zip(pairs).map(keep).collect() });
        if is_read { saved.with_input(x) } else { saved }
    }

    /// Columns of dy that belong to an adapter: None where they are all.
    fn part(&self, cx: &Context, adapter: &Adapter, dy: &Tensor) -> Option<Tensor> {
        self.linear.part(cx, dy, self.linear.columns(adapter.output..adapter.output + 1))
    }

    /// `scale * dy · b` of each adapter, `[batch, seq, rank]`.
    fn d_narrow(&self, cx: &Context, pairs: &[Pair], dy: &Activation) -> Vec<Tensor> {
        let of = |(adapter, pair): (&Adapter, &Pair)| {
            let part = self.part(cx, adapter, dy);
            let dy = part.as_ref().unwrap_or(dy);
            self.scaled(cx, dy, pair.a.value(0), |to| {
                let b = Weight { matrix: pair.b.value(0), layout: Layout::OutIn };
                cx.device.linear_input_gradient(dy.view(), b, to.view_mut(), false);
            })
        };
        self.adapters.iter().zip(pairs).map(of).collect()
    }

    /// Writes or adds `db = dyᵀ · narrow` and `da = d_narrowᵀ · drop(x)`, where they are wanted: then x and narrow were saved.
    fn gradients(
        &self,
        cx: &Context,
        pairs: &[Pair],
        (x, narrow): (Option<Activation>, &[Option<Tensor>]),
        (dy, d_narrow): (&Activation, &[Tensor]),
    ) {
        for ((adapter, pair), narrow) in self.adapters.iter().zip(pairs).zip(narrow) {
            if let (Some(mut db), Some(narrow)) = (pair.b.gradient(0), narrow) {
                let part = self.part(cx, adapter, dy);
                let (view, accumulate) = db.write();
                let dy = part.as_ref().unwrap_or(dy).view();
                cx.device.linear_weight_gradient(narrow.view(), dy, view, Layout::OutIn, accumulate);
            }
        }
        let Some(x) = x.filter(|_| pairs.iter().any(|pair| pair.a.want_gradients())) else { return };
        let x = self.dropped(cx, &x);
        for (pair, d_narrow) in pairs.iter().zip(d_narrow) {
            if let Some(mut da) = pair.a.gradient(0) {
                let (view, accumulate) = da.write();
                let dy = d_narrow.view();
                cx.device.linear_weight_gradient(x.view(), dy, view, Layout::OutIn, accumulate);
            }
        }
    }

    /// dx of the linear layer plus `drop(d_narrow · a)` of each adapter, in its memory where nothing is dropped.
    fn plus_input_gradients(
        &self,
        cx: &Context,
        pairs: &[Pair],
        d_narrow: &[Tensor],
        dx: Activation,
    ) -> Activation {
        let draw = cx.draws(self.dropout);
        let (mut own, base) = match draw {
            None => (cx.owned(dx, "lora.dx"), None),
            Some(_) => (cx.activation(dx.shape(), "lora.d_dropped"), Some(dx)),
        };
        let mut add = base.is_none();
        for (pair, d_narrow) in pairs.iter().zip(d_narrow) {
            let a = Weight { matrix: pair.a.value(0), layout: Layout::OutIn };
            cx.device.linear_input_gradient(d_narrow.view(), a, own.view_mut(), add);
            add = true;
        }
        match draw {
            None => Arc::new(own),
            Some(draw) => dropped(cx, draw, (self.dropout, &self.mask), Arc::new(own), base),
        }
    }
}

/// The tensor that the linear layer saved: x, if there is one.
fn of_linear(x: Option<Activation>) -> Saved<()> {
    x.map_or_else(|| Saved::new(()), |x| Saved::new(()).with_input(x))
}

impl Layer for Adapted {
    type Own = SavedAdapted;

    /// Those of the linear layer, then a and b of each adapter.
    fn parameters(&self) -> Vec<ParameterSpec> {
        let [a_is_term, b_is_term] =
            [self.linear.share_of_outputs, self.linear.share_of_inputs].map(|share| share.of > 1);
        let term = |layer: &Linear, partial| {
            Layer::parameters(layer).into_iter().map(move |spec| ParameterSpec { partial, ..spec })
        };
        let of = |adapter: &Adapter| {
            term(&adapter.down, a_is_term).chain(term(&adapter.up, b_is_term)).collect::<Vec<_>>()
        };
        Layer::parameters(&self.linear).into_iter().chain(self.adapters.iter().flat_map(of)).collect()
    }

    fn is_row_wise(&self) -> bool {
        true
    }

    /// x: `[batch, seq, in]` -> y: `[batch, seq, out]`
    fn forward(&self, cx: &Context, call: Call) -> Result<(Activation, Saved<SavedAdapted>)> {
        let Call { parameters, x, sum, input_wanted } = call;
        let (base, pairs) = self.split(parameters);
        let narrow = self.narrow(cx, &pairs, &x);
        let sum = Some(self.wide(cx, &pairs, &narrow, sum));
        let call = Call { parameters: base, x: x.clone(), sum, input_wanted };
        let (y, kept) = Layer::forward(&self.linear, cx, call)?;
        Ok((y, self.saved(kept.x, &pairs, x, narrow)))
    }

    /// Computes the narrow tensors alone.
    fn save(&self, cx: &Context, call: Call) -> Result<Saved<SavedAdapted>> {
        let (base, pairs) = self.split(call.parameters);
        let narrow = self.narrow(cx, &pairs, &call.x);
        let x = call.x.clone();
        let kept = Layer::save(&self.linear, cx, Call { parameters: base, ..call })?;
        Ok(self.saved(kept.x, &pairs, x, narrow))
    }

    /// dx = dy · wᵀ + drop(scale * dy · b · a) (+ sum); writes or adds the gradients that are wanted.
    fn backward(&self, cx: &Context, saved: Saved<SavedAdapted>, call: Call) -> Result<Option<Activation>> {
        let (base, pairs) = self.split(call.parameters);
        let (x, SavedAdapted { narrow }) = (saved.x.if_read(), saved.own);
        let d_narrow = self.d_narrow(cx, &pairs, &call.x);
        self.gradients(cx, &pairs, (x.clone(), &narrow), (&call.x, &d_narrow));
        drop(narrow);
        let dx = Layer::backward(&self.linear, cx, of_linear(x), Call { parameters: base, ..call })?;
        Ok(dx.map(|dx| self.plus_input_gradients(cx, &pairs, &d_narrow, dx)))
    }

    /// dx; what gradients read is kept.
    fn backward_input(
        &self,
        cx: &Context,
        saved: Saved<SavedAdapted>,
        call: Call,
    ) -> Result<(Option<Activation>, Deferred)> {
        let (base, pairs) = self.split(call.parameters);
        let (x, SavedAdapted { narrow }, dy) = (saved.x.if_read(), saved.own, call.x.clone());
        let d_narrow = self.d_narrow(cx, &pairs, &dy);
        let call = Call { parameters: base, ..call };
        let (dx, base) = Layer::backward_input(&self.linear, cx, of_linear(x.clone()), call)?;
        let dx = dx.map(|dx| self.plus_input_gradients(cx, &pairs, &d_narrow, dx));
        Ok((dx, Deferred::new(DeferredAdapted { base, x, dy, narrow, d_narrow })))
    }

    fn backward_weight(&self, cx: &Context, parameters: Parameters, deferred: Deferred) -> Result<()> {
        let (own, pairs) = self.split(parameters);
        let DeferredAdapted { base, x, dy, narrow, d_narrow } = deferred.restore();
        self.gradients(cx, &pairs, (x, &narrow), (&dy, &d_narrow));
        Layer::backward_weight(&self.linear, cx, own, base)
    }
}
