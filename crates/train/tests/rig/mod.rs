//! Runs a configuration on ranks that are threads of the test, each with an arena that replays its plan, and returns
//! the losses and the whole state.

pub mod devices;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use phalanx_checkpoint::{Checkpoint, HuggingFaceDir};
use phalanx_collectives::pretended::{Launchers, hosts_of_threads};
use phalanx_collectives::{Endpoint, threads};
use phalanx_cpu::Cpu;
use phalanx_data::{DocumentEnds, Masking, NOT_PREDICTED};
use phalanx_layers::{Network, POSITIONS, REFERENCES};
use phalanx_models::{Gpt2, Model};
use phalanx_parallel::zero::Selection;
use phalanx_plan::Peak;
use phalanx_plan::trace::PhaseName;
use phalanx_tensor::{Arena, Device, IGNORED, Memory, Region};
use phalanx_train::config::{Float, PrecisionConfig, Reduce, Sum};
use phalanx_train::rank::{Batch, Numbers, Rank};
use phalanx_train::state::Kept;
use phalanx_train::{GroupSource, Groups, RunConfig, RunPlan, Spec, device_request};

/// The folder of golden values.
pub fn golden() -> PathBuf {
    let built = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/tests/golden");
    // A program that was carried to another machine runs in its package's folder there (`tools/device_hour/sound.py`).
    if built.is_dir() { built } else { "../models/tests/golden".into() }
}

/// The golden model and a configuration that fits it: 8 sequences a step, AdamW as the goldens have it.
pub fn golden_config() -> (Gpt2, RunConfig) {
    let dir = HuggingFaceDir::open(&golden().join("gpt2")).unwrap();
    let model = Gpt2::from_config(dir.config()).unwrap();
    let mut config = RunConfig::default();
    config.model.seq = 16;
    config.batch.global = 8;
    config.optimizer.lr = 3e-3;
    config.optimizer.clip = 0.5;
    config.schedule.kind = phalanx_train::config::ScheduleKind::Constant;
    config.train.steps = 20;
    config.train.threads = Some(1);
    (model, config)
}

