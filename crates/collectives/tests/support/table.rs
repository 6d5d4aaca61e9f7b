//! Every operation of a group, against the naive oracle, bit for bit.

use phalanx_collectives::Group;
use phalanx_tensor::DType;

use super::{Sample, accumulated, host, same_bits, sample, summed, tensor, values, zeros};

/// Odd counts, whole cache lines, several blocks per part.
const COUNTS: [usize; 8] = [0, 1, 3, 17, 100, 1000, 4096, 300_001];
const PARTS: [usize; 5] = [0, 1, 5, 64, 3000];

/// Sums of a type.
pub fn sums<T: Sample>(g: &dyn Group) {
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

/// Copies of a type.
pub fn copies<T: Sample>(g: &dyn Group) {
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

/// A ring of messages, even ranks sending first, between collectives of the whole group.
pub fn messages(g: &dyn Group) {
    let (device, rank, world) = (host(), g.rank(), g.world_size());
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
}
