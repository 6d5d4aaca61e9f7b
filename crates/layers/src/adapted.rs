//! A linear layer with its adapters: forward, and backward in one part and in two ([`crate::lora`]).

use std::sync::Arc;

use phalanx_tensor::{Epilogue, Layout, Tensor, View, Weight};

use crate::activation::Activation;
use crate::call::{Call, Parameters};
use crate::dora::{Adapting, Magnitudes, SavedMagnitudes};
use crate::dropout::dropped_part;
use crate::failure::Result;
use crate::layer::{Context, Draw, Layer};
use crate::linear::Linear;
use crate::parameter::ParameterSpec;
use crate::saved::{Deferred, Saved, Shared};

/// A linear layer, or its share, with adapters.
pub struct Adapted {
    pub(crate) linear: Linear,
    pub(crate) adapters: Vec<Adapter>,
    pub(crate) scale: f32,
    pub(crate) dropout: f32,
    /// Key of the mask.
    pub(crate) mask: String,
    pub(crate) magnitudes: Option<Magnitudes>,
}

/// An adapter of one result.
pub(crate) struct Adapter {
    /// Index of the result.
    pub(crate) output: usize,
    /// `x · aᵀ`
    pub(crate) down: Linear,
    /// `h · bᵀ`
    pub(crate) up: Linear,
}

/// Tensors that backward reads beside x.
pub struct SavedAdapted {
    /// `[batch, seq, rank]`, the scaled input of each b; None where b is frozen.
    narrow: Vec<Option<Tensor>>,
    magnitudes: Option<SavedMagnitudes>,
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
    /// What the magnitudes have left; None without them.
    magnitudes: Option<DeferredMagnitudes>,
}

/// Derivatives that do not pass the magnitudes.
struct DeferredMagnitudes {
    /// `[batch, seq, out]` of y, which biases sum.
    dy: Activation,
    /// `[out]` f32 of each adapter whose magnitudes are trained.
    gradients: Vec<Option<Tensor>>,
}

/// The parameters of an adapter.
#[derive(Clone, Copy)]
struct Pair<'a> {
    a: Parameters<'a>,
    b: Parameters<'a>,
    /// None without magnitudes.
    m: Parameters<'a>,
}