/// Element types, as changes to a configuration.
pub type Policy = (&'static str, fn(&mut PrecisionConfig));

/// Every combination of types for computing, accumulating and communicating that has code of its own.
pub const POLICIES: [Policy; 6] = [
    ("bf16", |p| p.compute = Float::Bf16),
    ("f16", |p| f16(p, 24)),
    ("bf16, summed in bf16", |p| (p.compute, p.accumulate) = (Float::Bf16, Float::Bf16)),
    ("bf16, sent in bf16", |p| (p.compute, p.communicate) = (Float::Bf16, Some(Float::Bf16))),
    ("f32, sent in bf16", |p| p.communicate = Some(Float::Bf16)),
    ("f16, summed in f16, sent in bf16", |p| {
        f16(p, 20);
        (p.accumulate, p.communicate) = (Float::F16, Some(Float::Bf16));
    }),
];

/// With a first loss scale at which gradients overflow (of activations at 2^24; of parameters, which are
/// sums over tokens, at 2^20), and a window that the next steps fill.
fn f16(p: &mut PrecisionConfig, power: u32) {
    p.compute = Float::F16;
    p.initial_scale_power = power;
    p.hysteresis = 1;
    p.loss_scale_window = 2;
}

/// The result of a run of some steps.
#[derive(Clone, Debug)]
pub struct Ran {
    pub losses: Vec<f32>,
    pub grad_norms: Vec<f32>,
    pub skipped: Vec<bool>,
    /// For each "state/parameter": all elements, assembled from the ranks.
    pub state: State,
    /// For each parameter: the gradient of the last step, assembled from the ranks.
    pub gradients: State,
    /// The measured peak of each rank.
    pub peaks: Vec<Peak>,
    /// The planned peak of each rank.
    pub planned: Vec<Peak>,
    /// The measured and the planned peak of each rank in the last step.
    pub step_peaks: Vec<Peak>,
    pub step_planned: Vec<Peak>,
}

/// For each "state/parameter": all elements.
pub type State = BTreeMap<String, Vec<f32>>;

/// Sequences of every step: `[steps][global]` of `seq + 1` tokens; answers of pairs have two more numbers, the bits of their reference's
/// log-probability, and 1 if they are chosen.
pub type Steps = Vec<Vec<Vec<u32>>>;

/// Added to a token that is left out as a target.
pub const LEFT_OUT: u32 = 1 << 31;

/// Start of a run, and the checkpoint that it saves.
#[derive(Clone, Default)]
pub struct Checkpoints {
    /// True if it starts from initial values.
    pub fresh: bool,
    /// The checkpoint from which it starts, instead of the golden weights: those of the folder `model.init`, or of GPT-2.
    pub restore: Option<PathBuf>,
    /// The folder into which it saves a checkpoint of the last step.
    pub save: Option<PathBuf>,
}

/// The models that a run accepts.
pub trait AnyModel: Clone + Into<Arc<dyn Model>> {}

impl<M: Clone + Into<Arc<dyn Model>>> AnyModel for M {}

thread_local! {
    /// The number of ranks on each host, for runs that this thread starts; empty: one host.
    static HOSTS: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// Runs `body`, whose ranks run on hosts with these numbers of ranks, which speak TCP to each other.
pub fn on_hosts<T>(sizes: &[usize], body: impl FnOnce() -> T) -> T {
    HOSTS.set(sizes.to_vec());
    let result = body();
    HOSTS.take();
    result
}

fn endpoints(world: usize) -> (Vec<Option<Endpoint>>, Option<Launchers>) {
    let hosts = HOSTS.with_borrow(Vec::clone);
    if world == 1 {
        (vec![None], None)
    } else if hosts.is_empty() {
        (threads(world).into_iter().map(Some).collect(), None)
    } else {
        let (endpoints, launchers) = hosts_of_threads(&hosts, false, 2).unwrap();
        (endpoints.into_iter().map(Some).collect(), Some(launchers))
    }
}

/// Trains from the golden weights on `steps`, on as many threads-as-ranks as the configuration says.
pub fn run(model: &impl AnyModel, config: &RunConfig, steps: &[Vec<Vec<u32>>]) -> Ran {
    run_between(model, config, steps, &Checkpoints::default())
}

/// Like [`run`], from initial values.
pub fn run_fresh(model: &impl AnyModel, config: &RunConfig, steps: &[Vec<Vec<u32>>]) -> Ran {
    run_between(model, config, steps, &Checkpoints { fresh: true, ..Checkpoints::default() })
}

/// Like [`run`], from and to a checkpoint.
pub fn run_between(
    model: &impl AnyModel,
    config: &RunConfig,
    steps: &[Vec<Vec<u32>>],
    checkpoints: &Checkpoints,
) -> Ran {
    run_spec(spec(model, config), config, steps, checkpoints)
}

/// Like [`run_between`], with a specification that says more than the configuration.
pub fn run_spec(spec: Spec, config: &RunConfig, steps: &[Vec<Vec<u32>>], checkpoints: &Checkpoints) -> Ran {
    let plan = RunPlan::new(spec).unwrap();
    let network = |spec: &Spec, groups: &Groups| spec.network(&groups.tensor);
    let parts = on_planned_ranks(&plan, &network, &|engine, _| one_rank(engine, config, steps, checkpoints));
    for part in &parts {
        assert!(same_bits(&part.losses, &parts[0].losses), "all ranks report the same losses");
        assert!(same_bits(&part.grad_norms, &parts[0].grad_norms), "all ranks report the same norms");
        assert_eq!(part.skipped, parts[0].skipped, "all ranks skip the same steps");
    }
    // A run that applies no step does not reach the planned peaks: those of an update are missing.
    for (rank, part) in parts.iter().enumerate().filter(|(_, part)| part.skipped.contains(&false)) {
        for (memory, peak) in [Memory::Host, Memory::Disk].into_iter().zip(part.other_peaks) {
            let planned = plan.of(rank).peak_of(memory);
            assert_eq!(
                peak.unwrap_or(planned),
                planned,
                "rank {rank}: peak == plan in {} memory",
                memory.name()
            );
        }
    }
    Ran {
        losses: parts[0].losses.clone(),
        grad_norms: parts[0].grad_norms.clone(),
        skipped: parts[0].skipped.clone(),
        peaks: parts.iter().map(|p| p.peak).collect(),
        step_peaks: parts.iter().map(|p| p.step_peak).collect(),
        step_planned: (0..plan.spec.world_size())
            .map(|rank| plan.of(rank).memory.phase(PhaseName::Step).unwrap().peak)
            .collect(),
        planned: (0..plan.spec.world_size()).map(|rank| plan.of(rank).peak()).collect(),
        gradients: merge_gradients(&plan, &parts),
        state: merge(&plan, parts.into_iter().map(|p| p.pieces)),
    }
}

/// Checks that a run has the bits of another, and used its memory as planned.
pub fn assert_same_run(what: &str, expected: &Ran, got: &Ran) {
    assert!(same_bits(&got.losses, &expected.losses), "{what}: {:?} != {:?}", got.losses, expected.losses);
    assert!(same_bits(&got.grad_norms, &expected.grad_norms), "{what}: gradient norms");
    assert_same_state(what, &expected.state, &got.state);
    assert_eq!(got.peaks, got.planned, "{what}: peak == plan");
    assert_eq!(got.step_peaks, got.step_planned, "{what}: peak == plan in a step");
}

/// The specification of a configuration.
pub fn spec(model: &impl AnyModel, config: &RunConfig) -> Spec {
    let threads = config.train.threads.unwrap();
    let spec = Spec::new(config, model.clone(), config.batch.global, threads).unwrap();
    devices::on(&*devices::factory(), spec)
}

/// A run on devices whose memory the host addresses, if those of `spec` are of that kind and `host_addressable` says so.
pub fn addressed(mut spec: Spec, host_addressable: bool) -> Spec {
    spec.device.host_addressable &= host_addressable;
    spec
}

/// Makes the engine of every rank, each a thread over an arena that replays its plan, with the layers that
/// `network` makes for its number, and runs `body` on all of them.
pub fn on_ranks<T: Send>(
    model: &impl AnyModel,
    config: &RunConfig,
    network: &(dyn Fn(&Spec, &Groups) -> Network + Sync),
    body: &(dyn Fn(&mut Rank, usize) -> T + Sync),
) -> (RunPlan, Vec<T>) {
    let plan = RunPlan::new(spec(model, config)).unwrap();
    let done = on_planned_ranks(&plan, network, body);
    (plan, done)
}

/// Like [`on_ranks`], for a plan that was made before.
pub fn on_planned_ranks<T: Send>(
    plan: &RunPlan,
    network: &(dyn Fn(&Spec, &Groups) -> Network + Sync),
    body: &(dyn Fn(&mut Rank, usize) -> T + Sync),
) -> Vec<T> {
    let build = Build { network, ..Build::default() };
    let ended = each_rank(plan, &plan.spec, &build, body).into_iter().enumerate();
    ended.map(|(rank, ended)| ended.unwrap_or_else(|text| panic!("rank {rank} panicked: {text}"))).collect()
}

/// The parts of a rank's engine.
pub struct Build<'a> {
    pub network: &'a (dyn Fn(&Spec, &Groups) -> Network + Sync),
    /// Replaces the groups of a rank.
    pub groups: &'a (dyn Fn(&Device, &Spec, Groups) -> Groups + Sync),
    /// True if allocations come from the heap, instead of an arena that replays the plan: on the processor, or a simulated accelerator.
    pub heap: bool,
}

impl Default for Build<'_> {
    fn default() -> Self {
        Build {
            network: &|spec, groups| spec.network(&groups.tensor),
            groups: &|_, _, groups| groups,
            heap: false,
        }
    }
}

