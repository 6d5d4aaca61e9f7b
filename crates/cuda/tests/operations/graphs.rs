//! Launches that come again in the same order are graphs, of which a device keeps a bounded number.

use phalanx_cuda::checks::graphs::{fill_in_pieces, measure};
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
