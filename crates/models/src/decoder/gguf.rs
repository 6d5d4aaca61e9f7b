//! Decoders as llama.cpp computes them. It turns neighbours by rotary positions where its architecture is `llama` or `smollm3`, and halves
//! in the others; one tensor has query, key and value of `phi3`, and one its gate and up; norms of `gemma3` multiply by what the file has.

use phalanx_tensor::{Gelu, LongRope, Rotary, RotaryScaling, Yarn};
use serde_json::json;

use super::family::Norms;
use super::{Decoder, HEAD, Rope, TOKENS, Window, WindowLayers};
use crate::gguf::{GgufFrom, GgufModel, GgufNumber, GgufSource, RowOrder, of_layer};
use crate::{Activation, Model};

/// Every how many layers llama.cpp's SmolLM3 has one without rotary positions.
const WITHOUT_POSITIONS: usize = 4;

/// Layers of Gemma 3 27B, the one size whose scores llama.cpp divides by the root of the width of a head of queries.
const LAYERS_OF_27B: usize = 62;

/// Keys and their values.
type GgufKeys = Vec<(&'static str, GgufNumber)>;

impl Decoder {
    /// The model in a GGUF file. The error names what llama.cpp does not compute.
    pub(super) fn gguf(&self) -> Result<GgufModel, String> {
        let arch = self.gguf_arch()?;
        self.check_gguf(arch)?;
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
            ("rope.dimension_count", GgufNumber::Count(self.rope.rotated(self.head_dim))),
            ("rope.freq_base", GgufNumber::Real(self.rope.theta)),
            ("vocab_size", GgufNumber::Count(self.vocab)),
        ];
        let mut tensors = GgufSource::of_network(&self.whole(), |name| {
            Ok(self.gguf_name(arch, name).expect("a name of this model"))
        })?;
        let (scaling, factors) = self.gguf_scaling(arch)?;
        keys.extend(scaling);
        keys.extend(self.gguf_windows(arch));
        tensors.extend(factors);
        for source in &mut tensors {
            if let GgufFrom::Parameters { plus_one, .. } = &mut source.from {
                *plus_one = self.family.from_one && source.name.ends_with("_norm.weight");
            }
        }
        // It takes the table of tokens where there is no head, but for this architecture.
        if self.tied && arch == "olmo2" {
            let from = GgufFrom::parameter(TOKENS, RowOrder::Kept);
            tensors.push(GgufSource {
                name: "output.weight".into(),
                shape: vec![self.vocab, self.hidden],
                from,
            });
        }
        let notes = match &self.rope.scaling {
            RotaryScaling::LongRope(LongRope { original, .. }) => vec![format!(
                "llama.cpp takes the long factors of longrope wherever its context has more than {original} positions, and Phalanx for texts \
                 of more: give short texts a shorter context"
            )],
            _ => Vec::new(),
        };
        Ok(GgufModel { arch, keys, tensors, notes })
    }

    /// The architecture of llama.cpp that computes this family.
    fn gguf_arch(&self) -> Result<&'static str, String> {
        match self.family.name {
            "mistral" | "ministral" => Ok("llama"),
            "gemma3_text" => Ok("gemma3"),
            name @ ("llama" | "qwen2" | "qwen3" | "smollm3" | "olmo2" | "phi3") => Ok(name),
            other => Err(format!("arch = {other:?}: how it is written is not known here")),
        }
    }

    /// Refuses what this architecture of llama.cpp does not compute, but for the frequencies.
    fn check_gguf(&self, arch: &str) -> Result<(), String> {
        let windows = (0..self.layers).filter_map(|layer| self.heads_of(layer).window);
        let binds = |window: &usize| *window < self.rope.longest(self.positions) && arch != "gemma3";
        if let Some(window) = windows.min().filter(binds) {
            return Err(format!("sliding_window = {window}: its architecture {arch} has no window"));
        }
        let (computed, word) =
            if arch == "gemma3" { (Some(Gelu::Tanh), "gelu_pytorch_tanh") } else { (None, "silu") };
        if self.activation.map(|activation| activation.gelu) != computed {
            let (key, given) =
                (self.family.activation.0, self.activation.map_or_else(|| json!("silu"), Activation::word));
            return Err(format!("{key} = {given}: its architecture {arch} has {word}"));
        }
        let divisor = if self.layers == LAYERS_OF_27B { self.hidden / self.heads } else { self.head_dim };
        if let Some(scalar) = self.query_scalar.filter(|scalar| *scalar != divisor as f32) {
            return Err(format!(
                "query_pre_attn_scalar = {scalar}: its architecture {arch} divides by the root of {divisor}"
            ));
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
        if ["olmo2", "phi3"].contains(&arch) && self.heads * self.head_dim != self.hidden {
            return Err(format!(
                "head_dim = {}: its architecture {arch} has hidden_size / num_attention_heads",
                self.head_dim
            ));
        }
        Ok(())
    }

    /// The keys of the layers with a window.
    fn gguf_windows(&self, arch: &str) -> GgufKeys {
        // It needs a layer of each kind where there is a window.
        let has = (0..self.layers).any(|layer| self.heads_of(layer).window.is_some());
        let mut keys = Vec::new();
        match self.window {
            // Without this key, its architecture has the window of a published size.
            _ if arch == "phi3" => keys.push(("attention.sliding_window", GgufNumber::Count(0))),
            Some(Window { keys: count, layers: WindowLayers::AllBut(every) }) if has => keys.extend([
                ("attention.sliding_window", GgufNumber::Count(count)),
                ("attention.sliding_window_pattern", GgufNumber::Count(every)),
            ]),
            _ => {}
        }
        keys.extend(self.rope.local_theta.map(|theta| ("rope.freq_base_swa", GgufNumber::Real(theta))));
        keys
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
            "self_attn.q_proj" | "self_attn.k_proj" | "self_attn.v_proj" if self.family.fused => {
                ("attn_qkv", RowOrder::Kept)
            }
            "mlp.gate_proj" | "mlp.up_proj" if self.family.fused => ("ffn_up", RowOrder::Kept),
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
            "post_attention_layernorm" if self.family.norms == Norms::Before => ("ffn_norm", RowOrder::Kept),
            "post_attention_layernorm" => ("post_attention_norm", RowOrder::Kept),
            "pre_feedforward_layernorm" => ("ffn_norm", RowOrder::Kept),
            "post_feedforward_layernorm" => ("post_ffw_norm", RowOrder::Kept),
            _ => return None,
        };
        Some((format!("blk.{layer}.{part}.{ending}"), order))
    }

    /// The keys of the scaling of the frequencies, and the tensors of numbers that divide them. The error names what this architecture of
    /// llama.cpp does not do.
    fn gguf_scaling(&self, arch: &str) -> Result<(GgufKeys, Vec<GgufSource>), String> {
        let typed = |word, factor| {
            vec![
                ("rope.scaling.type", GgufNumber::Word(word)),
                ("rope.scaling.factor", GgufNumber::Real(factor)),
            ]
        };
        let divisors = |name: &str, numbers: Vec<f32>| GgufSource {
            name: format!("{name}.weight"),
            shape: vec![numbers.len()],
            from: GgufFrom::Numbers(numbers),
        };
        match &self.rope.scaling {
            RotaryScaling::Default => Ok((vec![], vec![])),
            RotaryScaling::Linear { factor } => Ok((typed("linear", *factor), vec![])),
            // Gemma's layers with a window would have it, too.
            RotaryScaling::Yarn(yarn) if self.rope.local_theta.is_none() => {
                Ok(([typed("yarn", yarn.factor), self.yarn_keys(*yarn)?].concat(), vec![]))
            }
            RotaryScaling::Llama3 { .. } if arch == "llama" => {
                Ok((vec![], vec![divisors("rope_freqs", self.divisors())]))
            }
            RotaryScaling::LongRope(LongRope { short, long, original, .. }) if arch == "phi3" => {
                let scale = self.rope.rotary(self.head_dim, false).0.scale();
                let keys = vec![
                    ("rope.scaling.original_context_length", GgufNumber::Count(*original)),
                    ("rope.scaling.attn_factor", GgufNumber::Real(scale)),
                ];
                let of = |name, factors: &[f64]| {
                    divisors(name, factors.iter().map(|factor| *factor as f32).collect())
                };
                Ok((keys, vec![of("rope_factors_long", long), of("rope_factors_short", short)]))
            }
            _ => {
                let table = self.rope.scaling_value().expect("a scaling is a table");
                Err(format!(
                    "rope_type = {}: its architecture {arch} has no such frequencies",
                    table["rope_type"]
                ))
            }
        }
    }

    /// Returns the number by which llama.cpp divides each frequency.
    fn divisors(&self) -> Vec<f32> {
        let plain = Rotary::new(self.head_dim, self.head_dim, self.rope.theta, RotaryScaling::Default);
        let (stretched, _) = self.rope.rotary(self.head_dim, false);
        let both = plain.frequencies().iter().zip(stretched.frequencies());
        both.map(|(plain, stretched)| (plain / stretched) as f32).collect()
    }

    /// The keys of type yarn beside its factor.
    fn yarn_keys(&self, yarn: Yarn) -> Result<GgufKeys, String> {
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
