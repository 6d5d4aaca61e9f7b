//! Runs a model block by block without any engine around it: on one rank or on several that share its layers,
//! on the CPU for its numbers, on `Meta` for what it takes and where it is.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "for who runs the test")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use half::{bf16, f16};
use phalanx_collectives::{Group, MetaGroup, threads};
use phalanx_cpu::Cpu;
use phalanx_layers::{
    AnySaved, Call, Checkpointing, Context, Draw, Gradient, Inputs, Network, POSITIONS, Parameter,
    ParameterSpec, Parameters, Rows, TARGETS, TOKENS,
};
use phalanx_models::{Bert, Gpt2, Model, RowsOf};
use phalanx_parallel::TensorParallel;
use phalanx_plan::trace::{Axis, PhaseName, Placement, Placements, Trace};
use phalanx_tensor::{Arena, Category, CrossEntropy, DType, Device, IGNORED, Shape, Tensor, View, ViewMut};
use phalanx_testing::planted::{Planted, PlantedFault};
use safetensors::SafeTensors;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

/// Numbers of a tensor in a golden file.
pub fn values(file: &str, name: &str) -> Vec<f32> {
    let bytes = std::fs::read(golden().join(file)).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let data = tensors.tensor(name).unwrap_or_else(|error| panic!("{name}: {error}"));
    data.data().chunks(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// All tensors of a golden file, sorted.
pub fn names_and_shapes(file: &str) -> Vec<(String, Vec<usize>)> {
    let bytes = std::fs::read(golden().join(file)).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let mut all: Vec<_> = tensors.iter().map(|(name, t)| (name.to_string(), t.shape().to_vec())).collect();
    all.sort();
    all
}

/// Numbers of a tensor of integers; -1 is [`IGNORED`].
pub fn ids(file: &str, name: &str) -> Vec<u32> {
    values(file, name).iter().map(|v| v.to_bits()).collect()
}

/// The `config.json` of a folder there.
pub fn config(folder: &str) -> serde_json::Value {
    let bytes = std::fs::read(golden().join(folder).join("config.json")).unwrap();
    serde_json::from_slice(&bytes).unwrap()
}

/// Rounded to the type of `to`.
fn upload(device: &Device, values: &[f32], to: ViewMut) {
    match to.dtype() {
        DType::BF16 => device.upload(&values.iter().map(|v| bf16::from_f32(*v)).collect::<Vec<_>>(), to),
        DType::F16 => device.upload(&values.iter().map(|v| f16::from_f32(*v)).collect::<Vec<_>>(), to),
        _ => device.upload(values, to),
    }
}

fn download(device: &Device, from: View) -> Vec<f32> {
    fn numbers<T: phalanx_tensor::Element + Default + Into<f32>>(device: &Device, from: View) -> Vec<f32> {
        let mut out = vec![T::default(); from.elements()];
        device.download(from, &mut out).unwrap();
        out.into_iter().map(Into::into).collect()
    }
    match from.dtype() {
        DType::BF16 => numbers::<bf16>(device, from),
        DType::F16 => numbers::<f16>(device, from),
        _ => numbers::<f32>(device, from),
    }
}

/// Gradients by name, and the mean loss.
pub struct Gradients {
    pub loss: f32,
    /// f32, in the order of the network.
    pub by_name: Vec<(String, Vec<f32>)>,
}

/// A model with golden weights, and a batch.
#[derive(Clone)]
pub struct Case {
    pub model: Arc<dyn Model>,
    /// Folder of `model.safetensors`.
    pub folder: &'static str,
    /// `[batch, seq]`
    pub shape: [usize; 2],
    pub tokens: Vec<u32>,
    pub targets: Vec<u32>,
    /// Positions in documents, where sequences have several.
    pub positions: Option<Vec<u32>>,
    pub compute: DType,
    pub checkpointing: Checkpointing,
    pub draw: Option<Draw>,
    /// The loss scale.
    pub loss_scale: f32,
    /// True if backward runs in two parts, all of the second after all of the first.
    pub split: bool,
}

/// The part of one rank.
struct Rank<'a> {
    case: &'a Case,
    device: Device,
    network: Network,
    parameters: Vec<Tensor>,
    tokens: Arc<Tensor>,
    inputs: Inputs<'static>,
    first_row: usize,
}

impl Case {
    /// The golden GPT-2: 4 sequences of 16 tokens, which are followed by others.
    pub fn gpt2(compute: DType) -> Case {
        let model = Gpt2::from_config(&config("gpt2")).unwrap();
        let sequences = ids("forward.safetensors", "tokens");
        let cut = |from: usize| sequences.chunks(17).flat_map(|s| s[from..from + 16].to_vec()).collect();
        Case {
            model: model.into(),
            folder: "gpt2",
            shape: [4, 16],
            tokens: cut(0),
            targets: cut(1),
            positions: None,
            compute,
            checkpointing: Checkpointing::None,
            draw: None,
            loss_scale: 1.0,
            split: false,
        }
    }

    /// The golden GPT-2 with another `activation_function`.
    pub fn gpt2_with(activation: &str) -> Case {
        let mut config = config("gpt2");
        config["activation_function"] = activation.into();
        Case { model: Gpt2::from_config(&config).unwrap().into(), ..Case::gpt2(DType::F32) }
    }

    /// The golden BERT: 4 sequences of 24 tokens of two types, of which 4 each are predicted.
    pub fn bert(compute: DType) -> Case {
        let model = Bert::from_config(&config("bert")).unwrap();
        let of = |name| ids("bert/forward.safetensors", name);
        Case {
            model: model.into(),
            folder: "bert",
            shape: [4, 24],
            tokens: of("tokens")
                .into_iter()
                .zip(of("types"))
                .map(|(token, kind)| token | kind << 31)
                .collect(),
            targets: of("targets"),
            ..Case::gpt2(compute)
        }
    }

    /// The golden BERT with three classes: 4 rows of unequal length and tokens of two types.
    pub fn bert_classes(compute: DType) -> Case {
        let model = Bert::from_config(&config("bert_classes")).unwrap();
        let of = |name| ids("bert_classes/forward.safetensors", name);
        let pairs = of("tokens").into_iter().zip(of("types"));
        // Behind each row, its padding counts as another document.
        let positions = |length: u32| (0..length).chain(0..20 - length);
        Case {
            model: model.into(),
            folder: "bert_classes",
            shape: [4, 20],
            tokens: pairs.map(|(token, kind)| token | kind << 31).collect(),
            targets: of("targets"),
            positions: Some(of("lengths").into_iter().flat_map(positions).collect()),
            ..Case::gpt2(compute)
        }
    }

    /// A golden decoder, by its folder: 3 sequences of 16 tokens, which are followed by others.
    pub fn decoder(folder: &'static str, compute: DType) -> Case {
        let sequences = ids(&format!("{folder}/forward.safetensors"), "tokens");
        let cut = |from: usize| sequences.chunks(17).flat_map(|s| s[from..from + 16].to_vec()).collect();
        let model = phalanx_models::from_config(&config(folder)).unwrap();
        Case { model, folder, shape: [3, 16], tokens: cut(0), targets: cut(1), ..Case::gpt2(compute) }
    }

    /// Both families.
    pub fn families() -> [Case; 2] {
        [Case::gpt2(DType::F32), Case::bert(DType::F32)]
    }

    /// Positions that are predicted.
    fn predicted(&self) -> Vec<usize> {
        (0..self.targets.len()).filter(|row| self.targets[*row] != IGNORED).collect()
    }

    fn numbers(&self) -> CrossEntropy {
        let mean = CrossEntropy::scaled(1.0 / self.predicted().len() as f32);
        CrossEntropy { gradient_scale: mean.scale * self.loss_scale, ..mean }
    }

    /// The golden values of `spec`, or of this rank's part of it.
    fn weights(&self, spec: &ParameterSpec) -> Vec<f32> {
        let file = format!("{}/model.safetensors", self.folder);
        let part = |member: &ParameterSpec| {
            let (name, shape) = (member.name.clone(), member.whole_shape().to_vec());
            let own = || RowsOf { name, shape, first: 0 };
            let RowsOf { name, shape, first } = self.model.source(member).unwrap_or_else(own);
            let theirs = values(&file, &name);
            assert_eq!(theirs.len(), shape.iter().product::<usize>(), "{name}");
            let runs = member.stripe().runs(0..member.elements() as u64);
            runs.flat_map(|(_, run)| {
                theirs[(first + run.start) as usize..(first + run.end) as usize].to_vec()
            })
            .collect::<Vec<_>>()
        };
        spec.members().iter().flat_map(part).collect()
    }

    fn rank(&self, device: Device, tensor: &TensorParallel, rank: usize) -> Rank<'_> {
        let network = self.model.network(tensor, self.checkpointing).unwrap();
        let parameter = |spec: &ParameterSpec| {
            let shape = Shape::from(spec.shape.as_slice());
            let mut tensor = device.alloc(self.compute, shape, Category::Parameters, "test");
            upload(&device, &self.weights(spec), tensor.view_mut());
            device.place(tensor.view(), placement(spec, Placement::Replicated));
            tensor
        };
        let parameters = network.parameters.iter().map(parameter).collect();
        let numbers = |numbers: &[u32], input: &str| {
            let inputs = self.model.inputs();
            let shape =
                inputs.iter().find(|known| known.name == input).map(|input| input.shape.of(self.shape));
            let shape = shape.unwrap_or(self.shape.into());
            let mut tensor = device.alloc(DType::U32, shape, Category::Activations, "test");
            device.upload(numbers, tensor.view_mut());
            device.place(tensor.view(), Placements::REPLICATED);
            tensor
        };
        let tokens = Arc::new(numbers(&self.tokens, TOKENS));
        let inputs = Inputs::only(TARGETS, Arc::new(numbers(&self.targets, TARGETS)));
        let inputs = match &self.positions {
            Some(positions) => inputs.and(POSITIONS, Arc::new(numbers(positions, POSITIONS))),
            None => inputs,
        };
        let first_row = if tensor.sequence() { rank * self.tokens.len() / tensor.ranks() } else { 0 };
        Rank { case: self, network, parameters, tokens, inputs, device, first_row }
    }

    fn solo(&self) -> Rank<'_> {
        self.rank(Device::new(Cpu::new(2), Arena::heap()), &TensorParallel::solo(), 0)
    }

    /// Logits of the positions that are predicted, and the mean loss.
    pub fn forward(&self) -> (Vec<f32>, f32) {
        let rank = self.solo();
        let cx = Context { keep: false, ..rank.context() };
        let (x, _) = rank.forward(&cx);
        let hidden = rank.network.width();
        let own = rank.parameters(rank.network.head_index());
        let head = rank.network.head.as_ref().unwrap();
        let logits = head.logits(&cx, Parameters::new(&own), x.view().reshape([self.targets.len(), hidden]));
        let all = download(&rank.device, logits.view());
        let [_, classes] = logits.dims();
        let predicted = self.predicted();
        let logits = predicted.iter().flat_map(|row| &all[row * classes..(row + 1) * classes]);
        let logits = logits.copied().collect();
        let call = Call { input_wanted: false, ..Call::new(Parameters::new(&own), x) };
        let (loss, _) = head.loss(&cx, call, self.numbers()).unwrap();
        (logits, rank.device.fetch([loss.view()]).unwrap()[0])
    }

    /// Runs on one rank.
    pub fn gradients(&self) -> Gradients {
        let rank = self.solo();
        let (loss, gradients) = rank.step();
        let by_name = self.as_in_goldens(members(&rank.network, rank.read(&gradients)).into_iter());
        Gradients { loss: rank.device.fetch([loss.view()]).unwrap()[0], by_name }
    }

    /// By the names of the golden files, which have as one what files of the model have as one, and BERT's query, key and value.
    fn as_in_goldens(&self, all: impl Iterator<Item = (ParameterSpec, Vec<f32>)>) -> Vec<(String, Vec<f32>)> {
        let mut out: Vec<(String, Vec<f32>)> = Vec::new();
        for (spec, values) in all {
            let packed = |name: String, part| name.replace(part, ".self.qkv.");
            let name =
                [".self.query.", ".self.key.", ".self.value."].into_iter().fold(spec.name.clone(), packed);
            let name = self.model.source(&spec).map_or(name, |rows| rows.name);
            match out.last_mut() {
                Some((last, packed)) if *last == name => packed.extend(values),
                _ => out.push((name, values)),
            }
        }
        out
    }

    /// Runs on tensor-parallel ranks, which are threads of this process, and assembles the results.
    pub fn gradients_over(&self, ranks: usize, sequence: bool) -> Gradients {
        let endpoints = threads(ranks);
        let body = |rank: usize, endpoint: phalanx_collectives::Endpoint| {
            let tensor = TensorParallel::new(endpoint.group("tensor"), sequence);
            let rank = self.rank(Device::new(Cpu::new(1), Arena::heap()), &tensor, rank);
            let (loss, gradients) = rank.step();
            let members = members(&rank.network, rank.read(&gradients));
            (rank.device.fetch([loss.view()]).unwrap()[0], members)
        };
        let results: Vec<_> = std::thread::scope(|scope| {
            let body = &body;
            let handles: Vec<_> = endpoints
                .into_iter()
                .enumerate()
                .map(|(rank, endpoint)| scope.spawn(move || body(rank, endpoint)))
                .collect();
            handles.into_iter().map(|handle| handle.join().unwrap()).collect()
        });
        let whole = |p: usize| {
            let parts: Vec<_> = results.iter().map(|(_, members)| (&members[p].0, &members[p].1)).collect();
            (parts[0].0.clone(), assembled(&parts))
        };
        let by_name = self.as_in_goldens((0..results[0].1.len()).map(whole));
        Gradients { loss: results[0].0, by_name }
    }

    /// The step of one of the ranks on `Meta`: its parameters, and a trace with all faults.
    pub fn dry_run(&self, ranks: usize, rank: usize, sequence: bool) -> (Vec<ParameterSpec>, Trace) {
        self.dry_run_with(ranks, rank, sequence, None)
    }

    /// The same with a planted fault.
    pub fn dry_run_with(
        &self,
        ranks: usize,
        rank: usize,
        sequence: bool,
        fault: Option<PlantedFault>,
    ) -> (Vec<ParameterSpec>, Trace) {
        let device = Device::meta(1);
        let recorder = Arc::clone(device.recorder().unwrap());
        let members: Vec<usize> = (0..ranks).collect();
        let group = |name, axis| {
            let recorder = Arc::clone(&recorder);
            Arc::new(MetaGroup::over(name, &[axis], &members, rank, recorder)) as Arc<dyn Group>
        };
        let (tensor, data) = (group("tensor", Axis::Tensor), group("data", Axis::Data));
        let tensor = match fault {
            None => tensor,
            Some(fault) => Planted::around(tensor, fault, &device, &data),
        };
        let tensor = TensorParallel::new(tensor, sequence);
        let rank = self.rank(device.clone(), &tensor, rank);
        let (_, gradients) = device.phase(PhaseName::Step, || rank.step());
        for (spec, gradient) in rank.network.parameters.iter().zip(&gradients) {
            let rest = if spec.partial { Placement::Partial } else { Placement::Replicated };
            device.expect_placement(gradient.view(), || spec.name.clone(), placement(spec, rest));
        }
        drop(gradients);
        (rank.network.members().cloned().collect(), device.take_trace(0))
    }

    /// The tensors that forward of block `index` saves on one rank, in elements per row (token), without row
    /// statistics.
    pub fn kept(&self, index: usize) -> usize {
        let device = Device::meta(1);
        let rank = self.rank(device.clone(), &TensorParallel::solo(), 0);
        let [batch, seq] = self.shape;
        let x = device.alloc(self.compute, [batch, seq, rank.network.width()], Category::Activations, "test");
        let layer = &rank.network.blocks[index].layer;
        let kept = device.phase(PhaseName::Forward, || {
            let own = rank.parameters(index);
            layer.forward(&rank.context(), Call::new(Parameters::new(&own), Arc::new(x))).unwrap()
        });
        let trace = device.take_trace(0);
        drop(kept);
        let mut live = Vec::new();
        for event in &trace.phase(PhaseName::Forward).unwrap().events {
            match event {
                phalanx_plan::trace::Event::Alloc { id, bytes, .. } => live.push((*id, *bytes as usize)),
                phalanx_plan::trace::Event::Free { id, .. } => live.retain(|(other, _)| other != id),
                _ => {}
            }
        }
        let row = batch * seq * self.compute.bytes();
        // Statistics have fewer numbers than a row of this width.
        live.iter().map(|(_, bytes)| bytes / row).filter(|n| *n >= rank.network.width()).sum()
    }
}

