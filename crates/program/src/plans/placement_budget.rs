//! The budget of `memory.placement = "auto"` where the configuration gives none: a rank's share of this machine's memory.
//!
//! It is filled in when the configuration is resolved, so a run folder has it, and a resumed run places chunks as before; where
//! there is less memory now, it falls (`kept_budget`).

use phalanx_cuda::DRIVER_HOST_BYTES;
use phalanx_train::RunConfig;
use phalanx_train::config::{DeviceKind, PlacementPolicy};

use crate::host::card_needs::CardNeeds;
use crate::host::elsewhere::Elsewhere;
use crate::host::{cards, machine};

/// Bytes of a unit of the `_mb` keys.
const MIB: f64 = 1_048_576.0;

/// Estimated bytes of a process beside its arena and its threads: the program, its plan, batches and windows of files.
const PROGRAM: u64 = 48 << 20;

/// Estimated bytes of each thread: its stack and its buffers for packed matrices.
const THREAD: u64 = 6 << 20;

/// Fills in `memory.device_budget_mb` for `auto`: what `memory.limit_mb` or this machine's available memory leaves each rank.
/// The memory of a simulated device, where it is given, is its budget. `ranks` share this machine.
pub fn fill(config: &mut RunConfig, ranks: usize) {
    if config.memory.placement != Some(PlacementPolicy::Auto) || config.memory.device_budget_mb.is_some() {
        return;
    }
    let simulated = config.device.kind == DeviceKind::Simulated;
    if simulated && config.device.memory_mb.is_some() {
        return;
    }
    if config.device.kind == DeviceKind::Cuda {
        return fill_card(config, ranks);
    }
    if let Some(bytes) = share(config, ranks) {
        set_device(config, bytes);
    }
}

/// Fills in the budgets of `auto` for a plan for another machine: what its ranks may take of their devices, and of host memory where
/// that is known.
pub fn fill_elsewhere(config: &mut RunConfig, elsewhere: &Elsewhere) {
    if config.memory.placement != Some(PlacementPolicy::Auto) {
        return;
    }
    if elsewhere.gives_budget(config) {
        let (bytes, _) = elsewhere.device_bytes(config);
        set_device(config, bytes);
    }
    let host = elsewhere.host_bytes.filter(|_| !config.device.kind.is_processor());
    if let (Some(bytes), None) = (host, config.memory.host_budget_mb) {
        set_host(config, bytes);
    }
}

/// The smaller of `memory.limit_mb` and each rank's share of this machine's available memory.
fn share(config: &RunConfig, ranks: usize) -> Option<u64> {
    let share = machine::available().map(|available| available.bytes / ranks as u64);
    let limit = config.memory.limit_mb.map(|mib| (mib * MIB) as u64);
    [share, limit].into_iter().flatten().min()
}

/// Fills in what a rank may take of its card, and its share of this machine's memory, or of `memory.limit_mb`, for what does not fit there.
fn fill_card(config: &mut RunConfig, ranks: usize) {
    if let Ok(bytes) = cards::share_bytes(config, ranks) {
        set_device(config, bytes);
    }
    if let (Some(bytes), None) = (share(config, ranks), config.memory.host_budget_mb) {
        set_host(config, bytes);
    }
}

/// Sets the budget of host memory so that the process of a rank with a device of its own fits `bytes`, too.
fn set_host(config: &mut RunConfig, bytes: u64) {
    let driver = if config.device.kind == DeviceKind::Cuda { DRIVER_HOST_BYTES } else { 0 };
    let whole = bytes.saturating_sub(process(config) + driver).max(1 << 20) >> 20;
    config.decide_host_budget(whole as f64);
}

/// Estimated bytes of a rank's process beside what it plans.
fn process(config: &RunConfig) -> u64 {
    let threads = config.train.threads.unwrap_or_else(|| machine::threads_per_rank(config.world_size()));
    PROGRAM + THREAD * threads as u64
}

/// Memory that a rank needs of its card beside its plan. A configuration that cannot work is refused elsewhere.
fn card_needs(config: &RunConfig) -> CardNeeds {
    let Ok(model) = config.check().and_then(|()| config.model.draft()) else { return CardNeeds::NONE };
    let tokens = [config.micro_batch_size(), config.model.seq];
    let scratch_bytes = CardNeeds::scratch(&*model, tokens, config.parallel.tensor);
    CardNeeds { communicators: config.communicators(), scratch_bytes }
}

/// Sets the budget so that a rank fits a device of `bytes`: where that is memory of the host, the process lies in it too.
fn set_device(config: &mut RunConfig, bytes: u64) {
    let whole = bytes.saturating_sub(outside(config)).max(1 << 20) >> 20;
    config.decide_device_budget(whole as f64);
}

/// Bytes of a device from which a budget of `bytes` is filled in.
pub fn device_of_budget(config: &RunConfig, bytes: u64) -> u64 {
    outside(config) + bytes.next_multiple_of(1 << 20)
}

/// Bytes that a rank needs of its device beside what a budget counts.
fn outside(config: &RunConfig) -> u64 {
    match config.device.kind {
        DeviceKind::Cpu | DeviceKind::Auto => process(config),
        DeviceKind::Cuda => card_needs(config).bytes(),
        DeviceKind::Simulated => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_becomes_the_budget_and_a_given_budget_stays() {
        let mut config = RunConfig::default();
        config.train.threads = Some(2);
        config.memory.limit_mb = Some(100.0);
        fill(&mut config, 1);
        assert_eq!(config.memory.device_budget_mb, None, "without auto there is no budget");
        config.memory.placement = Some(PlacementPolicy::Auto);
        fill(&mut config, 1);
        assert_eq!(config.memory.device_budget_mb, Some(40.0));
        config.memory.limit_mb = Some(200.0);
        fill(&mut config, 1);
        assert_eq!(config.memory.device_budget_mb, Some(40.0));
    }

    #[test]
    fn ranks_of_other_machines_take_nothing_of_this_one() {
        let budget = |ranks| {
            let mut config = RunConfig::default();
            (config.train.threads, config.parallel.data) = (Some(1), Some(8));
            config.memory.placement = Some(PlacementPolicy::Auto);
            fill(&mut config, ranks);
            config.memory.device_budget_mb
        };
        if let (Some(of_four), Some(of_eight)) = (budget(4), budget(8)) {
            assert!(of_four > 1.5 * of_eight, "{of_four} {of_eight}");
        }
    }
}
