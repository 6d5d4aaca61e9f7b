//! Launches that come again in the same order are graphs, of which a device keeps a bounded number.

use phalanx_cuda::checks::graphs::{fail_captures, fill_in_pieces, measure};
use phalanx_cuda::{Launches, Options};

use crate::bench::Bench;

#[test]
fn launches_that_come_again_are_graphs_until_there_are_enough() {
    let Some(bench) = Bench::new("graphs") else { return };
    let launched = |run: &dyn Fn()| {
        let before = bench.launches();
        run();
        let after = bench.launches();
        Launches {
            single: after.single - before.single,
            graphs: after.graphs - before.graphs,
            in_graphs: after.in_graphs - before.in_graphs,
        }
    };
    let fill = |segments, value| launched(&|| fill_in_pieces(bench.card(), segments, value).unwrap());
    assert_eq!(fill(3, 1.0), Launches { single: 96, graphs: 0, in_graphs: 0 }, "the first time");
    for value in [2.0, 3.0, 4.0] {
        assert_eq!(fill(3, value), Launches { single: 0, graphs: 3, in_graphs: 96 }, "{value}");
    }
    let made = measure(&bench).unwrap();
    assert_eq!((made.graphs, made.nodes), (64, 2048));
    // Two more than a device keeps.
    assert_eq!(fill(66, 5.0), Launches { single: 64, graphs: 64, in_graphs: 2048 });
    assert_eq!(fill(66, 6.0), Launches { single: 64, graphs: 64, in_graphs: 2048 }, "no room");
}

#[test]
fn without_graphs_launches_go_one_by_one() {
    let Some(bench) = Bench::of("no graphs", Options { graphs: false, ..Options::default() }) else { return };
    for value in [1.0, 2.0, 3.0] {
        fill_in_pieces(bench.card(), 2, value).unwrap();
    }
    assert_eq!(bench.launches(), Launches { single: 3 * 64, graphs: 0, in_graphs: 0 });
}

/// The segments of which each fill is one, as `single` and as graphs, for so many fills of which all are right.
fn launched(bench: &Bench, fills: usize) -> Vec<bool> {
    let is_graph = |value: usize| {
        let before = bench.launches();
        fill_in_pieces(bench.card(), 1, value as f32 + 1.0).unwrap();
        let after = bench.launches();
        assert_eq!(after.single - before.single + after.in_graphs - before.in_graphs, 32, "{value}");
        after.graphs > before.graphs
    };
    (0..fills).map(is_graph).collect()
}

#[test]
fn a_capture_that_fails_halfway_is_tried_again_later() {
    let Some(bench) = Bench::new("captures that fail") else { return };
    // The second fill is captured, the eight behind it are not, nor are the sixteen behind the second failure.
    if !fail_captures(2, 10) {
        return;
    }
    let found = launched(&bench, 30);
    let first = found.iter().position(|is_graph| *is_graph);
    assert_eq!(first, Some(1 + 1 + 8 + 1 + 16), "{found:?}");
    assert!(found[27..].iter().all(|is_graph| *is_graph), "{found:?}");
}

#[test]
fn captures_that_always_fail_are_given_up() {
    let Some(bench) = Bench::new("captures that always fail") else { return };
    if !fail_captures(4, 31) {
        return;
    }
    // No fault is left behind the fourth; and nobody asks for a capture any more.
    assert!(launched(&bench, 1 + 4 + 8 + 16 + 32 + 70).iter().all(|is_graph| !is_graph));
}
