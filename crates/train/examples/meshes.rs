//! Every mesh of 8 ranks or fewer against one rank: `cargo run --release -p phalanx-train --example meshes`.
//!
//! Trains a tiny GPT-2 and a tiny BERT for 20 steps with accumulation and clipping, on every (pipeline, data, tensor)
//! with every schedule, every ZeRO stage, sequence parallelism off and on, each rank a thread over an arena that
//! replays its plan. Losses, gradients of the last step and parameters are held against one rank, and all runs of one
//! mesh against each other, bit for bit. Prints the tables of docs/results/meshes.md; ends with an error when
//! something does not hold. With a number, only meshes of that many ranks.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program of its own, for a terminal")]

#[path = "../tests/one_rank/mod.rs"]
mod one_rank;
#[path = "../tests/rig/mod.rs"]
#[allow(dead_code, reason = "one part of it serves here")]
mod rig;

use one_rank::{SCHEDULES, Sizes, config, hold, model, steps, tolerance};
use phalanx_plan::pipeline::{Plan, generate, in_flight};
use phalanx_train::config::CutBy;

const STEPS: usize = 20;

fn main() {
    let only: Option<usize> = std::env::args().nth(1).map(|n| n.parse().expect("a number of ranks"));
    let mut failures = Vec::new();
    for family in ["gpt2", "bert"] {
        println!(
            "\n| {family}: pipeline x data x tensor | sequence parallel | runs | loss | gradients | parameters | tolerance | same bits | peak == plan |"
        );
        println!("|---|---|---|---|---|---|---|---|---|");
        for mesh in meshes().into_iter().filter(|m| only.is_none_or(|n| m.iter().product::<usize>() == n)) {
            for sequence in [false, true] {
                if sequence && mesh[2] == 1 {
                    continue;
                }
                let row = hold(family, mesh, sequence, (&SCHEDULES, &[0, 1, 2, 3]), STEPS);
                let limit = tolerance(Sizes::of(mesh));
                let [p, d, t] = mesh;
                let word = |yes: bool| if yes { "yes" } else { "**no**" };
                println!(
                    "| {p} x {d} x {t} | {} | {} | {:.1e} | {:.1e} | {:.1e} | {limit:.1e} | {} | {} |",
                    if sequence { "on" } else { "off" },
                    row.runs,
                    row.loss,
                    row.gradient,
                    row.parameter,
                    word(row.bits),
                    word(row.peaks)
                );
                if !row.holds(limit) {
                    failures.push(format!("{family} {mesh:?} {sequence}"));
                }
            }
        }
    }
    activations();
    assert!(failures.is_empty(), "these do not hold: {failures:?}");
}

fn meshes() -> Vec<[usize; 3]> {
    let mut all = Vec::new();
    for p in 1..=8 {
        for d in 1..=8 {
            for t in 1..=8 {
                if p * d * t <= 8 {
                    all.push([p, d, t]);
                }
            }
        }
    }
    all
}

/// Activations of each rank of a pipeline of 4, by schedule.
fn activations() {
    println!(
        "\n| schedule, 4 ranks, 8 micro-batches | rank | micro-batches in flight (to I / to W) | activations \
         planned, bytes | measured |"
    );
    println!("|---|---|---|---|---|");
    for schedule in SCHEDULES {
        let sizes = Sizes { layers: 8, heads: 8, micro_batch_size: 2, micro_batches: 8, global: 16 };
        let mut config = config("gpt2", [4, 1, 1], sizes);
        config.parallel.schedule = schedule.into();
        config.parallel.cut = CutBy::Uniform;
        let ran = rig::run_fresh(&model("gpt2", sizes), &config, &steps(2, sizes.global));
        let plan: Plan = schedule.parse().expect("a name");
        let flight = in_flight(&generate(plan, 4, sizes.micro_batches).expect("a schedule"));
        let measured: Vec<u64> = ran.step_peaks.iter().map(|peak| peak.activations).collect();
        for (rank, planned) in ran.step_planned.iter().enumerate() {
            let held = &flight.ranks[rank];
            println!(
                "| {schedule} | {rank} | {} / {} | {} | {} |",
                held.to_input, held.to_weight, planned.activations, measured[rank]
            );
        }
    }
}
