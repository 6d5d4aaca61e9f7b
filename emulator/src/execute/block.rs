//! A block: its warps take turns until all have ended; where one stops, the next goes on.

use crate::checks::{Accessor, Finding, Report, Reports};
use crate::kernel::{MaskOf, Special};
use crate::memory::DeviceMemory;
use crate::registers::{LANES, Words};
use crate::shared::SharedMemory;

use super::warp::Warp;
use super::{Launch, Statistics};

/// A finding that ends the launch.
pub type Stop = Box<Report>;

/// A block that runs.
pub struct Block<'a> {
    pub(super) launch: &'a Launch<'a>,
    pub(super) index: [u32; 3],
    pub(super) linear: u32,
    pub(super) memory: &'a mut DeviceMemory,
    pub(super) shared: &'a mut SharedMemory,
    pub(super) reports: &'a mut Reports,
    pub(super) statistics: Statistics,
    /// The phase of each warp, which a barrier increases.
    pub(super) phases: [u32; 32],
    /// For each warp, up to which phase of every warp it is ordered after it.
    pub(super) known: Box<[[u32; 32]; 32]>,
    /// Threads that arrived at each barrier without waiting, and the warps they belong to.
    pub(super) arrived: [(u32, u32); 16],
}

impl<'a> Block<'a> {
    pub(super) fn new(
        launch: &'a Launch<'a>,
        linear: u32,
        memory: &'a mut DeviceMemory,
        shared: &'a mut SharedMemory,
        reports: &'a mut Reports,
    ) -> Self {
        let [x, y, _] = launch.grid;
        let index = [linear % x, linear / x % y, linear / x / y];
        Self {
            launch,
            index,
            linear,
            memory,
            shared,
            reports,
            statistics: Statistics::default(),
            phases: [1; 32],
            known: Box::new([[0; 32]; 32]),
            arrived: [(0, 0); 16],
        }
    }

    /// Runs all warps to their end.
    pub(super) fn run(&mut self, warps: &mut Vec<Warp>) -> Result<(), Stop> {
        self.restart(warps);
        let count = warps.len();
        loop {
            let mut moved = false;
            for turn in 0..count {
                // The second bit of the seed reverses the order of warps.
                let number = if self.launch.seed & 2 == 0 { turn } else { count - 1 - turn };
                let warp = &mut warps[number];
                if !warp.has_ended() && warp.waiting.is_none() {
                    self.run_warp(warp)?;
                    moved = true;
                }
            }
            if warps.iter().all(Warp::has_ended) {
                return Ok(());
            }
            moved |= self.complete_barriers(warps);
            if !moved {
                return Err(self.deadlock(warps));
            }
        }
    }

    /// Makes the warps those of this block; the first block of a launch has none yet.
    fn restart(&self, warps: &mut Vec<Warp>) {
        let threads: u32 = self.launch.block.iter().product();
        let kernel = self.launch.kernel;
        for number in warps.len()..threads.div_ceil(LANES as u32) as usize {
            let mut warp = Warp::new(kernel, number);
            for &(slot, special) in &kernel.specials {
                warp.registers.words[usize::from(slot)] = Words(self.special(number as u32, special));
            }
            warps.push(warp);
        }
        for (number, warp) in warps.iter_mut().enumerate() {
            let lanes = (threads - (number * LANES) as u32).min(LANES as u32);
            warp.restart(if lanes == 32 { u32::MAX } else { (1 << lanes) - 1 });
            // The other special registers are the same in all blocks.
            for &(slot, special) in &kernel.specials {
                if let Special::Block(axis) = special {
                    warp.registers.words[usize::from(slot)] = Words([self.index[usize::from(axis)]; LANES]);
                }
            }
        }
    }

    /// The place of a thread in the block.
    pub(super) fn thread(&self, warp: usize, lane: usize) -> [u32; 3] {
        let [x, y, _] = self.launch.block;
        let linear = (warp * LANES + lane) as u32;
        [linear % x, linear / x % y, linear / x / y]
    }

    fn special(&self, warp: u32, special: Special) -> [u32; LANES] {
        let threads: u32 = self.launch.block.iter().product();
        std::array::from_fn(|lane| {
            let below = (1u32 << lane) - 1;
            match special {
                Special::Thread(axis) => self.thread(warp as usize, lane)[usize::from(axis)],
                Special::BlockSize(axis) => self.launch.block[usize::from(axis)],
                Special::Block(axis) => self.index[usize::from(axis)],
                Special::GridSize(axis) => self.launch.grid[usize::from(axis)],
                Special::Lane => lane as u32,
                Special::Warp => warp,
                Special::WarpCount => threads.div_ceil(LANES as u32),
                Special::Multiprocessor => 0,
                Special::DynamicShared => self.launch.dynamic_shared as u32,
                Special::LaneMask(MaskOf::Equal) => 1 << lane,
                Special::LaneMask(MaskOf::Below) => below,
                Special::LaneMask(MaskOf::UpTo) => below | 1 << lane,
                Special::LaneMask(MaskOf::Above) => !(below | 1 << lane),
                Special::LaneMask(MaskOf::From) => !below,
            }
        })
    }

    /// A report about a thread at an instruction.
    pub(super) fn report(
        &self,
        finding: Finding,
        at: usize,
        thread: (usize, usize),
        detail: String,
    ) -> Report {
        let kernel = self.launch.kernel;
        Report {
            finding,
            operation: kernel.name.clone(),
            source: kernel.source(at).map(|(file, line)| (file.to_string(), line)),
            ptx_line: kernel.lines.get(at).map_or(0, |(line, _)| *line),
            block: self.index,
            thread: Some(self.thread(thread.0, thread.1)),
            address: None,
            detail,
        }
    }

    /// Who accesses memory at an instruction of a warp.
    pub(super) fn accessor(&self, warp: usize, instruction: usize, atomic: bool) -> Accessor<'a> {
        Accessor {
            operation: self.launch.operation,
            block: self.linear,
            warp,
            phase: self.phases[warp],
            known: self.known[warp],
            instruction,
            atomic,
            order: self.launch.order,
            last_ordered: Default::default(),
        }
    }

    fn deadlock(&self, warps: &[Warp]) -> Stop {
        let waiting = warps.iter().filter_map(|warp| warp.waiting.map(|waiting| (warp, waiting)));
        let places: Vec<String> = waiting
            .clone()
            .map(|(warp, waiting)| {
                let line = self.launch.kernel.lines.get(waiting.instruction).map_or(0, |(line, _)| *line);
                format!("warp {} at barrier {} (PTX line {line})", warp.number, waiting.barrier)
            })
            .collect();
        let (warp, at) =
            waiting.clone().next().map_or((0, 0), |(warp, waiting)| (warp.number, waiting.instruction));
        Box::new(self.report(Finding::Deadlock, at, (warp, 0), places.join(", ")))
    }
}
