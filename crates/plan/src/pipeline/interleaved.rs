//! Interleaved 1F1B: v chunks a rank, stage s on rank s % p. Idle (p - 1)(F + B)/v, messages times v.
//!
//! Micro-batches go in rounds of equal size: a round passes the rank's chunks one after the other, all of its
//! micro-batches through each. There are m / p rounds, rounded down, as in PyTorch's
//! `ScheduleInterleaved1F1B`; Megatron has only rounds of p. What a round has beyond p waits on the channel
//! from the last rank to the first, which is as deep as that takes ([`super::depth()`]). Source: Narayanan et al.,
//! arXiv 2104.04473, section 2.2.

use super::action::{Action, Kind};
use super::error::ScheduleError;

/// Number of rounds of `micro_batches` on `ranks`.
fn rounds(ranks: usize, micro_batches: usize) -> usize {
    (micro_batches / ranks).max(1)
}

/// Checks that the micro-batches fall into rounds of equal size.
pub(super) fn equal_rounds(ranks: usize, micro_batches: usize) -> Result<(), ScheduleError> {
    let works = |number: usize| number >= ranks && number.is_multiple_of(rounds(ranks, number));
    // Multiples of the ranks work, so one is found before the distance reaches `ranks`.
    let near = |distance| [micro_batches + distance, micro_batches.saturating_sub(distance)];
    match (0..=ranks).flat_map(near).find(|&number| works(number)) {
        Some(nearest) if nearest != micro_batches => {
            Err(ScheduleError::UnequalRounds { ranks, micro_batches, nearest })
        }
        _ => Ok(()),
    }
}

/// Warm-up: forwards of v - 1 chunks of a round, and two more for every rank below. Then one forward and one backward
/// in turn.
pub(super) fn order(rank: usize, ranks: usize, chunks: usize, micro_batches: usize) -> Vec<Action> {
    let round = micro_batches / rounds(ranks, micro_batches);
    let total = chunks * micro_batches;
    let ahead = ((chunks - 1) * round + 2 * (ranks - rank - 1)).min(total);
    let action = |kind, chunk, number| {
        let micro_batch = number / (round * chunks) * round + number % round;
        Action { stage: chunk * ranks + rank, kind, micro_batch }
    };
    let chunk = |number: usize| number / round % chunks;
    let forward = |number| action(Kind::Forward, chunk(number), number);
    let backward = |number| action(Kind::Backward, chunks - 1 - chunk(number), number);
    let mut order: Vec<Action> = (0..ahead).map(forward).collect();
    for number in 0..total {
        if number + ahead < total {
            order.push(forward(number + ahead));
        }
        order.push(backward(number));
    }
    order
}
