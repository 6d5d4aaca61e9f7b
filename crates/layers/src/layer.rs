//! The trait of layers, and what its methods receive.
//!
//! A layer declares its parameters and has `forward` and, under it, `backward`. It owns no memory: it receives a [`Call`] with
//! its input, its parameters as views and their gradients as memory to write to, and allocates activations from the device. What
//! forward saves for backward is a [`Saved`]: the input and output where backward reads them, and a struct of the layer's own.
//! A layer whose output is cheap to recompute says so by [`Rebuild`]; whoever composes layers decides whether to use it. A layer
//! of any type is an [`AnyLayer`].

use std::sync::Arc;

use phalanx_tensor::{Category, DType, Device, Dropout, Shape, Tensor, View};

use crate::activation::Activation;
use crate::cache::KeyValueCache;
use crate::call::{Call, Gradient, Parameter, Parameters};
use crate::failure::Result;
use crate::inputs::{Inputs, POSITIONS};
use crate::parameter::ParameterSpec;
use crate::random;
use crate::rows::Rows;
use crate::saved::{AnyOwn, AnySaved, Deferred, Saved, Shared, restored};

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
    /// True if backward follows; if not, nothing is saved.
    pub keep: bool,
    /// Key of the dropout masks; None outside of training.
    pub draw: Option<Draw>,
    /// The rows of the micro-batch that are here.
    pub rows: Rows,
    /// In sampling: keys and values of the rows before the first. Tensors then hold the rows from there on.
    pub cache: Option<&'a KeyValueCache>,
    /// Largest number of bytes of a slice of logits. All ranks have the same, and so has the plan.
    pub slice_bytes: usize,
    /// The inputs of the micro-batch; None if a layer runs alone.
    pub inputs: Option<&'a Inputs<'a>>,
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
            rows: Rows::all(tokens),
            cache: None,
            slice_bytes: SLICE_BYTES,
            inputs: None,
        }
    }

    /// The same with these inputs.
    #[must_use]
    pub fn with(self, inputs: &'a Inputs<'a>) -> Context<'a> {
        Context { inputs: Some(inputs), ..self }
    }

    /// The position of each token in its document, `[batch, seq]` u32; None where each sequence is one document.
    #[track_caller]
    pub fn positions(&self) -> Option<Activation> {
        self.rows.documents.then(|| self.input(POSITIONS))
    }

    /// The input of this name ([`Inputs::get`]).
    #[track_caller]
    pub fn input(&self, name: &str) -> Activation {
        self.inputs.unwrap_or_else(|| panic!("there is no input {name}: the layer runs alone")).get(name)
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
    /// Key of the mask of a dropout with probability `p`; None when `p` is 0, and outside of training.
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

    /// Memory for a result that is added to `sum`, and whether to add to it: the sum's own memory where nothing else
    /// holds it, else a copy; new memory without a sum.
    #[track_caller]
    pub fn target(&self, sum: Option<Activation>, shape: Shape, name: &'static str) -> (Tensor, bool) {
        match sum.map(Arc::try_unwrap) {
            None => (self.activation(shape, name), false),
            Some(Ok(own)) => (own, true),
            Some(Err(shared)) => {
                let mut copy = self.activation(shape, name);
                self.device.copy(shared.view(), copy.view_mut());
                (copy, true)
            }
        }
    }

    /// The tensor itself where nothing else holds it, else a copy: for operations that overwrite it.
    #[track_caller]
    pub fn owned(&self, x: Activation, name: &'static str) -> Tensor {
        Arc::try_unwrap(x).unwrap_or_else(|shared| {
            let mut copy = self.device.alloc(shared.dtype(), shared.shape(), Category::Activations, name);
            self.device.copy(shared.view(), copy.view_mut());
            copy
        })
    }

    /// `y`, plus the sum if there is one, for layers whose kernels cannot add it.
    pub fn plus(&self, mut y: Tensor, sum: Option<Activation>) -> Activation {
        if let Some(sum) = sum {
            self.device.add(sum.view(), y.view_mut());
        }
        Arc::new(y)
    }
}

/// A differentiable function with parameters.
pub trait Layer: Send + Sync {
    /// State that backward reads beside the input and the output.
    type Own: Send + 'static;

    /// The parameters, in the order in which `forward` and `backward` receive them.
    fn parameters(&self) -> Vec<ParameterSpec>;

    /// `y = f(x)`, or `sum + f(x)`, and the state that backward needs.
    ///
    /// # Errors
    /// When a collective of the layer fails. Layers without collectives do not fail.
    fn forward(&self, cx: &Context, call: Call) -> Result<(Activation, Saved<Self::Own>)>;

