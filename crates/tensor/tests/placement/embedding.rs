//! Embedding tables: lookups, sums of embeddings, positions, and the gradients of tables.

use phalanx_plan::trace::Axis;
use phalanx_plan::trace::Placement::{Partial, Replicated, Shard};
use phalanx_tensor::{Lookup, Positions};

use super::{along, device, found, ids, of, placed, tensor};

/// The second half of the table's rows, and all of them.
const LOOKUPS: [Lookup; 2] = [Lookup::Token { first: 10, vocab: 20 }, Lookup::Token { first: 0, vocab: 10 }];

/// tokens, table, positions (None: none in the same call), and then y. Positions are found by the number of
/// the first row, so that their table is whole where rows are cut.
#[test]
fn embedding() {
    for (tokens, table, positions, y, words) in [
        (Replicated, Replicated, Some(Replicated), Replicated, &[][..]),
        (Shard(0), Replicated, Some(Replicated), Shard(0), &[]),
        (Shard(1), Replicated, Some(Replicated), Shard(1), &[]),
        (Replicated, Shard(1), Some(Shard(1)), Shard(2), &[]),
        (Replicated, Shard(1), None, Shard(2), &[]),
        // Rows of the vocabulary: a term of each rank.
        (Replicated, Shard(0), None, Partial, &[]),
        (
            Replicated,
            Shard(0),
            Some(Replicated),
            Partial,
            &[
                "`positions` is replicated, but embedding adds it as `positions` to what is a partial sum",
                "would add it once",
            ],
        ),
        (
            Replicated,
            Shard(1),
            Some(Replicated),
            Shard(2),
            &["`positions` is replicated", "cut over `tensor`"],
        ),
        (Shard(1), Replicated, Some(Shard(0)), Shard(1), &["`positions` is sharded in dimension 0"]),
        (Replicated, Replicated, Some(Shard(1)), Replicated, &["`positions` is sharded", "all_gather"]),
        (Shard(0), Shard(0), None, Shard(0), &["`table` is sharded in dimension 0", "`ids` of the same"]),
        (
            Replicated,
            Partial,
            None,
            Replicated,
            &["`table` is a partial sum that embedding reads as `table`"],
        ),
    ] {
        for lookup in LOOKUPS {
            let device = device();
            let row = format!("tokens {tokens}, table {table}, positions {positions:?}, {lookup:?}");
            let mut ids = ids(&device, "tokens", &[2, 4], tokens);
            device.upload(&[0u32; 8], ids.view_mut());
            let table = placed(&device, "table", &[10, 6], table);
            let positions = positions.map(|p| placed(&device, "positions", &[4, 6], p));
            let added = positions.as_ref().map(|p| Positions { table: p.view(), first_row: 0, seq: 4 });
            let mut x = tensor(&device, "x", &[2, 4, 6]);
            device.embedding(ids.view(), lookup, table.view(), added, false, x.view_mut());
            assert_eq!(of(&device, &x), y, "{row}");
            found(&device, words, &row);
        }
    }
}

/// Types are added to what tokens gave: ids, table, y before (None: zero), and then y.
#[test]
fn embeddings_that_are_added() {
    for (ids_are, table, before, after, words) in [
        (Replicated, Replicated, Some(Replicated), Replicated, &[][..]),
        (Shard(0), Replicated, Some(Shard(0)), Shard(0), &[]),
        (Shard(1), Replicated, Some(Shard(1)), Shard(1), &[]),
        (Replicated, Shard(1), Some(Shard(2)), Shard(2), &[]),
        // Another term of the same sum.
        (Replicated, Shard(0), Some(Partial), Partial, &[]),
        (Replicated, Shard(0), None, Partial, &[]),
        (Replicated, Replicated, Some(Partial), Replicated, &["`y` is a partial sum", "missing before"]),
        (Replicated, Shard(0), Some(Replicated), Partial, &["`y` is replicated", "would add it once"]),
        (Shard(1), Replicated, Some(Replicated), Shard(1), &["`y` is replicated", "cut over `tensor`"]),
        (Shard(1), Replicated, Some(Shard(2)), Shard(1), &["`y` is sharded in dimension 2"]),
    ] {
        let device = device();
        let row = format!("ids {ids_are}, table {table}, y {before:?}");
        let ids = ids(&device, "ids", &[2, 4], ids_are);
        let (table, mut y) = (placed(&device, "table", &[2, 6], table), tensor(&device, "y", &[2, 4, 6]));
        match before {
            Some(placement) => device.place(y.view(), along(placement)),
            None => device.fill(y.view_mut(), 0.0),
        }
        device.embedding(ids.view(), Lookup::Type, table.view(), None, true, y.view_mut());
        assert_eq!(of(&device, &y), after, "{row}");
        found(&device, words, &row);
    }
}

