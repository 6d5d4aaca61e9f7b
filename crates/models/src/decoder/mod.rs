//! The decoders of Llama (Touvron et al., arXiv 2302.13971) and the families that follow it, as transformers has them: RMS norms, rotary
//! positions, grouped queries, and an MLP with a gate. A family is a table, [`Family`].
//!
//! Names, `config.json` and initial values follow transformers. Weights are `[out, in]`; those of queries, keys and values lie one
//! behind another in memory, and so do those of gate and up, so that one product reads them.

mod config;
mod family;
mod gguf;
mod rope;
mod sizes;

use std::sync::Arc;

use phalanx_layers::{
    AnyLayer, Attention, Block, BlockRole, CannotCut, Checkpointing, Dropped, Embedding, Fork, Gated,
    HeadNorm, Init, Layer, LayerNorm, Linear, LinearCrossEntropy, Network, Output, ParameterSpec, Pieces,
    RotaryPositions, RowShape, Sequence, Times,
};
use phalanx_parallel::TensorParallel;
use phalanx_tensor::{Gate, Heads};
use serde_json::Value;

pub(crate) use family::ARCHITECTURES;
pub use family::Family;
pub use rope::Rope;

use self::family::AttentionBiases;

use crate::activation::Activation;
use crate::config::decimal;
use crate::gguf::GgufModel;
use crate::{Arch, Dropouts, Input, Keys, Model, NumberedLayers, RowsOf};

/// The token table, and the output projection where it is tied.
const TOKENS: &str = "model.embed_tokens.weight";

/// The output projection where it is not tied.
const HEAD: &str = "lm_head.weight";

/// Initial values of all matrices and the table (`initializer_range`).
const NORMAL: Init = Init::Normal(0.02);

/// Sizes of a decoder, what sets it apart in its family, and its dropout in training.
#[derive(Clone, Debug, PartialEq)]
pub struct Decoder {
    /// Its family: properties that it shares with other decoders.
    pub family: &'static Family,
    /// Transformer blocks (`num_hidden_layers`).
    pub layers: usize,
    /// Width (`hidden_size`).
    pub hidden: usize,
    /// Heads of queries (`num_attention_heads`).
    pub heads: usize,
    /// Heads of keys and values (`num_key_value_heads`).
    pub kv_heads: usize,
    /// Elements of a head (`head_dim`).
    pub head_dim: usize,
    /// Width within the MLP (`intermediate_size`).
    pub intermediate: usize,
    /// Rows of the token table (`vocab_size`).
    pub vocab: usize,
    /// The longest sequence (`max_position_embeddings`).
    pub positions: usize,
    /// Added to the mean square in a norm (`rms_norm_eps`).
    pub eps: f32,
    /// Frequencies of the rotary positions.
    pub rope: Rope,
    /// True if the output projection shares the token table (`tie_word_embeddings`).
    pub tied: bool,
    /// Biases of the projections.
    pub biases: Biases,
    /// Keys that a query sees, itself among them, in some layers (`sliding_window`).
    pub window: Option<Window>,
    /// Scores are divided by its root (`query_pre_attn_scalar`); None for that of `head_dim`.
    pub query_scalar: Option<f32>,
    /// Every how many layers one has no rotary positions (`no_rope_layer_interval`); None where all have them.
    pub without_positions: Option<usize>,
    /// A form of GELU as activation of the gate (`hidden_act`); None for SiLU.
    pub activation: Option<Activation>,
    /// Dropout in training.
    pub dropout: Dropouts,
}

/// Which projections have a bias.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Biases {
    /// Those of queries, keys and values.
    pub qkv: bool,
    /// That of attention's output.
    pub output: bool,
    /// Those of the MLP.
    pub mlp: bool,
}

/// Layers that see the last keys only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Number of keys.
    pub keys: usize,
    /// Which layers have it; the others see all keys.
    pub layers: WindowLayers,
}

/// The layers that have a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowLayers {
    /// Those from this one on (`max_window_layers`).
    From(usize),
    /// All but every so many-th (`sliding_window_pattern`).
    AllBut(usize),
}

impl WindowLayers {
    /// Returns whether a layer has a window.
    pub fn has(self, layer: usize) -> bool {
        match self {
            WindowLayers::From(first) => layer >= first,
            WindowLayers::AllBut(every) => !(layer + 1).is_multiple_of(every),
        }
    }
}

impl Decoder {
    fn build(&self, tensor: &TensorParallel, checkpointing: Checkpointing) -> Result<Network, CannotCut> {
        let output = RowShape::tokens(self.hidden);
        let block = |name: String, role, layer| Block { name, role, layer, output };
        let mut blocks = vec![block("embedding".into(), BlockRole::End, Box::new(self.embedding(tensor)))];
        for i in 0..self.layers {
            let layer = checkpointing.block(i, self.block(i, tensor, checkpointing)?);
            blocks.push(block(format!("layers.{i}"), BlockRole::Transformer, layer));
        }
        let norm = tensor.rows(self.norm("model.norm".into()));
        blocks.push(block("norm".into(), BlockRole::End, norm));
        let head = LinearCrossEntropy {
            weight: if self.tied { TOKENS } else { HEAD }.into(),
            bias: None,
            vocab: self.vocab,
            added: 0,
            hidden: self.hidden,
            init: NORMAL,
        };
        Ok(Network::new(blocks, tensor.head(head)))
    }

