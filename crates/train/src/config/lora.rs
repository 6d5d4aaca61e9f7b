//! `[lora]`: low-rank adapters, which are trained in place of the model's own parameters.

use std::collections::BTreeSet;
use std::sync::Arc;

use phalanx_data::is_match;
use phalanx_layers::{AdapterInit, Checkpointing, Lora, Network, ParameterSpec, lora::adapted_by};
use phalanx_models::limits::{MAX_HIDDEN, MAX_VOCAB};
use phalanx_models::{Model, Objective};
use phalanx_parallel::TensorParallel;
use phalanx_tensor::DType;
use serde::{Deserialize, Serialize};

use super::ConfigError;
use super::bounds::BELOW_1;
use super::check::refuse;
use super::declare::Conversion::{Rule, Same, Words};
use super::declare::Resume::Fixed;
use super::declare::{AXOLOTL, HUGGING_FACE, KEY, Kind, LLAMA_FACTORY};
use super::key_types::KeyType;
use super::needs::{LEFT_OUT, Need, SET};

/// Reasons for which a resumed run keeps its adapters.
const TENSORS: &str = "its checkpoints have adapters of this size";
const SCALE: &str = "its adapters were trained with this factor";

const BASE: &str = "its adapters were trained beside this base";

const ADAPTERS: Need = Need::is_for(&[("lora.rank", SET)], "");

const NOTHING: Need = Need::any(
    &[("lora.init", &["default", "gaussian"])],
    "with \"pissa\" an adapter starts as a part of the weight, and not as a folder or a magnitude has it",
);

table! {
    /// `[lora]`
    "lora" LoraConfig {
        /// Rank of the adapters, which are trained while all parameters of the model are frozen (LoRA); no adapters when left out. The
        /// matrices of an adapter are `rank` x inputs and outputs x `rank`.
        rank: Option<usize> = None, KEY.resume(Fixed(TENSORS)).from(1.0, MAX_HIDDEN as f64)
            .needs(&[Need::any(&[("model.trainable", LEFT_OUT)], "adapters alone are trained")])
            .foreign(&[(AXOLOTL, "lora_r", Same, ""), (LLAMA_FACTORY, "lora_rank", Same, "")]);
        /// The result of an adapter is multiplied by `alpha / rank`; `alpha` is `rank` when left out.
        alpha: Option<f64> = None, KEY.resume(Fixed(SCALE)).above(0.0, f64::MAX).needs(&[ADAPTERS])
            .foreign(&[(HUGGING_FACE, "lora_alpha", Same, "")]);
        /// Probability that training drops an element of an adapter's input. Adapters of results that one product computes, as those of
        /// queries, keys and values, drop the same elements.
        dropout: f64 = 0.0, KEY.from(0.0, BELOW_1).needs(&[ADAPTERS])
            .foreign(&[(HUGGING_FACE, "lora_dropout", Same, "")]);
        /// Linear layers that have an adapter: `"all-linear"`, all but the output projection; or patterns of their names, or of the ends of
        /// their names after a dot, as `["q_proj", "v_proj"]`.
        targets: Targets = Targets::default(), KEY.resume(Fixed(TENSORS)).needs(&[ADAPTERS])
            .foreign(&[(AXOLOTL, "lora_target_modules", Rule, ""), (LLAMA_FACTORY, "lora_target", Rule, "")]);
        /// Multiplies by `alpha / sqrt(rank)` (Kalajdzievski, 2023).
        rslora: bool = false, KEY.resume(Fixed(SCALE)).needs(&[ADAPTERS])
            .foreign(&[(HUGGING_FACE, "use_rslora", Same, ""), (AXOLOTL, "peft_use_rslora", Same, "")]);
        /// Trains a magnitude for each output of an adapted layer beside its direction (DoRA; Liu et al., 2024): the layer's weight with the
        /// adapter's is divided by the norms of its rows, which each step computes from all of the weight.
        dora: bool = false, KEY.resume(Fixed(TENSORS)).needs(&[ADAPTERS, NOTHING])
            .foreign(&[(HUGGING_FACE, "use_dora", Same, ""), (AXOLOTL, "peft_use_dora", Same, "")]);
        /// Initial values of an adapter's first matrix; the second is zero. With `"pissa"` both start as the largest singular vectors of their
        /// layer's weight, and the frozen weight is what is left (Meng et al., 2024).
        init: LoraInit = LoraInit::Default, KEY.resume(Fixed(BASE)).needs(&[ADAPTERS])
            .foreign(&[(AXOLOTL, "peft_init_lora_weights", Words(&[("true", "default"), ("gaussian", "gaussian"), ("pissa", "pissa")]), "")]);
        /// Type in which the weights of the frozen linear layers are kept: that of computing, or numbers of 8 or 4 bits, which each product
        /// turns into that of computing (QLoRA). The output projection, tables and norms keep the type of computing.
        base: LoraBase = LoraBase::Compute, KEY.resume(Fixed(BASE)).needs(&[ADAPTERS]);
        /// Rows of the token table and the output projection, the last ones, that are trained beside the adapters: those of
        /// `model.add_tokens`, or of a tokenizer with more ids than the model has rows, when left out.
        new_rows: Option<usize> = None, KEY.keeps().resume(Fixed(TENSORS)).from(1.0, MAX_VOCAB as f64).needs(&[ADAPTERS]);
        /// A folder with an adapter that PEFT or `phalanx export` has written, to start from. Its `adapter_config.json` gives the keys above.
        adapter: Option<String> = None, KEY.needs(&[Need::any(&[("model.init", SET)], "an adapter is of a model's weights"), ADAPTERS, NOTHING])
            .foreign(&[(AXOLOTL, "lora_model_dir", Same, ""), (LLAMA_FACTORY, "adapter_name_or_path", Same, "")]);
    }
}

