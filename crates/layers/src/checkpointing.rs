//! Activation checkpointing: backward recomputes activations that forward then need not save (Chen et al., arXiv
//! 1604.06174; Korthikanti et al., arXiv 2205.05198, for the selective kind).
//!
//! Cost for a Transformer block of width h on T tokens: without checkpointing it saves 16 h T elements. Selective
//! checkpointing saves 9 h T (the residual stream, queries, keys and values, and the input of GELU) and recomputes an
//! attention, two norms and a GELU. Checkpointing the block saves h T (its input) and recomputes its forward without
//! the last product.

use crate::activation::Activation;
use crate::call::{Call, Parameters};
use crate::combinators::Sequence;
use crate::failure::Result;
use crate::layer::{AnyLayer, Context, Draw, Layer};
use crate::parameter::ParameterSpec;
use crate::saved::{Deferred, Saved};

/// Which activations of a model are recomputed instead of saved. No choice changes a bit of the result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checkpointing {
    /// All activations are saved.
    #[default]
    None,
    /// Outputs of norms, attention and activation functions, which need no product with weights.
    Selective,
    /// Whole blocks: 0, k, 2k, ...
    Blocks {
        /// k, at least 1.
        every: usize,
    },
}

impl Checkpointing {
    /// Transformer block `index` of a model, wrapped in [`Recompute`] where it is checkpointed whole.
    pub fn block(self, index: usize, layer: impl Layer + 'static) -> Box<dyn AnyLayer> {
        match self {
            Checkpointing::Blocks { every } if index.is_multiple_of(every) => Box::new(Recompute(layer)),
            _ => Box::new(layer),
        }
    }

    /// The layers of a block in sequence.
    pub fn sequence(self, layers: Vec<Box<dyn AnyLayer>>) -> Sequence {
        match self {
            Checkpointing::Selective => Sequence::new(layers).rebuilding(),
            Checkpointing::None | Checkpointing::Blocks { .. } => Sequence::new(layers),
        }
    }
}

/// A layer that saves only its input; its backward runs forward again first.
pub struct Recompute<L>(pub L);

/// State that backward reads beside x.
pub struct SavedRecompute {
    /// Key of the dropout masks of forward.
    draw: Option<Draw>,
}

impl<L: Layer> Recompute<L> {
    /// Runs forward again and returns what it saves.
    fn again<'a>(
        &self,
        cx: &Context<'a>,
        saved: Saved<SavedRecompute>,
        call: &Call,
    ) -> Result<(Context<'a>, Saved<L::Own>)> {
        let Saved { x, own: SavedRecompute { draw }, .. } = saved;
        let again = Context { keep: true, draw, ..*cx };
        let Call { parameters, input_wanted, .. } = *call;
        let call = Call { parameters, x: x.into_held(), sum: None, input_wanted };
        let saved = cx.device.again(|| self.0.save(&again, call))?;
        Ok((again, saved))
    }
}

impl<L: Layer> Layer for Recompute<L> {
    type Own = SavedRecompute;

    fn parameters(&self) -> Vec<ParameterSpec> {
        self.0.parameters()
    }

    fn forward(&self, cx: &Context, call: Call) -> Result<(Activation, Saved<SavedRecompute>)> {
        let (once, x) = (Context { keep: false, ..*cx }, call.x.clone());
        let (y, _) = self.0.forward(&once, call)?;
        Ok((y, Saved::new(SavedRecompute { draw: cx.draw }).with_input(x)))
    }

    fn backward(&self, cx: &Context, saved: Saved<SavedRecompute>, call: Call) -> Result<Option<Activation>> {
        let (again, saved) = self.again(cx, saved, &call)?;
        self.0.backward(&again, saved, call)
    }

    fn backward_input(
        &self,
        cx: &Context,
        saved: Saved<SavedRecompute>,
        call: Call,
    ) -> Result<(Option<Activation>, Deferred)> {
        let (again, saved) = self.again(cx, saved, &call)?;
        self.0.backward_input(&again, saved, call)
    }

    fn backward_weight(&self, cx: &Context, parameters: Parameters, deferred: Deferred) -> Result<()> {
        self.0.backward_weight(cx, parameters, deferred)
    }
}
