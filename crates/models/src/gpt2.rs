//! GPT-2 (Radford et al., 2019), as `GPT2LMHeadModel` of transformers has it.
//!
//! Embedding, `layers` blocks of pre-norm attention and MLP with residual paths, a last norm, and an
//! output projection tied to the token table. Weights are `Conv1D`: `[in, out]`. Names, `config.json` and
//! initial values follow transformers, so that its files load and ours load there.

use phalanx_layers::{
    Attention, Block, BlockRole, CannotCut, Checkpointing, Dropped, Embedding, Fork, Init, Layer, LayerNorm,
    Linear, LinearCrossEntropy, LinearGelu, Network, Output, Pieces, PositionTable, Sequence,
};
use phalanx_parallel::TensorParallel;
use phalanx_tensor::{Heads, Layout};
use serde_json::{Value, json};

use crate::config::{
    decimal, epsilon, expect_architecture, expect_computed, heads, number, probability, renamed,
};
use crate::limits::{MAX_HIDDEN, MAX_LAYERS, MAX_POSITIONS, MAX_VOCAB};
use crate::{
    Activation, Arch, Architecture, Dropouts, Model, ModelError, ModelShape, NumberedLayers, Objective,
    ShapeKeys,
};

/// How files number the layers. The first GPT-2 on the Hugging Face hub leaves out `transformer.`.
const LAYERS: NumberedLayers = NumberedLayers { key: "n_layer", prefixes: &["transformer.h.", "h."] };

/// Other names of keys, which transformers maps to GPT-2's own (its `attribute_map`).
const OTHER_KEYS: [(&str, &str); 4] = [
    ("hidden_size", "n_embd"),
    ("max_position_embeddings", "n_positions"),
    ("num_attention_heads", "n_head"),
    ("num_hidden_layers", "n_layer"),
];

/// Epsilon of the norms, unless a file gives another value.
const EPS: f32 = 1e-5;

/// The entry in the registry.
pub(crate) const ARCHITECTURE: Architecture = Architecture {
    name: "gpt2",
    title: "GPT-2",
    objective: Objective::Causal,
    keys: ShapeKeys {
        layers: "n_layer",
        hidden: "n_embd",
        heads: "n_head",
        positions: "n_positions",
        vocab: "vocab_size",
    },
    build: |shape| Gpt2::new(shape).into(),
    from_config: |config| Gpt2::from_config(config).map(Into::into),
};

/// Sizes of a GPT-2, and its dropout in training.
#[derive(Clone, Debug, PartialEq)]
pub struct Gpt2 {
    /// Transformer blocks (`n_layer`).
    pub layers: usize,
    /// Width (`n_embd`).
    pub hidden: usize,
    /// Attention heads (`n_head`).
    pub heads: usize,
    /// Rows of the token table (`vocab_size`).
    pub vocab: usize,
    /// Rows of the position table (`n_positions`): the longest sequence.
    pub positions: usize,
    /// Added to the variance of a norm (`layer_norm_epsilon`).
    pub eps: f32,
    /// Within the MLP (`activation_function`).
    pub activation: Activation,
    /// Dropout in training.
    pub dropout: Dropouts,
}

impl Gpt2 {
    /// A model of these sizes with the values of the published models for everything else, and no dropout.
    pub fn new(shape: ModelShape) -> Gpt2 {
        let ModelShape { layers, hidden, heads, vocab, positions } = shape;
        let (activation, dropout) = (Activation::GELU_NEW, Dropouts::default());
        Gpt2 { layers, hidden, heads, vocab, positions, eps: EPS, activation, dropout }
    }

    /// The whole network on one rank: parameters named `transformer.wte.weight`, `transformer.h.0.ln_1.weight`, ...
    pub fn whole(&self) -> Network {
        self.network(&TensorParallel::solo(), Checkpointing::None)
    }

