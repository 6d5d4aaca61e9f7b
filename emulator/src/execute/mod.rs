//! Running a kernel: blocks one after the other, warps of a block in turns from barrier to barrier.
//!
//! The order of blocks and warps follows from the seed. A warp runs the lanes with the lowest program counter first, so
//! lanes that diverged meet again where their paths join.

mod access;
mod asynchronous;
mod atomic;
mod barrier;
mod block;
mod exchange;
mod matrix;
mod operands;
mod spans;
mod step;
mod values;
mod warp;

use crate::checks::{Checks, Reports};
use crate::kernel::Kernel;
use crate::memory::DeviceMemory;
pub use crate::shared::MAX_SHARED;

use block::Block;
pub use operands::Operands;

/// A launch of a kernel.
pub struct Launch<'a> {
    /// The kernel.
    pub kernel: &'a Kernel,
    /// Blocks by axis.
    pub grid: [u32; 3],
    /// Threads of a block by axis.
    pub block: [u32; 3],
    /// Parameters, laid out as `Kernel::parameters` says.
    pub parameters: &'a [u8],
    /// Bytes of dynamic shared memory.
    pub dynamic_shared: usize,
    /// What it may use of the allocations that these lie in.
    pub operands: &'a Operands,
    /// Number of this operation, from 1.
    pub operation: u32,
    /// Which earlier operations are ordered before this one.
    pub order: &'a dyn Fn(u32) -> bool,
    /// Which checks run.
    pub checks: Checks,
    /// Seed of the order of blocks and warps.
    pub seed: u64,
    /// The most instructions of all warps together.
    pub limit: u64,
}

/// What a launch did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Instructions, counted once for a warp.
    pub warp_instructions: u64,
    /// Lanes that took part in them.
    pub lane_instructions: u64,
    /// `mma.sync` instructions.
    pub multiplies: u64,
    /// Products that these added.
    pub multiply_adds: u64,
}

/// The most threads in a block.
pub const MAX_THREADS: u32 = 1024;

/// Runs a launch. Findings are added to the reports; a fatal one ends the launch early.
pub fn run(launch: &Launch, memory: &mut DeviceMemory, reports: &mut Reports) -> Statistics {
    let blocks: u64 = launch.grid.iter().map(|&count| u64::from(count)).product();
    let mut statistics = Statistics::default();
    let mut shared = memory.shared.take().unwrap_or_default();
    let mut warps = Vec::new();
    for turn in 0..blocks {
        // Odd seeds run the blocks backwards.
        let linear = if launch.seed & 1 == 0 { turn } else { blocks - 1 - turn };
        shared.begin(launch.kernel.static_shared + launch.dynamic_shared);
        let mut block = Block::new(launch, linear as u32, memory, &mut shared, reports);
        block.statistics = statistics;
        let result = block.run(&mut warps);
        statistics = block.statistics;
        if let Err(report) = result {
            reports.add(*report);
            break;
        }
    }
    memory.shared = Some(shared);
    statistics
}
