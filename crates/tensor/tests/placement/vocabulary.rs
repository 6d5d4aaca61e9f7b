//! Logits and losses over a vocabulary that is sharded by rows.

use phalanx_plan::trace::Axis;
use phalanx_plan::trace::Placement::{self, Partial, Replicated, Shard};
use phalanx_tensor::{CrossEntropy, Layout, Tensor, VocabularyLoss, VocabularyStatistics, Weight};

use super::{along, device, found, ids, of, placed, tensor, zero_sum};

/// x, w `[vocab, hidden]`, bias (None: none), targets, and then the statistics of rows, and the exponentials.
type StatisticsRow = ([Placement; 2], Option<Placement>, Placement, [Placement; 2], &'static [&'static str]);

#[test]
#[allow(clippy::too_many_lines, reason = "a list of cases")]
fn vocabulary_statistics() {
    let (none, whole) = (None, Some(Replicated));
    let rows: [StatisticsRow; 14] = [
        ([Replicated, Replicated], whole, Replicated, [Replicated, Replicated], &[]),
        // Rows of the batch, of the sequence.
        ([Shard(0), Replicated], whole, Shard(0), [Shard(0), Shard(0)], &[]),
        ([Shard(1), Replicated], whole, Shard(1), [Shard(0), Shard(0)], &[]),
        // Classes: what a part says of its rows is to be gathered.
        ([Replicated, Shard(0)], none, Replicated, [Shard(0), Shard(1)], &[]),
        ([Replicated, Shard(0)], Some(Shard(0)), Replicated, [Shard(0), Shard(1)], &[]),
        (
            [Replicated, Shard(0)],
            whole,
            Replicated,
            [Shard(0), Shard(1)],
            &["`bias` is replicated, but vocabulary_statistics adds it as `bias`", "cut over `tensor`"],
        ),
        (
            [Replicated, Replicated],
            Some(Shard(0)),
            Replicated,
            [Replicated, Replicated],
            &["`bias` is sharded in dimension 0", "all_gather"],
        ),
        (
            [Shard(2), Shard(1)],
            whole,
            Replicated,
            [Replicated, Replicated],
            &["`x` is sharded in dimension 2", "would be a partial sum"],
        ),
        (
            [Shard(0), Replicated],
            whole,
            Replicated,
            [Shard(0), Shard(0)],
            &["`targets` is replicated", "`x` of the same vocabulary_statistics"],
        ),
        (
            [Replicated, Replicated],
            whole,
            Shard(1),
            [Shard(0), Shard(0)],
            &["`x` is replicated", "`targets` of the same vocabulary_statistics"],
        ),
        (
            [Shard(1), Shard(0)],
            none,
            Shard(1),
            [Shard(0), Shard(0)],
            &["`w` is sharded in dimension 0", "only one can be cut over `tensor`"],
        ),
        (
            [Partial, Replicated],
            whole,
            Replicated,
            [Replicated, Replicated],
            &["`x` is a partial sum that vocabulary_statistics reads as `x`"],
        ),
        (
            [Replicated, Partial],
            none,
            Replicated,
            [Replicated, Replicated],
            &["vocabulary_statistics reads as `w`"],
        ),
        (
            [Replicated, Replicated],
            Some(Partial),
            Replicated,
            [Replicated, Replicated],
            &["`bias` is a partial sum", "missing before"],
        ),
    ];
    for ([x, w], bias, targets, expected, words) in rows {
        for training in [true, false] {
            let device = device();
            let row = format!("x {x}, w {w}, bias {bias:?}, targets {targets}, training {training}");
            let (x, w) = (placed(&device, "x", &[2, 4, 6], x), placed(&device, "w", &[10, 6], w));
            let bias = bias.map(|p| placed(&device, "bias", &[10], p));
            let targets = ids(&device, "targets", &[2, 4], targets);
            let mut exponentials = training.then(|| tensor(&device, "exponentials", &[8, 10]));
            let [mut blocks, mut statistics] = ["blocks", "statistics"].map(|n| tensor(&device, n, &[8, 4]));
            device.run(VocabularyStatistics {
                x: x.view(),
                w: Weight { matrix: w.view(), layout: Layout::OutIn },
                bias: bias.as_ref().map(Tensor::view),
                targets: targets.view(),
                first: 0,
                exponentials: exponentials.as_mut().map(Tensor::view_mut),
                blocks: blocks.view_mut(),
                statistics: statistics.view_mut(),
            });
            assert_eq!([&statistics, &blocks].map(|x| of(&device, x)), expected, "{row}");
            assert_eq!(exponentials.map_or(expected[1], |e| of(&device, &e)), expected[1], "{row}");
            found(&device, words, &row);
        }
    }
}

