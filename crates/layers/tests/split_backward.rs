//! Backward in two parts leaves the bits of backward in one: dx, and every gradient, of every layer and composition,
//! whatever is computed in between, in every precision.

use std::sync::Arc;

use crate::rig::{
    DRAW, HIDDEN, SEQ, attention, bits_of, decoder, filled_as, linear, norm, plain, rebuilding, rotary,
};
use phalanx_cpu::Cpu;
use phalanx_layers::{
    Activation, AnyLayer, AnySaved, Call, Context, Conv2d, Deferred, Draw, Dropped, Embedding, Fork, Gated,
    Init, Layer, LayerNorm, Linear, LinearGelu, MaxPool2d, Parameter, ParameterSpec, Parameters,
    PositionTable, Recompute, Relu, Sequence,
};
use phalanx_tensor::{Arena, Category, DType, Device, Gate, Gelu, Layout, Patches, Shape, Tensor};

const BATCH: usize = 3;
const VOCAB: usize = 11;

/// One pass of a micro-batch.
#[derive(Clone, Copy)]
enum Pass {
    Forward(usize),
    /// The whole backward.
    Backward(usize),
    /// Its first part.
    Input(usize),
    /// Its second part.
    Weight(usize),
}
use Pass::{Backward, Forward, Input, Weight};

/// The oracle, and the possible orders of the parts of backward: weights in the order of micro-batches.
const WHOLE: [Pass; 4] = [Forward(0), Backward(0), Forward(1), Backward(1)];
const SPLIT: [(&str, [Pass; 6]); 3] = [
    ("at once", [Forward(0), Input(0), Weight(0), Forward(1), Input(1), Weight(1)]),
    ("later", [Forward(0), Input(0), Forward(1), Input(1), Weight(0), Weight(1)]),
    ("all forwards first", [Forward(0), Forward(1), Input(0), Input(1), Weight(0), Weight(1)]),
];

/// A layer by name, the width of its input (`None` for tokens) and that of its output.
type Case = (String, Box<dyn AnyLayer>, Option<usize>, usize);

/// Setting in which the layer is run.
#[derive(Clone, Copy, Debug)]
struct Setting {
    compute: DType,
    gradients: DType,
    /// True if the gradients hold values already.
    accumulate: bool,
    /// True if forward and backward are given a residual.
    residual: bool,
    /// True if x, dy and the residuals are also held elsewhere.
    shared: bool,
}

/// Bits of both micro-batches.
#[derive(Debug, Default, PartialEq)]
struct Bits {
    y: Vec<Vec<u32>>,
    dx: Vec<Vec<u32>>,
    gradients: Vec<Vec<u32>>,
}

/// A layer while it runs some calls.
struct Bench<'a> {
    layer: &'a dyn AnyLayer,
    device: &'a Device,
    setting: Setting,
    widths: (Option<usize>, usize),
    parameters: Parameters<'a>,
    saved: [Option<AnySaved>; 2],
    deferred: [Option<Deferred>; 2],
    /// Tensors that are also held elsewhere, and their bits.
    held: Vec<(Activation, Vec<u32>)>,
    out: Bits,
}