    fn build(&self, tensor: &TensorParallel, checkpointing: Checkpointing) -> Result<Network, CannotCut> {
        let mut blocks = vec![Block {
            name: "embedding".into(),
            role: BlockRole::End,
            layer: Box::new(self.embedding(tensor)),
        }];
        for i in 0..self.layers {
            let layer = checkpointing.block(i, self.block(i, tensor, checkpointing)?);
            blocks.push(Block { name: format!("h.{i}"), role: BlockRole::Transformer, layer });
        }
        blocks.push(Block {
            name: "ln_f".into(),
            role: BlockRole::End,
            layer: tensor.rows(self.norm("transformer.ln_f".into())),
        });
        let head = LinearCrossEntropy {
            weight: "transformer.wte.weight".into(),
            bias: None,
            vocab: self.vocab,
            hidden: self.hidden,
            init: Init::Normal(0.02),
        };
        Ok(Network::new(blocks, tensor.head(head)))
    }

    fn embedding(&self, tensor: &TensorParallel) -> impl Layer + use<> {
        let layer = Embedding {
            tokens: "transformer.wte.weight".into(),
            positions: Some(PositionTable { name: "transformer.wpe.weight".into(), rows: self.positions }),
            types: None,
            vocab: self.vocab,
            hidden: self.hidden,
            init: Init::Normal(0.02),
        };
        Dropped { layer: tensor.embedding(layer), p: self.dropout.embedding, name: "transformer.drop".into() }
    }

    /// `x + attention(norm(x))`, then `x + mlp(norm(x))`.
    fn block(
        &self,
        index: usize,
        tensor: &TensorParallel,
        checkpointing: Checkpointing,
    ) -> Result<Sequence, CannotCut> {
        let name = |part: &str| format!("transformer.h.{index}.{part}");
        let hidden = self.hidden;
        // Projections into the residual stream start smaller, because each of the 2 * layers adds its variance.
        let small = Init::Normal(0.02 / (2.0 * self.layers as f32).sqrt());
        let linear = |part: &str, inputs, outputs, init| Linear {
            layout: Layout::InOut,
            ..Linear::new([Output::new(name(part), outputs)], inputs, init)
        };
        let pieces = Pieces { packed: 3, ..Pieces::of(self.heads) };
        let qkv = Output { pieces, ..Output::new(name("attn.c_attn"), 3 * hidden) };
        let qkv = Linear { layout: Layout::InOut, ..Linear::new([qkv], hidden, Init::Normal(0.02)) };
        let dropped = |layer, part: &str| Dropped { layer, p: self.dropout.residual, name: name(part) };
        let attention = Attention {
            heads: Heads::equal(self.heads, hidden / self.heads, true),
            dropout: self.dropout.attention,
            name: name("attn.attn_dropout"),
            first_head: 0,
            all_heads: self.heads,
        };
        let attention = Fork::residual(checkpointing.sequence(vec![
            tensor.rows(self.norm(name("ln_1"))),
            tensor.column(qkv)?,
            Box::new(tensor.attention(attention)?),
            Box::new(dropped(
                tensor.row(linear("attn.c_proj", hidden, hidden, small))?,
                "attn.resid_dropout",
            )),
        ]));
        let fc = linear("mlp.c_fc", hidden, 4 * hidden, Init::Normal(0.02));
        let mlp = Fork::residual(checkpointing.sequence(vec![
            tensor.rows(self.norm(name("ln_2"))),
            tensor.column(LinearGelu { linear: fc, gelu: self.activation.gelu })?,
            Box::new(dropped(tensor.row(linear("mlp.c_proj", 4 * hidden, hidden, small))?, "mlp.dropout")),
        ]));
        Ok(Sequence::new(vec![Box::new(attention), Box::new(mlp)]))
    }

    fn norm(&self, prefix: String) -> LayerNorm {
        LayerNorm { prefix, hidden: self.hidden, eps: self.eps, centred: true, bias: true }
    }

