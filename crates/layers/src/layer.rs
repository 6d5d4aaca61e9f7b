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

use phalanx_tensor::{Category, DType, Device, Dropout, Shape, Tensor, View, ViewMut};

use crate::init::Init;
use crate::random;
use crate::saved::Saved;

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

impl Draw {
    /// What the layer `name` drops with probability `p` from a tensor that has so many elements a sample: a
    /// piece of the whole global batch's.
    pub fn dropout(&self, p: f32, name: &str, elements_per_sample: usize) -> Dropout {
        let key = random::number(random::key(self.seed, name), self.step);
        Dropout { p, key, first: self.first_sample * elements_per_sample as u64 }
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
    /// Extents.
    pub shape: Vec<usize>,
    /// Initial values.
    pub init: Init,
}

impl ParameterSpec {
    /// Number of elements.
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
}

/// One differentiable piece of a model. See the module's head.
pub trait Layer: Send + Sync {
    /// Its parameters, in the order in which `forward` and `backward` receive them.
    fn parameters(&self) -> Vec<ParameterSpec>;

    /// `y = f(x)`, or `residual + f(x)` when a residual is given.
    fn forward(
        &self,
        cx: &Context,
        parameters: &[View],
        x: Activation,
        residual: Option<Activation>,
    ) -> (Activation, Saved);

    /// What forward saves, without its output, for a backward that begins by running forward again. A layer
    /// may leave out what only the output needs.
    fn save(&self, cx: &Context, parameters: &[View], x: Activation) -> Saved {
        self.forward(cx, parameters, x, None).1
    }

    /// How the output is made again from what forward saved, where that is cheap.
    fn rebuild(&self) -> Option<&dyn Rebuild> {
        None
    }

    /// `dx = fᵀ(dy)`, or `residual + fᵀ(dy)`; parameter gradients are written where `gradients` says.
    /// `None` when the input has no gradient (token ids).
    fn backward(
        &self,
        cx: &Context,
        parameters: &[View],
        gradients: &mut [Gradient],
        saved: Saved,
        dy: Activation,
        residual: Option<Activation>,
    ) -> Option<Activation>;
}

/// A layer whose output can be made again without a product of its weights, so that it need not be kept.
pub trait Rebuild {
    /// Whether making it again reads the layer's input.
    fn reads_input(&self) -> bool;

    /// The output of forward without a residual, bit for bit; what `saved` holds stays as it is.
    fn output(&self, cx: &Context, parameters: &[View], saved: &mut Saved) -> Activation;
}

/// A place for `residual + something`: the residual's own memory when nobody else holds it, else a
/// copy; without a residual, fresh memory. The flag says whether to add.
#[track_caller]
pub(crate) fn sum_target(
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
pub(crate) fn add_residual(cx: &Context, mut y: Tensor, residual: Option<Activation>) -> Activation {
    if let Some(residual) = residual {
        cx.device.add(residual.view(), y.view_mut());
    }
    Arc::new(y)
}
