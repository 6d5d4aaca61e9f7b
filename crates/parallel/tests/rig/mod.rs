//! A layer on the ranks of a tensor axis, as threads, and the same layer whole on one rank: what each gives, and
//! how far apart they may be.

use std::sync::Arc;

use phalanx_collectives::{Group, Solo, threads};
use phalanx_cpu::Cpu;
use phalanx_layers::{
    Activation, AnyLayer, Attention, Call, Context, Deferred, Draw, Dropped, Fork, Init, LayerNorm, Linear,
    LinearGelu, Output, Parameter, ParameterSpec, Parameters, Pieces, Rows, Sequence,
};
use phalanx_parallel::TensorParallel;
use phalanx_tensor::{Arena, Category, DType, Device, Gelu, Heads, Layout, Shape, Tensor};
use phalanx_testing::planted::{Planted, PlantedFault};

/// Twelve rows: two, three and four ranks share them, and a share of three or four does not end where a sample does.
pub const BATCH: usize = 2;
pub const SEQ: usize = 6;
pub const ROWS: usize = BATCH * SEQ;
pub const HIDDEN: usize = 24;
pub const HEADS: usize = 12;
/// Micro-batches of a run.
pub const MICRO_BATCHES: usize = 2;

/// Tensor axes that are tested: number of ranks, and whether rows are sharded too.
pub const AXES: [(usize, bool); 6] = [(2, false), (3, false), (4, false), (2, true), (3, true), (4, true)];

/// The draw of a later step, for a micro-batch that is not the first of the global batch.
pub const DRAW: Draw = Draw { seed: 3, step: 5, first_sample: 7 };

/// A model, written once for all axes.
pub type Build = dyn Fn(&TensorParallel) -> Box<dyn AnyLayer> + Sync;

pub fn linear(prefix: &str, inputs: usize, outputs: usize, layout: Layout) -> Linear {
    Linear { layout, ..Linear::new([Output::new(prefix, outputs)], inputs, Init::Normal(1.0)) }
}

pub fn norm(prefix: &str) -> LayerNorm {
    LayerNorm { prefix: prefix.into(), hidden: HIDDEN, eps: 1e-5, centred: true, bias: true, from_one: false }
}

/// Dropout probabilities: attention, residual.
pub type P = (f32, f32);

/// The layers of both residual paths of a block.
pub fn paths(
    tensor: &TensorParallel,
    layout: Layout,
    (attention, residual): P,
) -> [Vec<Box<dyn AnyLayer>>; 2] {
    let dropped = |layer, name: &str| Box::new(Dropped { layer, p: residual, name: name.into() });
    let heads = Heads::equal(HEADS, HIDDEN / HEADS, true);
    let attention =
        Attention { heads, dropout: attention, name: "attn".into(), first_head: 0, all_heads: HEADS };
    let mut qkv = linear("qkv", HIDDEN, 3 * HIDDEN, layout);
    qkv.outputs[0].pieces = Pieces { packed: 3, ..Pieces::of(HEADS) };
    let fc = LinearGelu { linear: linear("fc", HIDDEN, 4 * HIDDEN, layout), gelu: Gelu::Tanh };
    [
        vec![
            tensor.rows(norm("ln_1")),
            tensor.column(qkv).unwrap(),
            Box::new(tensor.attention(attention).unwrap()),
            dropped(tensor.row(linear("proj_1", HIDDEN, HIDDEN, layout)).unwrap(), "drop_1"),
        ],
        vec![
            tensor.rows(norm("ln_2")),
            tensor.column(fc).unwrap(),
            dropped(tensor.row(linear("proj_2", 4 * HIDDEN, HIDDEN, layout)).unwrap(), "drop_2"),
        ],
    ]
}

pub fn block(tensor: &TensorParallel, p: P) -> Sequence {
    let [a, b] = paths(tensor, Layout::InOut, p);
    Sequence::new(vec![
        Box::new(Fork::residual(Sequence::new(a))),
        Box::new(Fork::residual(Sequence::new(b))),
    ])
}

