//! The head of a language model: parts of the vocabulary that exchange their statistics are the whole.

use phalanx_cpu::Cpu;
use phalanx_layers::head::{Classes, HeadInput};
use phalanx_layers::{
    Call, Context, Gradient, Head, Init, Inputs, LinearCrossEntropy, Parameter, Parameters, RowTerms, TARGETS,
};
use phalanx_plan::trace::{Event, PhaseName};
use phalanx_tensor::{Arena, Category, CrossEntropy, DType, Device, IGNORED, Shape, Tensor};

const ROWS: usize = 7;
const HIDDEN: usize = 5;
const VOCAB: usize = 261;

/// Loss factors with all terms.
const NUMBERS: CrossEntropy =
    CrossEntropy { scale: 0.25, gradient_scale: 0.5, label_smoothing: 0.1, z_loss: 0.01 };

fn head(bias: bool) -> LinearCrossEntropy {
    LinearCrossEntropy {
        weight: "decoder.weight".into(),
        bias: bias.then(|| "decoder.bias".into()),
        vocab: VOCAB,
        added: 0,
        hidden: HIDDEN,
        init: Init::Normal(0.3),
    }
}

fn context(device: &Device) -> Context<'_> {
    Context::new(device, DType::F32, [1, ROWS])
}

fn values(name: &str, count: usize) -> Vec<f32> {
    let mut values = vec![0f32; count];
    Init::Normal(1.0).fill(2, name, 0, &mut values);
    values
}

fn tensor(device: &Device, shape: impl Into<Shape>, values: &[f32]) -> Tensor {
    let mut tensor = device.alloc(DType::F32, shape, Category::Activations, "test");
    device.upload(values, tensor.view_mut());
    tensor
}

fn read(device: &Device, tensor: &Tensor) -> Vec<f32> {
    let mut values = vec![0f32; tensor.shape().elements()];
    device.download(tensor.view(), &mut values).unwrap();
    values
}

fn targets(device: &Device) -> Tensor {
    let mut targets = device.alloc(DType::U32, [ROWS], Category::Activations, "test");
    device.upload(&[3, 260, IGNORED, 0, 130, 131, IGNORED], targets.view_mut());
    targets
}

/// Loss, dx, dw and db of classes `first .. end`, and the statistics that it passed to `exchange`, per slice.
struct Part {
    results: [Vec<f32>; 4],
    own: Vec<Vec<f32>>,
}

/// A pass over a part of the vocabulary. `others` holds, for each slice, the statistics of all parts; if empty, only
/// its own are used.
fn part(device: &Device, bias: bool, [first, end]: [usize; 2], others: Option<&[Vec<f32>]>) -> Part {
    let (head, columns) = (head(bias), end - first);
    let x = tensor(device, [ROWS, HIDDEN], &values("x", ROWS * HIDDEN));
    let of = |name: &str, width: usize| values(name, VOCAB * width)[first * width..end * width].to_vec();
    let (w, b) =
        (tensor(device, [columns, HIDDEN], &of("w", HIDDEN)), tensor(device, [columns], &of("b", 1)));
    let (mut dw, mut db) =
        (tensor(device, [columns, HIDDEN], &of("dw", HIDDEN)), tensor(device, [columns], &of("db", 1)));
    let mut written = [false, false];
    let [write_w, write_b] = &mut written;
    let mut own = Vec::new();
    let mut exchange = |statistics: Tensor| {
        let [rows, four] = statistics.dims();
        own.push(read(device, &statistics));
        match others {
            None => Ok(statistics.reshape([1, rows, four])),
            Some(all) => {
                let all = &all[own.len() - 1];
                Ok(tensor(device, [all.len() / rows / four, rows, four], all))
            }
        }
    };
    let (cx, targets, classes) = (context(device), targets(device), Classes { first, here: columns });
    let input =
        HeadInput { x: &x, targets: &targets, numbers: NUMBERS, classes, input_wanted: true, apart: false };
    let (loss, [dx, _]) = {
        let slots = [Gradient::new(dw.view_mut(), write_w), Gradient::new(db.view_mut(), write_b)];
        let with_slot = |(value, slot)| Parameter::with_gradient(value, Some(slot));
        let parameters: Vec<_> = [w.view(), b.view()].into_iter().zip(slots).map(with_slot).collect();
        let parameters = Parameters::new(&parameters[..1 + bias as usize]);
        head.pass(&cx, parameters, (input, RowTerms::default()), &mut exchange).unwrap()
    };
    let db = if bias { read(device, &db) } else { Vec::new() };
    let results = [read(device, &loss), read(device, &dx.unwrap()), read(device, &dw), db];
    Part { results, own }
}

