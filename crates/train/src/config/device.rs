//! `[device]`: what the ranks compute on.

use phalanx_layers::SLICE_BYTES;
use phalanx_models::Model;

use super::bounds::{MAX_GB_PER_S, MAX_MIB};
use super::check::refuse;
use super::declare::{FREE, Resume};
use super::needs::Need;
use super::{ConfigError, KernelChoice, RunConfig};

/// Default rate of copies between host and device memory: 16 lanes of PCI Express 4.
const COPY_GB_PER_S: f64 = 25.0;

/// Elements of a head of attention that a card computes at most.
pub const CUDA_HEAD_MAX: usize = 256;

const OF_CARDS: Need = Need::is_for(&[("device.kind", &["cuda", "auto"])], "");
const OF_SIMULATED: Need = Need::is_for(&[("device.kind", &["simulated"])], "");

table! {
    /// `[device]`
    "device" DeviceConfig {
        /// `cpu`: the processor, in the memory of the host. `cuda`: NVIDIA GPUs, which ranks share where there are more ranks than
        /// cards. `auto`: `cuda` where a driver, a compiler of kernels and a card that is new enough are found, else `cpu`.
        /// `simulated`: an accelerator with a memory of its own, which the processor plays, for experiments with memory budgets on a
        /// machine that has none.
        kind: DeviceKind = DeviceKind::Auto, FREE
            .needs(&[Need::of(&["cuda", "simulated"], &[("parallel.updates", &["synchronous"])], "")]);
        /// Instruction set and tile registers of the processor's kernels: `avx2`, or `avx512+amx`. `auto`: the fastest that the
        /// processors of all ranks have. A run records them, because each has its own bits.
        kernels: KernelChoice = KernelChoice::Auto, FREE.quiet().keeps().resume(Resume::Unsaid);
        /// Transport between ranks on cards. `nccl`: between the cards, by NVIDIA's library. `host`: through host memory. `auto`:
        /// `nccl` if the library is found and each rank has a card of its own, else `host`. The bits are the same.
        communication: Communication = Communication::Auto, FREE.quiet().unset_by("device.kind")
            .needs(&[OF_CARDS]);
        /// In MiB: the memory of a simulated device, as much as the plan needs when left out; or what a rank may take of its card,
        /// its share of the card when left out.
        memory_mb: Option<f64> = None, FREE.above(0.0, MAX_MIB).unset_by("device.kind")
            .needs(&[Need::is_for(&[("device.kind", &["cuda", "simulated", "auto"])], "")]);
        /// Logits that a card computes at once, in MiB. A quarter of it is received at once in sums between cards. The program decides
        /// by the memory of the card when left out: 64 to 512.
        slice_mb: Option<f64> = None, FREE.above(0.0, MAX_MIB).unset_by("device.kind")
            .needs(&[OF_CARDS]);
        /// Rate of copies between the host and a simulated device, in 10^9 bytes per second; 25 when left out.
        copy_gb_per_s: Option<f64> = None, FREE.above(0.0, MAX_GB_PER_S)
            .needs(&[OF_SIMULATED]);
        /// Seed of the delays of a simulated device; 1 when left out.
        seed: Option<u64> = None, FREE
            .needs(&[OF_SIMULATED]);
    }
}

words! {
    /// Kinds of devices.
    DeviceKind {
        /// The program decides: cards where it finds some that it can use, else the processor.
        Auto = "auto",
        /// The processor.
        Cpu = "cpu",
        /// NVIDIA GPUs.
        Cuda = "cuda",
        /// An accelerator that the processor plays.
        Simulated = "simulated",
    }
}

words! {
    /// Transport between ranks on cards.
    Communication {
        /// The program decides.
        Auto = "auto",
        /// Between cards, by NCCL.
        Nccl = "nccl",
        /// Through host memory.
        Host = "host",
    }
}

impl Communication {
    /// Returns whether it is not decided.
    pub fn is_auto(self) -> bool {
        self == Communication::Auto
    }
}

impl DeviceKind {
    /// Returns whether ranks compute on the processor. A kind that is not decided yet counts as the processor.
    pub fn is_processor(self) -> bool {
        matches!(self, DeviceKind::Cpu | DeviceKind::Auto)
    }
}

/// The device that a checked configuration asks for, with defaults for what was left out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum DeviceChoice {
    /// The processor.
    Cpu,
    /// NVIDIA GPUs, of which each rank may take so many bytes; `None` for its share of the card.
    Cuda {
        /// Bytes.
        memory_bytes: Option<u64>,
    },
    /// An accelerator that the processor plays.
    Simulated(SimulatedDevice),
}

/// A simulated device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SimulatedDevice {
    /// Bytes of its memory; `None` for as much as the plan needs.
    pub memory_bytes: Option<u64>,
    /// Bytes per second of a copy between its memory and the host's.
    pub copy_bytes_per_s: f64,
    /// Seed of its delays.
    pub seed: u64,
}

impl DeviceConfig {
    /// Returns whether ranks exchange data directly between cards.
    pub fn is_linked(&self) -> bool {
        self.kind == DeviceKind::Cuda && self.communication == Communication::Nccl
    }

