//! The tensors and numbers of one update.

use phalanx_tensor::{View, ViewMut};

/// One update of a flat range of parameters. All tensors are flat and of the same length.
pub struct Update<'a> {
    /// Number of this update, from 1; steps that were skipped do not count.
    pub number: u64,
    /// Learning rate of this update.
    pub lr: f32,
    /// Whether weight decay acts on this range.
    pub decays: bool,
    /// The parameters, f32; they are updated.
    pub parameters: ViewMut<'a>,
    /// Overwritten with the updated parameters, rounded to its type.
    pub rounded: Option<ViewMut<'a>>,
    /// The gradient.
    pub gradient: View<'a>,
    /// Factor for the gradient, `[1]`.
    pub factor: View<'a>,
    /// The states, in the order of [`Optimizer::states`](crate::Optimizer::states); they are updated.
    pub states: Vec<ViewMut<'a>>,
}
