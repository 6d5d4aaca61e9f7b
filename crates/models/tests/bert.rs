//! BERT's configurations, and what its parameters are in files.

use crate::rig;
use phalanx_models::{Bert, Dropouts, Model, Objective, RowsOf, from_config, name_in};
use serde_json::json;

fn small() -> Bert {
    let dropout = Dropouts { embedding: 0.3, attention: 0.2, residual: 0.3 };
    let (layers, hidden, heads, intermediate, vocab, positions) = (2, 8, 2, 20, 11, 4);
    Bert { layers, hidden, heads, intermediate, vocab, positions, dropout, ..Bert::default() }
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

/// The parameters are exactly the tensors that transformers wrote.
#[test]
fn names_and_shapes_are_those_of_transformers() {
    let model = Bert::from_config(&rig::config("bert")).unwrap();
    let mut ours: Vec<_> =
        model.whole().members().map(|spec| (spec.name.clone(), spec.shape.clone())).collect();
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
    for spec in model.whole().members() {
        let (name, aliases) = (&spec.name, model.aliases(&spec.name));
        let found = name_in(&model, name, |name| old.contains(&name));
        assert_eq!(found.replace("gamma", "weight").replace("beta", "bias"), *name);
        let is_norm = name.contains("LayerNorm");
        let bare = name.strip_prefix("bert.");
        assert!(bare.is_none_or(|bare| aliases.iter().any(|alias| alias == bare)), "{name}: {aliases:?}");
        let names = 1 + usize::from(bare.is_some());
        assert_eq!(aliases.len(), if is_norm { 2 * names - 1 } else { names - 1 }, "{name}");
    }
}

/// Query, key and value lie one behind another, and were one tensor of earlier checkpoints.
#[test]
fn query_key_and_value_join() {
    let model = small();
    let whole = model.whole();
    let joint = |part: &str| {
        let name = format!("bert.encoder.layer.0.attention.self.{{query,key,value}}.{part}");
        whole.parameters.iter().find(|spec| spec.name == name).unwrap()
    };
    for (part, shape, each) in [("weight", vec![24, 8], 64), ("bias", vec![24], 8)] {
        assert_eq!(joint(part).shape, shape);
        for (index, member) in joint(part).members().iter().enumerate() {
            let name = format!("bert.encoder.layer.0.attention.self.qkv.{part}");
            let (shape, first) = (shape.clone(), index as u64 * each);
            assert_eq!(model.earlier(member), Some(RowsOf { name, shape, first }));
        }
    }
    let apart: Vec<&str> =
        whole.parameters.iter().filter(|spec| spec.joined.is_empty()).map(|spec| &*spec.name).collect();
    assert!(!apart.iter().any(|name| name.contains(".self.")), "{apart:?}");
    let frozen = model.whole().freezing(|spec| spec.name.contains("0.attention.self.key"));
    let of = |name: &str| frozen.parameters.iter().filter(|spec| spec.name.contains(name)).count();
    assert_eq!([of("layer.0.attention.self"), of("layer.1.attention.self")], [6, 2]);
}
