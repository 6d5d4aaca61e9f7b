//! What a layer is.
//!
//! A layer declares its parameters and has `forward` and, under it, `backward`. It owns no memory: it
//! receives parameters as views and gradients as places to write, and gets its activations from the
//! device. What forward keeps for backward is handed around as [`Saved`]: input and output where backward
//! reads them, and a struct with a name for what only the layer knows. A layer that can make its output
//! again for little says so ([`Rebuild`]); whether that is done is up to who composes layers.
//!
//! Activations are shared (`Arc`): a residual path and a layer's saved input are one tensor. Its memory
//! goes back to the arena with the last owner, at the same place of the program in every step.

use std::sync::Arc;

use phalanx_plan::Stripe;
use phalanx_tensor::{Category, DType, Device, Dropout, Shape, Tensor, View, ViewMut};

use crate::failure::Result;
use crate::init::Init;
use crate::random;
use crate::saved::{Deferred, Saved};

/// A tensor between layers.
pub type Activation = Arc<Tensor>;

/// Where and how a layer runs.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// The device that computes.
    pub device: &'a Device,
    /// Element type of activations and parameters.
    pub compute: DType,
    /// Whether a backward will follow; without, nothing is kept.
    pub keep: bool,
    /// What random layers (dropout) draw; nothing outside of training.
    pub draw: Option<Draw>,
    /// `[batch, seq]` of the micro-batch, whatever part of its rows (tokens, batch-major) a tensor here holds.
    pub tokens: [usize; 2],
    /// First row of a tensor that holds a part of the rows.
    pub first_row: usize,
}

/// Where a micro-batch stands in the run: what random numbers are a function of, beside layer and element. So
/// they are the same whatever the layout, and whenever a layer runs again.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// Of the run.
    pub seed: u64,
    /// Number of the step, from 1.
    pub step: u64,
    /// Number of the micro-batch's first sample within the global batch.
    pub first_sample: u64,
}

impl<'a> Context<'a> {
    /// Training on whole micro-batches of `tokens` `[batch, seq]`, in which nothing is drawn.
    pub fn new(device: &'a Device, compute: DType, tokens: [usize; 2]) -> Context<'a> {
        Context { device, compute, keep: true, draw: None, tokens, first_row: 0 }
    }
}

impl Draw {
    /// What the layer `name` drops with probability `p` from a tensor that has so many elements a sample: a
    /// piece of the whole global batch's.
    pub fn dropout(&self, p: f32, name: &str, elements_per_sample: usize) -> Dropout {
        let key = random::number(random::key(self.seed, name), self.step);
        let sample = elements_per_sample as u64;
        Dropout { p, key, first: self.first_sample * sample, sample }
    }
}

impl Context<'_> {
    /// What a layer draws that drops with probability `p`: nothing when that is 0, or outside of training.
    pub fn draws(&self, p: f32) -> Option<Draw> {
        self.draw.filter(|_| p > 0.0)
    }

    /// Memory for an activation.
    #[track_caller]
    pub fn activation(&self, shape: impl Into<Shape>, name: &'static str) -> Tensor {
        self.device.alloc(self.compute, shape, Category::Activations, name)
    }

    /// Memory for row statistics and losses, which are f32 whatever is computed in.
    #[track_caller]
    pub fn statistics(&self, shape: impl Into<Shape>, name: &'static str) -> Tensor {
        self.device.alloc(DType::F32, shape, Category::Activations, name)
    }
}

/// A parameter as a layer declares it.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterSpec {
    /// Full name, as in the family's checkpoint files. Equal names are one parameter (tied).
    pub name: String,
    /// Extents here.
    pub shape: Vec<usize>,
    /// Initial values.
    pub init: Init,
    /// Which part of the whole parameter is here; `None` for all of it.
    pub part: Option<Part>,
    /// Whether the gradient that a layer writes is one term of a sum over those who share its activations by
    /// rows: they add theirs up before anybody uses it.
    pub partial: bool,
}

/// A part of a parameter, of which others have the rest.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// Extents of the whole.
    pub whole: Vec<usize>,
    /// The dimension that is split.
    pub dim: usize,
    /// Where the elements that are here lie in the whole.
    pub stripe: Stripe,
}

impl ParameterSpec {
    /// A parameter that is here whole.
    pub fn new(name: impl Into<String>, shape: impl Into<Vec<usize>>, init: Init) -> ParameterSpec {
        ParameterSpec { name: name.into(), shape: shape.into(), init, part: None, partial: false }
    }

    /// Extents of the whole parameter.
    pub fn whole_shape(&self) -> &[usize] {
        self.part.as_ref().map_or(&self.shape, |part| &part.whole)
    }

