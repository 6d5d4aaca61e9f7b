//! GPT-2 (Radford et al., 2019), as `GPT2LMHeadModel` of transformers has it.
//!
//! Embedding, `layers` blocks of pre-norm attention and MLP with residual paths, a last norm, and an
//! output projection tied to the token table. Weights are `Conv1D`: `[in, out]`. Names, `config.json` and
//! initial values follow transformers, so that its files load and ours load there.

use phalanx_layers::{
    Attention, Block, Checkpointing, Dropped, Embedding, Init, Layer, LayerNorm, Linear, LinearCrossEntropy,
    LinearGelu, Network, Recompute, Residual, Sequence,
};
use phalanx_tensor::{Heads, Layout};
use serde_json::{Value, json};

/// Shape of a GPT-2, and what it drops in training.
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
    /// What is dropped in training; no part of what the weights compute.
    pub dropout: Dropouts,
}

/// Probabilities of dropping an element in training, each in `0.0..1.0`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Dropouts {
    /// Of the embedding (`embd_pdrop`).
    pub embedding: f32,
    /// Of the attention probabilities (`attn_pdrop`).
    pub attention: f32,
    /// Of both projections into the residual stream (`resid_pdrop`).
    pub residual: f32,
}

/// A `config.json` that is not a GPT-2 which this code computes.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum ModelError {
    /// Another architecture.
    #[error("config.json: model_type is {given}, expected \"gpt2\"; other families cannot be imported yet")]
    Architecture {
        /// What the file says.
        given: String,
    },
    /// A key that is absent or of the wrong kind.
    #[error("config.json: {key} is {given}, expected {expected}")]
    Key {
        /// The key.
        key: &'static str,
        /// What the file says.
        given: String,
        /// What is computed here.
        expected: String,
    },
}

impl Gpt2 {
    /// The network: parameters named `transformer.wte.weight`, `transformer.h.0.ln_1.weight`, ...
    pub fn network(&self) -> Network {
        self.network_with(Checkpointing::None)
    }

    /// The same, of which backward computes again what `checkpointing` says.
    pub fn network_with(&self, checkpointing: Checkpointing) -> Network {
        let mut blocks = vec![Block { name: "embedding".into(), layer: Box::new(self.embedding()) }];
        for i in 0..self.layers {
            let block = self.block(i, checkpointing);
            let layer: Box<dyn Layer> =
                if checkpointing.recomputes(i) { Box::new(Recompute(block)) } else { Box::new(block) };
            blocks.push(Block { name: format!("h.{i}"), layer });
        }
        blocks.push(Block { name: "ln_f".into(), layer: Box::new(self.norm("transformer.ln_f".into())) });
        let head = LinearCrossEntropy {
            weight: "transformer.wte.weight".into(),
            vocab: self.vocab,
            hidden: self.hidden,
            init: Init::Normal(0.02),
        };
        Network::new(blocks, Box::new(head))
    }

    fn embedding(&self) -> impl Layer + use<> {
        let layer = Embedding {
            tokens: "transformer.wte.weight".into(),
            positions: "transformer.wpe.weight".into(),
            vocab: self.vocab,
            length: self.positions,
            hidden: self.hidden,
            init: Init::Normal(0.02),
        };
        Dropped { layer, p: self.dropout.embedding, name: "transformer.drop".into() }
    }

    /// `x + attention(norm(x))`, then `x + mlp(norm(x))`.
    fn block(&self, index: usize, checkpointing: Checkpointing) -> impl Layer + use<> {
        let name = |part: &str| format!("transformer.h.{index}.{part}");
        let hidden = self.hidden;
        // Projections into the residual stream start smaller: each of the 2 * layers adds its variance.
        let small = Init::Normal(0.02 / (2.0 * self.layers as f32).sqrt());
        let linear = |part: &str, inputs, outputs, init| Linear {
            prefix: name(part),
            inputs,
            outputs,
            layout: Layout::InOut,
            init,
        };
        let dropped = |layer, part: &str| Dropped { layer, p: self.dropout.residual, name: name(part) };
        let sequence = |layers| match checkpointing {
            Checkpointing::Selective => Sequence::new(layers).rebuilding(),
            Checkpointing::None | Checkpointing::Blocks { .. } => Sequence::new(layers),
        };
        let attention = Attention {
            heads: Heads { heads: self.heads, causal: true },
            dropout: self.dropout.attention,
            name: name("attn.attn_dropout"),
        };
        let attention = Residual(sequence(vec![
            Box::new(self.norm(name("ln_1"))),
            Box::new(linear("attn.c_attn", hidden, 3 * hidden, Init::Normal(0.02))),
            Box::new(attention),
            Box::new(dropped(linear("attn.c_proj", hidden, hidden, small), "attn.resid_dropout")),
        ]));
        let mlp = Residual(sequence(vec![
            Box::new(self.norm(name("ln_2"))),
            Box::new(LinearGelu(linear("mlp.c_fc", hidden, 4 * hidden, Init::Normal(0.02)))),
            Box::new(dropped(linear("mlp.c_proj", 4 * hidden, hidden, small), "mlp.dropout")),
        ]));
        Sequence::new(vec![Box::new(attention), Box::new(mlp)])
    }

