//! The environment variables: the one place that reads them. Ranks inherit them from their launcher.
//!
//! They decide how devices compute, so the factory that makes devices is here, too.

use std::sync::Arc;

use anyhow::{Result, bail};
use phalanx_cpu::peak::{self, Bandwidth};
use phalanx_cpu::{Cpu, CpuFactory, Options};
use phalanx_simd::Isa;
use phalanx_simulated::SimulatedFactory;
use phalanx_tensor::{Arena, DType, Device, DeviceFactory, Kernels};
use phalanx_train::config::{DeviceChoice, DeviceConfig};

/// Instruction set of the kernels: `portable`, `avx2`, `avx512` or `avx512bf16`.
const ISA: &str = "PHALANX_ISA";

/// Set to anything, it switches colours off.
const NO_COLOR: &str = "NO_COLOR";

/// Kind of the terminal; `dumb` has no colours.
const TERM: &str = "TERM";

/// Whether a terminal may get colours.
pub fn colours() -> bool {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    set(NO_COLOR).is_none() && set(TERM).is_none_or(|term| term != "dumb")
}

/// The values that were read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Environment {
    isa: Isa,
}

impl Environment {
    /// Reads the environment. Called once per program.
    ///
    /// # Errors
    /// An unknown value, or one that this processor does not support.
    pub fn read() -> Result<Environment> {
        let isa = std::env::var_os(ISA).unwrap_or_default();
        let sets = [Isa::fastest(), Isa::detect()];
        Ok(Environment { isa: instruction_set(&isa.to_string_lossy(), sets)? })
    }

    /// Instruction set of the kernels.
    pub fn isa(self) -> Isa {
        self.isa
    }

    /// Options of a processor device with `threads` threads.
    pub fn options(self, threads: usize) -> Options {
        Options { isa: self.isa, ..Options::new(threads) }
    }

    /// The factory for the devices of a run: the one place where `device.kind` becomes a device.
    pub fn device_factory(self, device: &DeviceConfig) -> Box<dyn DeviceFactory> {
        match device.choice() {
            DeviceChoice::Cpu => Box::new(CpuFactory { options: self.options(1), populate: true }),
            DeviceChoice::Simulated(simulated) => {
                let options = phalanx_simulated::Options {
                    copy_bytes_per_s: simulated.copy_bytes_per_s,
                    seed: simulated.seed,
                    ..phalanx_simulated::Options::new(0)
                };
                let kernels = move |threads| -> std::io::Result<Arc<dyn Kernels>> {
                    Ok(Cpu::with_options(self.options(threads))?)
                };
                Box::new(SimulatedFactory::new(options, simulated.memory_bytes, kernels))
            }
        }
    }

    /// The processor's kernels on `threads` threads, for the benchmark of kernels.
    ///
    /// # Errors
    /// When the system starts fewer threads.
    pub fn cpu(self, threads: usize) -> Result<Arc<Cpu>> {
        Ok(Cpu::with_options(self.options(threads))?)
    }

    /// The processor with `threads` threads, for measurements.
    ///
    /// # Errors
    /// When the system starts fewer threads.
    pub fn processor(self, threads: usize) -> Result<Processor> {
        Ok(Processor(self.cpu(threads)?))
    }

    /// A device of `threads` threads whose memory is not planned.
    ///
    /// # Errors
    /// When the system starts fewer threads.
    pub fn unplanned_device(self, threads: usize) -> Result<Device> {
        Ok(Device::new(self.cpu(threads)?, Arena::heap()))
    }
}

/// Compute threads, for measurements.
pub struct Processor(Arc<Cpu>);

impl Processor {
    /// Measures the floating-point operations per second of the threads in a type.
    pub fn flops_per_s(&self, dtype: DType) -> f64 {
        peak::flops_per_s(&self.0, dtype)
    }

    /// Measures the memory bandwidth in bytes per second, on `bytes` bytes.
    ///
    /// # Errors
    /// When the system does not have that much memory.
    pub fn bandwidth(&self, bytes: usize) -> std::io::Result<Bandwidth> {
        peak::bandwidth(&self.0, bytes)
    }

    /// The instruction set of the kernels.
    pub fn isa(&self) -> Isa {
        self.0.isa()
    }
}

/// The instruction set called `name`; for an empty name the `fastest` of the processor, whose best is `best`.
fn instruction_set(name: &str, [fastest, best]: [Isa; 2]) -> Result<Isa> {
    if name.is_empty() {
        return Ok(fastest);
    }
    let Some(isa) = Isa::ALL.into_iter().find(|isa| isa.name() == name) else {
        let known = Isa::ALL.map(Isa::name).join(", ");
        bail!("{ISA}={name}: there is no such instruction set; known are {known}");
    };
    if isa > best {
        bail!("{ISA}={name}: this processor has at most {}; give that or a weaker one", best.name());
    }
    Ok(isa)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_taken_up_to_what_the_processor_has() {
        assert_eq!(instruction_set("", [Isa::Avx2; 2]).unwrap(), Isa::Avx2);
        assert_eq!(instruction_set("portable", [Isa::Avx2; 2]).unwrap(), Isa::Portable);
        let slow_pairs = [Isa::Avx512, Isa::Avx512Bf16];
        assert_eq!(instruction_set("", slow_pairs).unwrap(), Isa::Avx512);
        assert_eq!(instruction_set("avx512bf16", slow_pairs).unwrap(), Isa::Avx512Bf16);
        let refused = |name, best| instruction_set(name, [best; 2]).unwrap_err().to_string();
        let unknown = refused("sse9", Isa::Avx512);
        assert!(
            unknown.contains("sse9") && unknown.contains("portable, avx2, avx512, avx512bf16"),
            "{unknown}"
        );
        let above = refused("avx512", Isa::Avx2);
        assert!(above.contains("PHALANX_ISA=avx512") && above.contains("at most avx2"), "{above}");
    }
}
