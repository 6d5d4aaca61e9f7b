//! A small ConvNet: its loss against a reference in f64, its gradients against the differences of that, and what it keeps.

use std::sync::Arc;

use phalanx_cpu::Cpu;
use phalanx_layers::{
    AnyLayer, Call, Context, Conv2d, Flatten, Head, Init, Inputs, LinearCrossEntropy, MaxPool2d, Parameter,
    ParameterSpec, Parameters, Relu, Sequence, TARGETS,
};
use phalanx_plan::trace::PhaseName;
use phalanx_tensor::{Arena, Category, CrossEntropy, DType, Device, Patches, Shape, Tensor};

use crate::differences::gradient;
use crate::rig::{HIDDEN, SEQ, kernels, left, trace};

const BATCH: usize = 3;
const IMAGE: [usize; 2] = [6, 5];
const CHANNELS: [usize; 2] = [2, 3];
const CLASSES: usize = 4;
const TARGET: [usize; BATCH] = [1, 3, 0];
/// A row of the image is left over.
const POOLED: [usize; 2] = [3, 2];
const FEATURES: usize = POOLED[0] * POOLED[1] * CHANNELS[1];

fn layers() -> (Sequence, LinearCrossEntropy) {
    let pool = MaxPool2d { patches: Patches::square(IMAGE, 2, 2, 0) };
    let layers: Vec<Box<dyn AnyLayer>> = vec![
        Box::new(Conv2d::new("conv", Patches::square(IMAGE, 3, 1, 1), CHANNELS)),
        Box::new(Relu),
        Box::new(pool),
        Box::new(Flatten { pixels: pool.patches.count() }),
    ];
    let (weight, bias) = ("classes.weight".into(), Some("classes.bias".into()));
    let init = Init::Normal(0.5);
    (
        Sequence::new(layers),
        LinearCrossEntropy { weight, bias, vocab: CLASSES, added: 0, hidden: FEATURES, init },
    )
}

/// The mean loss, by definition; x, then the parameters.
fn reference(sizes: &[usize], numbers: &[f64]) -> f64 {
    let mut rest = numbers;
    let all: Vec<&[f64]> =
        sizes.iter().map(|size| rest.split_off(..*size).expect("one range each")).collect();
    let [x, w, b, classes, class_bias] = all[..] else { panic!("x and four parameters") };
    let [inputs, outputs] = CHANNELS;
    let convolved = |sample: usize, row: usize, column: usize, out: usize| {
        let mut sum = b[out];
        for (c, i, j) in (0..inputs * 9).map(|at| (at / 9, at % 9 / 3, at % 3)) {
            let (y, z) = (row + i, column + j);
            if (1..=IMAGE[0]).contains(&y) && (1..=IMAGE[1]).contains(&z) {
                let pixel = (sample * IMAGE[0] + y - 1) * IMAGE[1] + z - 1;
                sum += w[((out * inputs + c) * 3 + i) * 3 + j] * x[pixel * inputs + c];
            }
        }
        sum.max(0.0)
    };
    let loss = |sample: usize| {
        let feature = |at: usize| {
            let (pixel, out) = (at / outputs, at % outputs);
            let (row, column) = (pixel / POOLED[1] * 2, pixel % POOLED[1] * 2);
            let four = [(0, 0), (0, 1), (1, 0), (1, 1)];
            four.map(|(i, j)| convolved(sample, row + i, column + j, out)).into_iter().fold(0.0, f64::max)
        };
        let features: Vec<f64> = (0..FEATURES).map(feature).collect();
        let logit = |class: usize| {
            let row = &classes[class * FEATURES..][..FEATURES];
            class_bias[class] + row.iter().zip(&features).map(|(w, x)| w * x).sum::<f64>()
        };
        let sum: f64 = (0..CLASSES).map(|class| logit(class).exp()).sum();
        sum.ln() - logit(TARGET[sample])
    };
    (0..BATCH).map(loss).sum::<f64>() / BATCH as f64
}

fn download(device: &Device, tensor: &Tensor) -> Vec<f64> {
    let mut values = vec![0f32; tensor.shape().elements()];
    device.download(tensor.view(), &mut values).unwrap();
    values.into_iter().map(f64::from).collect()
}