/// The parameters of a network, one by one, and the values of each.
fn members(network: &Network, values: Vec<Vec<f32>>) -> Vec<(ParameterSpec, Vec<f32>)> {
    let of = |(spec, values): (&ParameterSpec, Vec<f32>)| {
        let one = |(member, _, first): (&ParameterSpec, _, usize)| {
            (member.clone(), values[first..][..member.elements()].to_vec())
        };
        spec.of_members(0..values.len() as u64).map(one).collect::<Vec<_>>()
    };
    network.parameters.iter().zip(values).flat_map(of).collect()
}

/// The placement of a parameter; `rest` where it is whole on every rank (also for its gradient).
fn placement(spec: &ParameterSpec, rest: Placement) -> Placements {
    let here = spec.members()[0].part.as_ref().map_or(rest, |part| Placement::Shard(part.dim as u8));
    Placements::REPLICATED.with(Axis::Tensor, here)
}

/// Assembles a whole gradient from all ranks.
fn assembled(parts: &[(&ParameterSpec, &Vec<f32>)]) -> Vec<f32> {
    let (first, gradient) = parts[0];
    if first.partial {
        return (0..gradient.len()).map(|i| parts.iter().map(|(_, part)| part[i]).sum()).collect();
    }
    if first.part.is_none() {
        for (_, other) in parts {
            let same = gradient.iter().zip(*other).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same && gradient.len() == other.len(), "{} is not the same on all ranks", first.name);
        }
        return gradient.clone();
    }
    // Copies have a term each.
    let mut whole = vec![None; first.whole_shape().iter().product()];
    for (spec, part) in parts {
        for (here, there) in spec.stripe().runs(0..spec.elements() as u64) {
            let [here, there] = [here, there].map(|run| run.start as usize..run.end as usize);
            for (sum, term) in whole[there].iter_mut().zip(&part[here]) {
                *sum = Some(sum.unwrap_or(0.0) + term);
            }
        }
    }
    whole.into_iter().map(|element| element.expect("the parts are the whole")).collect()
}

