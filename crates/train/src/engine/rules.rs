//! Checks that the optimizer's rule fits the parameters that the ranks of a run hold.

use phalanx_layers::{Network, ParameterSpec};
use phalanx_optim::{Extent, Optimizer, Spread};
use phalanx_parallel::zero::updated;
use phalanx_plan::Coordinates;

use crate::engine::rule_mismatch::RuleMismatch;
use crate::engine::spec::Spec;

impl Spec {
    /// Checks the rule with the parameters of the whole network, and with the parts of every tensor-parallel rank where it needs more
    /// than elements.
    pub(crate) fn check_rule(&self, whole: &Network) -> Result<(), RuleMismatch> {
        let (optimizer, axes) = (&self.update.optimizer, self.mesh.axes);
        check_network(optimizer, whole)?;
        let mut trained = whole.members().filter(|p| p.trained);
        if axes.tensor == 1 || trained.all(|p| optimizer.extent(&updated(p)) == Extent::Elements) {
            return Ok(());
        }
        (0..axes.tensor).try_for_each(|tensor| {
            let rank = axes.rank(Coordinates { pipeline: 0, data: 0, tensor });
            check_network(optimizer, &self.network_of(rank))
        })
    }
}

fn check_network(optimizer: &Optimizer, network: &Network) -> Result<(), RuleMismatch> {
    for joined in network.parameters.iter().filter(|p| p.trained) {
        let mut before: usize = 0;
        for parameter in joined.members() {
            check_parameter(optimizer, parameter)?;
            if let Extent::Blocks(block) = optimizer.extent(&updated(parameter))
                && !before.is_multiple_of(block)
            {
                let parameter = parameter.name.clone();
                return Err(RuleMismatch::Joined { parameter, block, before });
            }
            before += parameter.elements();
        }
    }
    Ok(())
}

fn check_parameter(optimizer: &Optimizer, spec: &ParameterSpec) -> Result<(), RuleMismatch> {
    let of = updated(spec);
    optimizer.kept(&of)?;
    let (stripe, parameter) = (spec.stripe(), || spec.name.clone());
    match optimizer.extent(&of) {
        _ if stripe.is_whole() => Ok(()),
        Extent::Whole => Err(RuleMismatch::Part { parameter: parameter(), ranks: stripe.ranks }),
        Extent::Blocks(block) if !stripe.run.is_multiple_of(block as u64) => {
            Err(RuleMismatch::Block { parameter: parameter(), block, ranks: stripe.ranks, run: stripe.run })
        }
        Extent::Blocks(_) | Extent::Elements => Ok(()),
    }
}

/// Numbers of optimizer states for each trained element of the whole model, rounded down.
pub(crate) fn states_per_element(optimizer: &Optimizer, whole: &Network) -> u64 {
    let mut sums = [0; 2];
    for parameter in whole.members().filter(|p| p.trained).map(updated) {
        let kept = optimizer.kept(&parameter).expect("the rule was checked with the whole model");
        let numbers = |spread: Spread| spread.numbers(parameter.elements()) as u64;
        sums[0] += kept.iter().map(|kept| numbers(kept.spread)).sum::<u64>();
        sums[1] += parameter.elements() as u64;
    }
    sums[0].checked_div(sums[1]).unwrap_or(0)
}
