//! Weights that stay packed for the products of a step, so that each is packed once between two updates.
//!
//! Whoever runs layers has a [`PackedWeights`], says how often each layer runs, and forgets a weight before it changes. A layer
//! passes its weight through [`Context::with_weight`](crate::Context::with_weight); the first product that is worth it packs the weight, and the last one
//! frees its panels. Panels are allocated like activations, so a dry run plans them. They change no bit of a result.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use phalanx_tensor::operations::PackWeight;
use phalanx_tensor::{Category, DType, Device, Layout, PackedFor, Tensor, Weight, WeightPanels};

/// The packed weights of the layers that one caller runs.
pub struct PackedWeights {
    sizes: WeightPanels,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// How often each layer runs before the weights change.
    passes: usize,
    /// By name of the weight. Tied layers may take it in different layouts.
    kept: BTreeMap<(String, PackedFor, Layout), Kept>,
}

struct Kept {
    panels: Tensor,
    /// Products that are still expected.
    left: usize,
}

/// Whether a forward without anything saved runs again in backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Again {
    /// It does not.
    Never,
    /// Only [`Layer::save`](crate::Layer::save) does.
    Saves,
    /// It does as a whole.
    Runs,
}

impl PackedWeights {
    /// None so far; weights are packed in these sizes.
    pub fn new(sizes: WeightPanels) -> PackedWeights {
        PackedWeights { sizes, state: Mutex::default() }
    }

    /// From here on, each layer runs `passes` times, with the weights that it has now.
    pub fn begin(&self, passes: usize) {
        *self.state() = State { passes, kept: BTreeMap::new() };
    }

    /// Frees the panels of a weight, which is about to change.
    pub fn forget(&self, name: &str) {
        self.state().kept.retain(|(kept, ..), _| kept != name);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As [`Context::with_weight`](crate::Context::with_weight).
    pub(crate) fn with(
        &self,
        device: &Device,
        (name, w): (&str, Weight),
        (product, uses): (PackedFor, usize),
        run: impl FnOnce(Weight),
    ) {
        let mut state = self.state();
        let (key, left) = ((name.to_string(), product, w.layout), state.passes * uses);
        if !state.kept.contains_key(&key) {
            if left < 2 {
                return run(w);
            }
            let shape = [self.sizes.elements(product, w.in_out())];
            let mut panels = device.alloc(DType::F32, shape, Category::Workspace, PACKED_WEIGHT);
            device.run(PackWeight { w, product, to: panels.view_mut() });
            state.kept.insert(key.clone(), Kept { panels, left });
        }
        let kept = state.kept.get_mut(&key).expect("inserted above");
        run(w.with_panels(kept.panels.view()));
        kept.left -= 1;
        if kept.left == 0 {
            state.kept.remove(&key);
        }
    }
}

/// The name of panels in plans.
pub const PACKED_WEIGHT: &str = "packed_weight";