impl Adapted {
    /// The parameters of the linear layer, and those of each adapter.
    fn split<'a>(&self, all: Parameters<'a>) -> (Parameters<'a>, Vec<Pair<'a>>) {
        let (base, mut rest) = all.split_at(Layer::parameters(&self.linear).len());
        let pair = |_: &Adapter| {
            let (a, others) = rest.split_at(1);
            let (b, others) = others.split_at(1);
            let (m, others) = others.split_at(usize::from(self.magnitudes.is_some()));
            rest = others;
            Pair { a, b, m }
        };
        let pairs = self.adapters.iter().map(pair).collect();
        (base, pairs)
    }

    /// x, of which elements are dropped in training.
    fn dropped(&self, cx: &Context, x: &Activation) -> Activation {
        match cx.draws(self.dropout) {
            None => x.clone(),
            Some(draw) => self.dropped_part(cx, draw, x.clone(), None),
        }
    }

    /// This share of the inputs, or of their derivatives, of which elements are dropped, plus the sum.
    fn dropped_part(&self, cx: &Context, draw: Draw, x: Activation, sum: Option<Activation>) -> Activation {
        dropped_part(cx, draw, (self.dropout, &self.mask), (x, self.linear.share_of_inputs), sum)
    }

    /// The adapters of the magnitudes.
    fn adapting<'a>(&self, pairs: &[Pair<'a>]) -> Vec<Adapting<'a>> {
        let of = |(adapter, pair): (&Adapter, &Pair<'a>)| Adapting {
            columns: self.linear.columns(adapter.output..adapter.output + 1),
            matrices: [pair.a.value(0), pair.b.value(0)],
            magnitudes: pair.m,
        };
        self.adapters.iter().zip(pairs).map(of).collect()
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
    fn saved(
        &self,
        kept: Shared,
        pairs: &[Pair],
        x: Activation,
        (narrow, magnitudes): (Vec<Tensor>, Option<SavedMagnitudes>),
    ) -> Saved<SavedAdapted> {
        let is_read = !kept.is_unread() || pairs.iter().any(|pair| pair.a.are_trained());
        let keep = |(narrow, pair): (Tensor, &Pair)| pair.b.are_trained().then_some(narrow);
        let narrow = narrow.into_iter().zip(pairs).map(keep).collect();
        let saved = Saved::new(SavedAdapted { narrow, magnitudes });
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
            Some(draw) => {
                cx.device.sum_later(own.view());
                self.dropped_part(cx, draw, Arc::new(own), base)
            }
        }
    }

    /// The derivative of what the magnitudes rescale, and what is left for their gradients: dy itself without them.
    fn through_magnitudes(
        &self,
        cx: &Context,
        (base, pairs): (Parameters, &[Pair]),
        saved: Option<SavedMagnitudes>,
        dy: &Activation,
    ) -> (Activation, Option<DeferredMagnitudes>) {
        let Some((magnitudes, saved)) = self.magnitudes.as_ref().zip(saved) else {
            return (dy.clone(), None);
        };
        let (_, biases) = base.split_at(self.linear.outputs.len());
        let (dz, gradients) = magnitudes.backward(cx, biases, &self.adapting(pairs), (saved, dy));
        (dz, Some(DeferredMagnitudes { dy: dy.clone(), gradients }))
    }

    /// Writes or adds the gradients of magnitudes and biases.
    fn magnitude_gradients(
        &self,
        cx: &Context,
        (base, pairs): (Parameters, &[Pair]),
        deferred: DeferredMagnitudes,
    ) {
        for (pair, fresh) in pairs.iter().zip(deferred.gradients) {
            if let (Some(mut dm), Some(fresh)) = (pair.m.gradient(0), fresh) {
                dm.add(cx.device, fresh.view());
            }
        }
        let (_, biases) = base.split_at(self.linear.outputs.len());
        self.linear.bias_gradient(cx, biases, &deferred.dy);
    }

    /// The linear layer that backward runs, and its parameters: with magnitudes it has no biases.
    fn of_backward<'a>(&self, base: Parameters<'a>) -> (&Linear, Parameters<'a>) {
        match &self.magnitudes {
            None => (&self.linear, base),
            Some(Magnitudes { unbiased, .. }) => (unbiased, base.split_at(self.linear.outputs.len()).0),
        }
    }
}

/// The tensor that the linear layer saved: x, if there is one.
fn of_linear(x: Option<Activation>) -> Saved<()> {
    x.map_or_else(|| Saved::new(()), |x| Saved::new(()).with_input(x))
}

impl Layer for Adapted {
    type Own = SavedAdapted;

    /// Those of the linear layer, then a, b and magnitudes of each adapter.
    fn parameters(&self) -> Vec<ParameterSpec> {
        let [a_is_term, b_is_term] =
            [self.linear.share_of_outputs, self.linear.share_of_inputs].map(|share| share.of > 1);
        let term = |layer: &Linear, partial| {
            Layer::parameters(layer).into_iter().map(move |spec| ParameterSpec { partial, ..spec })
        };
        let of = |adapter: &Adapter| {
            let magnitudes = self.magnitudes.iter().map(|magnitudes| magnitudes.spec(adapter.output));
            let matrices = term(&adapter.down, a_is_term).chain(term(&adapter.up, b_is_term));
            matrices.chain(magnitudes).collect::<Vec<_>>()
        };
        Layer::parameters(&self.linear).into_iter().chain(self.adapters.iter().flat_map(of)).collect()
    }

    fn is_row_wise(&self) -> bool {
        true
    }

    /// x: `[batch, seq, in]` -> y: `[batch, seq, out]`
    fn forward(&self, cx: &Context, call: Call) -> Result<(Activation, Saved<SavedAdapted>)> {
        let Call { parameters, x, mut sum, input_wanted } = call;
        let (base, pairs) = self.split(parameters);
        let narrow = self.narrow(cx, &pairs, &x);
        let behind = sum.take_if(|_| self.magnitudes.is_some());
        let sum = Some(self.wide(cx, &pairs, &narrow, sum));
        let call = Call { parameters: base, x: x.clone(), sum, input_wanted };
        let (y, kept) = Layer::forward(&self.linear, cx, call)?;
        let Some(magnitudes) = &self.magnitudes else {
            return Ok((y, self.saved(kept.x, &pairs, x, (narrow, None))));
        };
        let (parameters, adapters) = (base.split_at(self.linear.outputs.len()), self.adapting(&pairs));
        let (rescaled, saved) = magnitudes.forward(cx, parameters, (&adapters, self.scale), &y)?;
        drop(y);
        Ok((cx.plus(rescaled, behind), self.saved(kept.x, &pairs, x, (narrow, Some(saved)))))
    }

