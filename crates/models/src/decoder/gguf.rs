//! Decoders as llama.cpp computes them. It turns neighbours by rotary positions where its architecture is `llama` or `smollm3`, and halves
//! in the others.

use phalanx_tensor::{Rotary, RotaryScaling, Yarn};

use super::family::Norms;
use super::{Decoder, HEAD, Rope, TOKENS};
use crate::Model;
use crate::gguf::{GgufFrom, GgufModel, GgufNumber, GgufSource, RowOrder, of_layer};

/// Every how many layers llama.cpp's SmolLM3 has one without rotary positions.
const WITHOUT_POSITIONS: usize = 4;

impl Decoder {
    /// The model in a GGUF file. The error names what llama.cpp does not compute.
    pub(super) fn gguf(&self) -> Result<GgufModel, String> {
        let arch = self.gguf_arch()?;
        let mut keys = vec![
            ("block_count", GgufNumber::Count(self.layers)),
            ("context_length", GgufNumber::Count(self.positions)),
            ("embedding_length", GgufNumber::Count(self.hidden)),
            ("feed_forward_length", GgufNumber::Count(self.intermediate)),
            ("attention.head_count", GgufNumber::Count(self.heads)),
            ("attention.head_count_kv", GgufNumber::Count(self.kv_heads)),
            ("attention.key_length", GgufNumber::Count(self.head_dim)),
            ("attention.value_length", GgufNumber::Count(self.head_dim)),
            ("attention.layer_norm_rms_epsilon", GgufNumber::Real(self.eps.into())),
            ("rope.dimension_count", GgufNumber::Count(self.head_dim)),
            ("rope.freq_base", GgufNumber::Real(self.rope.theta)),
            ("vocab_size", GgufNumber::Count(self.vocab)),
        ];
        let mut tensors = GgufSource::of_network(&self.whole(), |name| {
            Ok(self.gguf_name(arch, name).expect("a name of this model"))
        })?;
        let scaling = |word, factor| {
            [("rope.scaling.type", GgufNumber::Word(word)), ("rope.scaling.factor", GgufNumber::Real(factor))]
        };
        match &self.rope.scaling {
            RotaryScaling::Default => {}
            RotaryScaling::Linear { factor } => keys.extend(scaling("linear", *factor)),
            RotaryScaling::Yarn(yarn) => {
                keys.extend(scaling("yarn", yarn.factor));
                keys.extend(self.yarn_keys(*yarn)?);
            }
            RotaryScaling::Llama3 { .. } if arch == "llama" => {
                let name = "rope_freqs.weight".to_string();
                let numbers = self.divisors();
                tensors.push(GgufSource {
                    name,
                    shape: vec![numbers.len()],
                    from: GgufFrom::Numbers(numbers),
                });
            }
            RotaryScaling::Llama3 { .. } => {
                return Err(format!("rope_type = \"llama3\": its architecture {arch} does not read it"));
            }
            RotaryScaling::LongRope(_) => {
                return Err(format!("rope_type = \"longrope\": its architecture {arch} does not read it"));
            }
            RotaryScaling::Dynamic { .. } => {
                return Err(
                    "rope_type = \"dynamic\": its frequencies do not depend on the length".to_string()
                );
            }
        }
        // It takes the table of tokens where there is no head, but for this architecture.
        if self.tied && arch == "olmo2" {
            let from = GgufFrom::Parameter(TOKENS.to_string(), RowOrder::Kept);
            tensors.push(GgufSource {
                name: "output.weight".into(),
                shape: vec![self.vocab, self.hidden],
                from,
            });
        }
        Ok(GgufModel { arch, keys, tensors })
    }

