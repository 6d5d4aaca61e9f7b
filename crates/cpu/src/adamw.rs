//! AdamW (Loshchilov and Hutter, arXiv 1711.05101) with PyTorch's arithmetic, one pass over memory: 24 bytes
//! a parameter (p, m, v read and written), and those of g and of the rounded copy: 28 in f32, 28 with
//! gradients and copy of 16 bits.

use phalanx_simd::{Lanes, vectorized};
use phalanx_tensor::arguments::AdamW;
use phalanx_tensor::{View, ViewMut};

use crate::Cpu;
use crate::elementwise::over_updates;
use crate::shards::Shards;

/// The step's numbers as f32, rounded once from f64 as PyTorch does.
#[derive(Clone, Copy)]
struct Factors {
    gradient: f32,
    keep: f32,
    blend1: f32,
    beta2: f32,
    blend2: f32,
    step_size: f32,
    root_correction2: f32,
    eps: f32,
}

/// Updates p, m and v in place from `g * gradient_scale`, and writes p to `rounded` in its type.
pub(crate) fn adamw(
    cpu: &Cpu,
    step: AdamW,
    p: ViewMut,
    g: View,
    [m, v]: [ViewMut; 2],
    gradient_scale: f32,
    rounded: Option<ViewMut>,
) {
    let (lr, beta1, beta2) = (f64::from(step.lr), f64::from(step.beta1), f64::from(step.beta2));
    let power = |beta: f64| beta.powf(step.step as f64);
    let factors = Factors {
        gradient: gradient_scale,
        keep: (1.0 - lr * f64::from(step.weight_decay)) as f32,
        blend1: (1.0 - beta1) as f32,
        beta2: step.beta2,
        blend2: (1.0 - beta2) as f32,
        step_size: (lr / (1.0 - power(beta1))) as f32,
        root_correction2: (1.0 - power(beta2)).sqrt() as f32,
        eps: step.eps,
    };
    let (m, v) = (Shards::new(m.into_slice()), Shards::new(v.into_slice()));
    over_updates(cpu, p, g, rounded, |range, p, g| {
        // SAFETY: ranges are disjoint.
        let (m, v) = unsafe { (m.piece(range.clone()), v.piece(range)) };
        update(cpu.isa, factors, p, g, m, v);
    });
}

vectorized!(fn update(f: Factors, p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32]) = update_body);
#[inline(always)]
fn update_body<L: Lanes>(f: Factors, p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32]) {
    for (((p, g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
        let g = *g * f.gradient;
        let decayed = *p * f.keep;
        let new_m = L::fused(f.blend1, g - *m, *m);
        let new_v = L::fused(f.blend2 * g, g, *v * f.beta2);
        let denominator = new_v.sqrt() / f.root_correction2 + f.eps;
        *p = decayed - f.step_size * (new_m / denominator);
        *m = new_m;
        *v = new_v;
    }
}
