//! Decoders from the keys of a configuration, and from and to a `config.json` of transformers: of version 4 and of version 5, which
//! have rotary positions under different keys.

use phalanx_tensor::RotaryScaling;
use serde_json::{Value, json};

use super::family::{AttentionBiases, Windows};
use super::rope::is_share;
use super::sizes::Size;
use super::{Biases, Decoder, Family, Rope, Window, WindowLayers};
use crate::Activation;
use crate::config::{
    decimal, epsilon, expect_architecture, expect_computed, flag, number, probability, wrong,
};
use crate::keys::{KeyError, Keys};
use crate::limits::{MAX_HIDDEN, MAX_INTERMEDIATE, MAX_LAYERS, MAX_POSITIONS, MAX_VOCAB};
use crate::{Dropouts, ModelError};

/// Words of `layer_types`: a layer that sees all keys, and one with a window.
const KINDS: [&str; 2] = ["full_attention", "sliding_attention"];

/// Words of `hidden_act` for x sigmoid(x).
const SILU: [&str; 2] = ["silu", "swish"];

impl Decoder {
    /// The decoder of these keys, with `vocab` token ids, for sequences of `seq` tokens. What is left out is that of the size, if one
    /// is named.
    ///
    /// # Errors
    /// A key with a value that it cannot have beside the others.
    pub(super) fn of_keys(
        family: &'static Family,
        keys: &Keys,
        vocab: usize,
        seq: usize,
    ) -> Result<Decoder, KeyError> {
        family.refuse_foreign(keys)?;
        let size = family.size(keys)?;
        let count = |key, absent: usize, of: fn(&Size) -> usize| {
            keys.given_count(key).unwrap_or_else(|| size.map_or(absent, of))
        };
        let hidden = count("hidden", 768, |size| size.hidden);
        let heads = count("heads", 12, |size| size.heads[0]);
        let head_dim = count("head_dim", family.head_dim.unwrap_or(hidden / heads), |size| size.heads[2]);
        let follows = keys.get("head_dim").is_none() && size.is_none() && family.head_dim.is_none();
        if follows && !hidden.is_multiple_of(heads) {
            let expected = format!("must divide model.hidden = {hidden}, or give model.head_dim");
            return Err(keys.refused_as("heads", heads, expected));
        }
        let positions = count("positions", seq, |size| size.positions);
        let share = keys.given_number("partial_rotary_factor").unwrap_or(1.0);
        if !is_share(share) {
            return Err(keys.refused("partial_rotary_factor", "must be at most 1".to_string()));
        }
        let rope = Rope {
            theta: keys
                .given_number("rope_theta")
                .unwrap_or_else(|| size.map_or(family.theta, |size| size.theta)),
            share,
            local_theta: keys.given_number("local_rope_theta").or(family.local_theta),
            scaling: match keys.get("rope_scaling").and_then(Value::as_object) {
                None => size.map_or(RotaryScaling::Default, Size::scaling),
                Some(table) => Rope::read_scaling(table, positions, (head_dim as f64 * share) as usize)
                    .map_err(|wrong| keys.refused("rope_scaling", wrong.to_string()))?,
            },
        };
        let window = family.window(keys, size)?;
        let attention_bias = keys.flag("attention_bias").unwrap_or(false);
        let eps = keys.given_number("norm_eps").map(|eps| eps as f32);
        let model = Decoder {
            family,
            layers: count("layers", 12, |size| size.layers),
            hidden,
            heads,
            kv_heads: count("kv_heads", heads, |size| size.heads[1]),
            head_dim,
            // Llama's own rule: the parameters of an MLP of 4 times the width, whose gate makes three matrices of two.
            intermediate: count("intermediate", (8 * hidden).div_ceil(3).next_multiple_of(256), |size| {
                size.intermediate
            }),
            vocab,
            positions,
            eps: eps.unwrap_or_else(|| size.map_or(family.eps, |size| size.eps)),
            rope,
            tied: keys.flag("tied").unwrap_or_else(|| size.map_or(family.tied, |size| size.tied)),
            biases: family.biases(attention_bias, false),
            window,
            query_scalar: keys
                .given_number("query_pre_attn_scalar")
                .map(|scalar| scalar as f32)
                .or(family.query_scalar),
            without_positions: family.without_positions,
            activation: family.activation.1,
            dropout: Dropouts::default(),
        };
        match model.fault("model.heads") {
            _ if model.rope.longest(positions) < seq => Err(keys.refused_as(
                "positions",
                positions,
                format!("must be at least model.seq = {seq}, or model.rope_scaling must stretch it"),
            )),
            Some((key, given, expected)) => Err(keys.refused_as(key, given, format!("must be {expected}"))),
            None => Ok(model),
        }
    }