    /// Bytes of a slice of logits.
    pub fn slice_bytes(&self) -> usize {
        self.slice_mb.map_or(SLICE_BYTES, |mib| (mib * f64::from(1 << 20)) as usize)
    }

    /// The device. A kind that is not decided yet is the processor.
    pub fn choice(&self) -> DeviceChoice {
        let memory_bytes = self.memory_mb.map(|mib| (mib * f64::from(1 << 20)) as u64);
        match self.kind {
            DeviceKind::Cpu | DeviceKind::Auto => DeviceChoice::Cpu,
            DeviceKind::Cuda => DeviceChoice::Cuda { memory_bytes },
            DeviceKind::Simulated => DeviceChoice::Simulated(SimulatedDevice {
                memory_bytes,
                copy_bytes_per_s: 1e9 * self.copy_gb_per_s.unwrap_or(COPY_GB_PER_S),
                seed: self.seed.unwrap_or(1),
            }),
        }
    }
}

impl RunConfig {
    pub(super) fn check_device(&self, model: &dyn Model) -> Result<(), ConfigError> {
        let (heads, head) = model.attention().map_or((1, 1), |of| (of.heads, of.head_dim));
        if self.device.kind == DeviceKind::Cuda && head > CUDA_HEAD_MAX {
            let expected = format!(
                "makes heads of {head} elements, and a card computes heads of at most {CUDA_HEAD_MAX}: give more heads, or set \
                 device.kind = \"cpu\""
            );
            return Err(refuse("model.heads", heads, expected));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Products;

    #[test]
    fn keys_of_a_simulated_device_are_refused_for_the_processor_and_out_of_bounds() {
        let simulated = DeviceConfig { kind: DeviceKind::Simulated, ..DeviceConfig::default() };
        for (device, words) in [
            (
                DeviceConfig { memory_mb: Some(8.0), kind: DeviceKind::Cpu, ..DeviceConfig::default() },
                "device.memory_mb = 8: is for device.kind = \"cuda\", \"simulated\" or \"auto\" (it is \"cpu\")",
            ),
            (
                DeviceConfig { copy_gb_per_s: Some(1.5), ..DeviceConfig::default() },
                "device.copy_gb_per_s = 1.5",
            ),
            (
                DeviceConfig { slice_mb: Some(64.0), ..simulated.clone() },
                "device.slice_mb = 64: is for device.kind = \"cuda\" or \"auto\" (it is \"simulated\")",
            ),
            (
                DeviceConfig { seed: Some(0), ..DeviceConfig::default() },
                "device.seed = 0: is for device.kind",
            ),
            (
                DeviceConfig { communication: Communication::Nccl, ..simulated.clone() },
                "device.communication = \"nccl\": is for device.kind",
            ),
            (
                DeviceConfig { memory_mb: Some(0.0), ..simulated.clone() },
                "device.memory_mb = 0: must be a number above 0",
            ),
            (DeviceConfig { memory_mb: Some(f64::NAN), ..simulated.clone() }, "device.memory_mb = NaN"),
            (DeviceConfig { memory_mb: Some(1e300), ..simulated.clone() }, "must be at most"),
            (DeviceConfig { copy_gb_per_s: Some(-1.0), ..simulated.clone() }, "device.copy_gb_per_s = -1"),
            (DeviceConfig { copy_gb_per_s: Some(1e18), ..simulated.clone() }, "device.copy_gb_per_s"),
        ] {
            let config = RunConfig { device, ..RunConfig::default() };
            let refusal = config.check().unwrap_err().to_string();
            assert!(refusal.contains(words), "no {words:?} in: {refusal}");
        }
        RunConfig { device: simulated, ..RunConfig::default() }.check().unwrap();
    }

    #[test]
    fn what_a_card_does_not_compute_is_refused() {
        let mut config = RunConfig::default();
        config.device.kind = DeviceKind::Cuda;
        config.check().unwrap();
        config.model.keys.set("hidden", 1024);
        config.model.keys.set("heads", 2);
        let refusal = config.check().unwrap_err().to_string();
        assert!(refusal.contains("model.heads = 2: makes heads of 512 elements"), "{refusal}");
        config.model.keys.set("heads", 4);
        config.check().unwrap();
        config.precision.products = Products::Split;
        let refusal = config.check().unwrap_err().to_string();
        assert!(refusal.contains("precision.products = \"split\": needs device.kind"), "{refusal}");
    }

    #[test]
    fn what_is_left_out_has_a_default() {
        assert_eq!(DeviceConfig::default().choice(), DeviceChoice::Cpu);
        let kind = DeviceKind::Simulated;
        let device = DeviceConfig {
            kind,
            memory_mb: Some(0.5),
            copy_gb_per_s: Some(2.0),
            seed: Some(7),
            ..DeviceConfig::default()
        };
        let expected = SimulatedDevice { memory_bytes: Some(1 << 19), copy_bytes_per_s: 2e9, seed: 7 };
        assert_eq!(device.choice(), DeviceChoice::Simulated(expected));
        let defaults = DeviceConfig { kind, ..DeviceConfig::default() };
        let expected = SimulatedDevice { memory_bytes: None, copy_bytes_per_s: 25e9, seed: 1 };
        assert_eq!(defaults.choice(), DeviceChoice::Simulated(expected));
    }
}
