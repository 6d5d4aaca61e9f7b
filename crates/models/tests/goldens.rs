//! Each model against `transformers`: logits, loss and every gradient of a small one, block by block without any
//! engine around it.

use crate::rig::{Case, compare_gradients, compare_low, compare_low_forward, names_and_shapes, values};
use phalanx_layers::Checkpointing;
use phalanx_tensor::DType;

/// The reference of a model. PyTorch's f32 differs from its f64 by at most these errors; another order of sums may
/// differ as much in the other direction, plus a few additions, so tolerances are four times that.
struct Golden {
    case: fn(DType) -> Case,
    /// Path in `golden/`, without the suffix for the element type.
    files: &'static str,
    logits: f32,
    loss: f32,
    /// Tolerance of gradients, relative to the largest element of the tensor.
    gradients: f32,
}

/// With other activations than the two families have: only in f32.
const ACTIVATIONS: [Golden; 2] = [
    // 1.2e-6, 3.7e-7, 1.2e-6.
    Golden {
        case: |_| Case::gpt2_with("gelu"),
        files: "forward_gelu",
        logits: 6e-6,
        loss: 1.5e-6,
        gradients: 5e-6,
    },
    // 1.5e-6, 2.4e-7 (the rounding of the loss), 7.6e-7.
    Golden {
        case: |_| Case::gpt2_with("gelu_pytorch_tanh"),
        files: "forward_gelu_pytorch_tanh",
        logits: 6e-6,
        loss: 1e-6,
        gradients: 4e-6,
    },
];

const GOLDENS: [Golden; 2] = [
    // 1.3e-6 (logits), 2.4e-7 (the rounding of a loss of 4.27; its difference is 1.2e-7), 7.6e-7 (gradients).
    Golden { case: Case::gpt2, files: "forward", logits: 6e-6, loss: 1e-6, gradients: 4e-6 },
    // 1.2e-6 (of logits of 2.7 at most), 3.3e-7, 5.9e-7.
    Golden { case: Case::bert, files: "bert/forward", logits: 5e-6, loss: 1.3e-6, gradients: 2.4e-6 },
];

impl Golden {
    fn file(&self) -> String {
        format!("{}.safetensors", self.files)
    }

    fn file_in(&self, compute: DType) -> String {
        format!("{}_{}.safetensors", self.files, compute.name())
    }
}

#[test]
fn logits_and_loss() {
    for golden in GOLDENS.into_iter().chain(ACTIVATIONS) {
        let file = golden.file();
        let (logits, loss) = (golden.case)(DType::F32).forward();
        let expected = values(&file, "logits");
        assert_eq!(logits.len(), expected.len());
        for (i, (got, expected)) in logits.iter().zip(expected).enumerate() {
            assert!((got - expected).abs() < golden.logits, "{file}, logit {i}: {got} for {expected}");
        }
        let expected = values(&file, "loss")[0];
        assert!((loss - expected).abs() < golden.loss, "{file}: {loss} for {expected}");
    }
}

#[test]
fn every_gradient() {
    for golden in GOLDENS.into_iter().chain(ACTIVATIONS) {
        compare_gradients(&golden.file(), &(golden.case)(DType::F32).gradients(), golden.gradients);
    }
}

/// The same sums in another order and with other terms, within the same tolerance.
#[test]
fn every_gradient_on_ranks_that_share_layers() {
    for golden in GOLDENS {
        let file = golden.file();
        for (ranks, sequence) in [(2, false), (2, true), (4, false), (4, true)] {
            let gradients = (golden.case)(DType::F32).gradients_over(ranks, sequence);
            compare_gradients(&file, &gradients, golden.gradients);
            let off = (gradients.loss - values(&file, "loss")[0]).abs();
            assert!(off < golden.loss, "{file}, {ranks} ranks, sequence {sequence}: off by {off}");
        }
    }
}

fn forward_in(compute: DType) {
    for golden in GOLDENS {
        compare_low_forward(&golden.file_in(compute), &(golden.case)(compute).forward());
    }
}