    /// The key of a size that does not fit the others, its value, and what it must be; `heads` is the name of that key.
    fn fault(&self, heads: &str) -> Option<(&'static str, usize, String)> {
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Some(("kv_heads", self.kv_heads, format!("a divisor of {heads} = {}", self.heads)));
        }
        let (rotated, share) = (self.rope.rotated(self.head_dim), self.rope.share);
        let even = if share < 1.0 {
            format!("a number of which {share} is even")
        } else {
            "an even number".to_string()
        };
        let is_odd = rotated == 0 || !rotated.is_multiple_of(2);
        is_odd.then(|| ("head_dim", self.head_dim, format!("{even}, for rotary positions")))
    }

    /// Reads a `config.json` of transformers. Its dropout is that of the training which made the file; a run uses the dropout of its
    /// own configuration.
    ///
    /// # Errors
    /// When the file describes another architecture, or a variant that is not computed here.
    pub(super) fn from_config(family: &'static Family, config: &Value) -> Result<Decoder, ModelError> {
        expect_architecture(config, family.name)?;
        let computed = [
            ("quantization_config", json!(null)),
            ("attn_logit_softcapping", json!(null)),
            ("final_logit_softcapping", json!(null)),
            ("resid_pdrop", json!(0.0)),
            ("embd_pdrop", json!(0.0)),
        ];
        expect_computed(config, &computed)?;
        if flag(config, "use_bidirectional_attention", false)? {
            return Err(wrong("use_bidirectional_attention", true, "false"));
        }
        let hidden = number(config, "hidden_size", MAX_HIDDEN)?;
        let heads = number(config, "num_attention_heads", MAX_HIDDEN)?;
        let layers = number(config, "num_hidden_layers", MAX_LAYERS)?;
        let positions = number(config, "max_position_embeddings", MAX_POSITIONS)?;
        // Null is not absent: it follows from the other sizes in every family.
        let or = |key: &'static str, absent: Option<usize>, follows: usize| match config.get(key) {
            None => Ok(absent.unwrap_or(follows)),
            Some(Value::Null) => Ok(follows),
            Some(_) => number(config, key, MAX_HIDDEN),
        };
        if config.get("head_dim").is_none_or(Value::is_null)
            && family.head_dim.is_none()
            && !hidden.is_multiple_of(heads)
        {
            return Err(wrong("num_attention_heads", heads, &format!("a divisor of hidden_size = {hidden}")));
        }
        let head_dim = or("head_dim", family.head_dim, hidden / heads)?;
        let attention_bias = flag(config, "attention_bias", false)?;
        if attention_bias && family.biases == AttentionBiases::Never {
            return Err(wrong("attention_bias", true, "false"));
        }
        let model = Decoder {
            family,
            layers,
            hidden,
            heads,
            kv_heads: or("num_key_value_heads", family.kv_heads, heads)?,
            head_dim,
            intermediate: number(config, "intermediate_size", MAX_INTERMEDIATE)?,
            vocab: number(config, "vocab_size", MAX_VOCAB)?,
            positions,
            eps: epsilon(config, "rms_norm_eps", family.eps)?,
            rope: Rope::of_config(config, family, positions, head_dim)?,
            tied: flag(config, "tie_word_embeddings", family.tied)?,
            biases: family.biases(attention_bias, family.mlp_bias && flag(config, "mlp_bias", false)?),
            window: window_of(config, family, layers)?,
            query_scalar: match (family.query_scalar, config.get("query_pre_attn_scalar")) {
                (absent, None) | (absent @ None, _) => absent,
                (Some(_), Some(_)) => Some(epsilon(config, "query_pre_attn_scalar", 1.0)?),
            },
            without_positions: without_positions_of(config, family, layers)?,
            activation: activation_of(config, family)?,
            dropout: match config.get("attention_dropout") {
                None => Dropouts::default(),
                Some(_) => {
                    Dropouts { attention: probability(config, "attention_dropout")?, ..Dropouts::default() }
                }
            },
        };
        let file = |key| if key == "kv_heads" { "num_key_value_heads" } else { key };
        match model.fault("num_attention_heads") {
            Some((key, given, expected)) => Err(wrong(file(key), given, &expected)),
            None => Ok(model),
        }
    }

    /// The `config.json`. Version 4 of transformers reads `rope_theta` and `rope_scaling`, version 5 `rope_parameters`.
    pub(super) fn config(&self) -> Value {
        let mut config = json!({
            "architectures": [self.family.class],
            "attention_bias": self.biases.output,
            "attention_dropout": decimal(self.dropout.attention),
            "head_dim": self.head_dim,
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.positions,
            "model_type": self.family.name,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": decimal(self.eps),
            "tie_word_embeddings": self.tied,
            "torch_dtype": "float32",
            "vocab_size": self.vocab,
        });
        self.rope.write(&mut config, self.family.partial, self.positions);
        let mut set = |key: &str, value: Value| config[key] = value;
        set(self.family.activation.0, self.activation.map_or_else(|| json!(SILU[0]), Activation::word));
        if let Some(scalar) = self.query_scalar {
            // transformers takes whole numbers alone.
            let is_whole = scalar.fract() == 0.0;
            set(
                "query_pre_attn_scalar",
                if is_whole { json!(scalar as u64) } else { json!(decimal(scalar)) },
            );
        }
        if self.family.mlp_bias {
            set("mlp_bias", json!(self.biases.mlp));
        }
        let window = self.window.map(|window| window.keys);
        match self.family.windows {
            Windows::Never => {}
            Windows::All { .. } => set("sliding_window", json!(window)),
            Windows::From => {
                set("use_sliding_window", json!(window.is_some()));
                set("sliding_window", json!(window));
                let from = self.window.map(|window| window.layers);
                let from = match from {
                    Some(WindowLayers::From(first)) => first,
                    _ => self.layers,
                };
                set("max_window_layers", json!(from));
            }
            Windows::Pattern { .. } => {
                let kind = |layer| match self.heads_of(layer).window {
                    None => KINDS[0],
                    Some(_) => KINDS[1],
                };
                set("sliding_window", json!(window));
                set("layer_types", json!((0..self.layers).map(kind).collect::<Vec<_>>()));
                if let Some(Window { layers: WindowLayers::AllBut(every), .. }) = self.window {
                    set("sliding_window_pattern", json!(every));
                }
            }
        }
        if self.family.without_positions.is_some() {
            let has: Vec<u8> = (0..self.layers).map(|layer| self.has_positions(layer).into()).collect();
            set("no_rope_layers", json!(has));
            set("use_sliding_window", json!(false));
        }
        config
    }
}

