//! GPT-2 against `transformers`: logits, loss and every gradient of a small model, block by block without
//! any engine around it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use half::{bf16, f16};
use phalanx_layers::{Context, Gradient, Network};
use phalanx_models::{Dropouts, Gpt2};
use phalanx_tensor::{Arena, Category, Cpu, CrossEntropy, DType, Device, Shape, Tensor, View, ViewMut};
use safetensors::SafeTensors;

/// Positions of the batch: 4 sequences of 16 tokens.
const ROWS: usize = 64;

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

/// Rounded to the type of `to`.
fn upload(device: &Device, values: &[f32], to: ViewMut) {
    match to.dtype() {
        DType::BF16 => device.upload(&values.iter().map(|v| bf16::from_f32(*v)).collect::<Vec<_>>(), to),
        DType::F16 => device.upload(&values.iter().map(|v| f16::from_f32(*v)).collect::<Vec<_>>(), to),
        _ => device.upload(values, to),
    }
}

fn download(device: &Device, from: View) -> Vec<f32> {
    fn numbers<T: phalanx_tensor::buffer::Element + Default + Into<f32>>(
        device: &Device,
        from: View,
    ) -> Vec<f32> {
        let mut out = vec![T::default(); from.elements()];
        device.download(from, &mut out);
        out.into_iter().map(Into::into).collect()
    }
    match from.dtype() {
        DType::BF16 => numbers::<bf16>(device, from),
        DType::F16 => numbers::<f16>(device, from),
        _ => numbers::<f32>(device, from),
    }
}

struct Loaded {
    device: Device,
    network: Network,
    parameters: Vec<Tensor>,
    tokens: Arc<Tensor>,
    targets: Tensor,
}