/// Loss, dx and the gradient of all rows, of which the last `added` are a parameter of their own.
fn with_added(device: &Device, added: usize) -> [Vec<f32>; 3] {
    let head = LinearCrossEntropy { added, ..head(false) };
    let x = tensor(device, [1, ROWS, HIDDEN], &values("x", ROWS * HIDDEN));
    let w = values("w", VOCAB * HIDDEN);
    let (mut parameters, mut gradients) = (Vec::new(), Vec::new());
    for rows in [0..VOCAB - added, VOCAB - added..VOCAB].into_iter().filter(|rows| !rows.is_empty()) {
        let shape = [rows.len(), HIDDEN];
        parameters.push(tensor(device, shape, &w[rows.start * HIDDEN..rows.end * HIDDEN]));
        gradients.push(tensor(device, shape, &vec![0.0; rows.len() * HIDDEN]));
    }
    let shapes: Vec<_> = head.parameters().into_iter().map(|spec| spec.shape).collect();
    assert_eq!(shapes, parameters.iter().map(|p| p.shape().as_slice().to_vec()).collect::<Vec<_>>());
    let mut written = vec![false; parameters.len()];
    let inputs = Inputs::only(TARGETS, targets(device).into());
    let cx = context(device).with(&inputs);
    let (loss, dx) = {
        let own = Parameter::with_gradients(&parameters, &mut gradients, &mut written);
        head.loss(&cx, Call::new(Parameters::new(&own), x.into()), NUMBERS).unwrap()
    };
    let gradient = gradients.iter().flat_map(|gradient| read(device, gradient)).collect();
    [read(device, &loss), read(device, &dx.unwrap()), gradient]
}

/// 260, a target, is an added class; so is 130, with half of them.
#[test]
fn added_classes_are_those_of_one_matrix() {
    let device = Device::new(Cpu::new(2), Arena::heap());
    let whole = with_added(&device, 0);
    for added in [1, 31, 140] {
        for (which, (whole, parts)) in whole.iter().zip(with_added(&device, added)).enumerate() {
            let largest = whole.iter().fold(0f32, |a, x| a.max(x.abs()));
            assert_eq!(whole.len(), parts.len());
            for (i, (x, y)) in whole.iter().zip(&parts).enumerate() {
                // As in the test of parts below.
                assert!((x - y).abs() <= 64.0 * f32::EPSILON * largest, "{added}: {which}[{i}]: {y} for {x}");
            }
        }
    }
}

#[test]
fn parts_that_exchange_statistics_are_the_whole() {
    let device = Device::new(Cpu::new(2), Arena::heap());
    for bias in [false, true] {
        let whole = part(&device, bias, [0, VOCAB], None);
        assert_eq!(whole.own.iter().map(Vec::len).collect::<Vec<_>>(), [16, 12], "slices of 4 and 3 rows");
        let cuts = [[0, 130], [130, 200], [200, VOCAB]];
        let alone = cuts.map(|cut| part(&device, bias, cut, None).own);
        let all: Vec<Vec<f32>> =
            (0..2).map(|slice| alone.iter().flat_map(|a| a[slice].clone()).collect()).collect();
        let parts = cuts.map(|cut| part(&device, bias, cut, Some(&all)).results);
        assert!(parts.iter().all(|p| p[0] == parts[0][0]), "every part has the loss of all");
        let mut dx = vec![0f32; ROWS * HIDDEN];
        parts.iter().for_each(|p| dx.iter_mut().zip(&p[1]).for_each(|(sum, dx)| *sum += dx));
        let joined = |which: usize| parts.iter().flat_map(|p| p[which].clone()).collect::<Vec<f32>>();
        let results = [parts[0][0].clone(), dx, joined(2), joined(3)];
        for (which, (whole, parts)) in whole.results.iter().zip(&results).enumerate() {
            let largest = whole.iter().fold(0f32, |a, x| a.max(x.abs()));
            // Sums of 261 exponentials, of 7 rows, of 3 parts, in another order: a few dozen roundings.
            let allowed = 64.0 * f32::EPSILON * largest;
            assert_eq!(whole.len(), parts.len());
            // Compares every element, because a maximum of differences would ignore NaN.
            for (i, (x, y)) in whole.iter().zip(parts).enumerate() {
                assert!((x - y).abs() <= allowed, "output {which}[{i}]: {y} for {x}, allowed {allowed:e}");
            }
        }
    }
}

