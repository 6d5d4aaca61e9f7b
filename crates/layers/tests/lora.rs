//! Adapters: what they add and its derivatives, for results that one product computes and alone; what a frozen layer with adapters saves;
//! and the layers that have none.

use std::sync::Arc;

use phalanx_cpu::Cpu;
use phalanx_layers::lora::adapted_by;
use phalanx_layers::{
    Adapt, AdapterInit, AnyLayer, Call, Context, Draw, Gradient, Init, Linear, LinearGelu, Lora, Output,
    Parameter, ParameterSpec, Parameters, Recompute, Sequence,
};
use phalanx_plan::trace::PhaseName;
use phalanx_tensor::{Arena, Category, DType, Device, Gelu, Layout, Shape, Tensor};

use crate::rig::{DRAW, HIDDEN, SEQ, bits_of, filled_as, kernels, left, linear, norm};

const RANK: usize = 2;

fn lora(dropout: f32, targets: &'static [&'static str]) -> Lora {
    of_kind((dropout, false), targets)
}

/// Adapters with this dropout, and with magnitudes or not.
fn of_kind((dropout, magnitudes): (f32, bool), targets: &'static [&'static str]) -> Lora {
    let targets = Arc::new(|name: &str| targets.contains(&name));
    Lora { width: RANK, scale: 0.75, dropout, init: AdapterInit::Uniform, magnitudes, added: 0, targets }
}

fn joined(bias: bool) -> Linear {
    let results = [("q", HIDDEN), ("k", 3), ("v", 2 * HIDDEN)].map(|(name, width)| Output::new(name, width));
    Linear { bias, ..Linear::new(results, HIDDEN, Init::Normal(0.3)) }
}

/// The layers under test, with their names: all results of one product, some of them, one alone in both layouts, one with GELU behind it.
fn layers(kind: (f32, bool)) -> Vec<(&'static str, Box<dyn AnyLayer>)> {
    let single = |layout| Linear { layout, ..linear("o", HIDDEN, 2 * HIDDEN) };
    let gelu = LinearGelu { linear: single(Layout::InOut), gelu: Gelu::Tanh };
    let of = |names| of_kind(kind, names);
    vec![
        ("q, k, v", joined(true).adapted(&of(&["q", "k", "v"]), None)),
        ("q and v of three", joined(false).adapted(&of(&["q", "v"]), None)),
        ("[in, out]", single(Layout::InOut).adapted(&of(&["o"]), None)),
        ("[out, in]", single(Layout::OutIn).adapted(&of(&["o"]), None)),
        ("with GELU", gelu.adapted(&of(&["o"]), None)),
    ]
}

struct Run {
    y: Vec<f32>,
    dx: Option<Vec<f32>>,
    /// By parameter; None for frozen ones.
    gradients: Vec<Option<Vec<f32>>>,
}