    fn config(&self) -> Value {
        json!({
            "activation_function": self.activation.word(),
            "architectures": ["GPT2LMHeadModel"],
            "attn_pdrop": decimal(self.dropout.attention),
            "embd_pdrop": decimal(self.dropout.embedding),
            "initializer_range": 0.02,
            "layer_norm_epsilon": decimal(self.eps),
            "model_type": ARCHITECTURE.name,
            "n_ctx": self.positions,
            "n_embd": self.hidden,
            "n_head": self.heads,
            "n_inner": null,
            "n_layer": self.layers,
            "n_positions": self.positions,
            "resid_pdrop": decimal(self.dropout.residual),
            "scale_attn_weights": true,
            "tie_word_embeddings": true,
            "torch_dtype": "float32",
            "vocab_size": self.vocab,
        })
    }

    /// Reads a `config.json` of transformers. Its dropout is that of the training which made the file; a run uses the
    /// dropout of its own configuration.
    ///
    /// # Errors
    /// When the file describes another architecture, or a variant that is not computed here.
    pub fn from_config(config: &Value) -> Result<Gpt2, ModelError> {
        expect_architecture(config, ARCHITECTURE.name)?;
        let config = &renamed(config, &OTHER_KEYS)?;
        let hidden = number(config, "n_embd", MAX_HIDDEN)?;
        expect_computed(
            config,
            &[
                ("scale_attn_weights", json!(true)),
                ("scale_attn_by_inverse_layer_idx", json!(false)),
                ("reorder_and_upcast_attn", json!(false)),
                ("tie_word_embeddings", json!(true)),
                ("add_cross_attention", json!(false)),
                ("quantization_config", json!(null)),
            ],
        )?;
        let inner = config.get("n_inner").unwrap_or(&Value::Null);
        if !inner.is_null() && inner.as_u64() != Some(4 * hidden as u64) {
            let expected = format!("null or {}", 4 * hidden);
            return Err(ModelError::Key { key: "n_inner", given: inner.to_string(), expected });
        }
        Ok(Gpt2 {
            layers: number(config, "n_layer", MAX_LAYERS)?,
            hidden,
            heads: heads(config, "n_head", hidden, "n_embd")?,
            vocab: number(config, "vocab_size", MAX_VOCAB)?,
            positions: number(config, "n_positions", MAX_POSITIONS)?,
            eps: epsilon(config, "layer_norm_epsilon", EPS)?,
            activation: Activation::read(config, "activation_function", Activation::GELU_NEW)?,
            dropout: Dropouts {
                embedding: probability(config, "embd_pdrop")?,
                attention: probability(config, "attn_pdrop")?,
                residual: probability(config, "resid_pdrop")?,
            },
        })
    }
}

impl Model for Gpt2 {
    fn network(&self, tensor: &TensorParallel, checkpointing: Checkpointing) -> Network {
        self.build(tensor, checkpointing).expect("the configuration was checked")
    }

    fn shape(&self) -> ModelShape {
        let Gpt2 { layers, hidden, heads, vocab, positions, .. } = *self;
        ModelShape { layers, hidden, heads, vocab, positions }
    }

    fn architecture(&self) -> Option<Arch> {
        Some(Arch::of(&ARCHITECTURE))
    }

    /// The `config.json` of transformers.
    fn to_config(&self) -> Value {
        self.config()
    }

    /// Files written by the hub's first GPT-2 leave out the `transformer.` prefix.
    fn aliases(&self, name: &str) -> Vec<String> {
        name.strip_prefix("transformer.").map(str::to_string).into_iter().collect()
    }

    fn copies_of(&self, stored: &str) -> &'static [&'static str] {
        if stored == "transformer.wte.weight" { &["lm_head.weight"] } else { &[] }
    }

    fn numbered_layers(&self) -> Option<NumberedLayers> {
        Some(LAYERS)
    }

    /// The causal mask, which older versions of transformers saved with each layer.
    fn is_ignored(&self, name: &str) -> bool {
        let is_mask = name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
        is_mask && LAYERS.of(name).is_some_and(|layer| layer < self.layers)
    }

    fn dropping(&self, dropout: Dropouts) -> std::sync::Arc<dyn Model> {
        Gpt2 { dropout, ..self.clone() }.into()
    }
}
