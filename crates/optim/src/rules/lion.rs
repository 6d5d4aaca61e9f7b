//! Lion (Chen et al., arXiv 2302.06675): the sign of a momentum. One state for each element, half of what AdamW keeps.
//!
//! ```text
//! p <- p (1 - lr wd)   u = sign(b1 m + (1 - b1) g)   p <- p - lr u   m <- b2 m + (1 - b2) g        sign 0 = 0
//! ```

use crate::extent::{StateSpec, UpdatedParameter};
use crate::own::{UpdateRule, UpdateStep};

/// Lion, as lion-pytorch.
pub struct Lion {
    /// Share of the momentum in an update.
    pub beta1: f32,
    /// Decay of the momentum.
    pub beta2: f32,
    /// Weight decay of matrices; vectors have none.
    pub weight_decay: f32,
}

impl UpdateRule for Lion {
    fn states(&self, of: &UpdatedParameter) -> Vec<StateSpec> {
        vec![StateSpec::like("exp_avg", of)]
    }

    fn update(&self, step: &UpdateStep, p: &mut [f32], g: &[f32], states: &mut [&mut [f32]]) {
        let [momentum] = states else { panic!("Lion has one state") };
        let (&Lion { beta1, beta2, .. }, lr) = (self, step.lr);
        let kept = 1.0 - lr * super::decay(step, self.weight_decay);
        for ((p, g), m) in p.iter_mut().zip(g).zip(momentum.iter_mut()) {
            let u = beta1 * *m + (1.0 - beta1) * g;
            let sign = f32::from(u > 0.0) - f32::from(u < 0.0);
            *p = *p * kept - lr * sign;
            *m = beta2 * *m + (1.0 - beta2) * g;
        }
    }
}
