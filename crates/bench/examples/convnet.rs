//! A ConvNet on images of digits, as in the tutorials of DataParallel: `cargo run --release -p phalanx-bench --example convnet [STEPS]`.
//!
//! Two devices train the same network with each method: DataParallel with the outputs gathered on device 0 and with the loss inside
//! forward, DDP, and ZeRO-3. The table has the loss, the share of held-out images that are recognised, and the peak of the memory of
//! each device, as it was measured and as it was planned.
#![allow(clippy::print_stdout, reason = "a program of its own, for a terminal")]

use std::error::Error;
use std::sync::Arc;
use std::time::Instant;

use phalanx_bench::baselines::data_parallel::DataParallel;
use phalanx_collectives::Isa;
use phalanx_cpu::{Cpu, CpuFactory};
use phalanx_data::DataError;
use phalanx_drawing::report::{Table, bytes, percent, seconds};
use phalanx_layers::{
    AnyLayer, Block, BlockRole, Call, CannotCut, Checkpointing, Context, Conv2d, Flatten, Init, Input,
    Linear, LinearCrossEntropy, MaxPool2d, Network, Output, Parameter, ParameterSpec, Parameters, Relu,
    RowShape, Sequence, TARGETS,
};
use phalanx_models::{Dropouts, Model};
use phalanx_parallel::TensorParallel;
use phalanx_parallel::zero::{Selection, StateSpan};
use phalanx_plan::MemoryPlan;
use phalanx_plan::trace::PhaseName;
use phalanx_system::random::SplitMix64;
use phalanx_tensor::{Arena, Category, DType, Device, Patches, Shape, Tensor};
use phalanx_train::rank::{Batch, Rank, SampleNumbers};
use phalanx_train::{DataSource, RunConfig, RunError, Spec, Training, on_threads};

/// Height and width of the images that the network reads.
pub const SIDE: usize = 16;
const CLASSES: usize = 10;
/// Channels behind each convolution.
const CHANNELS: [usize; 2] = [8, 16];
const HIDDEN: usize = 64;
/// Images of a step, those of both devices together.
const BATCH: usize = 64;
const DEVICES: usize = 2;
/// Images that are held out, and the position of the first, which no run comes near.
const HELD_OUT: usize = 2000;
const FIRST_HELD_OUT: u64 = 1 << 40;

/// The digits, 5 x 7 pixels: a row is five bits.
const GLYPHS: [[u8; 7]; CLASSES] = [
    [0b01110, 0b10001, 0b10011, 0b10101, 0b11001, 0b10001, 0b01110],
    [0b00100, 0b01100, 0b00100, 0b00100, 0b00100, 0b00100, 0b01110],
    [0b01110, 0b10001, 0b00001, 0b00110, 0b01000, 0b10000, 0b11111],
    [0b11110, 0b00001, 0b00001, 0b01110, 0b00001, 0b00001, 0b11110],
    [0b00010, 0b00110, 0b01010, 0b10010, 0b11111, 0b00010, 0b00010],
    [0b11111, 0b10000, 0b11110, 0b00001, 0b00001, 0b10001, 0b01110],
    [0b00110, 0b01000, 0b10000, 0b11110, 0b10001, 0b10001, 0b01110],
    [0b11111, 0b00001, 0b00010, 0b00100, 0b01000, 0b01000, 0b01000],
    [0b01110, 0b10001, 0b10001, 0b01110, 0b10001, 0b10001, 0b01110],
    [0b01110, 0b10001, 0b10001, 0b01111, 0b00001, 0b00010, 0b01100],
];

/// Digits of several sizes, places and brightnesses, with noise: each image is a function of its position in the run.
pub struct Digits {
    /// Height and width of an image.
    pub side: usize,
}

