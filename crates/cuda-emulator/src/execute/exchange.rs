//! Shuffles, votes, matches and reductions between the lanes of a warp.

use crate::checks::Finding;
use crate::kernel::{Exchange, ExchangeKind as Kind};
use crate::registers::LANES;

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
        let values: [u64; LANES] = std::array::from_fn(|lane| lane_bits(warp, exchange.operand, lane));
        let members = &warp.registers.words[usize::from(exchange.members)].0;
        if let Some(lane) = lanes(active).find(|&lane| members[lane] >> lane & 1 == 0) {
            let detail = format!("the lane is not in its member mask {:#010x}", members[lane]);
            return Err(Box::new(self.report(Finding::InactiveLane, at, (warp.number, lane), detail)));
        }
        let members = *members;
        match exchange.kind {
            Kind::ShuffleXor | Kind::ShuffleDown | Kind::ShuffleUp | Kind::ShuffleIndex => {
                return self.shuffle(warp, exchange, &values, active, at);
            }
            _ => {}
        }
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

    fn shuffle(
        &mut self,
        warp: &mut Warp,
        exchange: &Exchange,
        values: &[u64; LANES],
        active: u32,
        at: usize,
    ) -> Result<(), Stop> {
        let [lane_slot, clamp_slot] = exchange.lane.map(usize::from);
        let (operands, clamps) = (warp.registers.words[lane_slot].0, warp.registers.words[clamp_slot].0);
        for lane in lanes(active) {
            let (from, is_inside) = source(exchange.kind, lane as u32, operands[lane], clamps[lane]);
            let from = if is_inside { from as usize & 31 } else { lane };
            if active >> from & 1 == 0 {
                let detail = format!("lane {lane} reads from lane {from}, which takes no part");
                return Err(Box::new(self.report(Finding::InactiveLane, at, (warp.number, lane), detail)));
            }
            set_lane(warp, exchange.result, lane, values[from]);
            if let Some(slot) = exchange.predicate {
                set_predicate(warp, slot, lane, is_inside);
            }
        }
        Ok(())
    }
}

/// The lane that a shuffle reads from, and whether it is within the segment.
fn source(kind: Kind, lane: u32, operand: u32, clamp: u32) -> (u32, bool) {
    let (operand, segment, clamp) = (operand & 31, clamp >> 8 & 31, clamp & 31);
    let largest = lane & segment | clamp & !segment;
    match kind {
        Kind::ShuffleUp => {
            let from = lane.wrapping_sub(operand);
            (from, from as i32 >= largest as i32)
        }
        Kind::ShuffleDown => (lane + operand, lane + operand <= largest),
        Kind::ShuffleXor => (lane ^ operand, lane ^ operand <= largest),
        _ => {
            let from = lane & segment | operand & !segment;
            (from, from <= largest)
        }
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
