//! The tensors and numbers of one update.

use std::collections::BTreeMap;
use std::sync::Arc;

use phalanx_tensor::{View, ViewMut};

use crate::extent::UpdatedParameter;

/// Rates of a parameter that replace the optimizer's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OwnRates {
    /// Its learning rate, as a factor of the schedule's.
    pub lr_factor: f64,
    /// Its weight decay; None for that of the optimizer, which depends on its kind.
    pub weight_decay: Option<f32>,
}

impl Default for OwnRates {
    fn default() -> Self {
        OwnRates { lr_factor: 1.0, weight_decay: None }
    }
}

/// The rates of parameters by full name; others have those of the optimizer.
pub type RatesByName = BTreeMap<String, OwnRates>;

/// One update of a range of a parameter. All tensors are flat but where its extent is [`Extent::Whole`](crate::Extent::Whole): there
/// they have the shapes of the parameter and of its states.
pub struct Update<'a> {
    /// Number of this update, from 1; steps that were skipped do not count.
    pub number: u64,
    /// Learning rate of this update, that of the parameter's group.
    pub lr: f32,
    /// Weight decay of the parameter's group, if it has one of its own; else the optimizer's, which depends on the parameter's kind.
    pub weight_decay: Option<f32>,
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
    /// Memory for the gradient times its factor, f32, as long as the parameter: where an optimizer of the caller's own takes all of it.
    pub scaled: Option<ViewMut<'a>>,
    /// The states, in the order of [`Optimizer::kept`](crate::Optimizer::kept); they are updated.
    pub states: Vec<ViewMut<'a>>,
}
