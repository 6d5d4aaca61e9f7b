//! A small Transformer block, run alone: on the CPU for its numbers, on `Meta` for what it takes and does.

use std::sync::Arc;

use phalanx_cpu::Cpu;
use phalanx_layers::{
    AnyLayer, Attention, Call, Context, Draw, Dropped, Fork, Gated, Init, LayerNorm, Linear, LinearGelu,
    Output, Parameter, ParameterSpec, Parameters, RotaryPositions, Sequence,
};
use phalanx_plan::trace::{Event, PhaseName, Trace};
use phalanx_tensor::{
    Arena, Category, DType, Device, Gate, Gelu, Heads, Layout, Rotary, RotaryScaling, Shape, Tensor,
};

pub const HIDDEN: usize = 8;
pub const HEADS: usize = 2;
pub const SEQ: usize = 5;

/// The draw of a first step, for a batch that is the whole global one.
pub const DRAW: Draw = Draw { seed: 3, step: 1, first_sample: 0 };

/// Dropout probabilities: attention, residual.
pub type P = (f32, f32);

pub fn linear(prefix: &str, inputs: usize, outputs: usize) -> Linear {
    let layout = Layout::InOut;
    Linear { layout, ..Linear::new([Output::new(prefix, outputs)], inputs, Init::Normal(0.3)) }
}

pub fn attention(p: f32) -> Attention {
    let heads = Heads::equal(HEADS, HIDDEN / HEADS, true);
    Attention { heads, dropout: p, name: "attn".into(), first_head: 0, all_heads: HEADS }
}

pub fn norm(prefix: &str) -> LayerNorm {
    LayerNorm { prefix: prefix.into(), hidden: HIDDEN, eps: 1e-5, centred: true, bias: true, from_one: false }
}

/// The layers of both residual paths of a block.
pub fn paths((probabilities, residual): P) -> [Vec<Box<dyn AnyLayer>>; 2] {
    let dropped =
        |layer: Linear, name: &str| Dropped { layer: Box::new(layer), p: residual, name: name.into() };
    [
        vec![
            Box::new(norm("ln_1")),
            Box::new(linear("c_attn", HIDDEN, 3 * HIDDEN)),
            Box::new(attention(probabilities)),
            Box::new(dropped(linear("proj_1", HIDDEN, HIDDEN), "drop_1")),
        ],
        vec![
            Box::new(norm("ln_2")),
            Box::new(LinearGelu { linear: linear("c_fc", HIDDEN, 4 * HIDDEN), gelu: Gelu::Tanh }),
            Box::new(dropped(linear("proj_2", 4 * HIDDEN, HIDDEN), "drop_2")),
        ],
    ]
}

pub fn plain(p: P) -> Sequence {
    let [a, b] = paths(p);
    Sequence::new(vec![
        Box::new(Fork::residual(Sequence::new(a))),
        Box::new(Fork::residual(Sequence::new(b))),
    ])
}

pub fn rebuilding(p: P) -> Sequence {
    let [a, b] = paths(p).map(|path| Sequence::new(path).rebuilding());
    Sequence::new(vec![Box::new(Fork::residual(a)), Box::new(Fork::residual(b))])
}

/// Positions of the queries and keys of [`attention`]: a half of each head turns.
pub fn rotary() -> RotaryPositions {
    let size = HIDDEN / HEADS;
    let rotary = Rotary::new(size, size / 2, 100.0, RotaryScaling::Default);
    RotaryPositions { rotary, beyond: None, heads: attention(0.0).heads }
}

/// A block with rotary positions and a gate, of which the first path begins at the projection of queries, keys and values.
pub fn decoder(rebuilds: bool) -> Sequence {
    let gate_and_up = [Output::new("gate", 4 * HIDDEN), Output::new("up", 4 * HIDDEN)];
    let gate_and_up = Linear { bias: false, ..Linear::new(gate_and_up, HIDDEN, Init::Normal(0.3)) };
    let paths: [Vec<Box<dyn AnyLayer>>; 2] = [
        vec![
            Box::new(linear("c_attn", HIDDEN, 3 * HIDDEN)),
            Box::new(rotary()),
            Box::new(attention(0.0)),
            Box::new(linear("proj_1", HIDDEN, HIDDEN)),
        ],
        vec![
            Box::new(gate_and_up),
            Box::new(Gated { gate: Gate::Silu }),
            Box::new(linear("proj_2", 4 * HIDDEN, HIDDEN)),
        ],
    ];
    let path = |layers| if rebuilds { Sequence::new(layers).rebuilding() } else { Sequence::new(layers) };
    let [a, b] = paths.map(path);
    Sequence::new(vec![Box::new(Fork::residual(a)), Box::new(Fork::residual(b))])
}

/// The results of a layer for `batch` samples.
#[derive(Debug, PartialEq)]
pub struct Numbers {
    pub y: Vec<u32>,
    pub dx: Vec<u32>,
    /// By parameter.
    pub gradients: Vec<Vec<u32>>,
}

