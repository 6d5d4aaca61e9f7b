//! The tensors that layers pass to each other.

use std::sync::Arc;

use phalanx_tensor::Tensor;

/// A tensor that layers pass to each other. It is shared: a residual path and a layer's saved input are one tensor. Its
/// last owner frees it, at the same point of every step.
pub type Activation = Arc<Tensor>;
