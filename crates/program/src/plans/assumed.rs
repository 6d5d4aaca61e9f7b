//! The line above the figures of a plan for another machine: what was assumed of it.

use anyhow::{Result, bail};
use phalanx_plan::{Machine, TransferRate};
use phalanx_train::config::DeviceKind;

use crate::host::elsewhere::Elsewhere;
use crate::plans::planned::Planned;
use phalanx_drawing::report::{bytes, plural};

/// The line that says what was assumed.
///
/// # Errors
/// More ranks than a host of the profile has devices, and no network in the profile.
pub fn line(elsewhere: &Elsewhere, planned: &Planned, profile: Option<&Machine>) -> Result<String> {
    let kind = planned.config.device.kind;
    let (each, source) = elsewhere.device_bytes(&planned.config);
    let mut parts = vec![format!("each rank has {} with {} ({source})", device_word(kind), bytes(each))];
    let spec = &planned.plan.spec;
    if kind == DeviceKind::Cuda && spec.world_size() > 1 {
        parts.push(match spec.device.linked {
            true => "ranks exchange data from card to card (device.communication = \"nccl\")".to_string(),
            false => "ranks exchange data through host memory (device.communication = \"host\")".to_string(),
        });
    }
    if let Some(machine) = profile {
        parts.extend(links(machine, spec.world_size())?);
    }
    match elsewhere.host_bytes {
        _ if kind.is_processor() => {}
        Some(host) => parts.push(format!("{} of host memory for each rank", bytes(host))),
        None => parts.push("as much host memory as the plan needs".to_string()),
    }
    let of = profile.map_or(String::new(), |machine| format!(" of {}", machine.name));
    Ok(format!("assumed{of}: {}", parts.join("; ")))
}

fn device_word(kind: DeviceKind) -> &'static str {
    match kind {
        DeviceKind::Cuda => "an NVIDIA GPU (device.kind = \"cuda\")",
        DeviceKind::Simulated => "a simulated device (device.kind = \"simulated\")",
        DeviceKind::Cpu | DeviceKind::Auto => "a processor (device.kind = \"cpu\")",
    }
}

/// Describes the connections between `ranks` ranks and their rates.
fn links(machine: &Machine, ranks: usize) -> Result<Vec<String>> {
    let rate = |rate: &TransferRate| match rate {
        TransferRate::Line { gb_per_s, .. } => format!("{gb_per_s} GB/s"),
        TransferRate::Measured { .. } => "the rates of its table".to_string(),
    };
    let Some(transport) = machine.transport.as_ref().filter(|_| ranks > 1) else { return Ok(Vec::new()) };
    let inside = format!("{} from each device to others of its host", rate(transport));
    let Some(devices) = machine.devices_per_host else {
        return Ok(vec![format!(
            "{inside}, all {ranks} ranks on one host (the profile has no devices_per_host)"
        )]);
    };
    let hosts = machine.hosts_of(ranks);
    Ok(match (hosts, &machine.network) {
        (1, _) => vec![format!("{inside}, {} on one host of {devices}", plural(ranks, "rank"))],
        (_, Some(network)) => vec![format!(
            "{inside}, {} on {hosts} hosts of {devices} devices with {} from each to other hosts",
            plural(ranks, "rank"),
            rate(network)
        )],
        (_, None) => bail!(
            "{ranks} ranks are more than the {devices} devices of a host of the profile {:?}, which has no network between hosts: \
             add network = {{ latency_us, gb_per_s }} to the profile, or plan at most {devices} ranks",
            machine.name
        ),
    })
}
