//! The base of adapters: the parameters of the model itself, which are frozen, so that checkpoints leave them out. They are the weights of the
//! folder `model.init`, or initial values.

use std::ops::Range;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use phalanx_checkpoint::{Checkpoint, HuggingFaceDir};
use phalanx_layers::lora::is_beside_base;
use phalanx_layers::{Lora, ParameterSpec, table_of_added};
use phalanx_models::{Model, RowsOf, name_in};
use phalanx_optim::PARAMETERS;
use phalanx_plan::Stripe;

use crate::engine::error::RunError;
use crate::engine::new_rows::Table;
use crate::engine::principal::{Factors, Principal};
use crate::engine::spec::ModelPart;

/// Source of the parameters below adapters.
pub struct Base {
    source: Source,
    /// What adapters start with, and the base is without; None where they start as nothing.
    principal: Option<Principal>,
}

enum Source {
    /// The weights of a Hugging Face folder.
    Folder(HuggingFaceDir),
    /// Initial values from this seed.
    Initial(u64),
}

/// Returns whether a checkpoint has all parameters of the model, and not those of adapters alone.
pub fn is_whole(from: &Checkpoint) -> bool {
    from.tensors().iter().any(|tensor| tensor.state == PARAMETERS && !is_beside_base(&tensor.name))
}

impl Base {
    /// The folder `init`, or initial values from `seed`.
    ///
    /// # Errors
    /// [`RunError::Init`] for a folder that cannot be opened.
    pub fn open(init: Option<&Path>, seed: u64) -> Result<Base, RunError> {
        let Some(dir) = init else { return Ok(Base::initial(seed)) };
        let opened = HuggingFaceDir::open(dir).map_err(RunError::from);
        opened
            .map(|dir| Base { source: Source::Folder(dir), principal: None })
            .map_err(|cause| RunError::Init { dir: dir.to_path_buf(), cause: Box::new(cause) })
    }

    /// Initial values from this seed.
    pub fn initial(seed: u64) -> Base {
        Base { source: Source::Initial(seed), principal: None }
    }

    /// Returns whether the weights are initial values.
    pub(crate) fn is_initial(&self) -> bool {
        matches!(self.source, Source::Initial(_))
    }

    /// Returns whether adapters start with a part of the weights.
    pub(crate) fn has_principal(&self) -> bool {
        self.principal.is_some()
    }

    /// The same below these adapters: without what they start with.
    #[must_use]
    pub fn below(self, adapters: Option<&Arc<Lora>>, model: &dyn Model, threads: usize) -> Base {
        Base { principal: adapters.and_then(|adapters| Principal::of(model, adapters, threads)), ..self }
    }

    /// The base of a run's adapters; None if it has none.
    ///
    /// # Errors
    /// Those of [`Base::open`].
    pub fn of(model: &ModelPart, threads: usize) -> Result<Option<Base>, RunError> {
        let Some(adapters) = &model.adapters else { return Ok(None) };
        let base = Base::open(model.init.as_deref(), model.seed)?;
        Ok(Some(base.below(Some(adapters), &*model.definition, threads)))
    }

    /// The principal part with which the adapter of this result starts; None where it starts as nothing.
    ///
    /// # Errors
    /// Those of [`Base::read`].
    pub(crate) fn principal(&self, model: &dyn Model, result: &str) -> Result<Option<Rc<Factors>>, RunError> {
        let Some(principal) = &self.principal else { return Ok(None) };
        let (whole, name) = (model.whole(), format!("{result}.weight"));
        let Some(weight) = whole.members().find(|spec| spec.name == name) else { return Ok(None) };
        principal.factors((result, model.linear_layout()), weight, &mut |elements, out| {
            self.source.read(model, weight, elements, out)
        })
    }

    /// Checksum of the weights, or the seed, which checkpoints store beside the checksums of the data. All weights are read.
    ///
    /// # Errors
    /// Files that cannot be read.
    pub fn digest(&self) -> Result<String, RunError> {
        match &self.source {
            Source::Folder(dir) => Ok(dir.digest()?),
            Source::Initial(seed) => Ok(format!("initial values of seed {seed}")),
        }
    }

    /// Refuses another base than that beside which the adapters of a checkpoint were trained; returns its digest.
    ///
    /// # Errors
    /// [`RunError::OtherBase`], and those of [`Base::digest`].
    pub fn check(&self, from: &Checkpoint) -> Result<String, RunError> {
        let found = self.digest()?;
        match from.state()["data"]["base"].as_str() {
            Some(expected) if expected != found => Err(RunError::OtherBase {
                base: match &self.source {
                    Source::Folder(dir) => format!("model.init = {:?}", dir.path().display().to_string()),
                    Source::Initial(seed) => format!("train.seed = {seed} without model.init"),
                },
                checkpoint: from.dir().to_path_buf(),
                expected: expected.to_string(),
                found,
            }),
            _ => Ok(found),
        }
    }