#[test]
fn the_loss_and_every_gradient_are_those_of_the_definition() {
    let ((network, head), device) = (layers(), Device::new(Cpu::new(2), Arena::heap()));
    let upload = |shape: &[usize], name: &str| {
        let mut tensor = device.alloc(DType::F32, Shape::from(shape), Category::Activations, "test");
        let mut values = vec![0f32; tensor.shape().elements()];
        Init::Normal(0.7).fill(5, name, 0, &mut values);
        device.upload(&values, tensor.view_mut());
        tensor
    };
    let [of_network, of_head] = [AnyLayer::parameters(&network), head.parameters()];
    let fill = |spec: &ParameterSpec| upload(&spec.shape, &spec.name);
    let parameters: Vec<Tensor> = of_network.iter().chain(&of_head).map(fill).collect();
    let mut gradients: Vec<Tensor> = of_network.iter().chain(&of_head).map(fill).collect();
    let mut ids = device.alloc(DType::U32, [BATCH, 1], Category::Activations, "test");
    device.upload(&TARGET.map(|target| target as u32), ids.view_mut());
    let inputs = Inputs::only(TARGETS, Arc::new(ids));
    let cx = Context::new(&device, DType::F32, [BATCH, 1]).with(&inputs);
    let x = Arc::new(upload(&[BATCH, IMAGE[0] * IMAGE[1], CHANNELS[0]], "x"));
    let mut written = [false; 4];
    let (loss, dx) = {
        let own = Parameter::with_gradients(&parameters, &mut gradients, &mut written);
        let (own, of_head) = Parameters::new(&own).split_at(of_network.len());
        let (y, saved) = AnyLayer::forward(&network, &cx, Call::new(own, Arc::clone(&x))).unwrap();
        let numbers = CrossEntropy::scaled(1.0 / BATCH as f32);
        let (loss, dy) = head.loss(&cx, Call::new(of_head, y), numbers).unwrap();
        (loss, AnyLayer::backward(&network, &cx, saved, Call::new(own, dy.unwrap())).unwrap().unwrap())
    };
    let numbers: Vec<Vec<f64>> =
        std::iter::once(&*x).chain(&parameters).map(|of| download(&device, of)).collect();
    let sizes: Vec<usize> = numbers.iter().map(Vec::len).collect();
    let expected = gradient(&numbers.concat(), |numbers| reference(&sizes, numbers));
    let found: Vec<f64> =
        std::iter::once(&*dx).chain(&gradients).flat_map(|of| download(&device, of)).collect();
    // Sums of at most 90 terms (pixels of a batch) in f32, behind sums of 18 and of as many features, of numbers of about 1: 200 roundings.
    let tolerance = 200.0 * f64::from(f32::EPSILON);
    let (loss, exact) = (download(&device, &loss)[0], reference(&sizes, &numbers.concat()));
    assert!((loss - exact).abs() < tolerance * exact, "{loss}, not {exact}");
    let largest = expected.iter().fold(0f64, |a, b| a.max(b.abs()));
    for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
        assert!((found - expected).abs() < tolerance * largest, "{i}: {found}, not {expected} of {largest}");
    }
    assert_eq!(found.len(), expected.len());
}

/// ReLU is computed in place, pooling keeps no indices, and rows of patches are made again.
#[test]
fn only_the_output_of_relu_is_kept() {
    let patches = Patches { image: [1, SEQ], kernel: [1, 3], stride: [1, 1], padding: [0, 1] };
    let layer = Sequence::new(vec![
        Box::new(Conv2d::new("conv", patches, [HIDDEN, 2 * HIDDEN])),
        Box::new(Relu),
        Box::new(MaxPool2d { patches }),
        Box::new(Conv2d::new("last", patches, [2 * HIDDEN, HIDDEN])),
    ]);
    let trace = trace(&layer, None);
    let bytes = (4 * SEQ * HIDDEN) as u64;
    // The output of the last convolution is the caller's.
    let kept = [("conv2d.y", bytes), ("conv2d.y", 2 * bytes), ("max_pool.y", 2 * bytes)];
    assert_eq!(left(&trace, PhaseName::Forward), kept);
    let forward = kernels(&trace, PhaseName::Forward);
    assert_eq!(forward, ["unfold", "linear", "relu", "max_pool", "unfold", "linear"]);
    let conv = ["bias_gradient", "unfold", "linear_weight_gradient", "linear_input_gradient", "fold"];
    let backward = [&conv[..], &["max_pool_backward", "relu_backward"], &conv].concat();
    assert_eq!(kernels(&trace, PhaseName::Backward), backward);
}
