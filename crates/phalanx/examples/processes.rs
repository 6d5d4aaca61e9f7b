//! Ranks as processes: `cargo run --release -p phalanx --example processes`.
//!
//! The program starts itself once more for each rank. A rank that dies ends the others, and the error names it.
#![allow(clippy::print_stdout, reason = "a program of its own, for a terminal")]

use std::error::Error;

use phalanx::{
    Arena, Category, Cpu, CpuFactory, DType, Device, Endpoint, Gpt2, Memory, RunConfig, Spec, Training,
    processes,
};

/// Data parallelism with ZeRO-3.
pub fn training(ranks: usize) -> Result<Training, Box<dyn Error>> {
    let mut config = RunConfig::default();
    (config.model.seq, config.batch.global) = (16, 8);
    (config.parallel.data, config.parallel.zero) = (Some(ranks), 3);
    let model = Gpt2 { layers: 2, hidden: 32, heads: 4, vocab: 64, positions: 16, ..Gpt2::default() };
    let counting = |position: u64, tokens: &mut [u32], targets: &mut [u32]| {
        let token = |t: usize| (position as usize * 7 + t) as u32 % 64;
        (0..tokens.len()).for_each(|t| (tokens[t], targets[t]) = (token(t), token(t + 1)));
    };
    Ok(Training::new(Spec::new(&config, model, 0, 1)?, counting, 5)?)
}

/// A collective without a plan: the sum of the ranks' numbers. Tensors lie in memory that other processes can read.
pub fn sum(rank: &Endpoint) -> Result<f32, Box<dyn Error>> {
    let arena = Arena::unplanned_in(Memory::Device, rank.arena(1 << 20)?);
    let device = Device::new(Cpu::new(1), arena);
    let mut x = device.alloc(DType::F32, [1], Category::Workspace, "x");
    device.fill(x.view_mut(), rank.rank() as f32);
    let x = rank.group("all").all_reduce(x).wait()?;
    Ok(device.fetch([x.view()])?[0])
}

fn main() -> Result<(), Box<dyn Error>> {
    let training = training(4)?;
    let losses = processes(4, |rank| training.on_rank(&CpuFactory::new(), rank))?;
    losses.iter().enumerate().for_each(|(rank, losses)| println!("rank {rank}: {losses:?}"));
    Ok(())
}