    /// Reads elements of this rank's part of a parameter of the model.
    ///
    /// # Errors
    /// A tensor that is missing, of another shape, unreadable, or not finite.
    pub fn read(
        &self,
        model: &dyn Model,
        spec: &ParameterSpec,
        elements: Range<u64>,
        out: &mut [f32],
    ) -> Result<(), RunError> {
        self.source.read(model, spec, elements.clone(), out)?;
        let Some(principal) = self.principal.as_ref().filter(|_| !out.is_empty()) else { return Ok(()) };
        let result = spec.name.strip_suffix(".weight").unwrap_or_default();
        let Some(factors) = self.principal(model, result)? else { return Ok(()) };
        let columns = spec.whole_shape()[1];
        for (here, whole) in spec.stripe().runs(elements.clone()) {
            let [start, end] = [here.start, here.end].map(|at| (at - elements.start) as usize);
            principal.subtract(&factors, (model.linear_layout(), columns), whole.start, &mut out[start..end]);
        }
        Ok(())
    }
}

impl Source {
    fn read(
        &self,
        model: &dyn Model,
        spec: &ParameterSpec,
        elements: Range<u64>,
        out: &mut [f32],
    ) -> Result<(), RunError> {
        match self {
            Source::Folder(dir) => read_imported(dir, model, spec, elements, out),
            Source::Initial(seed) => {
                fill_initial(spec, *seed, elements.start, out);
                Ok(())
            }
        }
    }
}

/// Initial values of the elements from `start` on of this rank's part of a parameter.
pub(crate) fn fill_initial(spec: &ParameterSpec, seed: u64, start: u64, out: &mut [f32]) {
    let mut done = 0;
    for (_, whole) in spec.stripe().runs(start..start + out.len() as u64) {
        let count = (whole.end - whole.start) as usize;
        spec.init.fill(seed, &spec.name, whole.start, &mut out[done..done + count]);
        done += count;
    }
}

/// Seed of the initial values of a head that a directory lacks.
const HEAD_SEED: u64 = 1;

/// Reads the elements of this rank's part of a parameter from a Hugging Face directory. They must be finite, and equal in every copy to which the architecture ties them. A head that the directory lacks gets
/// initial values, and tokens that its tables lack rows near the mean of the others.
///
/// # Errors
/// A tensor that is missing, of another shape, unreadable, not finite, or different from its copy.
pub fn read_imported(
    dir: &HuggingFaceDir,
    model: &dyn Model,
    spec: &ParameterSpec,
    elements: Range<u64>,
    out: &mut [f32],
) -> Result<(), RunError> {
    let (source, stripe) = (model.source(spec), spec.stripe());
    let table = table_of_added(&spec.name);
    let own = source.as_ref().map_or(table.as_ref().unwrap_or(&spec.name), |rows| &rows.name);
    let name = name_in(model, own, |name| dir.contains(name));
    if !dir.contains(&name) && model.head_prefixes().iter().any(|prefix| name.starts_with(prefix)) {
        fill_initial(spec, HEAD_SEED, elements.start, out);
        return Ok(());
    }
    let expected = source.as_ref().map_or(spec.whole_shape(), |rows| &rows.shape).to_vec();
    let given = dir.shape(&name)?.to_vec();
    if given != expected || table.is_some() {
        if let Some(table) = Table::of(dir, model, spec, (&name, &given)) {
            return table.read(&stripe, elements, out);
        }
        return Err(RunError::Shape { name, given, expected });
    }
    if let Some(RowsOf { shape, first, .. }) = source {
        let whole = Stripe::whole(shape.iter().product::<usize>() as u64);
        for (here, there) in stripe.runs(elements.clone()) {
            let [start, end] = [here.start, here.end].map(|at| (at - elements.start) as usize);
            dir.read_weights(&name, &whole, first + there.start..first + there.end, &mut out[start..end])?;
        }
        return Ok(());
    }
    dir.read_weights(&name, &stripe, elements.clone(), out)?;
    for copy in model.copies_of(&spec.name).iter().filter(|copy| dir.contains(copy)) {
        dir.check_copy(&name, copy, &stripe, elements.clone(), out)?;
    }
    Ok(())
}
