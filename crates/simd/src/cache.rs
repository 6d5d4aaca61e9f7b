//! Sizes of the processor's caches.

use std::sync::OnceLock;

/// Size of the L2 cache of one core, in bytes; 1 MiB if the processor does not say.
pub fn l2_bytes() -> usize {
    static BYTES: OnceLock<usize> = OnceLock::new();
    *BYTES.get_or_init(|| read_l2().unwrap_or(1 << 20))
}

#[cfg(target_arch = "x86_64")]
fn read_l2() -> Option<usize> {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    // Intel and AMD describe caches in the same layout, in leaves of their own.
    #[allow(unused_unsafe, reason = "safe from Rust 1.94 on")]
    // SAFETY: every x86-64 processor has the instruction; a leaf is read only where there is one.
    unsafe {
        let leaf = if __cpuid(0x8000_0000).eax >= 0x8000_001d && __cpuid_count(0x8000_001d, 0).eax & 0x1f != 0
        {
            0x8000_001d
        } else if __cpuid(0).eax >= 4 {
            4
        } else {
            return None;
        };
        for index in 0..8 {
            let cache = __cpuid_count(leaf, index);
            let (kind, level) = (cache.eax & 0x1f, cache.eax >> 5 & 7);
            if kind == 0 {
                return None;
            }
            if level == 2 && kind != 2 {
                let field = |shift: u32, bits: u32| (cache.ebx >> shift & ((1 << bits) - 1)) as usize + 1;
                return Some(field(22, 10) * field(12, 10) * field(0, 12) * (cache.ecx as usize + 1));
            }
        }
        None
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn read_l2() -> Option<usize> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_level_cache_has_a_plausible_size() {
        let bytes = l2_bytes();
        assert!((64 << 10..=64 << 20).contains(&bytes) && bytes.is_multiple_of(4096), "{bytes}");
    }
}
