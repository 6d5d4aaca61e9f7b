//! Which device a run computes on: where `device.kind` is decided, and what a rank may take of its card.

use anyhow::{Context, Result, bail};
use phalanx_bench::steps::DeviceLimits;
use phalanx_cuda::{Error, Found, nccl_version};
use phalanx_plan::trace::DType;
use phalanx_train::RunConfig;
use phalanx_train::config::{CUDA_HEAD_MAX, Communication, DeviceKind, Products, Updates};

use crate::host::environment;
use phalanx_drawing::report::plural;

/// Decides `device.kind = "auto"`, and returns the line that says what was decided and why, or which cards the ranks have; none
/// for a machine without GPUs. `runs`: whether the run is to start here, so that there must be the cards that it asks for.
/// `ranks_here`: how many ranks this machine runs.
///
/// # Errors
/// No usable card for `device.kind = "cuda"`; keys of a card for a run on the processor.
pub fn decide(config: &mut RunConfig, runs: bool, ranks_here: usize) -> Result<Option<String>> {
    if !matches!(config.device.kind, DeviceKind::Auto | DeviceKind::Cuda) {
        return Ok(None);
    }
    decide_by(&look(), config, runs, ranks_here)
}

fn decide_by(
    found: &Result<Found, Error>,
    config: &mut RunConfig,
    runs: bool,
    ranks_here: usize,
) -> Result<Option<String>> {
    let is_auto = config.device.kind == DeviceKind::Auto;
    let why_not = found
        .as_ref()
        .ok()
        .and_then(|found| found.why_no_heads(head_size(config)?, config.precision.compute.into()));
    if let Some(why_not) = why_not.as_ref().filter(|_| !is_auto && runs) {
        bail!("device.kind = \"cuda\": {why_not}; or compute on the processor with --set device.kind=cpu");
    }
    let why = match (found, why_processor(config).or(why_not.clone()).filter(|_| is_auto)) {
        (Ok(_), Some(why)) => why,
        (Ok(found), None) => {
            config.device.kind = DeviceKind::Cuda;
            decide_slice(config, found.share_bytes(1));
            let by = decide_communication(found, config, runs, ranks_here)?;
            let refused = why_not.map_or(String::new(), |why| format!(", which would refuse the run: {why}"));
            return Ok(Some(format!("{}{by}{refused}", ranks_on(found, ranks_here))));
        }
        (Err(error), _) if !is_auto && runs => {
            let advice = "or compute on the processor with --set device.kind=cpu";
            bail!("device.kind = \"cuda\": {error}; {advice}");
        }
        (Err(_), _) if !is_auto => return Ok(None),
        (Err(Error::NoDriver), _) => "there is no CUDA driver (`phalanx doctor` says more)".to_string(),
        (Err(error), _) => error.to_string(),
    };
    if config.device.communication == Communication::Nccl && runs {
        bail!(
            "device.communication = \"nccl\" is for cards, but there is none to use: {why}; leave it out, or set device.kind"
        );
    }
    config.device.communication = Communication::Auto;
    if let Some(mib) = config.device.memory_mb {
        bail!(
            "device.memory_mb = {mib} is for a card, but there is none to use: {why}; leave it out, or set device.kind"
        );
    }
    if config.precision.products == Products::Tf32 {
        bail!("precision.products = \"tf32\" is for a card, but there is none to use: {why}; leave it out");
    }
    config.device.kind = DeviceKind::Cpu;
    // Most machines have no GPU, and their users know.
    let has_driver = !matches!(found, Err(Error::NoDriver));
    Ok(has_driver.then(|| format!("computing on the processor (device.kind = \"auto\"): {why}")))
}

/// Decides `device.slice_mb` by the memory of a card, where it is left out: a 128th, 64 MiB at least and 512 at most.
pub fn decide_slice(config: &mut RunConfig, card_bytes: u64) {
    let bytes = config.device.memory_mb.map_or(card_bytes, |mib| (mib * f64::from(1 << 20)) as u64);
    config.device.slice_mb.get_or_insert(((bytes >> 27).clamp(64, 512)) as f64);
}

