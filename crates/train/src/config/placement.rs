//! Placement in `[memory]`: in which memories chunks lie between their uses, under one policy instead of part by part.

use phalanx_parallel::zero::{ChunkResidence, Residence};
use phalanx_tensor::Memory;

use super::check::refuse;
use super::{ConfigError, DeviceKind, Float, MemoryConfig, RunConfig, Tier, Updates};

/// Bytes of a unit of the `_mb` keys.
const MIB: f64 = 1_048_576.0;

words! {
    /// Placement policies. Gemini's words are known, too.
    Placement {
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

impl Placement {
    /// The memory that it names; `None` for `auto`.
    fn memory(self) -> Option<Memory> {
        match self {
            Placement::Device => Some(Memory::Device),
            Placement::Host => Some(Memory::Host),
            Placement::Nvme => Some(Memory::Disk),
            Placement::Auto => None,
        }
    }
}

impl MemoryConfig {
    fn fractions(&self) -> [(&'static str, Option<f64>); 3] {
        [
            ("memory.shard_param_frac", self.shard_param_frac),
            ("memory.offload_optim_frac", self.offload_optim_frac),
            ("memory.offload_param_frac", self.offload_param_frac),
        ]
    }

    /// Returns whether something lies on disk, or may be placed there.
    pub fn uses_disk(&self) -> bool {
        let tiers = [self.parameters, self.gradients, self.optimizer, self.activations];
        tiers.contains(&Tier::Nvme) || matches!(self.placement, Some(Placement::Nvme | Placement::Auto))
    }

    /// Returns whether parts have memories of their own.
    fn has_parts(&self) -> bool {
        [self.parameters, self.gradients, self.optimizer].iter().any(|tier| *tier != Tier::Device)
    }

    fn has_fractions(&self) -> bool {
        self.fractions().iter().any(|(_, fraction)| fraction.is_some())
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
            let away = memory.placement.and_then(Placement::memory).unwrap_or(Memory::Host);
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
            Some(Placement::Auto) => PlacementRule::Auto(self.auto_placement()?),
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
            return Err(refuse("memory.placement", format!("{:?}", Placement::Auto.name()), expected));
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

    pub(super) fn check_placement(&self) -> Result<(), ConfigError> {
        let memory = &self.memory;
        for (key, value) in [
            ("memory.device_budget_mb", memory.device_budget_mb),
            ("memory.host_budget_mb", memory.host_budget_mb),
        ] {
            if value.is_some() && memory.placement != Some(Placement::Auto) {
                let expected = "is for memory.placement = \"auto\": set that, or leave this out";
                return Err(refuse(key, value.unwrap_or(0.0), expected));
            }
        }
        self.check_fractions()?;
        let Some(placement) = memory.placement else { return Ok(()) };
        let given = format!("{:?}", placement.name());
        let refused = |expected: &str| Err(refuse("memory.placement", &given, expected));
        if memory.has_parts() {
            return refused(
                "decides where all parts lie: leave out memory.parameters, memory.gradients and memory.optimizer",
            );
        }
        if placement != Placement::Device && self.parallel.updates == Updates::Asynchronous {
            return refused(
                "works with synchronous updates only: leave it out, or leave out parallel.updates",
            );
        }
        if placement == Placement::Nvme && memory.nvme_path.is_none() {
            return refused("needs a folder on a local disk: set memory.nvme_path");
        }
        let nowhere = self.device.kind.is_processor() && memory.host_budget_mb.is_none();
        if placement == Placement::Auto && nowhere && memory.nvme_path.is_none() {
            return refused(
                "has nowhere to place what does not fit: device.kind = \"cpu\" computes in host memory; set memory.nvme_path \
                 (or, to try it, memory.host_budget_mb)",
            );
        }
        Ok(())
    }

    pub(super) fn check_gradients_in_place(&self) -> Result<(), ConfigError> {
        let (memory, precision) = (&self.memory, &self.precision);
        if !memory.gradients_in_place {
            return Ok(());
        }
        let refused = |expected: &str| Err(refuse("memory.gradients_in_place", true, expected));
        if self.parallel.updates == Updates::Asynchronous {
            return refused("works with synchronous updates only: leave out parallel.updates");
        }
        if precision.compute == Float::F32 {
            return refused(
                "needs precision.compute = \"bf16\" or \"f16\", with master weights: f32 parameters have no second copy",
            );
        }
        if precision.accumulate != precision.compute {
            return refused(
                "needs precision.accumulate of the type of precision.compute: a gradient of f32 does not fit in the place of \
                 a parameter of 16 bits",
            );
        }
        let micro_batches = self.micro_batches();
        if micro_batches > 1 {
            let expected = format!(
                "needs one micro-batch per step, but each rank has {micro_batches}, and the next one uses the parameters: \
                 raise batch.micro, or lower batch.global"
            );
            return refused(&expected);
        }
        let away = matches!(memory.placement, Some(Placement::Host | Placement::Nvme));
        let all_leave = if memory.has_fractions() { memory.offload_optim_frac == Some(1.0) } else { away };
        if memory.has_parts() || all_leave {
            return refused(
                "needs parameters, gradients and optimizer states in device memory: gradients that leave take no place there",
            );
        }
        Ok(())
    }

    fn check_fractions(&self) -> Result<(), ConfigError> {
        let memory = &self.memory;
        for (key, fraction) in memory.fractions() {
            let Some(fraction) = fraction else { continue };
            let refused = |expected: &str| Err(refuse(key, fraction, expected));
            if matches!(memory.placement, Some(Placement::Device | Placement::Auto)) {
                return refused(
                    "is a fraction of what lies elsewhere: set memory.placement to \"host\" or \"nvme\", or leave it out",
                );
            }
            if memory.has_parts() {
                return refused(
                    "decides where chunks lie: leave out memory.parameters, memory.gradients and memory.optimizer",
                );
            }
            if self.parallel.updates == Updates::Asynchronous {
                return refused(
                    "works with synchronous updates only: leave it out, or leave out parallel.updates",
                );
            }
        }
        if let Some(fraction) = memory.shard_param_frac
            && self.parallel.zero != 3
        {
            let expected = "needs parallel.zero = 3; below, every rank has all parameters";
            return Err(refuse("memory.shard_param_frac", fraction, expected));
        }
        let Some(fraction) = memory.offload_param_frac.filter(|fraction| *fraction > 0.0) else {
            return Ok(());
        };
        let refused = |expected: &str| Err(refuse("memory.offload_param_frac", fraction, expected));
        if self.parallel.zero != 3 {
            return refused("needs parallel.zero = 3, also on one rank");
        }
        if memory.shard_param_frac.is_some_and(|sharded| sharded != 1.0) {
            return refused(
                "needs memory.shard_param_frac = 1: what every rank has whole stays on the device",
            );
        }
        if memory.offload_optim_frac != Some(1.0) {
            return refused(
                "needs memory.offload_optim_frac = 1: optimizer states leave first, since they are used once a step",
            );
        }
        Ok(())
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
        let auto = |memory: &mut MemoryConfig| memory.placement = Some(Placement::Auto);
        type Change<'a> = &'a dyn Fn(&mut MemoryConfig);
        let cases: [(Change, &str); 9] = [
            (
                &|m| (m.placement, m.optimizer) = (Some(Placement::Host), Tier::Host),
                "leave out memory.parameters, memory.gradients",
            ),
            (&|m| m.placement = Some(Placement::Nvme), "set memory.nvme_path"),
            (&auto, "nowhere to place"),
            (&|m| m.device_budget_mb = Some(4.0), "is for memory.placement"),
            (&|m| m.offload_optim_frac = Some(1.5), "memory.offload_optim_frac = 1.5"),
            (&|m| m.offload_param_frac = Some(0.5), "needs memory.offload_optim_frac = 1"),
            (
                &|m| (m.shard_param_frac, m.offload_param_frac) = (Some(0.5), Some(0.5)),
                "needs memory.shard_param_frac = 1",
            ),
            (
                &|m| (m.placement, m.offload_optim_frac) = (Some(Placement::Auto), Some(0.5)),
                "fraction of what lies",
            ),
            (&|m| m.headroom = 1.0, "memory.headroom = 1"),
        ];
        for (change, words) in cases {
            let error = config(change).check().unwrap_err().to_string();
            assert!(error.contains(words), "no {words:?} in: {error}");
        }
        let unlimited = config(|m| (m.placement, m.nvme_path) = (Some(Placement::Auto), Some(folder())));
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
        assert_eq!(rule(Placement::Device, 3), uniform(Memory::Device, Memory::Device));
        assert_eq!(rule(Placement::Host, 2), uniform(Memory::Device, Memory::Host));
        assert_eq!(rule(Placement::Host, 3), uniform(Memory::Host, Memory::Host));
        assert_eq!(rule(Placement::Nvme, 3), uniform(Memory::Disk, Memory::Disk));
        let half = config(|m| m.offload_optim_frac = Some(0.5)).placement_rule().unwrap();
        let fractions = Fractions { away: Memory::Host, sharded: 1.0, parameters: 0.0, optimizer: 0.5 };
        assert_eq!(half, PlacementRule::Fractions(fractions));
        let words: Vec<Placement> =
            ["cuda", "cpu"].map(|word| serde_json::from_str(&format!("{word:?}")).unwrap()).into();
        assert_eq!(words, [Placement::Device, Placement::Host]);
    }
}
