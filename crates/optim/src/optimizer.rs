//! Optimizers: how a flat range of parameters is updated from its gradient.

use phalanx_tensor::{AdamW, AdamWUpdate, Device, Sgd, SgdUpdate, View, ViewMut};

/// An optimizer with its hyperparameters.
#[derive(Clone, Copy, Debug, PartialEq)]
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
}

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
    /// The states, in the order of [`Optimizer::states`]; they are updated.
    pub states: Vec<ViewMut<'a>>,
}

impl Optimizer {
    /// PyTorch's names of the states; each state is as large as the parameters.
    pub fn states(&self) -> &'static [&'static str] {
        match self {
            Optimizer::AdamW { .. } => &["exp_avg", "exp_avg_sq"],
            Optimizer::Sgd { .. } => &["momentum_buffer"],
        }
    }

    /// Updates parameters and states.
    pub fn apply(&self, device: &Device, update: Update) {
        let Update { number, lr, decays, parameters: p, rounded, gradient: g, factor, states } = update;
        let decay = |weight_decay: f32| if decays { weight_decay } else { 0.0 };
        match *self {
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
