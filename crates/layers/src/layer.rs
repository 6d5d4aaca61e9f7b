//! The trait of layers, and what its methods receive.
//!
//! A layer declares its parameters and has `forward` and, under it, `backward`. It owns no memory: it receives
//! parameters as views and gradients as memory to write to, and allocates activations from the device. What forward
//! saves for backward is a [`Saved`]: the input and output where backward reads them, and a struct of the layer's
//! own. A layer whose output is cheap to recompute implements [`Rebuild`]; whoever composes layers decides whether to
//! use it.

use std::sync::Arc;

use phalanx_plan::Stripe;
use phalanx_tensor::{Category, DType, Device, Dropout, Shape, Tensor, View, ViewMut};

use crate::activation::Activation;
use crate::cache::KeyValueCache;
use crate::failure::Result;
use crate::init::Init;
use crate::random;
use crate::saved::{Deferred, Saved, Shared};

/// Largest number of bytes of a slice of logits, without the padding of its rows, where a run does not say another
/// ([`Context::slice_bytes`]).
pub const SLICE_BYTES: usize = 64 << 20;

/// The device, types and positions with which a layer runs.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// The device that computes.
    pub device: &'a Device,
    /// Element type of activations and parameters.
    pub compute: DType,
    /// Whether backward follows; if not, nothing is saved.
    pub keep: bool,
    /// What dropout masks depend on; None outside of training.
    pub draw: Option<Draw>,
    /// `[batch, seq]` of the micro-batch, even where tensors hold only some of its rows (tokens, batch-major).
    pub tokens: [usize; 2],
    /// Number of the first row of tensors that hold only some rows.
    pub first_row: usize,
    /// In sampling: keys and values of the rows before `first_row`. Tensors then hold the rows from there on.
    pub cache: Option<&'a KeyValueCache>,
    /// Largest number of bytes of a slice of logits. All ranks have the same, and so has the plan.
    pub slice_bytes: usize,
}

/// The position of a micro-batch in the run. Random numbers are a function of it, the layer and the element, so they
/// do not depend on the layout, and a layer that runs again draws the same ones.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// Seed of the run.
    pub seed: u64,
    /// Number of the step, from 1.
    pub step: u64,
    /// Number of the micro-batch's first sample within the global batch.
    pub first_sample: u64,
}

impl<'a> Context<'a> {
    /// The context of training on whole micro-batches of `tokens` `[batch, seq]`, without dropout.
    pub fn new(device: &'a Device, compute: DType, tokens: [usize; 2]) -> Context<'a> {
        Context {
            device,
            compute,
            keep: true,
            draw: None,
            tokens,
            first_row: 0,
            cache: None,
            slice_bytes: SLICE_BYTES,
        }
    }
}

impl Draw {
    /// The dropout mask of layer `name`, with probability `p`, for a tensor with `elements_per_sample` elements per
    /// sample: a part of the mask of the global batch.
    pub fn dropout(&self, p: f32, name: &str, elements_per_sample: usize) -> Dropout {
        let key = random::number(random::key(self.seed, name), self.step);
        let sample = elements_per_sample as u64;
        Dropout { p, key, first: self.first_sample * sample, sample }
    }
}

impl Context<'_> {
    /// What the mask of a dropout with probability `p` depends on; None when `p` is 0, and outside of training.
    pub fn draws(&self, p: f32) -> Option<Draw> {
        self.draw.filter(|_| p > 0.0)
    }

    /// Allocates an activation in the compute type.
    #[track_caller]
    pub fn activation(&self, shape: impl Into<Shape>, name: &'static str) -> Tensor {
        self.device.alloc(self.compute, shape, Category::Activations, name)
    }

    /// Allocates row statistics or losses, which are f32 whatever the compute type.
    #[track_caller]
    pub fn statistics(&self, shape: impl Into<Shape>, name: &'static str) -> Tensor {
        self.device.alloc(DType::F32, shape, Category::Activations, name)
    }
}