/// Runs forward and backward of two samples with these numbers of x and all parameters, each in a phase of its own.
fn run(
    layer: &dyn AnyLayer,
    device: &Device,
    (x, values): (&Tensor, &[Tensor]),
    trained: &dyn Fn(&str) -> bool,
    (in_two_parts, draw): (bool, Option<Draw>),
) -> Run {
    let specs = layer.parameters();
    let make = |shape: &[usize], category| device.alloc(DType::F32, Shape::from(shape), category, "test");
    let mut gradients: Vec<Tensor> =
        specs.iter().map(|spec| make(&spec.shape, Category::Gradients)).collect();
    let mut written = vec![false; specs.len()];
    let cx = Context { draw, ..Context::new(device, DType::F32, [2, SEQ]) };
    let copy = |from: &Tensor| {
        let mut copy = make(from.shape().as_slice(), Category::Activations);
        device.copy(from.view(), copy.view_mut());
        Arc::new(copy)
    };
    let (y, dx) = {
        let slots =
            gradients.iter_mut().zip(&mut written).map(|(slot, flag)| Gradient::new(slot.view_mut(), flag));
        let own: Vec<Parameter> = specs
            .iter()
            .zip(values)
            .zip(slots)
            .map(|((spec, value), slot)| {
                Parameter::with_gradient(value.view(), trained(&spec.name).then_some(slot))
            })
            .collect();
        let parameters = Parameters::new(&own);
        let input = copy(x);
        let (y, saved) =
            device.phase(PhaseName::Forward, || layer.forward(&cx, Call::new(parameters, input))).unwrap();
        let dy = match device.is_meta() {
            true => Arc::new(make(y.shape().as_slice(), Category::Activations)),
            false => Arc::new(filled_as(device, DType::F32, "dy", 0, y.shape())),
        };
        let dx = device.phase(PhaseName::Backward, || match in_two_parts {
            false => layer.backward(&cx, saved, Call::new(parameters, dy)).unwrap(),
            true => {
                let (dx, later) = layer.backward_input(&cx, saved, Call::new(parameters, dy)).unwrap();
                layer.backward_weight(&cx, parameters, later).unwrap();
                dx
            }
        });
        (y, dx)
    };
    let floats = |tensor: &Tensor| -> Vec<f32> {
        if device.is_meta() {
            Vec::new()
        } else {
            bits_of(device, tensor).into_iter().map(f32::from_bits).collect()
        }
    };
    let of = |(gradient, written): (&Tensor, bool)| written.then(|| floats(gradient));
    let gradients = gradients.iter().zip(written).map(of).collect();
    Run { y: floats(&y), dx: dx.map(|dx| floats(&dx)), gradients }
}

fn numbers(device: &Device, layer: &dyn AnyLayer) -> (Tensor, Vec<Tensor>) {
    let make = |name: &str, shape: &[usize]| filled_as(device, DType::F32, name, 0, shape.into());
    let values = layer.parameters().iter().map(|spec| make(&spec.name, &spec.shape)).collect();
    (make("x", &[2, SEQ, HIDDEN]), values)
}

/// The loss whose derivatives a run gives: the sum of y * dy.
fn loss(device: &Device, run: &Run) -> f64 {
    let mut dy = vec![0f32; run.y.len()];
    let tensor = filled_as(device, DType::F32, "dy", 0, [run.y.len()].into());
    device.download(tensor.view(), &mut dy).unwrap();
    run.y.iter().zip(&dy).map(|(y, dy)| f64::from(*y) * f64::from(*dy)).sum()
}

/// Adds to one element.
fn add(device: &Device, tensor: &mut Tensor, at: usize, by: f32) {
    let mut numbers = vec![0f32; tensor.shape().elements()];
    device.download(tensor.view(), &mut numbers).unwrap();
    numbers[at] += by;
    device.upload(&numbers, tensor.view_mut());
}

/// y is linear in each parameter and in x, but for GELU, so a difference quotient is the derivative at any distance.
#[test]
fn derivatives_are_difference_quotients() {
    let device = Device::new(Cpu::new(2), Arena::heap());
    for (kind, draw) in [((0.0, false), None), ((0.25, false), Some(DRAW)), ((0.25, true), Some(DRAW))] {
        for (what, layer) in layers(kind) {
            let h = if what == "with GELU" { 1e-2 } else { 0.5 };
            let layer = &*layer;
            let (mut x, mut values) = numbers(&device, layer);
            let all = |_: &str| true;
            let found = run(layer, &device, (&x, &values), &all, (false, draw));
            let mut derivatives: Vec<&[f32]> =
                found.gradients.iter().map(|gradient| gradient.as_deref().unwrap()).collect();
            derivatives.push(found.dx.as_deref().unwrap());
            let specs = layer.parameters();
            for (index, derivative) in derivatives.into_iter().enumerate() {
                // The norm of a weight with its adapter's is a constant in backward, and not in a quotient.
                let moves_norms = |spec: &ParameterSpec| spec.shape.len() == 2;
                if kind.1 && specs.get(index).is_some_and(moves_norms) {
                    continue;
                }
                let largest = derivative.iter().fold(0f32, |max, one| max.max(one.abs()));
                assert!(largest > 0.0, "{what}: parameter {index}");
                for (at, one) in derivative.iter().enumerate().step_by(3) {
                    add(&device, values.get_mut(index).unwrap_or(&mut x), at, h);
                    let above = loss(&device, &run(layer, &device, (&x, &values), &all, (false, draw)));
                    add(&device, values.get_mut(index).unwrap_or(&mut x), at, -2.0 * h);
                    let below = loss(&device, &run(layer, &device, (&x, &values), &all, (false, draw)));
                    add(&device, values.get_mut(index).unwrap_or(&mut x), at, h);
                    let quotient = (above - below) / f64::from(2.0 * h);
                    // y is rounded to 24 bits, and the loss is a sum of a few hundred numbers of size 10; GELU's third derivative adds
                    // h squared.
                    let allowed = 2e-3 * f64::from(largest);
                    assert!((quotient - f64::from(*one)).abs() < allowed, "{what}, {kind:?}: {index}[{at}]");
                }
            }
        }
    }
}

