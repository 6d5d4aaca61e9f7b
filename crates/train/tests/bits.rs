//! Settings that may not change a bit of parameters and optimizer states: ZeRO stage, chunk size, overlap, prefetch, threads of a
//! rank, recomputation in backward, number of hosts. Checked after steps with clipping, with and without accumulation, in every
//! precision. Each test tries a share of the changes, in whole sweeps all: together every change with two of the six batches in
//! f32, with every policy, and on one of three sets of hosts.

use crate::rig;
use crate::rig::{Ran, assert_same_state, same_bits};
use phalanx_testing::sweeps;
use phalanx_train::RunConfig;
use phalanx_train::config::{
    Checkpointing, CheckpointingWord, Chunk, ChunkWord, Float, OptimizerKind, Reduce, Tier,
};

type Change = fn(&mut RunConfig);

/// Everything that must give the same bits, as changes to a configuration.
const SAME: &[(&str, Change)] = &[
    ("stage 1", |c| c.parallel.zero = 1),
    ("stage 2", |c| c.parallel.zero = 2),
    ("stage 3", |c| c.parallel.zero = 3),
    ("no chunks, stage 0", |c| c.memory.chunk = Chunk::Word(ChunkWord::None)),
    ("no chunks, stage 2", |c| (c.parallel.zero, c.memory.chunk) = (2, Chunk::Word(ChunkWord::None))),
    ("no chunks, stage 3", |c| (c.parallel.zero, c.memory.chunk) = (3, Chunk::Word(ChunkWord::None))),
    ("small chunks, stage 3", |c| (c.parallel.zero, c.memory.chunk) = (3, Chunk::Mebibytes(0.02))),
    ("one chunk, stage 1", |c| (c.parallel.zero, c.memory.chunk) = (1, Chunk::Mebibytes(64.0))),
    ("no overlap, stage 0", |c| c.parallel.overlap = false),
    ("no overlap, stage 1", |c| (c.parallel.zero, c.parallel.overlap) = (1, false)),
    ("no overlap, stage 3", |c| (c.parallel.zero, c.parallel.overlap) = (3, false)),
    ("no prefetch, stage 3", |c| (c.parallel.zero, c.memory.prefetch) = (3, 0)),
    ("prefetch 4, stage 3", |c| (c.parallel.zero, c.memory.prefetch) = (3, 4)),
    ("made again, stage 1", |c| {
        c.parallel.zero = 1;
        c.memory.checkpointing = Checkpointing::Word(CheckpointingWord::Selective);
    }),
    ("blocks computed again, stage 3", |c| {
        (c.parallel.zero, c.memory.checkpointing) = (3, Checkpointing::Every(1));
    }),
    ("optimizer states in host memory, stage 1", |c| {
        (c.parallel.zero, c.memory.optimizer) = (1, Tier::Host);
    }),
    ("optimizer states on disk, stage 0", |c| on_disk(c)),
    ("optimizer states on disk, small chunks, stage 3", |c| {
        on_disk(c);
        (c.parallel.zero, c.memory.chunk) = (3, Chunk::Mebibytes(0.02));
    }),
    ("parameters in host memory, stage 3", |c| {
        (c.parallel.zero, c.memory.parameters) = (3, Tier::Host);
    }),
    ("parameters and optimizer states on disk, stage 3, prefetch 2", |c| {
        on_disk(c);
        (c.parallel.zero, c.memory.parameters, c.memory.prefetch) = (3, Tier::Nvme, 2);
    }),
    ("block inputs in host memory", |c| c.memory.activations = Tier::Host),
    ("block inputs on disk, blocks computed again, stage 3", |c| {
        (c.parallel.zero, c.memory.checkpointing) = (3, Checkpointing::Every(1));
        c.memory.activations = Tier::Nvme;
        c.memory.nvme_path = Some(std::env::temp_dir().as_path().into());
    }),
    ("gradients in host memory, stage 0", |c| c.memory.gradients = Tier::Host),
    ("gradients in host memory, small chunks, stage 1", |c| {
        (c.parallel.zero, c.memory.gradients, c.memory.chunk) = (1, Tier::Host, Chunk::Mebibytes(0.02));
    }),
    ("everything on disk in tiles of one block, stage 3", |c| {
        on_disk(c);
        (c.parallel.zero, c.memory.parameters, c.memory.gradients) = (3, Tier::Nvme, Tier::Nvme);
        c.memory.buffer_mb = 1.0 / 64.0;
    }),
    ("2 threads", |c| c.train.threads = Some(2)),
    ("4 threads, stage 3", |c| (c.parallel.zero, c.train.threads) = (3, Some(4))),
];

fn on_disk(config: &mut RunConfig) {
    config.memory.optimizer = Tier::Nvme;
    config.memory.nvme_path = Some(std::env::temp_dir().as_path().into());
}

/// `hosts`: the number of ranks on each host; empty: one host. The first run is on one host in any case. `share`: the first change
/// that is tried, and that each so many are.
fn check(hosts: &[usize], base: RunConfig, steps: usize, share: (usize, usize), what: &str) -> Ran {
    let (model, _) = rig::golden_config();
    let steps = &rig::golden_steps()[..steps];
    let expected = rig::run(&model, &base, steps);
    for (name, change) in sweeps::share(SAME, share.0, share.1) {
        let mut config = base.clone();
        change(&mut config);
        let what = format!("{what}, {name}");
        let got = rig::on_hosts(hosts, || rig::run(&model, &config, steps));
        assert_eq!(got.peaks, got.planned, "{what}: peak == plan");
        // The state first: a difference there names the tensor.
        assert_same_state(&what, &expected.state, &got.state);
        assert!(same_bits(&expected.losses, &got.losses), "{what}: losses differ");
        assert!(same_bits(&expected.grad_norms, &got.grad_norms), "{what}: norms differ");
        assert_eq!(expected.skipped, got.skipped, "{what}");
    }
    expected
}

