//! The weights of a checkpoint as its model computes with them: those of adapted layers with what their adapters add. What lies below adapters
//! is read from where the run began, where the checkpoint does not have it, and is rounded as the run has rounded it.
//!
//! The sum is made in f32, `w + scale * b · a`, a window at a time; a layer's adapter is held while its weight is read. With magnitudes, each
//! output's weights are multiplied by magnitude over norm, for which the weight is read twice.

use std::cell::RefCell;
use std::ops::Range;
use std::path::Path;

use phalanx_checkpoint::{Checkpoint, CheckpointError};
use phalanx_layers::lora::{adapted_by, is_beside_base, magnitudes_of, parameters_of};
use phalanx_layers::{ParameterSpec, added_rows};
use phalanx_models::Model;
use phalanx_tensor::{DType, Layout};
use serde::Deserialize;

use crate::config::{Float, LoraConfig, QuantisedBase};
use crate::engine::base::{Base, is_whole};
use crate::engine::below::{Below, squares_of};
use crate::engine::error::RunError;
use crate::engine::state::{PARAMETERS, bad_state, read_stored};

/// Threads of the products that find principal parts of weights: any number gives the same numbers.
const THREADS: usize = 2;

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

/// Term of an adapter in the weight of its layer, in the weight's layout: `left · right`.
struct Adapter {
    weight: String,
    rank: usize,
    /// `[rows, rank]`, times the scale.
    left: Vec<f32>,
    /// `[rank, columns]`
    right: Vec<f32>,
    /// Magnitude over norm of each output, and the layout in which these lie; None without magnitudes.
    gains: Option<(Layout, Vec<f32>)>,
}

impl Adapter {
    /// Adds its term to the elements of the weight from `start` on.
    fn add_to(&self, start: u64, out: &mut [f32]) {
        let Adapter { rank, left, right, .. } = self;
        let columns = right.len() / rank;
        let (mut at, mut done) = (start as usize, 0);
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
    }

    /// Multiplies the elements from `start` on by the gains of their outputs.
    fn rescale(&self, start: u64, out: &mut [f32]) {
        let Some((layout, gains)) = &self.gains else { return };
        let columns = self.right.len() / self.rank;
        for (at, number) in (start as usize..).zip(out) {
            *number *= match layout {
                Layout::OutIn => gains[at / columns],
                Layout::InOut => gains[at % columns],
            };
        }
    }
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
        let base = base.below(weights.adapters.adapters().as_ref(), model, THREADS);
        let compute = Float::deserialize(&config["precision"]["compute"]);
        let compute = compute.map_err(|cause| bad_state(from, "config.precision", &cause.to_string()))?;
        let tensor = config["parallel"]["tensor"].as_u64().unwrap_or(1) as usize;
        let quantised = QuantisedBase::of(&weights.adapters, tensor, model);
        Ok(Weights { base: Some(Below::new(base, compute.into(), quantised)), ..weights })
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

    /// The adapter of a result beside the whole base, `[a, b]`: where it started as a part of the weight, of twice the rank, with that part
    /// behind it, which it subtracts.
    ///
    /// # Errors
    /// As [`Weights::read`].
    pub fn beside_whole_base(&self, [a, b]: [&ParameterSpec; 2]) -> Result<[Vec<f32>; 2], CheckpointError> {
        let mut own = [vec![0.0; a.elements()], vec![0.0; b.elements()]];
        for (spec, out) in [a, b].into_iter().zip(&mut own) {
            self.read(spec, 0..out.len() as u64, out)?;
        }
        let (rank, result) = (a.shape[0], adapted_by(&a.name).expect("a parameter of an adapter"));
        let base = self.base.as_ref().map(Below::base);
        let factors =
            base.map(|base| base.principal(self.model, result).map_err(|error| self.of_base(error)));
        let Some(factors) = factors.transpose()?.flatten() else { return Ok(own) };
        let [mut wide, narrow] = own;
        wide.extend(&factors.a);
        let rows = narrow.chunks_exact(rank).zip(factors.b.chunks_exact(rank));
        let narrow = rows.flat_map(|(own, first)| own.iter().copied().chain(first.iter().map(|x| -x)));
        Ok([wide, narrow.collect()])
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
        self.unadapted(spec, elements.clone(), out)?;
        if out.is_empty() || !self.load(spec)? {
            return Ok(());
        }
        let adapter = self.adapter.borrow();
        let adapter = adapter.as_ref().expect("it was loaded");
        adapter.add_to(elements.start, out);
        adapter.rescale(elements.start, out);
        Ok(())
    }

