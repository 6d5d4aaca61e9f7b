//! One stage: consecutive blocks of a model with their parameters, and the walk over them.
//!
//! A model that is not cut is one stage. Forward runs the blocks in order. The head of the last stage computes the
//! loss and its derivative in one pass, when backward begins. Backward runs the blocks in reverse, either whole or in
//! two parts: first the derivative of the input, later the parameter gradients. The head has no second part, since
//! that would keep the logits: it writes its gradients with the first. So when a schedule splits backward, the head's
//! parameters share no chunk with those of blocks.

use phalanx_collectives::CollectiveError;
use phalanx_layers::{
    Activation, AnySaved, Call, Context, Deferred, Failure, Network, ParameterSpec, Parameters,
};
use phalanx_plan::program::StageBlocks;
use phalanx_plan::trace::{Axis, Placement, Placements};
use phalanx_tensor::{CrossEntropy, Device, Tensor, View};

use crate::block_inputs::{BlockInputs, Kept};
use crate::zero::Zero;

/// A tensor that forward or backward shows to a watcher, in the order in which they compute it. Blocks are numbered
/// as in the whole network, the head last; `index` counts the parameters of the block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Seen {
    /// A parameter that the block reads.
    Parameter {
        /// The block.
        block: usize,
        /// Which of its parameters.
        index: usize,
    },
    /// The output of a block.
    Output {
        /// The block.
        block: usize,
    },
    /// The loss of the micro-batch.
    Loss,
    /// The gradient of a parameter that the layer wrote, before it is reduced.
    Gradient {
        /// The block.
        block: usize,
        /// Which of its parameters.
        index: usize,
    },
    /// The gradient of the input of a block.
    InputGradient {
        /// The block.
        block: usize,
    },
}

/// Called with every tensor of forward and backward. None in an ordinary step, which never waits for numbers.
pub type Watch<'a> = Option<&'a mut dyn FnMut(Seen, View)>;

/// Called with the logits of a micro-batch, `[rows, classes]`.
pub type SeeLogits<'a> = &'a dyn Fn(View) -> Result<(), CollectiveError>;

/// Consecutive blocks of a model, with the part of their parameters that this rank stores.
pub struct Stage {
    /// Number of the stage.
    pub index: usize,
    /// The blocks of the stage.
    pub network: Network,
    /// Parameters, gradients and optimizer states of the stage.
    pub zero: Zero,
    /// Parameters of this stage of which other stages have copies: each stage's gradient is one term of the sum.
    pub tied: Vec<usize>,
    /// Memory of the inputs of its Transformer blocks between forward and backward.
    pub inputs: BlockInputs,
}

/// The placement of a parameter on the mesh.
fn tensor_placement(spec: &ParameterSpec) -> Placements {
    // All members of a joint parameter are parts alike.
    let placement = spec.members()[0]
        .part
        .as_ref()
        .map_or(Placement::Replicated, |part| Placement::Shard(part.dim as u8));
    Placements::REPLICATED.with(Axis::Tensor, placement)
}

/// Tensors of a micro-batch that forward of a stage saves for backward.
pub struct SavedStage {
    /// Tensors saved by each block that backward runs: from [`Network::lowest`] on.
    saved: Vec<AnySaved>,
    /// The inputs of blocks that are not where their block left them.
    inputs: Kept,
    /// The input of the head, in the last stage.
    head: Option<Activation>,
}

/// Tensors of a micro-batch that the first part of backward saves for the second part: one entry for each block, the last block
/// first.
pub struct DeferredStage(Vec<Deferred>);

/// The input of backward.
pub enum BackwardStart {
    /// In the last stage: the factors of the loss.
    Loss(CrossEntropy),
    /// In an earlier stage: the derivative of its output.
    Derivative(Activation),
}

/// The result of backward.
pub struct BackwardResult {
    /// The derivative of the stage's input; None for ids, and where nothing before it is trained.
    pub dx: Option<Activation>,
    /// The scaled sum of losses, `[1]`, in the last stage.
    pub loss: Option<Tensor>,
}

/// The error behind a layer's failure: a layer can fail only in a collective.
fn cause(failure: Failure) -> CollectiveError {
    match failure.0.downcast::<CollectiveError>() {
        Ok(error) => *error,
        Err(other) => panic!("a layer failed with another error than that of a collective: {other}"),
    }
}