/// y before (None: zero), positions, and then y: it stays as it is, and is no term of a sum.
#[test]
fn add_positions() {
    for (before, positions, after, words) in [
        (Some(Replicated), Replicated, Replicated, &[][..]),
        (Some(Shard(0)), Replicated, Shard(0), &[]),
        (Some(Shard(1)), Replicated, Shard(1), &[]),
        (Some(Shard(2)), Shard(1), Shard(2), &[]),
        (None, Replicated, Replicated, &[]),
        (
            Some(Partial),
            Replicated,
            Replicated,
            &["`y` is a partial sum, but add_positions adds it as `y`", "all_reduce or reduce_scatter"],
        ),
        (Some(Shard(2)), Replicated, Shard(2), &["`positions` is replicated", "cut over `tensor`"]),
        (Some(Shard(2)), Shard(0), Shard(2), &["`positions` is sharded in dimension 0"]),
        (Some(Shard(1)), Shard(0), Shard(1), &["`positions` is sharded in dimension 0", "all_gather"]),
        (Some(Replicated), Shard(1), Replicated, &["`positions` is sharded in dimension 1", "all_gather"]),
        (Some(Replicated), Partial, Replicated, &["`positions` is a partial sum", "missing before"]),
    ] {
        let device = device();
        let row = format!("y {before:?}, positions {positions}");
        let (positions, mut y) =
            (placed(&device, "positions", &[4, 6], positions), tensor(&device, "y", &[2, 4, 6]));
        match before {
            Some(placement) => device.place(y.view(), along(placement)),
            None => device.fill(y.view_mut(), 0.0),
        }
        device.add_positions(Positions { table: positions.view(), first_row: 0, seq: 4 }, y.view_mut());
        assert_eq!(of(&device, &y), after, "{row}");
        found(&device, words, &row);
    }
}

/// tokens, dy, what was said of dtable, and then dtable and dpositions, also when the next micro-batch is
/// added.
#[test]
fn embedding_backward() {
    for (tokens, dy, said, dtable, dpositions, words) in [
        (Replicated, Replicated, Replicated, Replicated, Replicated, &[][..]),
        (Shard(0), Shard(0), Replicated, Partial, Partial, &[]),
        (Shard(1), Shard(1), Replicated, Partial, Partial, &[]),
        // Every rank has all rows of dy and some of the table.
        (Replicated, Replicated, Shard(0), Shard(0), Replicated, &[]),
        (Replicated, Shard(2), Replicated, Shard(1), Shard(1), &[]),
        (Replicated, Shard(2), Shard(1), Shard(1), Shard(1), &[]),
        // What was said of columns does not make whole ones parts.
        (Replicated, Replicated, Shard(1), Replicated, Replicated, &[]),
        (Shard(1), Replicated, Replicated, Partial, Replicated, &["`dy` is replicated", "`ids` of the same"]),
        (
            Replicated,
            Shard(1),
            Replicated,
            Partial,
            Partial,
            &["`tokens` is replicated", "shares with `ids`"],
        ),
    ] {
        for lookup in LOOKUPS {
            let device = device();
            let row = format!("tokens {tokens}, dy {dy}, dtable {said}");
            let ids = ids(&device, "tokens", &[2, 4], tokens);
            let dy = placed(&device, "dy", &[2, 4, 6], dy);
            let mut table = placed(&device, "dtable", &[10, 6], said);
            let mut positions = tensor(&device, "dpositions", &[4, 6]);
            for accumulate in [false, true] {
                device.embedding_backward(ids.view(), lookup, dy.view(), table.view_mut(), accumulate);
                device.position_gradient(dy.view(), 0, 4, positions.view_mut(), accumulate);
                assert_eq!([of(&device, &table), of(&device, &positions)], [dtable, dpositions], "{row}");
                found(&device, words, &row);
            }
        }
    }
}