impl Digits {
    /// The digit at a position, and its image, `[side * side]`.
    fn draw(&self, position: u64) -> (u32, Vec<f32>) {
        let mut random = SplitMix64::new(position);
        let mut between = |low: f64, high: f64| low + (high - low) * random.next_fraction();
        let digit = between(0.0, CLASSES as f64) as usize;
        let scale = between(1.6, 2.0) * self.side as f64 / 16.0;
        let [left, top] = [5.0, 7.0].map(|pixels| between(0.0, self.side as f64 - scale * pixels));
        let brightness = between(0.6, 1.0);
        let pixel = |i: usize| {
            let glyph = |at: usize, first: f64| ((at as f64 + 0.5 - first) / scale).floor();
            let (x, y) = (glyph(i % self.side, left), glyph(i / self.side, top));
            let is_inside = (0.0..5.0).contains(&x) && (0.0..7.0).contains(&y);
            let is_drawn = is_inside && (GLYPHS[digit][y as usize] >> (4 - x as usize)) & 1 == 1;
            (f64::from(u8::from(is_drawn)) * brightness + between(-0.25, 0.25)) as f32
        };
        (digit as u32, (0..self.side * self.side).map(pixel).collect())
    }
}

impl DataSource for Digits {
    fn sample(&self, position: u64, _: &mut [u32], targets: &mut [u32]) -> Result<(), DataError> {
        targets[0] = self.draw(position).0;
        Ok(())
    }

    fn input(&self, position: u64, name: &str, to: SampleNumbers) -> Result<(), DataError> {
        to.write(name, &self.draw(position).1)
    }

    fn leaves_out_targets(&self) -> bool {
        false
    }
}

/// Two convolutions, each with ReLU and pooling, and two linear layers.
#[derive(Debug)]
struct ConvNet;

impl ConvNet {
    /// A convolution of images of `side` x `side` pixels, which leaves a quarter of them.
    fn convolution(name: &str, side: usize, channels: [usize; 2]) -> Block {
        let pool = MaxPool2d { patches: Patches::square([side; 2], 2, 2, 0) };
        let convolution = Conv2d::new(name, Patches::square([side; 2], 3, 1, 1), channels);
        let row = [pool.patches.count(), channels[1]];
        ConvNet::block(name, vec![Box::new(convolution), Box::new(Relu), Box::new(pool)], row)
    }

    /// Layers whose output has these pixels and channels.
    fn block(name: &str, layers: Vec<Box<dyn AnyLayer>>, row: [usize; 2]) -> Block {
        let output = RowShape::samples(1).with_row(&row);
        let layer = Box::new(Sequence::new(layers));
        Block { name: name.into(), role: BlockRole::Transformer, layer, output }
    }
}

impl Model for ConvNet {
    fn network(&self, _: &TensorParallel, _: Checkpointing) -> Result<Network, CannotCut> {
        let ([first, second], pixels) = (CHANNELS, SIDE * SIDE / 16);
        let normal = |inputs: usize| Init::Normal((2.0 / inputs as f32).sqrt());
        let inputs = pixels * second;
        let hidden = Linear::new([Output::new("hidden", HIDDEN)], inputs, normal(inputs));
        let blocks = vec![
            ConvNet::convolution("first", SIDE, [1, first]),
            ConvNet::convolution("second", SIDE / 2, [first, second]),
            ConvNet::block(
                "hidden",
                vec![Box::new(Flatten { pixels }), Box::new(hidden), Box::new(Relu)],
                [1, HIDDEN],
            ),
        ];
        let head = LinearCrossEntropy {
            weight: "classes.weight".into(),
            bias: Some("classes.bias".into()),
            vocab: CLASSES,
            added: 0,
            hidden: HIDDEN,
            init: normal(HIDDEN),
        };
        Ok(Network::new(blocks, Box::new(head)))
    }

    fn inputs(&self) -> Vec<Input> {
        let image = RowShape::samples(1).with_row(&[SIDE * SIDE, 1]);
        vec![Input::floats("image", image), Input::ids(TARGETS, CLASSES)]
    }

    fn dropping(&self, _: Dropouts) -> Arc<dyn Model> {
        Arc::new(ConvNet)
    }
}

/// A run of `ranks` ranks with `threads` threads each.
fn spec(ranks: usize, zero: u8, threads: usize) -> Result<Spec, Box<dyn Error>> {
    let text = format!(
        "[model]\nseq = 1\n[batch]\nglobal = {BATCH}\n[optimizer]\nlr = 0.004\n[parallel]\ndata = {ranks}\nzero = {zero}"
    );
    let config: RunConfig = toml::from_str(&text)?;
    let model: Arc<dyn Model> = Arc::new(ConvNet);
    Ok(Spec::new(&config, model, 0, threads)?)
}

