//! A warp: its registers, and where its lanes are.
//!
//! Lanes that run together have one program counter. The others have their own, and run when theirs is the lowest, or
//! wait at an instruction for lanes that it names.

use std::collections::VecDeque;

use crate::kernel::Kernel;
use crate::registers::{LANES, Longs, Registers, Words};
use crate::vectors::vectorised;

use super::spans::Span;

/// A warp of a block.
pub struct Warp {
    /// Its place in the block.
    pub number: usize,
    /// Its registers.
    pub registers: Registers,
    /// Lanes that have not ended.
    pub live: u32,
    /// Lanes that run now.
    pub active: u32,
    /// Their program counter.
    pub counter: usize,
    /// Program counters of the other lanes.
    counters: [u32; LANES],
    /// Lanes that wait at their program counter for others.
    blocked: u32,
    /// The lowest program counter of lanes that neither run nor wait.
    next_counter: usize,
    /// The barrier at which the warp waits, and whether it just ends its waiting.
    pub waiting: Option<Waiting>,
    /// Local memory: that of lane 0, of lane 1, and so on.
    pub local: Vec<u8>,
    /// Which bytes of it were written.
    pub local_written: Vec<bool>,
    /// Asynchronous copies that belong to no group yet.
    pub(super) open: Vec<Copy>,
    /// Groups of asynchronous copies that may be unfinished, the oldest first.
    pub(super) groups: VecDeque<CopyGroup>,
}

/// A warp at a barrier.
#[derive(Clone, Copy, Debug)]
pub struct Waiting {
    /// The barrier.
    pub barrier: u32,
    /// How many threads it waits for; 0 for all of the block.
    pub threads: u32,
    /// The instruction.
    pub instruction: usize,
}

/// A copy of one lane, or of several that follow each other at both ends, that has not ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Copy {
    /// The lanes, and where they write in shared memory.
    pub to: Span,
    /// Where the first reads in global memory.
    pub from: u64,
    /// How many bytes each writes.
    pub bytes: usize,
    /// How many bytes each reads; the others are zeros.
    pub source_bytes: usize,
    /// The instruction.
    pub at: usize,
}

impl Copy {
    /// The lanes as a mask.
    pub fn lanes(&self) -> u32 {
        u32::MAX >> (LANES - self.to.lanes) << self.to.lane
    }
}

/// Copies that lanes committed together.
#[derive(Debug)]
pub(super) struct CopyGroup {
    /// Lanes that have not waited for the group.
    pub lanes: u32,
    /// Their copies.
    pub copies: Vec<Copy>,
}

/// What a warp does when some of its lanes cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Switch {
    /// Other lanes run.
    Continue,
    /// All lanes have ended.
    Ended,
    /// All lanes wait for each other at different places.
    Stuck,
}

impl Warp {
    /// A warp that has ended, with the constants of a kernel in its registers.
    pub fn new(kernel: &Kernel, number: usize) -> Self {
        let counts = kernel.registers;
        let mut registers = Registers {
            words: vec![Words([0; LANES]); counts.words],
            longs: vec![Longs([0; LANES]); counts.longs],
            predicates: vec![0; counts.predicates],
        };
        for &(slot, value) in &kernel.words {
            registers.words[usize::from(slot)] = Words([value; LANES]);
        }
        for &(slot, value) in &kernel.longs {
            registers.longs[usize::from(slot)] = Longs([value; LANES]);
        }
        for &slot in &kernel.set_predicates {
            registers.predicates[usize::from(slot)] = u32::MAX;
        }
        Self {
            number,
            registers,
            live: 0,
            active: 0,
            counter: 0,
            counters: [0; LANES],
            blocked: 0,
            next_counter: usize::MAX,
            waiting: None,
            local: vec![0xff; kernel.local_bytes * LANES],
            local_written: vec![false; kernel.local_bytes * LANES],
            open: Vec::new(),
            groups: VecDeque::new(),
        }
    }

    /// Begins anew with the lanes of a mask. Registers that are not constants keep what they had, which a kernel never
    /// reads: each is written first.
    pub fn restart(&mut self, live: u32) {
        self.live = live;
        self.active = live;
        self.counter = 0;
        self.blocked = 0;
        self.next_counter = usize::MAX;
        self.waiting = None;
        self.local_written.fill(false);
        self.open.clear();
        self.groups.clear();
    }

    /// Whether all lanes have ended.
    pub fn has_ended(&self) -> bool {
        self.live == 0
    }

    /// Goes on to an instruction; other lanes join or run first if theirs is not behind it.
    #[inline]
    pub fn go_to(&mut self, counter: usize) {
        self.counter = counter;
        if counter >= self.next_counter {
            self.park();
            self.choose();
        }
    }

    /// Branches the lanes of a mask, which are some but not all of those that run.
    pub fn split(&mut self, taken: u32, target: usize) {
        self.park_at(self.active, self.counter as u32 + 1);
        self.park_at(taken, target as u32);
        self.choose();
    }

    /// Ends the lanes of a mask; the others go on behind this instruction.
    pub fn end(&mut self, ended: u32) -> Switch {
        self.live &= !ended;
        self.active &= !ended;
        if self.live == 0 {
            return Switch::Ended;
        }
        // Lanes that waited for the ended ones may go on.
        self.blocked = 0;
        self.counter += 1;
        self.park();
        self.choose();
        Switch::Continue
    }

    /// Lets lanes that wait at this instruction run with those that arrive now.
    pub fn gather(&mut self) {
        let here = lanes(self.blocked).filter(|&lane| self.counters[lane] as usize == self.counter);
        let here = here.fold(0, |mask, lane| mask | 1 << lane);
        self.blocked &= !here;
        self.active |= here;
    }

    /// Lets the running lanes wait here for lanes that have not come.
    pub fn block(&mut self) -> Switch {
        self.park();
        self.blocked |= self.active;
        if self.live & !self.blocked == 0 {
            return Switch::Stuck;
        }
        self.choose();
        Switch::Continue
    }

    /// Stores the program counter of the running lanes.
    fn park(&mut self) {
        self.park_at(self.active, self.counter as u32);
    }

    /// Stores the program counter of the lanes of a mask.
    fn park_at(&mut self, mask: u32, counter: u32) {
        for lane in 0..LANES {
            let old = self.counters[lane];
            self.counters[lane] = if mask >> lane & 1 == 1 { counter } else { old };
        }
    }

    /// Runs the lanes with the lowest program counter that do not wait.
    fn choose(&mut self) {
        let ready = self.live & !self.blocked;
        let (counter, here) = lowest(&self.counters, ready);
        (self.counter, self.active) = (counter as usize, here);
        let (next, others) = lowest(&self.counters, ready & !here);
        self.next_counter = if others == 0 { usize::MAX } else { next as usize };
    }
}

vectorised! {
/// The lowest program counter of the lanes of a mask, and which of them have it.
fn lowest(counters: &[u32; LANES], mask: u32) -> (u32, u32) {
    let mut lowest = u32::MAX;
    for (lane, &counter) in counters.iter().enumerate() {
        lowest = lowest.min(if mask >> lane & 1 == 1 { counter } else { u32::MAX });
    }
    let mut here = 0;
    for (lane, &counter) in counters.iter().enumerate() {
        here |= u32::from(counter == lowest) << lane;
    }
    (lowest, here & mask)
}
}

/// The lanes of a mask, from the lowest.
pub fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    let mut rest = mask;
    std::iter::from_fn(move || {
        if rest == 0 {
            return None;
        }
        let lane = rest.trailing_zeros() as usize;
        rest &= rest - 1;
        Some(lane)
    })
}
