//! Who accessed a word of memory last, and whether the next access is ordered after that.
//!
//! Each word of 4 bytes has a cell with its last write and its last reads from two warps. Order within a block is that
//! of vector clocks: a warp has a phase, which a barrier increases, and knows up to which phase of every other warp
//! it is ordered. Order between operations is that of streams and events (`queues`).

/// The block number of accesses by copies.
pub const HOST_BLOCK: u32 = u32::MAX;

/// The lane number that stands for several lanes.
pub(super) const SEVERAL: u16 = 63;

/// One access. Operation 0 means that there was none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Access {
    /// The operation: a launch or a copy.
    pub operation: u32,
    /// The block of the launch.
    pub block: u32,
    /// The phase of the warp.
    pub phase: u32,
    /// The instruction, as far as 16 bits reach.
    pub instruction: u16,
    /// From the lowest bit: lane (6), warp (5), bytes of the word (4; in a row, how lanes follow), atomic (1).
    pub(super) who: u16,
}

impl Access {
    /// The lane, if it was one.
    pub fn lane(self) -> Option<u32> {
        let lane = self.who & 63;
        (lane != SEVERAL).then_some(u32::from(lane))
    }

    /// The warp.
    pub fn warp(self) -> usize {
        usize::from(self.who >> 6 & 31)
    }

    /// The lane, or `SEVERAL`.
    pub(super) fn lane_bits(self) -> u16 {
        self.who & 63
    }

    pub(super) fn bytes(self) -> u16 {
        self.who >> 11 & 15
    }

    pub(super) fn is_atomic(self) -> bool {
        self.who >> 15 == 1
    }

    /// Whether it was in the same phase of the same warp.
    #[inline]
    pub(super) fn is_beside(self, other: Self) -> bool {
        /// The bits of warp and atomic.
        const SAME: u16 = 31 << 6 | 1 << 15;
        (self.operation, self.block, self.phase) == (other.operation, other.block, other.phase)
            && (self.who ^ other.who) & SAME == 0
    }

    /// Both accesses, which are beside each other.
    fn joined(self, other: Self) -> Self {
        let lane = if self.who & 63 == other.who & 63 { self.who & 63 } else { SEVERAL };
        Self { who: lane | (self.who | other.who) & !63, ..other }
    }
}

/// The thread that accesses memory now, and what it is ordered after.
pub struct Accessor<'a> {
    /// The operation.
    pub operation: u32,
    /// The block.
    pub block: u32,
    /// The warp.
    pub warp: usize,
    /// The phase of the warp.
    pub phase: u32,
    /// Up to which phase of each warp this one is ordered after it.
    pub known: [u32; 32],
    /// The instruction.
    pub instruction: usize,
    /// Whether the access is atomic.
    pub atomic: bool,
    /// Which operations are ordered before this one.
    pub order: &'a dyn Fn(u32) -> bool,
    /// The operation that was last found to be ordered before this one: most accesses meet the same.
    pub last_ordered: std::cell::Cell<u32>,
}

impl Accessor<'_> {
    /// The access of a lane to bytes of a word.
    #[inline]
    pub(super) fn access(&self, lane: u16, bytes: u16) -> Access {
        Access {
            operation: self.operation,
            block: self.block,
            phase: self.phase,
            instruction: self.instruction.min(usize::from(u16::MAX)) as u16,
            who: lane | (self.warp as u16) << 6 | bytes << 11 | u16::from(self.atomic) << 15,
        }
    }

    /// Whether an operation is ordered before this one.
    #[inline]
    pub(super) fn is_before(&self, operation: u32) -> bool {
        if self.last_ordered.get() == operation {
            return true;
        }
        let is_before = (self.order)(operation);
        if is_before {
            self.last_ordered.set(operation);
        }
        is_before
    }

    /// Whether an earlier access is ordered before that of a lane. Shared memory is new for each block.
    #[inline]
    fn is_ordered<const SHARED: bool>(&self, earlier: Access, lane: u16, bytes: u16) -> bool {
        if earlier.operation == 0 || earlier.bytes() & bytes == 0 {
            return true;
        }
        if earlier.operation != self.operation {
            return SHARED || self.is_before(earlier.operation);
        }
        if self.atomic && earlier.is_atomic() {
            return true;
        }
        if earlier.block != self.block {
            return SHARED;
        }
        let same_thread = earlier.warp() == self.warp && earlier.lane_bits() == lane;
        // Several lanes of this warp: this one may be all of them.
        let unknown_lane = earlier.warp() == self.warp && earlier.lane_bits() == SEVERAL;
        same_thread || unknown_lane || earlier.phase <= self.known[earlier.warp()]
    }
}