#[test]
fn both_ways_of_backward_and_recomputing_give_the_same_bits() {
    let device = Device::new(Cpu::new(2), Arena::heap());
    for (what, layer) in layers((0.25, false)).into_iter().chain(layers((0.25, true))) {
        let (x, values) = numbers(&device, &*layer);
        for trained in [|_: &str| true, |name: &str| name.contains("lora")] {
            let bits = |layer: &dyn AnyLayer, in_two_parts| {
                let Run { y, dx, gradients } =
                    run(layer, &device, (&x, &values), &trained, (in_two_parts, Some(DRAW)));
                let bits = |floats: &Vec<f32>| floats.iter().map(|f| f.to_bits()).collect::<Vec<_>>();
                (
                    bits(&y),
                    dx.as_ref().map(bits),
                    gradients.iter().map(|g| g.as_ref().map(bits)).collect::<Vec<_>>(),
                )
            };
            let plain = bits(&*layer, false);
            assert!(bits(&*layer, true) == plain, "{what}, in two parts");
        }
    }
    let path = || -> Vec<Box<dyn AnyLayer>> {
        let gelu = LinearGelu { linear: linear("o", HIDDEN, HIDDEN), gelu: Gelu::Erf };
        vec![
            Box::new(norm("ln")),
            gelu.adapted(&lora(0.25, &["o"]), None),
            Box::new(linear("p", HIDDEN, HIDDEN)),
        ]
    };
    let plain = crate::rig::numbers(&Sequence::new(path()), 2, Some(DRAW));
    assert_eq!(crate::rig::numbers(&Sequence::new(path()).rebuilding(), 2, Some(DRAW)), plain);
    assert_eq!(crate::rig::numbers(&Recompute(Sequence::new(path())), 2, Some(DRAW)), plain);
}

/// Magnitudes of one over norms change nothing; twice as large, they double what is before the bias, and the derivative of x.
#[test]
fn magnitudes_scale_the_columns_of_their_results() {
    let device = Device::new(Cpu::new(2), Arena::heap());
    let targets: &[&str] = &["q", "v"];
    let (plain, rescaled) = (
        joined(true).adapted(&lora(0.0, targets), None),
        joined(true).adapted(&of_kind((0.0, true), targets), None),
    );
    let (x, plain_values) = numbers(&device, &*plain);
    let (_, mut values) = numbers(&device, &*rescaled);
    let read = |tensor: &Tensor| {
        let mut numbers = vec![0f32; tensor.shape().elements()];
        device.download(tensor.view(), &mut numbers).unwrap();
        numbers
    };
    // Weights, biases, and of each adapter a, b, m.
    for (weight, [a, b, m]) in [(0, [6, 7, 8]), (2, [9, 10, 11])] {
        let [w, a, b] = [weight, a, b].map(|index| read(&values[index]));
        let norm = |o: usize| {
            let of = |i: usize| {
                let added: f32 = (0..RANK).map(|k| b[o * RANK + k] * a[k * HIDDEN + i]).sum();
                w[o * HIDDEN + i] + 0.75 * added
            };
            (0..HIDDEN).map(|i| of(i).powi(2)).sum::<f32>().sqrt()
        };
        let norms: Vec<f32> = (0..b.len() / RANK).map(norm).collect();
        device.upload(&norms, values[m].view_mut());
    }
    let none = |_: &str| false;
    let expected = run(&*plain, &device, (&x, &plain_values), &none, (false, None));
    let found = run(&*rescaled, &device, (&x, &values), &none, (false, None));
    let near = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-5 * b.abs().max(1.0));
    assert!(near(&found.y, &expected.y) && near(&found.dx.unwrap(), &expected.dx.unwrap()));
}

