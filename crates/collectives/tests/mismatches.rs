//! Generated mismatches: of the same call on all ranks, one rank changes one thing. Every rank fails, both call sites are
//! named, and no buffer has changed: shared memory, TCP, carried messages, and several hosts of several ranks.

use crate::support::{HOSTS, Layout, host, ranks_on, zeros};
use phalanx_collectives::{CollectiveError, Group, Options};
use phalanx_tensor::{DType, Tensor};
use phalanx_testing::hostile::Random;

/// Mismatches for each of the eleven layouts, unless the environment says how many: 125 make more than a thousand in all.
const CASES: usize = 20;
const CASES_VARIABLE: &str = "PHALANX_TEST_MISMATCHES";

/// Every byte of the buffers of rank 0; of rank r, this plus r.
const PATTERN: u8 = 0x40;

/// A call of the whole group.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Planned {
    op: usize,
    dtype: DType,
    /// Elements of a part.
    part: usize,
    root: usize,
    accumulate: bool,
}

const OPS: [&str; 9] = [
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
];
const TYPES: [DType; 4] = [DType::F32, DType::F64, DType::BF16, DType::F16];

impl Planned {
    fn random(random: &mut Random, world: usize) -> Planned {
        Planned {
            op: random.below(OPS.len()),
            dtype: *random.pick(&TYPES),
            part: 1 + random.below(2000),
            root: random.below(world),
            accumulate: random.chance(0.5),
        }
    }

    /// The call with one thing changed that the group can see.
    fn changed(self, random: &mut Random, world: usize) -> Planned {
        loop {
            let other = Planned::random(random, world);
            let next = match random.below(5) {
                0 => Planned { op: other.op, ..self },
                1 => Planned { dtype: other.dtype, ..self },
                2 => Planned { part: other.part, ..self },
                3 => Planned { root: other.root, ..self },
                _ => Planned { accumulate: other.accumulate, ..self },
            };
            if next.seen() != self.seen() {
                return next;
            }
        }
    }

    /// The part of the call that peers see.
    fn seen(self) -> (usize, Option<(DType, usize)>, Option<usize>, bool) {
        let name = OPS[self.op];
        let sizes = (name != "barrier").then_some((self.dtype, self.part));
        let rooted = matches!(name, "broadcast" | "reduce" | "gather" | "scatter");
        (self.op, sizes, rooted.then_some(self.root), name == "reduce_scatter" && self.accumulate)
    }

    /// Runs the call. Returns its error, and the addresses of its buffers, which are lost with it.
    fn run(self, g: &dyn Group) -> (Result<(), CollectiveError>, Vec<(usize, usize)>) {
        let (device, world, rank) = (host(), g.world_size(), g.rank());
        let mut buffers = Vec::new();
        let mut tensor = |parts: usize| -> Tensor {
            let mut tensor = zeros(&device, self.dtype, parts * self.part);
            let view = tensor.view_mut();
            let (start, bytes) = (view.address().as_ptr(), view.bytes());
            // SAFETY: the tensor's own memory. Each rank has its own pattern, so a byte of another one shows.
            unsafe { start.write_bytes(PATTERN + rank as u8, bytes) };
            buffers.push((start.expose_provenance(), bytes));
            tensor
        };
        let (root, is_root) = (self.root, rank == self.root);
        let result = match OPS[self.op] {
            "all_reduce" => g.all_reduce(tensor(world)).wait().map(drop),
            "reduce_scatter" => g.reduce_scatter(tensor(world), tensor(1), self.accumulate).wait().map(drop),
            "all_gather" => g.all_gather(tensor(1), tensor(world)).wait().map(drop),
            "broadcast" => g.broadcast(tensor(world), root).wait().map(drop),
            "reduce" => g.reduce(tensor(world), root).wait().map(drop),
            "gather" => g.gather(tensor(1), is_root.then(|| tensor(world)), root).wait().map(drop),
            "scatter" => g.scatter(is_root.then(|| tensor(world)), tensor(1), root).wait().map(drop),
            "all_to_all" => g.all_to_all(tensor(world), tensor(world)).wait().map(drop),
            _ => g.barrier().wait(),
        };
        (result, buffers)
    }
}

/// Every buffer of the call has its pattern still.
fn is_unchanged(rank: usize, (address, bytes): (usize, usize)) -> bool {
    let start = std::ptr::with_exposed_provenance::<u8>(address);
    // SAFETY: a failed call loses its tensors without freeing them, and nobody writes them any more: the ranks have met
    // after their errors.
    unsafe { std::slice::from_raw_parts(start, bytes) }.iter().all(|byte| *byte == PATTERN + rank as u8)
}

fn every_mismatch_is_caught(layout: Layout) {
    let cases = std::env::var(CASES_VARIABLE).map_or(CASES, |text| text.parse().expect("a number of cases"));
    for case in 0..cases {
        let mut random = Random::of_case("mismatches", case);
        let world = layout.world();
        let (odd, overlap) = (random.below(world), random.chance(0.5));
        let same = Planned::random(&mut random, world);
        let other = same.changed(&mut random, world);
        let what = format!("case {case} on {layout:?}, {same:?}, rank {odd}: {other:?}");
        let failed = std::sync::Barrier::new(world);
        let options = Options { overlap, ..Options::default() };
        let results = ranks_on(layout, &options, |endpoint| {
            let group = endpoint.group("data");
            let planned = if endpoint.rank() == odd { other } else { same };
            let (result, buffers) = planned.run(&*group);
            failed.wait();
            (result, buffers.into_iter().all(|buffer| is_unchanged(endpoint.rank(), buffer)))
        });
        for (rank, result) in results.into_iter().enumerate() {
            let (result, unchanged) = result.unwrap();
            let Err(CollectiveError::Disagreement { report }) = result else { panic!("{what}: {result:?}") };
            assert_eq!(report.matches("tests/mismatches.rs:").count(), 2, "{what}, rank {rank}: {report}");
            for call in [same, other] {
                assert!(report.contains(OPS[call.op]), "{what}, rank {rank}: {report}");
            }
            assert!(report.contains(&format!("rank {odd}: ")), "{what}, rank {rank}: {report}");
            assert!(unchanged, "{what}: a byte was delivered on rank {rank}");
        }
    }
}

#[test]
fn in_shared_memory() {
    every_mismatch_is_caught(Layout::Shared(2));
    every_mismatch_is_caught(Layout::Shared(4));
}

#[test]
fn between_hosts() {
    HOSTS.into_iter().for_each(every_mismatch_is_caught);
}
