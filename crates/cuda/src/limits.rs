//! Peak rates of a card: published figures of its compute capability, at the highest clocks that it reports.
//!
//! Operations of a multiprocessor in a clock are those of NVIDIA's CUDA C++ Programming Guide (throughput of instructions) and of the
//! white papers of the architectures (dense tensor cores, sums in f32). GeForce cards halve the rate of sums in f32.

use phalanx_plan::trace::DType;

use crate::driver::Card;

/// Limits of a card.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Floating-point operations a second by multiply-adds of f32.
    pub f32_flops_per_s: f64,
    /// The same by tensor cores in bf16 and f16.
    pub half_flops_per_s: f64,
    /// Bytes a second of the card's memory.
    pub memory_bytes_per_s: f64,
}

impl Limits {
    /// The same where products of f32 are computed as TF32, on tensor cores: at half of the rate of 16 bits.
    pub fn with_tf32(self, tf32: bool) -> Limits {
        let f32_flops_per_s = if tf32 { self.half_flops_per_s / 2.0 } else { self.f32_flops_per_s };
        Limits { f32_flops_per_s, ..self }
    }

    /// Operations a second of matrix products in a type.
    pub fn flops_per_s(&self, dtype: DType) -> f64 {
        match dtype {
            DType::BF16 | DType::F16 => self.half_flops_per_s,
            _ => self.f32_flops_per_s,
        }
    }
}

impl Card {
    /// Its limits; None where it does not report its clocks (the emulator has none), or its capability is not known here.
    pub fn limits(&self) -> Option<Limits> {
        let [f32, half] = flops_per_clock(self.capability, self.name.contains("GeForce"))?;
        let clocks = self.clocks?;
        let clock = 1e3 * f64::from(clocks.multiprocessor_khz) * f64::from(self.multiprocessors);
        let memory_bytes_per_s = 2e3 * f64::from(clocks.memory_khz) * f64::from(clocks.memory_bits) / 8.0;
        Some(Limits { f32_flops_per_s: f32 * clock, half_flops_per_s: half * clock, memory_bytes_per_s })
    }
}

/// Operations of a multiprocessor in a clock: in f32, and in bf16 by tensor cores. A multiply-add is two.
fn flops_per_clock(capability: (i32, i32), is_geforce: bool) -> Option<[f64; 2]> {
    match capability {
        (8, 0) => Some([128.0, 2048.0]),
        (8 | 12, _) => Some([256.0, if is_geforce { 512.0 } else { 1024.0 }]),
        (9, _) => Some([256.0, 4096.0]),
        (10, _) => Some([256.0, 8192.0]),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::Clocks;

    fn card(capability: (i32, i32), multiprocessors: u32, clocks: Option<Clocks>) -> Card {
        let (index, name) = (0, "a card".to_string());
        Card { index, name, capability, multiprocessors, memory_bytes: 0, shared_bytes: 0, clocks, device: 0 }
    }

    #[test]
    fn limits_are_those_of_data_sheets() {
        let a100 = Clocks { multiprocessor_khz: 1_410_000, memory_khz: 1_215_000, memory_bits: 5120 };
        let limits = card((8, 0), 108, Some(a100)).limits().unwrap();
        // A100 40 GB: 312 and 19.5 teraflops, 1,555 gigabytes a second.
        assert!((limits.half_flops_per_s / 312e12 - 1.0).abs() < 0.01, "{limits:?}");
        assert!((limits.f32_flops_per_s / 19.5e12 - 1.0).abs() < 0.01, "{limits:?}");
        assert!((limits.memory_bytes_per_s / 1555e9 - 1.0).abs() < 0.01, "{limits:?}");
        // H100 SXM: 989 teraflops at 1,830 MHz, 3,350 gigabytes a second.
        let h100 = Clocks { multiprocessor_khz: 1_830_000, memory_khz: 2_619_000, memory_bits: 5120 };
        let limits = card((9, 0), 132, Some(h100)).limits().unwrap();
        assert!((limits.half_flops_per_s / 989e12 - 1.0).abs() < 0.01, "{limits:?}");
        assert!((limits.memory_bytes_per_s / 3350e9 - 1.0).abs() < 0.01, "{limits:?}");
        // RTX 4090: 165.2 teraflops in bf16 with sums in f32, 82.6 in f32, at 2,520 MHz; RTX 6000 Ada: 364.2 and 91.1 at 2,505 MHz.
        let ada = |khz| Clocks { multiprocessor_khz: khz, memory_khz: 10_501_000, memory_bits: 384 };
        for (name, multiprocessors, khz, half, f32) in [
            ("NVIDIA GeForce RTX 4090", 128, 2_520_000, 165.2e12, 82.6e12),
            ("NVIDIA RTX 6000 Ada Generation", 142, 2_505_000, 364.2e12, 91.1e12),
        ] {
            let card = card((8, 9), multiprocessors, Some(ada(khz)));
            let limits = Card { name: name.to_string(), ..card }.limits().unwrap();
            assert!((limits.half_flops_per_s / half - 1.0).abs() < 0.01, "{name}: {limits:?}");
            assert!((limits.f32_flops_per_s / f32 - 1.0).abs() < 0.01, "{name}: {limits:?}");
        }
        let tf32 = limits.with_tf32(true).flops_per_s(DType::F32);
        assert!((tf32 / 494.7e12 - 1.0).abs() < 0.01, "H100, TF32: {tf32}");
        assert_eq!(card((8, 0), 1, None).limits(), None);
        assert_eq!(card((99, 0), 1, Some(h100)).limits(), None);
    }
}