pub fn rebuilding_block(tensor: &TensorParallel, p: P) -> Sequence {
    let [a, b] = paths(tensor, Layout::InOut, p).map(|path| Sequence::new(path).rebuilding());
    Sequence::new(vec![Box::new(Fork::residual(a)), Box::new(Fork::residual(b))])
}

/// The inputs of a layer.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// The input is tokens below this, or (None) activations of [`HIDDEN`].
    pub vocab: Option<usize>,
    /// True if forward and backward are given a residual.
    pub residual: bool,
    pub draw: Option<Draw>,
    pub compute: DType,
    /// True if backward comes in two parts, the second of both micro-batches last.
    pub split: bool,
}

/// Activations in f32, without dropout.
pub const PLAIN: Setting =
    Setting { vocab: None, residual: false, draw: None, compute: DType::F32, split: false };

/// A rank's part of the results: its rows, and its parts of the gradients.
#[derive(Clone, Debug, PartialEq)]
pub struct Numbers {
    /// Outputs of all micro-batches, one after another.
    pub y: Vec<Vec<f32>>,
    pub dx: Vec<Vec<f32>>,
    /// The gradient of each parameter: the sum over micro-batches and what was there before.
    pub gradients: Vec<Vec<f32>>,
    pub specs: Vec<ParameterSpec>,
}

/// The result of every rank. A rank that panics ends the job, and this test.
pub fn on_ranks<R: Send>(ranks: usize, body: impl Fn(Arc<dyn Group>) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let body = &body;
        let run =
            |endpoint: phalanx_collectives::Endpoint| scope.spawn(move || body(endpoint.group("tensor")));
        let handles: Vec<_> = threads(ranks).into_iter().map(run).collect();
        let join = |handle: std::thread::ScopedJoinHandle<R>| {
            handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        handles.into_iter().map(join).collect()
    })
}

/// A device, and the rows and parameters of one rank on it.
pub struct TestRank<'a> {
    pub device: Device,
    pub tensor: &'a TensorParallel,
    /// Number of this rank.
    pub rank: usize,
}

impl<'a> TestRank<'a> {
    pub fn new(tensor: &'a TensorParallel, rank: usize) -> TestRank<'a> {
        TestRank { device: Device::new(Cpu::new(1), Arena::heap()), tensor, rank }
    }

    /// Like [`TestRank::new`], for a rank in whose group a fault is planted; `body` runs with it.
    pub fn with_fault<R>(
        group: Arc<dyn Group>,
        sequence: bool,
        fault: PlantedFault,
        body: impl FnOnce(&TestRank) -> R,
    ) -> R {
        let device = Device::new(Cpu::new(1), Arena::heap());
        let (rank, alone) = (group.rank(), Arc::new(Solo::new("data")) as Arc<dyn Group>);
        let tensor = TensorParallel::new(Planted::around(group, fault, &device, &alone), sequence);
        body(&TestRank { device, tensor: &tensor, rank })
    }

    /// The number of this rank's first row, and the number of its rows.
    pub fn rows(&self) -> [usize; 2] {
        let each = if self.tensor.sequence() { ROWS / self.tensor.ranks() } else { ROWS };
        [if self.tensor.sequence() { self.rank * each } else { 0 }, each]
    }

    pub fn context(&self, setting: Setting, micro_batch: usize) -> Context<'_> {
        let [first_row, _] = self.rows();
        let later =
            |draw: Draw| Draw { first_sample: draw.first_sample + (micro_batch * BATCH) as u64, ..draw };
        let draw = setting.draw.map(later);
        let rows = Rows::all([BATCH, SEQ]).from(first_row);
        Context { draw, rows, ..Context::new(&self.device, setting.compute, rows.tokens) }
    }

    pub fn upload(&self, dtype: DType, shape: impl Into<Shape>, values: &[f32]) -> Tensor {
        let shape = shape.into();
        let alloc = |dtype| self.device.alloc(dtype, shape, Category::Activations, "test");
        let (mut exact, mut tensor) = (alloc(DType::F32), alloc(dtype));
        self.device.upload(values, exact.view_mut());
        self.device.convert(exact.view(), tensor.view_mut());
        tensor
    }

