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
use phalanx_plan::program::Pass;
use phalanx_plan::trace::{Axis, Placement, Placements};
use phalanx_tensor::{CrossEntropy, Tensor, View};

use crate::block_inputs::{BlockInputs, Kept};
use crate::zero::Chunks;

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

/// Consecutive blocks of a model. Their parameters are in the [`Chunks`] of the rank.
pub struct Stage {
    /// Number of the stage.
    pub index: usize,
    /// The blocks of the stage.
    pub network: Network,
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
        chunks: &mut Chunks,
        x: Activation,
        watch: &mut Watch,
    ) -> Result<(Activation, SavedStage), CollectiveError> {
        let mut x = x;
        let mut saved = Vec::with_capacity(self.network.blocks.len());
        let mut inputs = Kept::default();
        let lowest = self.network.lowest();
        for i in 0..self.network.blocks.len() {
            let _scope = cx.device.scope(self.network.block_name(i));
            self.enter(cx, chunks, (i, Pass::Forward))?;
            self.show_parameters(chunks, watch, i);
            let (y, mut kept) = {
                let parameters = chunks.parameters(self.index, i);
                let call = call(&self.network, i, Parameters::new(&parameters), x);
                let cx = Context { keep: cx.keep && i >= lowest, ..*cx };
                self.network.blocks[i].layer.forward(&cx, call).map_err(cause)?
            };
            chunks.pause()?;
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

    /// Runs the whole backward. Gradients are in `chunks`; their reductions may still run when this returns.
    ///
    /// # Errors
    /// When a collective fails.
    pub fn backward(
        &mut self,
        cx: &Context,
        chunks: &mut Chunks,
        kept: SavedStage,
        from: BackwardStart,
        watch: &mut Watch,
    ) -> Result<BackwardResult, CollectiveError> {
        let SavedStage { mut saved, mut inputs, head } = kept;
        self.inputs.fetch(cx, &mut inputs, usize::MAX)?;
        let (dy, loss) = self.begin_backward(cx, chunks, (head, from), watch)?;
        let Some(mut dy) = dy else { return Ok(BackwardResult { dx: None, loss }) };
        for i in (0..self.network.blocks.len()).rev() {
            let mut kept = saved.pop().expect("forward saved one entry per block");
            let _scope = cx.device.scope(self.network.block_name(i));
            self.enter(cx, chunks, (i, Pass::Backward))?;
            self.inputs.put_back(cx, &mut inputs, &self.network.blocks[i], &mut kept, i)?;
            self.show_parameters(chunks, watch, i);
            let dx = {
                let network = &self.network;
                let parameters = chunks.parameters_with_gradients(self.index, i);
                let call = call(network, i, Parameters::new(&parameters), dy);
                network.blocks[i].layer.backward(cx, kept, call).map_err(cause)?
            };
            let dx = dx.filter(|_| self.network.wants_input(i));
            self.show_gradients(chunks, watch, i);
            self.show_input_gradient(watch, i, dx.as_ref());
            self.reduce(cx, chunks, i)?;
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
        chunks: &mut Chunks,
        kept: SavedStage,
        from: BackwardStart,
        watch: &mut Watch,
    ) -> Result<(BackwardResult, DeferredStage), CollectiveError> {
        let SavedStage { mut saved, mut inputs, head } = kept;
        self.inputs.fetch(cx, &mut inputs, usize::MAX)?;
        let (dy, loss) = self.begin_backward(cx, chunks, (head, from), watch)?;
        let later = DeferredStage(Vec::new());
        let Some(mut dy) = dy else { return Ok((BackwardResult { dx: None, loss }, later)) };
        let mut later = Vec::with_capacity(self.network.blocks.len());
        for i in (0..self.network.blocks.len()).rev() {
            let mut kept = saved.pop().expect("forward saved one entry per block");
            let _scope = cx.device.scope(self.network.block_name(i));
            self.enter(cx, chunks, (i, Pass::Input))?;
            self.inputs.put_back(cx, &mut inputs, &self.network.blocks[i], &mut kept, i)?;
            self.show_parameters(chunks, watch, i);
            let (dx, deferred) = {
                let parameters = chunks.parameters(self.index, i);
                let call = call(&self.network, i, Parameters::new(&parameters), dy);
                self.network.blocks[i].layer.backward_input(cx, kept, call).map_err(cause)?
            };
            let dx = dx.filter(|_| self.network.wants_input(i));
            chunks.pause()?;
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
        chunks: &mut Chunks,
        later: DeferredStage,
        watch: &mut Watch,
    ) -> Result<(), CollectiveError> {
        for (i, deferred) in (0..self.network.blocks.len()).rev().zip(later.0) {
            let _scope = cx.device.scope(self.network.block_name(i));
            chunks.enter(self.index, i, Pass::Weight)?;
            {
                let gradients = chunks.gradients(self.index, i);
                let layer = &self.network.blocks[i].layer;
                layer.backward_weight(cx, Parameters::new(&gradients), deferred).map_err(cause)?;
            }
            self.show_gradients(chunks, watch, i);
            self.reduce(cx, chunks, i)?;
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
        chunks: &mut Chunks,
        x: Activation,
        numbers: CrossEntropy,
        see: Option<SeeLogits>,
    ) -> Result<Tensor, CollectiveError> {
        let index = self.network.head_index();
        self.enter(cx, chunks, (index, Pass::Loss))?;
        let head = self.network.head.as_ref().expect("the last stage has a head");
        let loss = {
            let parameters = chunks.parameters(self.index, index);
            if let Some(see) = see {
                let rows = x.view().reshape(x.shape().rows_cols());
                see(head.logits(cx, Parameters::new(&parameters), rows).view())?;
            }
            let call = Call { input_wanted: false, ..Call::new(Parameters::new(&parameters), x) };
            head.loss(cx, call, numbers).map_err(cause)?.0
        };
        chunks.pause()?;
        Ok(loss)
    }

    /// Computes the derivative of the last block's output, where backward goes on, and in the last stage the loss.
    fn begin_backward(
        &mut self,
        cx: &Context,
        chunks: &mut Chunks,
        (x, from): (Option<Activation>, BackwardStart),
        watch: &mut Watch,
    ) -> Result<(Option<Activation>, Option<Tensor>), CollectiveError> {
        let numbers = match from {
            BackwardStart::Derivative(dy) => return Ok((Some(dy), None)),
            BackwardStart::Loss(numbers) => numbers,
        };
        let index = self.network.head_index();
        self.enter(cx, chunks, (index, Pass::Backward))?;
        self.show_parameters(chunks, watch, index);
        let x = x.expect("forward of the last stage saves the head's input");
        let (loss, dx) = {
            let network = &self.network;
            let head = network.head.as_ref().expect("the last stage has a head");
            let parameters = chunks.parameters_with_gradients(self.index, index);
            let call = call(network, index, Parameters::new(&parameters), x);
            head.loss(cx, call, numbers).map_err(cause)?
        };
        show(watch, Seen::Loss, &loss);
        self.show_gradients(chunks, watch, index);
        self.show_input_gradient(watch, index, dx.as_ref());
        self.reduce(cx, chunks, index)?;
        Ok((dx, Some(loss)))
    }

    /// Goes on to the run of a block, and in a dry run sets the placements of its parameters.
    fn enter(
        &self,
        cx: &Context,
        chunks: &mut Chunks,
        (block, pass): (usize, Pass),
    ) -> Result<(), CollectiveError> {
        chunks.enter(self.index, block, pass)?;
        if cx.device.follows_placements() {
            let views = chunks.views(self.index, block);
            for (view, number) in views.into_iter().zip(&self.network.uses[block]) {
                let spec = &self.network.parameters[*number];
                cx.device.place_named(view, tensor_placement(spec), || spec.name.clone());
            }
        }
        Ok(())
    }

    /// Goes on behind the run of a block that has written gradients; a dry run first checks their placements.
    fn reduce(&self, cx: &Context, chunks: &mut Chunks, block: usize) -> Result<(), CollectiveError> {
        if cx.device.follows_placements() {
            for (index, view) in chunks.written_gradients(self.index, block) {
                let number = self.network.uses[block][index];
                let spec = &self.network.parameters[number];
                let mut expected = tensor_placement(spec);
                if spec.partial {
                    expected = expected.with(Axis::Tensor, Placement::Partial);
                }
                if chunks.data_ranks() > 1 {
                    expected = expected.with(Axis::Data, Placement::Partial);
                }
                let name = || format!("gradient of {}", spec.name);
                cx.device.expect_placement(view, name, expected);
                cx.device.place_named(view, expected, name);
            }
        }
        chunks.pause()
    }

    fn show_parameters(&self, chunks: &Chunks, watch: &mut Watch, block: usize) {
        let Some(watch) = watch else { return };
        for (index, parameter) in chunks.views(self.index, block).into_iter().enumerate() {
            watch(Seen::Parameter { block: self.network.first_block + block, index }, parameter);
        }
    }

    /// Shows the gradients of a block, the last parameter first: backward runs from the last layer to the first.
    fn show_gradients(&self, chunks: &Chunks, watch: &mut Watch, block: usize) {
        let Some(watch) = watch else { return };
        for (index, gradient) in chunks.written_gradients(self.index, block).into_iter().rev() {
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
