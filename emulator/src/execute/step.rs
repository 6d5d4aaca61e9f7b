//! The loop over a warp's instructions.

use crate::checks::Finding;
use crate::kernel::{Kernel, Operation};
use crate::registers::{Class, LANES};

use super::block::{Block, Stop};
use super::warp::{Switch, Warp, lanes};

/// What a warp does behind an instruction.
enum Next {
    /// Goes on to an instruction.
    At(usize),
    /// Goes on where `Warp` says.
    Chosen,
    /// Stops until others have moved.
    Stop,
}

impl Block<'_> {
    /// Runs a warp up to its end or a barrier.
    pub(super) fn run_warp(&mut self, warp: &mut Warp) -> Result<(), Stop> {
        let kernel = self.launch.kernel;
        loop {
            let at = warp.counter;
            let instruction = &kernel.code[at];
            let active = match instruction.guard {
                None => warp.active,
                Some(guard) => {
                    let flip = if guard.negated { u32::MAX } else { 0 };
                    warp.active & (warp.registers.predicates[usize::from(guard.slot)] ^ flip)
                }
            };
            self.statistics.warp_instructions += 1;
            self.statistics.lane_instructions += u64::from(active.count_ones());
            if let Operation::Alu(run, slots) = &instruction.operation {
                // SAFETY: the decoder took the version of the function that this processor can run.
                unsafe { run(&mut warp.registers, slots, active) };
                warp.go_to(at + 1);
                continue;
            }
            match self.step(warp, kernel, active)? {
                Next::At(next) => warp.go_to(next),
                Next::Chosen => {}
                Next::Stop => return Ok(()),
            }
        }
    }

    /// Executes one instruction that does not only compute.
    #[inline]
    fn step(&mut self, warp: &mut Warp, kernel: &Kernel, active: u32) -> Result<Next, Stop> {
        let at = warp.counter;
        let operation = &kernel.code[at].operation;
        let next = Ok(Next::At(at + 1));
        if let Operation::Branch(target) = operation {
            return self.branch(warp, active, *target as usize);
        }
        if active == 0 {
            return next;
        }
        match operation {
            Operation::Load(transfer) => self.load(warp, transfer, active, at)?,
            Operation::Store(transfer) => self.store(warp, transfer, active, at)?,
            Operation::Atomic(atomic) => self.atomic(warp, atomic, active, at)?,
            Operation::AsyncCopy(copy) => self.async_copy(warp, copy, active, at)?,
            Operation::AsyncCommit => self.async_commit(warp, active),
            Operation::AsyncWait(count) => self.async_wait(warp, active, *count as usize, at)?,
            Operation::AsyncWaitAll => {
                self.async_commit(warp, active);
                self.async_wait(warp, active, 0, at)?;
            }
            Operation::LoadMatrix(_)
            | Operation::Multiply(_)
            | Operation::Exchange(_)
            | Operation::SyncWarp(_) => {
                return self.together(warp, operation, active, at);
            }
            Operation::Barrier(barrier) => {
                if !self.gathered(warp, warp.live, active, at)? {
                    return Ok(Next::Chosen);
                }
                if self.arrive(warp, barrier, at)? {
                    return Ok(Next::Stop);
                }
            }
            Operation::ActiveMask(slot) => {
                let row = &mut warp.registers.words[usize::from(*slot)].0;
                lanes(active).for_each(|lane| row[lane] = active);
            }
            Operation::Clock(register) => self.clock(warp, *register),
            Operation::Trap => {
                let lane = active.trailing_zeros() as usize;
                return Err(Box::new(self.report(Finding::Trap, at, (warp.number, lane), String::new())));
            }
            Operation::Exit => {
                self.unfinished_copies(warp, active, at);
                return Ok(match warp.end(active) {
                    Switch::Ended => Next::Stop,
                    _ => Next::Chosen,
                });
            }
            Operation::Fence | Operation::Alu(..) | Operation::Branch(_) => {}
        }
        next
    }

    /// Executes an instruction for which lanes wait for each other.
    fn together(
        &mut self,
        warp: &mut Warp,
        operation: &Operation,
        active: u32,
        at: usize,
    ) -> Result<Next, Stop> {
        let members = match operation {
            Operation::Exchange(exchange) => members(warp, exchange.members, active),
            Operation::SyncWarp(slot) => members(warp, *slot, active),
            _ => warp.live,
        };
        if !self.gathered(warp, members, active, at)? {
            return Ok(Next::Chosen);
        }
        match operation {
            Operation::Exchange(exchange) => {
                self.exchange(warp, exchange, active | warp.active & members, at)?;
            }
            Operation::LoadMatrix(load) => self.load_matrix(warp, load, at)?,
            Operation::Multiply(multiply) => self.multiply(warp, multiply, at)?,
            _ => self.order_warp(warp.number),
        }
        Ok(Next::At(at + 1))
    }

    fn branch(&mut self, warp: &mut Warp, taken: u32, target: usize) -> Result<Next, Stop> {
        if self.statistics.warp_instructions > self.launch.limit {
            let lane = warp.active.trailing_zeros() as usize;
            let detail = format!("the launch ran {} instructions of warps", self.launch.limit);
            return Err(Box::new(self.report(Finding::Endless, warp.counter, (warp.number, lane), detail)));
        }
        Ok(if taken == warp.active {
            Next::At(target)
        } else if taken == 0 {
            Next::At(warp.counter + 1)
        } else {
            warp.split(taken, target);
            Next::Chosen
        })
    }

    /// Whether all lanes of a mask that have not ended are here. If not, those that are wait.
    fn gathered(&mut self, warp: &mut Warp, members: u32, active: u32, at: usize) -> Result<bool, Stop> {
        let missing = members & warp.live & !active;
        if missing == 0 {
            return Ok(true);
        }
        warp.gather();
        if members & warp.live & !warp.active == 0 && self.guard_passes(warp, at) == warp.active {
            return Ok(true);
        }
        if warp.active & missing != 0 {
            // Lanes that are here, but whose guard does not let them take part.
            let lane = active.trailing_zeros() as usize;
            let detail = format!("its guard keeps lanes {:#010x} from taking part", warp.active & missing);
            return Err(Box::new(self.report(Finding::Divergence, at, (warp.number, lane), detail)));
        }
        match warp.block() {
            Switch::Stuck => {
                let lane = active.trailing_zeros() as usize;
                let detail =
                    format!("lanes {active:#010x} wait for lanes {missing:#010x}, which wait elsewhere");
                Err(Box::new(self.report(Finding::Divergence, at, (warp.number, lane), detail)))
            }
            _ => Ok(false),
        }
    }

    /// The running lanes that the guard of an instruction lets pass.
    fn guard_passes(&self, warp: &Warp, at: usize) -> u32 {
        match self.launch.kernel.code[at].guard {
            None => warp.active,
            Some(guard) => {
                let flip = if guard.negated { u32::MAX } else { 0 };
                warp.active & (warp.registers.predicates[usize::from(guard.slot)] ^ flip)
            }
        }
    }

    /// The clock counts instructions of warps.
    fn clock(&self, warp: &mut Warp, register: crate::kernel::Register) {
        let time = self.statistics.warp_instructions;
        let slot = usize::from(register.slot);
        match register.class {
            Class::Long => warp.registers.longs[slot].0 = [time; 32],
            _ => warp.registers.words[slot].0 = [time as u32; 32],
        }
    }
}

/// All lanes that the masks of the active lanes name.
fn members(warp: &Warp, slot: u16, active: u32) -> u32 {
    let masks = &warp.registers.words[usize::from(slot)].0;
    (0..LANES).fold(0, |all, lane| all | masks[lane] & (active >> lane & 1).wrapping_neg())
}
