//! Forks: the sum of layers that read the same input has the sum of their outputs and of their dx, and each has its own gradients.

use std::sync::Arc;

use phalanx_layers::{
    AnyLayer, Call, Context, Fork, Gradient, Linear, Parameter, Parameters, Recompute, Sequence,
};
use phalanx_plan::trace::PhaseName;
use phalanx_tensor::{Category, DType, Device, Shape, Tensor};

use crate::rig::{DRAW, HIDDEN, Numbers, SEQ, kernels, left, linear, norm, numbers};

/// Width within an adapter.
const RANK: usize = 2;

fn base() -> Linear {
    linear("base", HIDDEN, HIDDEN)
}

/// A low-rank adapter (Hu et al., "LoRA", arXiv 2106.09685): two narrow layers.
fn adapter() -> Sequence {
    let narrow = |name, inputs, outputs| Linear { bias: false, ..linear(name, inputs, outputs) };
    Sequence::new(vec![Box::new(narrow("a", HIDDEN, RANK)), Box::new(narrow("b", RANK, HIDDEN))])
}

fn adapted() -> Fork {
    Fork::sum(vec![Box::new(base()), Box::new(adapter())])
}

/// `a + b`, elementwise, of bits.
fn sum(a: &[u32], b: &[u32]) -> Vec<f32> {
    a.iter().zip(b).map(|(a, b)| f32::from_bits(*a) + f32::from_bits(*b)).collect()
}

#[track_caller]
fn near(got: &[u32], expected: &[f32]) {
    // A sum within a product rounds once more or less than one behind it; numbers are of size one.
    let near = |(got, expected): (&u32, &f32)| (f32::from_bits(*got) - expected).abs() <= 1e-5;
    assert!(got.len() == expected.len() && got.iter().zip(expected).all(near));
}

#[test]
fn a_sum_has_the_outputs_of_its_branches_and_each_its_gradients() {
    let [one, other] = [numbers(&base(), 2, None), numbers(&adapter(), 2, None)];
    let Numbers { y, dx, gradients } = numbers(&adapted(), 2, None);
    near(&y, &sum(&one.y, &other.y));
    near(&dx, &sum(&one.dx, &other.dx));
    assert_eq!(gradients, [one.gradients, other.gradients].concat());
}

/// Within a sequence that computes the fork's input again, around a fork, and computed again as a whole.
#[test]
fn compositions_do_not_change_a_bit() {
    let path = || -> Vec<Box<dyn AnyLayer>> { vec![Box::new(norm("ln")), Box::new(adapted())] };
    let plain = numbers(&Fork::residual(Sequence::new(path())), 2, Some(DRAW));
    assert_eq!(numbers(&Fork::residual(Sequence::new(path()).rebuilding()), 2, Some(DRAW)), plain);
    assert_eq!(numbers(&Fork::residual(Recompute(Sequence::new(path()))), 2, Some(DRAW)), plain);
    let twice = Fork::sum(vec![Box::new(Fork::sum(vec![Box::new(base())])), Box::new(adapter())]);
    assert_eq!(numbers(&twice, 2, None), numbers(&adapted(), 2, None));
}

/// Bytes that forward keeps beside its output, and the kernels of backward, if these parameters are trained.
fn work(
    layer: &dyn AnyLayer,
    trained: &dyn Fn(&str) -> bool,
    input_wanted: bool,
) -> (u64, Vec<&'static str>) {
    let device = Device::meta(1);
    let make = |shape: &[usize]| device.alloc(DType::F32, Shape::from(shape), Category::Activations, "test");
    let specs = layer.parameters();
    let values: Vec<Tensor> = specs.iter().map(|spec| make(&spec.shape)).collect();
    let mut gradients: Vec<Tensor> = specs.iter().map(|spec| make(&spec.shape)).collect();
    let mut written = vec![false; specs.len()];
    let slots =
        gradients.iter_mut().zip(&mut written).map(|(slot, flag)| Gradient::new(slot.view_mut(), flag));
    let own: Vec<Parameter> = specs
        .iter()
        .zip(&values)
        .zip(slots)
        .map(|((spec, value), slot)| {
            Parameter::with_gradient(value.view(), trained(&spec.name).then_some(slot))
        })
        .collect();
    let cx = Context::new(&device, DType::F32, [1, SEQ]);
    let call = |x| Call { input_wanted, ..Call::new(Parameters::new(&own), x) };
    let [x, dy] = [(); 2].map(|()| Arc::new(make(&[1, SEQ, HIDDEN])));
    let (y, saved) = device.phase(PhaseName::Forward, || layer.forward(&cx, call(x))).unwrap();
    device.phase(PhaseName::Backward, || layer.backward(&cx, saved, call(dy))).unwrap();
    drop(y);
    let trace = device.take_trace(0);
    let bytes = left(&trace, PhaseName::Forward).iter().map(|(_, bytes)| bytes).sum::<u64>();
    (bytes - (SEQ * HIDDEN * 4) as u64, kernels(&trace, PhaseName::Backward))
}

/// A frozen base saves nothing and has no gradient; where dx is not wanted either, backward runs the adapter alone.
#[test]
fn a_frozen_branch_costs_nothing() {
    let is_adapter = |name: &str| !name.starts_with("base");
    let (saved, backward) = work(&adapted(), &is_adapter, true);
    // The narrow activation; the input is the caller's.
    assert_eq!(saved, (SEQ * RANK * 4) as u64);
    let count = |name: &str| backward.iter().filter(|kernel| **kernel == name).count();
    assert_eq!(["linear_weight_gradient", "linear_input_gradient"].map(count), [2, 3]);
    let (_, backward) = work(&adapted(), &is_adapter, false);
    assert_eq!(backward, ["linear_weight_gradient", "linear_input_gradient", "linear_weight_gradient"]);
    let frozen = |_: &str| false;
    assert_eq!(work(&adapted(), &frozen, false).1.len(), 0);
}
