//! An optimizer of the caller's own: a function of elements, which the engine applies wherever they lie.

use std::fmt;
use std::sync::Arc;

use phalanx_tensor::{Device, OwnOperation, ViewMut};

use crate::update::Update;

/// Elements of a gradient that are converted at a time.
const BLOCK: usize = 4096;

/// The numbers of one update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpdateStep {
    /// Number of this update, from 1; steps that were skipped do not count.
    pub number: u64,
    /// Learning rate of this update.
    pub lr: f32,
    /// Whether weight decay acts on these parameters: on matrices, not on vectors.
    pub decays: bool,
}

/// An optimizer of the caller's own.
///
/// It works element by element: element i of the parameters and of the states depends only on element i of all of them
/// and of the gradient. So the engine may cut parameters anywhere, and every ZeRO stage gives the same bits.
pub trait UpdateRule: Send + Sync {
    /// Names of the states in checkpoints; each state is as large as the parameters, f32, and begins with zeros.
    fn states(&self) -> &'static [&'static str];

    /// Updates some parameters and their states, in the order of [`UpdateRule::states`]. The gradient is the mean over
    /// the global batch, clipped. All slices have the same length.
    fn update(&self, step: &UpdateStep, parameters: &mut [f32], gradient: &[f32], states: &mut [&mut [f32]]);
}

impl fmt::Debug for dyn UpdateRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UpdateRule with states {:?}", self.states())
    }
}

/// Applies `rule` on `device`.
pub(crate) fn apply(rule: Arc<dyn UpdateRule>, device: &Device, update: Update) {
    let Update { number, lr, decays, parameters: mut p, rounded, gradient, factor, states } = update;
    let step = UpdateStep { number, lr, decays };
    let mut call = OwnOperation::update("own_optimizer", p.reborrow(), gradient).read("factor", "", factor);
    for state in states {
        call = call.write("state", "", state);
    }
    call.run_on_all(device, move |reads, writes| {
        let (gradient, factor) = (reads[0], reads[1].as_slice::<f32>()[0]);
        let mut slices: Vec<&mut [f32]> = writes.into_iter().map(ViewMut::into_slice).collect();
        let (parameters, states) = slices.split_first_mut().expect("the parameters come first");
        let mut scaled = [0.0; BLOCK];
        for start in (0..parameters.len()).step_by(BLOCK) {
            let here = start..(start + BLOCK).min(parameters.len());
            let scaled = &mut scaled[..here.len()];
            gradient.read_f32(here.start, scaled);
            scaled.iter_mut().for_each(|g| *g *= factor);
            let mut states: Vec<&mut [f32]> = states.iter_mut().map(|s| &mut s[here.clone()]).collect();
            rule.update(&step, &mut parameters[here], scaled, &mut states);
        }
    });
    if let Some(rounded) = rounded {
        device.convert(p.as_view(), rounded);
    }
}