    pub fn read(&self, tensor: &Tensor) -> Vec<f32> {
        let mut exact = self.device.alloc(DType::F32, tensor.shape(), Category::Activations, "test");
        self.device.convert(tensor.view(), exact.view_mut());
        let mut values = vec![0f32; tensor.shape().elements()];
        self.device.download(exact.view(), &mut values).unwrap();
        values
    }

    /// This rank's rows of `[batch, seq, HIDDEN]` normal numbers.
    pub fn activation(&self, compute: DType, name: &str, micro_batch: usize) -> Activation {
        let all = normals(&format!("{name} {micro_batch}"), ROWS * HIDDEN);
        let [first, rows] = self.rows();
        let shape = if rows < ROWS { [1, rows, HIDDEN] } else { [BATCH, SEQ, HIDDEN] };
        Arc::new(self.upload(compute, shape, &all[first * HIDDEN..(first + rows) * HIDDEN]))
    }

    /// All ids, of both types, some of them twice.
    fn tokens(&self, vocab: usize, micro_batch: usize) -> Activation {
        let token = |i: usize| ((i % 9 * 17 + micro_batch * 5) % vocab) as u32 | ((i as u32 / 2) % 2) << 31;
        let ids: Vec<u32> = (0..ROWS).map(token).collect();
        let mut tensor = self.device.alloc(DType::U32, [BATCH, SEQ], Category::Activations, "test");
        self.device.upload(&ids, tensor.view_mut());
        Arc::new(tensor)
    }

    /// This rank's part of a parameter, or of its initial gradient: normal numbers, scaled so that a sum over `fan_in`
    /// of them is about one, and gains of about one.
    pub fn parameter(&self, dtype: DType, spec: &ParameterSpec, what: &str) -> Tensor {
        let whole: usize = spec.whole_shape().iter().product();
        let mut values = normals(&format!("{what} {}", spec.name), whole);
        let std = (HIDDEN as f32).sqrt().recip();
        values.iter_mut().for_each(|v| *v = *v * std + if spec.init == Init::Ones { 1.0 } else { 0.0 });
        let mut here = vec![0f32; spec.elements()];
        for (local, global) in spec.stripe().runs(0..here.len() as u64) {
            here[range(&local)].copy_from_slice(&values[range(&global)]);
        }
        self.upload(dtype, spec.shape.as_slice(), &here)
    }

    /// The initial gradient. If gradients are terms of a sum, the first rank that has a term has all of it.
    pub fn gradient(&self, dtype: DType, spec: &ParameterSpec) -> Tensor {
        let mut tensor = self.parameter(dtype, spec, "gradient");
        let is_first =
            spec.part.as_ref().map_or(self.rank == 0, |part| self.rank.is_multiple_of(part.copies));
        if spec.terms().is_some() && !is_first {
            self.device.fill(tensor.view_mut(), 0.0);
        }
        tensor
    }
}

fn range(r: &std::ops::Range<u64>) -> std::ops::Range<usize> {
    r.start as usize..r.end as usize
}

pub fn normals(name: &str, count: usize) -> Vec<f32> {
    let mut values = vec![0f32; count];
    Init::Normal(1.0).fill(2, name, 0, &mut values);
    values
}

/// Runs forward and backward of [`MICRO_BATCHES`] micro-batches, whose gradients are added to the initial ones.
pub fn run(place: &TestRank, layer: &dyn AnyLayer, setting: Setting) -> Numbers {
    let compute = setting.compute;
    let specs = layer.parameters();
    let parameters: Vec<Tensor> = specs.iter().map(|s| place.parameter(compute, s, "parameter")).collect();
    let mut gradients: Vec<Tensor> = specs.iter().map(|s| place.gradient(DType::F32, s)).collect();
    let mut written = vec![true; specs.len()];
    let (y, dx) = run_with(
        place,
        layer,
        setting,
        &Parameter::with_gradients(&parameters, &mut gradients, &mut written),
    );
    Numbers { y, dx, gradients: gradients.iter().map(|g| place.read(g)).collect(), specs }
}

