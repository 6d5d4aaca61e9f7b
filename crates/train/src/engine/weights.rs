//! The weights of a checkpoint as its model computes with them: those of adapted layers with what their adapters add. What lies below adapters
//! is read from where the run began, where the checkpoint does not have it, and is rounded as the run has rounded it.
//!
//! The sum is made in f32, `w + scale * b · a`, a window at a time; a layer's adapter is held while its weight is read.

use std::cell::RefCell;
use std::ops::Range;
use std::path::Path;

use half::{bf16, f16};
use phalanx_checkpoint::{Checkpoint, CheckpointError};
use phalanx_layers::{ParameterSpec, lora::adapted_by, lora::parameters_of};
use phalanx_models::Model;
use phalanx_tensor::{DType, Layout, blocks};
use serde::Deserialize;

use crate::config::{Float, LoraConfig, QuantisedBase};
use crate::engine::base::{Base, is_whole};
use crate::engine::error::RunError;
use crate::engine::state::{PARAMETERS, bad_state, read_stored};

/// The weights of a checkpoint.
pub struct Weights<'a> {
    from: &'a Checkpoint,
    model: &'a dyn Model,
    adapters: LoraConfig,
    /// The weights below adapters; None where the checkpoint has it.
    base: Option<Below>,
    /// That of the weight that was read last.
    adapter: RefCell<Option<Adapter>>,
}

/// The weights below adapters, and how the run has kept it.
struct Below {
    base: Base,
    /// The type to which it was rounded.
    compute: DType,
    /// Weights that were quantised before.
    quantised: Option<QuantisedBase>,
}

/// Term of an adapter in the weight of its layer, in the weight's layout: `left · right`.
struct Adapter {
    weight: String,
    rank: usize,
    /// `[rows, rank]`, times the scale.
    left: Vec<f32>,
    /// `[rank, columns]`
    right: Vec<f32>,
}

/// The adapters of the run that saved a checkpoint, as its configuration has them.
///
/// # Errors
/// A configuration that cannot be read.
pub fn adapters_of(from: &Checkpoint) -> Result<LoraConfig, RunError> {
    let Some(stored) = from.state()["config"].get("lora") else { return Ok(LoraConfig::default()) };
    LoraConfig::deserialize(stored).map_err(|cause| bad_state(from, "config.lora", &cause.to_string()))
}