impl Rank<'_> {
    fn context(&self) -> Context<'_> {
        let Case { compute, draw, shape, .. } = *self.case;
        let documents = self.case.positions.is_some();
        Context {
            draw,
            rows: Rows { documents, ..Rows::all(shape).from(self.first_row) },
            ..Context::new(&self.device, compute, shape).with(&self.inputs)
        }
    }

    fn parameters(&self, block: usize) -> Vec<Parameter<'_>> {
        let read = |p: &usize| {
            let members = self.network.parameters[*p].members().len();
            Parameter::read(self.parameters[*p].view(), true).joining(members)
        };
        self.network.uses[block].iter().map(read).collect()
    }

    fn forward(&self, cx: &Context) -> (Arc<Tensor>, Vec<AnySaved>) {
        let mut x = Arc::clone(&self.tokens);
        let mut saved = Vec::new();
        for (i, block) in self.network.blocks.iter().enumerate() {
            let own = self.parameters(i);
            let (y, kept) = block.layer.forward(cx, Call::new(Parameters::new(&own), x)).unwrap();
            x = y;
            saved.push(kept);
        }
        (x, saved)
    }

    /// Loss and gradients of all parameters.
    fn step(&self) -> (Tensor, Vec<Tensor>) {
        let cx = self.context();
        let like = |p: &Tensor| self.device.alloc(DType::F32, p.shape(), Category::Gradients, "test");
        let mut gradients: Vec<Tensor> = self.parameters.iter().map(like).collect();
        if !self.device.is_meta() {
            // Old values must be overwritten, not added to.
            gradients.iter_mut().for_each(|g| self.device.fill(g.view_mut(), 1e30));
        }
        let mut written = vec![false; gradients.len()];
        let (x, mut saved) = self.forward(&cx);
        let index = self.network.head_index();
        let head = self.network.head.as_ref().unwrap();
        let (loss, dy) = {
            let own = self.parameters_and_slots(&mut gradients, &mut written, index);
            let call = Call::new(Parameters::new(&own), x);
            head.loss(&cx, call, self.case.numbers()).unwrap()
        };
        let mut dy = dy.unwrap();
        let mut later = Vec::new();
        for (i, block) in self.network.blocks.iter().enumerate().rev() {
            let saved = saved.pop().unwrap();
            let own = self.parameters_and_slots(&mut gradients, &mut written, i);
            let call = Call::new(Parameters::new(&own), dy);
            let dx = if self.case.split {
                let (dx, deferred) = block.layer.backward_input(&cx, saved, call).unwrap();
                later.push((i, deferred));
                dx
            } else {
                block.layer.backward(&cx, saved, call).unwrap()
            };
            let Some(dx) = dx else { break };
            dy = dx;
        }
        for (i, deferred) in later {
            let own = self.parameters_and_slots(&mut gradients, &mut written, i);
            self.network.blocks[i].layer.backward_weight(&cx, Parameters::new(&own), deferred).unwrap();
        }
        (loss, gradients)
    }

    /// The parameters of a block, in its order, with the slots of their gradients.
    fn parameters_and_slots<'a>(
        &'a self,
        gradients: &'a mut [Tensor],
        written: &'a mut [bool],
        block: usize,
    ) -> Vec<Parameter<'a>> {
        let mut all: Vec<_> = gradients.iter_mut().zip(written).map(Some).collect();
        let take = |p: &usize| {
            let (tensor, flag) = all[*p].take().unwrap();
            let slot = Gradient::new(tensor.view_mut(), flag);
            let members = self.network.parameters[*p].members().len();
            Parameter::with_gradient(self.parameters[*p].view(), Some(slot)).joining(members)
        };
        self.network.uses[block].iter().map(take).collect()
    }

    fn read(&self, gradients: &[Tensor]) -> Vec<Vec<f32>> {
        let unscaled = |g: f32| g / self.case.loss_scale;
        gradients
            .iter()
            .map(|g| download(&self.device, g.view()).into_iter().map(unscaled).collect())
            .collect()
    }
}

