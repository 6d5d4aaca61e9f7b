//! Accesses to consecutive bytes, which most accesses of warps are, by rows of 16 bytes.
//!
//! As long as a row is used as a whole, one cell describes its four words: lanes follow each other in it as the cell says.
//! A row that is used in parts has a cell for each word, until it is used as a whole again.

use super::shadow::SEVERAL;
use super::{Access, Accessor, Cell};

/// Bytes of a row.
pub const ROW: usize = 16;

/// The operation of a row's write that says: the words have cells of their own.
const BY_WORDS: u32 = u32::MAX;

/// Which lanes have which of some consecutive bytes.
#[derive(Clone, Copy, Debug)]
pub struct Lanes {
    /// The lane of the first byte.
    pub first: usize,
    /// Logarithm of the bytes of each lane.
    pub shift: u32,
    /// Whether several lanes have all bytes.
    pub several: bool,
}

impl Lanes {
    /// All bytes belong to one lane.
    pub const ONE: Self = Self { first: 0, shift: usize::BITS - 2, several: false };

    #[inline]
    fn at(self, offset: usize) -> u16 {
        if self.several { SEVERAL } else { (self.first + (offset >> self.shift)) as u16 }
    }

    /// How lanes follow each other in a row: the logarithm of the words of each, at most 2.
    #[inline]
    fn in_row(self) -> u16 {
        if self.several { 2 } else { self.shift.saturating_sub(2).min(2) as u16 }
    }
}

/// An access that is not ordered after an earlier one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conflict {
    /// The place of the access.
    pub at: usize,
    /// Its lane.
    pub lane: usize,
    /// The earlier access.
    pub earlier: Access,
}

/// The cells of a memory.
pub struct Shadow<'a> {
    /// One for each row.
    pub rows: &'a mut [Cell],
    /// One for each word, which count where the row says so.
    pub words: &'a mut [Cell],
}

impl Shadow<'_> {
    /// Records an access to consecutive bytes: the first conflict.
    #[inline]
    pub fn touch<const SHARED: bool>(
        &mut self,
        at: usize,
        count: usize,
        lanes: Lanes,
        by: &Accessor,
        write: bool,
    ) -> Option<Conflict> {
        let end = at + count;
        let (several, in_row) = (lanes.shift < 2, lanes.in_row());
        let (mut found, mut place) = (None, at);
        while place < end {
            let row = place / ROW;
            let next = ((row + 1) * ROW).min(end);
            let is_whole = !by.atomic && next - place == ROW;
            let lane = if several { SEVERAL } else { lanes.at(place - at) };
            let now = by.access(lane, in_row);
            if !is_whole || !touch_row::<SHARED>(&mut self.rows[row], now, by, write) {
                let conflict = self.touch_words::<SHARED>((place, next), at, lanes, by, write);
                found = found.or(conflict);
                if is_whole {
                    self.join_words(row, now, write);
                }
            }
            place = next;
        }
        found
    }

    /// Records an access to bytes of one row word by word.
    fn touch_words<const SHARED: bool>(
        &mut self,
        (place, end): (usize, usize),
        at: usize,
        lanes: Lanes,
        by: &Accessor,
        write: bool,
    ) -> Option<Conflict> {
        self.split(place / ROW);
        let (mut found, mut byte) = (None, place);
        let of_lane = if lanes.several { 4 } else { 1usize << lanes.shift.min(2) };
        while byte < end {
            let count = of_lane.min(4 - byte % 4).min(end - byte);
            let mask = ((1u16 << count) - 1) << (byte % 4);
            let (lane, cell) = (lanes.at(byte - at), &mut self.words[byte / 4]);
            let earlier = match write {
                true => cell.write::<SHARED>(by, lane, mask),
                false => cell.read::<SHARED>(by, lane, mask),
            };
            if let (None, Some(earlier)) = (found, earlier) {
                let lane = if lane == SEVERAL { lanes.first } else { usize::from(lane) };
                found = Some(Conflict { at: byte, lane, earlier });
            }
            byte += count;
        }
        found
    }

    /// Gives the words of a row cells of their own.
    fn split(&mut self, row: usize) {
        let cell = &mut self.rows[row];
        if cell.write.operation == BY_WORDS {
            return;
        }
        for (word, out) in self.words[row * 4..row * 4 + 4].iter_mut().enumerate() {
            let of_word = |access| of_word(access, word as u16);
            *out = Cell { write: of_word(cell.write), reads: cell.reads.map(of_word) };
        }
        cell.write.operation = BY_WORDS;
    }

    /// Describes the words of a row, all of which were just used, by one cell if that loses nothing.
    fn join_words(&mut self, row: usize, now: Access, write: bool) {
        let words = &self.words[row * 4..row * 4 + 4];
        let first = words[0];
        let of_now = |access: Access, word: usize| access == of_word(now, word as u16);
        if write {
            if words.iter().enumerate().all(|(word, cell)| of_now(cell.write, word)) {
                self.rows[row] = Cell { write: now, ..Cell::default() };
            }
            return;
        }
        // Of accesses by other operations, only the operation counts.
        let joins = |access: Access, first: Access| {
            access.operation == first.operation
                && access.operation != now.operation
                && !access.is_atomic()
                && (access.operation == 0 || access.bytes() == 15)
        };
        let joined = words.iter().enumerate().all(|(word, cell)| {
            joins(cell.write, first.write)
                && of_now(cell.reads[0], word)
                && joins(cell.reads[1], first.reads[1])
        });
        if joined {
            let several = |access: Access| Access { who: access.who | SEVERAL, ..access };
            self.rows[row] = Cell { write: several(first.write), reads: [now, several(first.reads[1])] };
        }
    }
}

