//! Checks of a configuration: each error names the key, its value and what it must be.

use std::borrow::Cow;

use phalanx_layers::CannotCut;
use phalanx_models::{KeyError, Model};
use phalanx_plan::pipeline::{Plan, ScheduleError, check as check_schedule, generate};
use phalanx_plan::{Mesh, pipeline::PipelineSchedule};
use phalanx_tensor::DType;

use super::{Float, ParallelConfig, RunConfig, Updates};

/// Maximum number of ranks with asynchronous updates: the dry run runs each of them, with messages between every pair.
const MAX_ASYNCHRONOUS: usize = 256;

/// An invalid value: its key, the value, and what is expected.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{key} = {given}: {expected}")]
pub struct ConfigError {
    /// `table.key`
    pub key: Cow<'static, str>,
    /// The value.
    pub given: String,
    /// Required value, and advice.
    pub expected: String,
    /// Other keys that contradict it, and would not if they were left out.
    pub others: Vec<&'static str>,
    /// True if the key means nothing beside the values that it contradicts.
    pub means_nothing: bool,
}

impl ConfigError {
    /// The error for `key`, with the value `given`.
    pub(crate) fn new(key: impl Into<Cow<'static, str>>, given: String, expected: String) -> ConfigError {
        ConfigError { key: key.into(), given, expected, others: Vec::new(), means_nothing: false }
    }

    /// The error for a key that an architecture reads.
    pub(crate) fn of_model(KeyError { key, given, expected }: KeyError) -> ConfigError {
        ConfigError::new(format!("model.{key}"), given, expected)
    }

    /// Names other keys that contradict this one.
    pub(crate) fn with(self, others: &[&'static str]) -> ConfigError {
        ConfigError { others: others.to_vec(), ..self }
    }
}

pub(crate) fn refuse(key: &'static str, given: impl ToString, expected: impl Into<String>) -> ConfigError {
    ConfigError::new(key, given.to_string(), expected.into())
}

impl RunConfig {
    /// The mesh of ranks.
    ///
    /// # Errors
    /// Sizes that do not form a mesh, with the nearest that do.
    pub fn mesh(&self) -> Result<Mesh, ConfigError> {
        let ParallelConfig { ranks, pipeline, data, tensor, .. } = self.parallel;
        Mesh::derive(ranks, pipeline, data, tensor).map_err(|error| {
            let data = data.map_or("left out".to_string(), |data| data.to_string());
            let ranks = ranks.map_or(String::new(), |ranks| format!(" of {ranks} ranks"));
            let given = format!("pipeline {pipeline}, data {data}, tensor {tensor}{ranks}");
            refuse("parallel", given, error.to_string())
        })
    }

    /// Ranks of the data axis, for a valid mesh.
    pub fn data(&self) -> usize {
        self.mesh().map_or(1, |mesh| mesh.data)
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.mesh().map_or(1, |mesh| mesh.world_size())
    }

    /// Sequences that one rank computes at once.
    pub fn micro_batch_size(&self) -> usize {
        let each = self.batch.global / self.data();
        let counted = self.parallel.micro_batches.map(|count| each / count.max(1));
        self.batch.micro.or(counted).unwrap_or(each)
    }

    /// Micro-batches that one rank accumulates in a step.
    pub fn micro_batches(&self) -> usize {
        self.batch.global / (self.micro_batch_size() * self.data())
    }