/// Runs `body` on the engine of every rank, each in a thread. Returns its result, or the text of its panic.
pub fn each_rank<T: Send>(
    plan: &RunPlan,
    spec: &Spec,
    build: &Build,
    body: &(dyn Fn(&mut Rank, usize) -> T + Sync),
) -> Vec<Result<T, String>> {
    let (endpoints, _launchers) = endpoints(plan.spec.world_size());
    let factory = devices::factory_for(&plan.spec);
    let one = |rank: usize, endpoint: Option<Endpoint>| {
        let own = plan.of(rank);
        let request = device_request(&spec.device, rank, own, &Region::anonymous);
        let device = match build.heap {
            false => factory.make(&request).unwrap(),
            true if spec.device.host_addressable => {
                Device::new(Cpu::new(plan.spec.device.threads), Arena::heap())
            }
            true => devices::unplanned(),
        };
        let source = endpoint
            .as_ref()
            .map_or(GroupSource::Alone(phalanx_collectives::Isa::detect()), GroupSource::Host);
        let groups = (build.groups)(&device, spec, Groups::new(&source, spec)).on_device(&device);
        let network = (build.network)(spec, &groups);
        let mut engine = Rank::with_network(device, groups, spec, network).unwrap();
        body(&mut engine, rank)
    };
    std::thread::scope(|scope| {
        let one = &one;
        let spawned: Vec<_> = endpoints
            .into_iter()
            .enumerate()
            .map(|(rank, endpoint)| scope.spawn(move || one(rank, endpoint)))
            .collect();
        spawned.into_iter().map(|rank| rank.join().map_err(|payload| panic_text(&*payload))).collect()
    })
}