impl Stage {
    /// Returns whether backward runs in this stage: it, or an earlier one, has a trained parameter.
    pub fn is_differentiated(&self) -> bool {
        self.network.lowest() < self.network.uses.len()
    }

    /// Its blocks, as a schedule runs them.
    pub fn blocks(&self) -> StageBlocks {
        let (blocks, lowest) = (self.network.blocks.len(), self.network.lowest());
        StageBlocks { index: self.index, blocks, has_head: self.is_last(), lowest }
    }

    /// Returns whether this stage has the head.
    pub fn is_last(&self) -> bool {
        self.network.head.is_some()
    }

    /// x: token ids `[batch, seq]` u32, or the output of the previous stage -> the output of this stage, and what
    /// backward needs.
    ///
    /// # Errors
    /// When a collective fails: a peer died, stalled or disagreed.
    pub fn forward(
        &mut self,
        cx: &Context,
        x: Activation,
        watch: &mut Watch,
    ) -> Result<(Activation, SavedStage), CollectiveError> {
        let mut x = x;
        let mut saved = Vec::with_capacity(self.network.blocks.len());
        let mut inputs = Kept::default();
        let lowest = self.network.lowest();
        for i in 0..self.network.blocks.len() {
            let _scope = cx.device.scope(self.network.block_name(i));
            self.enter(cx, i)?;
            self.show_parameters(watch, i);
            let (y, mut kept) = {
                let parameters = self.zero.parameters(i);
                let call = call(&self.network, i, Parameters::new(&parameters), x);
                let cx = Context { keep: cx.keep && i >= lowest, ..*cx };
                self.network.blocks[i].layer.forward(&cx, call).map_err(cause)?
            };
            self.zero.release(i);
            show(watch, Seen::Output { block: self.network.first_block + i }, &y);
            x = y;
            if cx.keep && i >= lowest {
                let block = &self.network.blocks[i];
                self.inputs.leave(cx, &mut inputs, block, &mut kept, i)?;
                saved.push(kept);
            }
        }
        self.inputs.settle(cx, &mut inputs, 0)?;
        let head = self.is_last().then(|| x.clone());
        Ok((x, SavedStage { saved, inputs, head }))
    }

    /// Runs the whole backward. Gradients are in `zero`; their reductions may still run when this returns.
    ///
    /// # Errors
    /// When a collective fails.
    pub fn backward(
        &mut self,
        cx: &Context,
        kept: SavedStage,
        from: BackwardStart,
        watch: &mut Watch,
    ) -> Result<BackwardResult, CollectiveError> {
        let SavedStage { mut saved, mut inputs, head } = kept;
        self.inputs.fetch(cx, &mut inputs, usize::MAX)?;
        let (dy, loss) = self.begin_backward(cx, head, from, watch)?;
        let Some(mut dy) = dy else { return Ok(BackwardResult { dx: None, loss }) };
        for i in (0..self.network.blocks.len()).rev() {
            let mut kept = saved.pop().expect("forward saved one entry per block");
            let _scope = cx.device.scope(self.network.block_name(i));
            self.enter(cx, i)?;
            self.inputs.put_back(cx, &mut inputs, &self.network.blocks[i], &mut kept, i)?;
            self.show_parameters(watch, i);
            self.zero.open_gradients(i)?;
            let dx = {
                let Stage { zero, network, .. } = &mut *self;
                let parameters = zero.parameters_with_gradients(i);
                let call = call(network, i, Parameters::new(&parameters), dy);
                network.blocks[i].layer.backward(cx, kept, call).map_err(cause)?
            };
            let dx = dx.filter(|_| self.network.wants_input(i));
            self.zero.release(i);
            self.show_gradients(watch, i);
            self.show_input_gradient(watch, i, dx.as_ref());
            self.reduce(cx, i)?;
            let Some(dx) = dx else { return Ok(BackwardResult { dx: None, loss }) };
            dy = dx;
        }
        Ok(BackwardResult { dx: Some(dy), loss })
    }