fn gradients_in(compute: DType, loss_scale: f32) {
    for golden in GOLDENS {
        for (name, got) in (Case { loss_scale, ..(golden.case)(compute) }).gradients().by_name {
            compare_low(&golden.file_in(compute), &format!("grad.{name}"), &got);
        }
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

/// The decoders, one for each variant of a family. Their files have double precision, and how far PyTorch's f32 is from it: the bound
/// is four times that, as above, and of gradients four times the greatest.
const DECODERS: [&str; 15] = [
    "decoders/llama",
    "decoders/llama_tied_llama3",
    "decoders/llama_biases_linear",
    "decoders/llama_yarn",
    "decoders/llama_gelu",
    "decoders/mistral",
    "decoders/qwen2",
    "decoders/qwen2_window",
    "decoders/qwen3",
    "decoders/smollm3",
    "decoders/olmo2",
    "decoders/gemma3_text",
    "decoders/ministral",
    "decoders/phi3",
    "decoders/phi3_longrope",
];

/// Greatest error of PyTorch's f32 under a prefix, relative to the greatest value of the tensor, but at least the rounding of one.
fn error_of(file: &str, prefix: &str) -> f32 {
    let names = names_and_shapes(file).into_iter().map(|(name, _)| name);
    let errors = names.filter(|name| name.starts_with(&format!("error.{prefix}")));
    errors.map(|name| values(file, &name)[0]).fold(f32::EPSILON, f32::max)
}

#[test]
fn decoders_of_every_variant() {
    for folder in DECODERS {
        let file = format!("{folder}/forward.safetensors");
        let case = Case::decoder(folder, DType::F32);
        let (logits, loss) = case.forward();
        for (name, got) in [("logits", logits), ("loss", vec![loss])] {
            let expected = values(&file, name);
            let greatest = expected.iter().fold(0.0f32, |max, value| max.max(value.abs()));
            let bound = 4.0 * error_of(&file, name) * greatest;
            assert_eq!(got.len(), expected.len(), "{file}: {name}");
            for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
                assert!(
                    (got - expected).abs() <= bound,
                    "{file}, {name} {i}: {got} for {expected}, within {bound}"
                );
            }
        }
        compare_gradients(&file, &case.gradients(), 4.0 * error_of(&file, "grad."));
    }
}

/// Each head of keys and values lies on two of 4 ranks, or on all four.
#[test]
fn decoders_on_ranks_that_share_layers() {
    for folder in DECODERS {
        let file = format!("{folder}/forward.safetensors");
        for (ranks, sequence) in [(2, true), (4, false)] {
            let gradients = Case::decoder(folder, DType::F32).gradients_over(ranks, sequence);
            compare_gradients(&file, &gradients, 4.0 * error_of(&file, "grad."));
        }
    }
}

#[test]
fn decoders_in_16_bits() {
    for folder in DECODERS {
        for (compute, name, loss_scale) in [(DType::BF16, "bf16", 1.0), (DType::F16, "f16", 65536.0)] {
            let file = format!("{folder}/forward_{name}.safetensors");
            let case = Case { loss_scale, ..Case::decoder(folder, compute) };
            compare_low_forward(&file, &case.forward());
            for (name, got) in case.gradients().by_name {
                compare_low(&file, &format!("grad.{name}"), &got);
            }
        }
    }
}

#[test]
fn decoders_checkpointed_or_with_backward_in_two_parts_have_the_same_bits() {
    for folder in DECODERS {
        let case = Case::decoder(folder, DType::F32);
        let bits = |case: &Case| {
            let by_name = case.gradients().by_name.into_iter();
            by_name
                .map(|(name, values)| (name, values.into_iter().map(f32::to_bits).collect::<Vec<_>>()))
                .collect::<Vec<_>>()
        };
        let plain = bits(&case);
        for checkpointing in [Checkpointing::Selective, Checkpointing::Blocks { every: 1 }] {
            assert!(bits(&Case { checkpointing, ..case.clone() }) == plain, "{folder}: {checkpointing:?}");
        }
        assert!(bits(&Case { split: true, ..case }) == plain, "{folder}: in two parts");
    }
}
