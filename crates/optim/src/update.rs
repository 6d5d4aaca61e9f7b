//! The tensors and numbers of one update.

use std::sync::Arc;

use phalanx_tensor::{View, ViewMut};

use crate::extent::UpdatedParameter;

/// One update of a range of a parameter. All tensors are flat but where its extent is [`Extent::Whole`](crate::Extent::Whole): there
/// they have the shapes of the parameter and of its states.
pub struct Update<'a> {
    /// Number of this update, from 1; steps that were skipped do not count.
    pub number: u64,
    /// Learning rate of this update.
    pub lr: f32,
    /// The parameter.
    pub of: &'a Arc<UpdatedParameter>,
    /// Its values, f32; they are updated.
    pub parameters: ViewMut<'a>,
    /// Overwritten with the updated parameters, rounded to its type.
    pub rounded: Option<ViewMut<'a>>,
    /// The gradient.
    pub gradient: View<'a>,
    /// Factor for the gradient, `[1]`.
    pub factor: View<'a>,
    /// The states, in the order of [`Optimizer::kept`](crate::Optimizer::kept); they are updated.
    pub states: Vec<ViewMut<'a>>,
}
