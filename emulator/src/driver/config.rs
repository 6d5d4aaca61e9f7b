//! Settings of the emulator, which a process gives by its environment before the first call.

use std::env;

use crate::checks::Checks;
use crate::execute::MAX_SHARED;

/// Settings of the emulator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Decides in which order work runs (`PHALANX_EMULATOR_SEED`).
    pub seed: u64,
    /// Size of a device's memory in bytes (`PHALANX_EMULATOR_MEMORY_MB`).
    pub memory: usize,
    /// Addresses for it; they are not used twice.
    pub address_space: usize,
    /// The version of the driver interface (`PHALANX_EMULATOR_DRIVER`): 12080 for 12.8.
    pub version: i32,
    /// How many devices there are (`PHALANX_EMULATOR_CARDS`), at most 16; none with 0.
    pub cards: usize,
    /// The newest PTX that is taken (`PHALANX_EMULATOR_PTX`, for instance 87 for 8.7).
    pub ptx: (i32, i32),
    /// Compute capability (`PHALANX_EMULATOR_CAPABILITY`, for instance 75 for 7.5).
    pub capability: (i32, i32),
    /// Shared memory that a block may have (`PHALANX_EMULATOR_SHARED_KB`), at most [`MAX_SHARED`]: 99 for cards of desktops.
    pub shared: usize,
    /// Whether host memory can be registered; not with `PHALANX_EMULATOR_REGISTER=off`.
    pub registers: bool,
    /// Bytes that a communicator of NCCL takes of its device for each rank that it first exchanges data with (`PHALANX_EMULATOR_NCCL_MB`).
    pub nccl: usize,
    /// Whether aborts of communicators return; not with `PHALANX_EMULATOR_ABORT=off`.
    pub aborts: bool,
    /// How many queues of work the streams of a device share: with `PHALANX_EMULATOR_QUEUES=on` as many as `CUDA_DEVICE_MAX_CONNECTIONS`
    /// says, or 8. None: each has one.
    pub connections: Option<usize>,
    /// Whether cuBLASLt takes only matrices whose columns have a multiple of 16 bytes (`PHALANX_EMULATOR_EXTENTS=on`), as its fast kernels may.
    pub whole_extents: bool,
    /// The device is lost at this call that uses it (`PHALANX_EMULATOR_LOST_AT`).
    pub lost_at: Option<u64>,
    /// Whether streams can be captured; not with `PHALANX_EMULATOR_CAPTURE=off`.
    pub captures: bool,
    /// Which checks run; none with `PHALANX_EMULATOR_CHECKS=off`.
    pub checks: Checks,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            seed: 0,
            memory: 4 << 30,
            address_space: 32 << 30,
            version: 12080,
            cards: 1,
            ptx: (99, 0),
            capability: (8, 0),
            shared: MAX_SHARED,
            registers: true,
            nccl: 0,
            aborts: true,
            connections: None,
            whole_extents: false,
            lost_at: None,
            captures: true,
            checks: Checks::default(),
        }
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
        config.version = number("PHALANX_EMULATOR_DRIVER").map_or(config.version, |version| version as i32);
        config.cards = number("PHALANX_EMULATOR_CARDS").map_or(config.cards, |cards| cards.min(16) as usize);
        if let Some(capability) = number("PHALANX_EMULATOR_CAPABILITY") {
            config.capability = (capability as i32 / 10, capability as i32 % 10);
        }
        if let Some(ptx) = number("PHALANX_EMULATOR_PTX") {
            config.ptx = (ptx as i32 / 10, ptx as i32 % 10);
        }
        config.shared = number("PHALANX_EMULATOR_SHARED_KB")
            .map_or(config.shared, |kib| config.shared.min((kib as usize) << 10));
        config.lost_at = number("PHALANX_EMULATOR_LOST_AT");
        let is_off = |name: &str| env::var(name).is_ok_and(|value| value == "off");
        config.registers = !is_off("PHALANX_EMULATOR_REGISTER");
        config.nccl = number("PHALANX_EMULATOR_NCCL_MB").map_or(0, |megabytes| (megabytes as usize) << 20);
        config.aborts = !is_off("PHALANX_EMULATOR_ABORT");
        let is_on = |name: &str| env::var(name).is_ok_and(|value| value == "on");
        config.whole_extents = is_on("PHALANX_EMULATOR_EXTENTS");
        let connections = number("CUDA_DEVICE_MAX_CONNECTIONS").unwrap_or(8).clamp(1, 32) as usize;
        config.connections = is_on("PHALANX_EMULATOR_QUEUES").then_some(connections);
        config.captures = !is_off("PHALANX_EMULATOR_CAPTURE");
        if is_off("PHALANX_EMULATOR_CHECKS") {
            config.checks = Checks { unwritten: false, races: false };
        }
        config
    }
}
