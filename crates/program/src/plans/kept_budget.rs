//! Keeps a run within memory where the program has chosen the budgets of `memory.placement = "auto"`.
//!
//! A budget counts what chunks and activations take, so it is that memory less an estimate of the rest. The plan knows the rest: buffers
//! to exchange data with other hosts, checksums of what lies on disk, tables of allocations. Where both together do not fit, the budget falls by what is
//! missing, and the run is planned again. A budget that the user gave stays.

use anyhow::Result;
use phalanx_train::config::DeviceKind;

use crate::plans::budgets::Budget;
use crate::plans::planned::{MakePlan, Planned};

/// Plans until one fits. Other placements need other windows and tables, so that one change may not do.
const TRIES: usize = 6;

/// Bytes of a unit of the `_mb` keys, and the units in which budgets fall.
const MIB: f64 = 1_048_576.0;
const KIB: u64 = 1024;

/// Lowers the budgets that were decided, now or when a resumed run began, until `planned` fits the budgets that `budgets` gives, or
/// nothing more can leave. The new plans are made by `make`. Where it cannot fit, returns the last plan that could be made: whoever
/// checks it says what is missing.
///
/// # Errors
/// When the engine cannot be planned.
pub fn keep(
    mut planned: Planned,
    budgets: impl Fn(&Planned) -> Vec<Budget>,
    make: MakePlan,
) -> Result<Planned> {
    for _ in 0..TRIES {
        let Some((of_host, missing)) = missing(&planned, &budgets(&planned)) else { break };
        let config = &planned.config;
        let (is_decided, used) = match of_host {
            true => {
                let arena = planned.plan.ranks.iter().map(|rank| rank.host.arena_bytes).max();
                (config.is_decided("memory.host_budget_mb"), arena)
            }
            false => (config.is_decided("memory.device_budget_mb"), Some(planned.plan.arena_bytes_max())),
        };
        let left = used.unwrap_or(0).saturating_sub(missing) / KIB * KIB;
        if !is_decided || left == 0 {
            break;
        }
        let lowered = planned.again(
            |config| {
                match of_host {
                    true => config.decide_host_budget(left as f64 / MIB),
                    // What the headroom leaves must be in it.
                    false => config.decide_device_budget(left as f64 / (1.0 - config.memory.headroom) / MIB),
                }
            },
            make,
        );
        match lowered {
            Ok(lowered) => planned = lowered,
            // No placement fits.
            Err(_) => break,
        }
    }
    Ok(planned)
}

/// Returns whether the exceeded budget is one of host memory beside that of a card, and the bytes that a rank must give up; `None` if none
/// is exceeded.
fn missing(planned: &Planned, budgets: &[Budget]) -> Option<(bool, u64)> {
    let exceeded = budgets.iter().find(|budget| !budget.fits(planned))?;
    let has_card = planned.config.device.kind == DeviceKind::Cuda;
    let of_host = has_card && matches!(exceeded, Budget::Rank(_) | Budget::Machine(_));
    let of_host = of_host || matches!(exceeded, Budget::Host(_));
    let ranks = if matches!(exceeded, Budget::Machine(_)) { planned.ranks_here().max(1) } else { 1 };
    Some((of_host, (exceeded.needed(planned) - exceeded.bytes()).div_ceil(ranks as u64)))
}

#[cfg(test)]
mod tests {
    use phalanx_collectives::{Connections, Hosts, Wire};
    use phalanx_models::Gpt2;
    use phalanx_train::config::PlacementPolicy;
    use phalanx_train::{ResolvedConfig, RunConfig, RunPlan};

    use super::*;
    use crate::plans::budgets;
    use crate::plans::placement_budget;
    use crate::plans::planned::Across;

    /// A run under `memory.limit_mb`, as a command plans it: on so many hosts of a rank each, with so many connections between two.
    fn planned(limit_mb: f64, hosts: usize, streams: usize) -> Planned {
        let mut config = RunConfig::default();
        config.model.seq = 16;
        (config.batch.global, config.train.threads) = (hosts, Some(1));
        (config.parallel.data, config.parallel.zero) = (Some(hosts), 2);
        let memory = &mut config.memory;
        (memory.placement, memory.limit_mb) = (Some(PlacementPolicy::Auto), Some(limit_mb));
        (memory.nvme_path, memory.buffer_mb) = (Some(std::env::temp_dir().as_path().into()), 0.25);
        memory.nvme_checksums = true;
        placement_budget::fill(&mut config, 1);
        let model = Gpt2 { layers: 8, hidden: 256, heads: 4, vocab: 256, positions: 16, ..Gpt2::default() };
        let connections = Connections { wire: Wire::Tcp, streams, encrypted: true };
        let across = Across { hosts: Hosts::new(vec![1; hosts]), ranks_of_a_machine: 1, connections };
        let planned = Planned::new(ResolvedConfig::new(config).unwrap(), model.into(), 0).unwrap();
        planned.across(Some(across))
    }

    /// Buffers for other hosts are not in the estimate of the budget: chunks make room for them.
    #[test]
    fn what_a_plan_lists_beside_its_arena_fits_a_limit_too() {
        let (limit_mb, hosts, streams) = (135.0, 8, 16);
        let first = planned(limit_mb, hosts, streams);
        let decided =
            ["memory.device_budget_mb", "memory.host_budget_mb"].map(|key| first.config.is_decided(key));
        assert_eq!(decided, [true, false]);
        let limit = |planned: &Planned| budgets::limit(planned).into_iter().collect::<Vec<Budget>>();
        let between = first.between_hosts_bytes().unwrap();
        assert!(between > 32 << 20 && !limit(&first)[0].fits(&first), "{between} bytes for other hosts");
        let kept = keep(first.clone(), limit, RunPlan::without_offsets).unwrap();
        let budget = &limit(&kept)[0];
        assert!(budget.fits(&kept), "{} of {}", budget.needed(&kept), budget.bytes());
        let [before, after] = [&first, &kept].map(|planned| planned.plan.of(0).disk.arena_bytes);
        assert!(before < after, "{before} and {after} bytes on disk");
        // A budget that the user gave stays, and the check of the run refuses it.
        let given = |config: &mut RunConfig| config.recorded.decided.clear();
        let first = first.again(given, RunPlan::without_offsets).unwrap();
        let kept = keep(first.clone(), limit, RunPlan::without_offsets).unwrap();
        assert_eq!(kept.config.memory.device_budget_mb, first.config.memory.device_budget_mb);
    }
}