/// Consecutive elements of a parameter: its name, the number of the first of them, and the elements.
type Weights = (String, usize, Vec<f32>);

/// The weights that a rank saves: over all ranks, each once.
fn weights(rank: &Rank) -> Result<Vec<Weights>, RunError> {
    let [stage] = rank.stages() else { panic!("one stage") };
    let read = |span: StateSpan| {
        let mut values = vec![0.0; (span.elements.end - span.elements.start) as usize];
        rank.chunks().read_span(0, &span, 0..values.len(), &mut values)?;
        let name = stage.network.parameters[span.parameter].name.clone();
        Ok((name, span.elements.start as usize, values))
    };
    rank.chunks().spans(0, 0, Selection::Owned).into_iter().map(read).collect()
}

fn read<'a>(parameters: &'a [Tensor], uses: &[usize]) -> Vec<Parameter<'a>> {
    uses.iter().map(|p| Parameter::read(parameters[*p].view(), false)).collect()
}

/// The share of the held-out images that the network with these weights recognises.
fn accuracy(weights: &[Weights]) -> Result<f64, Box<dyn Error>> {
    let device = Device::new(Cpu::new(DEVICES), Arena::heap());
    let upload = |shape: &[usize], values: &[f32]| {
        let mut tensor = device.alloc(DType::F32, Shape::from(shape), Category::Activations, "held_out");
        device.upload(values, tensor.view_mut());
        tensor
    };
    let network = ConvNet.whole();
    let filled = |spec: &ParameterSpec| {
        let mut values = vec![0.0; spec.elements()];
        for (_, first, own) in weights.iter().filter(|(name, ..)| *name == spec.name) {
            values[*first..][..own.len()].copy_from_slice(own);
        }
        upload(&spec.shape, &values)
    };
    let parameters: Vec<Tensor> = network.parameters.iter().map(filled).collect();
    let held_out = |i: usize| Digits { side: SIDE }.draw(FIRST_HELD_OUT + i as u64);
    let (labels, images): (Vec<u32>, Vec<Vec<f32>>) = (0..HELD_OUT).map(held_out).unzip();
    let mut x = Arc::new(upload(&[HELD_OUT, SIDE * SIDE, 1], &images.concat()));
    let cx = Context { keep: false, ..Context::new(&device, DType::F32, [HELD_OUT, 1]) };
    for (i, block) in network.blocks.iter().enumerate() {
        let own = read(&parameters, &network.uses[i]);
        let call = Call { input_wanted: false, ..Call::new(Parameters::new(&own), x) };
        x = block.layer.forward(&cx, call)?.0;
    }
    let head = network.head.as_ref().expect("a whole network has a head");
    let own = read(&parameters, &network.uses[network.head_index()]);
    let logits = head.logits(&cx, Parameters::new(&own), x.view().reshape([HELD_OUT, HIDDEN]));
    let mut numbers = vec![0f32; HELD_OUT * CLASSES];
    device.download(logits.view(), &mut numbers)?;
    let best = |row: &[f32]| (0..CLASSES).max_by(|a, b| row[*a].total_cmp(&row[*b]));
    let rows = numbers.chunks(CLASSES).zip(&labels);
    Ok(rows.filter(|(row, label)| best(row) == Some(**label as usize)).count() as f64 / HELD_OUT as f64)
}

/// A method, and the results of its training.
pub struct Trained {
    /// The name of the method.
    pub method: &'static str,
    /// The loss of each step.
    pub losses: Vec<f32>,
    /// The share of the held-out images that are recognised.
    pub accuracy: f64,
    /// For each device: the peak of its memory in bytes, measured and planned.
    pub peaks: Vec<[u64; 2]>,
    /// Seconds of all steps.
    pub seconds: f64,
}

fn planned(memory: &MemoryPlan) -> u64 {
    memory.phase(PhaseName::Step).map_or(0, |step| step.peak.bytes)
}