/// A parameter as a layer declares it.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterSpec {
    /// Full name, as in Hugging Face checkpoints of the model. Parameters of equal names are one parameter (tied).
    pub name: String,
    /// Shape of this rank's part.
    pub shape: Vec<usize>,
    /// Initial values.
    pub init: Init,
    /// Which part of the whole parameter this is; None for the whole.
    pub part: Option<Part>,
    /// Whether the gradient that the layer writes is one term of a sum over the ranks that hold other rows of its
    /// activations. The terms are summed before the update.
    pub partial: bool,
}

/// A part of a parameter; other ranks have the other parts.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// Shape of the whole parameter.
    pub whole: Vec<usize>,
    /// The dimension that is split.
    pub dim: usize,
    /// Which elements of the whole the part has.
    pub stripe: Stripe,
}

impl ParameterSpec {
    /// A whole parameter.
    pub fn new(name: impl Into<String>, shape: impl Into<Vec<usize>>, init: Init) -> ParameterSpec {
        ParameterSpec { name: name.into(), shape: shape.into(), init, part: None, partial: false }
    }

    /// Shape of the whole parameter.
    pub fn whole_shape(&self) -> &[usize] {
        self.part.as_ref().map_or(&self.shape, |part| &part.whole)
    }

    /// Which elements of the whole parameter this part has.
    pub fn stripe(&self) -> Stripe {
        self.part.as_ref().map_or(Stripe::whole(self.elements() as u64), |part| part.stripe)
    }

    /// Number of elements of this part.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Weight decay acts on matrices only.
    pub fn decays(&self) -> bool {
        self.shape.len() >= 2
    }
}

/// The memory of a parameter's gradient. The first write may overwrite it; every later write adds to it.
pub struct Gradient<'a> {
    view: ViewMut<'a>,
    accumulate: &'a mut bool,
}

impl<'a> Gradient<'a> {
    /// A gradient in `view`. `accumulate` says whether `view` holds a gradient already; the first write sets it.
    pub fn new(view: ViewMut<'a>, accumulate: &'a mut bool) -> Gradient<'a> {
        Gradient { view, accumulate }
    }

    /// The memory, and whether to add to it (or to overwrite).
    pub fn write(&mut self) -> (ViewMut<'_>, bool) {
        let accumulate = std::mem::replace(self.accumulate, true);
        (self.view.reborrow(), accumulate)
    }

    /// Writes or adds `from`, which may have another type.
    pub fn add(&mut self, cx: &Context, from: View) {
        let (to, accumulate) = self.write();
        match accumulate {
            true => cx.device.add(from, to),
            false if from.dtype() == to.dtype() => cx.device.copy(from, to),
            false => cx.device.convert(from, to),
        }
    }
}

/// A differentiable function with parameters.
pub trait Layer: Send + Sync {
    /// The parameters, in the order in which `forward` and `backward` receive them.
    fn parameters(&self) -> Vec<ParameterSpec>;

    /// `y = f(x)`, or `residual + f(x)` when a residual is given.
    ///
    /// # Errors
    /// When a collective of the layer fails. Layers without collectives do not fail.
    fn forward(
        &self,
        cx: &Context,
        parameters: &[View],
        x: Activation,
        residual: Option<Activation>,
    ) -> Result<(Activation, Saved)>;

    /// Whether each row of the output depends on the same row of the input alone.
    fn is_row_wise(&self) -> bool {
        false
    }

