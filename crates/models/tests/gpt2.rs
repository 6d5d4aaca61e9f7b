//! GPT-2's configurations, and what its parameters are in files.

use crate::rig;
use phalanx_models::{Activation, Dropouts, Gpt2, Model, from_config, name_in};
use phalanx_tensor::Gelu;
use serde_json::json;

#[test]
fn configurations_go_both_ways_and_foreign_ones_are_refused() {
    let dropout = Dropouts { embedding: 0.1, attention: 0.2, residual: 0.3 };
    let activation = Activation::GELU_NEW;
    let model = Gpt2 {
        layers: 2,
        hidden: 8,
        heads: 2,
        vocab: 11,
        positions: 4,
        activation,
        dropout,
        ..Gpt2::default()
    };
    let config = model.to_config();
    assert_eq!(Gpt2::from_config(&config).unwrap(), model);
    assert_eq!(from_config(&config).unwrap().to_config(), config);
    for (key, p) in [("embd_pdrop", 0.1), ("attn_pdrop", 0.2), ("resid_pdrop", 0.3)] {
        assert_eq!(config[key], json!(p), "the decimal that was given");
    }
    for (key, value, part) in [
        ("model_type", json!("t5"), "model_type is \"t5\", expected \"gpt2\""),
        ("n_head", json!(3), "n_head is 3, expected a divisor of n_embd = 8"),
        ("n_inner", json!(0), "n_inner is 0"),
        ("activation_function", json!("relu"), "activation_function is \"relu\", expected one of \"gelu\""),
        ("activation_function", json!("gelu_10"), "activation_function is \"gelu_10\""),
        ("activation_function", json!(null), "activation_function is null"),
        ("scale_attn_weights", json!(false), "scale_attn_weights is false"),
        ("scale_attn_by_inverse_layer_idx", json!(true), "scale_attn_by_inverse_layer_idx is true"),
        ("reorder_and_upcast_attn", json!(true), "reorder_and_upcast_attn is true"),
        ("tie_word_embeddings", json!(false), "tie_word_embeddings is false"),
        ("quantization_config", json!({"bits": 4}), "quantization_config is {\"bits\":4}, expected null"),
        (
            "hidden_size",
            json!(16),
            "[\"n_embd\", \"hidden_size\"] mean the same, and their values are [\"8\", \"16\"]",
        ),
        ("n_layer", json!(null), "n_layer is null"),
        ("attn_pdrop", json!(1.5), "attn_pdrop is 1.5"),
        ("layer_norm_epsilon", json!("small"), "layer_norm_epsilon is \"small\""),
    ] {
        let mut changed = config.clone();
        changed[key] = value;
        for error in [Gpt2::from_config(&changed).unwrap_err(), from_config(&changed).unwrap_err()] {
            assert!(error.to_string().contains(part), "{error}");
        }
    }
}

#[test]
fn the_first_files_leave_out_a_prefix() {
    let model = Gpt2::from_config(&rig::config("gpt2")).unwrap();
    for spec in model.whole().parameters {
        let short = spec.name.strip_prefix("transformer.").unwrap();
        assert_eq!(name_in(&model, &spec.name, |name| name == short), short);
        assert_eq!(name_in(&model, &spec.name, |_| true), spec.name);
        assert_eq!(name_in(&model, &spec.name, |_| false), spec.name, "for the message");
    }
}

#[test]
fn every_spelling_of_both_forms_of_gelu_is_read_and_written_again() {
    let mut config = Gpt2::from_config(&rig::config("gpt2")).unwrap().to_config();
    for (word, gelu) in [
        ("gelu", Gelu::Erf),
        ("gelu_python", Gelu::Erf),
        ("gelu_new", Gelu::Tanh),
        ("gelu_fast", Gelu::Tanh),
        ("gelu_accurate", Gelu::Tanh),
        ("gelu_pytorch_tanh", Gelu::Tanh),
        ("gelu_python_tanh", Gelu::Tanh),
    ] {
        config["activation_function"] = json!(word);
        let model = Gpt2::from_config(&config).unwrap();
        assert_eq!((model.activation.gelu, &model.to_config()["activation_function"]), (gelu, &json!(word)));
    }
    config.as_object_mut().unwrap().remove("activation_function");
    assert_eq!(Gpt2::from_config(&config).unwrap().activation, Activation::GELU_NEW, "transformers' default");
}

#[test]
fn sizes_may_have_the_canonical_names_of_transformers() {
    let model = Gpt2::from_config(&rig::config("gpt2")).unwrap();
    let mut config = model.to_config();
    let fields = config.as_object_mut().unwrap();
    for (key, canonical) in [
        ("n_embd", "hidden_size"),
        ("n_layer", "num_hidden_layers"),
        ("n_head", "num_attention_heads"),
        ("n_positions", "max_position_embeddings"),
    ] {
        let size = fields.remove(key).unwrap();
        fields.insert(canonical.to_string(), size);
    }
    assert_eq!(Gpt2::from_config(&config).unwrap(), model);
}
