//! GPT-2 against `transformers`: logits, loss and every gradient of a small model, block by block without
//! any engine around it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use phalanx_layers::{Context, Gradient, Network};
use phalanx_models::{Dropouts, Gpt2};
use phalanx_tensor::{Arena, Category, Cpu, CrossEntropy, DType, Device, Shape, Tensor, View};
use safetensors::SafeTensors;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

fn values(file: &str, name: &str) -> Vec<f32> {
    let bytes = std::fs::read(golden().join(file)).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let data = tensors.tensor(name).unwrap();
    data.data().chunks(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

fn ids(name: &str) -> Vec<u32> {
    values("forward.safetensors", name).iter().map(|v| v.to_bits()).collect()
}

struct Loaded {
    device: Device,
    network: Network,
    parameters: Vec<Tensor>,
    tokens: Arc<Tensor>,
    targets: Tensor,
}

/// The golden model on a heap arena, and its batch: 4 sequences of 16 tokens.
fn load() -> Loaded {
    let config = std::fs::read(golden().join("gpt2/config.json")).unwrap();
    let model = Gpt2::from_config(&serde_json::from_slice(&config).unwrap()).unwrap();
    let device = Device::new(Cpu::new(2), Arena::heap());
    let network = model.network();
    let tensor = |spec: &phalanx_layers::ParameterSpec| {
        let shape = Shape::from(spec.shape.as_slice());
        let mut tensor = device.alloc(DType::F32, shape, Category::Parameters, "test");
        device.upload(&values("gpt2/model.safetensors", &spec.name), tensor.view_mut());
        tensor
    };
    let parameters = network.parameters.iter().map(tensor).collect();
    let sequences = ids("tokens");
    let cut = |from: usize| {
        let part: Vec<u32> = sequences.chunks(17).flat_map(|s| s[from..from + 16].to_vec()).collect();
        let mut tensor = device.alloc(DType::U32, [4, 16], Category::Activations, "test");
        device.upload(&part, tensor.view_mut());
        tensor
    };
    let (tokens, targets) = (Arc::new(cut(0)), cut(1));
    Loaded { network, parameters, tokens, targets, device }
}

fn views<'a>(l: &'a Loaded, block: usize) -> Vec<View<'a>> {
    l.network.uses[block].iter().map(|p| l.parameters[*p].view()).collect()
}

/// PyTorch's f32 differs from its f64 by at most 1.3e-6 (logits), 7.6e-7 of a tensor's largest gradient;
/// another order of sums may be as far on the other side, and a few additions more: four times that.
const LOGIT_TOLERANCE: f32 = 6e-6;
const GRADIENT_TOLERANCE: f32 = 4e-6;

#[test]
fn logits_and_loss() {
    let l = load();
    let cx = Context { device: &l.device, compute: DType::F32, keep: false, draw: None };
    let mut x = Arc::clone(&l.tokens);
    for (i, block) in l.network.blocks.iter().enumerate() {
        (x, _) = block.layer.forward(&cx, &views(&l, i), x, None);
    }
    let head = views(&l, l.network.head_index());
    let rows = x.view().reshape([64, 32]);
    let logits = l.network.head.logits(&cx, &head, rows);
    let mut got = vec![0f32; 64 * 67];
    l.device.download(logits.view(), &mut got);
    for (i, (got, expected)) in got.iter().zip(values("forward.safetensors", "logits")).enumerate() {
        assert!((got - expected).abs() < LOGIT_TOLERANCE, "logit {i}: {got} for {expected}");
    }
    let loss = l.network.head.loss(&cx, &head, x, &l.targets, CrossEntropy::scaled(1.0 / 64.0));
    let expected = values("forward.safetensors", "loss")[0];
    assert!((l.device.fetch(loss.view()) - expected).abs() < 1e-6);
}

#[test]
fn every_gradient() {
    let l = load();
    let cx = Context { device: &l.device, compute: DType::F32, keep: true, draw: None };
    let like = |p: &Tensor| l.device.alloc(DType::F32, p.shape(), Category::Gradients, "test");
    let mut gradients: Vec<Tensor> = l.parameters.iter().map(like).collect();
    // What was there before must be overwritten, not added to.
    gradients.iter_mut().for_each(|g| l.device.fill(g.view_mut(), 1e30));
    let mut written = vec![false; gradients.len()];

    let mut x = Arc::clone(&l.tokens);
    let mut saved = Vec::new();
    for (i, block) in l.network.blocks.iter().enumerate() {
        let (y, kept) = block.layer.forward(&cx, &views(&l, i), x, None);
        x = y;
        saved.push(kept);
    }
    let head = l.network.head_index();
    let mut slots = slots(&mut gradients, &mut written, &l.network.uses[head]);
    let (_, mut dy) = l.network.head.loss_and_gradient(
        &cx,
        &views(&l, head),
        &mut slots,
        x,
        &l.targets,
        CrossEntropy::scaled(1.0 / 64.0),
    );
    for (i, block) in l.network.blocks.iter().enumerate().rev() {
        let mut slots = self::slots(&mut gradients, &mut written, &l.network.uses[i]);
        let dx = block.layer.backward(&cx, &views(&l, i), &mut slots, saved.pop().unwrap(), dy, None);
        let Some(dx) = dx else { break };
        dy = dx;
    }

    for (spec, gradient) in l.network.parameters.iter().zip(&gradients) {
        let expected = values("forward.safetensors", &format!("grad.{}", spec.name));
        let mut got = vec![0f32; expected.len()];
        l.device.download(gradient.view(), &mut got);
        let largest = expected.iter().fold(0f32, |m, v| m.max(v.abs()));
        for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
            let tolerance = GRADIENT_TOLERANCE * largest;
            assert!((got - expected).abs() <= tolerance, "{}[{i}]: {got} for {expected}", spec.name);
        }
    }
}

/// Gradient slots of a block, in its order.
fn slots<'a>(gradients: &'a mut [Tensor], written: &'a mut [bool], uses: &[usize]) -> Vec<Gradient<'a>> {
    let mut all: Vec<_> = gradients.iter_mut().zip(written).map(Some).collect();
    let take = |p: &usize| {
        let (tensor, flag) = all[*p].take().unwrap();
        Gradient::new(tensor.view_mut(), flag)
    };
    uses.iter().map(take).collect()
}

#[test]
fn configurations_go_both_ways_and_foreign_ones_are_refused() {
    let dropout = Dropouts { embedding: 0.1, attention: 0.2, residual: 0.3 };
    let model = Gpt2 { layers: 2, hidden: 8, heads: 2, vocab: 11, positions: 4, eps: 1e-5, dropout };
    let config = model.to_config();
    assert_eq!(Gpt2::from_config(&config).unwrap(), model);
    for (key, p) in [("embd_pdrop", 0.1), ("attn_pdrop", 0.2), ("resid_pdrop", 0.3)] {
        assert_eq!(config[key], serde_json::json!(p), "the decimal that was given");
    }
    for (key, value, part) in [
        ("model_type", serde_json::json!("llama"), "model_type is \"llama\""),
        ("n_head", serde_json::json!(3), "n_head is 3"),
        ("n_inner", serde_json::json!(100), "n_inner is 100"),
        ("activation_function", serde_json::json!("relu"), "activation_function"),
        ("n_layer", serde_json::json!(null), "n_layer is null"),
        ("attn_pdrop", serde_json::json!(1.5), "attn_pdrop is 1.5"),
    ] {
        let mut changed = config.clone();
        changed[key] = value;
        let error = Gpt2::from_config(&changed).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}
