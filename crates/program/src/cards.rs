//! Which device a run computes on: where `device.kind` is decided, and what a rank may take of its card.

use anyhow::{Context, Result, bail};
use phalanx_bench::steps::DeviceLimits;
use phalanx_cuda::{Error, Found};
use phalanx_trace::DType;
use phalanx_train::RunConfig;
use phalanx_train::config::{DeviceKind, Updates};

use crate::environment;
use crate::report::plural;

/// Decides `device.kind = "auto"`, and returns the line that says what was decided and why, or which cards the ranks have.
/// `runs`: whether the run is to start here, so that there must be the cards that it asks for.
///
/// # Errors
/// No usable card for `device.kind = "cuda"`; keys of a card for a run on the processor.
pub fn decide(config: &mut RunConfig, runs: bool) -> Result<Option<String>> {
    let kind = config.device.kind;
    if !matches!(kind, DeviceKind::Auto | DeviceKind::Cuda) {
        return Ok(None);
    }
    let found = look();
    let why = match (kind, &found) {
        (DeviceKind::Auto, _) if config.parallel.updates == Updates::Asynchronous => {
            "parallel.updates = \"asynchronous\" has no other device".to_string()
        }
        (_, Ok(found)) => {
            config.device.kind = DeviceKind::Cuda;
            return Ok(Some(ranks_on(found, config.world_size())));
        }
        (DeviceKind::Cuda, Err(error)) if runs => {
            let advice = "or compute on the processor with --set device.kind=cpu";
            bail!("device.kind = \"cuda\": {error}; {advice}");
        }
        (DeviceKind::Cuda, Err(_)) => return Ok(None),
        (_, Err(Error::NoDriver)) => "there is no CUDA driver (`phalanx doctor` says more)".to_string(),
        (_, Err(error)) => error.to_string(),
    };
    if let Some(mib) = config.device.memory_mb {
        bail!(
            "device.memory_mb = {mib} is for a card, but there is none to use: {why}; leave it out, or set device.kind"
        );
    }
    config.device.kind = DeviceKind::Cpu;
    Ok(Some(format!("computing on the processor (device.kind = \"auto\"): {why}")))
}

/// The cards of this machine.
///
/// # Errors
/// What is missing.
pub fn look() -> Result<Found, Error> {
    Found::look(&environment::cuda_options(None))
}

/// Bytes of its card that each of `ranks` may take: `device.memory_mb`, or its share.
///
/// # Errors
/// No usable card.
pub fn share_bytes(config: &RunConfig) -> Result<u64> {
    if let Some(mib) = config.device.memory_mb {
        return Ok((mib * f64::from(1 << 20)) as u64);
    }
    let found = look().context("give device.memory_mb, what a rank may take of its card")?;
    Ok(found.share_bytes(config.world_size()))
}

fn ranks_on(found: &Found, ranks: usize) -> String {
    let each = found.ranks_per_card(ranks);
    let shared = if each > 1 { format!(", up to {} on a card", plural(each, "rank")) } else { String::new() };
    format!("computing on {found}{shared}")
}

/// Rate of copies between a card and the host that predictions assume: 16 lanes of PCI Express 4.
pub const COPY_BYTES_PER_S: f64 = 25e9;

/// Floating-point operations per second in a type of the cards of so many ranks together, by published figures of their compute
/// capabilities; 0 where a card does not say how fast it runs.
pub fn peak_flops_per_s(dtype: DType, ranks: usize) -> f64 {
    let Ok(found) = look() else { return 0.0 };
    let used = found.cards.iter().take(ranks);
    used.filter_map(|card| Some(card.limits()?.flops_per_s(dtype))).sum()
}

/// What the card of a rank can do at most, by published figures.
pub fn limits_of(rank: usize) -> Option<DeviceLimits> {
    let limits = look().ok()?.card_of(rank).limits()?;
    Some(DeviceLimits {
        f32_flops_per_s: limits.f32_flops_per_s,
        half_flops_per_s: limits.half_flops_per_s,
        bytes_per_s: limits.memory_bytes_per_s,
    })
}