impl Family {
    fn biases(&self, attention: bool, mlp: bool) -> Biases {
        let (qkv, output) = match self.biases {
            AttentionBiases::Never => (false, false),
            AttentionBiases::Inputs => (true, false),
            AttentionBiases::Key => (attention, attention),
        };
        Biases { qkv, output, mlp }
    }

    /// Refuses keys of other families.
    fn refuse_foreign(&self, keys: &Keys) -> Result<(), KeyError> {
        let own = [
            ("window", self.windows != Windows::Never),
            ("window_from", self.windows == Windows::From),
            ("window_pattern", matches!(self.windows, Windows::Pattern { .. })),
            ("local_rope_theta", self.local_theta.is_some()),
            ("query_pre_attn_scalar", self.query_scalar.is_some()),
            ("attention_bias", self.biases == AttentionBiases::Key),
            ("partial_rotary_factor", self.partial),
        ];
        match own.iter().find(|(key, is_own)| keys.get(key).is_some() && !is_own) {
            Some((key, _)) => Err(keys.refused(key, format!("is not a key of arch {:?}", self.name))),
            None => Ok(()),
        }
    }

    /// The window of these keys and this size.
    fn window(&self, keys: &Keys, size: Option<&Size>) -> Result<Option<Window>, KeyError> {
        let given = keys.given_count("window").or_else(|| size.and_then(|size| size.window));
        let layers = match self.windows {
            Windows::Pattern { every, .. } => {
                WindowLayers::AllBut(keys.given_count("window_pattern").unwrap_or(every))
            }
            _ => WindowLayers::From(keys.given_count("window_from").unwrap_or(0)),
        };
        let absent = match self.windows {
            Windows::Pattern { absent, .. } => Some(absent),
            _ => None,
        };
        let window = given.or(absent).map(|keys| Window { keys, layers });
        match keys.get("window_from").filter(|_| window.is_none()) {
            Some(_) => Err(keys.refused("window_from", "needs model.window".to_string())),
            None => Ok(window),
        }
    }