/// statistics `[parts, rows, 4]`, targets, exponentials, and then the loss and the derivatives.
#[test]
fn vocabulary_loss() {
    for (statistics, targets, exponentials, expected, words) in [
        (Replicated, Replicated, Replicated, [Replicated, Replicated], &[][..]),
        // Derivatives of logits stay where their classes are.
        (Replicated, Replicated, Shard(1), [Replicated, Shard(1)], &[]),
        // Rows: each rank has the losses of its own.
        (Shard(1), Shard(0), Shard(0), [Partial, Shard(0)], &[]),
        (
            Shard(1),
            Replicated,
            Shard(0),
            [Partial, Shard(0)],
            &["`targets` is replicated, while `statistics` of the same vocabulary_loss is sharded"],
        ),
        (Replicated, Shard(0), Replicated, [Partial, Replicated], &["`statistics` is replicated"]),
        // Parts that were not gathered.
        (
            Shard(0),
            Replicated,
            Shard(1),
            [Partial, Shard(1)],
            &["`targets` is replicated, while `statistics` of the same vocabulary_loss is sharded"],
        ),
        (
            Partial,
            Replicated,
            Replicated,
            [Replicated, Replicated],
            &["`statistics` is a partial sum that vocabulary_loss reads as `statistics`"],
        ),
    ] {
        for training in [true, false] {
            let device = device();
            let row = format!("statistics {statistics}, targets {targets}, training {training}");
            let statistics = placed(&device, "statistics", &[2, 8, 4], statistics);
            let targets = ids(&device, "targets", &[8], targets);
            let mut logits = training.then(|| placed(&device, "logits", &[8, 10], exponentials));
            let (blocks, mut loss) = (tensor(&device, "blocks", &[8, 4]), zero_sum(&device));
            // The second slice of rows is added to the first.
            for accumulate in [false, true] {
                device.run(VocabularyLoss {
                    statistics: statistics.view(),
                    blocks: blocks.view(),
                    targets: targets.view(),
                    first: 10,
                    columns: 10,
                    classes: 20,
                    numbers: CrossEntropy::scaled(1.0),
                    exponentials: logits.as_mut().map(Tensor::view_mut),
                    weights: None,
                    losses: None,
                    loss: loss.view_mut(),
                    accumulate,
                });
                assert_eq!(of(&device, &loss), expected[0], "{row}");
                found(&device, words, &row);
            }
            assert_eq!(logits.map_or(expected[1], |l| of(&device, &l)), expected[1], "{row}");
        }
    }
}

/// exponentials, and then the derivatives that take their place.
#[test]
fn derivatives_of_logits() {
    for (exponentials, derivatives, words) in [
        (Replicated, Replicated, &[][..]),
        (Shard(0), Shard(0), &[]),
        (Shard(1), Shard(1), &[]),
        (Partial, Replicated, &["`logits` is a partial sum that vocabulary_loss reads as `exponentials`"]),
    ] {
        let device = device();
        let (all, blocks) = (tensor(&device, "all", &[2, 8, 4]), tensor(&device, "blocks", &[8, 4]));
        let targets = ids(&device, "targets", &[8], Replicated);
        let (mut logits, mut loss) = (placed(&device, "logits", &[8, 10], exponentials), zero_sum(&device));
        device.run(VocabularyLoss {
            statistics: all.view(),
            blocks: blocks.view(),
            targets: targets.view(),
            first: 0,
            columns: 10,
            classes: 20,
            numbers: CrossEntropy::scaled(1.0),
            exponentials: Some(logits.view_mut()),
            weights: None,
            losses: None,
            loss: loss.view_mut(),
            accumulate: false,
        });
        assert_eq!(of(&device, &logits), derivatives, "{exponentials}");
        found(&device, words, &format!("exponentials {exponentials}"));
    }
}