impl Bench<'_> {
    fn context(&self, micro_batch: usize) -> Context<'_> {
        let draw = Some(Draw { first_sample: (micro_batch * BATCH) as u64, ..DRAW });
        Context { draw, ..Context::new(self.device, self.setting.compute, [BATCH, SEQ]) }
    }

    fn activation(&mut self, name: &str, micro_batch: usize, width: usize) -> Activation {
        let first = (micro_batch * BATCH * SEQ * width) as u64;
        let shape = Shape::from([BATCH, SEQ, width]);
        let tensor = Arc::new(filled_as(self.device, self.setting.compute, name, first, shape));
        self.hold(tensor)
    }

    fn hold(&mut self, tensor: Activation) -> Activation {
        if self.setting.shared {
            self.held.push((tensor.clone(), bits_of(self.device, &tensor)));
        }
        tensor
    }

    /// Both types of tokens, some tokens twice.
    fn tokens(&mut self, micro_batch: usize) -> Activation {
        let token = |i: usize| ((i * 7 + micro_batch * 3) % VOCAB) as u32 | ((i as u32 / 2) % 2) << 31;
        let ids: Vec<u32> = (0..BATCH * SEQ).map(token).collect();
        let mut tensor = self.device.alloc(DType::U32, [BATCH, SEQ], Category::Activations, "test");
        self.device.upload(&ids, tensor.view_mut());
        Arc::new(tensor)
    }

    fn sum(&mut self, name: &str, micro_batch: usize, width: usize) -> Option<Activation> {
        self.setting.residual.then(|| self.activation(name, micro_batch, width))
    }

    fn call(&mut self, pass: Pass) {
        let (inputs, outputs) = self.widths;
        match pass {
            Forward(m) => {
                let x = match inputs {
                    Some(width) => self.activation("x", m, width),
                    None => self.tokens(m),
                };
                let sum = self.sum("residual", m, outputs);
                let call = Call { sum, ..Call::new(self.parameters, x) };
                let (y, saved) = self.layer.forward(&self.context(m), call).unwrap();
                self.out.y.push(bits_of(self.device, &y));
                self.saved[m] = Some(saved);
            }
            Backward(m) | Input(m) => {
                let dy = self.activation("dy", m, outputs);
                let sum = inputs.and_then(|width| self.sum("dresidual", m, width));
                let saved = self.saved[m].take().unwrap();
                let call = Call { sum, ..Call::new(self.parameters, dy) };
                let cx = self.context(m);
                let dx = match pass {
                    Backward(_) => self.layer.backward(&cx, saved, call),
                    _ => self.layer.backward_input(&cx, saved, call).map(|(dx, later)| {
                        self.deferred[m] = Some(later);
                        dx
                    }),
                };
                let dx = dx.unwrap();
                assert_eq!(dx.is_some(), inputs.is_some(), "tokens alone have no gradient");
                self.out.dx.extend(dx.map(|dx| bits_of(self.device, &dx)));
            }
            Weight(m) => {
                let later = self.deferred[m].take().unwrap();
                self.layer.backward_weight(&self.context(m), self.parameters, later).unwrap();
            }
        }
    }
}

/// Runs some calls from the same start. Gradients that must be overwritten are filled with NaN.
fn run(device: &Device, (_, layer, inputs, outputs): &Case, setting: Setting, calls: &[Pass]) -> Bits {
    let specs = layer.parameters();
    let fill = |spec: &ParameterSpec, dtype, seed: &str| {
        filled_as(device, dtype, &format!("{seed} {}", spec.name), 0, spec.shape.as_slice().into())
    };
    let parameters: Vec<Tensor> = specs.iter().map(|spec| fill(spec, setting.compute, "parameter")).collect();
    let mut gradients: Vec<Tensor> =
        specs.iter().map(|spec| fill(spec, setting.gradients, "gradient")).collect();
    if !setting.accumulate {
        gradients.iter_mut().for_each(|g| device.fill(g.view_mut(), f32::NAN));
    }
    let mut written = vec![setting.accumulate; specs.len()];
    let mut out = {
        let own = Parameter::with_gradients(&parameters, &mut gradients, &mut written);
        let mut bench = Bench {
            layer: &**layer,
            device,
            setting,
            widths: (*inputs, *outputs),
            parameters: Parameters::new(&own),
            saved: [None, None],
            deferred: [None, None],
            held: Vec::new(),
            out: Bits::default(),
        };
        calls.iter().for_each(|pass| bench.call(*pass));
        for (tensor, before) in &bench.held {
            assert!(bits_of(device, tensor) == *before, "what others hold is not written");
        }
        bench.out
    };
    assert!(written.iter().all(|w| *w), "every gradient is written");
    out.gradients = gradients.iter().map(|g| bits_of(device, g)).collect();
    let finite = |bits: &Vec<u32>| bits.iter().all(|b| f32::from_bits(*b).is_finite());
    assert!([&out.y, &out.dx, &out.gradients].iter().all(|list| list.iter().all(finite)));
    out
}

