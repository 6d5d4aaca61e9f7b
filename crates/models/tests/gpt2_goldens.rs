//! GPT-2 against `transformers`: logits, loss and every gradient of a small model, block by block without
//! any engine around it.

mod rig;

use phalanx_models::{Dropouts, Gpt2, Model, from_config};
use phalanx_tensor::DType;
use rig::{Case, compare_gradients, compare_low, compare_low_forward, values};
use serde_json::json;

/// PyTorch's f32 differs from its f64 by at most 1.3e-6 (logits), 7.6e-7 of a tensor's largest gradient;
/// another order of sums may be as far on the other side, and a few additions more: four times that.
const LOGIT_TOLERANCE: f32 = 6e-6;
const GRADIENT_TOLERANCE: f32 = 4e-6;

#[test]
fn logits_and_loss() {
    let (logits, loss) = Case::gpt2(DType::F32).forward();
    let expected = values("forward.safetensors", "logits");
    assert_eq!(logits.len(), expected.len());
    for (i, (got, expected)) in logits.iter().zip(expected).enumerate() {
        assert!((got - expected).abs() < LOGIT_TOLERANCE, "logit {i}: {got} for {expected}");
    }
    let expected = values("forward.safetensors", "loss")[0];
    assert!((loss - expected).abs() < 1e-6);
}

#[test]
fn every_gradient() {
    compare_gradients("forward.safetensors", &Case::gpt2(DType::F32).gradients(), GRADIENT_TOLERANCE);
}

/// The same sums in another order and of other terms: within the same tolerance of PyTorch's.
#[test]
fn every_gradient_on_ranks_that_share_layers() {
    for (ranks, sequence) in [(2, false), (2, true), (4, false), (4, true)] {
        let gradients = Case::gpt2(DType::F32).gradients_over(ranks, sequence);
        compare_gradients("forward.safetensors", &gradients, GRADIENT_TOLERANCE);
        let expected = values("forward.safetensors", "loss")[0];
        assert!((gradients.loss - expected).abs() < 1e-6, "{ranks} ranks, sequence {sequence}");
    }
}

fn forward_in(compute: DType) {
    let file = format!("forward_{}.safetensors", compute.name());
    compare_low_forward(&file, &Case::gpt2(compute).forward());
}

fn gradients_in(compute: DType, loss_scale: f32) {
    let file = format!("forward_{}.safetensors", compute.name());
    for (name, got) in (Case { loss_scale, ..Case::gpt2(compute) }).gradients().by_name {
        compare_low(&file, &format!("grad.{name}"), &got);
    }
}

#[test]
fn logits_and_loss_in_bf16() {
    forward_in(DType::BF16);
}

#[test]
fn logits_and_loss_in_f16() {
    forward_in(DType::F16);
}

#[test]
fn every_gradient_in_bf16() {
    gradients_in(DType::BF16, 1.0);
}

/// With the loss scale that the goldens were made with, and runs begin with.
#[test]
fn every_gradient_in_f16() {
    gradients_in(DType::F16, 65536.0);
}

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
        ("model_type", json!("llama"), "model_type is \"llama\", expected \"gpt2\" or \"bert\""),
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