/// Runs forward and backward on the CPU and returns the bits. The samples are those from `first` of an endless batch.
pub fn numbers(layer: &dyn AnyLayer, batch: usize, draw: Option<Draw>) -> Numbers {
    let device = Device::new(Cpu::new(2), Arena::heap());
    let first = draw.map_or(0, |d| d.first_sample) * (SEQ * HIDDEN) as u64;
    let make = |name, first| filled(&device, name, first, [batch, SEQ, HIDDEN].into());
    let cx = Context { draw, ..Context::new(&device, DType::F32, [batch, SEQ]) };
    let specs = layer.parameters();
    let parameters: Vec<Tensor> = specs.iter().map(|spec| parameter(&device, spec)).collect();
    let mut gradients: Vec<Tensor> = specs.iter().map(|spec| parameter(&device, spec)).collect();
    let mut written = vec![false; specs.len()];
    let (y, dx) = {
        let own = Parameter::with_gradients(&parameters, &mut gradients, &mut written);
        let call = |x| Call::new(Parameters::new(&own), Arc::new(x));
        let (y, saved) = layer.forward(&cx, call(make("x", first))).unwrap();
        let dx = layer.backward(&cx, saved, call(make("dy", first))).unwrap();
        (y, dx.expect("an input with gradient"))
    };
    let gradients = gradients.iter().map(|g| bits_of(&device, g)).collect();
    Numbers { y: bits_of(&device, &y), dx: bits_of(&device, &dx), gradients }
}

fn parameter(device: &Device, spec: &ParameterSpec) -> Tensor {
    let mut tensor =
        device.alloc(DType::F32, Shape::from(spec.shape.as_slice()), Category::Parameters, "test");
    let mut values = vec![0f32; spec.elements()];
    spec.init.fill(1, &spec.name, 0, &mut values);
    device.upload(&values, tensor.view_mut());
    tensor
}

fn filled(device: &Device, name: &str, first: u64, shape: Shape) -> Tensor {
    filled_as(device, DType::F32, name, first, shape)
}

/// Elements `first ..` of an endless list of standard normal numbers, rounded to `dtype`.
pub fn filled_as(device: &Device, dtype: DType, name: &str, first: u64, shape: Shape) -> Tensor {
    let alloc = |dtype| device.alloc(dtype, shape, Category::Activations, "test");
    let (mut exact, mut tensor) = (alloc(DType::F32), alloc(dtype));
    let mut values = vec![0f32; shape.elements()];
    Init::Normal(1.0).fill(2, name, first, &mut values);
    device.upload(&values, exact.view_mut());
    device.convert(exact.view(), tensor.view_mut());
    tensor
}

/// Bits of a tensor's elements as f32, which are distinct for 16-bit types too.
pub fn bits_of(device: &Device, tensor: &Tensor) -> Vec<u32> {
    let mut exact = device.alloc(DType::F32, tensor.shape(), Category::Activations, "test");
    device.convert(tensor.view(), exact.view_mut());
    let mut values = vec![0f32; tensor.shape().elements()];
    device.download(exact.view(), &mut values).unwrap();
    values.iter().map(|v| v.to_bits()).collect()
}

/// Forward and backward of one sample on `Meta`, as two phases.
pub fn trace(layer: &dyn AnyLayer, draw: Option<Draw>) -> Trace {
    let device = Device::meta(1);
    let alloc = |shape: Shape| device.alloc(DType::F32, shape, Category::Activations, "test");
    let cx = Context { draw, ..Context::new(&device, DType::F32, [1, SEQ]) };
    let like = |spec: &ParameterSpec| alloc(Shape::from(spec.shape.as_slice()));
    let specs = layer.parameters();
    let parameters: Vec<Tensor> = specs.iter().map(like).collect();
    let mut gradients: Vec<Tensor> = specs.iter().map(like).collect();
    let mut written = vec![false; specs.len()];
    let shape = Shape::from([1, SEQ, HIDDEN]);
    let (x, dy) = (alloc(shape), alloc(shape));
    let own = Parameter::with_gradients(&parameters, &mut gradients, &mut written);
    let call = |x| Call::new(Parameters::new(&own), Arc::new(x));
    let (y, saved) = device.phase(PhaseName::Forward, || layer.forward(&cx, call(x))).unwrap();
    device.phase(PhaseName::Backward, || layer.backward(&cx, saved, call(dy))).unwrap();
    drop(y);
    device.take_trace(0)
}

/// Names and bytes of the allocations that a phase leaves, sorted.
pub fn left(trace: &Trace, phase: PhaseName) -> Vec<(&'static str, u64)> {
    let mut live = Vec::new();
    for event in &trace.phase(phase).unwrap().events {
        match event {
            Event::Alloc { id, name, bytes, .. } => live.push((*id, *name, *bytes)),
            Event::Free { id, .. } => live.retain(|(other, ..)| other != id),
            _ => {}
        }
    }
    let mut left: Vec<_> = live.into_iter().map(|(_, name, bytes)| (name, bytes)).collect();
    left.sort_unstable();
    left
}

/// Kernels of a phase, in order.
pub fn kernels(trace: &Trace, phase: PhaseName) -> Vec<&'static str> {
    let name = |event: &Event| match event {
        Event::Kernel { name, .. } => Some(*name),
        _ => None,
    };
    trace.phase(phase).unwrap().events.iter().filter_map(name).collect()
}
