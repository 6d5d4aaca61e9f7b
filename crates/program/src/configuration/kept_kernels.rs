//! The processor's kernels over the life of a run: those that it has recorded, and those that all hosts have.

use phalanx_launch::HostInfo;
use phalanx_train::RunConfig;
use phalanx_train::config::{DeviceKind, KernelChoice, KernelSet};

use crate::configuration::user_config::UserConfig;
use crate::host::environment::Environment;
use crate::host::host_kernels::HostKernels;

/// The key under which a run records its kernels.
const KEY: &str = "device.kernels";

/// The environment of a job on `hosts`, whose ranks all compute with the same kernels; and a line for the user where some
/// could use faster ones.
pub fn on_hosts(own: Environment, hosts: &[HostInfo]) -> (Environment, Option<String>) {
    let shared = own.on_hosts(hosts.iter().filter_map(HostKernels::of));
    let mut first = 0;
    let mut differing = Vec::new();
    for host in hosts {
        let ranks = match host.ranks {
            1 => format!("rank {first}"),
            ranks => format!("ranks {first} to {}", first + ranks - 1),
        };
        first += host.ranks;
        if let Some(uses) = HostKernels::of(host).and_then(|said| said.uses.set())
            && uses != shared.kernels()
        {
            differing.push(format!("{ranks} on {} ({})", host.name, uses.name()));
        }
    }
    let all = shared.kernels().name();
    let line = (!differing.is_empty()).then(|| {
        format!(
            "all ranks compute with the kernels {all}, or those that the run has recorded, so that their results agree: the \
             processors of all hosts have them, and PHALANX_ISA of no host excludes them; by themselves, others would be used by \
             {}",
            differing.join(", ")
        )
    });
    (shared, line)
}

/// Keeps the kernels that a run has recorded, where they can be used. `is_said`: the user gave the key for this resume. Returns
/// a line for the user where the kernels change, and with them the bits.
pub fn keep(
    given: &mut UserConfig,
    before: &RunConfig,
    environment: Environment,
    is_said: bool,
) -> Option<String> {
    let was = before.device.kernels.set()?;
    let asked = given.config().ok()?.device.kernels;
    let (now, why) = match asked {
        KernelChoice::Set(now) if is_said || now != was => (now, format!("because {KEY} was changed")),
        KernelChoice::Auto => (environment.kernels(), format!("because {KEY} was changed")),
        KernelChoice::Set(_) if environment.is_chosen() => {
            (environment.kernels(), "because PHALANX_ISA asks for them".to_string())
        }
        KernelChoice::Set(_) => match environment.why_not(was) {
            None => (was, String::new()),
            Some(why) => (environment.kernels(), format!("because {why}")),
        },
    };
    if now != was && asked == KernelChoice::Set(was) {
        given.leave_out(KEY);
    }
    // Cards have kernels of their own.
    let place = if before.device.kind == DeviceKind::Cuda { "on the processor, " } else { "" };
    changed(was, now).then(|| {
        format!(
            "{place}the run has computed with the kernels {} and computes with {} from here on, {why}: its bits may differ from \
             those of an undisturbed run",
            was.name(),
            now.name()
        )
    })
}

/// Returns whether results change with the kernels.
fn changed(was: KernelSet, now: KernelSet) -> bool {
    !was.same_bits(now)
}