impl<'a> Weights<'a> {
    /// The weights of `model` in a checkpoint that was saved from it, with adapters or without.
    ///
    /// # Errors
    /// Adapters that cannot be read from the checkpoint's configuration; another base than theirs, or none.
    pub fn of(from: &'a Checkpoint, model: &'a dyn Model) -> Result<Weights<'a>, RunError> {
        let weights = Weights::of_adapters(from, model)?;
        if is_whole(from) {
            return Ok(weights);
        }
        let config = &from.state()["config"];
        let init = config["model"]["init"].as_str().map(Path::new);
        let base = Base::open(init, config["train"]["seed"].as_u64().unwrap_or_default())?;
        base.check(from)?;
        let compute = Float::deserialize(&config["precision"]["compute"]);
        let compute = compute.map_err(|cause| bad_state(from, "config.precision", &cause.to_string()))?;
        let tensor = config["parallel"]["tensor"].as_u64().unwrap_or(1) as usize;
        let quantised = QuantisedBase::of(&weights.adapters, tensor, model);
        Ok(Weights { base: Some(Below { base, compute: compute.into(), quantised }), ..weights })
    }

    /// The adapters of a checkpoint, of which no other weight is read.
    ///
    /// # Errors
    /// Adapters that cannot be read from the checkpoint's configuration.
    pub fn of_adapters(from: &'a Checkpoint, model: &'a dyn Model) -> Result<Weights<'a>, RunError> {
        Ok(Weights { from, model, adapters: adapters_of(from)?, base: None, adapter: RefCell::default() })
    }

    /// The adapters of the run.
    pub fn adapters(&self) -> &LoraConfig {
        &self.adapters
    }

    /// Reads elements of a whole parameter of the model.
    ///
    /// # Errors
    /// Damage, a missing tensor, another shape.
    pub fn read(
        &self,
        spec: &ParameterSpec,
        elements: Range<u64>,
        out: &mut [f32],
    ) -> Result<(), CheckpointError> {
        match &self.base {
            Some(below) if adapted_by(&spec.name).is_none() => {
                let read = below.read(self.model, spec, elements.clone(), out);
                read.map_err(|error| self.of_base(error))?;
            }
            _ => read_stored(self.from, self.model, (PARAMETERS, spec), elements.clone(), out)?,
        }
        if out.is_empty() || !self.load(spec)? {
            return Ok(());
        }
        let adapter = self.adapter.borrow();
        let Adapter { rank, left, right, .. } = adapter.as_ref().expect("it was loaded");
        let columns = right.len() / rank;
        let (mut at, mut done) = (elements.start as usize, 0);
        while done < out.len() {
            let (row, column) = (at / columns, at % columns);
            let count = (columns - column).min(out.len() - done);
            let mut added = vec![0.0; count];
            for (k, factor) in left[row * rank..][..*rank].iter().enumerate() {
                let terms = &right[k * columns + column..][..count];
                added.iter_mut().zip(terms).for_each(|(sum, term)| *sum += factor * term);
            }
            out[done..][..count].iter_mut().zip(&added).for_each(|(weight, added)| *weight += added);
            (at, done) = (at + count, done + count);
        }
        Ok(())
    }

    fn of_base(&self, error: RunError) -> CheckpointError {
        match error {
            RunError::Checkpoint(error) => error,
            other => CheckpointError::HuggingFace {
                path: self.from.dir().to_path_buf(),
                reason: format!("the base of its adapters: {other}"),
            },
        }
    }

    /// Holds the adapter of the layer with this weight; returns whether there is one.
    fn load(&self, spec: &ParameterSpec) -> Result<bool, CheckpointError> {
        let (Some(rank), Some(layer)) = (self.adapters.rank, spec.name.strip_suffix(".weight")) else {
            return Ok(false);
        };
        if self.adapter.borrow().as_ref().is_some_and(|held| held.weight == spec.name) {
            return Ok(true);
        }
        let [a, b] = parameters_of(layer);
        let (&[rows, columns], true) = (&spec.shape[..], self.from.tensor(PARAMETERS, &a).is_ok()) else {
            return Ok(false);
        };
        let layout = self.model.linear_layout();
        let [inputs, outputs] = layout.in_out([rows, columns]);
        let (a, mut b) = (self.matrix(&a, [rank, inputs])?, self.matrix(&b, [outputs, rank])?);
        let scale = self.adapters.scale();
        b.iter_mut().for_each(|value| *value *= scale);
        let (left, right) = match layout {
            Layout::OutIn => (b, a),
            Layout::InOut => (transposed(&a, [rank, inputs]), transposed(&b, [outputs, rank])),
        };
        *self.adapter.borrow_mut() = Some(Adapter { weight: spec.name.clone(), rank, left, right });
        Ok(true)
    }

    /// A whole matrix with these extents.
    fn matrix(&self, name: &str, extents: [usize; 2]) -> Result<Vec<f32>, CheckpointError> {
        self.from.expect(PARAMETERS, name, &extents, DType::F32)?;
        let mut values = vec![0.0; extents[0] * extents[1]];
        let elements = 0..values.len() as u64;
        self.from.read(PARAMETERS, name, elements, bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }
}

impl Below {
    /// Reads elements of a whole parameter as the run has computed with them.
    fn read(
        &self,
        model: &dyn Model,
        spec: &ParameterSpec,
        elements: Range<u64>,
        out: &mut [f32],
    ) -> Result<(), RunError> {
        match self.quantised.as_ref().filter(|quantised| quantised.has(spec)) {
            None => self.base.read(model, spec, elements, out)?,
            Some(QuantisedBase { dtype, .. }) => {
                let block = dtype.block() as u64;
                let start = elements.start / block * block;
                let mut numbers = vec![0.0; (elements.end.next_multiple_of(block) - start) as usize];
                self.base.read(model, spec, start..start + numbers.len() as u64, &mut numbers)?;
                numbers = blocks::dequantised(*dtype, &blocks::quantised(*dtype, &numbers));
                out.copy_from_slice(&numbers[(elements.start - start) as usize..][..out.len()]);
            }
        }
        round(self.compute, out);
        Ok(())
    }
}

/// Rounds numbers to a type of 16 bits, if it is one.
fn round(compute: DType, numbers: &mut [f32]) {
    match compute {
        DType::BF16 => numbers.iter_mut().for_each(|number| *number = bf16::from_f32(*number).to_f32()),
        DType::F16 => numbers.iter_mut().for_each(|number| *number = f16::from_f32(*number).to_f32()),
        _ => {}
    }
}

fn transposed(matrix: &[f32], [rows, columns]: [usize; 2]) -> Vec<f32> {
    (0..columns).flat_map(|column| (0..rows).map(move |row| matrix[row * columns + column])).collect()
}
