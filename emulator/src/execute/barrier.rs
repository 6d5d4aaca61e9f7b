//! Barriers of the block: which warps go on, and what they are ordered after.

use crate::kernel::{Barrier, BarrierReduction, Operation};

use super::block::{Block, Stop};
use super::warp::{Waiting, Warp};

impl Block<'_> {
    /// A warp, all of whose lanes are here, arrives at a barrier. Returns whether it waits.
    pub(super) fn arrive(&mut self, warp: &mut Warp, barrier: &Barrier, at: usize) -> Result<bool, Stop> {
        let lane = warp.live.trailing_zeros() as usize;
        let word = |slot: u16| warp.registers.words[usize::from(slot)].0[lane];
        let number = word(barrier.number.slot) & 15;
        let threads = barrier.threads.map_or(0, |register| word(register.slot));
        if !barrier.waits {
            let arrived = &mut self.arrived[number as usize];
            arrived.0 += warp.live.count_ones();
            arrived.1 |= 1 << warp.number;
            // What comes later is not ordered before those who wait: it belongs to the next phase.
            self.phases[warp.number] += 1;
            return Ok(false);
        }
        warp.waiting = Some(Waiting { barrier: number, threads, instruction: at });
        Ok(true)
    }

    /// Lets the warps of complete barriers go on. Returns whether there were any.
    pub(super) fn complete_barriers(&mut self, warps: &mut [Warp]) -> bool {
        let live: u32 = warps.iter().map(|warp| warp.live.count_ones()).sum();
        let mut any = false;
        for number in 0..16u32 {
            let is_here = |warp: &Warp| warp.waiting.is_some_and(|waiting| waiting.barrier == number);
            let (arrived, arrived_warps) = self.arrived[number as usize];
            let waiting: u32 =
                warps.iter().filter(|warp| is_here(warp)).map(|warp| warp.live.count_ones()).sum();
            let Some(first) = warps.iter().find(|warp| is_here(warp)).and_then(|warp| warp.waiting) else {
                continue;
            };
            let expected = if first.threads == 0 { live } else { first.threads };
            if waiting + arrived < expected {
                continue;
            }
            let here =
                warps.iter().filter(|warp| is_here(warp)).fold(0u32, |mask, warp| mask | 1 << warp.number);
            self.order(here, arrived_warps & !here);
            self.reduce(warps, here, first.instruction);
            self.arrived[number as usize] = (0, 0);
            for warp in warps.iter_mut().filter(|warp| here >> warp.number & 1 == 1) {
                warp.waiting = None;
                warp.go_to(warp.counter + 1);
            }
            any = true;
        }
        any
    }

    /// Orders all warps of a mask, which waited, after all that arrived.
    fn order(&mut self, waited: u32, arrived: u32) {
        let mut joined = [0u32; 32];
        for warp in super::warp::lanes(waited | arrived) {
            for (other, &phase) in joined.iter_mut().zip(&self.known[warp]) {
                *other = phase.max(*other);
            }
        }
        for warp in super::warp::lanes(waited) {
            joined[warp] = joined[warp].max(self.phases[warp]);
        }
        for warp in super::warp::lanes(arrived) {
            joined[warp] = joined[warp].max(self.phases[warp] - 1);
        }
        for warp in super::warp::lanes(waited) {
            self.known[warp] = joined;
            self.phases[warp] += 1;
        }
    }

    /// `bar.red`: gives all warps of a mask the function of all their predicates.
    fn reduce(&self, warps: &mut [Warp], here: u32, instruction: usize) {
        let Operation::Barrier(barrier) = &self.launch.kernel.code[instruction].operation else { return };
        let Some((function, operand, result)) = barrier.reduction else { return };
        let here = |warp: &&mut Warp| here >> warp.number & 1 == 1;
        let (mut set, mut all) = (0, 0);
        for warp in warps.iter_mut().filter(here) {
            set += (warp.registers.predicates[usize::from(operand.slot)] & warp.live).count_ones();
            all += warp.live.count_ones();
        }
        for warp in warps.iter_mut().filter(here) {
            let truth = match function {
                BarrierReduction::And => set == all,
                BarrierReduction::Or => set > 0,
                BarrierReduction::Count => {
                    warp.registers.words[usize::from(result.slot)].0 = [set; 32];
                    continue;
                }
            };
            warp.registers.predicates[usize::from(result.slot)] = if truth { u32::MAX } else { 0 };
        }
    }

    /// `bar.warp.sync`: later accesses of the warp are ordered after its earlier ones.
    pub(super) fn order_warp(&mut self, warp: usize) {
        self.known[warp][warp] = self.phases[warp];
        self.phases[warp] += 1;
    }
}