/// The text of a panic.
pub fn panic_text(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| text.to_string());
    let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "a panic without a text".to_string())
}

struct Part {
    losses: Vec<f32>,
    grad_norms: Vec<f32>,
    skipped: Vec<bool>,
    pieces: Pieces,
    gradients: Vec<(String, u64, Vec<f32>)>,
    peak: Peak,
    /// In host and disk memory, where there is one with a plan.
    other_peaks: [Option<Peak>; 2],
    step_peak: Peak,
}

fn one_rank(
    engine: &mut Rank,
    config: &RunConfig,
    steps: &[Vec<Vec<u32>>],
    checkpoints: &Checkpoints,
) -> Part {
    let done = match &checkpoints.restore {
        None if checkpoints.fresh => {
            engine.initialise(1).unwrap();
            0
        }
        None => {
            let folder = config.model.init.as_deref().unwrap_or("gpt2");
            engine.import(&HuggingFaceDir::open(&golden().join(folder)).unwrap()).unwrap();
            0
        }
        Some(dir) => {
            let checkpoint = Checkpoint::open(dir).unwrap();
            engine.restore(&checkpoint).unwrap();
            checkpoint.step()
        }
    };
    let (mut losses, mut grad_norms, mut skipped) = (Vec::new(), Vec::new(), Vec::new());
    for (number, sequences) in steps.iter().enumerate() {
        let batch = batch(engine, config, sequences);
        let outcome = engine.step(done + number as u64 + 1, &batch, false).unwrap();
        losses.push(outcome.loss);
        grad_norms.push(outcome.grad_norm);
        skipped.push(outcome.skipped);
    }
    let is_kept = !config.memory.gradients_in_place && !config.memory.update_in_backward;
    let gradients = if is_kept { gradients(engine) } else { Vec::new() };
    let step_peak = engine.device().arena().phase_peak().unwrap_or_default();
    losses.push(evaluate(engine, config));
    match &checkpoints.save {
        None => engine.save(|_, _| Ok(())).unwrap(),
        Some(dir) => {
            let step = done + steps.len() as u64;
            let state = serde_json::json!({ "step": step, "config": config });
            engine.save_checkpoint(dir, step, &state).map(drop).unwrap()
        }
    }
    let device = engine.device();
    let peak = device.arena().peak().unwrap();
    let other_peaks = [device.host_arena(), device.disk_arena()].map(|arena| arena.peak());
    Part { losses, grad_norms, skipped, pieces: pieces(engine), gradients, peak, other_peaks, step_peak }
}

/// The loss of windows that are all alike.
pub fn evaluate(engine: &mut Rank, config: &RunConfig) -> f32 {
    let mut windows = Batch::with_rows(config.batch.global / config.data(), config.model.seq);
    windows.tokens.fill(1);
    if config.model.arch == phalanx_models::Arch::BERT {
        let seq = config.model.seq;
        windows
            .targets
            .chunks_mut(seq)
            .for_each(|row| row[..seq - Masking::predicted(seq)].fill(NOT_PREDICTED));
    }
    keep_apart(&mut windows, config);
    label(&mut windows, config);
    let rows = windows.tokens.len() / config.model.seq;
    refer(&mut windows, config, (0..2 * rows).map(|at| if at % 4 == 1 { 1.0 } else { 0.0 }));
    engine.evaluate(&windows).unwrap().loss
}

