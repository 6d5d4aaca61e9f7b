//! SGD with momentum in PyTorch's form, one pass over memory: 16 bytes a parameter (p and velocity read and
//! written), and those of g and of the rounded copy: 20 in f32, 20 with gradients and copy of 16 bits.

use phalanx_simd::{Lanes, vectorized};
use phalanx_tensor::arguments::Sgd;
use phalanx_tensor::{View, ViewMut};

use crate::Cpu;
use crate::elementwise::over_updates;
use crate::shards::Shards;

/// `g' = g * gradient_scale + weight_decay * p; v = momentum * v + g' (g' itself in the first step); p -= lr * v`.
/// Updates p and velocity in place, and writes p to `rounded` in its type.
pub(crate) fn sgd(
    cpu: &Cpu,
    step: Sgd,
    p: ViewMut,
    g: View,
    velocity: ViewMut,
    gradient_scale: f32,
    rounded: Option<ViewMut>,
) {
    let velocity = Shards::new(velocity.into_slice());
    over_updates(cpu, p, g, rounded, |range, p, g| {
        // SAFETY: ranges are disjoint.
        let velocity = unsafe { velocity.piece(range) };
        update(cpu.isa, step, p, g, velocity, gradient_scale);
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