    /// Runs the first part of backward: the derivative of the input, and what the second part needs.
    ///
    /// # Errors
    /// When a collective fails.
    pub fn backward_input(
        &mut self,
        cx: &Context,
        kept: SavedStage,
        from: BackwardStart,
        watch: &mut Watch,
    ) -> Result<(BackwardResult, DeferredStage), CollectiveError> {
        let SavedStage { mut saved, mut inputs, head } = kept;
        self.inputs.fetch(cx, &mut inputs, usize::MAX)?;
        let (dy, loss) = self.begin_backward(cx, head, from, watch)?;
        let later = DeferredStage(Vec::new());
        let Some(mut dy) = dy else { return Ok((BackwardResult { dx: None, loss }, later)) };
        let mut later = Vec::with_capacity(self.network.blocks.len());
        for i in (0..self.network.blocks.len()).rev() {
            let mut kept = saved.pop().expect("forward saved one entry per block");
            let _scope = cx.device.scope(self.network.block_name(i));
            self.enter(cx, i)?;
            self.inputs.put_back(cx, &mut inputs, &self.network.blocks[i], &mut kept, i)?;
            self.show_parameters(watch, i);
            let (dx, deferred) = {
                let parameters = self.zero.parameters(i);
                let call = call(&self.network, i, Parameters::new(&parameters), dy);
                self.network.blocks[i].layer.backward_input(cx, kept, call).map_err(cause)?
            };
            let dx = dx.filter(|_| self.network.wants_input(i));
            self.zero.release(i);
            self.show_input_gradient(watch, i, dx.as_ref());
            later.push(deferred);
            match dx {
                Some(dx) => dy = dx,
                None => return Ok((BackwardResult { dx: None, loss }, DeferredStage(later))),
            }
        }
        Ok((BackwardResult { dx: Some(dy), loss }, DeferredStage(later)))
    }

    /// Runs the second part of backward: parameter gradients. It reads no parameters.
    ///
    /// # Errors
    /// When a collective fails.
    pub fn backward_weight(
        &mut self,
        cx: &Context,
        later: DeferredStage,
        watch: &mut Watch,
    ) -> Result<(), CollectiveError> {
        for (i, deferred) in (0..self.network.blocks.len()).rev().zip(later.0) {
            let _scope = cx.device.scope(self.network.block_name(i));
            self.zero.open_gradients(i)?;
            {
                let Stage { zero, network, .. } = &mut *self;
                let gradients = zero.gradients(i);
                let layer = &network.blocks[i].layer;
                layer.backward_weight(cx, Parameters::new(&gradients), deferred).map_err(cause)?;
            }
            self.show_gradients(watch, i);
            self.reduce(cx, i)?;
        }
        Ok(())
    }

    /// Computes the scaled sum of losses of a micro-batch from the output of [`Stage::forward`] in the last stage, and shows the logits
    /// of its rows, `[rows, classes]`, to `see`.
    ///
    /// # Errors
    /// When a collective fails, and those of `see`.
    pub fn loss(
        &mut self,
        cx: &Context,
        x: Activation,
        numbers: CrossEntropy,
        see: Option<SeeLogits>,
    ) -> Result<Tensor, CollectiveError> {
        let index = self.network.head_index();
        self.enter(cx, index)?;
        let head = self.network.head.as_ref().expect("the last stage has a head");
        let loss = {
            let parameters = self.zero.parameters(index);
            if let Some(see) = see {
                let rows = x.view().reshape(x.shape().rows_cols());
                see(head.logits(cx, Parameters::new(&parameters), rows).view())?;
            }
            let call = Call { input_wanted: false, ..Call::new(Parameters::new(&parameters), x) };
            head.loss(cx, call, numbers).map_err(cause)?.0
        };
        self.zero.release(index);
        Ok(loss)
    }

    /// Waits until gradients are summed over the data axis. Gradients of tied parameters are then terms of a sum over
    /// stages.
    ///
    /// # Errors
    /// When a reduction fails.
    pub fn finish_gradients(&mut self, device: &Device) -> Result<(), CollectiveError> {
        self.zero.finish_gradients()?;
        if device.follows_placements() {
            self.tied.iter().for_each(|p| self.zero.place_terms(*p, Axis::Pipeline));
            let specs = self.network.parameters.iter().enumerate();
            // Rules of operations know that gradients of parameters which are whole on every rank are terms.
            let copies = specs.filter(|(_, spec)| spec.trained && !spec.partial && spec.terms().is_some());
            copies.for_each(|(p, _)| self.zero.place_terms(p, Axis::Tensor));
        }
        Ok(())
    }

