//! Many calls in flight at once: they own their buffers, happen in order, and are waited for in any order.

use std::time::Duration;

use crate::support::{
    self, HOSTS, Layout, groups, groups_on, host, same_bits, sample, summed, summed_from, tensor, values,
    zeros,
};
use phalanx_collectives::{Group, Pending};
use phalanx_tensor::{DType, Tensor};

const IN_FLIGHT: usize = 60;

fn size(i: usize) -> usize {
    1 + (i * 977) % 20_000
}

enum Flight {
    Sum(Pending<Tensor>),
    Gather(Pending<(Tensor, Tensor)>),
}

fn start(g: &dyn Group, i: usize) -> Flight {
    let (device, rank, world) = (host(), g.rank(), g.world_size());
    let own = tensor(&device, &sample::<f32>(rank + i, size(i)));
    if i.is_multiple_of(3) {
        Flight::Gather(g.all_gather(own, zeros(&device, DType::F32, size(i) * world)))
    } else {
        Flight::Sum(g.all_reduce(own))
    }
}

fn finish(flight: Flight, world: usize, i: usize) {
    match flight {
        Flight::Sum(pending) => {
            let sum = values::<f32>(&pending.wait().unwrap());
            same_bits(&sum, &summed_from(i, world, size(i)), &format!("call {i}"));
        }
        Flight::Gather(pending) => {
            let expected: Vec<f32> = (0..world).flat_map(|r| sample(r + i, size(i))).collect();
            same_bits(&values::<f32>(&pending.wait().unwrap().1), &expected, &format!("call {i}"));
        }
    }
}

#[test]
fn calls_are_waited_for_in_any_order() {
    for layout in [1, 2, 3, 8].map(Layout::Shared).into_iter().chain(HOSTS) {
        let world = layout.world();
        for overlap in [false, true] {
            groups_on(layout, overlap, |g| {
                let mut flights: Vec<Option<Flight>> = (0..IN_FLIGHT).map(|i| Some(start(g, i))).collect();
                // Each rank waits in a different order; 7 and 60 have no common divisor.
                for k in 0..IN_FLIGHT {
                    let i = (k * 7 + g.rank() * 11) % IN_FLIGHT;
                    finish(flights[i].take().unwrap(), world, i);
                }
            });
        }
    }
}

/// A rank that drops what it started still takes part, so the others get their sums.
#[test]
fn a_dropped_call_still_happens() {
    for overlap in [false, true] {
        groups(3, overlap, |g| {
            for i in 0..20 {
                let pending = g.all_reduce(tensor(&host(), &sample::<f32>(g.rank(), 500)));
                if g.rank() == i % 3 {
                    drop(pending);
                } else {
                    same_bits(&values::<f32>(&pending.wait().unwrap()), &summed(3, 500), "sum");
                }
            }
        });
    }
}

/// The owner thread finishes a call that nobody waits for yet.
#[test]
fn a_call_completes_beside_its_submitter() {
    groups(2, true, |g| {
        let pending = g.all_reduce(tensor(&host(), &sample::<f32>(g.rank(), 1000)));
        let start = std::time::Instant::now();
        while !pending.is_done() {
            assert!(start.elapsed() < Duration::from_secs(60), "the owner thread does not run");
            std::thread::yield_now();
        }
        same_bits(&values::<f32>(&pending.wait().unwrap()), &summed(2, 1000), "sum");
    });
}

/// Two groups in flight at once, waited for in opposite orders by two ranks.
#[test]
fn groups_do_not_wait_for_each_other() {
    let options = phalanx_collectives::Options::default();
    let results = support::ranks(2, &options, |endpoint| {
        let (a, b) = (endpoint.group("data"), endpoint.group("tensor"));
        for _ in 0..50 {
            let x = a.all_reduce(tensor(&host(), &sample::<f32>(a.rank(), 100)));
            let y = b.all_reduce(tensor(&host(), &sample::<f64>(b.rank(), 200)));
            let (x, y) = if endpoint.rank() == 0 {
                let x = x.wait().unwrap();
                (x, y.wait().unwrap())
            } else {
                let y = y.wait().unwrap();
                (x.wait().unwrap(), y)
            };
            same_bits(&values::<f32>(&x), &summed(2, 100), "data");
            same_bits(&values::<f64>(&y), &summed(2, 200), "tensor");
        }
    });
    results.into_iter().for_each(|r| r.unwrap());
}

/// Four ranks as two pairs and as two columns: sub-groups of one name with other members.
#[test]
fn sub_groups_sum_over_their_members() {
    for layout in [Layout::Shared(4), Layout::Hosts(&[2, 2]), Layout::Hosts(&[1, 3])] {
        sub_groups(layout);
    }
}

fn sub_groups(layout: Layout) {
    let options = phalanx_collectives::Options::default();
    let results = support::ranks_on(layout, &options, |endpoint| {
        let rank = endpoint.rank();
        let rows = endpoint.sub_group("tensor", if rank < 2 { &[0, 1] } else { &[2, 3] });
        let columns = endpoint.sub_group("data", if rank % 2 == 0 { &[0, 2] } else { &[1, 3] });
        for (group, members) in
            [(rows, [rank / 2 * 2, rank / 2 * 2 + 1]), (columns, [rank % 2, rank % 2 + 2])]
        {
            assert_eq!(members[group.rank()], rank);
            let x = group.all_reduce(tensor(&host(), &sample::<f32>(rank, 300))).wait().unwrap();
            let [low, high] = members.map(|m| sample::<f32>(m, 300));
            let expected: Vec<f32> = low.iter().zip(&high).map(|(a, b)| a + b).collect();
            same_bits(&values::<f32>(&x), &expected, group.name());
        }
    });
    results.into_iter().for_each(|r| r.unwrap());
}

#[test]
fn statistics_count_what_peers_read() {
    groups(4, true, |g| {
        g.all_reduce(tensor(&host(), &sample::<f32>(g.rank(), 1024))).wait().unwrap();
        g.barrier().wait().unwrap();
        let statistics = g.take_statistics();
        assert_eq!((statistics.calls, statistics.sent_bytes), (2, 6144));
        assert!(statistics.busy_s > 0.0 && statistics.busy_s < 60.0, "{statistics:?}");
        assert_eq!(g.take_statistics(), Default::default());
    });
}
