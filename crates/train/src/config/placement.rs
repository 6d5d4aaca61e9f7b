//! Placement in `[memory]`: in which memories chunks lie between their uses, under one policy instead of part by part.

use phalanx_parallel::zero::{ChunkResidence, Residence};
use phalanx_tensor::Memory;

use super::check::refuse;
use super::{ConfigError, DeviceKind, MemoryConfig, RunConfig, Tier};

/// Bytes of a unit of the `_mb` keys.
const MIB: f64 = 1_048_576.0;

words! {
    /// Placement policies. Gemini's words are known, too.
    PlacementPolicy {
        /// Everything in device memory (Gemini's `cuda`).
        Device = "device" | "cuda",
        /// Optimizer states and gradients, and parameters under ZeRO stage 3, in host memory (Gemini's `cpu`).
        Host = "host" | "cpu",
        /// The same on disk.
        Nvme = "nvme",
        /// As much in device memory as its budget allows; decided by dry runs.
        Auto = "auto",
    }
}

/// Rule that decides the memories of chunks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PlacementRule {
    /// All chunks alike.
    Uniform(ChunkResidence),
    /// Fractions of the bytes of all chunks (Colossal-AI's static placement).
    Fractions(Fractions),
    /// Chunks that do not fit the budget leave device memory.
    Auto(AutoPlacement),
}

/// Fractions of the bytes of all chunks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fractions {
    /// The memory of what is not in device memory.
    pub away: Memory,
    /// The share of the parameters that is sharded under ZeRO stage 3; the rest is whole on every rank.
    pub sharded: f64,
    /// The share of the parameters that lies outside of device memory.
    pub parameters: f64,
    /// The share of the optimizer states, master weights and gradients that lies outside of device memory.
    pub optimizer: f64,
}

/// The budget of `placement = "auto"`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AutoPlacement {
    /// Bytes of device memory.
    pub device_bytes: u64,
    /// Share of them that stays free.
    pub headroom: f64,
    /// Bytes of host memory; `None` if nothing is placed there, for example because device memory is host memory.
    pub host_bytes: Option<u64>,
    /// True if there is disk memory.
    pub disk: bool,
}

impl AutoPlacement {
    /// Bytes of device memory that may be used.
    pub fn usable_bytes(&self) -> u64 {
        (self.device_bytes as f64 * (1.0 - self.headroom)) as u64
    }
}

impl PlacementRule {
    /// The memories of the chunks of a stage; everything on the device where dry runs decide.
    pub(crate) fn before_dry_runs(&self) -> Residence {
        match self {
            PlacementRule::Uniform(chunk) => Residence::uniform(*chunk),
            PlacementRule::Fractions(_) | PlacementRule::Auto(_) => Residence::DEVICE,
        }
    }
}

impl PlacementPolicy {
    /// The memory that it names; `None` for `auto`.
    fn memory(self) -> Option<Memory> {
        match self {
            PlacementPolicy::Device => Some(Memory::Device),
            PlacementPolicy::Host => Some(Memory::Host),
            PlacementPolicy::Nvme => Some(Memory::Disk),
            PlacementPolicy::Auto => None,
        }
    }
}

impl MemoryConfig {
    /// Returns whether something lies on disk, or may be placed there.
    pub fn uses_disk(&self) -> bool {
        let tiers = [self.parameters, self.gradients, self.optimizer, self.activations];
        tiers.contains(&Tier::Nvme)
            || matches!(self.placement, Some(PlacementPolicy::Nvme | PlacementPolicy::Auto))
    }

    fn has_fractions(&self) -> bool {
        [self.shard_param_frac, self.offload_optim_frac, self.offload_param_frac].iter().any(Option::is_some)
    }

    /// Returns whether a policy places all optimizer states and gradients outside of device memory.
    pub(super) fn all_optimizer_states_leave(&self) -> bool {
        match self.has_fractions() {
            true => self.offload_optim_frac == Some(1.0),
            false => matches!(self.placement, Some(PlacementPolicy::Host | PlacementPolicy::Nvme)),
        }
    }
}

impl RunConfig {
    /// Rule that decides the memories of chunks.
    ///
    /// # Errors
    /// `placement = "auto"` without a budget.
    pub fn placement_rule(&self) -> Result<PlacementRule, ConfigError> {
        let memory = &self.memory;
        if memory.has_fractions() {
            let away = memory.placement.and_then(PlacementPolicy::memory).unwrap_or(Memory::Host);
            let of = |fraction: Option<f64>| fraction.unwrap_or(0.0);
            return Ok(PlacementRule::Fractions(Fractions {
                away,
                sharded: memory.shard_param_frac.unwrap_or(1.0),
                parameters: of(memory.offload_param_frac),
                optimizer: of(memory.offload_optim_frac),
            }));
        }
        Ok(match memory.placement {
            None => PlacementRule::Uniform(memory.residence()),
            Some(PlacementPolicy::Auto) => PlacementRule::Auto(self.auto_placement()?),
            Some(placement) => {
                let away = placement.memory().unwrap_or(Memory::Device);
                let parameters = if self.parallel.zero == 3 { away } else { Memory::Device };
                // An update within backward keeps none.
                let gradients = if memory.update_in_backward { Memory::Device } else { away };
                PlacementRule::Uniform(ChunkResidence { parameters, gradients, optimizer: away })
            }
        })
    }