/// Every gradient within `tolerance` of the greatest of its tensor in the golden `file`.
pub fn compare_gradients(file: &str, gradients: &Gradients, tolerance: f32) {
    let golden = names_and_shapes(file).into_iter().filter(|(name, _)| name.starts_with("grad.")).count();
    assert_eq!(gradients.by_name.len(), golden, "{file}: every gradient is compared");
    for (name, got) in &gradients.by_name {
        let expected = values(file, &format!("grad.{name}"));
        assert_eq!(got.len(), expected.len(), "{name}");
        let largest = expected.iter().fold(0f32, |m, v| m.max(v.abs()));
        for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
            let near = (got - expected).abs() <= tolerance * largest;
            assert!(near, "{name}[{i}]: {got} for {expected}, of at most {largest}");
        }
    }
}

/// The files of 16 bits hold what PyTorch gives in f64 with rounded parameters, and how far PyTorch is that
/// computes in the type: by tensor, the greatest error and the root mean square, each the worse of two runs.
/// Here activations are rounded at about as many places, but elsewhere: errors of the same distribution,
/// drawn anew. The smallest tensors have 32 elements; of 32 normal errors the greatest is twice the greatest
/// of two such runs once in two thousand times.
const TIMES_PYTORCH: f32 = 2.0;