    /// Computes the derivative of the last block's output, where backward goes on, and in the last stage the loss.
    fn begin_backward(
        &mut self,
        cx: &Context,
        x: Option<Activation>,
        from: BackwardStart,
        watch: &mut Watch,
    ) -> Result<(Option<Activation>, Option<Tensor>), CollectiveError> {
        let numbers = match from {
            BackwardStart::Derivative(dy) => return Ok((Some(dy), None)),
            BackwardStart::Loss(numbers) => numbers,
        };
        let index = self.network.head_index();
        self.enter(cx, index)?;
        self.show_parameters(watch, index);
        self.zero.open_gradients(index)?;
        let x = x.expect("forward of the last stage saves the head's input");
        let (loss, dx) = {
            let Stage { zero, network, .. } = &mut *self;
            let head = network.head.as_ref().expect("the last stage has a head");
            let parameters = zero.parameters_with_gradients(index);
            let call = call(network, index, Parameters::new(&parameters), x);
            head.loss(cx, call, numbers).map_err(cause)?
        };
        self.zero.release(index);
        show(watch, Seen::Loss, &loss);
        self.show_gradients(watch, index);
        self.show_input_gradient(watch, index, dx.as_ref());
        self.reduce(cx, index)?;
        Ok((dx, Some(loss)))
    }

    /// Makes the parameters of a block readable, and in a dry run sets their placements.
    fn enter(&mut self, cx: &Context, block: usize) -> Result<(), CollectiveError> {
        self.zero.acquire(block)?;
        if cx.device.follows_placements() {
            let views = self.zero.views(block);
            for (view, number) in views.into_iter().zip(&self.network.uses[block]) {
                let spec = &self.network.parameters[*number];
                cx.device.place_named(view, tensor_placement(spec), || spec.name.clone());
            }
        }
        Ok(())
    }

    /// Starts the reduction of the gradients of a block; a dry run first checks their placements.
    fn reduce(&mut self, cx: &Context, block: usize) -> Result<(), CollectiveError> {
        if cx.device.follows_placements() {
            for (index, view) in self.zero.written_gradients(block) {
                let number = self.network.uses[block][index];
                let spec = &self.network.parameters[number];
                let mut expected = tensor_placement(spec);
                if spec.partial {
                    expected = expected.with(Axis::Tensor, Placement::Partial);
                }
                if self.zero.data_ranks() > 1 {
                    expected = expected.with(Axis::Data, Placement::Partial);
                }
                let name = || format!("gradient of {}", spec.name);
                cx.device.expect_placement(view, name, expected);
                cx.device.place_named(view, expected, name);
            }
        }
        self.zero.reduce(block)
    }

    fn show_parameters(&self, watch: &mut Watch, block: usize) {
        let Some(watch) = watch else { return };
        for (index, parameter) in self.zero.views(block).into_iter().enumerate() {
            watch(Seen::Parameter { block: self.network.first_block + block, index }, parameter);
        }
    }

    /// Shows the gradients of a block, the last parameter first: backward runs from the last layer to the first.
    fn show_gradients(&self, watch: &mut Watch, block: usize) {
        let Some(watch) = watch else { return };
        for (index, gradient) in self.zero.written_gradients(block).into_iter().rev() {
            watch(Seen::Gradient { block: self.network.first_block + block, index }, gradient);
        }
    }

    fn show_input_gradient(&self, watch: &mut Watch, block: usize, dx: Option<&Activation>) {
        if let (Some(watch), Some(dx)) = (watch, dx) {
            watch(Seen::InputGradient { block: self.network.first_block + block }, dx.view());
        }
    }
}

/// The call of a block, or of the head. The derivative of its input is wanted where something before it is trained.
fn call<'a>(network: &Network, block: usize, parameters: Parameters<'a>, x: Activation) -> Call<'a> {
    Call { input_wanted: network.wants_input(block), ..Call::new(parameters, x) }
}

fn show(watch: &mut Watch, seen: Seen, x: &Tensor) {
    if let Some(watch) = watch {
        watch(seen, x.view());
    }
}