/// This rank's part of the sequences of a step.
pub fn batch(engine: &Rank, config: &RunConfig, sequences: &[Vec<u32>]) -> Batch {
    let (rank, world) = (engine.at().data, config.data());
    let (micro_batch_size, micro_batches, seq) =
        (config.micro_batch_size(), config.micro_batches(), config.model.seq);
    let mut batch = Batch::with_rows(micro_batch_size * micro_batches, seq);
    let mut references = Vec::new();
    let are_neighbours = config.batch.sum == Sum::Tree && config.batch.reduce == Reduce::Defer;
    for m in 0..micro_batches {
        let number = if are_neighbours { rank * micro_batches + m } else { m * world + rank };
        for row in 0..micro_batch_size {
            let sequence = &sequences[number * micro_batch_size + row];
            let at = (m * micro_batch_size + row) * seq;
            let (sequence, reference) = sequence.split_at(seq + 1);
            references.extend(reference.chunks(2).flat_map(|of| [f32::from_bits(of[0]), of[1] as f32]));
            for (t, pair) in sequence.windows(2).enumerate() {
                batch.tokens[at + t] = pair[0] & !LEFT_OUT;
                batch.targets[at + t] = if pair[1] < LEFT_OUT { pair[1] } else { IGNORED };
            }
            if config.model.arch == phalanx_models::Arch::BERT {
                let hidden = Masking::predicted(seq);
                batch.targets[at..at + seq - hidden].fill(NOT_PREDICTED);
            }
        }
    }
    keep_apart(&mut batch, config);
    label(&mut batch, config);
    refer(&mut batch, config, references.into_iter());
    batch
}

/// Adds two numbers for each answer of pairs.
fn refer(batch: &mut Batch, config: &RunConfig, numbers: impl Iterator<Item = f32>) {
    if config.data.pairs.is_some() {
        batch.others.insert(REFERENCES, Numbers::Floats(numbers.collect()));
    }
}

/// Leaves out targets, and adds positions, where documents are apart.
fn keep_apart(batch: &mut Batch, config: &RunConfig) {
    let Some(end_token) = config.data.end_token else { return };
    let documents = DocumentEnds { end_token };
    let mut positions = vec![0; batch.tokens.len()];
    for row in 0..batch.tokens.len() / config.model.seq {
        let row = row * config.model.seq..(row + 1) * config.model.seq;
        documents.part(&batch.tokens[row.clone()], &mut batch.targets[row.clone()]);
        documents.positions(&batch.tokens[row.clone()], &mut positions[row]);
    }
    batch.others.insert(POSITIONS, Numbers::Ids(positions));
}

/// Makes labelled rows of the sequences, for a model with classes: class and length follow from their first tokens.
fn label(batch: &mut Batch, config: &RunConfig) {
    let (classes, seq) = (config.model.keys.labels().len(), config.model.seq);
    if classes == 0 {
        return;
    }
    let rows = batch.tokens.chunks(seq);
    let positions = rows.clone().flat_map(|row| (0..1 + row[1] % seq as u32).chain(0..).take(seq)).collect();
    batch.targets = rows.map(|row| row[0] % classes as u32).collect();
    batch.others.insert(POSITIONS, Numbers::Ids(positions));
}

