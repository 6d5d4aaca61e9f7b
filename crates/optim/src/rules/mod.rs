//! Optimizers that are rules of updates like those of users ([`UpdateRule`](crate::UpdateRule)): a function of numbers, which the host processor
//! computes.

mod adafactor;
mod lion;

pub use adafactor::Adafactor;
pub use lion::Lion;

use crate::own::UpdateStep;

/// Weight decay of a step: that of the parameter's group, or `of_all` of what decays.
fn decay(step: &UpdateStep, of_all: f32) -> f32 {
    step.weight_decay.unwrap_or(if step.of.kind.decays() { of_all } else { 0.0 })
}