fn check(cases: Vec<Case>) {
    let device = Device::new(Cpu::new(2), Arena::heap());
    let sixteen = [DType::BF16, DType::F16].map(|compute| [(compute, DType::F32), (compute, compute)]);
    let types = [&[(DType::F32, DType::F32)], sixteen.as_flattened()].concat();
    for case in &cases {
        for (compute, gradients) in &types {
            for flags in 0..8 {
                let [accumulate, residual, shared] = [1, 2, 4].map(|bit| flags & bit != 0);
                let setting =
                    Setting { compute: *compute, gradients: *gradients, accumulate, residual, shared };
                let whole = run(&device, case, setting, &WHOLE);
                for (order, calls) in &SPLIT {
                    let split = run(&device, case, setting, calls);
                    assert!(split == whole, "{}, {order}, {setting:?}", case.0);
                }
            }
        }
    }
}

fn case(name: &str, layer: impl Layer + 'static, inputs: usize, outputs: usize) -> Case {
    (name.into(), Box::new(layer), Some(inputs), outputs)
}

fn gelu(gelu: Gelu, layout: Layout) -> LinearGelu {
    LinearGelu { linear: Linear { layout, ..linear("fc", HIDDEN, 4 * HIDDEN) }, gelu }
}

fn dropped(layer: impl Layer + 'static, p: f32) -> Dropped {
    Dropped { layer: Box::new(layer), p, name: "drop".into() }
}

fn embedding(positions: bool, types: bool) -> Embedding {
    Embedding {
        tokens: "tokens".into(),
        positions: positions.then(|| PositionTable { name: "positions".into(), rows: SEQ + 2 }),
        types: types.then(|| "types".into()),
        vocab: VOCAB,
        added: 0,
        hidden: HIDDEN,
        init: Init::Normal(0.3),
    }
}

#[test]
fn linear_layers() {
    let mut cases = Vec::new();
    for layout in [Layout::InOut, Layout::OutIn] {
        for bias in [false, true] {
            let layer = Linear { layout, bias, ..linear("fc", HIDDEN, 3 * HIDDEN) };
            cases.push(case(&format!("linear {layout:?}, bias {bias}"), layer, HIDDEN, 3 * HIDDEN));
        }
        for form in [Gelu::Tanh, Gelu::Erf] {
            let name = format!("linear_gelu {layout:?}, {form:?}");
            cases.push(case(&name, gelu(form, layout), HIDDEN, 4 * HIDDEN));
            let LinearGelu { linear, gelu } = gelu(form, layout);
            let plain = LinearGelu { linear: Linear { bias: false, ..linear }, gelu };
            cases.push(case(&format!("{name}, without bias"), plain, HIDDEN, 4 * HIDDEN));
        }
    }
    check(cases);
}

#[test]
fn norm_attention_and_embedding() {
    let mut cases = vec![case("norm", norm("norm"), HIDDEN, HIDDEN)];
    for p in [0.0, 0.3] {
        cases.push(case(&format!("attention, dropping {p}"), attention(p), 3 * HIDDEN, HIDDEN));
    }
    cases.push(case("norm without beta", LayerNorm { bias: false, ..norm("norm") }, HIDDEN, HIDDEN));
    let rms_norm = LayerNorm { bias: false, centred: false, ..norm("norm") };
    cases.push(case("RMS norm", rms_norm, HIDDEN, HIDDEN));
    cases.push(case("rotary positions", rotary(), 3 * HIDDEN, 3 * HIDDEN));
    for gate in [Gate::Silu, Gate::Gelu(Gelu::Tanh), Gate::Gelu(Gelu::Erf)] {
        cases.push(case(&format!("{gate:?}"), Gated { gate }, 2 * HIDDEN, HIDDEN));
    }
    for (positions, types) in [(true, false), (true, true), (false, false), (false, true)] {
        let name = format!("embedding, positions {positions}, types {types}");
        cases.push((name.clone(), Box::new(embedding(positions, types)), None, HIDDEN));
        let layer = dropped(embedding(positions, types), 0.3);
        cases.push((format!("dropped {name}"), Box::new(layer), None, HIDDEN));
    }
    check(cases);
}

