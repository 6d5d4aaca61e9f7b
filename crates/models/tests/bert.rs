//! BERT's configurations, and what its parameters are in files.

use crate::rig;
use phalanx_models::{Activation, Bert, Dropouts, Model, Objective, Stored, from_config};
use serde_json::json;

fn small() -> Bert {
    let dropout = Dropouts { embedding: 0.3, attention: 0.2, residual: 0.3 };
    let (layers, hidden, heads, intermediate, vocab, positions) = (2, 8, 2, 20, 11, 4);
    let (eps, activation) = (1e-12, Activation::GELU);
    Bert { layers, hidden, heads, intermediate, vocab, positions, eps, activation, dropout }
}

#[test]
fn configurations_go_both_ways_and_foreign_ones_are_refused() {
    let model = small();
    assert_eq!(model.objective(), Objective::Masked);
    let config = model.to_config();
    assert_eq!(Bert::from_config(&config).unwrap(), model);
    assert_eq!(from_config(&config).unwrap().to_config(), config);
    for (key, number) in
        [("hidden_dropout_prob", 0.3), ("attention_probs_dropout_prob", 0.2), ("layer_norm_eps", 1e-12)]
    {
        assert_eq!(config[key], json!(number), "the decimal that was given");
    }
    for (key, value, part) in [
        ("model_type", json!("roberta"), "model_type is \"roberta\", expected \"bert\""),
        ("hidden_act", json!("relu"), "hidden_act is \"relu\", expected one of \"gelu\""),
        ("quantization_config", json!({}), "quantization_config is {}, expected null"),
        ("position_embedding_type", json!("relative_key"), "position_embedding_type is \"relative_key\""),
        ("type_vocab_size", json!(16), "type_vocab_size is 16, expected 2"),
        ("tie_word_embeddings", json!(false), "tie_word_embeddings is false"),
        ("is_decoder", json!(true), "is_decoder is true"),
        ("num_attention_heads", json!(3), "num_attention_heads is 3, expected a divisor of hidden_size = 8"),
        ("intermediate_size", json!(0), "intermediate_size is 0"),
        ("hidden_dropout_prob", json!(1), "hidden_dropout_prob is 1"),
    ] {
        let mut changed = config.clone();
        changed[key] = value;
        let error = Bert::from_config(&changed).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}

/// The tensors under which the network's parameters are stored are exactly those that transformers wrote.
#[test]
fn names_and_shapes_are_those_of_transformers() {
    let model = Bert::from_config(&rig::config("bert")).unwrap();
    let mut ours: Vec<(String, Vec<usize>)> = Vec::new();
    for spec in model.whole().parameters {
        let mut next = 0;
        for stored in model.stored_as(&spec) {
            assert_eq!(stored.first, next, "{} follows in {}", stored.name, spec.name);
            next += stored.elements();
            ours.push((stored.name, stored.shape));
        }
        assert_eq!(next, spec.elements() as u64, "{}", spec.name);
    }
    ours.sort();
    assert_eq!(ours, rig::names_and_shapes("bert/model.safetensors"));
}

#[test]
fn older_files_call_a_norm_gamma_and_beta_and_bare_ones_leave_out_a_prefix() {
    let model = small();
    let old = [
        "bert.embeddings.LayerNorm.gamma",
        "bert.encoder.layer.1.output.LayerNorm.beta",
        "cls.predictions.transform.LayerNorm.gamma",
    ];
    for spec in model.whole().parameters {
        let stored = model.stored_as(&spec);
        let found = stored[0].name_in(|name| old.contains(&name)).to_string();
        let new = found.replace("gamma", "weight").replace("beta", "bias");
        assert_eq!(new, stored[0].name);
        let is_norm = spec.name.contains("LayerNorm");
        for Stored { name, aliases, .. } in stored {
            let bare = name.strip_prefix("bert.");
            assert!(bare.is_none_or(|bare| aliases.iter().any(|alias| alias == bare)), "{name}: {aliases:?}");
            let names = 1 + usize::from(bare.is_some());
            assert_eq!(aliases.len(), if is_norm { 2 * names - 1 } else { names - 1 }, "{name}");
        }
    }
}

/// Any piece of a packed parameter, on any rank, takes the right elements of the right tensor.
#[test]
fn pieces_of_the_packed_projection() {
    let model = small();
    let spec = model.whole().parameters.into_iter().find(|p| p.name.ends_with("0.attention.self.qkv.weight"));
    let spec = spec.unwrap();
    let stored = model.stored_as(&spec);
    let names: Vec<&str> = stored.iter().map(|s| s.name.rsplit('.').nth(1).unwrap()).collect();
    assert_eq!(names, ["query", "key", "value"]);
    // Whole: 3 tensors of 8 x 8, side by side.
    for piece in [0..192, 0..1, 63..65, 64..128, 100..192, 127..129] {
        let mut covered = Vec::new();
        for stored in &stored {
            let Some(overlap) = stored.within(&spec, piece.clone()) else { continue };
            assert_eq!(overlap.theirs.end - overlap.theirs.start, overlap.ours.len() as u64);
            for (there, here) in overlap.theirs.zip(overlap.ours) {
                assert_eq!(stored.first + there, piece.start + here as u64);
                covered.push(here);
            }
        }
        assert_eq!(covered, (0..(piece.end - piece.start) as usize).collect::<Vec<_>>());
    }
}
