//! What may not change a bit of parameters and optimizer states: ZeRO stage, chunk size, overlap,
//! prefetch, threads of a rank. Checked after 20 steps with clipping, with and without accumulation.

mod rig;

use phalanx_train::RunConfig;
use phalanx_train::config::{Chunk, ChunkWord, OptimizerKind, Reduce};

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
    ("2 threads", |c| c.train.threads = Some(2)),
    ("4 threads, stage 3", |c| (c.parallel.zero, c.train.threads) = (3, Some(4))),
];

fn check(base: RunConfig, what: &str) {
    let (model, _) = rig::golden_config();
    let steps = rig::golden_steps();
    let expected = rig::run(&model, &base, &steps);
    assert!(expected.losses.iter().all(|l| l.is_finite()));
    for (name, change) in SAME {
        let mut config = base.clone();
        change(&mut config);
        let got = rig::run(&model, &config, &steps);
        assert_eq!(got.peaks, got.planned, "{what}, {name}: peak == plan");
        // The state first: a difference there names the tensor.
        for (tensor, values) in &expected.state {
            assert!(same_bits(values, &got.state[tensor]), "{what}, {name}: {tensor} differs");
        }
        assert!(same_bits(&expected.losses, &got.losses), "{what}, {name}: losses differ");
        assert!(same_bits(&expected.grad_norms, &got.grad_norms), "{what}, {name}: norms differ");
    }
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

fn base(world: usize) -> RunConfig {
    let (_, mut config) = rig::golden_config();
    config.parallel.data = world;
    config
}

#[test]
fn one_rank() {
    check(base(1), "1 rank");
}

#[test]
fn two_ranks() {
    check(base(2), "2 ranks");
}

#[test]
fn two_ranks_reducing_each_micro_batch() {
    let mut config = base(2);
    config.batch.micro = Some(1);
    check(config, "2 ranks, 4 micro-batches");
}

#[test]
fn two_ranks_deferring_the_reduction() {
    let mut config = base(2);
    config.batch.micro = Some(2);
    config.batch.reduce = Reduce::Defer;
    check(config, "2 ranks, deferred");
}

#[test]
fn four_ranks_with_sgd() {
    let mut config = base(4);
    config.optimizer.kind = OptimizerKind::Sgd;
    config.optimizer.lr = 0.05;
    check(config, "4 ranks, SGD");
}

#[test]
fn three_ranks_do_not_divide_the_tree() {
    let mut config = base(3);
    config.batch.global = 6;
    check(config, "3 ranks");
}