    /// `dx = fᵀ(dy)`, or `sum + fᵀ(dy)`; parameter gradients are written where they are wanted. None where dx is not
    /// wanted, and when the input has no gradient (token ids).
    ///
    /// # Errors
    /// The errors of `forward`.
    fn backward(&self, cx: &Context, saved: Saved<Self::Own>, call: Call) -> Result<Option<Activation>>;

    /// Returns whether each row of the output depends on the same row of the input alone.
    fn is_row_wise(&self) -> bool {
        false
    }

    /// The last row of the output of one sample, `[1, 1, width]`, with the bits of `forward`; the sum has that row
    /// only. For sampling, which reads no other. By default, a layer that is not row-wise computes all rows.
    ///
    /// # Errors
    /// The errors of `forward`.
    fn last_row(&self, cx: &Context, call: Call) -> Result<Activation> {
        if self.is_row_wise() {
            return Ok(self.forward(cx, Call { x: last_row_of(cx, call.x), ..call })?.0);
        }
        let Call { sum, .. } = call;
        let (y, _) = self.forward(cx, Call { sum: None, ..call })?;
        Ok(match sum {
            None => last_row_of(cx, y),
            Some(_) => cx.plus(copy_of_last_row(cx, &y), sum),
        })
    }

    /// Runs forward only for the tensors that it saves, for a backward that begins by running forward again. A layer may skip
    /// work that only the output needs.
    ///
    /// # Errors
    /// The errors of `forward`.
    fn save(&self, cx: &Context, call: Call) -> Result<Saved<Self::Own>> {
        Ok(self.forward(cx, call)?.1)
    }

    /// Method to recompute the output without a matrix product, so that it need not be saved; None if there is none.
    fn rebuild(&self) -> Option<Rebuild> {
        None
    }

    /// The output of forward without a sum, bit for bit, from what was saved, which keeps its values. Only for layers
    /// with a [`Layer::rebuild`].
    ///
    /// # Errors
    /// The errors of `forward`.
    fn output(&self, _: &Context, _: Parameters, _: &Shared, _: &mut Self::Own) -> Result<Activation> {
        unreachable!("a layer that cannot be rebuilt is not asked to")
    }

    /// Calls `see` with each place that holds the layer's input, so that whoever runs the layer can keep the input
    /// elsewhere until backward: `x`, which is [`Saved::x`], or places in the layer's own struct.
    fn each_input(&self, x: &mut Shared, _: &mut Self::Own, see: &mut dyn FnMut(&mut Shared)) {
        see(x);
    }

    /// The first of two parts of backward, for schedules that run them at different times (Qi et al., arXiv
    /// 2401.10241): dx, and what the second part needs. Both parts together give the bits of [`Layer::backward`]. By
    /// default, the gradients of all parameters are computed here into f32 memory and added in the second part, which
    /// suits small parameters.
    ///
    /// # Errors
    /// The errors of `forward`.
    fn backward_input(
        &self,
        cx: &Context,
        saved: Saved<Self::Own>,
        call: Call,
    ) -> Result<(Option<Activation>, Deferred)> {
        let alloc = |(index, value): (usize, View)| {
            let is_trained = call.parameters.is_trained(index);
            is_trained.then(|| cx.statistics(value.shape(), "deferred.gradient"))
        };
        let mut fresh: Vec<Option<Tensor>> = call.parameters.values().enumerate().map(alloc).collect();
        let mut written = vec![false; fresh.len()];
        let dx = {
            let slots = fresh.iter_mut().zip(&mut written);
            let slots =
                slots.map(|(fresh, written)| Some(Gradient::new(fresh.as_mut()?.view_mut(), written)));
            let parameters: Vec<Parameter> = call
                .parameters
                .values()
                .zip(slots)
                .zip(call.parameters.members())
                .map(|((value, slot), members)| Parameter::with_gradient(value, slot).joining(members))
                .collect();
            let Call { x, sum, input_wanted, .. } = call;
            self.backward(cx, saved, Call { parameters: Parameters::new(&parameters), x, sum, input_wanted })?
        };
        let fresh: Vec<_> =
            fresh.into_iter().zip(written).map(|(x, written)| x.filter(|_| written)).collect();
        Ok((dx, Deferred::new(fresh)))
    }

