//! What the environment says: the one place that reads it. Ranks inherit it from their launcher.

use std::sync::Arc;

use anyhow::{Result, bail};
use phalanx_cpu::Cpu;
use phalanx_cpu::Options;
use phalanx_simd::Isa;
use phalanx_tensor::{Arena, Device};

/// Instruction set of the kernels: `portable`, `avx2`, `avx512` or `avx512bf16`.
const ISA: &str = "PHALANX_ISA";

/// What was read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Environment {
    isa: Isa,
}

impl Environment {
    /// Reads it, once in a program.
    ///
    /// # Errors
    /// A value that means nothing, or that this processor cannot do.
    pub fn read() -> Result<Environment> {
        let isa = std::env::var_os(ISA).unwrap_or_default();
        Ok(Environment { isa: instruction_set(&isa.to_string_lossy(), Isa::detect())? })
    }

    /// What kernels use.
    pub fn isa(self) -> Isa {
        self.isa
    }

    /// How `threads` threads compute.
    pub fn options(self, threads: usize) -> Options {
        Options { isa: self.isa, ..Options::new(threads) }
    }

    /// `threads` threads that compute so.
    ///
    /// # Errors
    /// When the system starts fewer.
    pub fn cpu(self, threads: usize) -> Result<Arc<Cpu>> {
        Ok(Cpu::with_options(self.options(threads))?)
    }

    /// A device of `threads` threads whose memory is not planned.
    ///
    /// # Errors
    /// When the system starts fewer threads.
    pub fn unplanned_device(self, threads: usize) -> Result<Device> {
        Ok(Device::new(self.cpu(threads)?, Arena::heap()))
    }
}

/// The one that is named; the best of a processor that has `best` where none is.
fn instruction_set(name: &str, best: Isa) -> Result<Isa> {
    if name.is_empty() {
        return Ok(best);
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
        assert_eq!(instruction_set("", Isa::Avx2).unwrap(), Isa::Avx2);
        assert_eq!(instruction_set("portable", Isa::Avx2).unwrap(), Isa::Portable);
        assert_eq!(instruction_set("avx512bf16", Isa::Avx512Bf16).unwrap(), Isa::Avx512Bf16);
        let refused = |name, best| instruction_set(name, best).unwrap_err().to_string();
        let unknown = refused("sse9", Isa::Avx512);
        assert!(
            unknown.contains("sse9") && unknown.contains("portable, avx2, avx512, avx512bf16"),
            "{unknown}"
        );
        let above = refused("avx512", Isa::Avx2);
        assert!(above.contains("PHALANX_ISA=avx512") && above.contains("at most avx2"), "{above}");
    }
}
