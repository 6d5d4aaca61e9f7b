//! GPT-2 (Radford et al., 2019), as `GPT2LMHeadModel` of transformers has it.
//!
//! Embedding, `layers` blocks of pre-norm attention and MLP with residual paths, a last norm, and an
//! output projection tied to the token table. Weights are `Conv1D`: `[in, out]`. Names, `config.json` and
//! initial values follow transformers, so that its files load and ours load there.

use phalanx_layers::{
    Attention, Block, BlockRole, CannotCut, Checkpointing, Dropped, Embedding, Fork, Init, Layer, LayerNorm,
    Linear, LinearCrossEntropy, LinearGelu, Network, Output, Pieces, PositionTable, RowShape, Sequence,
};
use phalanx_parallel::TensorParallel;
use phalanx_tensor::{Gelu, Heads, Layout};
use serde_json::{Value, json};

use crate::config::{
    decimal, epsilon, expect_architecture, expect_computed, heads, number, probability, renamed,
};
use crate::gguf::{GgufModel, GgufNumber, GgufSource, RowOrder, of_layer};
use crate::keys::{Key, Keys};
use crate::limits::{MAX_HIDDEN, MAX_INTERMEDIATE, MAX_LAYERS, MAX_POSITIONS, MAX_VOCAB};
use crate::{Activation, Arch, Architecture, Dropouts, Input, Model, ModelError, NumberedLayers, Objective};

/// Prefixes of a layer's number in tensor names. The first GPT-2 on the Hugging Face hub leaves out `transformer.`.
const LAYERS: [&str; 2] = ["transformer.h.", "h."];

/// Other names of keys, which transformers maps to GPT-2's own (its `attribute_map`).
const OTHER_KEYS: [(&str, &str); 4] = [
    ("hidden_size", "n_embd"),
    ("max_position_embeddings", "n_positions"),
    ("num_attention_heads", "n_head"),
    ("num_hidden_layers", "n_layer"),
];

/// Epsilon of the norms, unless a file or a configuration gives another value.
const EPS: f32 = 1e-5;

