//! Settings of the emulator, which a process gives by its environment before the first call.

use std::env;

use crate::checks::Checks;

/// Settings of the emulator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Decides in which order work runs (`PHALANX_EMULATOR_SEED`).
    pub seed: u64,
    /// Size of the device's memory in bytes (`PHALANX_EMULATOR_MEMORY_MB`).
    pub memory: usize,
    /// Addresses for it; they are not used twice.
    pub address_space: usize,
    /// Which checks run; none with `PHALANX_EMULATOR_CHECKS=off`.
    pub checks: Checks,
}

impl Default for Config {
    fn default() -> Self {
        Self { seed: 0, memory: 4 << 30, address_space: 32 << 30, checks: Checks::default() }
    }
}

impl Config {
    /// The settings of this process. What cannot be read counts as not given.
    pub fn from_environment() -> Self {
        let number = |name: &str| env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
        let mut config = Self::default();
        config.seed = number("PHALANX_EMULATOR_SEED").unwrap_or(config.seed);
        if let Some(megabytes) = number("PHALANX_EMULATOR_MEMORY_MB") {
            config.memory = (megabytes as usize) << 20;
            config.address_space = config.memory.saturating_mul(8).max(1 << 30);
        }
        if env::var("PHALANX_EMULATOR_CHECKS").is_ok_and(|value| value == "off") {
            config.checks = Checks { unwritten: false, races: false };
        }
        config
    }
}