    /// The architecture of llama.cpp that computes this model.
    fn gguf_arch(&self) -> Result<&'static str, String> {
        let arch = match self.family.name {
            "mistral" => "llama",
            name @ ("llama" | "qwen2" | "qwen3" | "smollm3" | "olmo2") => name,
            other => return Err(format!("arch = {other:?}: how it is written is not known here")),
        };
        let windows = (0..self.layers).filter_map(|layer| self.heads_of(layer).window);
        if let Some(window) = windows.min().filter(|window| *window < self.rope.longest(self.positions)) {
            return Err(format!("sliding_window = {window}: its architecture {arch} has no window"));
        }
        if let Some(activation) = self.activation {
            return Err(format!("hidden_act = {}: its architecture {arch} has silu", activation.word()));
        }
        let differs =
            |layer: &usize| self.has_positions(*layer) == (layer + 1).is_multiple_of(WITHOUT_POSITIONS);
        if let Some(layer) = (0..self.layers).find(differs).filter(|_| arch == "smollm3") {
            return Err(format!(
                "no_rope_layers: its architecture {arch} has no rotary positions in every layer {WITHOUT_POSITIONS} n alone, and layer \
                 {} of this model is not so",
                layer + 1
            ));
        }
        let biases = (self.biases.qkv && arch != "qwen2") || self.biases.output || self.biases.mlp;
        if biases && arch != "llama" {
            return Err(format!("attention_bias or mlp_bias: its architecture {arch} has no such biases"));
        }
        if arch == "olmo2" && self.heads * self.head_dim != self.hidden {
            return Err(format!(
                "head_dim = {}: its architecture {arch} has hidden_size / num_attention_heads",
                self.head_dim
            ));
        }
        Ok(arch)
    }

    /// The name of a parameter in a GGUF file, and the order of its rows.
    fn gguf_name(&self, arch: &str, name: &str) -> Option<(String, RowOrder)> {
        match name {
            TOKENS => return Some(("token_embd.weight".into(), RowOrder::Kept)),
            HEAD => return Some(("output.weight".into(), RowOrder::Kept)),
            "model.norm.weight" => return Some(("output_norm.weight".into(), RowOrder::Kept)),
            _ => {}
        }
        let (layer, part, ending) = of_layer(name, "model.layers.")?;
        let turned = if arch == "llama" || arch == "smollm3" {
            RowOrder::Neighbours(self.head_dim)
        } else {
            RowOrder::Kept
        };
        let (part, order) = match part {
            "self_attn.q_proj" => ("attn_q", turned),
            "self_attn.k_proj" => ("attn_k", turned),
            "self_attn.v_proj" => ("attn_v", RowOrder::Kept),
            "self_attn.o_proj" => ("attn_output", RowOrder::Kept),
            "self_attn.q_norm" => ("attn_q_norm", RowOrder::Kept),
            "self_attn.k_norm" => ("attn_k_norm", RowOrder::Kept),
            "mlp.gate_proj" => ("ffn_gate", RowOrder::Kept),
            "mlp.up_proj" => ("ffn_up", RowOrder::Kept),
            "mlp.down_proj" => ("ffn_down", RowOrder::Kept),
            "input_layernorm" => ("attn_norm", RowOrder::Kept),
            "post_attention_layernorm" if self.family.norms == Norms::After => {
                ("post_attention_norm", RowOrder::Kept)
            }
            "post_attention_layernorm" => ("ffn_norm", RowOrder::Kept),
            "post_feedforward_layernorm" => ("post_ffw_norm", RowOrder::Kept),
            _ => return None,
        };
        Some((format!("blk.{layer}.{part}.{ending}"), order))
    }

    /// Returns the number by which llama.cpp divides each frequency.
    fn divisors(&self) -> Vec<f32> {
        let plain = Rotary::new(self.head_dim, self.head_dim, self.rope.theta, RotaryScaling::Default);
        let (stretched, _) = self.rope.rotary(self.head_dim, false);
        let both = plain.frequencies().iter().zip(stretched.frequencies());
        both.map(|(plain, stretched)| (plain / stretched) as f32).collect()
    }

    /// The keys of type yarn beside its factor.
    fn yarn_keys(&self, yarn: Yarn) -> Result<Vec<(&'static str, GgufNumber)>, String> {
        let usual = RotaryScaling::Yarn(Yarn { attention_factor: None, mscales: None, ..yarn });
        let usual = Rope { scaling: usual, ..self.rope.clone() };
        let [own, usual] = [&self.rope, &usual].map(|rope| rope.rotary(self.head_dim, false).0.scale());
        if own != usual {
            return Err(
                "attention_factor or mscale: it has a factor of its own for rope_type = \"yarn\"".to_string()
            );
        }
        if !yarn.truncate {
            return Err(
                "truncate = false: it rounds the ends of the ramp of rope_type = \"yarn\"".to_string()
            );
        }
        Ok(vec![
            ("rope.scaling.original_context_length", GgufNumber::Count(yarn.original)),
            ("rope.scaling.yarn_beta_fast", GgufNumber::Real(yarn.beta_fast)),
            ("rope.scaling.yarn_beta_slow", GgufNumber::Real(yarn.beta_slow)),
        ])
    }
}