    fn embedding(&self, tensor: &TensorParallel) -> impl Layer + use<> {
        let layer = Embedding {
            tokens: TOKENS.into(),
            positions: None,
            types: None,
            vocab: self.vocab,
            added: 0,
            hidden: self.hidden,
            init: NORMAL,
        };
        let mut layer = tensor.embedding(layer);
        if self.family.scaled_embedding {
            let times = tensor.rows(Times { factor: (self.hidden as f32).sqrt() });
            layer = Box::new(Sequence::new(vec![layer, times]));
        }
        Dropped { layer, p: self.dropout.embedding, name: "model.drop".into() }
    }

    /// `x + attention(norm(x))`, then `x + mlp(norm(x))`, with the norms before or after attention and MLP, or both.
    fn block(
        &self,
        index: usize,
        tensor: &TensorParallel,
        checkpointing: Checkpointing,
    ) -> Result<Sequence, CannotCut> {
        let norm = |name| tensor.rows(self.norm(format!("model.layers.{index}.{name}")));
        let parts = [self.attention(index, tensor)?, self.mlp(index, tensor)?];
        let paths = self.family.norms.names().into_iter().zip(parts).map(|([before, after], part)| {
            let layers = before.map(norm).into_iter().chain(part).chain(after.map(norm)).collect();
            Box::new(Fork::residual(checkpointing.sequence(layers))) as Box<dyn AnyLayer>
        });
        Ok(Sequence::new(paths.collect()))
    }

    /// Attention with its projections.
    fn attention(&self, index: usize, tensor: &TensorParallel) -> Result<Vec<Box<dyn AnyLayer>>, CannotCut> {
        let name = |part: &str| format!("model.layers.{index}.self_attn.{part}");
        let heads = self.heads_of(index);
        let result = |part: &str, count, repeat| {
            let pieces = Pieces { repeat, ..Pieces::of(count) };
            Output { name: name(part), width: count * self.head_dim, pieces }
        };
        let (q, kv) = (result("q_proj", self.heads, false), |part| result(part, self.kv_heads, true));
        let qkv = Linear {
            bias: self.biases.qkv,
            ..Linear::new([q, kv("k_proj"), kv("v_proj")], self.hidden, NORMAL)
        };
        let mut layers = vec![tensor.column(qkv)?];
        if let Some(over) = self.family.head_norms {
            let names = ["q_norm.weight", "k_norm.weight"].map(name);
            let (eps, from_one) = (self.eps, self.family.from_one);
            let norm = HeadNorm { names, heads, over, eps, from_one, shared: None };
            layers.push(Box::new(tensor.head_norm(norm)?));
        }
        if self.has_positions(index) {
            let (heads, _) = tensor.heads(heads)?;
            let (rotary, beyond) = self.rope.rotary(self.head_dim, heads.window.is_some());
            layers.push(Box::new(RotaryPositions { rotary, beyond, heads }));
        }
        layers.push(Box::new(tensor.attention(Attention {
            heads,
            dropout: self.dropout.attention,
            name: name("dropout"),
            first_head: 0,
            all_heads: self.heads,
        })?));
        let output = Output::new(name("o_proj"), self.hidden);
        let output =
            Linear { bias: self.biases.output, ..Linear::new([output], self.heads * self.head_dim, NORMAL) };
        layers.push(self.dropped(tensor.row(output)?, name("resid_dropout")));
        Ok(layers)
    }

    /// `down(act(gate(x)) * up(x))`
    fn mlp(&self, index: usize, tensor: &TensorParallel) -> Result<Vec<Box<dyn AnyLayer>>, CannotCut> {
        let name = |part: &str| format!("model.layers.{index}.mlp.{part}");
        let linear = |outputs: Vec<Output>, inputs| Linear {
            bias: self.biases.mlp,
            ..Linear::new(outputs, inputs, NORMAL)
        };
        let result = |part: &str| Output::new(name(part), self.intermediate);
        let down = linear(vec![Output::new(name("down_proj"), self.hidden)], self.intermediate);
        Ok(vec![
            tensor.column(linear(vec![result("gate_proj"), result("up_proj")], self.hidden))?,
            Box::new(Gated {
                gate: self.activation.map_or(Gate::Silu, |activation| Gate::Gelu(activation.gelu)),
            }),
            self.dropped(tensor.row(down)?, name("dropout")),
        ])
    }

    fn dropped(&self, layer: Box<dyn AnyLayer>, name: String) -> Box<dyn AnyLayer> {
        Box::new(Dropped { layer, p: self.dropout.residual, name })
    }

    fn norm(&self, prefix: String) -> LayerNorm {
        LayerNorm {
            prefix,
            hidden: self.hidden,
            eps: self.eps,
            centred: false,
            bias: false,
            from_one: self.family.from_one,
        }
    }