    /// Computes the narrow tensors alone; for the gradient of magnitudes the result, too.
    fn save(&self, cx: &Context, call: Call) -> Result<Saved<SavedAdapted>> {
        let (base, pairs) = self.split(call.parameters);
        let narrow = self.narrow(cx, &pairs, &call.x);
        let x = call.x.clone();
        let Some(magnitudes) = &self.magnitudes else {
            let kept = Layer::save(&self.linear, cx, Call { parameters: base, ..call })?;
            return Ok(self.saved(kept.x, &pairs, x, (narrow, None)));
        };
        let (weights, adapters) = (base.split_at(self.linear.outputs.len()).0, self.adapting(&pairs));
        let call = Call { parameters: base, sum: None, ..call };
        let (z, kept) = if pairs.iter().any(|pair| pair.m.are_trained()) {
            let sum = Some(self.wide(cx, &pairs, &narrow, None));
            let (z, kept) = Layer::forward(&self.linear, cx, Call { sum, ..call })?;
            (Some(z), kept)
        } else {
            (None, Layer::save(&self.linear, cx, call)?)
        };
        let saved = magnitudes.saved(cx, weights, (&adapters, self.scale), z)?;
        Ok(self.saved(kept.x, &pairs, x, (narrow, Some(saved))))
    }

    /// dx = dy · wᵀ + drop(scale * dy · b · a) (+ sum), of dy times magnitude over norm where there are magnitudes; writes or adds the
    /// gradients that are wanted.
    fn backward(&self, cx: &Context, saved: Saved<SavedAdapted>, call: Call) -> Result<Option<Activation>> {
        let (base, pairs) = self.split(call.parameters);
        let (x, SavedAdapted { narrow, magnitudes }) = (saved.x.if_read(), saved.own);
        let (dz, deferred) = self.through_magnitudes(cx, (base, &pairs), magnitudes, &call.x);
        if let Some(deferred) = deferred {
            self.magnitude_gradients(cx, (base, &pairs), deferred);
        }
        let d_narrow = self.d_narrow(cx, &pairs, &dz);
        self.gradients(cx, &pairs, (x.clone(), &narrow), (&dz, &d_narrow));
        drop(narrow);
        let (linear, parameters) = self.of_backward(base);
        let dx = Layer::backward(linear, cx, of_linear(x), Call { parameters, x: dz, ..call })?;
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
        let (x, SavedAdapted { narrow, magnitudes }) = (saved.x.if_read(), saved.own);
        let (dy, magnitudes) = self.through_magnitudes(cx, (base, &pairs), magnitudes, &call.x);
        let d_narrow = self.d_narrow(cx, &pairs, &dy);
        let (linear, parameters) = self.of_backward(base);
        let call = Call { parameters, x: dy.clone(), ..call };
        let (dx, base) = Layer::backward_input(linear, cx, of_linear(x.clone()), call)?;
        let dx = dx.map(|dx| self.plus_input_gradients(cx, &pairs, &d_narrow, dx));
        Ok((dx, Deferred::new(DeferredAdapted { base, x, dy, narrow, d_narrow, magnitudes })))
    }

    fn backward_weight(&self, cx: &Context, parameters: Parameters, deferred: Deferred) -> Result<()> {
        let (own, pairs) = self.split(parameters);
        let DeferredAdapted { base, x, dy, narrow, d_narrow, magnitudes } = deferred.restore();
        if let Some(deferred) = magnitudes {
            self.magnitude_gradients(cx, (own, &pairs), deferred);
        }
        self.gradients(cx, &pairs, (x, &narrow), (&dy, &d_narrow));
        let (linear, own) = self.of_backward(own);
        Layer::backward_weight(linear, cx, own, base)
    }
}