    /// The schedule of a step.
    ///
    /// # Errors
    /// An unknown name, a text that cannot be read, or one that does not fit mesh and micro-batches.
    pub fn schedule(&self) -> Result<PipelineSchedule, ConfigError> {
        let mesh = self.mesh()?;
        let (text, micro_batches) = (&self.parallel.schedule, self.micro_batches());
        let refused = |error: ScheduleError| {
            let given = text.lines().next().unwrap_or_default();
            let more = if text.lines().count() > 1 { " ..." } else { "" };
            refuse("parallel.schedule", format!("{given}{more}"), error.to_string())
        };
        if !text.contains([',', '\n']) {
            let plan = text.parse::<Plan>().map_err(|error| refused(error.into()))?;
            let plan = plan.with_chunks(self.parallel.chunks);
            return generate(plan, mesh.pipeline, micro_batches).map_err(|error| {
                let mut refused = refused(error);
                refused.expected += " (parallel.micro_batches, or batch.micro, sets how many there are)";
                refused
            });
        }
        let schedule = PipelineSchedule::parse(text).map_err(refused)?;
        check_schedule(&schedule).map_err(refused)?;
        for (what, key, given, expected) in [
            ("rows", "parallel.pipeline", schedule.ranks.len(), mesh.pipeline),
            ("micro-batches", "parallel.micro_batches", schedule.micro_batches, micro_batches),
        ] {
            if given != expected {
                let expected = format!(
                    "has {given} {what}, and the configuration makes {expected}: set {key} = {given}"
                );
                return Err(refuse("parallel.schedule", "the schedule given", expected));
            }
        }
        Ok(schedule)
    }

    /// Checks the configuration, with the model of its keys.
    ///
    /// # Errors
    /// The first key that is wrong, with what it must be.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.check_with(&*self.model.draft()?)
    }

    /// Checks the configuration for a run of `model`, which may be another one than that of its keys.
    ///
    /// # Errors
    /// The first key that is wrong, with what it must be.
    pub fn check_with(&self, model: &dyn Model) -> Result<(), ConfigError> {
        self.check_bounds()?;
        self.check_needs()?;
        self.check_model(model)?;
        self.lora.check(model)?;
        self.check_batch()?;
        self.check_preference()?;
        self.check_parallel(model)?;
        self.check_device(model)?;
        self.check_memory()?;
        self.check_precision()?;
        self.check_training()
    }

    fn check_model(&self, model: &dyn Model) -> Result<(), ConfigError> {
        match model.longest() {
            Some(longest) if longest < self.model.seq => {
                let expected = format!("the model has {longest} positions, which no sequence may exceed");
                Err(refuse("model.seq", self.model.seq, expected))
            }
            _ => Ok(()),
        }
    }

    fn check_batch(&self) -> Result<(), ConfigError> {
        let (global, ranks) = (self.batch.global, self.mesh()?.data);
        // As u128, because products of three counts exceed 64 bits.
        let product = |counts: [usize; 3]| counts.into_iter().map(|count| count as u128).product::<u128>();
        if let (Some(count), Some(micro_batch_size)) = (self.parallel.micro_batches, self.batch.micro)
            && product([count, micro_batch_size, ranks]) != global as u128
        {
            let expected = format!(
                "x batch.micro = {micro_batch_size} x {ranks} data-parallel ranks is not batch.global = {global}; leave one out"
            );
            return Err(refuse("parallel.micro_batches", count, expected));
        }
        // Only one of the two is needed; the other follows from it.
        let part = self.batch.micro.or(self.parallel.micro_batches).unwrap_or(1);
        let unit = product([ranks, part, 1]);
        if global == 0 || !(global as u128).is_multiple_of(unit) {
            let near = (global as u128 / unit).max(1) * unit;
            let expected = format!(
                "must be a multiple of {unit} ({ranks} data-parallel ranks x batch.micro or parallel.micro_batches); the nearest are {near} and {}",
                near + unit
            );
            return Err(refuse("batch.global", global, expected));
        }
        self.check_micro_batches()
    }