    fn norm(&self, prefix: String) -> LayerNorm {
        LayerNorm { prefix, hidden: self.hidden, eps: self.eps }
    }

    /// As transformers writes it.
    pub fn to_config(&self) -> Value {
        json!({
            "activation_function": "gelu_new",
            "architectures": ["GPT2LMHeadModel"],
            "attn_pdrop": decimal(self.dropout.attention),
            "embd_pdrop": decimal(self.dropout.embedding),
            "initializer_range": 0.02,
            "layer_norm_epsilon": decimal(self.eps),
            "model_type": "gpt2",
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

    /// From a `config.json` of transformers. What it drops is that of the training which made the file; a run
    /// drops what its own configuration says.
    ///
    /// # Errors
    /// When the file describes another architecture, or a variant that is not computed here.
    pub fn from_config(config: &Value) -> Result<Gpt2, ModelError> {
        let kind = config.get("model_type").unwrap_or(&Value::Null);
        if kind != "gpt2" {
            return Err(ModelError::Architecture { given: kind.to_string() });
        }
        let hidden = number(config, "n_embd")?;
        for (key, computed) in [
            ("activation_function", json!("gelu_new")),
            ("scale_attn_weights", json!(true)),
            ("scale_attn_by_inverse_layer_idx", json!(false)),
            ("tie_word_embeddings", json!(true)),
            ("add_cross_attention", json!(false)),
        ] {
            let given = config.get(key).unwrap_or(&computed);
            if *given != computed {
                return Err(ModelError::Key {
                    key,
                    given: given.to_string(),
                    expected: computed.to_string(),
                });
            }
        }
        let inner = config.get("n_inner").unwrap_or(&Value::Null);
        if !inner.is_null() && inner.as_u64() != Some(4 * hidden as u64) {
            let expected = format!("null or {}", 4 * hidden);
            return Err(ModelError::Key { key: "n_inner", given: inner.to_string(), expected });
        }
        let heads = number(config, "n_head")?;
        if !hidden.is_multiple_of(heads) {
            let expected = format!("a divisor of n_embd = {hidden}");
            return Err(ModelError::Key { key: "n_head", given: heads.to_string(), expected });
        }
        Ok(Gpt2 {
            layers: number(config, "n_layer")?,
            hidden,
            heads,
            vocab: number(config, "vocab_size")?,
            positions: number(config, "n_positions")?,
            eps: config.get("layer_norm_epsilon").and_then(Value::as_f64).unwrap_or(1e-5) as f32,
            dropout: Dropouts {
                embedding: probability(config, "embd_pdrop")?,
                attention: probability(config, "attn_pdrop")?,
                residual: probability(config, "resid_pdrop")?,
            },
        })
    }
}

fn number(config: &Value, key: &'static str) -> Result<usize, ModelError> {
    let given = config.get(key).unwrap_or(&Value::Null);
    given.as_u64().filter(|n| *n > 0).map(|n| n as usize).ok_or_else(|| ModelError::Key {
        key,
        given: given.to_string(),
        expected: "a positive integer".into(),
    })
}

/// A probability of dropping; transformers' default is 0.1.
fn probability(config: &Value, key: &'static str) -> Result<f32, ModelError> {
    let Some(given) = config.get(key) else { return Ok(0.1) };
    let value = given.as_f64().map(|p| p as f32).filter(|p| (0.0..1.0).contains(p));
    value.ok_or_else(|| ModelError::Key {
        key,
        given: given.to_string(),
        expected: "a number from 0 to below 1".into(),
    })
}

/// The shortest decimal that is this f32: 1e-5, not 9.999999747378752e-6.
fn decimal(number: f32) -> f64 {
    number.to_string().parse().unwrap_or(f64::from(number))
}