/// The outputs and derivatives of all micro-batches.
fn run_with<'a>(
    place: &TestRank,
    layer: &dyn AnyLayer,
    setting: Setting,
    own: &'a [Parameter<'a>],
) -> (Vec<Vec<f32>>, Vec<Vec<f32>>) {
    let Setting { vocab, residual, compute, split, .. } = setting;
    let call = |x, sum| Call { sum, ..Call::new(Parameters::new(own), x) };
    let given = |name, m| residual.then(|| place.activation(compute, name, m));
    let (mut y, mut dx) = (Vec::new(), Vec::new());
    let mut deferred: Vec<Deferred> = Vec::new();
    for m in 0..MICRO_BATCHES {
        let cx = place.context(setting, m);
        let x = vocab.map_or_else(|| place.activation(compute, "x", m), |vocab| place.tokens(vocab, m));
        let (out, saved) = layer.forward(&cx, call(x, given("residual", m))).unwrap();
        y.push(place.read(&out));
        let residual = given("dresidual", m).filter(|_| vocab.is_none());
        let dy = place.activation(compute, "dy", m);
        let derivative = match split {
            false => layer.backward(&cx, saved, call(dy, residual)).unwrap(),
            true => {
                let (dx, later) = layer.backward_input(&cx, saved, call(dy, residual)).unwrap();
                deferred.push(later);
                dx
            }
        };
        assert_eq!(derivative.is_none(), vocab.is_some(), "tokens alone have no gradient");
        dx.extend(derivative.map(|dx| place.read(&dx)));
    }
    for (m, later) in deferred.into_iter().enumerate() {
        layer.backward_weight(&place.context(setting, m), Parameters::new(own), later).unwrap();
    }
    (y, dx)
}

/// On one rank.
pub fn whole(build: &Build, setting: Setting) -> Numbers {
    let tensor = TensorParallel::solo();
    run(&TestRank::new(&tensor, 0), &*build(&tensor), setting)
}

/// On every rank of an axis.
pub fn parts(build: &Build, (ranks, sequence): (usize, bool), setting: Setting) -> Vec<Numbers> {
    on_ranks(ranks, |group| {
        let rank = group.rank();
        let tensor = TensorParallel::new(group, sequence);
        run(&TestRank::new(&tensor, rank), &*build(&tensor), setting)
    })
}

/// Assembles the parts of all ranks; copies must be equal on all of them.
pub fn joined(parts: &[Numbers], sequence: bool) -> Numbers {
    let rows = |of: fn(&Numbers) -> &Vec<Vec<f32>>| -> Vec<Vec<f32>> {
        let joined = |m: usize| match sequence {
            true => parts.iter().flat_map(|part| of(part)[m].clone()).collect(),
            false => {
                assert!(parts.iter().all(|part| of(part)[m] == of(&parts[0])[m]), "ranks differ");
                of(&parts[0])[m].clone()
            }
        };
        (0..of(&parts[0]).len()).map(joined).collect()
    };
    let gradient = |i: usize| {
        let of: Vec<(&ParameterSpec, &[f32])> =
            parts.iter().map(|part| (&part.specs[i], part.gradients[i].as_slice())).collect();
        join_gradient(&of)
    };
    let whole = |spec: &ParameterSpec| ParameterSpec {
        shape: spec.whole_shape().to_vec(),
        part: None,
        partial: false,
        ..spec.clone()
    };
    let specs = &parts[0].specs;
    Numbers {
        y: rows(|n| &n.y),
        dx: rows(|n| &n.dx),
        gradients: (0..specs.len()).map(gradient).collect(),
        specs: specs.iter().map(whole).collect(),
    }
}

