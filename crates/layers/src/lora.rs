//! Low-rank adapters around a linear layer (Hu et al., "LoRA", arXiv 2106.09685), with the names and initial values of PEFT.
//!
//! An adapter has two parameters, `a` `[rank, in]` and `b` `[out, rank]`, and adds `scale * drop(x) · aᵀ · bᵀ` to a result of the layer.
//! Results that one product computes have an adapter each, and the mask of dropout in common. Where the layer has a share of its outputs,
//! so has b; every holder then has the whole of a, and one term of its gradient. With a share of the inputs, a and b change places. What is
//! summed over the holders is what the layer sums: none of them waits for a narrow tensor. The mask is that of the whole input, so that no
//! share changes which elements are dropped. Results may have magnitudes apart from their directions ([`crate::dora`]).

use std::fmt;
use std::sync::Arc;

use crate::adapted::{Adapted, Adapter};
use crate::combinators::Sequence;
use crate::cut::Cut;
pub use crate::dora::rescaled_by;
use crate::dora::{END, Magnitudes};
use crate::embedding::table_of_added;
use crate::head_norm::SumOfShares;
use crate::init::Init;
use crate::layer::AnyLayer;
use crate::linear::{Linear, Output};
use crate::linear_gelu::{GeluAlone, LinearGelu};

/// Ends of the names of an adapter's parameters, behind the name of the result: `a` and `b`.
const ENDS: [&str; 2] = [".lora_A", ".lora_B"];

/// The adapters of a model's linear layers.
#[derive(Clone)]
pub struct Lora {
    /// Rows of a and columns of b: the adapters' rank.
    pub width: usize,
    /// Factor of an adapter's result.
    pub scale: f32,
    /// Probability that training drops an element of an adapter's input.
    pub dropout: f32,
    /// Initial values of a; b starts at zero.
    pub init: AdapterInit,
    /// True if each adapted result has magnitudes, which are trained beside the adapter (DoRA).
    pub magnitudes: bool,
    /// Number of tokens, the last ones, whose rows of the token table and the output projection are trained beside the frozen others.
    pub added: usize,
    /// Returns whether the result of this name of a linear layer has an adapter.
    pub targets: Arc<dyn Fn(&str) -> bool + Send + Sync>,
}

/// Initial values of the first matrix of an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdapterInit {
    /// Uniform up to `1 / sqrt(in)` (He et al., arXiv 1502.01852, with a negative slope of the root of 5).
    Uniform,
    /// Normal with a standard deviation of `1 / rank`.
    Gaussian,
    /// The largest singular vectors of the weight, in both matrices; the weight is then without them (PiSSA). Layers do not know the
    /// weight: whoever fills the parameters computes them.
    Principal,
}

impl fmt::Debug for Lora {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Lora { width, scale, dropout, init, magnitudes, added, targets: _ } = self;
        write!(f, "Lora {{ width: {width}, scale: {scale}, dropout: {dropout}, init: {init:?}, ")?;
        write!(f, "magnitudes: {magnitudes}, added: {added} }}")
    }
}

impl Lora {
    /// The layer, or its share, with adapters; the layer itself where it has none. `sum` adds over the holders of other inputs.
    ///
    /// # Errors
    /// The layer, unchanged, where none of its results is a target.
    pub fn around(&self, linear: Linear, sum: Option<SumOfShares>) -> std::result::Result<Adapted, Linear> {
        let targets = (0..linear.outputs.len()).filter(|i| (self.targets)(&linear.outputs[*i].name));
        let adapters: Vec<Adapter> = targets.map(|output| self.adapter(&linear, output)).collect();
        if adapters.is_empty() {
            return Err(linear);
        }
        let Lora { scale, dropout, .. } = *self;
        let mask = format!("{}.lora_dropout", linear.outputs[0].name);
        let unbiased = Linear { bias: false, ..linear.clone() };
        let magnitudes = self.magnitudes.then_some(Magnitudes { unbiased, sum });
        Ok(Adapted { linear, adapters, scale, dropout, mask, magnitudes })
    }

    fn adapter(&self, linear: &Linear, output: usize) -> Adapter {
        let init = match self.init {
            AdapterInit::Uniform | AdapterInit::Principal => {
                Init::Uniform(1.0 / (linear.inputs as f32).sqrt())
            }
            AdapterInit::Gaussian => Init::Normal(1.0 / self.width as f32),
        };
        let wide = linear.outputs[output].clone();
        let [a, b] = ENDS.map(|end| format!("{}{end}", wide.name));
        let plain = |output, inputs, init| Linear { bias: false, ..Linear::new([output], inputs, init) };
        let (inputs, outputs) = (linear.share_of_inputs, linear.share_of_outputs);
        Adapter {
            output,
            down: Linear {
                share_of_inputs: inputs,
                ..plain(Output::new(a, self.width), linear.inputs, init)
            },
            up: Linear {
                share_of_outputs: outputs,
                ..plain(Output { name: b, ..wide }, self.width, Init::Zeros)
            },
        }
    }
}

/// A layer that adapters may be put around.
pub trait Adapt: Cut {
    /// The layer, which may have a share already, with the adapters that `lora` has for it: none for a layer of a kind of its own.
    /// `sum` adds over the holders of other inputs, if there are some.
    fn adapted(self, _lora: &Lora, _sum: Option<SumOfShares>) -> Box<dyn AnyLayer> {
        Box::new(self)
    }
}

impl Adapt for Linear {
    fn adapted(self, lora: &Lora, sum: Option<SumOfShares>) -> Box<dyn AnyLayer> {
        match lora.around(self, sum) {
            Ok(adapted) => Box::new(adapted),
            Err(linear) => Box::new(linear),
        }
    }
}

impl Adapt for LinearGelu {
    /// GELU then follows the sum of the linear layer and its adapter.
    fn adapted(self, lora: &Lora, sum: Option<SumOfShares>) -> Box<dyn AnyLayer> {
        let LinearGelu { linear, gelu } = self;
        match lora.around(linear, sum) {
            Ok(adapted) => Box::new(Sequence::new(vec![Box::new(adapted), Box::new(GeluAlone { gelu })])),
            Err(linear) => Box::new(LinearGelu { linear, gelu }),
        }
    }
}

/// The result of a linear layer to which the adapter with this parameter belongs; None for other parameters.
pub fn adapted_by(parameter: &str) -> Option<&str> {
    let of_matrix =
        |name: &'_ str| -> Option<usize> { ENDS.iter().find_map(|end| name.strip_suffix(end)).map(str::len) };
    let matrix = parameter.strip_suffix(".weight").and_then(of_matrix);
    matrix.map(|end| &parameter[..end]).or_else(|| rescaled_by(parameter))
}

/// Returns whether a parameter is trained beside a frozen base: that of an adapter, or the rows of added tokens.
pub fn is_beside_base(parameter: &str) -> bool {
    adapted_by(parameter).is_some() || table_of_added(parameter).is_some()
}

/// Name of the magnitudes of this result.
pub fn magnitudes_of(result: &str) -> String {
    format!("{result}{END}")
}

/// Names of the parameters a and b of the adapter of this result.
pub fn parameters_of(result: &str) -> [String; 2] {
    ENDS.map(|end| format!("{result}{end}.weight"))
}
