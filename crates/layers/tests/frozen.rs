//! Frozen parameters: the gradients of the others, and dx, have the bits that they have when all are trained; nothing is computed
//! or saved for the frozen ones alone.

use std::sync::Arc;

use phalanx_cpu::Cpu;
use phalanx_layers::{AnyLayer, Call, Context, Gradient, Parameter, Parameters, Recompute};
use phalanx_plan::trace::PhaseName;
use phalanx_tensor::{Arena, Category, DType, Device, Shape, Tensor};

use crate::rig::{DRAW, HIDDEN, SEQ, bits_of, filled_as, kernels, left, plain, rebuilding};

/// Which parameters are trained, whether dx is wanted, whether backward runs in two parts.
struct Case<'a> {
    trained: &'a dyn Fn(&str) -> bool,
    input_wanted: bool,
    in_two_parts: bool,
}

#[derive(Debug, PartialEq)]
struct Bits {
    y: Vec<u32>,
    dx: Option<Vec<u32>>,
    /// By parameter, in its order; None for those that nothing has written.
    gradients: Vec<Option<Vec<u32>>>,
}

fn tensor(device: &Device, name: &str, shape: Shape) -> Tensor {
    match device.is_meta() {
        true => device.alloc(DType::F32, shape, Category::Activations, "test"),
        false => filled_as(device, DType::F32, name, 0, shape),
    }
}

/// Runs forward and backward of one sample, each in a phase of its own. Memory is given for gradients of trained parameters alone.
fn run(layer: &dyn AnyLayer, device: &Device, case: &Case) -> Bits {
    let specs = layer.parameters();
    let make = |name: &str, shape: &[usize]| tensor(device, name, Shape::from(shape));
    let values: Vec<Tensor> = specs.iter().map(|spec| make(&spec.name, &spec.shape)).collect();
    let mut gradients: Vec<Option<Tensor>> =
        specs.iter().map(|spec| (case.trained)(&spec.name).then(|| make("before", &spec.shape))).collect();
    let mut written = vec![false; specs.len()];
    let cx = Context { draw: Some(DRAW), ..Context::new(device, DType::F32, [1, SEQ]) };
    let (x, dy) = (Arc::new(make("x", &[1, SEQ, HIDDEN])), Arc::new(make("dy", &[1, SEQ, HIDDEN])));
    let input_wanted = case.input_wanted;
    let (y, dx) = {
        let mut own: Vec<Parameter> = Vec::new();
        for ((value, tensor), flag) in values.iter().zip(&mut gradients).zip(&mut written) {
            let slot = tensor.as_mut().map(|tensor| Gradient::new(tensor.view_mut(), flag));
            own.push(Parameter::with_gradient(value.view(), slot));
        }
        let parameters = Parameters::new(&own);
        let call = |x| Call { input_wanted, ..Call::new(parameters, x) };
        let (y, saved) = device.phase(PhaseName::Forward, || layer.forward(&cx, call(x))).unwrap();
        let dx = device.phase(PhaseName::Backward, || match case.in_two_parts {
            false => layer.backward(&cx, saved, call(dy)).unwrap(),
            true => {
                let (dx, deferred) = layer.backward_input(&cx, saved, call(dy)).unwrap();
                layer.backward_weight(&cx, parameters, deferred).unwrap();
                dx
            }
        });
        (y, dx)
    };
    let bits = |tensor: &Tensor| if device.is_meta() { Vec::new() } else { bits_of(device, tensor) };
    let gradients = gradients.iter().zip(written);
    let gradients =
        gradients.map(|(tensor, written)| tensor.as_ref().filter(|_| written).map(bits)).collect();
    Bits { y: bits(&y), dx: dx.map(|dx| bits(&dx)), gradients }
}

/// Predicate: the parameter of this name is trained.
type IsTrained = fn(&str) -> bool;

