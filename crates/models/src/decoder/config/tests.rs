//! Configurations of decoders in both directions, and what is refused.

use super::*;
use crate::{Arch, Model};

fn llama() -> Value {
    json!({
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4,
        "intermediate_size": 24, "vocab_size": 40, "max_position_embeddings": 64,
    })
}

fn with(family: &str, more: Value) -> Result<std::sync::Arc<dyn Model>, String> {
    let mut config = llama();
    config["model_type"] = family.into();
    for (key, value) in more.as_object().unwrap() {
        config[key] = value.clone();
    }
    crate::from_config(&config).map_err(|error| error.to_string())
}

fn refusal(family: &str, more: Value) -> String {
    with(family, more).unwrap_err()
}

#[test]
fn what_is_left_out_is_the_value_of_the_family_and_null_follows_from_the_sizes() {
    let key = |family, more, key| with(family, more).unwrap().keys().get(key).cloned().unwrap_or(json!(null));
    assert_eq!(key("llama", json!({}), "kv_heads"), 4);
    assert_eq!(key("mistral", json!({ "num_attention_heads": 8 }), "kv_heads"), 8);
    assert_eq!(key("mistral", json!({ "num_key_value_heads": null }), "kv_heads"), 4);
    assert_eq!(key("mistral", json!({ "num_key_value_heads": 4 }), "window"), 4096);
    assert_eq!(
        key("mistral", json!({ "num_key_value_heads": 4, "sliding_window": null }), "window"),
        json!(null)
    );
    assert_eq!(key("qwen3", json!({ "num_key_value_heads": 2 }), "head_dim"), 128);
    assert_eq!(key("smollm3", json!({}), "rope_theta"), 2e6);
    assert!(
        refusal("qwen2", json!({}))
            .contains("num_key_value_heads is 32, expected a divisor of num_attention_heads = 4")
    );
}

