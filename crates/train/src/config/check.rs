//! What a configuration may not say: each refusal names the key, the value and what it must be.

use phalanx_tensor::DType;

use super::{Checkpointing, Chunk, Float, RunConfig};

/// A value that cannot work: which key, what it is, what it must be.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{key} = {given}: {expected}")]
pub struct ConfigError {
    /// `table.key`
    pub key: &'static str,
    /// The value.
    pub given: String,
    /// What it must be and what to do.
    pub expected: String,
}

fn refuse(key: &'static str, given: impl ToString, expected: impl Into<String>) -> ConfigError {
    ConfigError { key, given: given.to_string(), expected: expected.into() }
}

impl RunConfig {
    /// Sequences that one rank computes at once.
    pub fn micro(&self) -> usize {
        self.batch.micro.unwrap_or(self.batch.global / self.parallel.data.max(1))
    }

    /// Micro-batches that one rank accumulates in a step.
    pub fn micro_batches(&self) -> usize {
        self.batch.global / (self.micro() * self.parallel.data)
    }

    /// Refuses what cannot work.
    ///
    /// # Errors
    /// The first key that is wrong, with what it must be.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.check_model()?;
        self.check_batch()?;
        self.check_memory()?;
        self.check_precision()?;
        self.check_training()
    }

    fn check_model(&self) -> Result<(), ConfigError> {
        let model = &self.model;
        if model.arch != "gpt2" {
            return Err(refuse("model.arch", &model.arch, "the one known architecture is \"gpt2\""));
        }
        for (key, value) in [
            ("model.layers", model.layers),
            ("model.hidden", model.hidden),
            ("model.heads", model.heads),
            ("model.seq", model.seq),
            ("model.vocab", model.vocab.unwrap_or(1)),
        ] {
            if value == 0 {
                return Err(refuse(key, 0, "must be at least 1"));
            }
        }
        if !model.hidden.is_multiple_of(model.heads) {
            let near = nearest_divisor(model.hidden, model.heads);
            let expected =
                format!("must divide model.hidden = {}; the nearest that does is {near}", model.hidden);
            return Err(refuse("model.heads", model.heads, expected));
        }
        if model.positions.is_some_and(|p| p < model.seq) {
            let expected = format!("must be at least model.seq = {}", model.seq);
            return Err(refuse("model.positions", model.positions.unwrap_or(0), expected));
        }
        Ok(())
    }

    fn check_batch(&self) -> Result<(), ConfigError> {
        let (global, ranks) = (self.batch.global, self.parallel.data);
        if ranks == 0 {
            return Err(refuse("parallel.data", 0, "must be at least 1"));
        }
        if self.parallel.zero > 3 {
            return Err(refuse("parallel.zero", self.parallel.zero, "ZeRO has stages 0, 1, 2 and 3"));
        }
        if self.batch.micro == Some(0) {
            return Err(refuse("batch.micro", 0, "must be at least 1"));
        }
        let unit = ranks * self.batch.micro.unwrap_or(1);
        if global == 0 || !global.is_multiple_of(unit) {
            let near = (global / unit).max(1) * unit;
            let expected = format!(
                "must be a multiple of {unit} (parallel.data = {ranks} x batch.micro = {}); the nearest are {near} and {}",
                self.batch.micro.unwrap_or(1),
                near + unit
            );
            return Err(refuse("batch.global", global, expected));
        }
        Ok(())
    }

    fn check_memory(&self) -> Result<(), ConfigError> {
        let memory = &self.memory;
        if let Chunk::Mebibytes(size) = memory.chunk
            && !(size > 0.0 && size.is_finite())
        {
            return Err(refuse("memory.chunk", size, "\"auto\", \"none\" or a positive number of MiB"));
        }
        for (key, value) in [
            ("memory.search_range_mb", memory.search_range_mb),
            ("memory.min_chunk_size_mb", memory.min_chunk_size_mb),
            ("memory.limit_mb", memory.limit_mb.unwrap_or(0.0)),
        ] {
            if !(value >= 0.0 && value.is_finite()) {
                return Err(refuse(key, value, "must be a number, 0 or more"));
            }
        }
        if memory.checkpointing == Checkpointing::Every(0) {
            let expected = "\"none\", \"selective\", \"block\", or k for every k-th block, at least 1";
            return Err(refuse("memory.checkpointing", 0, expected));
        }
        if memory.hidden_dim == Some(0) {
            return Err(refuse("memory.hidden_dim", 0, "must be at least 1 element"));
        }
        Ok(())
    }

    fn check_precision(&self) -> Result<(), ConfigError> {
        let p = &self.precision;
        let [compute, accumulate] = [p.compute, p.accumulate].map(|float| DType::from(float).name());
        if !["f32", compute].contains(&accumulate) {
            let expected = match compute {
                "f32" => "must be \"f32\", as precision.compute is".to_string(),
                _ => format!("must be \"f32\" or precision.compute = \"{compute}\""),
            };
            return Err(refuse("precision.accumulate", accumulate, expected));
        }
        let scale = p.loss_scale as f32;
        if p.compute != Float::F16 && ![0.0, 1.0].contains(&scale) {
            let expected = format!(
                "must be 0 or left out: only precision.compute = \"f16\" needs a loss scale, and it is \"{compute}\""
            );
            return Err(refuse("precision.loss_scale", p.loss_scale, expected));
        }
        let positive = |x: f32| x > 0.0 && x.is_finite();
        if p.loss_scale != 0.0 && !positive(scale) {
            let expected = "must be a positive number, or 0 for a dynamic scale";
            return Err(refuse("precision.loss_scale", p.loss_scale, expected));
        }
        if p.initial_scale_power > 126 {
            let expected = "must lie between 0 and 126: 2 to this power is the first loss scale";
            return Err(refuse("precision.initial_scale_power", p.initial_scale_power, expected));
        }
        for (key, value) in [
            ("precision.loss_scale_window", p.loss_scale_window),
            ("precision.hysteresis", p.hysteresis.into()),
        ] {
            if value == 0 {
                return Err(refuse(key, 0, "must be at least 1"));
            }
        }
        let first = 2f64.powi(p.initial_scale_power as i32);
        if !(positive(p.min_loss_scale as f32) && p.min_loss_scale <= first) {
            let expected = format!(
                "must be a positive number, at most the first loss scale 2^{} (precision.initial_scale_power)",
                p.initial_scale_power
            );
            return Err(refuse("precision.min_loss_scale", p.min_loss_scale, expected));
        }
        Ok(())
    }

    fn check_training(&self) -> Result<(), ConfigError> {
        let (m, l, o, s, d) = (&self.model, &self.loss, &self.optimizer, &self.schedule, &self.data);
        let numbers = [
            ("model.dropout", m.dropout, 0.0..=0.999_999_9),
            ("model.embedding_dropout", m.embedding_dropout.unwrap_or(0.0), 0.0..=0.999_999_9),
            ("model.attention_dropout", m.attention_dropout.unwrap_or(0.0), 0.0..=0.999_999_9),
            ("model.residual_dropout", m.residual_dropout.unwrap_or(0.0), 0.0..=0.999_999_9),
            ("loss.label_smoothing", l.label_smoothing, 0.0..=0.999_999_9),
            ("loss.z_loss", l.z_loss, 0.0..=f64::MAX),
            ("optimizer.lr", o.lr, 0.0..=f64::MAX),
            ("optimizer.beta1", o.beta1, 0.0..=0.999_999_9),
            ("optimizer.beta2", o.beta2, 0.0..=0.999_999_9),
            ("optimizer.eps", o.eps, 0.0..=1.0),
            ("optimizer.weight_decay", o.weight_decay, 0.0..=f64::MAX),
            ("optimizer.clip", o.clip, 0.0..=f64::MAX),
            ("schedule.min_lr", s.min_lr, 0.0..=o.lr),
            ("data.validation", d.validation, 0.0..=0.9),
        ];
        for (key, value, range) in numbers {
            if !range.contains(&value) {
                let expected = if *range.end() == f64::MAX {
                    "must be 0 or more".to_string()
                } else {
                    format!("must lie between {} and {}", range.start(), range.end())
                };
                return Err(refuse(key, value, expected));
            }
        }
        if self.train.steps == 0 {
            return Err(refuse("train.steps", 0, "must be at least 1"));
        }
        if self.train.threads == Some(0) {
            return Err(refuse(
                "train.threads",
                0,
                "must be at least 1; leave it out for this machine's cores",
            ));
        }
        if !d.text.is_empty() && d.tokens.is_some() {
            return Err(refuse(
                "data.tokens",
                d.tokens.as_deref().unwrap_or(""),
                "give data.text or data.tokens, not both",
            ));
        }
        Ok(())
    }
}