    /// Where the elements here lie in the whole parameter.
    pub fn stripe(&self) -> Stripe {
        self.part.as_ref().map_or(Stripe::whole(self.elements() as u64), |part| part.stripe)
    }

    /// Number of elements here.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Weight decay acts on matrices only.
    pub fn decays(&self) -> bool {
        self.shape.len() >= 2
    }
}

/// Where a parameter's gradient goes. The first write of a micro-batch may overwrite what is there,
/// every later one adds.
pub struct Gradient<'a> {
    view: ViewMut<'a>,
    accumulate: &'a mut bool,
}

impl<'a> Gradient<'a> {
    /// A gradient in `view`; `accumulate` says whether something is there already, and is set by the
    /// first write.
    pub fn new(view: ViewMut<'a>, accumulate: &'a mut bool) -> Gradient<'a> {
        Gradient { view, accumulate }
    }

    /// The memory, and whether to add to it (or to overwrite).
    pub fn write(&mut self) -> (ViewMut<'_>, bool) {
        let accumulate = std::mem::replace(self.accumulate, true);
        (self.view.reborrow(), accumulate)
    }

    /// Writes a gradient that was computed elsewhere, in any type.
    pub fn add(&mut self, cx: &Context, from: View) {
        let (to, accumulate) = self.write();
        match accumulate {
            true => cx.device.add(from, to),
            false if from.dtype() == to.dtype() => cx.device.copy(from, to),
            false => cx.device.convert(from, to),
        }
    }
}

/// One differentiable piece of a model. See the module's head.
pub trait Layer: Send + Sync {
    /// Its parameters, in the order in which `forward` and `backward` receive them.
    fn parameters(&self) -> Vec<ParameterSpec>;

    /// `y = f(x)`, or `residual + f(x)` when a residual is given.
    ///
    /// # Errors
    /// When others that it exchanges tensors with failed; a layer that computes alone has none.
    fn forward(
        &self,
        cx: &Context,
        parameters: &[View],
        x: Activation,
        residual: Option<Activation>,
    ) -> Result<(Activation, Saved)>;

    /// What forward saves, without its output, for a backward that begins by running forward again. A layer
    /// may leave out what only the output needs.
    ///
    /// # Errors
    /// Those of forward.
    fn save(&self, cx: &Context, parameters: &[View], x: Activation) -> Result<Saved> {
        Ok(self.forward(cx, parameters, x, None)?.1)
    }

    /// How the output is made again from what forward saved, where that is cheap.
    fn rebuild(&self) -> Option<&dyn Rebuild> {
        None
    }

    /// `dx = fᵀ(dy)`, or `residual + fᵀ(dy)`; parameter gradients are written where `gradients` says.
    /// `None` when the input has no gradient (token ids).
    ///
    /// # Errors
    /// As forward.
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
    /// 2401.10241): dx, and what the second part needs. Both together leave the bits that [`Layer::backward`]
    /// leaves. A layer that does not say otherwise computes its parameter gradients here, into f32 memory of
    /// their own, and adds them later: right for vectors.
    ///
    /// # Errors
    /// As forward.
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

    /// The second part: parameter gradients, as `gradients` says.
    ///
    /// # Errors
    /// As forward.
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

/// So that a layer around another need not know what it is.
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

    fn save(&self, cx: &Context, parameters: &[View], x: Activation) -> Result<Saved> {
        (**self).save(cx, parameters, x)
    }

    fn rebuild(&self) -> Option<&dyn Rebuild> {
        (**self).rebuild()
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

/// A layer whose output can be made again without a product of its weights, so that it need not be kept.
pub trait Rebuild {
    /// Whether making it again reads the layer's input.
    fn reads_input(&self) -> bool;

    /// Whether it is never kept, whoever composes.
    fn always(&self) -> bool {
        false
    }

    /// The output of forward without a residual, bit for bit; what `saved` holds stays as it is.
    ///
    /// # Errors
    /// As forward.
    fn output(&self, cx: &Context, parameters: &[View], saved: &mut Saved) -> Result<Activation>;
}

/// A place for `residual + something`: the residual's own memory when nobody else holds it, else a
/// copy; without a residual, fresh memory. The flag says whether to add.
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

/// `y`, plus the residual if there is one, for layers that cannot add it on the way.
pub fn add_residual(cx: &Context, mut y: Tensor, residual: Option<Activation>) -> Activation {
    if let Some(residual) = residual {
        cx.device.add(residual.view(), y.view_mut());
    }
    Arc::new(y)
}
