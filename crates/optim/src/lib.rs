//! Optimizers, learning rate schedules and loss scales. They work on ranges of parameters and numbers; they know no ranks,
//! chunks or stages.
#![forbid(unsafe_code)]

mod extent;
pub mod loss_scale;
pub mod optimizer;
pub mod own;
pub mod rules;
pub mod schedule;
mod update;

pub use extent::{Extent, KeptState, PARAMETERS, RuleError, Spread, StateSpec, UpdatedParameter};
pub use loss_scale::{LossScale, LossScaleState, LossScaling, Verdict};
pub use optimizer::Optimizer;
pub use own::{UpdateRule, UpdateStep};
pub use schedule::{CountedSteps, LearningRate, Restarted, Schedule};
pub use update::{OwnRates, RatesByName, Update};
