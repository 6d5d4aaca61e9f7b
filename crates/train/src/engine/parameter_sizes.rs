//! Sizes of parameters, from which chunks are laid out.

use phalanx_layers::{Network, ParameterSpec};
use phalanx_optim::{Extent, Optimizer};
use phalanx_parallel::zero::updated;
use phalanx_plan::ParameterSize;

/// The sizes of the parameters of a network.
pub(crate) fn sizes(optimizer: &Optimizer, network: &Network) -> Vec<ParameterSize> {
    network.parameters.iter().map(|p| size(optimizer, p)).collect()
}

/// The size of a parameter of a network.
pub(crate) fn size(optimizer: &Optimizer, p: &ParameterSpec) -> ParameterSize {
    let whole = p.trained && p.members().iter().any(|p| optimizer.extent(&updated(p)) == Extent::Whole);
    let (trained, kept) = (p.trained, p.kept);
    ParameterSize { trained, whole, kept, ..ParameterSize::new(&p.name, p.elements() as u64) }
}

/// Number of elements that a parameter takes in the layout: those of the largest rank's part.
pub(crate) fn reserved(spec: &ParameterSpec) -> u64 {
    let largest = |member: &ParameterSpec| {
        let here = member.elements() as u64;
        member.part.as_ref().map_or(here, |part| {
            let whole: usize = part.whole.iter().product();
            let even = (whole as u64).is_multiple_of(part.stripe.run * part.stripe.ranks);
            if even { here } else { part.stripe.run }
        })
    };
    spec.members().iter().map(largest).sum()
}