words! {
    /// Initial values of the first matrix of an adapter.
    LoraInit {
        /// Uniform between `-1 / sqrt(inputs)` and `1 / sqrt(inputs)`.
        Default = "default",
        /// Normal with a standard deviation of `1 / rank`.
        Gaussian = "gaussian",
        /// The largest singular vectors of the weight.
        Pissa = "pissa",
    }
}

words! {
    /// Type of the weights of frozen linear layers.
    LoraBase {
        /// That of computing.
        Compute = "compute",
        /// 8 bits in groups of 32 that share a scale: 1.06 bytes a weight.
        Q8_0 = "q8_0",
        /// 4 bits in groups of 64 that share a scale: 0.52 bytes a weight.
        Nf4 = "nf4",
    }
}

impl LoraBase {
    fn dtype(self) -> Option<DType> {
        match self {
            LoraBase::Compute => None,
            LoraBase::Q8_0 => Some(DType::Q8_0),
            LoraBase::Nf4 => Some(DType::Nf4),
        }
    }
}

/// The weights below adapters that are kept in blocks.
#[derive(Clone, Debug)]
pub struct QuantisedBase {
    /// Their type.
    pub dtype: DType,
    /// Their names.
    weights: Arc<BTreeSet<String>>,
    /// Number of weights of linear layers that are not: a rank's part of them is no whole blocks.
    pub others: usize,
}

impl QuantisedBase {
    /// Those of a model with these adapters, of whose tensors `tensor` ranks have a part each: the weights of all linear layers that may have
    /// an adapter, where a rank's part of them is whole blocks. None if they are kept in the type of computing.
    pub fn of(config: &LoraConfig, tensor: usize, model: &dyn Model) -> Option<QuantisedBase> {
        let dtype = config.base.dtype()?;
        let layers: BTreeSet<String> = linear_layers(model).into_iter().collect();
        let is_linear = |spec: &ParameterSpec| {
            spec.name.strip_suffix(".weight").is_some_and(|layer| layers.contains(layer))
        };
        let (mut weights, mut others) = (BTreeSet::new(), 0);
        let whole = model.whole();
        for spec in whole.parameters.iter().filter(|spec| spec.members().iter().all(is_linear)) {
            let fits = |spec: &ParameterSpec| spec.elements().is_multiple_of(dtype.block() * tensor);
            match spec.members().iter().all(fits) {
                true => weights.extend(spec.members().iter().map(|spec| spec.name.clone())),
                false => others += spec.members().len(),
            }
        }
        Some(QuantisedBase { dtype, weights: Arc::new(weights), others })
    }

    /// Number of the weights.
    pub fn count(&self) -> usize {
        self.weights.len()
    }

    /// Returns whether this parameter is kept in blocks.
    pub fn has(&self, spec: &ParameterSpec) -> bool {
        spec.members().iter().all(|spec| self.weights.contains(&spec.name))
    }

    /// The network with these weights in blocks.
    pub(crate) fn applied_to(&self, network: Network) -> Network {
        network.keeping(|spec| self.has(spec).then_some(self.dtype))
    }
}