    /// The second part of backward: writes or adds parameter gradients. `parameters` have no values.
    ///
    /// # Errors
    /// The errors of `forward`.
    fn backward_weight(&self, cx: &Context, parameters: Parameters, deferred: Deferred) -> Result<()> {
        let fresh: Vec<Option<Tensor>> = deferred.restore();
        for (index, fresh) in fresh.into_iter().enumerate() {
            if let (Some(mut gradient), Some(fresh)) = (parameters.gradient(index), fresh) {
                gradient.add(cx.device, fresh.view());
            }
        }
        Ok(())
    }
}

/// Method by which a layer can recompute its output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rebuild {
    /// True if recomputing reads the layer's input.
    pub reads_input: bool,
    /// True if the output is never saved, in any composition.
    pub always: bool,
}

/// Any layer: what it saves is boxed, here and nowhere else.
pub trait AnyLayer: Send + Sync {
    /// [`Layer::parameters`]
    fn parameters(&self) -> Vec<ParameterSpec>;
    /// [`Layer::forward`]
    ///
    /// # Errors
    /// Its errors.
    fn forward(&self, cx: &Context, call: Call) -> Result<(Activation, AnySaved)>;
    /// [`Layer::backward`]
    ///
    /// # Errors
    /// Its errors.
    fn backward(&self, cx: &Context, saved: AnySaved, call: Call) -> Result<Option<Activation>>;
    /// [`Layer::is_row_wise`]
    fn is_row_wise(&self) -> bool;
    /// [`Layer::last_row`]
    ///
    /// # Errors
    /// Its errors.
    fn last_row(&self, cx: &Context, call: Call) -> Result<Activation>;
    /// [`Layer::save`]
    ///
    /// # Errors
    /// Its errors.
    fn save(&self, cx: &Context, call: Call) -> Result<AnySaved>;
    /// [`Layer::rebuild`]
    fn rebuild(&self) -> Option<Rebuild>;
    /// [`Layer::output`]
    ///
    /// # Errors
    /// Its errors.
    fn output(
        &self,
        cx: &Context,
        parameters: Parameters,
        x: &Shared,
        own: &mut AnyOwn,
    ) -> Result<Activation>;
    /// [`Layer::each_input`]
    fn each_input(&self, x: &mut Shared, own: &mut AnyOwn, see: &mut dyn FnMut(&mut Shared));
    /// [`Layer::backward_input`]
    ///
    /// # Errors
    /// Its errors.
    fn backward_input(
        &self,
        cx: &Context,
        saved: AnySaved,
        call: Call,
    ) -> Result<(Option<Activation>, Deferred)>;
    /// [`Layer::backward_weight`]
    ///
    /// # Errors
    /// Its errors.
    fn backward_weight(&self, cx: &Context, parameters: Parameters, deferred: Deferred) -> Result<()>;
}

impl<L: Layer> AnyLayer for L {
    fn parameters(&self) -> Vec<ParameterSpec> {
        Layer::parameters(self)
    }

    fn forward(&self, cx: &Context, call: Call) -> Result<(Activation, AnySaved)> {
        let (y, saved) = Layer::forward(self, cx, call)?;
        Ok((y, saved.boxed()))
    }

    fn backward(&self, cx: &Context, saved: AnySaved, call: Call) -> Result<Option<Activation>> {
        Layer::backward(self, cx, saved.unboxed(), call)
    }

    fn is_row_wise(&self) -> bool {
        Layer::is_row_wise(self)
    }

    fn last_row(&self, cx: &Context, call: Call) -> Result<Activation> {
        Layer::last_row(self, cx, call)
    }

    fn save(&self, cx: &Context, call: Call) -> Result<AnySaved> {
        Ok(Layer::save(self, cx, call)?.boxed())
    }

    fn rebuild(&self) -> Option<Rebuild> {
        Layer::rebuild(self)
    }

    fn output(
        &self,
        cx: &Context,
        parameters: Parameters,
        x: &Shared,
        own: &mut AnyOwn,
    ) -> Result<Activation> {
        Layer::output(self, cx, parameters, x, restored(own))
    }

    fn each_input(&self, x: &mut Shared, own: &mut AnyOwn, see: &mut dyn FnMut(&mut Shared)) {
        Layer::each_input(self, x, restored(own), see);
    }

    fn backward_input(
        &self,
        cx: &Context,
        saved: AnySaved,
        call: Call,
    ) -> Result<(Option<Activation>, Deferred)> {
        Layer::backward_input(self, cx, saved.unboxed(), call)
    }

    fn backward_weight(&self, cx: &Context, parameters: Parameters, deferred: Deferred) -> Result<()> {
        Layer::backward_weight(self, cx, parameters, deferred)
    }
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
