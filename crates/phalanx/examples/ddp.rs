//! Data parallelism in a few lines: `cargo run --release -p phalanx --example ddp`.
//!
//! A GPT-2 on two ranks, each with half of the batch; gradients are summed over ranks while backward still runs. The
//! losses are those of one rank, up to the order of sums. `zero` shards optimizer, gradients and parameters, too.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program of its own, for a terminal")]

use phalanx::{Batch, CpuFactory, Gpt2, RunConfig, RunPlan, Spec, on_threads};

/// Trains and prints the losses.
pub fn main() -> Result<(), Box<dyn std::error::Error>> {
    for (ranks, zero) in [(1, 0), (2, 0), (2, 3)] {
        let mut config = RunConfig::default();
        (config.model.seq, config.batch.global) = (32, 8);
        (config.parallel.data, config.parallel.zero) = (Some(ranks), zero);
        let model = Gpt2 { layers: 4, hidden: 64, heads: 4, vocab: 256, positions: 32, ..Gpt2::default() };
        let plan = RunPlan::new(Spec::new(&config, model, 0, 1)?)?;

        let losses = on_threads(&CpuFactory::new(), &plan, |rank| {
            rank.initialise(1).expect("initial values need nothing");
            let own = rank.at().data * 8 / ranks..(rank.at().data + 1) * 8 / ranks;
            (1..=5)
                .map(|step| rank.step(step, &rows(step, own.clone()), false).expect("no rank dies").loss)
                .collect()
        })?;
        let losses: &Vec<f32> = &losses[0];
        println!(
            "{ranks} rank(s), ZeRO-{zero}: {} bytes a rank, losses {losses:?}",
            plan.of(0).memory.arena_bytes
        );
    }
    Ok(())
}

/// Some sequences of the batch of a step, and what follows each token.
fn rows(step: u64, rows: std::ops::Range<usize>) -> Batch {
    let token = |row: usize, t: usize| ((step as usize + row * 31 + t * (row % 3 + 1)) % 256) as u32;
    let all =
        |shift: usize| rows.clone().flat_map(|row| (0..32).map(move |t| token(row, t + shift))).collect();
    Batch { tokens: all(0), targets: all(1), ..Batch::default() }
}