    fn auto_placement(&self) -> Result<AutoPlacement, ConfigError> {
        let (memory, device) = (&self.memory, &self.device);
        let of_device = device.memory_mb.filter(|_| device.kind == DeviceKind::Simulated);
        let Some(budget) = memory.device_budget_mb.or(of_device) else {
            let expected = "needs the bytes of device memory that it may fill: set memory.device_budget_mb";
            return Err(refuse("memory.placement", format!("{:?}", PlacementPolicy::Auto.name()), expected));
        };
        let bytes = |mib: f64| (mib * MIB) as u64;
        let host_bytes = match (memory.host_budget_mb, device.kind) {
            (Some(budget), _) => Some(bytes(budget)),
            (None, DeviceKind::Simulated | DeviceKind::Cuda) => Some(u64::MAX),
            // Host memory is device memory: what lies there gains nothing.
            (None, DeviceKind::Cpu | DeviceKind::Auto) => None,
        };
        let (device_bytes, headroom) = (bytes(budget), memory.headroom);
        Ok(AutoPlacement { device_bytes, headroom, host_bytes, disk: memory.nvme_path.is_some() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder() -> super::super::Paths {
        super::super::Paths::One("/scratch".into())
    }

    fn config(change: impl FnOnce(&mut MemoryConfig)) -> RunConfig {
        let mut config = RunConfig::default();
        config.parallel.zero = 3;
        change(&mut config.memory);
        config
    }

    #[test]
    fn policies_that_contradict_other_keys_are_refused() {
        let auto = |memory: &mut MemoryConfig| memory.placement = Some(PlacementPolicy::Auto);
        type Change<'a> = &'a dyn Fn(&mut MemoryConfig);
        let cases: [(Change, &str); 9] = [
            (
                &|m| (m.placement, m.optimizer) = (Some(PlacementPolicy::Host), Tier::Host),
                "memory.placement = \"host\": needs memory.optimizer = \"device\" (it is \"host\")",
            ),
            (&|m| m.placement = Some(PlacementPolicy::Nvme), "needs memory.nvme_path"),
            (&auto, "has nowhere to lie"),
            (&|m| m.device_budget_mb = Some(4.0), "is for memory.placement"),
            (&|m| m.offload_optim_frac = Some(1.5), "memory.offload_optim_frac = 1.5"),
            (&|m| m.offload_param_frac = Some(0.5), "needs memory.offload_optim_frac = 1"),
            (
                &|m| (m.shard_param_frac, m.offload_param_frac) = (Some(0.5), Some(0.5)),
                "needs memory.shard_param_frac left out or = 1",
            ),
            (
                &|m| (m.placement, m.offload_optim_frac) = (Some(PlacementPolicy::Device), Some(0.5)),
                "fraction of what lies",
            ),
            (&|m| m.headroom = 1.0, "memory.headroom = 1"),
        ];
        for (change, words) in cases {
            let error = config(change).check().unwrap_err().to_string();
            assert!(error.contains(words), "no {words:?} in: {error}");
        }
        let unlimited =
            config(|m| (m.placement, m.nvme_path) = (Some(PlacementPolicy::Auto), Some(folder())));
        unlimited.check().unwrap();
        assert!(unlimited.placement_rule().unwrap_err().to_string().contains("memory.device_budget_mb"));
    }

    #[test]
    fn a_policy_says_where_parts_lie() {
        let rule = |placement, zero| {
            let mut config = config(|m| (m.placement, m.nvme_path) = (Some(placement), Some(folder())));
            config.parallel.zero = zero;
            config.placement_rule().unwrap()
        };
        let uniform = |parameters, optimizer| {
            PlacementRule::Uniform(ChunkResidence { parameters, gradients: optimizer, optimizer })
        };
        assert_eq!(rule(PlacementPolicy::Device, 3), uniform(Memory::Device, Memory::Device));
        assert_eq!(rule(PlacementPolicy::Host, 2), uniform(Memory::Device, Memory::Host));
        assert_eq!(rule(PlacementPolicy::Host, 3), uniform(Memory::Host, Memory::Host));
        assert_eq!(rule(PlacementPolicy::Nvme, 3), uniform(Memory::Disk, Memory::Disk));
        let half = config(|m| m.offload_optim_frac = Some(0.5)).placement_rule().unwrap();
        let fractions = Fractions { away: Memory::Host, sharded: 1.0, parameters: 0.0, optimizer: 0.5 };
        assert_eq!(half, PlacementRule::Fractions(fractions));
        let words: Vec<PlacementPolicy> =
            ["cuda", "cpu"].map(|word| serde_json::from_str(&format!("{word:?}")).unwrap()).into();
        assert_eq!(words, [PlacementPolicy::Device, PlacementPolicy::Host]);
    }
}
