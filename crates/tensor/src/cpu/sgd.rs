//! SGD with momentum in PyTorch's form, one pass over memory: 20 bytes a parameter.

use super::lanes::Lanes;
use super::shards::Shards;
use super::simd::vectorized;
use super::{Cpu, GRAIN};
use crate::kernels::Sgd;

/// `g' = g * gradient_scale + weight_decay * p; v = momentum * v + g' (g' itself in the first step);
/// p -= lr * v`. p and velocity are updated in place.
pub(super) fn sgd(cpu: &Cpu, step: Sgd, p: &mut [f32], g: &[f32], velocity: &mut [f32], gradient_scale: f32) {
    let (p, velocity) = (Shards::new(p), Shards::new(velocity));
    cpu.over(g.len(), GRAIN, |range| {
        // SAFETY: ranges are disjoint.
        let (p, velocity) = unsafe { (p.piece(range.clone()), velocity.piece(range.clone())) };
        update(cpu.isa, step, p, &g[range], velocity, gradient_scale);
    });
}

vectorized!(fn update(step: Sgd, p: &mut [f32], g: &[f32], velocity: &mut [f32], scale: f32) = update_body);
#[inline(always)]
fn update_body<L: Lanes>(step: Sgd, p: &mut [f32], g: &[f32], velocity: &mut [f32], scale: f32) {
    for ((p, g), v) in p.iter_mut().zip(g).zip(velocity) {
        let g = L::fused(step.weight_decay, *p, *g * scale);
        let new = if step.first { g } else { L::fused(step.momentum, *v, g) };
        *p = L::fused(-step.lr, new, *p);
        *v = new;
    }
}
