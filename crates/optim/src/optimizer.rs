//! Optimizers: how a range of a parameter is updated from its gradient.

use std::sync::Arc;

use phalanx_tensor::{AdamW, AdamWUpdate, Device, Sgd, SgdUpdate, ViewMut};

use crate::extent::{Extent, KeptState, RuleError, StateSpec, UpdatedParameter};
use crate::own::{self, UpdateRule};
use crate::update::Update;

/// An optimizer with its hyperparameters.
#[derive(Clone, Debug)]
pub enum Optimizer {
    /// Adam with decoupled weight decay (arXiv 1711.05101), as `torch.optim.AdamW`.
    AdamW {
        /// Decay of the first moment.
        beta1: f32,
        /// Decay of the second moment.
        beta2: f32,
        /// Added to the root of the second moment.
        eps: f32,
        /// Weight decay of matrices; vectors have none.
        weight_decay: f32,
    },
    /// Gradient descent with momentum, as `torch.optim.SGD`.
    Sgd {
        /// Decay of the velocity.
        momentum: f32,
        /// Weight decay of matrices; vectors have none.
        weight_decay: f32,
    },
    /// An optimizer of the caller's own.
    Own(Arc<dyn UpdateRule>),
}

impl Optimizer {
    /// Part of a parameter that an update needs at a time.
    pub fn extent(&self, of: &UpdatedParameter) -> Extent {
        match self {
            Optimizer::AdamW { .. } | Optimizer::Sgd { .. } => Extent::Elements,
            Optimizer::Own(rule) => rule.extent(of),
        }
    }

    /// The states that it keeps of a parameter.
    ///
    /// # Errors
    /// A rule of the caller's own that contradicts itself.
    pub fn kept(&self, of: &UpdatedParameter) -> Result<Vec<KeptState>, RuleError> {
        // PyTorch's names.
        let states = match self {
            Optimizer::AdamW { .. } => {
                ["exp_avg", "exp_avg_sq"].map(|name| StateSpec::like(name, of)).to_vec()
            }
            Optimizer::Sgd { .. } => vec![StateSpec::like("momentum_buffer", of)],
            Optimizer::Own(rule) => rule.states(of),
        };
        of.kept(self.extent(of), states)
    }

    /// Updates parameters and states.
    pub fn apply(&self, device: &Device, update: Update) {
        if let Optimizer::Own(rule) = self {
            return own::apply(Arc::clone(rule), device, update);
        }
        let Update {
            number,
            lr,
            weight_decay: own,
            of,
            parameters: p,
            rounded,
            gradient: g,
            factor,
            states,
            ..
        } = update;
        let decay = |of_all: f32| own.unwrap_or(if of.kind.decays() { of_all } else { 0.0 });
        match *self {
            Optimizer::Own(_) => unreachable!("applied above"),
            Optimizer::AdamW { beta1, beta2, eps, weight_decay } => {
                let [m, v]: [ViewMut; 2] = states.try_into().expect("AdamW has two states");
                let weight_decay = decay(weight_decay);
                let numbers = AdamW { lr, beta1, beta2, eps, weight_decay, step: number };
                device.run(AdamWUpdate {
                    step: numbers,
                    p,
                    g,
                    moments: [m, v],
                    gradient_scale: factor,
                    rounded,
                });
            }
            Optimizer::Sgd { momentum, weight_decay } => {
                let [velocity]: [ViewMut; 1] = states.try_into().expect("SGD has one state");
                let weight_decay = decay(weight_decay);
                let numbers = Sgd { lr, momentum, weight_decay, first: number == 1 };
                device.run(SgdUpdate { step: numbers, p, g, velocity, gradient_scale: factor, rounded });
            }
        }
    }
}