/// Terms of a gradient are added to terms: ids and dy, what is added to, and then that.
#[test]
fn gradients_of_tables_are_added_to_their_like() {
    for (rows, old, expected, words) in [
        (Shard(1), Partial, Partial, &[][..]),
        (Replicated, Replicated, Replicated, &[]),
        (Shard(1), Replicated, Partial, &["is replicated", "would add it once"]),
        (Shard(1), Shard(0), Partial, &["is sharded in dimension 0", "to what is a partial sum"]),
        (Replicated, Partial, Replicated, &["is a partial sum", "missing before"]),
        (Replicated, Shard(1), Replicated, &["is sharded in dimension 1", "all_gather"]),
    ] {
        let device = device();
        let row = format!("rows {rows}, gradient {old}");
        let ids = ids(&device, "tokens", &[2, 4], rows);
        let dy = placed(&device, "dy", &[2, 4, 6], rows);
        let [mut table, mut positions] =
            [("dtable", 10), ("dpositions", 4)].map(|(name, rows)| placed(&device, name, &[rows, 6], old));
        device.embedding_backward(ids.view(), LOOKUPS[1], dy.view(), table.view_mut(), true);
        assert_eq!(of(&device, &table), expected, "{row}");
        found(&device, words, &row);
        device.position_gradient(dy.view(), 0, 4, positions.view_mut(), true);
        assert_eq!(of(&device, &positions), expected, "{row}");
        found(&device, words, &row);
    }
}

/// Rows over data and a table of vocabulary rows over the axis, forwards and backwards.
#[test]
fn an_embedding_over_two_axes() {
    let device = device();
    let over_data = |placement| along(placement).with(Axis::Data, Shard(0));
    let tokens = ids(&device, "tokens", &[2, 4], Replicated);
    device.place(tokens.view(), over_data(Replicated));
    let table = placed(&device, "table", &[10, 6], Shard(0));
    let positions = placed(&device, "positions", &[4, 6], Replicated);
    let mut y = tensor(&device, "y", &[2, 4, 6]);
    device.embedding(tokens.view(), LOOKUPS[0], table.view(), None, false, y.view_mut());
    assert_eq!(device.placements(y.view()), over_data(Partial));
    // Reduced over the axis, here or to parts of the sequence.
    for reduced in [Replicated, Shard(1)] {
        device.place(y.view(), over_data(reduced));
        device.add_positions(Positions { table: positions.view(), first_row: 0, seq: 4 }, y.view_mut());
        assert_eq!(device.placements(y.view()), over_data(reduced));
        let mut dpositions = tensor(&device, "dpositions", &[4, 6]);
        device.position_gradient(y.view(), 0, 4, dpositions.view_mut(), false);
        let terms = if reduced == Replicated { Replicated } else { Partial };
        assert_eq!(device.placements(dpositions.view()), along(terms).with(Axis::Data, Partial));
    }
    device.place(y.view(), over_data(Replicated));
    let mut dtable = placed(&device, "dtable", &[10, 6], Shard(0));
    for accumulate in [false, true] {
        device.embedding_backward(tokens.view(), LOOKUPS[0], y.view(), dtable.view_mut(), accumulate);
        assert_eq!(device.placements(dtable.view()), along(Shard(0)).with(Axis::Data, Partial));
    }
    found(&device, &[], "embedding");
}
