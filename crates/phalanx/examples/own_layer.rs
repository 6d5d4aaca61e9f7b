//! A layer of your own in a GPT-2, on a mesh: `cargo run --release -p phalanx --example own_layer`.
#![allow(clippy::print_stdout, reason = "a program of its own, for a terminal")]

use std::error::Error;

use phalanx::layers::{Init, Kind, OnEachRow, ParameterSpec, RowFunction};
use phalanx::{CpuFactory, Gpt2, RunConfig, Spec, Training, WithBlock};

const HIDDEN: usize = 32;

/// `y = x * w`, with one factor for each column.
struct Scale;

impl RowFunction for Scale {
    fn parameters(&self) -> Vec<ParameterSpec> {
        vec![ParameterSpec::new("scale.weight", Kind::Vector, [HIDDEN], Init::Ones)]
    }

    fn forward(&self, parameters: &[&[f32]], x: &[f32], y: &mut [f32]) {
        (0..HIDDEN).for_each(|i| y[i] = x[i] * parameters[0][i]);
    }

    fn backward(&self, w: &[&[f32]], x: &[f32], dy: &[f32], dx: &mut [f32], dw: &mut [&mut [f32]]) {
        for i in 0..HIDDEN {
            dx[i] = dy[i] * w[0][i];
            dw[0][i] += dy[i] * x[i];
        }
    }
}

/// Half of the ranks share each layer, with the rows of the own layer cut over them; the others are replicas.
pub fn training(ranks: usize) -> Result<Training, Box<dyn Error>> {
    let mut config = RunConfig::default();
    (config.model.seq, config.batch.global) = (16, 8);
    (config.parallel.data, config.parallel.tensor) = (Some(ranks.min(2)), ranks.div_ceil(2));
    (config.parallel.sequence_parallel, config.parallel.zero) = (ranks > 2, 3);
    let model = Gpt2 { layers: 2, hidden: HIDDEN, heads: 4, vocab: 64, positions: 16, ..Gpt2::default() };
    let model = WithBlock::new(model, "scale", |tensor| tensor.rows(OnEachRow::new(Scale)));
    let counting = |position: u64, tokens: &mut [u32], targets: &mut [u32]| {
        let token = |t: usize| (position as usize * 7 + t) as u32 % 64;
        (0..tokens.len()).for_each(|t| (tokens[t], targets[t]) = (token(t), token(t + 1)));
    };
    Ok(Training::new(Spec::new(&config, model, 0, 1)?, counting, 5)?)
}

fn main() -> Result<(), Box<dyn Error>> {
    for losses in training(4)?.on_threads(&CpuFactory::new())? {
        println!("{:?}", losses?);
    }
    Ok(())
}