/// The linear layers that have an adapter, as written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Targets {
    /// `"all-linear"`, or one pattern.
    One(String),
    /// Patterns.
    Several(Vec<String>),
}

/// All linear layers.
pub const ALL_LINEAR: &str = "all-linear";

impl Default for Targets {
    fn default() -> Targets {
        Targets::One(ALL_LINEAR.into())
    }
}

impl KeyType for Targets {
    const KIND: Kind = Kind::TextOrTexts("\"all-linear\" or a list of patterns, as [\"q_proj\", \"v_proj\"]");
}

impl Targets {
    /// The patterns; none for all linear layers.
    pub fn patterns(&self) -> &[String] {
        match self {
            Targets::One(all) if all == ALL_LINEAR => &[],
            Targets::One(one) => std::slice::from_ref(one),
            Targets::Several(several) => several,
        }
    }

    /// Returns whether the result of this name of a linear layer has an adapter.
    fn have(&self, name: &str) -> bool {
        let patterns = self.patterns();
        *self == Targets::default() || patterns.iter().any(|pattern| is_target(pattern, name))
    }
}

/// Returns whether a pattern matches a name, or its end after a dot.
fn is_target(pattern: &str, name: &str) -> bool {
    let ends = name.match_indices('.').map(|(dot, _)| &name[dot + 1..]);
    std::iter::once(name).chain(ends).any(|end| is_match(pattern.as_bytes(), end.as_bytes()))
}

impl LoraConfig {
    /// The factor of what an adapter adds.
    pub fn scale(&self) -> f32 {
        let rank = self.rank.unwrap_or(1) as f64;
        let divisor = if self.rslora { rank.sqrt() } else { rank };
        (self.alpha.unwrap_or(rank) / divisor) as f32
    }

    /// The adapters; None where the model has none.
    pub fn adapters(&self) -> Option<Arc<Lora>> {
        let (rank, targets) = (self.rank?, self.targets.clone());
        Some(Arc::new(Lora {
            width: rank,
            scale: self.scale(),
            dropout: self.dropout as f32,
            init: match self.init {
                LoraInit::Default => AdapterInit::Uniform,
                LoraInit::Gaussian => AdapterInit::Gaussian,
                LoraInit::Pissa => AdapterInit::Principal,
            },
            magnitudes: self.dora,
            added: self.new_rows.unwrap_or(0),
            targets: Arc::new(move |name| targets.have(name)),
        }))
    }

    /// Refuses a model without adapters, and a pattern that matches none of its linear layers.
    ///
    /// # Errors
    /// As said.
    pub(super) fn check(&self, model: &dyn Model) -> Result<(), ConfigError> {
        let Some(rank) = self.rank else { return Ok(()) };
        if model.objective() != Objective::Causal {
            let expected = "adapts models that continue text, and this one does not: leave it out";
            return Err(refuse("lora.rank", rank, expected));
        }
        if let Some(new) = self.new_rows.filter(|new| *new >= model.vocab()) {
            let expected = format!(
                "is not below the model's {} rows, some of which stay frozen: give less",
                model.vocab()
            );
            return Err(refuse("lora.new_rows", new, expected));
        }
        let mut given = self.targets.patterns().iter().peekable();
        if given.peek().is_none() {
            let is_empty = self.targets != Targets::default();
            let expected = "names no linear layer: give patterns, or \"all-linear\"";
            return if is_empty { Err(refuse("lora.targets", "[]", expected)) } else { Ok(()) };
        }
        let names = linear_layers(model);
        let Some(unused) = given.find(|pattern| !names.iter().any(|name| is_target(pattern, name))) else {
            return Ok(());
        };
        let mut ends: Vec<&str> = names.iter().filter_map(|name| name.rsplit('.').next()).collect();
        ends.sort_unstable();
        ends.dedup();
        let expected = format!(
            "matches no linear layer: a pattern is for a whole name or its end after a dot, and the names end in {}",
            ends.join(", ")
        );
        Err(refuse("lora.targets", format!("\"{unused}\""), expected))
    }
}

/// Names of the linear layers of a model that may have an adapter, in order.
fn linear_layers(model: &dyn Model) -> Vec<String> {
    let every = LoraConfig { rank: Some(1), ..LoraConfig::default() }.adapters().expect("a rank");
    let network = model.network(&TensorParallel::solo().adapting(every), Checkpointing::None);
    let network = network.expect("one rank divides nothing");
    let mut names: Vec<String> =
        network.members().filter_map(|spec| adapted_by(&spec.name)).map(str::to_string).collect();
    names.dedup();
    names
}
