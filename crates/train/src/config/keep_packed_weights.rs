//! `memory.keep_packed_weights`: whether weights stay packed from product to product, and what that needs.

use phalanx_cpu::Options;
use phalanx_layers::packed::PACKED_WEIGHT;
use phalanx_tensor::WeightPanels;
use phalanx_trace::{Event, Phase};
use serde::{Deserialize, Serialize};

use super::check::refuse;
use super::{ConfigError, DeviceKind, KernelSet, RunConfig, Updates};

/// Whether the weights of products stay packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KeepPacked {
    /// Each product packs its weight.
    #[default]
    Off,
    /// Where the kernels pack weights, parameters stay in device memory, no `placement` fills a budget, and the plan fits the
    /// memory of a rank.
    Auto,
    /// They do. A run in which they cannot is refused.
    On,
}

/// What a run plans for weights that stay packed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptPacked {
    /// The sizes of packed weights; None where none stays packed.
    pub sizes: Option<WeightPanels>,
    /// For `auto`: the largest arena with which they do.
    pub arena_bytes_limit: Option<u64>,
}

impl KeptPacked {
    /// Whether an arena is so large that no weight should stay packed.
    pub(crate) fn is_refused_by(self, arena_bytes: u64) -> bool {
        self.sizes.is_some() && self.arena_bytes_limit.is_some_and(|limit| arena_bytes > limit)
    }
}

impl RunConfig {
    pub(super) fn check_keep_packed_weights(&self) -> Result<(), ConfigError> {
        match self.why_not_packed() {
            Some(why) if self.memory.keep_packed_weights == KeepPacked::On => {
                Err(refuse("memory.keep_packed_weights", "\"on\"", why))
            }
            _ => Ok(()),
        }
    }

    fn why_not_packed(&self) -> Option<&'static str> {
        if self.parallel.zero == 3 {
            return Some(
                "needs parallel.zero = 0, 1 or 2: under 3 a block's parameters are here only while it computes, and panels \
                 that stay would be another copy of them",
            );
        }
        if self.device.kind == DeviceKind::Cuda {
            return Some("is for processors: kernels of cards read weights as they lie; leave it out");
        }
        (self.parallel.updates == Updates::Asynchronous)
            .then_some("works with synchronous updates only: leave out parallel.updates")
    }

    /// What a run of this configuration plans for weights that stay packed.
    pub(crate) fn kept_packed(&self) -> KeptPacked {
        let keep = match self.memory.keep_packed_weights {
            KeepPacked::Off => false,
            KeepPacked::Auto => self.why_not_packed().is_none() && self.memory.placement.is_none(),
            KeepPacked::On => true,
        };
        let limit = self.memory.limit_mb.map(|mib| (mib * f64::from(1 << 20)) as u64);
        KeptPacked {
            sizes: keep.then(|| self.weight_panels()),
            arena_bytes_limit: limit.filter(|_| self.memory.keep_packed_weights == KeepPacked::Auto),
        }
    }

    /// The sizes of packed weights for the kernels of the run; where these are not decided, for the fastest of this processor.
    fn weight_panels(&self) -> WeightPanels {
        let fastest = Options::new(1);
        let options = match self.device.kernels.set() {
            Some(KernelSet { isa, tiles }) => Options { isa, tiles, ..fastest },
            None => fastest,
        };
        let options = options.with_products(self.precision.product_method()).unwrap_or(options);
        options.panels(self.precision.compute.into())
    }
}

/// Bytes of the weights that are packed in a phase to be used again.
pub(crate) fn packed_bytes(phase: &Phase) -> u64 {
    let bytes = |event: &Event| match event {
        Event::Alloc { name, bytes, .. } if *name == PACKED_WEIGHT => *bytes,
        _ => 0,
    };
    phase.events.iter().map(bytes).sum()
}