/// Decides `device.communication = "auto"` for a run on cards; the words that say what was decided and why.
///
/// # Errors
/// `nccl` for a run that starts here and cannot have it.
fn decide_communication(
    found: &Found,
    config: &mut RunConfig,
    runs: bool,
    ranks_here: usize,
) -> Result<String> {
    let (asked, world) = (config.device.communication, config.world_size());
    let (cards, several_hosts) = (found.cards.len(), ranks_here < world);
    let missing = match &found.nccl {
        _ if ranks_here > cards => Some(format!(
            "{} share {}, and NCCL needs one for each",
            plural(ranks_here, "rank"),
            plural(cards, "card")
        )),
        Err(wrong) => Some(wrong.clone()),
        Ok(None) => Some(phalanx_cuda::NO_NCCL.to_string()),
        Ok(Some(_)) if several_hosts && asked.is_auto() => Some(
            "on several hosts, device.communication = \"nccl\" makes ranks exchange data between cards"
                .to_string(),
        ),
        Ok(Some(_)) => None,
    };
    let by = || {
        let version = found.nccl.as_ref().ok().copied().flatten();
        let version = version.map_or(String::new(), |version| format!(" {}", nccl_version(version)));
        Ok(format!(", ranks exchange data between cards by NCCL{version}"))
    };
    match (asked, missing) {
        // One rank has nobody to exchange data with.
        (Communication::Auto, _) if world == 1 => Ok(String::new()),
        // A library that was named is wanted.
        (Communication::Auto, Some(wrong)) if runs && found.nccl.is_err() && ranks_here <= cards => {
            bail!("{wrong}; or set device.communication = \"host\"")
        }
        (Communication::Nccl, Some(missing)) if runs => {
            bail!(
                "device.communication = \"nccl\": {missing}; or leave it out: ranks then exchange data through host memory"
            )
        }
        (Communication::Nccl, _) => by(),
        (Communication::Auto, None) => {
            config.device.communication = Communication::Nccl;
            config.decide("device.communication");
            by()
        }
        (Communication::Auto, Some(missing)) => {
            config.device.communication = Communication::Host;
            config.decide("device.communication");
            Ok(format!(", ranks exchange data through host memory ({missing})"))
        }
        (Communication::Host, _) => Ok(", ranks exchange data through host memory".to_string()),
    }
}

/// Reason why only the processor can run a configuration; `None` if cards can, too.
fn why_processor(config: &RunConfig) -> Option<String> {
    if config.parallel.updates == Updates::Asynchronous {
        return Some("parallel.updates = \"asynchronous\" has no other device".to_string());
    }
    if config.precision.products == Products::Split {
        return Some("precision.products = \"split\" is for processors with tile registers".to_string());
    }
    let size = head_size(config)?;
    (size > CUDA_HEAD_MAX).then(|| {
        format!("a head has {size} elements (model.hidden / model.heads), and cards compute at most {CUDA_HEAD_MAX}")
    })
}

/// Elements of an attention head of the model of a checked configuration, if it has attention.
fn head_size(config: &RunConfig) -> Option<usize> {
    Some(config.model.draft().ok()?.attention()?.head_dim)
}

/// The cards of this machine.
///
/// # Errors
/// An error that names what is missing.
pub fn look() -> Result<Found, Error> {
    Found::look(&environment::cuda_options(None))
}

