//! The line above the figures of a plan for another machine: what was assumed of it.

use anyhow::{Result, bail};
use phalanx_plan::{Link, Machine, TransferRate};
use phalanx_train::config::DeviceKind;

use crate::host::elsewhere::Elsewhere;
use crate::plans::planned::Planned;
use phalanx_drawing::report::{bytes, plural};

/// The line that says what was assumed.
///
/// # Errors
/// More ranks than the links of the profile join.
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
    parts.extend(profile.and_then(|machine| machine.planned_only.clone()));
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
    let rate = |link: &Link| {
        let rate = match &link.time {
            TransferRate::Line { gb_per_s, .. } => format!("{gb_per_s} GB/s"),
            TransferRate::Measured { .. } => "the rates of its table".to_string(),
        };
        match link.shared_by {
            1 => format!("{rate} ({})", link.name),
            shared => format!("{rate}, shared by {shared} ({})", link.name),
        }
    };
    if ranks == 1 {
        return Ok(Vec::new());
    }
    let hosts = machine.hosts_of(ranks);
    if let Some(devices) = machine.joined_devices().filter(|devices| *devices < ranks) {
        bail!(
            "the links of the profile {:?} join {}, and there are {ranks} ranks: add to the profile\n[[links]]\nname = \"network\"\n\
             time = {{ latency_us = 20, gb_per_s = 50 }}\nor plan at most {}",
            machine.name,
            plural(devices, "device"),
            plural(devices, "rank")
        );
    }
    // Levels beyond the one that joins all are not used.
    let reaches = |link: &Link| link.devices.is_none_or(|devices| devices >= ranks);
    let used = machine.links.iter().position(reaches).map_or(machine.links.len(), |at| at + 1);
    let of = |link: &Link| match link.devices {
        Some(devices) if devices < ranks => {
            format!("each device sends {} to the {devices} next to it", rate(link))
        }
        _ => format!("each device sends {} to the others", rate(link)),
    };
    let lies = match machine.devices_per_host {
        None => format!("all {ranks} ranks on one host (the profile has no devices_per_host)"),
        Some(devices) if hosts == 1 => format!("{ranks} ranks on one host of {devices}"),
        Some(devices) => format!("{ranks} ranks on {hosts} hosts of {}", plural(devices, "device")),
    };
    Ok(machine.links[..used].iter().map(of).chain([lies]).collect())
}
