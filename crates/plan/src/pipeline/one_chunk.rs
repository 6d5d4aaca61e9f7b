//! The schedules with one stage per rank and a whole backward: model parallelism, GPipe, 1F1B.
//!
//! All idle (p - 1)(F + B) or more; they differ in how many micro-batches' activations they hold.

use super::action::{Action, Kind};

fn forward(stage: usize, micro_batch: usize) -> Action {
    Action { stage, kind: Kind::Forward, micro_batch }
}

fn backward(stage: usize, micro_batch: usize) -> Action {
    Action { stage, kind: Kind::Backward, micro_batch }
}

/// Each micro-batch runs forward and backward before the next. Holds one micro-batch.
pub(super) fn model_parallel(rank: usize, micro_batches: usize) -> Vec<Action> {
    (0..micro_batches).flat_map(|number| [forward(rank, number), backward(rank, number)]).collect()
}

/// All forwards, then all backwards. Holds all micro-batches.
pub(super) fn gpipe(rank: usize, micro_batches: usize) -> Vec<Action> {
    let forwards = (0..micro_batches).map(|number| forward(rank, number));
    forwards.chain((0..micro_batches).map(|number| backward(rank, number))).collect()
}

/// As many forwards in advance as there are ranks below, then one forward and one backward in turn. Holds `ranks -
/// rank` micro-batches.
pub(super) fn one_forward_one_backward(rank: usize, ranks: usize, micro_batches: usize) -> Vec<Action> {
    let ahead = ranks - rank - 1;
    let mut order: Vec<Action> = (0..ahead).map(|number| forward(rank, number)).collect();
    for number in 0..micro_batches {
        if number + ahead < micro_batches {
            order.push(forward(rank, number + ahead));
        }
        order.push(backward(rank, number));
    }
    order
}