/// The accesses to a word of 4 bytes.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Cell {
    pub(super) write: Access,
    pub(super) reads: [Access; 2],
}

impl Cell {
    /// A read of some bytes by a lane: the write that it is not ordered after, if any.
    #[inline]
    pub fn read<const SHARED: bool>(&mut self, accessor: &Accessor, lane: u16, bytes: u16) -> Option<Access> {
        let now = accessor.access(lane, bytes);
        let [first, second] = self.reads;
        if first.is_beside(now) {
            self.reads[0] = first.joined(now);
        } else if second.is_beside(now) {
            self.reads[1] = second.joined(now);
        } else {
            self.reads = [now, first];
        }
        if !accessor.is_ordered::<SHARED>(self.write, lane, bytes) {
            return Some(self.write);
        }
        // Atomic accesses among the reads are those of other warps, see `write`.
        let is_conflict =
            |earlier: &Access| earlier.is_atomic() && !accessor.is_ordered::<SHARED>(*earlier, lane, bytes);
        [first, second].into_iter().find(is_conflict)
    }

    /// A write of some bytes by a lane: the access that it is not ordered after, if any.
    #[inline]
    pub fn write<const SHARED: bool>(
        &mut self,
        accessor: &Accessor,
        lane: u16,
        bytes: u16,
    ) -> Option<Access> {
        let now = accessor.access(lane, bytes);
        let accesses = [self.write, self.reads[0], self.reads[1]];
        let conflict =
            accesses.into_iter().find(|&earlier| !accessor.is_ordered::<SHARED>(earlier, lane, bytes));
        let earlier = self.write;
        // Atomic writes do not order each other, so those of one other warp are kept.
        let is_hidden = accessor.atomic && earlier.is_atomic() && earlier.operation == now.operation;
        self.reads = if earlier.is_beside(now) {
            self.reads.map(|read| if accessor.atomic && read.is_atomic() { read } else { Access::default() })
        } else {
            [if is_hidden { earlier } else { Access::default() }, Access::default()]
        };
        self.write = if earlier.is_beside(now) { earlier.joined(now) } else { now };
        conflict
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accessor<'a>(
        warp: usize,
        phase: u32,
        known: &[u32; 32],
        order: &'a dyn Fn(u32) -> bool,
    ) -> Accessor<'a> {
        let (known, last_ordered) = (*known, Default::default());
        let (operation, block, instruction, atomic) = (1, 0, 0, false);
        Accessor { operation, block, warp, phase, known, instruction, atomic, order, last_ordered }
    }

    #[test]
    fn warps_race_until_a_barrier() {
        let never = |_| false;
        let fresh = [0; 32];
        let mut cell = Cell::default();
        assert_eq!(cell.write::<false>(&accessor(0, 1, &fresh, &never), 3, 15), None);
        assert!(cell.read::<false>(&accessor(1, 1, &fresh, &never), 3, 15).is_some());
        let after = [1; 32];
        assert_eq!(cell.read::<false>(&accessor(1, 2, &after, &never), 3, 15), None);
        assert!(
            cell.write::<false>(&accessor(0, 2, &after, &never), 3, 15).is_some(),
            "a write after a read"
        );
    }

    #[test]
    fn lanes_race_unless_their_bytes_differ() {
        let never = |_| false;
        let fresh = [0; 32];
        let mut cell = Cell::default();
        assert_eq!(cell.write::<false>(&accessor(0, 1, &fresh, &never), 0, 0b0011), None);
        assert_eq!(cell.write::<false>(&accessor(0, 1, &fresh, &never), 1, 0b1100), None);
        let mut cell = Cell::default();
        assert_eq!(cell.write::<false>(&accessor(0, 1, &fresh, &never), 0, 15), None);
        assert!(cell.write::<false>(&accessor(0, 1, &fresh, &never), 1, 15).is_some());
    }

    #[test]
    fn operations_are_ordered_by_streams() {
        let fresh = [0; 32];
        let (never, always) = (|_| false, |_| true);
        let mut cell = Cell::default();
        assert_eq!(cell.write::<false>(&accessor(0, 1, &fresh, &never), 0, 15), None);
        let next = |order| Accessor { operation: 2, ..accessor(4, 1, &fresh, order) };
        assert!(cell.read::<false>(&next(&never), 7, 15).is_some());
        assert_eq!(cell.read::<false>(&next(&always), 7, 15), None);
    }
}