#[test]
fn a_loss_alone_is_that_of_training_and_takes_no_logits() {
    let device = Device::new(Cpu::new(2), Arena::heap());
    let head = head(true);
    let x = || tensor(&device, [ROWS, HIDDEN], &values("x", ROWS * HIDDEN));
    let w = tensor(&device, [VOCAB, HIDDEN], &values("w", VOCAB * HIDDEN));
    let b = tensor(&device, [VOCAB], &values("b", VOCAB));
    let (cx, parameters) = (context(&device), [w.view(), b.view()].map(|view| Parameter::read(view, true)));
    let call = Call { input_wanted: false, ..Call::new(Parameters::new(&parameters), x().into()) };
    let inputs = Inputs::only(TARGETS, targets(&device).into());
    let (loss, _) = head.loss(&cx.with(&inputs), call, NUMBERS).unwrap();
    assert_eq!(read(&device, &loss), part(&device, true, [0, VOCAB], None).results[0]);

    let meta = Device::meta(1);
    let like = |t: &Tensor| meta.alloc(t.dtype(), t.shape(), Category::Activations, "test");
    let (x, w, b, targets) = (like(&x()), like(&w), like(&b), like(&targets(&device)));
    let inputs = Inputs::only(TARGETS, targets.into());
    meta.phase(PhaseName::Loss, || {
        let parameters = [w.view(), b.view()].map(|view| Parameter::read(view, true));
        let call = Call { input_wanted: false, ..Call::new(Parameters::new(&parameters), x.into()) };
        head.loss(&context(&meta).with(&inputs), call, NUMBERS).unwrap()
    });
    let trace = meta.take_trace(0);
    let names: Vec<&str> = trace
        .phase(PhaseName::Loss)
        .unwrap()
        .events
        .iter()
        .filter_map(|event| match event {
            Event::Alloc { name, .. } => Some(*name),
            _ => None,
        })
        .collect();
    assert_eq!(names, ["head.blocks", "head.sum", "head.statistics", "head.statistics", "head.loss"]);
}

#[test]
fn a_bias_is_a_parameter_that_starts_at_zero_and_moves_logits() {
    let names = |bias| head(bias).parameters().into_iter().map(|p| (p.name, p.shape)).collect::<Vec<_>>();
    let weight = ("decoder.weight".to_string(), vec![VOCAB, HIDDEN]);
    assert_eq!(names(false), std::slice::from_ref(&weight));
    assert_eq!(names(true), [weight, ("decoder.bias".to_string(), vec![VOCAB])]);
    assert_eq!(head(true).parameters()[1].init, Init::Zeros);

    let device = Device::new(Cpu::new(1), Arena::heap());
    let (x, w) = (
        tensor(&device, [1, HIDDEN], &[0.0; HIDDEN]),
        tensor(&device, [VOCAB, HIDDEN], &values("w", VOCAB * HIDDEN)),
    );
    let b = tensor(&device, [VOCAB], &values("b", VOCAB));
    let parameters = [w.view(), b.view()].map(|view| Parameter::read(view, true));
    let logits = head(true).logits(&context(&device), Parameters::new(&parameters), x.view());
    assert_eq!(read(&device, &logits), values("b", VOCAB));
}
