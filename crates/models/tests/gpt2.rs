//! GPT-2's configurations, and what its parameters are in files.

mod rig;

use phalanx_models::{Dropouts, Gpt2, Model, from_config};
use serde_json::json;

#[test]
fn configurations_go_both_ways_and_foreign_ones_are_refused() {
    let dropout = Dropouts { embedding: 0.1, attention: 0.2, residual: 0.3 };
    let model = Gpt2 { layers: 2, hidden: 8, heads: 2, vocab: 11, positions: 4, eps: 1e-5, dropout };
    let config = model.to_config();
    assert_eq!(Gpt2::from_config(&config).unwrap(), model);
    assert_eq!(from_config(&config).unwrap().to_config(), config);
    for (key, p) in [("embd_pdrop", 0.1), ("attn_pdrop", 0.2), ("resid_pdrop", 0.3)] {
        assert_eq!(config[key], json!(p), "the decimal that was given");
    }
    for (key, value, part) in [
        ("model_type", json!("llama"), "model_type is \"llama\", expected \"gpt2\""),
        ("n_head", json!(3), "n_head is 3, expected a divisor of n_embd = 8"),
        ("n_inner", json!(100), "n_inner is 100"),
        ("activation_function", json!("relu"), "activation_function"),
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
        let [stored] = &model.stored_as(&spec)[..] else { panic!("{} is one tensor", spec.name) };
        let short = spec.name.strip_prefix("transformer.").unwrap();
        assert_eq!((&stored.name, &stored.shape), (&spec.name, &spec.shape));
        assert_eq!(stored.name_in(|name| name == short), short);
        assert_eq!(stored.name_in(|_| true), spec.name);
        assert_eq!(stored.name_in(|_| false), spec.name, "for the message");
    }
}
