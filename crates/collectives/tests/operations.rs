//! Every operation on 1 to 8 ranks as threads, on one host and on several, with and without overlap, against a naive
//! oracle, bit for bit; a world of one is held against `Solo`.

use crate::support::table::{copies, messages, sums};
use crate::support::{
    HOSTS, Layout, Sample, groups, groups_on, host, same_bits, sample, summed, tensor, tree, values, zeros,
};
use half::{bf16, f16};
use phalanx_collectives::{Group, Options, Solo, threads};
use phalanx_cpu::Cpu;
use phalanx_simd::sums::LAST_VECTORS;
use phalanx_simd::{Isa, Lanes, vectorized};
use phalanx_tensor::{Arena, Category, DType, Device};

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

/// The vectors that `isa` stands for.
fn vectors_of(isa: Isa) -> &'static str {
    vectorized!(fn name() -> &'static str = name_body);
    #[inline(always)]
    fn name_body<L: Lanes>() -> &'static str {
        std::any::type_name::<L>()
    }
    name(isa)
}

/// Groups sum with the instruction set of their options, at most with what the processor has.
#[test]
fn groups_keep_to_their_instruction_set() {
    let sum_in = |group: &dyn Group| {
        LAST_VECTORS.set("none");
        let device = Device::new(Cpu::new(1), Arena::heap());
        let alloc = |elements: usize| {
            let mut x = device.alloc(DType::F32, [elements], Category::Communication, "x");
            device.fill(x.view_mut(), 1.0);
            x
        };
        let (_, shard) =
            group.reduce_scatter(alloc(64 * group.world_size()), alloc(64), true).wait().unwrap();
        assert!(shard.view().as_slice::<f32>().iter().all(|x| *x == group.world_size() as f32 + 1.0));
        LAST_VECTORS.get()
    };
    for isa in Isa::ALL {
        let expected = vectors_of(isa.limit(Isa::detect()));
        assert_eq!(sum_in(&Solo::new("alone").with_isa(isa)), expected, "{isa:?}");
        let options = Options { isa, overlap: false, ..Options::default() };
        std::thread::scope(|scope| {
            for endpoint in threads(2) {
                let endpoint = endpoint.with_options(options.clone());
                let sum_in = &sum_in;
                scope.spawn(move || assert_eq!(sum_in(&*endpoint.group("data")), expected, "{isa:?}"));
            }
        });
    }
}