/// The loss that is added to, the rows that are added.
#[test]
fn losses_are_added_to_their_like() {
    for (old, rows, words) in [
        (Partial, [Shard(1), Shard(0)], &[][..]),
        (Replicated, [Shard(1), Shard(0)], &["`sum` is replicated", "would add it once"]),
        (Partial, [Replicated, Replicated], &["`sum` is a partial sum", "adds it as `loss`"]),
    ] {
        let device = device();
        let statistics = placed(&device, "statistics", &[1, 8, 4], rows[0]);
        let targets = ids(&device, "targets", &[8], rows[1]);
        let (blocks, mut loss) = (tensor(&device, "blocks", &[8, 4]), zero_sum(&device));
        device.place(loss.view(), along(old));
        let (numbers, to) = (CrossEntropy::scaled(1.0), loss.view_mut());
        device.run(VocabularyLoss {
            statistics: statistics.view(),
            blocks: blocks.view(),
            targets: targets.view(),
            first: 0,
            columns: 10,
            classes: 10,
            numbers,
            exponentials: None,
            weights: None,
            losses: None,
            loss: to,
            accumulate: true,
        });
        found(&device, words, &format!("loss {old}, rows {rows:?}"));
    }
}

/// Rows over data and classes over the axis, through everything that a head does, in two slices of the rows;
/// the statistics of a part are gathered, or (second) that is forgotten.
#[test]
fn a_head_over_two_axes() {
    for gathers in [true, false] {
        let device = device();
        let rows_over_data = |along_axis| along(along_axis).with(Axis::Data, Shard(0));
        let x = tensor(&device, "x", &[2, 4, 6]);
        device.place(x.view(), rows_over_data(Replicated));
        let targets = ids(&device, "targets", &[2, 4], Replicated);
        device.place(targets.view(), rows_over_data(Replicated));
        let w = placed(&device, "w", &[10, 6], Shard(0));
        let w = Weight { matrix: w.view(), layout: Layout::OutIn };
        let bias = placed(&device, "bias", &[10], Shard(0));
        let [mut logits, mut blocks, mut own, mut dx, mut dw, mut db] =
            [&[4, 10][..], &[4, 4], &[4, 4], &[2, 4, 6], &[10, 6], &[10]].map(|s| tensor(&device, "head", s));
        let mut sum = zero_sum(&device);
        for start in [0, 4] {
            let flat = start * 6..(start + 4) * 6;
            let x = x.view().range(flat.clone()).reshape([4, 6]);
            let targets = targets.view().range(start..start + 4);
            let (to_logits, to_blocks) = (Some(logits.view_mut()), blocks.view_mut());
            let bias = Some(bias.view());
            device.run(VocabularyStatistics {
                x,
                w,
                bias,
                targets,
                first: 0,
                exponentials: to_logits,
                blocks: to_blocks,
                statistics: own.view_mut(),
            });
            assert_eq!(device.placements(own.view()), rows_over_data(Shard(0)));
            let all = tensor(&device, "all", &[2, 4, 4]);
            let gathered = along(Replicated).with(Axis::Data, Shard(1));
            device.place(all.view(), gathered);
            let seen = if gathers { all.view() } else { own.view().reshape([1, 4, 4]) };
            let (numbers, to_logits) = (CrossEntropy::scaled(1.0), Some(logits.view_mut()));
            let (blocks, add) = (blocks.view(), start > 0);
            device.run(VocabularyLoss {
                statistics: seen,
                blocks,
                targets,
                first: 0,
                columns: 10,
                classes: 20,
                numbers,
                exponentials: to_logits,
                weights: None,
                losses: None,
                loss: sum.view_mut(),
                accumulate: add,
            });
            let dlogits = logits.view();
            device.linear_input_gradient(dlogits, w, dx.view_mut().range(flat).reshape([4, 6]), false);
            device.linear_weight_gradient(x, dlogits, dw.view_mut(), Layout::OutIn, add);
            device.bias_gradient(dlogits, db.view_mut(), add);
            let forgotten = &["`targets` is replicated", "`statistics` of the same vocabulary_loss"][..];
            found(&device, if gathers { &[] } else { forgotten }, &format!("rows from {start}"));
        }
        let mut loss = tensor(&device, "loss", &[1]);
        device.scaled(sum.view(), 0.5, loss.view_mut());
        let of_loss = along(if gathers { Replicated } else { Partial }).with(Axis::Data, Partial);
        assert_eq!(device.placements(loss.view()), of_loss);
        assert_eq!(device.placements(logits.view()), rows_over_data(Shard(1)));
        assert_eq!(device.placements(dx.view()), rows_over_data(Partial));
        assert_eq!(device.placements(dw.view()), along(Shard(0)).with(Axis::Data, Partial));
        assert_eq!(device.placements(db.view()), along(Shard(0)).with(Axis::Data, Partial));
        found(&device, &[], "head");
    }
}