    /// The last row of the output of one sample, `[1, 1, width]`, with the bits of `forward`; `residual` has that row
    /// only. For sampling, which reads no other. By default, a layer that is not row-wise computes all rows.
    ///
    /// # Errors
    /// The errors of `forward`.
    fn last_row(
        &self,
        cx: &Context,
        parameters: &[View],
        x: Activation,
        residual: Option<Activation>,
    ) -> Result<Activation> {
        if self.is_row_wise() {
            return Ok(self.forward(cx, parameters, last_row_of(cx, x), residual)?.0);
        }
        let (y, _) = self.forward(cx, parameters, x, None)?;
        Ok(match residual {
            None => last_row_of(cx, y),
            Some(_) => add_residual(cx, copy_of_last_row(cx, &y), residual),
        })
    }

    /// What forward saves, for a backward that begins by running forward again. A layer may skip work that only the
    /// output needs.
    ///
    /// # Errors
    /// The errors of `forward`.
    fn save(&self, cx: &Context, parameters: &[View], x: Activation) -> Result<Saved> {
        Ok(self.forward(cx, parameters, x, None)?.1)
    }

    /// Recomputes the output from what forward saved; None where that is not cheap.
    fn rebuild(&self) -> Option<&dyn Rebuild> {
        None
    }

    /// Calls `see` with each place in `saved` that holds the layer's input, so that whoever runs the layer can keep the
    /// input elsewhere until backward. Layers that hold it in their own struct name those places instead.
    fn each_input(&self, saved: &mut Saved, see: &mut dyn FnMut(&mut Shared)) {
        see(&mut saved.x);
    }

    /// `dx = fᵀ(dy)`, or `residual + fᵀ(dy)`; parameter gradients are written where `gradients` says.
    /// `None` when the input has no gradient (token ids).
    ///
    /// # Errors
    /// The errors of `forward`.
    fn backward(
        &self,
        cx: &Context,
        parameters: &[View],
        gradients: &mut [Gradient],
        saved: Saved,
        dy: Activation,
        residual: Option<Activation>,
    ) -> Result<Option<Activation>>;

    /// The first of two parts of backward, for schedules that run them at different times (Qi et al., arXiv
    /// 2401.10241): dx, and what the second part needs. Both parts together give the bits of [`Layer::backward`]. By
    /// default, parameter gradients are computed here into f32 memory and added in the second part, which suits small
    /// parameters.
    ///
    /// # Errors
    /// The errors of `forward`.
    fn backward_input(
        &self,
        cx: &Context,
        parameters: &[View],
        saved: Saved,
        dy: Activation,
        residual: Option<Activation>,
    ) -> Result<(Option<Activation>, Deferred)> {
        let alloc = |spec: &ParameterSpec| cx.statistics(spec.shape.as_slice(), "deferred.gradient");
        let mut fresh: Vec<Tensor> = self.parameters().iter().map(alloc).collect();
        let mut written = vec![false; fresh.len()];
        let slots = fresh.iter_mut().zip(&mut written).map(|(x, flag)| Gradient::new(x.view_mut(), flag));
        let mut slots: Vec<Gradient> = slots.collect();
        let dx = self.backward(cx, parameters, &mut slots, saved, dy, residual)?;
        drop(slots);
        let fresh: Vec<_> = fresh.into_iter().zip(written).map(|(x, written)| written.then_some(x)).collect();
        Ok((dx, Deferred::new(fresh)))
    }

    /// The second part of backward: writes or adds parameter gradients.
    ///
    /// # Errors
    /// The errors of `forward`.
    fn backward_weight(&self, cx: &Context, gradients: &mut [Gradient], deferred: Deferred) -> Result<()> {
        let fresh: Vec<Option<Tensor>> = deferred.restore();
        for (gradient, fresh) in gradients.iter_mut().zip(fresh) {
            if let Some(fresh) = fresh {
                gradient.add(cx, fresh.view());
            }
        }
        Ok(())
    }
}

/// A boxed layer is a layer, so that combinators can wrap any layer.
impl Layer for Box<dyn Layer> {
    fn parameters(&self) -> Vec<ParameterSpec> {
        (**self).parameters()
    }