#[test]
fn both_forms_of_rotary_keys_are_read_and_written() {
    let yarn = json!({ "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32 });
    let mut new = yarn.clone();
    new["rope_theta"] = json!(5e5);
    let old = with("llama", json!({ "rope_theta": 5e5, "rope_scaling": yarn })).unwrap();
    let new = with("llama", json!({ "rope_parameters": new })).unwrap();
    assert_eq!(old.to_config(), new.to_config());
    assert_eq!((old.longest(), old.keys().get("rope_theta").unwrap()), (Some(128), &json!(5e5)));
    let written = old.to_config();
    assert_eq!(
        (&written["rope_theta"], &written["rope_parameters"]["rope_theta"]),
        (&json!(5e5), &json!(5e5))
    );
    assert_eq!(written["rope_scaling"]["beta_fast"], written["rope_parameters"]["beta_fast"]);
    assert_eq!(crate::from_config(&written).unwrap().to_config(), written);
}

/// Phi-3 of version 4 takes three keys of longrope and no others; both versions read the positions before the stretching at the top.
#[test]
fn phi3_turns_a_part_of_a_head_and_stretches_by_lists() {
    let lists = json!({ "type": "su", "short_factor": [1.0], "long_factor": [2.0] });
    let more = json!({
        "head_dim": 4, "partial_rotary_factor": 0.5, "rope_scaling": lists, "original_max_position_embeddings": 16,
    });
    let model = with("phi3", more.clone()).unwrap();
    let written = model.to_config();
    assert_eq!(
        written["rope_scaling"],
        json!({ "type": "longrope", "short_factor": [1.0], "long_factor": [2.0] })
    );
    assert_eq!(written["original_max_position_embeddings"], 16);
    assert_eq!((&written["rope_parameters"]["factor"], model.longest()), (&json!(4.0), Some(64)));
    assert_eq!(written["rope_parameters"]["partial_rotary_factor"], 0.5);
    assert_eq!(crate::from_config(&written).unwrap().to_config(), written);
    let mut wrong = more;
    wrong["rope_scaling"]["long_factor"] = json!([2.0, 1.0]);
    assert!(refusal("phi3", wrong).contains("long_factor = [2.0,1.0], expected 1 numbers above 0"));
}

/// From `config.json` to `[model]` and back, nothing of a window is lost.
#[test]
fn windows_in_some_layers_have_keys() {
    let used = |more: Value| {
        let mut all = json!({ "num_key_value_heads": 4, "use_sliding_window": true, "sliding_window": 8 });
        all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        all
    };
    let (full, sliding) = ("full_attention", "sliding_attention");
    let cases = [
        ("qwen2", used(json!({ "max_window_layers": 1 })), Some(8), Some(1), None),
        ("qwen2", used(json!({ "max_window_layers": 0 })), Some(8), None, None),
        ("qwen3", used(json!({ "layer_types": [full, sliding] })), Some(8), Some(1), None),
        ("gemma3_text", json!({ "sliding_window": 8 }), Some(8), None, Some(6)),
        ("gemma3_text", json!({ "layer_types": [sliding, full] }), Some(4096), None, Some(2)),
        ("gemma3_text", json!({ "layer_types": [full, full] }), Some(4096), None, Some(1)),
        ("ministral", json!({ "num_key_value_heads": 4 }), Some(4096), None, None),
    ];
    for (family, more, window, from, pattern) in cases {
        let model = with(family, more).unwrap();
        let keys = model.keys();
        let count = |key| keys.get(key).and_then(Value::as_u64);
        let found = ["window", "window_from", "window_pattern"].map(count);
        assert_eq!(found, [window, from, pattern], "{family}");
        let again = Arch::named(family).unwrap().model(&keys, 40, 16).unwrap();
        assert_eq!(again.to_config(), model.to_config(), "{family}");
        assert_eq!(crate::from_config(&model.to_config()).unwrap().keys(), keys, "{family}");
    }
    let keys = Keys::from([("window_from", json!(3))]);
    let error = Arch::named("qwen2").unwrap().model(&keys, 40, 16).unwrap_err().to_string();
    assert_eq!(error, "model.window_from = 3: needs model.window");
}

/// Each kind of layers has its base, in both versions.
#[test]
fn gemma3_has_two_bases() {
    let old = with("gemma3_text", json!({ "rope_theta": 1e5, "rope_local_base_freq": 5e3 })).unwrap();
    let kinds = json!({
        "full_attention": { "rope_type": "default", "rope_theta": 1e5 },
        "sliding_attention": { "rope_type": "default", "rope_theta": 5e3 },
    });
    let new = with("gemma3_text", json!({ "rope_parameters": kinds })).unwrap();
    assert_eq!(old.to_config(), new.to_config());
    assert_eq!(old.to_config()["rope_parameters"], kinds);
    assert_eq!(new.keys().get("local_rope_theta"), Some(&json!(5e3)));
    let absent = with("gemma3_text", json!({})).unwrap().keys();
    assert_eq!(["rope_theta", "local_rope_theta"].map(|key| absent.get(key).unwrap()), [1e6, 1e4]);
}

#[test]
fn what_would_change_the_numbers_is_refused_by_name() {
    for (family, more, expected) in [
        (
            "llama",
            json!({ "rope_scaling": { "rope_type": "none" } }),
            "rope_scaling is rope_type = \"none\", expected one of \"default\"",
        ),
        (
            "llama",
            json!({ "rope_scaling": { "type": "linear" } }),
            "factor = left out, expected a number of at least 1",
        ),
        (
            "llama",
            json!({ "rope_scaling": { "type": "linear", "factor": 2, "beta_fast": 1 } }),
            "beta_fast = 1, expected no such key",
        ),
        (
            "llama",
            json!({ "rope_parameters": { "partial_rotary_factor": 0.5 } }),
            "partial_rotary_factor is 0.5, expected 1",
        ),
        ("llama", json!({ "rope_theta": 1e4, "rope_parameters": { "rope_theta": 2e4 } }), "mean the same"),
        ("llama", json!({ "hidden_act": "relu" }), "hidden_act is \"relu\""),
        (
            "llama",
            json!({ "num_key_value_heads": 3 }),
            "num_key_value_heads is 3, expected a divisor of num_attention_heads = 4",
        ),
        ("llama", json!({ "head_dim": 5 }), "head_dim is 5, expected an even number"),
        (
            "llama",
            json!({ "num_attention_heads": 3 }),
            "num_attention_heads is 3, expected a divisor of hidden_size = 16",
        ),
        ("llama", json!({ "quantization_config": {} }), "quantization_config"),
        (
            "mistral",
            json!({ "num_key_value_heads": 4, "attention_bias": true }),
            "attention_bias is true, expected false",
        ),
        (
            "qwen2",
            json!({ "num_key_value_heads": 4, "layer_types": ["full_attention", "sliding_attention"] }),
            "there is no window",
        ),
        (
            "qwen2",
            json!({ "num_key_value_heads": 4, "use_sliding_window": true, "layer_types": ["sliding_attention", "full_attention"] }),
            "layer_types is",
        ),
        ("gemma3_text", json!({ "final_logit_softcapping": 30.0 }), "final_logit_softcapping is 30.0"),
        ("gemma3_text", json!({ "attn_logit_softcapping": 50.0 }), "attn_logit_softcapping is 50.0"),
        (
            "gemma3_text",
            json!({ "use_bidirectional_attention": true }),
            "use_bidirectional_attention is true",
        ),
        ("phi3", json!({ "resid_pdrop": 0.5 }), "resid_pdrop is 0.5, expected 0.0"),
        ("phi3", json!({ "partial_rotary_factor": 0.3 }), "expected a number of which 0.3 is even"),
        ("smollm3", json!({ "no_rope_layers": [0, 1] }), "no_rope_layers is [0,1]"),
        ("smollm3", json!({ "use_sliding_window": true }), "use_sliding_window is true"),
    ] {
        let error = refusal(family, more);
        assert!(error.contains(expected), "{error}, expected {expected}");
    }
}

#[test]
fn keys_of_a_configuration_that_do_not_fit_are_refused_by_name() {
    let of =
        |arch: &str, keys: Keys| Arch::named(arch).unwrap().model(&keys, 40, 64).unwrap_err().to_string();
    for (arch, key, value, expected) in [
        ("llama", "kv_heads", json!(5), "model.kv_heads = 5: must be a divisor of model.heads = 12"),
        (
            "llama",
            "heads",
            json!(7),
            "model.heads = 7: must divide model.hidden = 768, or give model.head_dim",
        ),
        ("llama", "head_dim", json!(9), "model.head_dim = 9: must be an even number, for rotary positions"),
        ("mistral", "window_from", json!(9), "model.window_from = 9: is not a key of arch \"mistral\""),
        ("phi3", "partial_rotary_factor", json!(1.5), "model.partial_rotary_factor = 1.5: must be at most 1"),
        ("llama", "window", json!(9), "model.window = 9: is not a key of arch \"llama\""),
        (
            "qwen2",
            "attention_bias",
            json!(true),
            "model.attention_bias = true: is not a key of arch \"qwen2\"",
        ),
        ("llama", "positions", json!(8), "model.positions = 8: must be at least model.seq = 64, or"),
        ("llama", "rope_scaling", json!({ "rope_type": "none" }), "rope_type = \"none\": one of \"default\""),
    ] {
        let error = of(arch, Keys::from([(key, value)]));
        assert!(error.contains(expected), "{error}, expected {expected}");
    }
    let stretched =
        [("positions", json!(8)), ("rope_scaling", json!({ "rope_type": "linear", "factor": 8 }))];
    assert!(Arch::named("llama").unwrap().model(&Keys::from(stretched), 40, 64).is_ok());
}
