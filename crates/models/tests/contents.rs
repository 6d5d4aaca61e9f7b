//! Comparison of a file of weights with its `config.json`: no tensor is dropped silently, and no network is built before the
//! number of layers is known to be right.

use crate::rig;
use std::sync::Arc;
use std::time::{Duration, Instant};

use phalanx_models::{Model, ModelError, check_contents, from_config, heads_lacking};
use serde_json::json;

type Tensors = Vec<(String, Vec<usize>)>;

fn check(model: &dyn Model, tensors: &Tensors) -> Result<(), ModelError> {
    check_contents(model, tensors.iter().map(|(name, shape)| (name.as_str(), shape.as_slice())))
}

/// The golden models with the tensors that transformers wrote.
fn goldens() -> [(Arc<dyn Model>, &'static str, Tensors); 3] {
    [("gpt2", "n_layer"), ("bert", "num_hidden_layers"), ("decoders/phi3", "num_hidden_layers")].map(
        |(folder, key)| {
            let model = from_config(&rig::config(folder)).unwrap();
            (model, key, rig::names_and_shapes(&format!("{folder}/model.safetensors")))
        },
    )
}

#[test]
fn what_transformers_wrote_is_whole_and_every_tensor_is_needed() {
    for (model, _, tensors) in goldens() {
        check(&*model, &tensors).unwrap();
        for at in 0..tensors.len() {
            let (mut fewer, mut other) = (tensors.clone(), tensors.clone());
            let (name, _) = fewer.remove(at);
            let error = check(&*model, &fewer).unwrap_err().to_string();
            assert!(error.contains(&format!("no {name}")) || error.contains(".gamma"), "{name}: {error}");
            other[at].1[0] += 1;
            let error = check(&*model, &other).unwrap_err().to_string();
            assert!(error.contains(&name) && error.contains("do not belong together"), "{error}");
        }
    }
}

#[test]
fn a_number_of_layers_that_is_not_the_files_is_refused_at_once() {
    for (folder, (_, key, tensors)) in ["gpt2", "bert", "decoders/phi3"].into_iter().zip(goldens()) {
        for layers in [1u64, 3, 1024] {
            let mut config = rig::config(folder);
            config[key] = json!(layers);
            let start = Instant::now();
            let error = check(&*from_config(&config).unwrap(), &tensors).unwrap_err().to_string();
            for word in [key, &layers.to_string(), "2 layers", "the last is number 1"] {
                assert!(error.contains(word), "{word:?} in {error}");
            }
            assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
        }
        for layers in [json!(1025), json!(1_000_000), json!(1e9), json!(u64::MAX), json!(-1), json!("2")] {
            let mut config = rig::config(folder);
            config[key] = layers;
            let error = from_config(&config).unwrap_err().to_string();
            assert!(error.contains(key) && error.contains("from 1 to 1024"), "{error}");
        }
    }
}

/// Many layers of one tensor each: no network is built to find out what is missing.
#[test]
fn layers_of_one_tensor_each_are_refused_at_once() {
    let layers = 1024usize;
    let mut config = rig::config("gpt2");
    config["n_layer"] = json!(layers);
    let tensors: Tensors = (0..layers).map(|layer| (format!("h.{layer}.a"), vec![1])).collect();
    let start = Instant::now();
    let error = check(&*from_config(&config).unwrap(), &tensors).unwrap_err().to_string();
    assert!(error.contains("transformer.h.0.*"), "{error}");
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
}

#[test]
fn a_gap_between_layers_is_refused() {
    let [(model, ..), ..] = goldens();
    let mut tensors = rig::names_and_shapes("gpt2/model.safetensors");
    for (name, _) in &mut tensors {
        *name = name.replace(".h.1.", ".h.7.");
    }
    let error = check(&*model, &tensors).unwrap_err().to_string();
    assert!(error.contains("n_layer is 2") && error.contains("number 7"), "{error}");
}

#[test]
fn tensors_that_would_be_lost_are_named_and_known_extras_are_not() {
    let [(gpt2, _, of_gpt2), (bert, _, of_bert), _] = goldens();
    let mask = vec![1, 1, 16, 16];
    let known: [(&dyn Model, &Tensors, &str, Vec<usize>); 10] = [
        (&*gpt2, &of_gpt2, "transformer.h.0.attn.bias", mask.clone()),
        (&*gpt2, &of_gpt2, "h.1.attn.bias", mask.clone()),
        (&*gpt2, &of_gpt2, "transformer.h.1.attn.masked_bias", vec![]),
        (&*gpt2, &of_gpt2, "lm_head.weight", vec![67, 32]),
        (&*bert, &of_bert, "bert.pooler.dense.weight", vec![32, 32]),
        (&*bert, &of_bert, "cls.seq_relationship.bias", vec![2]),
        (&*bert, &of_bert, "bert.embeddings.position_ids", vec![1, 32]),
        (&*bert, &of_bert, "cls.predictions.decoder.weight", vec![96, 32]),
        (&*bert, &of_bert, "cls.predictions.decoder.bias", vec![96]),
        (&*bert, &of_bert, "bert.pooler.dense.bias", vec![32]),
    ];
    for (model, tensors, name, shape) in known {
        let mut more = tensors.clone();
        more.push((name.to_string(), shape));
        check(model, &more).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
    let lost: [(&dyn Model, &Tensors, &str, Vec<usize>); 6] = [
        (&*gpt2, &of_gpt2, "transformer.h.0.crossattention.c_attn.weight", vec![32, 64]),
        (&*gpt2, &of_gpt2, "score.weight", vec![2, 32]),
        (&*gpt2, &of_gpt2, "wte.weight", vec![67, 32]),
        (&*gpt2, &of_gpt2, "lm_head.weight", vec![68, 32]),
        (&*bert, &of_bert, "bert.encoder.layer.1.crossattention.self.query.weight", vec![32, 32]),
        (&*bert, &of_bert, "cls.predictions.decoder.weight", vec![32, 96]),
    ];
    for (model, tensors, name, shape) in lost {
        let mut more = tensors.clone();
        more.push((name.to_string(), shape));
        let error = check(model, &more).unwrap_err().to_string();
        assert!(error.contains(name), "{name}: {error}");
    }
}

/// `BertModel` has no prefix and no head; a head of which a part is missing is an incomplete file.
#[test]
fn a_bert_without_prefix_and_head_is_whole() {
    let [_, (model, _, tensors), _] = goldens();
    let bare = |(name, shape): &(String, Vec<usize>)| {
        (name.strip_prefix("bert.").unwrap_or(name).to_string(), shape.clone())
    };
    let bare: Tensors = tensors.iter().map(bare).collect();
    check(&*model, &bare).unwrap();
    let (head, mut body): (Tensors, Tensors) =
        bare.into_iter().partition(|(name, _)| name.starts_with("cls."));
    body.push(("pooler.dense.weight".to_string(), vec![32, 32]));
    check(&*model, &body).unwrap();
    let has = |name: &str| body.iter().any(|(own, _)| own == name);
    assert_eq!(heads_lacking(&*model, has), ["cls.predictions."]);
    let classes = model.classifying(&["no".into(), "yes".into()]).unwrap();
    assert_eq!(heads_lacking(&*classes, has), ["classifier."], "the pooler is there, without a prefix");
    for tensor in &head {
        body.push(tensor.clone());
        let error = check(&*model, &body).unwrap_err().to_string();
        assert!(error.contains("the weights have no cls."), "{error}");
        body.pop();
    }
}
