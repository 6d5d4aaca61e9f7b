//! An optimizer and a learning rate schedule of your own: `cargo run --release -p phalanx --example own_optimizer`.
#![allow(clippy::print_stdout, reason = "a program of its own, for a terminal")]

use std::error::Error;

use phalanx::{
    CpuFactory, Gpt2, RunConfig, Spec, StateSpec, Training, UpdateRule, UpdateStep, UpdatedParameter,
};

/// Lion (Chen et al., arXiv 2302.06675): the sign of an average of gradient and momentum.
struct Lion {
    beta1: f32,
    beta2: f32,
    weight_decay: f32,
}

impl UpdateRule for Lion {
    fn states(&self, of: &UpdatedParameter) -> Vec<StateSpec> {
        vec![StateSpec::like("exp_avg", of)]
    }

    fn update(&self, step: &UpdateStep, p: &mut [f32], gradient: &[f32], states: &mut [&mut [f32]]) {
        let Lion { beta1, beta2, weight_decay } = *self;
        let decay = if step.of.kind.decays() { weight_decay } else { 0.0 };
        for ((p, g), m) in p.iter_mut().zip(gradient).zip(states[0].iter_mut()) {
            let mean = beta1 * *m + (1.0 - beta1) * g;
            let sign = if mean == 0.0 { 0.0 } else { mean.signum() };
            *p -= step.lr * (sign + decay * *p);
            *m = beta2 * *m + (1.0 - beta2) * g;
        }
    }
}

/// Data parallelism with ZeRO-2: each rank updates its part of the parameters.
pub fn training(ranks: usize) -> Result<Training, Box<dyn Error>> {
    let mut config = RunConfig::default();
    (config.model.seq, config.batch.global) = (16, 8);
    (config.parallel.data, config.parallel.zero) = (Some(ranks), 2);
    let model = Gpt2 { layers: 2, hidden: 32, heads: 4, vocab: 64, positions: 16, ..Gpt2::default() };
    let spec = Spec::new(&config, model, 0, 1)?
        .with_optimizer(Lion { beta1: 0.9, beta2: 0.99, weight_decay: 0.1 })?
        .with_learning_rate(|step: u64| 3e-3 / (1.0 + step as f64).sqrt());
    let counting = |position: u64, tokens: &mut [u32], targets: &mut [u32]| {
        let token = |t: usize| (position as usize * 7 + t) as u32 % 64;
        (0..tokens.len()).for_each(|t| (tokens[t], targets[t]) = (token(t), token(t + 1)));
    };
    Ok(Training::new(spec, counting, 5)?)
}

fn main() -> Result<(), Box<dyn Error>> {
    for losses in training(4)?.on_threads(&CpuFactory::new())? {
        println!("{:?}", losses?);
    }
    Ok(())
}