    /// The size that the keys name, if they do.
    pub(super) fn size(&self, keys: &Keys) -> Result<Option<&'static Size>, KeyError> {
        let Some(name) = keys.get("size").and_then(Value::as_str) else { return Ok(None) };
        let size = self.sizes.iter().find(|size| size.name == name);
        size.map(Some).ok_or_else(|| {
            let names: Vec<&str> = self.sizes.iter().map(|size| size.name).collect();
            keys.refused("size", format!("the sizes of arch {:?} are {}", self.name, names.join(", ")))
        })
    }
}

/// The window, by its keys and by `layer_types`, which overrides them.
fn window_of(config: &Value, family: &Family, layers: usize) -> Result<Option<Window>, ModelError> {
    let keys = |absent: Option<usize>| match config.get("sliding_window") {
        None => Ok(absent),
        Some(Value::Null) => Ok(None),
        Some(_) => number(config, "sliding_window", MAX_POSITIONS).map(Some),
    };
    let is_used = flag(config, "use_sliding_window", false)?;
    let (keys, which) = match family.windows {
        Windows::Never if is_used => return Err(wrong("use_sliding_window", true, "false")),
        Windows::Never => (None, WindowLayers::From(0)),
        Windows::All { absent } => (keys(absent)?, WindowLayers::From(0)),
        Windows::From => {
            let from = config.get("max_window_layers").map_or(Some(28), Value::as_u64);
            let from = from.and_then(|from| usize::try_from(from).ok());
            let given = &config["max_window_layers"];
            let from = from.ok_or_else(|| wrong("max_window_layers", given, "a number of layers"))?;
            (if is_used { keys(Some(4096))? } else { None }, WindowLayers::From(from))
        }
        Windows::Pattern { every, absent } => {
            let every = match config.get("sliding_window_pattern") {
                None | Some(Value::Null) => every,
                Some(_) => number(config, "sliding_window_pattern", MAX_LAYERS)?,
            };
            let keys = keys(Some(absent))?;
            (
                Some(keys.ok_or_else(|| wrong("sliding_window", "null", "a number"))?),
                WindowLayers::AllBut(every),
            )
        }
    };
    let Some(types) = config.get("layer_types").filter(|types| !types.is_null()) else {
        return Ok(keys.map(|keys| Window { keys, layers: which }));
    };
    let kind = |kind: &Value| KINDS.iter().position(|word| kind == word).map(|index| index == 1);
    let kinds: Option<Vec<bool>> = types.as_array().and_then(|types| types.iter().map(kind).collect());
    let Some(kinds) = kinds.filter(|kinds| kinds.len() == layers) else {
        return Err(wrong("layer_types", types, &format!("{layers} of the words {}", KINDS.join(", "))));
    };
    match keys {
        _ if !kinds.contains(&true) && !matches!(family.windows, Windows::Pattern { .. }) => Ok(None),
        None => {
            let expected = "full_attention in all layers: the other keys say that there is no window";
            Err(wrong("layer_types", types, expected))
        }
        Some(keys) => {
            let expected = match family.windows {
                Windows::Pattern { .. } => "sliding_attention but for every n-th layer",
                Windows::From => "full_attention, and after them sliding_attention",
                Windows::All { .. } | Windows::Never => "sliding_attention in all layers",
            };
            let layers = layers_of(&kinds, which, family.windows);
            let layers = layers.ok_or_else(|| wrong("layer_types", types, expected))?;
            Ok(Some(Window { keys, layers }))
        }
    }
}

