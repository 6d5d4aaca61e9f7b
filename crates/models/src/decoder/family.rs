//! The families of decoders: what each leaves out of its files, and what sets its blocks apart.

use std::sync::Arc;

use phalanx_layers::NormOver;

use super::sizes::Size;
use super::{Decoder, sizes};
use crate::keys::{Key, Values};
use crate::limits::{MAX_HIDDEN, MAX_LAYERS, MAX_POSITIONS};
use crate::{Activation, Arch, Architecture, Objective};

/// A family of decoders: the value of a key that its `config.json` leaves out, and what its blocks have.
#[derive(Debug, PartialEq)]
pub struct Family {
    /// `model_type` of its files.
    pub name: &'static str,
    /// Its name in messages.
    pub title: &'static str,
    /// Class of transformers that computes it.
    pub class: &'static str,
    /// `num_key_value_heads` where it is left out; None for as many as heads of queries.
    pub kv_heads: Option<usize>,
    /// `head_dim` where it is left out; None for the width over the heads.
    pub head_dim: Option<usize>,
    /// Which projections of attention have biases.
    pub biases: AttentionBiases,
    /// True if `mlp_bias` is a key.
    pub mlp_bias: bool,
    /// The norm of queries and keys, if there is one.
    pub head_norms: Option<NormOver>,
    /// Position of the norms in a block.
    pub norms: Norms,
    /// True if norms multiply by 1 + weight.
    pub from_one: bool,
    /// True if embeddings are multiplied by the square root of the width.
    pub scaled_embedding: bool,
    /// `query_pre_attn_scalar` where it is left out, if it is a key: scores are divided by its root.
    pub query_scalar: Option<f32>,
    /// The key of the gate's activation, and the activation where it is left out: a form of GELU; None for SiLU.
    pub activation: (&'static str, Option<Activation>),
    /// Which layers have a window.
    pub windows: Windows,
    /// True if `partial_rotary_factor` is a key: RoPE rotates only the first elements of each head.
    pub partial: bool,
    /// True if files hold query, key and value as one tensor (`qkv_proj`), and gate and up as one (`gate_up_proj`).
    pub fused: bool,
    /// Every how many layers one has no rotary positions (`no_rope_layer_interval`), where it is left out.
    pub without_positions: Option<usize>,
    /// `tie_word_embeddings` where it is left out.
    pub tied: bool,
    /// `rope_theta` where it is left out.
    pub theta: f64,
    /// `rope_local_base_freq` where it is left out, if it is a key: the base in layers with a window.
    pub local_theta: Option<f64>,
    /// `rms_norm_eps` where it is left out.
    pub eps: f32,
    /// Its published sizes.
    pub sizes: &'static [Size],
}

/// Which projections of attention have biases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionBiases {
    /// None.
    Never,
    /// Those of queries, keys and values.
    Inputs,
    /// All four, where `attention_bias` says so.
    Key,
}

/// Which layers have a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Windows {
    /// None.
    Never,
    /// All, of `sliding_window` keys; of so many where that is left out.
    All {
        /// Number of keys; None for no window.
        absent: Option<usize>,
    },
    /// Those from `max_window_layers` on, where `use_sliding_window` says so.
    From,
    /// All but every so many-th (`sliding_window_pattern`), of `sliding_window` keys.
    Pattern {
        /// Every how many layers one sees all keys, where that is left out.
        every: usize,
        /// Number of keys, where that is left out.
        absent: usize,
    },
}

/// Position of the norms in a block, relative to attention and to the MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norms {
    /// Before each.
    Before,
    /// After each (OLMo 2).
    After,
    /// Before and after each (Gemma).
    Around,
}

