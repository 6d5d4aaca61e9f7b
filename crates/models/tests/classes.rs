//! BERT with a class head against `BertForSequenceClassification` of transformers, and its `config.json`.

use phalanx_layers::Checkpointing;
use phalanx_models::{Arch, Objective, from_config};
use phalanx_tensor::DType;
use serde_json::json;

use crate::rig::{self, Case, compare_gradients, compare_low, compare_low_forward, names_and_shapes, values};

const FILE: &str = "bert_classes/forward.safetensors";

/// PyTorch's f32 is off its f64 by 1.4e-7 in the loss and by 5.6e-7 of a gradient's greatest element; tolerances are four times that, as
/// those of goldens.rs. Twelve logits of at most 0.6 are too few to measure: they have the relative tolerance of gradients.
const LOSS: f32 = 6e-7;
const GRADIENTS: f32 = 2.3e-6;
const LOGITS: f32 = 1.4e-6;

#[test]
fn logits_loss_and_every_gradient() {
    let case = Case::bert_classes(DType::F32);
    let (logits, loss) = case.forward();
    for (got, expected) in logits.iter().zip(values(FILE, "logits")) {
        assert!((got - expected).abs() < LOGITS, "{got} for {expected}");
    }
    assert!((loss - values(FILE, "loss")[0]).abs() < LOSS);
    compare_gradients(FILE, &case.gradients(), GRADIENTS);
    for ranks in [2] {
        compare_gradients(FILE, &case.gradients_over(ranks, false), GRADIENTS);
        for rank in 0..ranks {
            let (_, trace) = case.dry_run(ranks, rank, false);
            let faults: Vec<String> = trace.faults.iter().map(ToString::to_string).collect();
            assert_eq!(faults, [""; 0], "rank {rank} of {ranks}");
        }
    }
}

#[test]
fn in_16_bits() {
    for (compute, name, loss_scale) in [(DType::BF16, "bf16", 1.0), (DType::F16, "f16", 65536.0)] {
        let file = format!("bert_classes/forward_{name}.safetensors");
        let case = Case { loss_scale, ..Case::bert_classes(compute) };
        compare_low_forward(&file, &case.forward());
        for (name, got) in case.gradients().by_name {
            compare_low(&file, &format!("grad.{name}"), &got);
        }
    }
}

#[test]
fn what_is_computed_again_or_in_two_parts_changes_no_bit() {
    let case = Case::bert_classes(DType::F32);
    let expected = case.gradients();
    for checkpointing in [Checkpointing::None, Checkpointing::Selective, Checkpointing::Blocks { every: 1 }] {
        for split in [false, true] {
            let got = Case { checkpointing, split, ..case.clone() }.gradients();
            assert!(got.by_name == expected.by_name, "{checkpointing:?}, split {split}");
        }
    }
}

#[test]
fn names_shapes_and_labels_are_those_of_transformers() {
    let config = rig::config("bert_classes");
    let model = from_config(&config).unwrap();
    let mut ours: Vec<_> =
        model.whole().members().map(|spec| (spec.name.clone(), spec.shape.clone())).collect();
    ours.sort();
    assert_eq!(ours, names_and_shapes("bert_classes/model.safetensors"));
    assert_eq!(
        (model.labels(), model.objective()),
        (&["bad", "fair", "good"].map(String::from)[..], Objective::Classes)
    );
    for key in ["architectures", "id2label", "label2id"] {
        assert_eq!(model.to_config()[key], config[key], "{key}");
    }
    assert_eq!(from_config(&model.to_config()).unwrap().to_config(), model.to_config());
    let masked = from_config(&rig::config("bert")).unwrap();
    let labels = ["no".to_string(), "yes".to_string()];
    let classes = masked.classifying(&labels).unwrap();
    assert_eq!((classes.labels(), classes.keys().get("labels")), (&labels[..], Some(&json!(labels))));
    let built = Arch::BERT.model(&classes.keys(), 96, 8).unwrap();
    assert_eq!(built.keys(), classes.keys());
}

#[test]
fn heads_that_choose_no_class_of_several_are_refused_by_name() {
    let config = rig::config("bert_classes");
    for (key, value, part) in [
        (
            "problem_type",
            json!("regression"),
            "problem_type is \"regression\", expected null or \"single_label",
        ),
        ("problem_type", json!("multi_label_classification"), "several classes of one row are not computed"),
        ("num_labels", json!(2), "[\"num_labels\", \"id2label\"] mean the same"),
        ("id2label", json!({ "0": "a", "2": "b" }), "a name for each of the numbers 0, 1, 2"),
        ("id2label", json!({ "0": "a" }), "num_labels is 1, expected at least 2: one is a regression"),
        ("id2label", json!({ "0": "a", "1": "a" }), "has the class \"a\" twice"),
        ("label2id", json!({ "bad": 1, "fair": 0, "good": 2 }), "[\"label2id\", \"id2label\"] mean the same"),
    ] {
        let mut changed = config.clone();
        changed[key] = value;
        let error = from_config(&changed).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    let mut bare = config.clone();
    let keys = bare.as_object_mut().unwrap();
    keys.remove("id2label");
    keys.remove("label2id");
    assert_eq!(from_config(&bare).unwrap().labels(), ["LABEL_0", "LABEL_1"]);
    let given = phalanx_models::Keys::from([("labels", json!(["a"]))]);
    let error = Arch::BERT.model(&given, 50, 8).unwrap_err().to_string();
    assert_eq!(error, "model.labels = [\"a\"]: must have 2 to 4096 names, one for each class");
}
