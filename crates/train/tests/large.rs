//! Thousands of ranks, on devices that only record: one rank of each place in the pipeline, and what it plans to hold
//! and to do.

use phalanx_models::Gpt2;
use phalanx_plan::trace::PhaseName;
use phalanx_train::config::Float;
use phalanx_train::{RankPlan, RunConfig, RunPlan, Spec};

/// GPT-3 175B (Brown et al., arXiv 2005.14165) on the mesh of Narayanan et al. (arXiv 2104.04473): tensor 8, pipeline
/// 8, data 24.
#[test]
fn gpt3_is_planned_by_one_rank_a_stage() {
    let model =
        Gpt2 { layers: 96, hidden: 12288, heads: 96, vocab: 51200, positions: 2048, ..Gpt2::default() };
    let mut config = RunConfig::default();
    config.model.seq = 2048;
    config.batch.global = 1536;
    config.batch.micro = Some(1);
    let parallel = &mut config.parallel;
    (parallel.pipeline, parallel.data, parallel.tensor) = (8, Some(24), 8);
    (parallel.zero, parallel.sequence_parallel) = (1, true);
    config.precision.compute = Float::Bf16;
    let plan = RunPlan::new(Spec::new(&config, model, 0, 1).unwrap()).unwrap();
    assert_eq!(
        plan.ranks.iter().map(|rank| rank.rank).collect::<Vec<_>>(),
        Vec::from_iter((0..8).map(|p| p * 192))
    );
    assert_eq!(plan.parameters() / 1_000_000_000, 174);
    // Their equation 3 without recomputation; causal attention computes half of the products, and tiles on the
    // diagonal.
    let (b, s, l, h, v) = (1536.0, 2048.0, 96.0, 12288.0, 51200.0);
    let flops = 72.0 * b * s * l * h * h * (1.0 + s / (12.0 * h) + v / (12.0 * l * h));
    assert_near("operations of a step", plan.flops_per_step() as f64, flops, 0.005);
    assert_eq!(plan.flops_per_step(), plan.model_flops_per_step(), "nothing is computed again");
    plan.ranks.iter().for_each(check_rank);
    // 1f1b: stage p holds 8 - p micro-batches of 12 blocks, each 16 tensors of the width, in bf16 over 8 ranks.
    let block = 16.0 * 2048.0 * 12288.0 * 2.0 / 8.0;
    for (before, after) in plan.ranks[1..6].iter().zip(&plan.ranks[2..7]) {
        let held = |rank: &RankPlan| rank.memory.peak.categories.activations as f64;
        assert_near("activations of one micro-batch", held(before) - held(after), 12.0 * block, 0.002);
    }
}

/// Memory and operations of a rank of one stage.
fn check_rank(rank: &RankPlan) {
    let held = rank.memory.peak.categories;
    assert_eq!(held.total(), rank.memory.arena_bytes, "rank {}", rank.rank);
    // bf16, in chunks whose parts are even over 24 ranks; f32 gradients, and a bucket of them on its way; master
    // weights and both moments of the 24th part.
    assert_near("parameters", held.parameters as f64, 2.0 * rank.parameters[0] as f64, 0.03);
    assert_near("gradients", held.gradients as f64, 4.0 * rank.parameters[0] as f64, 0.08);
    assert_eq!(24 * held.optimizer, 6 * held.parameters, "rank {}", rank.rank);
    // 64 micro-batches through 12 blocks and what is before and behind them, each of at most 30 tensors.
    let allocations = rank.memory.phase(PhaseName::Step).unwrap().slots.len();
    assert!(allocations <= 64 * (12 + 2) * 30, "rank {}: {allocations} allocations a step", rank.rank);
}

#[track_caller]
fn assert_near(what: &str, planned: f64, expected: f64, share: f64) {
    let off = (planned - expected).abs() / expected;
    assert!(off <= share, "{what}: {planned}, expected {expected} within {share}");
}
