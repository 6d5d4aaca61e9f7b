//! Every operation on 1 to 8 ranks as threads, on one host and on several, with and without overlap, against a naive
//! oracle, bit for bit; a world of one is held against `Solo`.

mod support;

use half::{bf16, f16};
use phalanx_collectives::{Group, Solo};
use phalanx_tensor::DType;
use support::table::{copies, messages, sums};
use support::{
    HOSTS, Layout, Sample, groups, groups_on, host, same_bits, sample, summed, tensor, tree, values, zeros,
};

const WORLDS: [usize; 6] = [1, 2, 3, 4, 5, 8];

/// Runs `body` on every world and on several hosts, with and without overlap, and as `Solo`.
fn everywhere(body: impl Fn(&dyn Group) + Sync) {
    on_worlds_and(&HOSTS, body);
}

/// The same on few hosts: for types that only their width tells from others.
fn nearly_everywhere(body: impl Fn(&dyn Group) + Sync) {
    on_worlds_and(&HOSTS[2..3], body);
}

fn on_worlds_and(hosts: &[Layout], body: impl Fn(&dyn Group) + Sync) {
    body(&Solo::new("data"));
    for layout in WORLDS.map(Layout::Shared).into_iter().chain(hosts.iter().copied()) {
        for overlap in [false, true] {
            groups_on(layout, overlap, &body);
        }
    }
}

#[test]
fn sums_of_f32() {
    everywhere(sums::<f32>);
}

#[test]
fn sums_of_f64() {
    nearly_everywhere(sums::<f64>);
}

#[test]
fn sums_of_bf16() {
    everywhere(sums::<bf16>);
}

#[test]
fn sums_of_f16() {
    nearly_everywhere(sums::<f16>);
}

/// With more ranks than one pass sums, the result is still rounded once.
#[test]
fn sums_of_many_ranks() {
    for world in [9, 11] {
        groups(world, false, |g| {
            sums::<bf16>(g);
            sums::<f16>(g);
        });
    }
}

#[test]
fn copies_of_f32() {
    everywhere(copies::<f32>);
}

#[test]
fn copies_of_f64() {
    nearly_everywhere(copies::<f64>);
}

#[test]
fn copies_of_bf16() {
    nearly_everywhere(copies::<bf16>);
}

#[test]
fn copies_of_u32() {
    everywhere(copies::<u32>);
}

/// Many hosts add by halving and doubling, and gather in a ring, at sizes that few hosts or short buffers do not have.
#[test]
fn many_hosts() {
    for layout in
        [Layout::Hosts(&[1; 8]), Layout::Hosts(&[2; 8]), Layout::Hosts(&[1; 5]), Layout::Hosts(&[2, 1, 2, 1])]
    {
        let world = layout.world();
        groups_on(layout, false, |g| {
            sums_at::<f32>(g, &[20_000, 100_003, 400_003]);
            sums_at::<bf16>(g, &[40_001]);
            sums_at::<f64>(g, &[30_000]);
            let (device, part) = (host(), 150_001);
            let own = tensor(&device, &sample::<f32>(g.rank(), part));
            let (_, whole) = g.all_gather(own, zeros(&device, DType::F32, part * world)).wait().unwrap();
            let all: Vec<f32> = (0..world).flat_map(|r| sample(r, part)).collect();
            same_bits(&values::<f32>(&whole), &all, "all_gather");
        });
    }
}

fn sums_at<T: Sample>(g: &dyn Group, counts: &[usize]) {
    for count in counts {
        let x = g.all_reduce(tensor(&host(), &sample::<T>(g.rank(), *count))).wait().unwrap();
        same_bits(&values::<T>(&x), &summed(g.world_size(), *count), &format!("all_reduce of {count}"));
    }
}

/// Long copies use a different code path than short ones.
#[test]
fn long_copies() {
    const PART: usize = 300_003;
    for world in [2, 3] {
        groups(world, false, |g| {
            let (device, rank) = (host(), g.rank());
            let own = || tensor(&device, &sample::<f32>(rank, PART));
            let (_, whole) = g.all_gather(own(), zeros(&device, DType::F32, PART * world)).wait().unwrap();
            let all: Vec<f32> = (0..world).flat_map(|r| sample(r, PART)).collect();
            same_bits(&values::<f32>(&whole), &all, "all_gather");
            let x = g.broadcast(own(), 1).wait().unwrap();
            same_bits(&values::<f32>(&x), &sample(1, PART), "broadcast");
        });
    }
}

#[test]
fn messages_reach_their_peer() {
    for layout in [2, 3, 4, 5, 8].map(Layout::Shared).into_iter().chain(HOSTS) {
        for overlap in [false, true] {
            groups_on(layout, overlap, messages);
        }
    }
}

/// All ranks hold the same bits of the sum, which equal those of the plain tree.
#[test]
fn every_rank_has_the_same_bits() {
    for world in WORLDS {
        let all = groups(world, true, |g| {
            let x = tensor(&host(), &sample::<f32>(g.rank(), 5000));
            values::<f32>(&g.all_reduce(x).wait().unwrap())
        });
        let by_hand: Vec<f32> =
            (0..5000).map(|i| tree(&(0..world).map(|r| f32::sample(r, i)).collect::<Vec<_>>())).collect();
        all.iter().for_each(|x| same_bits(x, &by_hand, "all_reduce"));
    }
}
