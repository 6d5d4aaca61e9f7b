//! A linear layer with several results: weights and biases that lie one behind another are read by one product, and those that are
//! apart give the same bits of y and of their gradients.

use std::sync::Arc;

use phalanx_cpu::Cpu;
use phalanx_layers::{Call, Context, Gradient, Init, Layer, Linear, Output, Parameter, Parameters};
use phalanx_plan::trace::PhaseName;
use phalanx_tensor::{Arena, Category, DType, Device, Tensor};

use crate::rig::{HIDDEN, SEQ, bits_of, filled_as, kernels};

/// Columns of the three results.
const WIDTHS: [usize; 3] = [HIDDEN, 3, 2 * HIDDEN];

fn layer(bias: bool) -> Linear {
    let results = ["q", "k", "v"].into_iter().zip(WIDTHS).map(|(name, width)| Output::new(name, width));
    Linear { bias, ..Linear::new(results.collect::<Vec<_>>(), HIDDEN, Init::Normal(0.3)) }
}

#[derive(Debug, PartialEq)]
struct Bits {
    y: Vec<u32>,
    dx: Vec<u32>,
    /// All weights' gradients, then all biases'.
    gradients: Vec<u32>,
}

/// Runs the layer with so many parameters joined in each, of which `trained` are trained, with something to add to y and dx.
fn run(device: &Device, layer: &Linear, joined: &[usize], trained: &[bool], in_two_parts: bool) -> Bits {
    let specs = layer.parameters();
    let mut specs = specs.iter();
    let flat = |name: &str, shape: &[usize]| match device.is_meta() {
        true => device.alloc(DType::F32, shape, Category::Activations, "test"),
        false => filled_as(device, DType::F32, name, 0, shape.into()),
    };
    let mut values: Vec<Tensor> = Vec::new();
    for count in joined {
        let members: Vec<_> = specs.by_ref().take(*count).collect();
        let rows: usize = members.iter().map(|member| member.shape[0]).sum();
        let shape = [&[rows], &members[0].shape[1..]].concat();
        let mut joint = device.alloc(DType::F32, &shape[..], Category::Parameters, "test");
        let mut at = 0;
        for member in members {
            let value = flat(&member.name, &member.shape);
            device.copy(value.view(), joint.view_mut().range(at..at + member.elements()));
            at += member.elements();
        }
        values.push(joint);
    }
    let mut gradients: Vec<Tensor> =
        values.iter().map(|v| device.alloc(DType::F32, v.shape(), Category::Gradients, "test")).collect();
    gradients.iter_mut().for_each(|gradient| device.fill(gradient.view_mut(), 0.0));
    let mut written = vec![false; values.len()];
    let cx = Context::new(device, DType::F32, [1, SEQ]);
    let of = |name: &str, width| Arc::new(flat(name, &[1, SEQ, width]));
    let (x, dy, width) = (of("x", HIDDEN), of("dy", layer.width()), layer.width());
    let (y, dx) = {
        let mut own: Vec<Parameter> = Vec::new();
        for (index, (tensor, flag)) in gradients.iter_mut().zip(&mut written).enumerate() {
            let slot = trained[index].then(|| Gradient::new(tensor.view_mut(), flag));
            own.push(Parameter::with_gradient(values[index].view(), slot).joining(joined[index]));
        }
        let parameters = Parameters::new(&own);
        let call = |x, sum| Call { sum: Some(sum), ..Call::new(parameters, x) };
        let forward = || layer.forward(&cx, call(x, of("sum", width))).unwrap();
        let (y, saved) = device.phase(PhaseName::Forward, forward);
        let dx = device.phase(PhaseName::Backward, || match in_two_parts {
            false => layer.backward(&cx, saved, call(dy, of("sum", HIDDEN))).unwrap(),
            true => {
                let (dx, later) = layer.backward_input(&cx, saved, call(dy, of("sum", HIDDEN))).unwrap();
                layer.backward_weight(&cx, parameters, later).unwrap();
                dx
            }
        });
        (y, dx.unwrap())
    };
    let bits = |tensor: &Tensor| if device.is_meta() { Vec::new() } else { bits_of(device, tensor) };
    Bits { y: bits(&y), dx: bits(&dx), gradients: gradients.iter().flat_map(bits).collect() }
}