/// Images of one row.
#[test]
fn layers_of_images() {
    let patches = Patches { image: [1, SEQ], kernel: [1, 3], stride: [1, 1], padding: [0, 1] };
    let conv = |bias| Conv2d { bias, ..Conv2d::new("conv", patches, [HIDDEN, 2 * HIDDEN]) };
    check(vec![
        case("convolution", conv(true), HIDDEN, 2 * HIDDEN),
        case("convolution without bias", conv(false), HIDDEN, 2 * HIDDEN),
        case("ReLU", Relu, HIDDEN, HIDDEN),
        case("max pooling", MaxPool2d { patches }, HIDDEN, HIDDEN),
    ]);
}

#[test]
fn dropped_and_residual() {
    let square = || linear("fc", HIDDEN, HIDDEN);
    let mut cases = vec![
        case("residual", Fork::residual(square()), HIDDEN, HIDDEN),
        case("residual norm", Fork::residual(norm("norm")), HIDDEN, HIDDEN),
        case("residual in residual", Fork::residual(Fork::residual(square())), HIDDEN, HIDDEN),
    ];
    for p in [0.0, 0.3] {
        cases.extend([
            case(&format!("dropped {p}"), dropped(square(), p), HIDDEN, HIDDEN),
            case(
                &format!("dropped gelu {p}"),
                dropped(gelu(Gelu::Erf, Layout::InOut), p),
                HIDDEN,
                4 * HIDDEN,
            ),
            case(&format!("residual dropped {p}"), Fork::residual(dropped(square(), p)), HIDDEN, HIDDEN),
            case(&format!("dropped residual {p}"), dropped(Fork::residual(square()), p), HIDDEN, HIDDEN),
        ]);
    }
    check(cases);
}

#[test]
fn sequences_and_blocks() {
    let layers = || -> Vec<Box<dyn AnyLayer>> {
        vec![
            Box::new(norm("a")),
            Box::new(norm("b")),
            Box::new(gelu(Gelu::Tanh, Layout::OutIn)),
            Box::new(linear("c", 4 * HIDDEN, 3 * HIDDEN)),
            Box::new(attention(0.3)),
            Box::new(norm("d")),
        ]
    };
    let block = |name: &str, layer: Box<dyn AnyLayer>| (name.to_string(), layer, Some(HIDDEN), HIDDEN);
    let p = (0.2, 0.3);
    check(vec![
        block("sequence", Box::new(Sequence::new(layers()))),
        block("rebuilding sequence", Box::new(Sequence::new(layers()).rebuilding())),
        block("recomputed sequence", Box::new(Recompute(Sequence::new(layers())))),
        block("block", Box::new(plain(p))),
        block("rebuilding block", Box::new(rebuilding(p))),
        block("recomputed block", Box::new(Recompute(plain(p)))),
        block("recomputed rebuilding block", Box::new(Recompute(rebuilding(p)))),
        block("decoder", Box::new(decoder(false))),
        block("rebuilding decoder", Box::new(decoder(true))),
        block("recomputed rebuilding decoder", Box::new(Recompute(decoder(true)))),
    ]);
}

#[test]
fn blocks_in_blocks() {
    let p = (0.2, 0.3);
    let inner = || -> Vec<Box<dyn AnyLayer>> {
        vec![
            Box::new(Recompute(plain(p))),
            Box::new(Fork::residual(Sequence::new(vec![
                Box::new(norm("a")),
                Box::new(Recompute(rebuilding(p))),
            ]))),
            Box::new(norm("b")),
        ]
    };
    let model = |recomputed: bool| -> Box<dyn AnyLayer> {
        let blocks = Sequence::new(inner()).rebuilding();
        let blocks: Box<dyn AnyLayer> =
            if recomputed { Box::new(Recompute(blocks)) } else { Box::new(blocks) };
        Box::new(Sequence::new(vec![
            Box::new(dropped(embedding(true, true), 0.3)),
            blocks,
            Box::new(norm("c")),
        ]))
    };
    check(vec![
        ("blocks".into(), Box::new(Sequence::new(inner())), Some(HIDDEN), HIDDEN),
        ("blocks that rebuild".into(), Box::new(Sequence::new(inner()).rebuilding()), Some(HIDDEN), HIDDEN),
        ("blocks, recomputed".into(), Box::new(Recompute(Sequence::new(inner()))), Some(HIDDEN), HIDDEN),
        ("model".into(), model(false), None, HIDDEN),
        ("model, recomputed".into(), model(true), None, HIDDEN),
    ]);
}