/// In f32 nothing overflows. `number` is that of the test.
fn check_f32(number: usize, base: RunConfig, what: &str) {
    let steps = if sweeps::are_whole() { 20 } else { 6 };
    let ran = check(&[], base, steps, (number, 3), what);
    assert!(ran.losses.iter().all(|l| l.is_finite()) && !ran.skipped.contains(&true));
}

/// Every policy on `world` ranks, with the batch as `cut` cuts it. A tree that is not cut gives other bits,
/// so few steps tell. `number` is that of the test.
fn check_policies(number: usize, world: usize, what: &str, cut: Change) {
    for (at, (name, policy)) in rig::POLICIES.iter().enumerate() {
        let mut config = base(world);
        policy(&mut config.precision);
        cut(&mut config);
        let share = (number + at, rig::POLICIES.len());
        let ran = check(&[], config.clone(), 6, share, &format!("{what}, {name}"));
        let scaled = config.precision.compute == Float::F16;
        assert_eq!(scaled, ran.skipped.contains(&true), "{what}, {name}: the first scale overflows");
        assert!(ran.skipped.contains(&false), "{what}, {name}: a lower one does not");
        let loss = ran.losses.last().unwrap();
        assert!(loss.is_finite(), "{what}, {name}: {loss}");
    }
}

fn base(world: usize) -> RunConfig {
    let (_, mut config) = rig::golden_config();
    config.parallel.data = Some(world);
    config
}

#[test]
fn one_rank() {
    check_f32(0, base(1), "1 rank");
}

#[test]
fn two_ranks() {
    check_f32(1, base(2), "2 ranks");
}

#[test]
fn two_ranks_reducing_each_micro_batch() {
    let mut config = base(2);
    config.batch.micro = Some(1);
    check_f32(2, config, "2 ranks, 4 micro-batches");
}

#[test]
fn two_ranks_deferring_the_reduction() {
    let mut config = base(2);
    config.batch.micro = Some(2);
    config.batch.reduce = Reduce::Defer;
    check_f32(3, config, "2 ranks, deferred");
}

#[test]
fn four_ranks_with_sgd() {
    let mut config = base(4);
    config.optimizer.kind = OptimizerKind::Sgd;
    config.optimizer.lr = 0.05;
    check_f32(4, config, "4 ranks, SGD");
}

#[test]
fn three_ranks_do_not_divide_the_tree() {
    let mut config = base(3);
    config.batch.global = 6;
    check_f32(5, config, "3 ranks");
}

#[test]
fn policies_on_one_rank() {
    check_policies(0, 1, "1 rank", |_| {});
}

#[test]
fn policies_on_one_rank_that_accumulates() {
    check_policies(1, 1, "1 rank, 4 micro-batches", |c| c.batch.micro = Some(2));
}

#[test]
fn policies_on_two_ranks_reducing_each_micro_batch() {
    check_policies(2, 2, "2 ranks, 2 micro-batches", |c| c.batch.micro = Some(2));
}

#[test]
fn policies_on_two_ranks_deferring_the_reduction() {
    check_policies(3, 2, "2 ranks, deferred", |c| (c.batch.micro, c.batch.reduce) = (Some(2), Reduce::Defer));
}

#[test]
fn policies_on_three_ranks() {
    check_policies(4, 3, "3 ranks", |c| c.batch.global = 6);
}

#[test]
fn policies_on_four_ranks_with_sgd() {
    check_policies(5, 4, "4 ranks, SGD", |c| {
        c.batch.micro = Some(1);
        (c.optimizer.kind, c.optimizer.lr) = (OptimizerKind::Sgd, 0.05);
    });
}

/// Each rank on a host of its own: TCP alone.
#[test]
fn two_hosts_of_one_rank() {
    check(&[1, 1], base(2), 4, (0, 3), "2 hosts");
}

/// Hosts of different size, whose ranks do not divide the tree: shared memory and TCP.
#[test]
fn a_host_of_two_ranks_and_one_of_one() {
    let mut config = base(3);
    (config.batch.global, config.batch.micro) = (6, Some(1));
    config.precision.compute = Float::Bf16;
    check(&[2, 1], config, 4, (1, 3), "hosts of 2 ranks and 1");
}

/// Two ranks on each of two hosts, with 16-bit sums.
#[test]
fn two_hosts_of_two_ranks() {
    let mut config = base(4);
    (config.precision.compute, config.precision.communicate) = (Float::Bf16, Some(Float::Bf16));
    check(&[2, 2], config, 4, (2, 3), "2 hosts of 2 ranks");
}

/// Otherwise the result would depend on the number of ranks by more than the order of sums.
#[test]
fn what_crosses_ranks_is_rounded_on_one_rank_too() {
    let (model, _) = rig::golden_config();
    for micro_batch_size in [8, 2] {
        let norm = |communicate| {
            let mut config = base(1);
            config.batch.micro = Some(micro_batch_size);
            config.precision.communicate = communicate;
            rig::run(&model, &config, &rig::golden_steps()[..1]).grad_norms[0]
        };
        let (exact, rounded) = (norm(None), norm(Some(Float::Bf16)));
        assert_eq!(norm(Some(Float::F32)), exact);
        // Each gradient by 2^-9 at most, and so their norm.
        assert!(exact != rounded && (exact - rounded).abs() < exact / 512.0, "{exact} {rounded}");
    }
}