    fn forward(
        &self,
        cx: &Context,
        parameters: &[View],
        x: Activation,
        residual: Option<Activation>,
    ) -> Result<(Activation, Saved)> {
        (**self).forward(cx, parameters, x, residual)
    }

    fn is_row_wise(&self) -> bool {
        (**self).is_row_wise()
    }

    fn last_row(
        &self,
        cx: &Context,
        parameters: &[View],
        x: Activation,
        residual: Option<Activation>,
    ) -> Result<Activation> {
        (**self).last_row(cx, parameters, x, residual)
    }

    fn save(&self, cx: &Context, parameters: &[View], x: Activation) -> Result<Saved> {
        (**self).save(cx, parameters, x)
    }

    fn rebuild(&self) -> Option<&dyn Rebuild> {
        (**self).rebuild()
    }

    fn each_input(&self, saved: &mut Saved, see: &mut dyn FnMut(&mut Shared)) {
        (**self).each_input(saved, see);
    }

    fn backward(
        &self,
        cx: &Context,
        parameters: &[View],
        gradients: &mut [Gradient],
        saved: Saved,
        dy: Activation,
        residual: Option<Activation>,
    ) -> Result<Option<Activation>> {
        (**self).backward(cx, parameters, gradients, saved, dy, residual)
    }

    fn backward_input(
        &self,
        cx: &Context,
        parameters: &[View],
        saved: Saved,
        dy: Activation,
        residual: Option<Activation>,
    ) -> Result<(Option<Activation>, Deferred)> {
        (**self).backward_input(cx, parameters, saved, dy, residual)
    }

    fn backward_weight(&self, cx: &Context, gradients: &mut [Gradient], deferred: Deferred) -> Result<()> {
        (**self).backward_weight(cx, gradients, deferred)
    }
}

/// A layer that can recompute its output without a matrix product, so that the output need not be saved.
pub trait Rebuild {
    /// Whether recomputing reads the layer's input.
    fn reads_input(&self) -> bool;

    /// Whether the output is never saved, in any composition.
    fn always(&self) -> bool {
        false
    }

    /// The output of forward without a residual, bit for bit. `saved` keeps its values.
    ///
    /// # Errors
    /// The errors of `forward`.
    fn output(&self, cx: &Context, parameters: &[View], saved: &mut Saved) -> Result<Activation>;
}

/// The last row of x `[1, rows, columns]`; x itself if it has one row.
pub(crate) fn last_row_of(cx: &Context, x: Activation) -> Activation {
    match x.dims() {
        [1, 1, _] => x,
        _ => Arc::new(copy_of_last_row(cx, &x)),
    }
}

fn copy_of_last_row(cx: &Context, x: &Tensor) -> Tensor {
    let [samples, rows, columns] = x.dims();
    assert_eq!(samples, 1, "the last row of one sample");
    let mut last = cx.activation([1, 1, columns], "last_row");
    cx.device.copy(x.view().range((rows - 1) * columns..rows * columns), last.view_mut());
    last
}

/// Memory for `residual + f`: the residual's own memory when nothing else holds it, otherwise a copy; new memory
/// without a residual. The flag says whether to add to it.
#[track_caller]
pub fn sum_target(
    cx: &Context,
    residual: Option<Activation>,
    shape: Shape,
    name: &'static str,
) -> (Tensor, bool) {
    match residual.map(Arc::try_unwrap) {
        None => (cx.activation(shape, name), false),
        Some(Ok(unique)) => (unique, true),
        Some(Err(shared)) => {
            let mut copy = cx.activation(shape, name);
            cx.device.copy(shared.view(), copy.view_mut());
            (copy, true)
        }
    }
}

/// `y`, plus the residual if there is one, for layers whose kernels cannot add it.
pub fn add_residual(cx: &Context, mut y: Tensor, residual: Option<Activation>) -> Activation {
    if let Some(residual) = residual {
        cx.device.add(residual.view(), y.view_mut());
    }
    Arc::new(y)
}