/// Assembles one parameter's gradient from all ranks: parts are joined, with every element on as many ranks as have a term of it;
/// terms are summed; copies must be equal.
pub fn join_gradient(parts: &[(&ParameterSpec, &[f32])]) -> Vec<f32> {
    let (first, values) = parts[0];
    assert!(first.part.is_none() || !first.partial, "{}: a part that is a term", first.name);
    if first.partial {
        return (0..values.len())
            .map(|i| parts.iter().map(|(_, v)| f64::from(v[i])).sum::<f64>() as f32)
            .collect();
    }
    if first.part.is_none() {
        assert!(parts.iter().all(|(_, v)| *v == values), "{}: ranks differ", first.name);
        return values.to_vec();
    }
    let elements: usize = first.whole_shape().iter().product();
    let (mut whole, mut seen) = (vec![0f32; elements], vec![0; elements]);
    for (spec, values) in parts {
        let part = spec.part.as_ref().unwrap();
        assert_eq!((&part.whole[..], &spec.name), (first.whole_shape(), &first.name));
        assert_eq!(part.stripe.local_elements(elements as u64), Some(values.len() as u64), "{}", spec.name);
        for (local, global) in spec.stripe().runs(0..values.len() as u64) {
            whole[range(&global)].iter_mut().zip(&values[range(&local)]).for_each(|(sum, term)| *sum += term);
            seen[range(&global)].iter_mut().for_each(|count| *count += 1);
        }
    }
    let copies = first.part.as_ref().unwrap().copies;
    assert!(
        seen.iter().all(|count| *count == copies),
        "{}: every element lies on {copies} ranks",
        first.name
    );
    whole
}

/// Tolerance for sums in another order, relative to the largest element of the tensor.
///
/// Two ways to add n terms differ by at most 2 (n - 1) u Σ|t|, u = ε / 2 (Higham, "Accuracy and Stability of Numerical
/// Algorithms", 4.2); terms of random sign have Σ|t| ≤ √n √Σt², and √Σt² is the size of a typical result, which the
/// largest of a tensor is not below. So n^1.5 ε for each sum of n terms on the way to a result; what comes in is passed
/// on by layers that do not enlarge it (weights are scaled by their inputs' number, norms give numbers of size one), a
/// norm and a softmax being sums too.
pub fn allowed(sums: &[usize]) -> f32 {
    sums.iter().map(|n| (*n as f32).powf(1.5)).sum::<f32>() * f32::EPSILON
}

#[track_caller]
pub fn close(got: &[f32], expected: &[f32], allowed: f32, what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0f32, |a, x| a.max(x.abs()));
    assert!(largest > 0.0 && expected.iter().all(|x| x.is_finite()), "{what} tells something");
    let worst = got.iter().zip(expected).map(|(x, y)| (x - y).abs());
    let worst = worst.fold(0f32, |a, x| if x.is_nan() { x } else { a.max(x) });
    assert!(worst <= allowed * largest, "{what}: off by {worst:e}, allowed {:e}", allowed * largest);
}

/// Largest difference between the tensors of two results, relative to the largest element of the second's tensor.
pub fn distance(got: &Numbers, expected: &Numbers) -> f32 {
    let tensors = |n: &Numbers| [&n.y[..], &n.dx[..], &n.gradients[..]].concat();
    let (got, expected) = (tensors(got), tensors(expected));
    assert_eq!(got.len(), expected.len());
    let apart = got.iter().zip(&expected).map(|(got, expected)| {
        assert_eq!(got.len(), expected.len());
        let largest = expected.iter().fold(0f32, |a, x| a.max(x.abs()));
        got.iter().zip(expected).fold(0f32, |a, (x, y)| a.max((x - y).abs())) / largest
    });
    apart.fold(0.0, f32::max)
}

/// Checks that both results agree within a tolerance relative to the largest element of each tensor.
#[track_caller]
pub fn same_within(got: &Numbers, expected: &Numbers, allowed: f32, what: &str) {
    assert_eq!(got.specs, expected.specs, "{what}");
    for (name, got, expected) in [("y", &got.y, &expected.y), ("dx", &got.dx, &expected.dx)] {
        assert_eq!(got.len(), expected.len(), "{what}");
        for (m, (got, expected)) in got.iter().zip(expected).enumerate() {
            close(got, expected, allowed, &format!("{what}: {name} of micro-batch {m}"));
        }
    }
    assert_eq!([got.gradients.len(), expected.gradients.len()], [got.specs.len(); 2], "{what}");
    for ((spec, got), expected) in got.specs.iter().zip(&got.gradients).zip(&expected.gradients) {
        close(got, expected, allowed, &format!("{what}: gradient of {}", spec.name));
    }
}