/// One product of a weight with all columns, whose bits joined weights have.
#[test]
fn parameters_that_join_give_the_bits_of_one_and_apart_those_of_y_and_of_the_gradients() {
    let device = Device::new(Cpu::new(2), Arena::heap());
    for bias in [false, true] {
        let layer = layer(bias);
        let biases = |joined: &[usize]| if bias { joined.to_vec() } else { Vec::new() };
        let all = |joined: &[usize], in_two_parts| {
            run(&device, &layer, joined, &vec![true; joined.len()], in_two_parts)
        };
        let joint = all(&[&[3][..], &biases(&[3])].concat(), false);
        let apart = all(&[&[1, 1, 1][..], &biases(&[1, 1, 1])].concat(), false);
        assert_eq!((&apart.y, &apart.gradients), (&joint.y, &joint.gradients));
        let near = apart.dx.iter().zip(&joint.dx).all(|(a, b)| {
            // Three sums of at most 16 terms in another order.
            let (a, b) = (f32::from_bits(*a), f32::from_bits(*b));
            (a - b).abs() <= 1e-5 * (1.0 + b.abs())
        });
        assert!(near, "dx apart {:?}, joint {:?}", apart.dx, joint.dx);
        for weights in [&[3][..], &[1, 2], &[2, 1], &[1, 1, 1]] {
            for own in [&[3][..], &[1, 2], &[1, 1, 1]].into_iter().filter(|own| bias || own.len() == 1) {
                let joined = [weights, &biases(own)].concat();
                let whole = all(&joined, false);
                assert_eq!((&whole.y, &whole.gradients), (&joint.y, &joint.gradients), "{joined:?}");
                assert_eq!(whole, all(&joined, true), "{joined:?}, in two parts");
                for frozen in 0..joined.len() {
                    let trained: Vec<bool> = (0..joined.len()).map(|index| index != frozen).collect();
                    let parts = [false, true].map(|two| run(&device, &layer, &joined, &trained, two));
                    assert_eq!(parts[0], parts[1], "{joined:?} without {frozen}");
                    assert_eq!(
                        (&parts[0].y, &parts[0].dx),
                        (&whole.y, &whole.dx),
                        "{joined:?} without {frozen}"
                    );
                    let mut others = whole.gradients.clone();
                    let sizes = own_sizes(&layer, &joined);
                    let start: usize = sizes[..frozen].iter().sum();
                    others[start..start + sizes[frozen]].fill(0);
                    assert_eq!(parts[0].gradients, others, "{joined:?} without {frozen}");
                }
            }
        }
    }
}

fn own_sizes(layer: &Linear, joined: &[usize]) -> Vec<usize> {
    let specs = layer.parameters();
    let mut specs = specs.iter();
    joined.iter().map(|count| specs.by_ref().take(*count).map(|spec| spec.elements()).sum()).collect()
}

#[test]
fn joined_weights_take_one_product_and_no_copies() {
    let work = |joined: &[usize]| {
        let device = Device::meta(1);
        run(&device, &layer(true), joined, &vec![true; joined.len()], false);
        let trace = device.take_trace(0);
        [kernels(&trace, PhaseName::Forward), kernels(&trace, PhaseName::Backward)]
    };
    assert_eq!(
        work(&[3, 3]),
        [vec!["linear"], vec!["bias_gradient", "linear_weight_gradient", "linear_input_gradient"]]
    );
    let [forward, backward] = work(&[1, 2, 3]);
    let count = |kernels: &[&str], name: &str| kernels.iter().filter(|kernel| **kernel == name).count();
    assert_eq!(["linear", "copy_columns", "add"].map(|name| count(&forward, name)), [2, 2, 1]);
    let names = ["bias_gradient", "linear_weight_gradient", "linear_input_gradient", "copy_columns"];
    assert_eq!(names.map(|name| count(&backward, name)), [1, 2, 2, 4]);
}
