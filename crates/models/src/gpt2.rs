//! GPT-2 (Radford et al., 2019), as `GPT2LMHeadModel` of transformers has it.
//!
//! Embedding, `layers` blocks of pre-norm attention and MLP with residual paths, a last norm, and an
//! output projection tied to the token table. Weights are `Conv1D`: `[in, out]`. Names, `config.json` and
//! initial values follow transformers, so that its files load and ours load there.

use phalanx_layers::{
    Attention, Block, Embedding, Init, Layer, LayerNorm, Linear, LinearCrossEntropy, LinearGelu, Network,
    Residual, Sequence,
};
use phalanx_tensor::{Heads, Layout};
use serde_json::{Value, json};

/// Shape of a GPT-2.
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
        let mut blocks = vec![Block { name: "embedding".into(), layer: Box::new(self.embedding()) }];
        for i in 0..self.layers {
            blocks.push(Block { name: format!("h.{i}"), layer: Box::new(self.block(i)) });
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

    fn embedding(&self) -> Embedding {
        Embedding {
            tokens: "transformer.wte.weight".into(),
            positions: "transformer.wpe.weight".into(),
            vocab: self.vocab,
            length: self.positions,
            hidden: self.hidden,
            init: Init::Normal(0.02),
        }
    }

    /// `x + attention(norm(x))`, then `x + mlp(norm(x))`.
    fn block(&self, index: usize) -> impl Layer + use<> {
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
        let attention = Residual(Sequence::new(vec![
            Box::new(self.norm(name("ln_1"))),
            Box::new(linear("attn.c_attn", hidden, 3 * hidden, Init::Normal(0.02))),
            Box::new(Attention { heads: Heads { heads: self.heads, causal: true } }),
            Box::new(linear("attn.c_proj", hidden, hidden, small)),
        ]));
        let mlp = Residual(Sequence::new(vec![
            Box::new(self.norm(name("ln_2"))),
            Box::new(LinearGelu(linear("mlp.c_fc", hidden, 4 * hidden, Init::Normal(0.02)))),
            Box::new(linear("mlp.c_proj", 4 * hidden, hidden, small)),
        ]));
        Sequence::new(vec![Box::new(attention), Box::new(mlp)])
    }

    fn norm(&self, prefix: String) -> LayerNorm {
        LayerNorm { prefix, hidden: self.hidden, eps: self.eps }
    }

    /// As transformers writes it.
    pub fn to_config(&self) -> Value {
        // The shortest decimal that is this f32: 1e-5, not 9.999999747378752e-6.
        let eps: f64 = self.eps.to_string().parse().unwrap_or(f64::from(self.eps));
        json!({
            "activation_function": "gelu_new",
            "architectures": ["GPT2LMHeadModel"],
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "initializer_range": 0.02,
            "layer_norm_epsilon": eps,
            "model_type": "gpt2",
            "n_ctx": self.positions,
            "n_embd": self.hidden,
            "n_head": self.heads,
            "n_inner": null,
            "n_layer": self.layers,
            "n_positions": self.positions,
            "resid_pdrop": 0.0,
            "scale_attn_weights": true,
            "tie_word_embeddings": true,
            "torch_dtype": "float32",
            "vocab_size": self.vocab,
        })
    }

    /// From a `config.json` of transformers.
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
