//! Every operation on 1 to 8 ranks as threads, on one host and on several, with and without overlap, against a naive
//! oracle, bit for bit; a world of one is held against `Solo`.

mod support;

use half::{bf16, f16};
use phalanx_collectives::{Group, Solo};
use phalanx_tensor::DType;
use support::{
    HOSTS, Layout, Sample, accumulated, groups, groups_on, host, same_bits, sample, summed, tensor, tree,
    values, zeros,
};

const WORLDS: [usize; 6] = [1, 2, 3, 4, 5, 8];
/// Odd counts, whole cache lines, several blocks per part.
const COUNTS: [usize; 8] = [0, 1, 3, 17, 100, 1000, 4096, 300_001];
const PARTS: [usize; 5] = [0, 1, 5, 64, 3000];

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

fn sums<T: Sample>(g: &dyn Group) {
    let (device, rank, world) = (host(), g.rank(), g.world_size());
    for count in COUNTS {
        let x = g.all_reduce(tensor(&device, &sample::<T>(rank, count))).wait().unwrap();
        same_bits(&values::<T>(&x), &summed(world, count), &format!("all_reduce of {count}, {world} ranks"));
        let root = count % world;
        let x = g.reduce(tensor(&device, &sample::<T>(rank, count)), root).wait().unwrap();
        if rank == root {
            same_bits(&values::<T>(&x), &summed(world, count), &format!("reduce of {count}, {world} ranks"));
        }
    }
    for part in PARTS {
        let what = format!("reduce_scatter of {world} x {part}");
        let whole = sample::<T>(rank, part * world);
        let expected = &summed::<T>(world, part * world)[rank * part..(rank + 1) * part];
        let start = sample::<T>(77, part);

        let shard = tensor(&device, &start);
        let (w, shard) = g.reduce_scatter(tensor(&device, &whole), shard, false).wait().unwrap();
        same_bits(&values::<T>(&shard), expected, &what);
        same_bits(&values::<T>(&w), &whole, &what);

        let (_, shard) = g.reduce_scatter(w, tensor(&device, &start), true).wait().unwrap();
        let added = &accumulated::<T>(77, world, part)[rank * part..(rank + 1) * part];
        same_bits(&values::<T>(&shard), added, &format!("{what}, accumulating"));

        let w = g.reduce_scatter_in_place(tensor(&device, &whole)).wait().unwrap();
        same_bits(&values::<T>(&w)[rank * part..(rank + 1) * part], expected, &format!("{what} in place"));
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

fn copies<T: Sample>(g: &dyn Group) {
    let (device, rank, world) = (host(), g.rank(), g.world_size());
    for part in PARTS {
        let what = format!("{world} x {part}");
        let all: Vec<T> = (0..world).flat_map(|r| sample(r, part)).collect();
        let own = sample::<T>(rank, part);
        let empty = || zeros(&device, T::DTYPE, part * world);

        let (shard, whole) = g.all_gather(tensor(&device, &own), empty()).wait().unwrap();
        same_bits(&values::<T>(&whole), &all, &format!("all_gather of {what}"));
        same_bits(&values::<T>(&shard), &own, &what);

        let mut whole = empty();
        whole.view_mut().into_slice::<T>()[rank * part..(rank + 1) * part].copy_from_slice(&own);
        let whole = g.all_gather_in_place(whole).wait().unwrap();
        same_bits(&values::<T>(&whole), &all, &format!("all_gather in place of {what}"));

        let from = tensor(&device, &sample::<T>(rank, part * world));
        let (_, to) = g.all_to_all(from, empty()).wait().unwrap();
        let mine = rank * part..(rank + 1) * part;
        let expected: Vec<T> =
            (0..world).flat_map(|r| sample::<T>(r, part * world)[mine.clone()].to_vec()).collect();
        same_bits(&values::<T>(&to), &expected, &format!("all_to_all of {what}"));

        for root in 0..world {
            let is_root = rank == root;
            let x = g.broadcast(tensor(&device, &own), root).wait().unwrap();
            same_bits(&values::<T>(&x), &sample(root, part), &format!("broadcast of {what}"));

            let (_, whole) = g.gather(tensor(&device, &own), is_root.then(empty), root).wait().unwrap();
            assert_eq!(whole.is_some(), is_root);
            if let Some(whole) = whole {
                same_bits(&values::<T>(&whole), &all, &format!("gather of {what}"));
            }
            let whole = is_root.then(|| tensor(&device, &all));
            let (_, x) = g.scatter(whole, zeros(&device, T::DTYPE, part), root).wait().unwrap();
            same_bits(&values::<T>(&x), &own, &format!("scatter of {what}"));
        }
    }
    g.barrier().wait().unwrap();
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
            sums_at::<f32>(g, &[20_000, 100_003, 400_000]);
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

/// A ring of messages, even ranks sending first, between collectives of the whole group.
#[test]
fn messages_reach_their_peer() {
    for layout in [2, 3, 4, 5, 8].map(Layout::Shared).into_iter().chain(HOSTS) {
        let world = layout.world();
        for overlap in [false, true] {
            groups_on(layout, overlap, |g| {
                let (device, rank) = (host(), g.rank());
                let (next, previous) = ((rank + 1) % world, (rank + world - 1) % world);
                for count in COUNTS {
                    let send = || g.send(tensor(&device, &sample::<f32>(rank, count)), next, count as u64);
                    let recv = || g.recv(zeros(&device, DType::F32, count), previous, count as u64);
                    // With an odd world the last rank and rank 0 both send first: not to each other.
                    let x = if rank % 2 == 0 {
                        let sent = send();
                        let x = recv().wait().unwrap();
                        sent.wait().unwrap();
                        x
                    } else {
                        let x = recv().wait().unwrap();
                        send().wait().unwrap();
                        x
                    };
                    same_bits(&values::<f32>(&x), &sample(previous, count), "message");
                    g.barrier().wait().unwrap();
                }
            });
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