/// Checks that errors are within [`TIMES_PYTORCH`] times PyTorch's, by maximum and root mean square.
pub fn compare_low(file: &str, name: &str, got: &[f32]) {
    let (expected, error) = (values(file, name), values(file, &format!("error.{name}")));
    assert_eq!(got.len(), expected.len(), "{name}");
    let off: Vec<f32> = got.iter().zip(&expected).map(|(g, e)| g - e).collect();
    let largest = |x: &[f32]| x.iter().fold(0f32, |m, v| m.max(v.abs()));
    let figures = [largest(&off) / largest(&expected), root_mean_square(&off) / root_mean_square(&expected)];
    for (what, figure, error) in [("greatest", figures[0], error[0]), ("mean", figures[1], error[1])] {
        println!("{file} {name}: {what} error {figure:.1e}, PyTorch's {error:.1e}");
        // Also fails for NaN.
        assert!(figure <= TIMES_PYTORCH * error, "{file} {name}: {what} error {figure}, PyTorch's {error}");
    }
}

/// Logits by [`compare_low`], and the loss.
pub fn compare_low_forward(file: &str, (logits, loss): &(Vec<f32>, f32)) {
    compare_low(file, "logits", logits);
    // A row's loss is the difference of a log-sum-exp and a logit, each off by about as much as a logit; the
    // mean is not off by more than that, were all of one sign.
    let logit_error = values(file, "error.logits")[1] * root_mean_square(&values(file, "logits"));
    let expected = values(file, "loss")[0];
    assert!((loss - expected).abs() <= TIMES_PYTORCH * logit_error, "loss {loss} for {expected}");
}

fn root_mean_square(x: &[f32]) -> f32 {
    (x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / x.len() as f64).sqrt() as f32
}
