//! Thousands of ranks, on devices that only record: one rank of each place in the pipeline.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "for who runs the test")]

use phalanx_models::{Dropouts, Gpt2};
use phalanx_train::config::Float;
use phalanx_train::{RunConfig, RunPlan, Spec};

/// GPT-3 175B (Brown et al., arXiv 2005.14165) on the mesh of Narayanan et al. (arXiv 2104.04473): tensor 8, pipeline
/// 8, data 24.
#[test]
fn gpt3_is_planned_by_one_rank_a_stage() {
    let dropout = Dropouts::default();
    let model =
        Gpt2 { layers: 96, hidden: 12288, heads: 96, vocab: 51200, positions: 2048, eps: 1e-5, dropout };
    let mut config = RunConfig::default();
    (config.model.layers, config.model.hidden, config.model.heads) = (96, 12288, 96);
    config.model.seq = 2048;
    config.batch.global = 1536;
    config.batch.micro = Some(1);
    let parallel = &mut config.parallel;
    (parallel.pipeline, parallel.data, parallel.tensor) = (8, Some(24), 8);
    (parallel.zero, parallel.sequence_parallel) = (1, true);
    config.precision.compute = Float::Bf16;
    config.check().unwrap();
    let start = std::time::Instant::now();
    let plan = RunPlan::new(Spec::new(&config, model, 0, 1).unwrap()).unwrap();
    println!("{:?}", start.elapsed());
    assert_eq!(plan.ranks.len(), 8);
    assert_eq!(plan.parameters / 1_000_000_000, 174);
    for rank in &plan.ranks {
        println!("{} {:?}", rank.rank, rank.memory.peak);
    }
}