/// The entry in the registry.
pub(crate) const ARCHITECTURE: Architecture = Architecture {
    name: "gpt2",
    title: "GPT-2",
    objective: Objective::Causal,
    keys: &[
        Key::layers("n_layer", Some(12)),
        Key::hidden("n_embd", Some(768)),
        Key::heads("n_head", Some(12)),
        Key::positions("n_positions"),
        Key::intermediate("n_inner"),
        Key::norm_eps("layer_norm_epsilon", Some(EPS)),
    ],
    build: |_, keys, vocab, seq| {
        let model = Gpt2 {
            layers: keys.count("layers"),
            hidden: keys.count("hidden"),
            heads: keys.divisor("heads", "hidden")?,
            intermediate: keys.given_count("intermediate"),
            vocab,
            positions: keys.positions(seq)?,
            eps: keys.number("norm_eps"),
            ..Gpt2::default()
        };
        Ok(model.into())
    },
    vocab: |_, _| None,
    from_config: |_, config| Gpt2::from_config(config).map(Into::into),
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
    /// Width within the MLP (`n_inner`); None for 4 times `hidden`.
    pub intermediate: Option<usize>,
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

/// The sizes of the smallest published model, its values for everything else, and no dropout.
impl Default for Gpt2 {
    fn default() -> Gpt2 {
        Gpt2 {
            layers: 12,
            hidden: 768,
            heads: 12,
            intermediate: None,
            vocab: 50257,
            positions: 1024,
            eps: EPS,
            activation: Activation::GELU_NEW,
            dropout: Dropouts::default(),
        }
    }
}

impl Gpt2 {
    fn intermediate(&self) -> usize {
        self.intermediate.unwrap_or(4 * self.hidden)
    }

    fn build(&self, tensor: &TensorParallel, checkpointing: Checkpointing) -> Result<Network, CannotCut> {
        let output = RowShape::tokens(self.hidden);
        let mut blocks = vec![Block {
            name: "embedding".into(),
            role: BlockRole::End,
            layer: Box::new(self.embedding(tensor)),
            output,
        }];
        for i in 0..self.layers {
            let layer = checkpointing.block(i, self.block(i, tensor, checkpointing)?);
            blocks.push(Block { name: format!("h.{i}"), role: BlockRole::Transformer, layer, output });
        }
        blocks.push(Block {
            name: "ln_f".into(),
            role: BlockRole::End,
            layer: tensor.rows(self.norm("transformer.ln_f".into())),
            output,
        });
        let head = LinearCrossEntropy {
            weight: "transformer.wte.weight".into(),
            bias: None,
            vocab: self.vocab,
            added: 0,
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
            added: 0,
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
        let fc = linear("mlp.c_fc", hidden, self.intermediate(), Init::Normal(0.02));
        let mlp = Fork::residual(checkpointing.sequence(vec![
            tensor.rows(self.norm(name("ln_2"))),
            tensor.column(LinearGelu { linear: fc, gelu: self.activation.gelu })?,
            Box::new(dropped(
                tensor.row(linear("mlp.c_proj", self.intermediate(), hidden, small))?,
                "mlp.dropout",
            )),
        ]));
        Ok(Sequence::new(vec![Box::new(attention), Box::new(mlp)]))
    }

    fn norm(&self, prefix: String) -> LayerNorm {
        LayerNorm { prefix, hidden: self.hidden, eps: self.eps, centred: true, bias: true, from_one: false }
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
            "n_inner": self.intermediate,
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
        let intermediate = match config.get("n_inner").unwrap_or(&Value::Null) {
            Value::Null => None,
            _ => Some(number(config, "n_inner", MAX_INTERMEDIATE)?).filter(|inner| *inner != 4 * hidden),
        };
        Ok(Gpt2 {
            layers: number(config, "n_layer", MAX_LAYERS)?,
            hidden,
            heads: heads(config, "n_head", hidden, "n_embd")?,
            intermediate,
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

/// The name of a parameter in a GGUF file, and the order of its rows: there, weights are `[out, in]`.
fn gguf_name(name: &str) -> Option<(String, RowOrder)> {
    let name = name.strip_prefix("transformer.")?;
    if let Some((layer, part, ending)) = of_layer(name, LAYERS[1]) {
        let part = match part {
            "ln_1" => "attn_norm",
            "attn.c_attn" => "attn_qkv",
            "attn.c_proj" => "attn_output",
            "ln_2" => "ffn_norm",
            "mlp.c_fc" => "ffn_up",
            "mlp.c_proj" => "ffn_down",
            _ => return None,
        };
        let is_matrix = ending == "weight" && !part.ends_with("_norm");
        let order = if is_matrix { RowOrder::Transposed } else { RowOrder::Kept };
        return Some((format!("blk.{layer}.{part}.{ending}"), order));
    }
    let (part, ending) = name.rsplit_once('.')?;
    let part = match part {
        "wte" => "token_embd",
        "wpe" => "position_embd",
        "ln_f" => "output_norm",
        _ => return None,
    };
    Some((format!("{part}.{ending}"), RowOrder::Kept))
}

impl Model for Gpt2 {
    fn network(&self, tensor: &TensorParallel, checkpointing: Checkpointing) -> Result<Network, CannotCut> {
        self.build(tensor, checkpointing)
    }

    fn inputs(&self) -> Vec<Input> {
        Input::of_language_model(self.vocab)
    }

    fn longest(&self) -> Option<usize> {
        Some(self.positions)
    }

    fn attention(&self) -> Option<Heads> {
        Some(Heads::equal(self.heads, self.hidden / self.heads, true))
    }

    fn keys(&self) -> Keys {
        Keys::from([
            ("layers", self.layers.into()),
            ("hidden", self.hidden.into()),
            ("heads", self.heads.into()),
            ("positions", self.positions.into()),
            ("intermediate", self.intermediate().into()),
            ("norm_eps", decimal(self.eps).into()),
        ])
    }

    fn architecture(&self) -> Option<Arch> {
        Some(Arch::of(&ARCHITECTURE))
    }

    /// The `config.json` of transformers.
    fn to_config(&self) -> Value {
        self.config()
    }

    fn to_gguf(&self) -> Result<GgufModel, String> {
        if self.activation.gelu != Gelu::Tanh {
            return Err(format!("activation_function = {}: its GPT-2 has gelu_new", self.activation.word()));
        }
        let name = |name: &str| Ok(gguf_name(name).expect("a name of this model"));
        Ok(GgufModel {
            arch: ARCHITECTURE.name,
            keys: vec![
                ("block_count", GgufNumber::Count(self.layers)),
                ("context_length", GgufNumber::Count(self.positions)),
                ("embedding_length", GgufNumber::Count(self.hidden)),
                ("feed_forward_length", GgufNumber::Count(self.intermediate())),
                ("attention.head_count", GgufNumber::Count(self.heads)),
                ("attention.layer_norm_epsilon", GgufNumber::Real(self.eps.into())),
                ("vocab_size", GgufNumber::Count(self.vocab)),
            ],
            tensors: GgufSource::of_network(&self.whole(), name)?,
            notes: Vec::new(),
        })
    }

    /// Files written by the hub's first GPT-2 leave out the `transformer.` prefix.
    fn aliases(&self, name: &str) -> Vec<String> {
        name.strip_prefix("transformer.").map(str::to_string).into_iter().collect()
    }

    fn linear_layout(&self) -> Layout {
        Layout::InOut
    }

    fn copies_of(&self, stored: &str) -> &'static [&'static str] {
        if stored == "transformer.wte.weight" { &["lm_head.weight"] } else { &[] }
    }

    fn numbered_layers(&self) -> Option<NumberedLayers> {
        Some(NumberedLayers { count: self.layers, key: "n_layer", prefixes: &LAYERS })
    }

    /// The causal mask, which older versions of transformers saved with each layer.
    fn is_ignored(&self, name: &str) -> bool {
        let is_mask = name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
        is_mask
            && self
                .numbered_layers()
                .and_then(|numbered| numbered.of(name))
                .is_some_and(|layer| layer < self.layers)
    }

    fn with_vocab(&self, vocab: usize) -> Option<std::sync::Arc<dyn Model>> {
        Some(Gpt2 { vocab, ..self.clone() }.into())
    }

    fn dropping(&self, dropout: Dropouts) -> std::sync::Arc<dyn Model> {
        Gpt2 { dropout, ..self.clone() }.into()
    }
}