    fn check_parallel(&self, model: &dyn Model) -> Result<(), ConfigError> {
        let (mesh, p, m) = (self.mesh()?, &self.parallel, &self.model);
        // The last rank may have fewer rows than the others, but at least one.
        let vocab = model.vocab();
        if (mesh.tensor - 1) * vocab.div_ceil(mesh.tensor) >= vocab.max(1) {
            let expected = format!(
                "shares the {vocab} rows of the vocabulary, and some ranks would have none: use fewer"
            );
            return Err(refuse("parallel.tensor", mesh.tensor, expected));
        }
        if mesh.tensor > 1 {
            model.check_cut(mesh.tensor).map_err(|error| cannot_cut(model, error))?;
        }
        let rows = self.micro_batch_size() * m.seq;
        if p.sequence_parallel && !rows.is_multiple_of(mesh.tensor) {
            let expected = format!(
                "shards the {rows} tokens of a micro-batch ({} sequences of {}) over parallel.tensor = {}, which does \
                 not divide them",
                self.micro_batch_size(),
                m.seq,
                mesh.tensor
            );
            return Err(refuse("parallel.sequence_parallel", true, expected));
        }
        let size = || {
            let network = model.whole();
            (network.uses.len(), network.layers())
        };
        // Checked before the schedule is generated, because that may be large.
        if mesh.pipeline > 1
            && let (blocks, layers) = size()
            && mesh.pipeline > blocks
        {
            let expected = format!(
                "makes more stages than the {blocks} blocks of a model of model.layers = {layers}: use fewer, at most {blocks}"
            );
            return Err(refuse("parallel.pipeline", mesh.pipeline, expected));
        }
        let schedule = self.schedule()?;
        if schedule.stages() > 1
            && let (blocks, layers) = size()
            && schedule.stages() > blocks
        {
            let expected = format!(
                "with schedule {} makes {} stages, and a model of model.layers = {layers} has {blocks} blocks to cut: use \
                 fewer ranks or chunks, or more layers",
                schedule.name,
                schedule.stages(),
            );
            return Err(refuse("parallel.pipeline", mesh.pipeline, expected));
        }
        self.check_updates(mesh)
    }

    fn check_updates(&self, mesh: Mesh) -> Result<(), ConfigError> {
        if self.parallel.updates == Updates::Asynchronous && mesh.world_size() > MAX_ASYNCHRONOUS {
            let expected = format!(
                "has each rank send to each other: at most {MAX_ASYNCHRONOUS} ranks are planned, and the configuration \
                 makes {} (parallel.data)",
                mesh.world_size()
            );
            return Err(refuse("parallel.updates", "\"asynchronous\"", expected));
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
        let (lr, min_lr) = (self.optimizer.lr, self.schedule.min_lr);
        if min_lr > lr {
            return Err(refuse("schedule.min_lr", min_lr, format!("must be at most optimizer.lr = {lr}")));
        }
        self.check_groups()?;
        self.check_learning_rate()?;
        self.check_data()
    }
}

/// The refusal of tensor-parallel ranks that cannot divide `model`, with the key of the number that they do not divide, and the numbers of
/// ranks that can, up to twice as many.
fn cannot_cut(model: &dyn Model, error: CannotCut) -> ConfigError {
    let CannotCut { what, pieces, holders } = error;
    let keys = model.keys();
    let is = |name: &&str| keys.get(name).and_then(|value| value.as_u64()) == Some(pieces as u64);
    let key = ["heads", "kv_heads"].into_iter().find(is).or(keys.iter().map(|(name, _)| name).find(is));
    let what =
        key.map_or_else(|| format!("the {pieces} pieces of {what}"), |key| format!("model.{key} = {pieces}"));
    // Heads of keys may have several holders each.
    let may = |size: &usize| pieces.is_multiple_of(*size) || size.is_multiple_of(pieces);
    let sizes = (1..=2 * holders).filter(may).filter(|size| model.check_cut(*size).is_ok());
    let sizes: Vec<String> = sizes.map(|size| size.to_string()).collect();
    refuse(
        "parallel.tensor",
        holders,
        format!("cannot divide {what}; numbers of ranks that can: {}", sizes.join(", ")),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{PrecisionConfig, Products};

    #[test]
    fn precision_that_cannot_work_names_key_value_and_what_it_must_be() {
        type Change = fn(&mut PrecisionConfig);
        let refused: [(Change, &str); 14] = [
            (|p| p.accumulate = Float::Bf16, "precision.accumulate = bf16: must be \"f32\""),
            (|p| (p.compute, p.accumulate) = (Float::F16, Float::Bf16), "precision.compute = \"f16\""),
            (
                |p| (p.compute, p.products) = (Float::Bf16, Products::Split),
                "precision.products = \"split\": needs precision.compute = \"f32\" or \"f16\"",
            ),
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
