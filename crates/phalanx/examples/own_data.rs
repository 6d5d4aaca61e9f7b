//! A data source of your own: `cargo run --release -p phalanx --example own_data`.
#![allow(clippy::print_stdout, reason = "a program of its own, for a terminal")]

use std::error::Error;

use phalanx::{CpuFactory, DataError, DataSource, Gpt2, IGNORED, RunConfig, Spec, Training};

/// Additions to complete, such as `17+25=42`: the loss counts where the sum is.
struct Additions {
    /// The sums that there are.
    samples: u64,
}

impl DataSource for Additions {
    fn sample(&self, position: u64, tokens: &mut [u32], targets: &mut [u32]) -> Result<(), DataError> {
        if position >= self.samples {
            return Err(DataError::Source { reason: format!("there are {} samples", self.samples) });
        }
        let (a, b) = (position * 37 % 100, position * 11 % 100);
        let text = format!("{a}+{b}={}.", a + b);
        let equals = text.find('=').unwrap_or_default();
        tokens.fill(0);
        targets.fill(IGNORED);
        for (t, pair) in text.as_bytes().windows(2).enumerate() {
            tokens[t] = pair[0].into();
            targets[t] = if t < equals { IGNORED } else { pair[1].into() };
        }
        Ok(())
    }
}

/// Two pipeline stages, on half of the ranks each; the ranks of a stage are replicas.
pub fn training(ranks: usize) -> Result<Training, Box<dyn Error>> {
    let mut config = RunConfig::default();
    (config.model.seq, config.batch.global) = (12, 16);
    (config.parallel.pipeline, config.parallel.data) = (ranks.min(2), Some(ranks.div_ceil(2)));
    (config.batch.micro, config.parallel.schedule) = (Some(2), "1f1b".into());
    let model = Gpt2 { layers: 2, hidden: 32, heads: 4, vocab: 128, positions: 12, ..Gpt2::default() };
    Ok(Training::new(Spec::new(&config, model, 0, 1)?, Additions { samples: 1000 }, 5)?)
}

fn main() -> Result<(), Box<dyn Error>> {
    for losses in training(4)?.on_threads(&CpuFactory::new())? {
        println!("{:?}", losses?);
    }
    Ok(())
}
