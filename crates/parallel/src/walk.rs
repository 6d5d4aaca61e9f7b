//! The walk over the blocks of a network, forward and backward.

use phalanx_collectives::CollectiveError;
use phalanx_layers::{Activation, Context, Network};
use phalanx_tensor::{CrossEntropy, Tensor, View};

use crate::zero::Zero;

/// What a walk shows to whoever watches it, in the order in which it comes to be. Blocks are numbered as in
/// [`Network::uses`], the head last; `index` is into the uses of the block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// A parameter, as the block reads it.
    Parameter {
        /// The block.
        block: usize,
        /// Which of its parameters.
        index: usize,
    },
    /// What a block's forward made.
    Output {
        /// The block.
        block: usize,
    },
    /// The loss of the micro-batch.
    Loss,
    /// The gradient of a parameter as its layer wrote it, before it is reduced.
    Gradient {
        /// The block.
        block: usize,
        /// Which of its parameters.
        index: usize,
    },
    /// The gradient of what a block was given.
    InputGradient {
        /// The block.
        block: usize,
    },
}

/// Watches a walk; `None` in a step, which waits for nothing.
pub type Watch<'a> = Option<&'a mut dyn FnMut(Seen, View)>;

/// One micro-batch: tokens and targets `[batch, seq]` u32 -> the sum of losses as `numbers` says, `[1]`.
/// Gradients are where `zero` keeps them, and on their way to their owners when this returns.
///
/// # Errors
/// When a collective fails: a peer died, stalled or disagreed.
pub fn forward_backward(
    network: &Network,
    zero: &mut Zero,
    cx: &Context,
    tokens: Activation,
    targets: &Tensor,
    numbers: CrossEntropy,
    mut watch: Watch,
) -> Result<Tensor, CollectiveError> {
    let mut x = tokens;
    let mut saved = Vec::with_capacity(network.blocks.len());
    for (i, block) in network.blocks.iter().enumerate() {
        zero.acquire(i)?;
        show_parameters(&mut watch, zero, i);
        let (y, kept) = block.layer.forward(cx, &zero.parameters(i), x, None);
        zero.release(i);
        show(&mut watch, Seen::Output { block: i }, &y);
        x = y;
        saved.push(kept);
    }

    let head = network.head_index();
    zero.acquire(head)?;
    show_parameters(&mut watch, zero, head);
    zero.open_gradients(head)?;
    let (parameters, mut gradients) = zero.parameters_and_gradients(head);
    let (loss, dx) = network.head.loss_and_gradient(cx, &parameters, &mut gradients, x, targets, numbers);
    drop((parameters, gradients));
    zero.release(head);
    show(&mut watch, Seen::Loss, &loss);
    show_gradients(&mut watch, zero, head, Some(&dx));
    zero.reduce(head)?;

    let mut dy = dx;
    for (i, block) in network.blocks.iter().enumerate().rev() {
        let kept = saved.pop().expect("forward saved one entry a block");
        zero.acquire(i)?;
        show_parameters(&mut watch, zero, i);
        zero.open_gradients(i)?;
        let (parameters, mut gradients) = zero.parameters_and_gradients(i);
        let dx = block.layer.backward(cx, &parameters, &mut gradients, kept, dy, None);
        drop((parameters, gradients));
        zero.release(i);
        show_gradients(&mut watch, zero, i, dx.as_ref());
        zero.reduce(i)?;
        let Some(dx) = dx else { break };
        dy = dx;
    }
    Ok(loss)
}

fn show(watch: &mut Watch, seen: Seen, x: &Tensor) {
    if let Some(watch) = watch {
        watch(seen, x.view());
    }
}

fn show_parameters(watch: &mut Watch, zero: &Zero, block: usize) {
    let Some(watch) = watch else { return };
    for (index, parameter) in zero.parameters(block).into_iter().enumerate() {
        watch(Seen::Parameter { block, index }, parameter);
    }
}

/// Backward runs from the last layer of a block to its first, and so do these.
fn show_gradients(watch: &mut Watch, zero: &Zero, block: usize, dx: Option<&Activation>) {
    let Some(watch) = watch else { return };
    for (index, gradient) in zero.written_gradients(block).into_iter().rev() {
        watch(Seen::Gradient { block, index }, gradient);
    }
    if let Some(dx) = dx {
        watch(Seen::InputGradient { block }, dx.view());
    }
}

/// As [`forward_backward`], forward only.
///
/// # Errors
/// When a collective fails.
pub fn evaluate(
    network: &Network,
    zero: &mut Zero,
    cx: &Context,
    tokens: Activation,
    targets: &Tensor,
    numbers: CrossEntropy,
) -> Result<Tensor, CollectiveError> {
    let mut x = tokens;
    for (i, block) in network.blocks.iter().enumerate() {
        zero.acquire(i)?;
        (x, _) = block.layer.forward(cx, &zero.parameters(i), x, None);
        zero.release(i);
    }
    let head = network.head_index();
    zero.acquire(head)?;
    let loss = network.head.loss(cx, &zero.parameters(head), x, targets, numbers);
    zero.release(head);
    Ok(loss)
}