/// An access to a row as that of one of its words.
fn of_word(access: Access, word: u16) -> Access {
    if access.operation == 0 {
        return Access::default();
    }
    let lane = match access.lane_bits() {
        SEVERAL => SEVERAL,
        first => first + (word >> access.bytes()),
    };
    Access { who: access.who & !63 | lane | 15 << 11, ..access }
}

/// Records an access to a whole row, unless its words have to be looked at one by one.
#[inline]
fn touch_row<const SHARED: bool>(row: &mut Cell, now: Access, by: &Accessor, write: bool) -> bool {
    let Cell { write: earlier, reads: [first, second] } = *row;
    if earlier.operation == BY_WORDS || !is_ordered::<SHARED>(earlier, now, by) {
        return false;
    }
    if !write {
        if first.is_beside(now) {
            let Some(joined) = joined(first, now) else { return false };
            row.reads[0] = joined;
        } else if second.is_beside(now) {
            let Some(joined) = joined(second, now) else { return false };
            row.reads[1] = joined;
        } else {
            row.reads = [now, first];
        }
        return true;
    }
    if !is_ordered::<SHARED>(first, now, by) || !is_ordered::<SHARED>(second, now, by) {
        return false;
    }
    let joined = if earlier.is_beside(now) { joined(earlier, now) } else { Some(now) };
    let Some(write) = joined else { return false };
    *row = Cell { write, ..Cell::default() };
    true
}

/// Whether an access to a row is ordered before another of the same, for sure.
#[inline]
fn is_ordered<const SHARED: bool>(earlier: Access, now: Access, by: &Accessor) -> bool {
    if earlier.operation != by.operation {
        return earlier.operation == 0 || SHARED || by.is_before(earlier.operation);
    }
    if earlier.block != by.block {
        return SHARED;
    }
    let warp = earlier.warp();
    earlier.phase <= by.known[warp]
        || warp == by.warp && (earlier.who == now.who || earlier.lane_bits() == SEVERAL)
}

/// Two accesses to a row that are beside each other, if one cell can say which lanes they have.
#[inline]
fn joined(first: Access, now: Access) -> Option<Access> {
    if first.who == now.who {
        return Some(now);
    }
    let several = first.lane_bits() == SEVERAL || now.lane_bits() == SEVERAL;
    // Lanes that follow each other alike, but begin with another, differ in every word.
    (several || first.bytes() == now.bytes()).then_some(Access { who: now.who | SEVERAL, ..now })
}

#[cfg(test)]
mod tests {
    use phalanx_system::random::SplitMix64;

    use super::*;

    const BYTES: usize = 256;

    /// The same access lane by lane and word by word, without rows.
    fn touch_each(
        cells: &mut [Cell],
        at: usize,
        count: usize,
        lanes: Lanes,
        by: &Accessor,
        write: bool,
    ) -> bool {
        let each = if lanes.several { count } else { 1 << lanes.shift };
        let mut found = false;
        for first in (at..at + count).step_by(each) {
            let lanes_here = if lanes.several { lanes.first..lanes.first + 3 } else { 0..1 };
            for several in lanes_here {
                let lane = if lanes.several { several as u16 } else { lanes.at(first - at) };
                let size = each.min(4);
                for byte in (first..first + each).step_by(size) {
                    let mask = ((1u16 << size) - 1) << (byte % 4);
                    found |= match write {
                        true => cells[byte / 4].write::<false>(by, lane, mask),
                        false => cells[byte / 4].read::<false>(by, lane, mask),
                    }
                    .is_some();
                }
            }
        }
        found
    }

    /// Random accesses by eight warps, with barriers and new operations between them: rows find what words find.
    #[test]
    fn rows_find_what_words_find() {
        let mut conflicts = [0; 2];
        for seed in 0..300 {
            let mut random = SplitMix64::new(seed);
            let mut pick = |count: usize| (random.next_u64() % count as u64) as usize;
            let (mut rows, mut words) =
                (vec![Cell::default(); BYTES / ROW], vec![Cell::default(); BYTES / 4]);
            let mut cells = words.clone();
            let (mut operation, mut phase, mut known) = (1, 1, [0; 32]);
            for step in 0..40 {
                match pick(8) {
                    0 => (phase, known) = (phase + 1, [phase; 32]),
                    1 => operation += 1,
                    _ => {}
                }
                let shift = pick(5) as u32;
                let write = pick(3) == 0;
                let several = !write && pick(4) == 0;
                let lanes_max = if several { 1 } else { [1, 4, 8, 16][pick(4)] };
                let count = (lanes_max << shift).min(BYTES);
                let at = pick(((BYTES - count) >> shift) + 1) << shift;
                let lanes = Lanes { first: pick(16), shift, several };
                // Every other operation is ordered before those after it.
                let order = |earlier: u32| earlier.is_multiple_of(2);
                let by = Accessor {
                    operation,
                    block: 0,
                    warp: pick(2),
                    phase,
                    known,
                    instruction: step,
                    atomic: pick(12) == 0 && shift >= 2,
                    order: &order,
                    last_ordered: Default::default(),
                };
                let mut shadow = Shadow { rows: &mut rows, words: &mut words };
                let found = shadow.touch::<false>(at, count, lanes, &by, write).is_some();
                let expected = touch_each(&mut cells, at, count, lanes, &by, write);
                assert_eq!(found, expected, "seed {seed}, step {step}: {count} bytes at {at} by {lanes:?}");
                conflicts[usize::from(found)] += 1;
                if found {
                    break;
                }
            }
        }
        assert!(conflicts[0] > 1000 && conflicts[1] > 200, "{conflicts:?}");
    }
}
