//! The machine that a plan is for, where `--device-memory` or `--machine` describe another one than this.
//!
//! Nothing of this machine counts then: each rank has a device of its own, and what is assumed of it is said in a line above the figures.

use anyhow::{Result, bail};
use phalanx_plan::Machine;
use phalanx_train::RunConfig;
use phalanx_train::config::{Communication, DeviceKind};

use crate::host::cards;

/// Assumptions of a plan about the machine of its ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Elsewhere {
    /// Bytes of the device of each rank.
    device_bytes: u64,
    /// True if `--device-memory` gives them, false if the profile does.
    is_given: bool,
    /// Bytes of host memory that a rank may use; `None` where nobody says.
    pub host_bytes: Option<u64>,
    /// Device that ranks compute on; `None` if only the configuration names it.
    kind: Option<DeviceKind>,
}

impl Elsewhere {
    /// Assumptions from `--device-memory` and the profile of `--machine`; `None` for a plan for this machine.
    pub fn of(given: Option<u64>, profile: Option<&Machine>) -> Option<Elsewhere> {
        let kind = |machine: &Machine| match machine.computes_on_host {
            true => DeviceKind::Cpu,
            false => DeviceKind::Cuda,
        };
        Some(Elsewhere {
            device_bytes: given.or(profile.map(|machine| machine.memory_bytes))?,
            is_given: given.is_some(),
            host_bytes: profile.map(|machine| machine.host_bytes),
            kind: profile.map(kind),
        })
    }

    /// Bytes that a rank may take of its device, and the option or key that gives them.
    pub fn device_bytes(&self, config: &RunConfig) -> (u64, &'static str) {
        match config.device.memory_mb {
            _ if self.is_given => (self.device_bytes, "--device-memory"),
            Some(mib) => ((mib * f64::from(1 << 20)) as u64, "device.memory_mb"),
            None => (self.device_bytes, "the profile of --machine"),
        }
    }

    /// Returns whether the budget of `memory.placement = "auto"` follows from it: `--device-memory` replaces what the configuration gives.
    pub fn gives_budget(&self, config: &RunConfig) -> bool {
        self.is_given || config.memory.device_budget_mb.is_none()
    }

    /// Decides `device.kind = "auto"` where a profile says what the ranks compute on.
    ///
    /// # Errors
    /// Another device in the configuration than in the profile.
    pub fn decide_kind(&self, config: &mut RunConfig) -> Result<()> {
        let Some(kind) = self.kind else { return Ok(()) };
        let given = config.device.kind;
        match (given, kind) {
            (DeviceKind::Auto, _) => config.device.kind = kind,
            // It stands for a card.
            (DeviceKind::Simulated, DeviceKind::Cuda) => {}
            _ if given == kind => {}
            _ => bail!(
                "device.kind = {:?}, but the profile of --machine describes {}: leave out device.kind, or give another --machine \
                 (`here` measures this one)",
                given.name(),
                if kind == DeviceKind::Cuda { "cards" } else { "a processor (computes_on_host)" }
            ),
        }
        Ok(())
    }

    /// Decides the device where the configuration leaves it open; the line that says why it is the processor, if it is decided here.
    /// Each rank has a device of its own.
    ///
    /// # Errors
    /// Keys of a card for a run on the processor.
    pub fn decide_device(&self, config: &mut RunConfig) -> Result<Option<String>> {
        let (asked, is_open) = (config.device.communication, config.device.kind == DeviceKind::Auto);
        let ranks = config.world_size();
        let line = if is_open { cards::decide(config, false, ranks)? } else { None };
        let several = config.world_size() > 1;
        if config.device.kind != DeviceKind::Cuda {
            return Ok(line);
        }
        cards::decide_slice(config, self.device_bytes);
        let device = &mut config.device;
        device.communication = match asked {
            Communication::Auto if several => Communication::Nccl,
            asked => asked,
        };
        Ok(None)
    }
}