    /// The heads of a layer.
    fn heads_of(&self, layer: usize) -> Heads {
        let window = self.window.filter(|window| window.layers.has(layer)).map(|window| window.keys);
        let heads = Heads::equal(self.heads, self.head_dim, true);
        let scale = self.query_scalar.map_or(heads.scale, |scalar| 1.0 / scalar.sqrt());
        Heads { kv_heads: self.kv_heads, window, scale, ..heads }
    }

    /// Returns whether a layer has rotary positions.
    fn has_positions(&self, layer: usize) -> bool {
        self.without_positions.is_none_or(|interval| !(layer + 1).is_multiple_of(interval))
    }
}

impl Model for Decoder {
    fn network(&self, tensor: &TensorParallel, checkpointing: Checkpointing) -> Result<Network, CannotCut> {
        self.build(tensor, checkpointing)
    }

    fn inputs(&self) -> Vec<Input> {
        Input::of_language_model(self.vocab)
    }

    fn longest(&self) -> Option<usize> {
        Some(self.rope.longest(self.positions))
    }

    fn attention(&self) -> Option<Heads> {
        Some(self.heads_of(0))
    }

    fn keys(&self) -> Keys {
        let mut keys = Keys::from([
            ("layers", self.layers.into()),
            ("hidden", self.hidden.into()),
            ("heads", self.heads.into()),
            ("kv_heads", self.kv_heads.into()),
            ("head_dim", self.head_dim.into()),
            ("intermediate", self.intermediate.into()),
            ("positions", self.positions.into()),
            ("norm_eps", decimal(self.eps).into()),
            ("rope_theta", self.rope.theta.into()),
            ("tied", self.tied.into()),
        ]);
        if self.family.partial {
            keys.set("partial_rotary_factor", self.rope.share);
        }
        if let Some(theta) = self.rope.local_theta {
            keys.set("local_rope_theta", theta);
        }
        if let Some(scalar) = self.query_scalar {
            keys.set("query_pre_attn_scalar", decimal(scalar));
        }
        if let Some(scaling) = self.rope.scaling_value() {
            keys.set("rope_scaling", scaling);
        }
        if self.family.biases == AttentionBiases::Key {
            keys.set("attention_bias", self.biases.output);
        }
        if let Some(Window { keys: count, layers }) = self.window {
            keys.set("window", count);
            match layers {
                WindowLayers::From(0) => {}
                WindowLayers::From(first) => keys.set("window_from", first),
                WindowLayers::AllBut(every) => keys.set("window_pattern", every),
            }
        }
        keys
    }

    fn architecture(&self) -> Option<Arch> {
        Arch::named(self.family.name)
    }

    fn to_config(&self) -> Value {
        self.config()
    }

    fn to_gguf(&self) -> Result<GgufModel, String> {
        self.gguf()
    }

    /// Files of the bare model leave out `model.`.
    fn aliases(&self, name: &str) -> Vec<String> {
        name.strip_prefix("model.").map(str::to_string).into_iter().collect()
    }

    /// Query, key and value are rows of one tensor, and gate and up of another, where files of the family fuse them.
    fn source(&self, parameter: &ParameterSpec) -> Option<RowsOf> {
        let (layer, part) = parameter.name.strip_suffix(".weight")?.rsplit_once('.')?;
        let [q, kv] = [self.heads, self.kv_heads].map(|heads| heads * self.head_dim);
        let fused: [(&str, &[(&str, usize)]); 2] = [
            ("qkv_proj", &[("q_proj", q), ("k_proj", kv), ("v_proj", kv)]),
            ("gate_up_proj", &[("gate_proj", self.intermediate), ("up_proj", self.intermediate)]),
        ];
        let place = |parts: &[(&str, usize)]| parts.iter().position(|(name, _)| *name == part);
        let found = fused.iter().find_map(|(name, parts)| Some((name, parts, place(parts)?)));
        let (name, parts, index) = found.filter(|_| self.family.fused)?;
        let rows = |parts: &[(&str, usize)]| parts.iter().map(|(_, rows)| rows).sum::<usize>();
        Some(RowsOf {
            name: format!("{layer}.{name}.weight"),
            shape: vec![rows(parts), self.hidden],
            first: (rows(&parts[..index]) * self.hidden) as u64,
        })
    }

    fn copies_of(&self, stored: &str) -> &'static [&'static str] {
        if self.tied && stored == TOKENS { &[HEAD] } else { &[] }
    }

    fn numbered_layers(&self) -> Option<NumberedLayers> {
        Some(NumberedLayers {
            count: self.layers,
            key: "num_hidden_layers",
            prefixes: &["model.layers.", "layers."],
        })
    }

    /// Frequencies, which old versions of transformers saved with each layer.
    fn is_ignored(&self, name: &str) -> bool {
        name.ends_with(".rotary_emb.inv_freq")
    }

    fn with_vocab(&self, vocab: usize) -> Option<Arc<dyn Model>> {
        Some(Arc::new(Decoder { vocab, ..self.clone() }))
    }

    fn dropping(&self, dropout: Dropouts) -> Arc<dyn Model> {
        Arc::new(Decoder { dropout, ..self.clone() })
    }
}
