//! An optimizer of the caller's own: a function of numbers in host memory, which the engine applies wherever they lie.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use phalanx_tensor::{Device, NORM_BLOCK, OwnOperation, ViewMut};

use crate::extent::{Extent, StateSpec, UpdatedParameter};
use crate::update::Update;

/// The numbers of one update, and its parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpdateStep<'a> {
    /// Number of this update, from 1; steps that were skipped do not count.
    pub number: u64,
    /// Learning rate of this update, that of the parameter's group.
    pub lr: f32,
    /// Weight decay of the parameter's group, if it has one of its own.
    pub weight_decay: Option<f32>,
    /// The parameter: its kind says whether weight decay acts on it.
    pub of: &'a UpdatedParameter,
}

/// An optimizer of the caller's own.
///
/// It says how much of a parameter it must see at a time. The engine cuts parameters nowhere else, so that every ZeRO stage, chunk
/// size and placement gives the same bits.
pub trait UpdateRule: Send + Sync {
    /// Part of a parameter that an update needs. By default, any elements.
    fn extent(&self, _: &UpdatedParameter) -> Extent {
        Extent::Elements
    }

    /// The states that it keeps of a parameter.
    fn states(&self, of: &UpdatedParameter) -> Vec<StateSpec>;

    /// Updates a range of a parameter and its states, in the order of [`UpdateRule::states`]. The gradient is the mean over the global
    /// batch, clipped; it is as long as the parameters. A range has any elements, or blocks from the first of one on, or the whole
    /// parameter, and of each state what belongs to it.
    fn update(&self, step: &UpdateStep, parameters: &mut [f32], gradient: &[f32], states: &mut [&mut [f32]]);
}

impl fmt::Debug for dyn UpdateRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UpdateRule")
    }
}

/// Applies `rule` on `device`.
pub(crate) fn apply(rule: Arc<dyn UpdateRule>, device: &Device, update: Update) {
    let Update { number, lr, weight_decay, of, parameters: mut p, rounded, gradient, factor, scaled, states } =
        update;
    let mut call = OwnOperation::update("own_optimizer", p.reborrow(), gradient).read("factor", "", factor);
    for state in states {
        call = call.write("state", "", state);
    }
    let (of, extent) = (Arc::clone(of), rule.extent(of));
    assert_eq!(extent == Extent::Whole, scaled.is_some(), "`{}`: memory for a whole gradient", of.name);
    if let Some(scaled) = scaled {
        call = call.write("scaled", "", scaled);
    }
    call.run_on_all(device, move |reads, writes| {
        let (gradient, factor) = (reads[0], reads[1].as_slice::<f32>()[0]);
        let mut slices: Vec<&mut [f32]> = writes.into_iter().map(ViewMut::into_slice).collect();
        let last = if extent == Extent::Whole { slices.pop() } else { None };
        let (parameters, states) = slices.split_first_mut().expect("the parameters come first");
        let step = UpdateStep { number, lr, weight_decay, of: &of };
        let length = parameters.len();
        let (elements, block) = match extent {
            Extent::Elements => (NORM_BLOCK, 1),
            Extent::Blocks(block) => (NORM_BLOCK, block),
            Extent::Whole => (length, length),
        };
        let mut few = [0.0; NORM_BLOCK];
        let scaled = if extent == Extent::Whole { last.expect("it came last") } else { &mut few[..] };
        for start in (0..length).step_by(elements) {
            let here = start..(start + elements).min(length);
            let scaled = &mut scaled[..here.len()];
            gradient.read_f32(start, scaled);
            scaled.iter_mut().for_each(|g| *g *= factor);
            let mut states: Vec<&mut [f32]> =
                states.iter_mut().map(|state| part(state, &here, length, block)).collect();
            rule.update(&step, &mut parameters[here.clone()], scaled, &mut states);
        }
    });
    if let Some(rounded) = rounded {
        device.convert(p.as_view(), rounded);
    }
}

/// The part of a state that belongs to the elements `here` of `length`.
fn part<'a>(state: &'a mut [f32], here: &Range<usize>, length: usize, block: usize) -> &'a mut [f32] {
    match state.len() {
        _ if here.len() == length => state,
        numbers if numbers == length => &mut state[here.clone()],
        _ => &mut state[here.start / block..here.end.div_ceil(block)],
    }
}