impl Norms {
    /// The names of those before and after attention, and before and after the MLP.
    pub(super) fn names(self) -> [[Option<&'static str>; 2]; 2] {
        let [attention, mlp] = ["post_attention_layernorm", "post_feedforward_layernorm"].map(Some);
        let input = Some("input_layernorm");
        match self {
            Norms::Before => [[input, None], [attention, None]],
            Norms::After => [[None, attention], [None, mlp]],
            Norms::Around => [[input, attention], [Some("pre_feedforward_layernorm"), mlp]],
        }
    }
}

const LLAMA: Family = Family {
    name: "llama",
    title: "Llama",
    class: "LlamaForCausalLM",
    kv_heads: None,
    head_dim: None,
    biases: AttentionBiases::Key,
    mlp_bias: true,
    head_norms: None,
    norms: Norms::Before,
    from_one: false,
    scaled_embedding: false,
    query_scalar: None,
    activation: ("hidden_act", None),
    windows: Windows::Never,
    partial: false,
    fused: false,
    without_positions: None,
    tied: false,
    theta: 1e4,
    local_theta: None,
    eps: 1e-6,
    sizes: &sizes::LLAMA,
};

const QWEN2: Family = Family {
    name: "qwen2",
    title: "Qwen2",
    class: "Qwen2ForCausalLM",
    kv_heads: Some(32),
    biases: AttentionBiases::Inputs,
    mlp_bias: false,
    windows: Windows::From,
    sizes: &sizes::QWEN2,
    ..LLAMA
};

const MISTRAL: Family = Family {
    name: "mistral",
    title: "Mistral",
    class: "MistralForCausalLM",
    kv_heads: Some(8),
    biases: AttentionBiases::Never,
    mlp_bias: false,
    windows: Windows::All { absent: Some(4096) },
    sizes: &sizes::MISTRAL,
    ..LLAMA
};

/// All families.
static FAMILIES: [Family; 9] = [
    LLAMA,
    MISTRAL,
    QWEN2,
    Family {
        name: "qwen3",
        title: "Qwen3",
        class: "Qwen3ForCausalLM",
        head_dim: Some(128),
        biases: AttentionBiases::Key,
        head_norms: Some(NormOver::EachHead),
        sizes: &sizes::QWEN3,
        ..QWEN2
    },
    Family {
        name: "smollm3",
        title: "SmolLM3",
        class: "SmolLM3ForCausalLM",
        kv_heads: Some(4),
        without_positions: Some(4),
        tied: true,
        theta: 2e6,
        sizes: &sizes::SMOLLM3,
        ..LLAMA
    },
    Family {
        name: "olmo2",
        title: "OLMo 2",
        class: "Olmo2ForCausalLM",
        mlp_bias: false,
        head_norms: Some(NormOver::AllHeads),
        norms: Norms::After,
        eps: 1e-5,
        sizes: &sizes::OLMO2,
        ..LLAMA
    },
    Family {
        name: "phi3",
        title: "Phi-3",
        class: "Phi3ForCausalLM",
        biases: AttentionBiases::Never,
        mlp_bias: false,
        windows: Windows::All { absent: None },
        partial: true,
        fused: true,
        eps: 1e-5,
        sizes: &sizes::PHI3,
        ..LLAMA
    },
    Family {
        name: "gemma3_text",
        title: "Gemma 3",
        class: "Gemma3ForCausalLM",
        kv_heads: Some(4),
        head_dim: Some(256),
        mlp_bias: false,
        head_norms: Some(NormOver::EachHead),
        norms: Norms::Around,
        from_one: true,
        scaled_embedding: true,
        query_scalar: Some(256.0),
        activation: ("hidden_activation", Some(Activation::GELU_PYTORCH_TANH)),
        windows: Windows::Pattern { every: 6, absent: 4096 },
        tied: true,
        theta: 1e6,
        local_theta: Some(1e4),
        sizes: &sizes::GEMMA3,
        ..LLAMA
    },
    Family { name: "ministral", title: "Ministral", class: "MinistralForCausalLM", sizes: &[], ..MISTRAL },
];

/// The keys of `[model]` that all families read. Where one is left out, the family or the size has its value.
const KEYS: [Key; 19] = [
    Key::layers("num_hidden_layers", None),
    Key::hidden("hidden_size", None),
    Key::heads("num_attention_heads", None),
    Key::count(
        "kv_heads",
        "Heads of keys and values; as many as of queries when left out.",
        "num_key_value_heads",
        None,
        MAX_HIDDEN,
    ),
    Key::count(
        "head_dim",
        "Elements of a head; what the family has, or `hidden` / `heads`, when left out.",
        "head_dim",
        None,
        MAX_HIDDEN,
    ),
    Key::intermediate("intermediate_size"),
    Key::positions("max_position_embeddings"),
    Key::count(
        "window",
        "Keys that a position sees, itself among them.",
        "sliding_window",
        None,
        MAX_POSITIONS,
    ),
    Key::count(
        "window_from",
        "The first layer with the window; all have it when left out.",
        "max_window_layers",
        None,
        MAX_LAYERS,
    ),
    Key::count(
        "window_pattern",
        "Every so many-th layer sees all keys, the others those of the window.",
        "sliding_window_pattern",
        None,
        MAX_LAYERS,
    ),
    Key::norm_eps("rms_norm_eps", None),
    Key::positive("rope_theta", "Base of the rotary frequencies.", "rope_theta"),
    Key::positive(
        "local_rope_theta",
        "Base of the rotary frequencies in layers with a window.",
        "rope_local_base_freq",
    ),
    Key::positive(
        "query_pre_attn_scalar",
        "Scores of attention are divided by the root of this number.",
        "query_pre_attn_scalar",
    ),
    Key::positive(
        "partial_rotary_factor",
        "The share of a head, its first elements, that turns; all when left out.",
        "partial_rotary_factor",
    ),
    Key {
        name: "rope_scaling",
        file: "rope_scaling",
        values: Values::Table,
        help: "Scaling of the rotary frequencies, as in a `config.json` of transformers: `linear`, `dynamic`, `llama3`, `yarn`, `longrope`.",
    },
    Key {
        name: "tied",
        file: "tie_word_embeddings",
        values: Values::Flag,
        help: "The output projection is the token table.",
    },
    Key {
        name: "size",
        file: "size",
        values: Values::Word,
        help: "A published shape by its name, as `llama3.2-1b`: the value of every key of the model that is left out. A wrong name lists them.",
    },
    Key {
        name: "attention_bias",
        file: "attention_bias",
        values: Values::Flag,
        help: "The projections of attention have biases.",
    },
];

/// The entries in the registry.
pub(crate) static ARCHITECTURES: [Architecture; FAMILIES.len()] = {
    const fn entry(index: usize) -> Architecture {
        Architecture {
            name: FAMILIES[index].name,
            title: FAMILIES[index].title,
            objective: Objective::Causal,
            keys: &KEYS,
            build: |arch, keys, vocab, seq| {
                Ok(Arc::new(Decoder::of_keys(Family::of(arch), keys, vocab, seq)?))
            },
            vocab: |arch, keys| Family::of(arch).size(keys).ok()?.map(|size| size.vocab),
            from_config: |arch, config| Ok(Arc::new(Decoder::from_config(Family::of(arch), config)?)),
        }
    }
    let (mut all, mut next) = ([entry(0); FAMILIES.len()], 1);
    while next < all.len() {
        all[next] = entry(next);
        next += 1;
    }
    all
};

impl Family {
    /// The family of an architecture that is in the registry as one.
    fn of(arch: Arch) -> &'static Family {
        FAMILIES.iter().find(|family| family.name == arch.name).expect("the registry has it from here")
    }
}
