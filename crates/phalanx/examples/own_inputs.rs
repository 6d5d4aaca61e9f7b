//! A model of floats with a loss of its own, on a mesh: `cargo run --release -p phalanx --example own_inputs`.
//!
//! It reads no tokens: the first block receives features, a block in the middle asks for gates, and the head for heights, each by name
//! and on the rank that has this block.
#![allow(clippy::print_stdout, reason = "a program of its own, for a terminal")]

use std::error::Error;
use std::sync::Arc;

use phalanx::layers::{
    Activation, Block, BlockRole, Call, CannotCut, Checkpointing, Context, Head, Init, Layer, Linear,
    LinearGelu, Output, ParameterSpec, Result, RowShape, Saved,
};
use phalanx::{
    CpuFactory, DataError, DataSource, Dropouts, Gelu, Input, LossNumbers, Model, Network, OwnOperation,
    RunConfig, SampleNumbers, Spec, Tensor, TensorParallel, Training,
};

const FEATURES: usize = 4;
const HIDDEN: usize = 16;

/// `y = x * gates`; gates are an input, `[batch, seq, HIDDEN]`.
struct Gate;

impl Gate {
    fn gated(cx: &Context, x: Activation) -> Activation {
        let gates = cx.input("gates");
        let mut y = cx.activation(x.shape(), "gate.y");
        let call = OwnOperation::new("gate").read("x", "rh", x.view()).read("gates", "rh", gates.view());
        call.write("y", "rh", y.view_mut()).run(cx.device, |[x, gates], [y]| {
            let (x, gates) = (x.as_slice::<f32>(), gates.as_slice::<f32>());
            y.into_slice::<f32>().iter_mut().enumerate().for_each(|(i, y)| *y = x[i] * gates[i]);
        });
        Arc::new(y)
    }
}

impl Layer for Gate {
    type Own = ();

    fn parameters(&self) -> Vec<ParameterSpec> {
        Vec::new()
    }

    fn forward(&self, cx: &Context, call: Call) -> Result<(Activation, Saved<()>)> {
        Ok((Gate::gated(cx, call.x), Saved::new(())))
    }

    fn backward(&self, cx: &Context, _: Saved<()>, call: Call) -> Result<Option<Activation>> {
        Ok(Some(Gate::gated(cx, call.x)))
    }
}

/// The mean of `(x - heights)^2` over the samples; heights are an input, `[batch, seq, 1]`.
struct SquaredError;

impl Head for SquaredError {
    fn parameters(&self) -> Vec<ParameterSpec> {
        Vec::new()
    }

    fn loss(&self, cx: &Context, call: Call, numbers: LossNumbers) -> Result<(Tensor, Option<Activation>)> {
        let heights = cx.input("heights");
        let mut loss = cx.statistics([1], "squared_error.loss");
        let mut dx = cx.activation(call.x.shape(), "squared_error.dx");
        let LossNumbers { scale, gradient_scale, .. } = numbers;
        let squares = OwnOperation::new("squared_error")
            .read("x", "rh", call.x.view())
            .read("heights", "rh", heights.view())
            .write("loss", "h", loss.view_mut())
            .write("dx", "rh", dx.view_mut());
        squares.run(cx.device, move |[x, heights], [loss, dx]| {
            let errors = x.as_slice::<f32>().iter().zip(heights.as_slice::<f32>()).map(|(x, y)| x - y);
            loss.into_slice::<f32>()[0] = errors.clone().map(|error| error * error).sum::<f32>() * scale;
            dx.into_slice::<f32>().iter_mut().zip(errors).for_each(|(dx, e)| *dx = 2.0 * e * gradient_scale);
        });
        Ok((loss, Some(Arc::new(dx))))
    }
}

#[derive(Debug)]
struct Regression;

impl Model for Regression {
    fn network(&self, _: &TensorParallel, _: Checkpointing) -> std::result::Result<Network, CannotCut> {
        let linear = |name: &str, inputs, outputs| {
            Linear::new([Output::new(name, outputs)], inputs, Init::Normal(0.5))
        };
        let block = |name: &str, layer, width| {
            let output = RowShape::tokens(width);
            Block { name: name.into(), role: BlockRole::Transformer, layer, output }
        };
        let widen = LinearGelu { linear: linear("widen", FEATURES, HIDDEN), gelu: Gelu::Tanh };
        let blocks = vec![
            block("widen", Box::new(widen), HIDDEN),
            block("gate", Box::new(Gate), HIDDEN),
            block("narrow", Box::new(linear("narrow", HIDDEN, 1)), 1),
        ];
        Ok(Network::new(blocks, Box::new(SquaredError)))
    }

    fn inputs(&self) -> Vec<Input> {
        let floats = |name, width| Input::floats(name, RowShape::tokens(width));
        vec![floats("features", FEATURES), floats("gates", HIDDEN), floats("heights", 1)]
    }

    fn dropping(&self, _: Dropouts) -> Arc<dyn Model> {
        Arc::new(Regression)
    }
}

/// Points of a plane.
struct Plane;

impl DataSource for Plane {
    fn sample(&self, _: u64, _: &mut [u32], _: &mut [u32]) -> std::result::Result<(), DataError> {
        Ok(())
    }

    fn input(&self, sample: u64, name: &str, to: SampleNumbers) -> std::result::Result<(), DataError> {
        let SampleNumbers::Floats(to) = to else { unreachable!("the model reads floats") };
        let feature = |i: u64| ((sample * 7 + i * 3) % 11) as f32 / 11.0;
        match name {
            "features" => (0..).zip(to).for_each(|(i, to)| *to = feature(i)),
            "gates" => to.fill(1.0),
            _ => to.fill(2.0 * feature(0) - feature(1)),
        }
        Ok(())
    }
}

/// A training run of the model with these keys of `[parallel]`: so many samples a step, in micro-batches of 2.
pub fn on_mesh(samples: usize, parallel: &str) -> std::result::Result<Training, Box<dyn Error>> {
    let keys =
        format!("[model]\nseq = 1\n[batch]\nglobal = {samples}\nmicro = 2\n[optimizer]\nlr = 0.02\nclip = 0");
    let config: RunConfig = toml::from_str(&format!("{keys}\n[parallel]\n{parallel}"))?;
    let model: Arc<dyn Model> = Arc::new(Regression);
    Ok(Training::new(Spec::new(&config, model, 0, 1)?, Plane, 5)?)
}

/// ZeRO-3 on two ranks; on four, they are two pipeline stages with two replicas each.
pub fn training(ranks: usize) -> std::result::Result<Training, Box<dyn Error>> {
    let (pipeline, data) = (ranks.div_ceil(2).min(2), ranks.min(2));
    on_mesh(8, &format!("pipeline = {pipeline}\ndata = {data}\nzero = 3\nschedule = \"1f1b\""))
}

fn main() -> std::result::Result<(), Box<dyn Error>> {
    for losses in training(4)?.on_threads(&CpuFactory::new())? {
        println!("{:?}", losses?);
    }
    Ok(())
}