/// A frozen layer with adapters saves the input of a and those of each b; its own gradient costs nothing.
#[test]
fn a_frozen_layer_costs_its_products_alone() {
    let layer = joined(false).adapted(&lora(0.0, &["q", "v"]), None);
    let device = Device::meta(1);
    let make = |shape: &[usize]| device.alloc(DType::F32, Shape::from(shape), Category::Activations, "test");
    let values: Vec<Tensor> = layer.parameters().iter().map(|spec| make(&spec.shape)).collect();
    let x = make(&[2, SEQ, HIDDEN]);
    run(&*layer, &device, (&x, &values), &|name| name.contains("lora"), (false, None));
    let trace = device.take_trace(0);
    let names: Vec<&str> = left(&trace, PhaseName::Forward).iter().map(|(name, _)| *name).collect();
    // y; the parameters of the test are no tensors of forward.
    assert_eq!(names.iter().filter(|name| **name == "lora.narrow").count(), 2);
    assert!(
        !names.iter().any(|name| name.starts_with("lora.wide") || name.starts_with("lora.y")),
        "{names:?}"
    );
    let backward = kernels(&trace, PhaseName::Backward);
    let count = |name: &str| backward.iter().filter(|kernel| **kernel == name).count();
    // Of the three joined weights, which are apart here, dx alone; of each adapter dx twice and both gradients.
    assert_eq!(["linear_weight_gradient", "linear_input_gradient"].map(count), [4, 3 + 4]);
}

#[test]
fn names_shapes_and_initial_values_are_those_of_peft() {
    let layer = joined(true).adapted(&lora(0.0, &["q", "v"]), None);
    let adapters: Vec<_> = layer
        .parameters()
        .into_iter()
        .skip(6)
        .map(|spec| (spec.name, spec.shape, spec.init, spec.joins))
        .collect();
    let uniform = Init::Uniform(1.0 / (HIDDEN as f32).sqrt());
    assert_eq!(
        adapters,
        [
            ("q.lora_A.weight".to_string(), vec![RANK, HIDDEN], uniform, false),
            ("q.lora_B.weight".to_string(), vec![HIDDEN, RANK], Init::Zeros, false),
            ("v.lora_A.weight".to_string(), vec![RANK, HIDDEN], uniform, false),
            ("v.lora_B.weight".to_string(), vec![2 * HIDDEN, RANK], Init::Zeros, false),
        ]
    );
    let gaussian = Lora { init: AdapterInit::Gaussian, ..lora(0.0, &["q"]) };
    assert_eq!(joined(false).adapted(&gaussian, None).parameters()[3].init, Init::Normal(0.5));
    let magnitudes = joined(false).adapted(&of_kind((0.0, true), &["q", "v"]), None).parameters();
    let names: Vec<_> = magnitudes[3..].iter().map(|spec| (&spec.name[..], &spec.shape[..])).collect();
    assert_eq!(names[2], ("q.lora_magnitude_vector", &[HIDDEN][..]));
    assert_eq!(names[5], ("v.lora_magnitude_vector", &[2 * HIDDEN][..]));
    assert!(names.iter().all(|(name, _)| ["q", "v"].contains(&adapted_by(name).unwrap())), "{names:?}");
    // No target: the layers as they are.
    let none = lora(0.0, &["o"]);
    assert_eq!(joined(true).adapted(&none, None).parameters(), joined(true).parameters());
    let gelu = || LinearGelu { linear: linear("fc", HIDDEN, HIDDEN), gelu: Gelu::Tanh };
    assert_eq!(gelu().adapted(&none, None).parameters(), AnyLayer::parameters(&gelu()));
}
