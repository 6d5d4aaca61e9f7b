//! Shuffles, votes, matches and reductions between the lanes of a warp.

use crate::checks::Finding;
use crate::kernel::{Exchange, ExchangeKind as Kind};
use crate::registers::{LANES, store};

use super::access::{lane_bits, set_lane};
use super::block::{Block, Stop};
use super::warp::{Warp, lanes};

impl Block<'_> {
    /// Exchanges values between the active lanes.
    pub(super) fn exchange(
        &mut self,
        warp: &mut Warp,
        exchange: &Exchange,
        active: u32,
        at: usize,
    ) -> Result<(), Stop> {
        let members = warp.registers.words[usize::from(exchange.members)].0;
        let outside = (0..LANES).fold(0, |mask, lane| mask | (!members[lane] >> lane & 1) << lane) & active;
        if outside != 0 {
            let lane = outside.trailing_zeros() as usize;
            let detail = format!("the lane is not in its member mask {:#010x}", members[lane]);
            return Err(Box::new(self.report(Finding::InactiveLane, at, (warp.number, lane), detail)));
        }
        match exchange.kind {
            Kind::ShuffleXor | Kind::ShuffleDown | Kind::ShuffleUp | Kind::ShuffleIndex => {
                return self.shuffle(warp, exchange, active, at);
            }
            _ => {}
        }
        let values: [u64; LANES] = std::array::from_fn(|lane| lane_bits(warp, exchange.operand, lane));
        for lane in lanes(active) {
            let group = members[lane] & active;
            let (result, predicate) = combined(exchange.kind, &values, lane, group);
            set_lane(warp, exchange.result, lane, result);
            if let Some(slot) = exchange.predicate {
                set_predicate(warp, slot, lane, predicate);
            }
        }
        Ok(())
    }

    fn shuffle(&mut self, warp: &mut Warp, exchange: &Exchange, active: u32, at: usize) -> Result<(), Stop> {
        let row = |slot: u16| &warp.registers.words[usize::from(slot)].0;
        let [operands, clamps] = exchange.lane.map(row);
        let (from, inside) = sources(exchange.kind, operands, clamps);
        if active != u32::MAX
            && let Some(lane) = lanes(active).find(|&lane| active >> from[lane] & 1 == 0)
        {
            let detail = format!("lane {lane} reads from lane {}, which takes no part", from[lane]);
            return Err(Box::new(self.report(Finding::InactiveLane, at, (warp.number, lane), detail)));
        }
        let values = row(exchange.operand.slot);
        let mut result = [0; LANES];
        for (out, &from) in result.iter_mut().zip(&from) {
            *out = values[from as usize % LANES];
        }
        store(&mut warp.registers.words[usize::from(exchange.result.slot)].0, &result, active);
        if let Some(slot) = exchange.predicate {
            let row = &mut warp.registers.predicates[usize::from(slot)];
            *row = *row & !active | inside & active;
        }
        Ok(())
    }
}

/// The lane that each lane of a shuffle reads from, and the mask of those for which it is within the segment; the others
/// read from themselves.
fn sources(kind: Kind, operands: &[u32; LANES], clamps: &[u32; LANES]) -> ([u32; LANES], u32) {
    let each = |find: fn(u32, u32, u32, u32) -> (u32, bool)| {
        let (mut from, mut inside) = ([0; LANES], 0);
        for lane in 0..LANES {
            let (segment, clamp) = (clamps[lane] >> 8 & 31, clamps[lane] & 31);
            let largest = lane as u32 & segment | clamp & !segment;
            let (source, is_inside) = find(lane as u32, operands[lane] & 31, segment, largest);
            from[lane] = if is_inside { source & 31 } else { lane as u32 };
            inside |= u32::from(is_inside) << lane;
        }
        (from, inside)
    };
    match kind {
        Kind::ShuffleUp => each(|lane, operand, _, largest| {
            let from = lane.wrapping_sub(operand);
            (from, from as i32 >= largest as i32)
        }),
        Kind::ShuffleDown => each(|lane, operand, _, largest| (lane + operand, lane + operand <= largest)),
        Kind::ShuffleXor => each(|lane, operand, _, largest| (lane ^ operand, lane ^ operand <= largest)),
        _ => each(|lane, operand, segment, largest| {
            let from = lane & segment | operand & !segment;
            (from, from <= largest)
        }),
    }
}

/// The result of a vote, match or reduction for a lane, and the predicate of `match.all`.
fn combined(kind: Kind, values: &[u64; LANES], lane: usize, group: u32) -> (u64, bool) {
    let each = || lanes(group).map(|other| values[other]);
    let words = || lanes(group).map(|other| values[other] as u32);
    let set = lanes(group).filter(|&other| values[other] != 0).fold(0u32, |mask, other| mask | 1 << other);
    let result = match kind {
        Kind::VoteAll => u64::from(set == group),
        Kind::VoteAny => u64::from(set != 0),
        Kind::VoteUniform => u64::from(set == 0 || set == group),
        Kind::Ballot => u64::from(set),
        Kind::MatchAny => {
            let same = lanes(group).filter(|&other| values[other] == values[lane]);
            u64::from(same.fold(0u32, |mask, other| mask | 1 << other))
        }
        Kind::MatchAll => {
            let all = each().all(|value| value == values[lane]);
            return (if all { u64::from(group) } else { 0 }, all);
        }
        Kind::ReduceAdd => u64::from(words().fold(0, u32::wrapping_add)),
        Kind::ReduceMin => u64::from(words().min().unwrap_or(0)),
        Kind::ReduceMax => u64::from(words().max().unwrap_or(0)),
        Kind::ReduceMinSigned => u64::from(words().map(|word| word as i32).min().unwrap_or(0) as u32),
        Kind::ReduceMaxSigned => u64::from(words().map(|word| word as i32).max().unwrap_or(0) as u32),
        Kind::ReduceAnd => u64::from(words().fold(u32::MAX, |all, word| all & word)),
        Kind::ReduceOr => u64::from(words().fold(0, |all, word| all | word)),
        _ => u64::from(words().fold(0, |all, word| all ^ word)),
    };
    (result, true)
}

fn set_predicate(warp: &mut Warp, slot: u16, lane: usize, value: bool) {
    let row = &mut warp.registers.predicates[usize::from(slot)];
    *row = *row & !(1 << lane) | u32::from(value) << lane;
}
