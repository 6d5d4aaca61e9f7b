//! The walk over the blocks of a network, forward and backward.

use phalanx_collectives::CollectiveError;
use phalanx_layers::{Activation, Context, Network};
use phalanx_tensor::{CrossEntropy, Tensor};

use crate::zero::Zero;

/// One micro-batch: tokens and targets `[batch, seq]` u32 -> the sum of losses as
/// `numbers` says, `[1]`. Gradients
/// are where `zero` keeps them, and on their way to their owners when this returns.
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
) -> Result<Tensor, CollectiveError> {
    let mut x = tokens;
    let mut saved = Vec::with_capacity(network.blocks.len());
    for (i, block) in network.blocks.iter().enumerate() {
        zero.acquire(i)?;
        let (y, kept) = block.layer.forward(cx, &zero.parameters(i), x, None);
        zero.release(i);
        x = y;
        saved.push(kept);
    }

    let head = network.head_index();
    zero.acquire(head)?;
    zero.open_gradients(head)?;
    let (parameters, mut gradients) = zero.parameters_and_gradients(head);
    let (loss, dx) = network.head.loss_and_gradient(cx, &parameters, &mut gradients, x, targets, numbers);
    drop((parameters, gradients));
    zero.release(head);
    zero.reduce(head)?;

    let mut dy = dx;
    for (i, block) in network.blocks.iter().enumerate().rev() {
        let kept = saved.pop().expect("forward saved one entry a block");
        zero.acquire(i)?;
        zero.open_gradients(i)?;
        let (parameters, mut gradients) = zero.parameters_and_gradients(i);
        let dx = block.layer.backward(cx, &parameters, &mut gradients, kept, dy, None);
        drop((parameters, gradients));
        zero.release(i);
        zero.reduce(i)?;
        let Some(dx) = dx else { break };
        dy = dx;
    }
    Ok(loss)
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