/// The golden model on a heap arena, its parameters rounded to `compute`, and its batch.
fn load(compute: DType) -> Loaded {
    let config = std::fs::read(golden().join("gpt2/config.json")).unwrap();
    let model = Gpt2::from_config(&serde_json::from_slice(&config).unwrap()).unwrap();
    let device = Device::new(Cpu::new(2), Arena::heap());
    let network = model.network();
    let tensor = |spec: &phalanx_layers::ParameterSpec| {
        let shape = Shape::from(spec.shape.as_slice());
        let mut tensor = device.alloc(compute, shape, Category::Parameters, "test");
        upload(&device, &values("gpt2/model.safetensors", &spec.name), tensor.view_mut());
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

/// Logits of all positions, and the mean loss.
fn forward(compute: DType) -> (Vec<f32>, f32) {
    let l = load(compute);
    let cx = Context { device: &l.device, compute, keep: false, draw: None };
    let mut x = Arc::clone(&l.tokens);
    for (i, block) in l.network.blocks.iter().enumerate() {
        (x, _) = block.layer.forward(&cx, &views(&l, i), x, None);
    }
    let head = views(&l, l.network.head_index());
    let logits = l.network.head.logits(&cx, &head, x.view().reshape([ROWS, 32]));
    let logits = download(&l.device, logits.view());
    let loss = l.network.head.loss(&cx, &head, x, &l.targets, CrossEntropy::scaled(1.0 / ROWS as f32));
    (logits, l.device.fetch(loss.view()))
}

/// f32 gradients of all parameters, by name; derivatives are multiplied by `loss_scale` on their way.
fn gradients(compute: DType, loss_scale: f32) -> Vec<(String, Vec<f32>)> {
    let l = load(compute);
    let cx = Context { device: &l.device, compute, keep: true, draw: None };
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
    let mean = CrossEntropy::scaled(1.0 / ROWS as f32);
    let numbers = CrossEntropy { gradient_scale: mean.scale * loss_scale, ..mean };
    let (_, mut dy) =
        l.network.head.loss_and_gradient(&cx, &views(&l, head), &mut slots, x, &l.targets, numbers);
    for (i, block) in l.network.blocks.iter().enumerate().rev() {
        let mut slots = self::slots(&mut gradients, &mut written, &l.network.uses[i]);
        let dx = block.layer.backward(&cx, &views(&l, i), &mut slots, saved.pop().unwrap(), dy, None);
        let Some(dx) = dx else { break };
        dy = dx;
    }
    let read = |g: &Tensor| download(&l.device, g.view()).into_iter().map(|g| g / loss_scale).collect();
    l.network.parameters.iter().zip(&gradients).map(|(spec, g)| (spec.name.clone(), read(g))).collect()
}

/// PyTorch's f32 differs from its f64 by at most 1.3e-6 (logits), 7.6e-7 of a tensor's largest gradient;
/// another order of sums may be as far on the other side, and a few additions more: four times that.
const LOGIT_TOLERANCE: f32 = 6e-6;
const GRADIENT_TOLERANCE: f32 = 4e-6;

#[test]
fn logits_and_loss() {
    let (logits, loss) = forward(DType::F32);
    for (i, (got, expected)) in logits.iter().zip(values("forward.safetensors", "logits")).enumerate() {
        assert!((got - expected).abs() < LOGIT_TOLERANCE, "logit {i}: {got} for {expected}");
    }
    let expected = values("forward.safetensors", "loss")[0];
    assert!((loss - expected).abs() < 1e-6);
}

#[test]
fn every_gradient() {
    for (name, got) in gradients(DType::F32, 1.0) {
        let expected = values("forward.safetensors", &format!("grad.{name}"));
        let largest = expected.iter().fold(0f32, |m, v| m.max(v.abs()));
        for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
            let tolerance = GRADIENT_TOLERANCE * largest;
            assert!((got - expected).abs() <= tolerance, "{name}[{i}]: {got} for {expected}");
        }
    }
}

/// The files of 16 bits hold what PyTorch gives in f64 with rounded parameters, and how far PyTorch is that
/// computes in the type: by tensor, the greatest error and the root mean square, each the worse of two runs.
/// Here activations are rounded at about as many places, but elsewhere: errors of the same distribution, drawn
/// anew. The smallest tensors have 32 elements; of 32 normal errors the greatest is twice the greatest of two
/// such runs once in two thousand times.
const TIMES_PYTORCH: f32 = 2.0;

/// Within [`TIMES_PYTORCH`] of PyTorch's errors, by the greatest and by the root mean square.
fn compare_low(file: &str, name: &str, got: &[f32]) {
    let (expected, error) = (values(file, name), values(file, &format!("error.{name}")));
    assert_eq!(got.len(), expected.len(), "{name}");
    let off: Vec<f32> = got.iter().zip(&expected).map(|(g, e)| g - e).collect();
    let largest = |x: &[f32]| x.iter().fold(0f32, |m, v| m.max(v.abs()));
    let figures = [largest(&off) / largest(&expected), root_mean_square(&off) / root_mean_square(&expected)];
    for (what, figure, error) in [("greatest", figures[0], error[0]), ("mean", figures[1], error[1])] {
        println!("{file} {name}: {what} error {figure:.1e}, PyTorch's {error:.1e}");
        // Also where it is not a number.
        assert!(figure <= TIMES_PYTORCH * error, "{file} {name}: {what} error {figure}, PyTorch's {error}");
    }
}

fn root_mean_square(x: &[f32]) -> f32 {
    (x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / x.len() as f64).sqrt() as f32
}

fn forward_in(compute: DType) {
    let file = format!("forward_{}.safetensors", compute.name());
    let (logits, loss) = forward(compute);
    compare_low(&file, "logits", &logits);
    // A row's loss is the difference of a log-sum-exp and a logit, each off by about as much as a logit; the
    // mean is not off by more than that, were all of one sign.
    let logit_error = values(&file, "error.logits")[1] * root_mean_square(&values(&file, "logits"));
    let expected = values(&file, "loss")[0];
    assert!((loss - expected).abs() <= TIMES_PYTORCH * logit_error, "loss {loss} for {expected}");
}

fn gradients_in(compute: DType, loss_scale: f32) {
    let file = format!("forward_{}.safetensors", compute.name());
    for (name, got) in gradients(compute, loss_scale) {
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
