//! The processor's cores and how they lie: which hardware threads share a core, which cores a package.

use super::text;

/// Sorts numbers of processors so that the hardware threads of a core stand side by side, and the cores of a package. What the
/// system does not say counts as one package, and one thread per core.
pub fn by_place(mut processors: Vec<usize>) -> Vec<usize> {
    let number = |processor: usize, file: &str| {
        let path = format!("/sys/devices/system/cpu/cpu{processor}/topology/{file}");
        text(path)?.trim().parse::<usize>().ok()
    };
    processors.sort_by_cached_key(|processor| {
        let package = number(*processor, "physical_package_id").unwrap_or(0);
        let core = number(*processor, "core_id").unwrap_or(*processor);
        (package, core, *processor)
    });
    processors
}

/// A text that differs between machines, and between two starts of one; empty if the system does not say.
pub fn boot_id() -> String {
    text("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_string()
}

/// The name of this machine.
pub fn host_name() -> String {
    text("/proc/sys/kernel/hostname").map_or_else(|| "unknown".to_string(), |name| name.trim().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_processor_is_kept() {
        let mut sorted = by_place(vec![1, 0, 1 << 20]);
        sorted.sort();
        assert_eq!(sorted, [0, 1, 1 << 20]);
        assert!(!host_name().is_empty());
    }
}