/// State that a rank owns: names of the state and of the parameter, first element in the whole, elements.
pub type Pieces = Vec<(&'static str, String, u64, Vec<f32>)>;

/// Downloads everything that a rank owns. Parameters must be settled.
pub fn pieces(engine: &Rank) -> Pieces {
    let mut pieces = Vec::new();
    for (at, stage) in engine.stages().iter().enumerate() {
        for (state, name) in engine.chunks().state_names(at).into_iter().enumerate() {
            for piece in engine.chunks().spans(at, state, Selection::Owned) {
                let local = piece.elements.clone();
                let mut out = vec![0f32; (local.end - local.start) as usize];
                engine.chunks().read_span(state, &piece, 0..out.len(), &mut out).unwrap();
                let spec = &stage.network.parameters[piece.parameter].members()[piece.member];
                let stripe = Kept::of(engine.optimizer(), name, spec).stripe;
                for (here, whole) in stripe.runs(local.clone()) {
                    let here = (here.start - local.start) as usize..(here.end - local.start) as usize;
                    pieces.push((name, spec.name.clone(), whole.start, out[here].to_vec()));
                }
            }
        }
    }
    pieces
}

/// Downloads a rank's part of the summed gradients: name of the parameter, first element in the whole,
/// elements.
fn gradients(engine: &Rank) -> Vec<(String, u64, Vec<f32>)> {
    let mut found = Vec::new();
    for (at, stage) in engine.stages().iter().enumerate() {
        let read = engine.chunks().read_gradients(at, |p, local, values| {
            for (member, here, first) in stage.network.parameters[p].runs(local) {
                found.push((member.name.clone(), first, values[here].to_vec()));
            }
        });
        read.unwrap();
    }
    found
}

/// Assembles gradients; copies on several ranks must be equal bit for bit.
fn merge_gradients(plan: &RunPlan, parts: &[Part]) -> State {
    let mut merged = State::new();
    let elements = elements(plan);
    for (name, start, values) in parts.iter().flat_map(|part| &part.gradients) {
        let whole = merged.entry(name.clone()).or_insert_with(|| vec![f32::NAN; elements[name]]);
        let place = &mut whole[*start as usize..*start as usize + values.len()];
        let known = pairs(place, values).all(|(a, b)| a.is_nan() || a.to_bits() == b.to_bits());
        assert!(known, "{name}: copies of its gradient differ");
        place.copy_from_slice(values);
    }
    merged
}

/// Elements of each whole parameter.
fn elements(plan: &RunPlan) -> BTreeMap<String, usize> {
    plan.spec.model.whole().members().map(|spec| (spec.name.clone(), spec.elements())).collect()
}

/// Assembles the state from the pieces of all ranks.
pub fn merge(plan: &RunPlan, parts: impl Iterator<Item = Pieces>) -> State {
    let mut merged = State::new();
    let network = plan.spec.model.whole();
    let kept = |state, parameter: &String| {
        let spec = network.members().find(|spec| spec.name == *parameter).unwrap();
        Kept::of(&plan.spec.update.optimizer, state, spec)
    };
    for (state, parameter, start, values) in parts.flatten() {
        let elements = || kept(state, &parameter).shape.iter().product();
        let whole =
            merged.entry(format!("{state}/{parameter}")).or_insert_with(|| vec![f32::NAN; elements()]);
        let place = &mut whole[start as usize..start as usize + values.len()];
        assert!(place.iter().all(|x| x.is_nan()), "{parameter}: elements from {start} are owned twice");
        place.copy_from_slice(&values);
    }
    merged
}

/// Pairs two lists, which must have the same length and not be empty: `zip` would stop at the end of the shorter one.
#[track_caller]
pub fn pairs<'a, A, B>(a: &'a [A], b: &'a [B]) -> impl Iterator<Item = (&'a A, &'a B)> {
    assert_eq!(a.len(), b.len(), "two lists of different lengths are compared");
    assert!(!a.is_empty(), "nothing is compared");
    a.iter().zip(b)
}

/// Largest relative difference of two lists of one length; infinite where a number is NaN.
#[track_caller]
pub fn relative_difference(got: &[f32], expected: &[f32]) -> f32 {
    let apart = pairs(got, expected).map(|(a, b)| ((a - b) / b).abs());
    apart.fold(0.0, |max, d| if d.is_nan() { f32::INFINITY } else { max.max(d) })
}

/// Bit equality: NaN is NaN, 0 is not -0.
pub fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// Fails the test at the first tensor in which a bit differs.
#[track_caller]
pub fn assert_same_state(what: &str, a: &State, b: &State) {
    assert!(a.len() == b.len() && !a.is_empty(), "{what}: {} and {} tensors", a.len(), b.len());
    for (tensor, values) in a {
        assert!(same_bits(values, &b[tensor]), "{what}: {tensor} differs");
    }
}

/// `[steps][global]` sequences of the golden run.
pub fn golden_steps() -> Steps {
    let tokens = golden_tensor("adamw.safetensors", "tokens");
    tokens
        .chunks(8 * 17)
        .map(|step| step.chunks(17).map(|s| s.iter().map(|t| *t as u32).collect()).collect())
        .collect()
}

/// A golden tensor as f32 (ids are small integers).
pub fn golden_tensor(file: &str, name: &str) -> Vec<f32> {
    let bytes = std::fs::read(golden().join(file)).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensor = tensors.tensor(name).unwrap();
    let word = |b: &[u8]| [b[0], b[1], b[2], b[3]];
    match tensor.dtype() {
        safetensors::Dtype::F32 => tensor.data().chunks(4).map(|b| f32::from_le_bytes(word(b))).collect(),
        safetensors::Dtype::I32 => {
            tensor.data().chunks(4).map(|b| i32::from_le_bytes(word(b)) as f32).collect()
        }
        other => panic!("golden of type {other:?}"),
    }
}