/// Trains ranks, which are threads of this process.
///
/// # Errors
/// Images of another size than the network reads.
pub fn on_ranks(
    method: &'static str,
    (ranks, zero): (usize, u8),
    steps: usize,
    digits: Digits,
) -> Result<Trained, Box<dyn Error>> {
    let training = Training::new(spec(ranks, zero, DEVICES / ranks)?, digits, steps as u64)?;
    let start = Instant::now();
    let trained = on_threads(&CpuFactory::new(), training.plan(), |rank| {
        let losses = training.train(rank, |_, _| {})?;
        let measured = rank.device().arena().peak().map_or(0, |peak| peak.bytes);
        Ok::<_, RunError>((losses, measured, weights(rank)?))
    })?;
    let seconds = start.elapsed().as_secs_f64();
    let (mut losses, mut peaks, mut all) = (Vec::new(), Vec::new(), Vec::new());
    for (rank, trained) in trained.into_iter().enumerate() {
        let (of_all, measured, own) = trained?;
        losses = of_all;
        peaks.push([measured, planned(&training.plan().of(rank).memory)]);
        all.extend(own);
    }
    Ok(Trained { method, losses, accuracy: accuracy(&all)?, peaks, seconds })
}

/// Trains the devices of one process. Device 0 has the state, and takes the loss of the outputs of all, unless it is inside forward.
///
/// # Errors
/// Memory that the system does not give.
pub fn data_parallel(
    method: &'static str,
    loss_in_forward: bool,
    steps: usize,
) -> Result<Trained, Box<dyn Error>> {
    let spec = spec(1, 0, 1)?;
    let plan = DataParallel::plan(&spec, DEVICES, loss_in_forward)?;
    let mut engine = DataParallel::new(&plan, Isa::detect())?;
    engine.initialise(spec.model.seed)?;
    let mut batch = Batch::of(&spec.batch, BATCH);
    let (mut losses, start) = (Vec::new(), Instant::now());
    for step in 0..steps {
        let first = (step * BATCH) as u64;
        batch.fill((&spec.batch, spec.mesh.axes), 0, first, &Digits { side: SIDE })?;
        losses.push(engine.step(&batch)?.loss);
    }
    let seconds = start.elapsed().as_secs_f64();
    let peaks = plan.memory.iter().zip(engine.peaks()).map(|(memory, peak)| [peak.bytes, planned(memory)]);
    let accuracy = accuracy(&weights(engine.root())?)?;
    Ok(Trained { method, losses, accuracy, peaks: peaks.collect(), seconds })
}

/// All methods, DDP first.
///
/// # Errors
/// Memory that the system does not give.
pub fn all(steps: usize) -> Result<Vec<Trained>, Box<dyn Error>> {
    let on_ranks = |method, mesh| on_ranks(method, mesh, steps, Digits { side: SIDE });
    Ok(vec![
        on_ranks("DDP", (DEVICES, 0))?,
        on_ranks("ZeRO-3", (DEVICES, 3))?,
        data_parallel("DataParallel, loss inside forward", true, steps)?,
        data_parallel("DataParallel, outputs gathered", false, steps)?,
        on_ranks("one device", (1, 0))?,
    ])
}

/// The largest difference between the losses of two runs.
pub fn apart(a: &Trained, b: &Trained) -> f32 {
    a.losses.iter().zip(&b.losses).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

fn main() -> Result<(), Box<dyn Error>> {
    let steps = std::env::args().nth(1).map_or(Ok(300), |steps| steps.parse())?;
    let trained = all(steps)?;
    let loss = |of: &Trained| of.losses.iter().rev().take(20).sum::<f32>() / steps.min(20) as f32;
    let memory = |of: &Trained, device: usize| match of.peaks.get(device) {
        Some([measured, planned]) => format!("{} ({})", bytes(*measured), bytes(*planned)),
        None => String::new(),
    };
    let table = Table::of(
        &trained,
        &[
            ("method", &|of| of.method.to_string()),
            ("loss", &|of| format!("{:.5}", loss(of))),
            ("at most from DDP's", &|of| format!("{:.1e}", apart(of, &trained[0]))),
            ("recognised", &|of| percent(of.accuracy)),
            ("device 0 (planned)", &|of| memory(of, 0)),
            ("device 1 (planned)", &|of| memory(of, 1)),
            ("time", &|of| seconds(of.seconds)),
        ],
    );
    println!("{steps} steps of {BATCH} images; the loss is the mean of the last 20 steps\n{table}");
    Ok(())
}