/// Bytes of its card that each of `ranks` of this machine may take: `device.memory_mb`, or its share.
///
/// # Errors
/// No usable card.
pub fn share_bytes(config: &RunConfig, ranks: usize) -> Result<u64> {
    if let Some(mib) = config.device.memory_mb {
        return Ok((mib * f64::from(1 << 20)) as u64);
    }
    let found = look().context("give device.memory_mb, what a rank may take of its card")?;
    Ok(found.share_bytes(ranks))
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
pub fn peak_flops_per_s(dtype: DType, tf32: bool, ranks: usize) -> f64 {
    let Ok(found) = look() else { return 0.0 };
    let used = found.cards.iter().take(ranks);
    used.filter_map(|card| Some(card.limits()?.with_tf32(tf32).flops_per_s(dtype))).sum()
}

/// Limits of a rank's card by published figures. `ranks` ranks share the cards; `tf32` means that products of f32 are computed in TF32.
/// `None` if the card does not say how fast it runs.
pub fn limits_of(rank: usize, ranks: usize, tf32: bool) -> Option<DeviceLimits> {
    let found = look().ok()?;
    let limits = found.card_of(rank).limits()?.with_tf32(tf32);
    let share = found.ranks_on_card_of(rank, ranks) as f64;
    Some(DeviceLimits {
        f32_flops_per_s: limits.f32_flops_per_s / share,
        half_flops_per_s: limits.half_flops_per_s / share,
        bytes_per_s: limits.memory_bytes_per_s / share,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_of_logits_grow_with_the_card() {
        for (gib, given, expected) in
            [(4, None, 64.0), (16, None, 128.0), (80, None, 512.0), (80, Some(2048.0), 64.0)]
        {
            let mut config = RunConfig::default();
            config.device.memory_mb = given;
            decide_slice(&mut config, gib << 30);
            assert_eq!(config.device.slice_mb, Some(expected), "{gib} GiB");
            decide_slice(&mut config, 1 << 40);
            assert_eq!(config.device.slice_mb, Some(expected), "what is given stays");
        }
    }

    fn decided(found: Error, kind: DeviceKind, runs: bool) -> (Result<Option<String>>, DeviceKind) {
        let mut config = RunConfig::default();
        config.device.kind = kind;
        let line = decide_by(&Err(found), &mut config, runs, 1);
        (line, config.device.kind)
    }

    #[test]
    fn without_a_driver_auto_is_the_processor_without_a_word() {
        let (line, kind) = decided(Error::NoDriver, DeviceKind::Auto, true);
        assert_eq!((line.unwrap(), kind), (None, DeviceKind::Cpu));
        let (line, kind) = decided(Error::DriverTooOld { version: 11080 }, DeviceKind::Auto, true);
        let line = line.unwrap().unwrap();
        assert!(kind == DeviceKind::Cpu && line.contains("11.8"), "{line}");
        let (line, kind) = decided(Error::NoDriver, DeviceKind::Cuda, false);
        assert_eq!((line.unwrap(), kind), (None, DeviceKind::Cuda), "a plan needs no card");
        let refused = decided(Error::NoDriver, DeviceKind::Cuda, true).0.unwrap_err().to_string();
        assert!(refused.contains("device.kind=cpu"), "{refused}");
    }

    #[test]
    fn what_a_card_would_refuse_is_for_the_processor() {
        assert_eq!(why_processor(&RunConfig::default()), None);
        let mut config = RunConfig::default();
        config.model.keys.set("hidden", 1024);
        config.model.keys.set("heads", 4);
        assert_eq!(why_processor(&config), None);
        config.model.keys.set("heads", 2);
        assert!(why_processor(&config).unwrap().contains("512"));
        config.model.keys.set("heads", 4);
        config.precision.products = Products::Split;
        assert!(why_processor(&config).unwrap().contains("split"));
        config.precision.products = Products::Tf32;
        assert_eq!(why_processor(&config), None);
        config.device.kind = DeviceKind::Auto;
        let refused = decide_by(&Err(Error::NoDriver), &mut config, true, 1).unwrap_err().to_string();
        assert!(refused.contains("tf32") && refused.contains("driver"), "{refused}");
        assert_eq!(phalanx_cuda::programs::HEADS.last(), Some(&(CUDA_HEAD_MAX as u32)));
    }
}