const TRAINED: [(&str, IsTrained); 9] = [
    ("all", |_| true),
    ("none", |_| false),
    ("weights", |name| name.ends_with("weight")),
    ("biases", |name| name.ends_with("bias")),
    ("norms", |name| name.starts_with("ln_")),
    ("all but norms", |name| !name.starts_with("ln_")),
    ("the last linear layer", |name| name.starts_with("proj_2")),
    ("the second path", |name| name.starts_with("ln_2") || name.starts_with("c_fc")),
    ("the bias of the first norm", |name| name == "ln_1.bias"),
];

#[test]
fn the_others_have_the_gradients_that_they_have_when_all_are_trained() {
    let device = Device::new(Cpu::new(2), Arena::heap());
    for p in [(0.0, 0.0), (0.2, 0.3)] {
        let layers: [(&str, Box<dyn AnyLayer>); 3] = [
            ("plain", Box::new(plain(p))),
            ("rebuilding", Box::new(rebuilding(p))),
            ("computed again", Box::new(Recompute(plain(p)))),
        ];
        for (kind, layer) in &layers {
            let names: Vec<String> = layer.parameters().into_iter().map(|spec| spec.name).collect();
            let run = |trained: &dyn Fn(&str) -> bool, input_wanted, in_two_parts| {
                run(&**layer, &device, &Case { trained, input_wanted, in_two_parts })
            };
            let all = run(&|_| true, true, false);
            for (what, trained) in TRAINED {
                for (input_wanted, in_two_parts) in
                    [(true, false), (true, true), (false, false), (false, true)]
                {
                    let what =
                        format!("{kind}, {p:?}, {what}, dx {input_wanted}, in two parts {in_two_parts}");
                    if !input_wanted && !names.iter().any(|name| trained(name)) {
                        continue;
                    }
                    let Bits { y, dx, gradients } = run(&trained, input_wanted, in_two_parts);
                    assert_eq!((&y, dx), (&all.y, all.dx.clone().filter(|_| input_wanted)), "{what}");
                    for ((name, own), expected) in names.iter().zip(gradients).zip(&all.gradients) {
                        let expected = expected.clone().filter(|_| trained(name));
                        assert!(own == expected, "{what}: the gradient of {name}");
                    }
                }
            }
        }
    }
}

/// Kernels of backward, and bytes that forward leaves.
fn work(
    layer: &dyn AnyLayer,
    trained: &dyn Fn(&str) -> bool,
    input_wanted: bool,
) -> (Vec<&'static str>, u64) {
    let device = Device::meta(1);
    run(layer, &device, &Case { trained, input_wanted, in_two_parts: false });
    let trace = device.take_trace(0);
    let bytes = left(&trace, PhaseName::Forward).iter().map(|(_, bytes)| bytes).sum();
    (kernels(&trace, PhaseName::Backward), bytes)
}

#[test]
fn nothing_is_computed_or_saved_for_frozen_parameters() {
    let layer = plain((0.0, 0.0));
    let (all, saved) = work(&layer, &|_| true, true);
    let count = |kernels: &[&str], name: &str| kernels.iter().filter(|kernel| **kernel == name).count();
    let weights = count(&all, "linear_weight_gradient");
    assert_eq!(weights, 4);

    let (none, saved_for_dx) = work(&layer, &|_| false, true);
    assert_eq!([count(&none, "linear_weight_gradient"), count(&none, "bias_gradient")], [0, 0]);
    assert_eq!(count(&none, "linear_input_gradient"), 4);
    // The inputs of three linear layers: the outputs of both norms, and of GELU. That of the fourth is attention's own.
    let row = (SEQ * HIDDEN * 4) as u64;
    assert_eq!(saved - saved_for_dx, row + row + 4 * row);

    let (last, saved_for_last) = work(&layer, &|name| name.starts_with("proj_2"), false);
    assert_eq!(last, ["bias_gradient", "linear_weight_gradient"]);
    // The input of that layer, and the block's output.
    assert_eq!(saved_for_last, 4 * row + row);
}