/// The divisor of `n` nearest to `wanted`.
fn nearest_divisor(n: usize, wanted: usize) -> usize {
    (1..=n).filter(|d| n.is_multiple_of(*d)).min_by_key(|d| d.abs_diff(wanted)).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::PrecisionConfig;

    #[test]
    fn precision_that_cannot_work_names_key_value_and_what_it_must_be() {
        type Change = fn(&mut PrecisionConfig);
        let refused: [(Change, &str); 13] = [
            (|p| p.accumulate = Float::Bf16, "precision.accumulate = bf16: must be \"f32\""),
            (|p| (p.compute, p.accumulate) = (Float::F16, Float::Bf16), "precision.compute = \"f16\""),
            (|p| p.loss_scale = 128.0, "precision.loss_scale = 128: must be 0 or left out"),
            (|p| (p.compute, p.loss_scale) = (Float::Bf16, 2.0), "it is \"bf16\""),
            (|p| (p.compute, p.loss_scale) = (Float::F16, -2.0), "precision.loss_scale = -2"),
            (|p| (p.compute, p.loss_scale) = (Float::F16, f64::NAN), "precision.loss_scale = NaN"),
            (|p| (p.compute, p.loss_scale) = (Float::F16, 1e300), "must be a positive number"),
            (|p| p.initial_scale_power = 127, "precision.initial_scale_power = 127"),
            (|p| p.loss_scale_window = 0, "precision.loss_scale_window = 0: must be at least 1"),
            (|p| p.hysteresis = 0, "precision.hysteresis = 0"),
            (|p| p.min_loss_scale = 0.0, "precision.min_loss_scale = 0"),
            (|p| p.min_loss_scale = 1e6, "at most the first loss scale 2^16"),
            (|p| p.min_loss_scale = f64::INFINITY, "precision.min_loss_scale = inf"),
        ];
        for (change, words) in refused {
            let mut config = RunConfig::default();
            change(&mut config.precision);
            let refusal = config.check().unwrap_err().to_string();
            assert!(refusal.contains(words), "no {words:?} in: {refusal}");
        }
        let accepted: [Change; 5] = [
            |p| p.loss_scale = 1.0,
            |p| (p.compute, p.accumulate) = (Float::Bf16, Float::Bf16),
            |p| (p.compute, p.communicate) = (Float::F16, Some(Float::Bf16)),
            |p| (p.compute, p.loss_scale) = (Float::F16, 0.5),
            |p| p.communicate = Some(Float::Bf16),
        ];
        for change in accepted {
            let mut config = RunConfig::default();
            change(&mut config.precision);
            config.check().unwrap();
        }
    }
}