/// The layers with a window, of which there are some: as the other keys say if that is so, else as a family can have them.
fn layers_of(has: &[bool], said: WindowLayers, windows: Windows) -> Option<WindowLayers> {
    let first = |wanted: bool| has.iter().position(|has| *has == wanted);
    let other = match windows {
        Windows::From => first(true).map(WindowLayers::From),
        Windows::Pattern { .. } => first(false).map(|first| WindowLayers::AllBut(first + 1)),
        Windows::All { .. } | Windows::Never => None,
    };
    let fits = |layers: &WindowLayers| has.iter().enumerate().all(|(i, has)| layers.has(i) == *has);
    [Some(said), other].into_iter().flatten().find(fits)
}

/// Every how many layers one has no rotary positions, by `no_rope_layers` (1 for those that have them) or its interval.
fn without_positions_of(config: &Value, family: &Family, layers: usize) -> Result<Option<usize>, ModelError> {
    let Some(absent) = family.without_positions else { return Ok(None) };
    let interval = match config.get("no_rope_layer_interval") {
        None | Some(Value::Null) => absent,
        Some(_) => number(config, "no_rope_layer_interval", MAX_LAYERS)?,
    };
    let Some(given) = config.get("no_rope_layers").filter(|given| !given.is_null()) else {
        return Ok(Some(interval));
    };
    let list: Option<Vec<u64>> = given.as_array().and_then(|list| list.iter().map(Value::as_u64).collect());
    let fits = |list: &[u64], interval: usize| {
        list.iter().enumerate().all(|(i, has)| *has == u64::from(!(i + 1).is_multiple_of(interval)))
    };
    let list = list.filter(|list| list.len() == layers);
    let found = list.as_deref().and_then(|list| match list.iter().position(|has| *has == 0) {
        None => list.iter().all(|has| *has == 1).then_some(None),
        Some(first) => fits(list, first + 1).then_some(Some(first + 1)),
    });
    let expected = format!("{layers} numbers 1, of which every n-th is 0");
    found.ok_or_else(|| wrong("no_rope_layers", given, &expected))
}

/// The function of the gate; None for x sigmoid(x).
fn activation_of(config: &Value, family: &Family) -> Result<Option<Activation>, ModelError> {
    let (key, absent) = family.activation;
    match config.get(key) {
        None => Ok(absent),
        Some(word) if SILU.iter().any(|silu| word == silu) => Ok(None),
        Some(_) => Activation::read(config, key, Activation::GELU).map(Some),
    }
}

#[cfg(test)]
mod tests;