    /// Reads elements without what an adapter adds.
    fn unadapted(
        &self,
        spec: &ParameterSpec,
        elements: Range<u64>,
        out: &mut [f32],
    ) -> Result<(), CheckpointError> {
        let Some(added) = self.rows_of_added(spec) else {
            return self.of_base_or_stored(spec, elements, out);
        };
        // The rows of added tokens lie behind those of the base's table.
        let first = (spec.elements() - added.elements()) as u64;
        let here = first.clamp(elements.start, elements.end);
        let (of_base, of_added) = out.split_at_mut((here - elements.start) as usize);
        if !of_base.is_empty() {
            let shape = vec![spec.shape[0] - added.shape[0], spec.shape[1]];
            let table = ParameterSpec { shape, ..spec.clone() };
            self.of_base_or_stored(&table, elements.start..here, of_base)?;
        }
        if of_added.is_empty() {
            return Ok(());
        }
        read_stored(self.from, self.model, (PARAMETERS, &added), here - first..elements.end - first, of_added)
    }

    fn of_base_or_stored(
        &self,
        spec: &ParameterSpec,
        elements: Range<u64>,
        out: &mut [f32],
    ) -> Result<(), CheckpointError> {
        match &self.base {
            Some(below) if !is_beside_base(&spec.name) => {
                below.read(self.model, spec, elements, out).map_err(|error| self.of_base(error))
            }
            _ => read_stored(self.from, self.model, (PARAMETERS, spec), elements, out),
        }
    }

    /// The rows of added tokens behind a whole table of the model, if the run has trained some.
    fn rows_of_added(&self, spec: &ParameterSpec) -> Option<ParameterSpec> {
        let name = added_rows(&spec.name);
        let rows = self.adapters.new_rows.filter(|_| self.from.tensor(PARAMETERS, &name).is_ok())?;
        Some(ParameterSpec { name, shape: vec![rows, spec.shape[1]], ..spec.clone() })
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
        let mut adapter = Adapter { weight: spec.name.clone(), rank, left, right, gains: None };
        if self.adapters.dora {
            let gains = self.gains(layer, spec, (&adapter, layout))?;
            adapter.gains = Some((layout, gains));
        }
        *self.adapter.borrow_mut() = Some(adapter);
        Ok(true)
    }

    /// Magnitude over norm of each output of a layer.
    fn gains(
        &self,
        layer: &str,
        spec: &ParameterSpec,
        (adapter, layout): (&Adapter, Layout),
    ) -> Result<Vec<f32>, CheckpointError> {
        let outputs = layout.in_out([spec.shape[0], spec.shape[1]])[1];
        let mut magnitudes = self.vector(&magnitudes_of(layer), outputs)?;
        let mut read = |elements: Range<u64>, out: &mut [f32]| {
            self.unadapted(spec, elements.clone(), out)?;
            adapter.add_to(elements.start, out);
            Ok(())
        };
        let squares = squares_of(layout, [spec.shape[0], spec.shape[1]], 0..outputs, &mut read)?;
        for (magnitude, square) in magnitudes.iter_mut().zip(squares) {
            *magnitude = if square > 0.0 { (f64::from(*magnitude) / square.sqrt()) as f32 } else { 0.0 };
        }
        Ok(magnitudes)
    }

    /// A whole matrix with these extents.
    fn matrix(&self, name: &str, extents: [usize; 2]) -> Result<Vec<f32>, CheckpointError> {
        self.whole(name, &extents)
    }

    /// A whole vector.
    fn vector(&self, name: &str, length: usize) -> Result<Vec<f32>, CheckpointError> {
        self.whole(name, &[length])
    }

    fn whole(&self, name: &str, extents: &[usize]) -> Result<Vec<f32>, CheckpointError> {
        self.from.expect(PARAMETERS, name, extents, DType::F32)?;
        let mut values = vec![0.0; extents.iter().product()];
        let elements = 0..values.len() as u64;
        self.from.read(PARAMETERS, name, elements, bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }
}

fn transposed(matrix: &[f32], [rows, columns]: [usize; 2]) -> Vec<f32> {
    (0..columns).flat_map(|column| (0..rows).map(move |row| matrix[row * columns + column])).collect()
}
