//! The zero-bubble schedules of Qi et al., arXiv 2401.10241: weight gradients wait to fill bubbles.
//!
//! ZB-H1 is 1F1B with the weight parts r behind on rank r: the stage below gets its gradient earlier, and the
//! ranks idle (p - 1)(F + I - W). ZB-H2 runs twice as many forwards ahead and has the weight parts twice as far behind:
//! where F = I = W no rank waits between its first and its last action, once there are 2p - 1 micro-batches. ZB-V gives each rank two chunks, stage s and stage 2p - 1 - s, so that the
//! last stage sits on the first rank and backward starts there at once; it waits as little as ZB-H2. The phases of ZB-H1
//! and ZB-V are PyTorch's (`ScheduleInterleavedZeroBubble` with one stage a rank, `ScheduleZBVZeroBubble`).

use super::action::{Action, Kind};

/// ZB-H1 (`distance` 1): holds p - r micro-batches until I, and p until W. ZB-H2 (`distance` 2): 2(p - r) - 1 and 2p - 1.
/// Forwards are `distance` micro-batches ahead of I, and W behind it, for each rank on that side.
pub(super) fn h(distance: usize, rank: usize, ranks: usize, micro_batches: usize) -> Vec<Action> {
    let action = |kind, micro_batch| Action { stage: rank, kind, micro_batch };
    let [ahead, behind] = [ranks - rank - 1, rank].map(|others| (distance * others).min(micro_batches));
    let mut order: Vec<Action> = (0..ahead).map(|number| action(Kind::Forward, number)).collect();
    for number in 0..micro_batches {
        if number + ahead < micro_batches {
            order.push(action(Kind::Forward, number + ahead));
        }
        order.push(action(Kind::Input, number));
        if number >= behind {
            order.push(action(Kind::Weight, number - behind));
        }
    }
    order.extend((micro_batches - behind..micro_batches).map(|number| action(Kind::Weight, number)));
    order
}

/// ZB-V: chunk 0 is the stage on the way from the first rank to the last, chunk 1 the one on the way back.
pub(super) fn v(rank: usize, ranks: usize, micro_batches: usize) -> Vec<Action> {
    use Kind::{Forward, Input, Weight};
    // The phases need at least this many micro-batches; actions of micro-batches that do not exist are left out.
    let filled = micro_batches.max(2 * ranks - 1);
    let below = ranks - rank;
    let mut row = RankActions::new([rank, 2 * ranks - 1 - rank]);
    row.repeat(2 * below - 1, &[(0, Forward)]);
    row.repeat(rank, &[(1, Forward), (0, Forward)]);
    row.repeat(below, &[(1, Forward), (1, Input), (1, Weight)]);
    while row.done(1, Forward) < filled {
        if row.done(0, Forward) < filled {
            row.repeat(1, &[(0, Forward)]);
        }
        row.repeat(1, &[(0, Input), (0, Weight), (1, Forward), (1, Input), (1, Weight)]);
    }
    row.repeat(rank, &[(0, Input), (1, Input)]);
    row.repeat(below, &[(0, Input), (0, Weight)]);
    for chunk in [1, 0] {
        row.repeat(filled - row.done(chunk, Weight), &[(chunk, Weight)]);
    }
    row.order.retain(|action| action.micro_batch < micro_batches);
    row.order
}

/// The actions of a rank under construction. In each chunk, the next micro-batch of a kind is the one after the last.
struct RankActions {
    stages: [usize; 2],
    order: Vec<Action>,
}

impl RankActions {
    fn new(stages: [usize; 2]) -> RankActions {
        RankActions { stages, order: Vec::new() }
    }

    /// Micro-batches that chunk `chunk` has done.
    fn done(&self, chunk: usize, kind: Kind) -> usize {
        let same = |action: &&Action| action.stage == self.stages[chunk] && action.kind == kind;
        self.order.iter().rev().find(same).map_or(0, |action| action.micro_batch + 1)
    }

    fn repeat(&mut self, times: usize, group: &[(usize, Kind)]) {
        for &(chunk, kind) in (0..times).flat_map(|_| group) {
            let micro_batch = self.done(chunk, kind);
            self.order.push(Action { stage: self.stages[chunk], kind, micro_batch });
        }
    }
}
